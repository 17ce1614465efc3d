"""Which parts may make a good plan: a list to simulate, and a bound on what is not on it.

    limit    seconds that no stage may take for a microbatch, its share of what comes once included
    offer    what a pool can do: a mesh, and the seconds and bytes of its stages, by their layers

A step of m microbatches takes m times the limit and the time in which the first microbatch goes
down and back up, less what overlaps. So for a number of microbatches, a checkpointing and a limit,
the best parts are those that hold all layers in the fewest seconds of one microbatch: a knapsack
over the pools, solved exactly by dynamic programming over layers. A range of limits makes a list.

Where parts meet, a whole microbatch crosses in each direction, and the nodes of the smaller stage
share it; that takes no longer than the limit either.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from holmesjax import costs
from holmesjax.config import Config
from holmesjax.layouts import Mesh, Pass, divisors, meshes
from holmesjax.problem import CHUNKS, Part, Problem, Seat

CHECKPOINTING: tuple[costs.Checkpointing, ...] = ("none", "dots", "full")  # the last keeps least
# Seconds of a stage, to the least that any plan needs: how unevenly stages may be loaded.
LIMITS = (1.0002, 1.03, 1.1, 1.2, 1.4, 1.8, 2.5, 4.0)
MAX_CHOICES = 24  # of how many stages each pool has


def passes(config: Config) -> Iterator[Pass]:
    """All that the config allows."""
    parallel, batch = config.parallel, config.train.global_batch
    counts = [parallel.microbatches] if parallel.microbatches else divisors(batch)
    policies: Iterable[costs.Checkpointing] = CHECKPOINTING
    if parallel.activation_checkpointing is not None:
        policies = [parallel.activation_checkpointing]
    elif parallel.schedule == "zero_bubble":
        policies = ["none"]
    for policy in policies:
        yield from (Pass(count, policy) for count in counts)


def numbers_of_stages(config: Config, passing: Pass) -> list[int] | None:
    """Those that the config allows; None: any number."""
    parallel = config.parallel
    if given := parallel.layers or parallel.clusters:
        return [len(given)]
    if parallel.stages:
        return [parallel.stages]
    if parallel.schedule == "interleaved_1f1b":  # goes through its stages in groups of them
        most = config.model.num_layers // (parallel.chunks or min(CHUNKS))
        return [n for n in divisors(passing.microbatches) if 1 < n <= most]
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offers:
    """What one pool can do in one pass, [meshes] each. A stage of n layers costs fixed + n layer.

    Stages in the middle of the pipeline are meant: those at its ends cost more.
    """

    pool: int
    meshes: tuple[Mesh, ...]
    most_stages: np.ndarray
    fixed_s: np.ndarray  # of a microbatch: to the next stage of the pool, and back
    layer_s: np.ndarray  # all tasks
    fixed_load_s: np.ndarray  # of tasks, with a share of what comes once in a step
    layer_load_s: np.ndarray
    fixed_bytes: np.ndarray  # of memory that is left
    layer_bytes: np.ndarray
    kept_bytes: np.ndarray  # by a layer of each microbatch in flight
    way_s: np.ndarray  # a microbatch to the pool that is reached fastest
    count: int | None = None  # of stages; None: as many as are best

    def most(self, limit_s: float, depth: int, crosses: bool) -> np.ndarray:
        """Layers that a stage can hold, [meshes], with so many microbatches in flight."""
        in_time = (limit_s - self.fixed_load_s) / self.layer_load_s * (1 + 1e-9)
        in_memory = self.fixed_bytes / (self.layer_bytes + depth * self.kept_bytes)
        most = np.maximum(np.floor(np.minimum(in_time, in_memory)), 0)
        return np.where(self.way_s <= limit_s, most, 0) if crosses else most

    def counted(self, count: int) -> "Offers":
        """With so many stages, and no other number of them."""
        most_stages = np.where(self.most_stages >= count, count, 0)
        return replace(self, most_stages=most_stages, count=count)

    @property
    def alone(self) -> "Offers":
        """Without what comes once in a step: a load that nothing can hide."""
        return replace(self, fixed_load_s=0.0 * self.fixed_s, layer_load_s=self.layer_s)


def make_offers(problem: Problem, passing: Pass) -> dict[int, Offers]:
    """Of each pool that has a possible mesh."""
    offers = (_offers(problem, index, passing) for index in range(len(problem.pools)))
    return {offer.pool: offer for offer in offers if offer is not None}


def _offers(problem: Problem, pool_index: int, passing: Pass) -> Offers | None:
    pool, stage_costs = problem.pools[pool_index], problem.stage_costs
    num_bytes = problem.boundary_bytes(passing)
    own_link, *links = problem.links_of(pool_index)
    found = list(meshes(problem.config, pool, passing))
    if not found:
        return None
    times = [stage_costs.many_times(pool, found, passing, n) for n in (1, 2)]
    task_s = np.asarray(times[0].microbatch_s)
    first_s, second_s = (t.microbatch_s + t.once_s / passing.microbatches for t in times)
    one, more, deep = (
        stage_costs.many_bytes(found, passing, n, depth) for n, depth in ((1, 1), (2, 1), (1, 2))
    )
    num_nodes = np.array([len(problem.nodes(Seat(pool_index, mesh, 1, 0))) for mesh in found])
    time_s = lambda link: (
        link.latency_s
        + np.maximum(
            num_bytes / num_nodes / link.bandwidth_bytes_per_s,
            num_bytes / link.capacity_bytes_per_s,
        )
    )
    ways_s = [time_s(link) for link in links]
    return Offers(
        pool=pool_index,
        meshes=tuple(found),
        most_stages=np.array([pool.num_devices // mesh.num_devices for mesh in found]),
        fixed_s=2 * time_s(own_link),
        layer_s=task_s,
        fixed_load_s=np.asarray(2 * first_s - second_s),
        layer_load_s=np.asarray(second_s - first_s),
        fixed_bytes=pool.usable_bytes - (2 * one - more),
        layer_bytes=more - deep,
        kept_bytes=deep - one,
        way_s=np.min(ways_s, axis=0) if ways_s else np.zeros(len(found)),
    )


class Choice(NamedTuple):
    """Pools that may be used together, and whether more than one of them is."""

    offers: tuple[Offers, ...]
    crosses: bool

    def least_limit_s(self, num_layers: int, depth: int) -> float:
        """Just below the least limit within which the pools hold all layers; infinite if none."""
        holds = lambda limit_s: (
            sum((o.most_stages * o.most(limit_s, depth, self.crosses)).max() for o in self.offers)
            >= num_layers
        )
        low_s, high_s = 0.0, 1e-3
        while not holds(high_s):
            low_s, high_s = high_s, 4 * high_s
            if high_s > 1e9:
                return math.inf
        while high_s - low_s > 1e-4 * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if holds(middle_s) else (middle_s, high_s)
        return low_s


def choices(problem: Problem, passing: Pass, offers: Mapping[int, Offers]) -> list[Choice]:
    """Which pools may be used together: all of them, or one; or with stages as they are asked for.

    Of the latter, those that may be fastest.
    """
    numbers = numbers_of_stages(problem.config, passing)
    if numbers is None:
        alone = [Choice((offer,), crosses=False) for offer in offers.values()]
        return alone if len(alone) == 1 else [Choice(tuple(offers.values()), True), *alone]
    counted = [
        Choice(tuple(offers[pool].counted(n) for pool, n in used), crosses=len(used) > 1)
        for number in numbers
        for counts in _counts(len(problem.pools), number)
        for used in [[(pool, n) for pool, n in enumerate(counts) if n]]
        if all(pool in offers for pool, _ in used) and _is_asked_for(problem, counts)
    ]
    limit_s = [choice.least_limit_s(problem.num_layers, depth=1) for choice in counted]
    order = np.argsort(limit_s, kind="stable")[:MAX_CHOICES]
    return [counted[i] for i in order if math.isfinite(limit_s[i])]


def _is_asked_for(problem: Problem, counts: Sequence[int]) -> bool:
    """Whether each cluster has as many stages as the config says, if it says so."""
    asked = problem.config.parallel.clusters
    found = Counter[str]()
    for pool, count in zip(problem.pools, counts, strict=True):
        found[pool.cluster.name] += count
    return asked is None or +found == Counter(asked)


def _counts(num_pools: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Stages of every pool, in all ways; a pool with none stays idle."""
    for num_used in range(1, min(num_stages, num_pools) + 1):
        for used in itertools.combinations(range(num_pools), num_used):
            for cuts in itertools.combinations(range(1, num_stages), num_used - 1):
                counts = [0] * num_pools
                for pool, start, stop in zip(used, (0, *cuts), (*cuts, num_stages), strict=True):
                    counts[pool] = stop - start
                yield tuple(counts)


def bound_s(problem: Problem, passing: Pass, offers: Mapping[int, Offers]) -> float:
    """Seconds that no step of this pass takes less than: its slowest stage works that long."""
    found = choices(problem, passing, {pool: offer.alone for pool, offer in offers.items()})
    limits_s = (choice.least_limit_s(problem.num_layers, depth=1) for choice in found)
    return passing.microbatches * min(limits_s, default=math.inf)


def rough_bound_s(problem: Problem, passing: Pass) -> float:
    """The same, but sooner: as if layers could be cut, and nothing were sent or held."""
    layers_per_s = 0.0
    for pool in problem.pools:
        seconds = {}
        for mesh in meshes(problem.config, pool, passing):
            if (cut := (mesh.tensor, mesh.context, mesh.parts)) not in seconds:
                own_s = problem.stage_costs.layer_s(pool, mesh, passing)
                seconds[cut] = own_s * mesh.num_devices
        if seconds:
            layers_per_s += pool.num_devices / min(seconds.values())
    if not layers_per_s:
        return math.inf
    return passing.microbatches * problem.num_layers / layers_per_s


class Listed(NamedTuple):
    """Parts that may make a good plan, in any order."""

    estimate_s: float  # of a step
    passing: Pass
    parts: tuple[Part, ...]


def listed(
    problem: Problem, passing: Pass, offers: Mapping[int, Offers], most_s: float
) -> Iterator[Listed]:
    """The best parts for every limit, and for several numbers of microbatches in flight.

    Only those whose slowest stage works no longer than `most_s` in a step.
    """
    num_layers = problem.num_layers
    for choice in choices(problem, passing, offers):
        seen: list[float] = []
        for depth in _depths(passing):
            limit_s = choice.least_limit_s(num_layers, depth)
            if not passing.microbatches * limit_s <= most_s:
                break
            if limit_s in seen and _is_roomy(choice, num_layers, depth):
                continue
            seen.append(limit_s)
            for factor in LIMITS:
                if passing.microbatches * factor * limit_s > most_s:
                    break
                fill_s, parts = _knapsack(choice, factor * limit_s, depth, num_layers)
                if parts:
                    estimate_s = fill_s + (passing.microbatches - 1) * factor * limit_s
                    yield Listed(estimate_s, passing, parts)


def _depths(passing: Pass) -> list[int]:
    """Microbatches in flight that stages are given memory for, when the list is made."""
    return [n for n in (1, 2, 4, 8, 16, 32) if n <= passing.microbatches]


def _is_roomy(choice: Choice, num_layers: int, depth: int) -> bool:
    """Whether every stage could keep all layers of so many microbatches."""
    most = [o.fixed_bytes / (o.layer_bytes + depth * o.kept_bytes) for o in choice.offers]
    return all((room >= num_layers).all() for room in most)


def _knapsack(
    choice: Choice, limit_s: float, depth: int, num_layers: int
) -> tuple[float, tuple[Part, ...]]:
    """The parts that hold all layers in the fewest seconds of a microbatch."""
    n = np.arange(num_layers + 1)
    others = n[:, None] - n[None, :]  # [all, own] -> what the pools before hold
    least_s = np.where(n == 0, 0.0, np.inf)  # of all pools so far, by layers that they hold
    steps = []
    for offer in choice.offers:
        most = offer.most(limit_s, depth, choice.crosses)
        own_s, chosen = _fill(offer, most, num_layers)
        together = np.where(others >= 0, least_s[others] + own_s, np.inf)
        taken = together.argmin(1)
        least_s = together[n, taken]
        steps.append((offer, most, chosen, taken))
    if not np.isfinite(least_s[num_layers]):
        return math.inf, ()
    parts, left = [], num_layers
    for offer, most, chosen, taken in reversed(steps):
        if own := int(taken[left]):
            mesh = int(chosen[own])
            num_stages = offer.count or math.ceil(own / most[mesh])
            parts.append(Part(offer.pool, offer.meshes[mesh], num_stages))
            left -= own
    return float(least_s[num_layers]), tuple(parts[::-1])


def _fill(offer: Offers, most: np.ndarray, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a microbatch through n layers on one pool, and by which mesh; n from 0."""
    n = np.arange(num_layers + 1)[None, :]
    stages = np.ceil(n / np.maximum(most, 1)[:, None])
    possible = (most >= 1)[:, None] & (stages <= offer.most_stages[:, None])
    if offer.count is not None:
        possible &= n >= offer.count
        stages = np.full_like(stages, offer.count)
    seconds = n * offer.layer_s[:, None] + stages * offer.fixed_s[:, None]
    seconds = np.where(possible, seconds, np.inf)
    seconds[:, 0] = 0.0 if offer.count is None else np.inf
    chosen = seconds.argmin(0)
    return seconds[chosen, n[0]], chosen
