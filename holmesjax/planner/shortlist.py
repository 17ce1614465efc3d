"""Parts that may make a good plan: a list to simulate, and a bound on plans not on the list.

    limit    seconds that no stage may take for a microbatch, its share of what comes once included
    offer    what a pool can do: a mesh, and the seconds and bytes of its stages, by their load
    load     the number of layers, each counted as often as its work asks (`LayerRanges.loads`)

A step of m microbatches takes m times the limit and the time in which the first microbatch goes
down and back up, less what overlaps. So for a number of microbatches, a checkpointing and a limit,
the best segments are those that hold all layers in the fewest seconds of one microbatch: a knapsack
over the pools, solved exactly by dynamic programming over loads. A range of limits makes a list.

With layers of several kinds, a unit of load takes in a bound the seconds and the bytes that it
takes in the cheapest kind, so that the bound holds for any of them. For the list both are the means
over all kinds: a sparse layer may have twenty times the parameters of a dense one of equal load.

Between two segments a whole microbatch crosses in each direction, shared by the nodes of the
smaller stage. The crossing takes no longer than the limit either.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holmesjax.config import Checkpointing, Config
from holmesjax.planner.assignment import Segment
from holmesjax.planner.layer_ranges import LayerRanges
from holmesjax.planner.offers import Offers, most_load, most_stages, rooms
from holmesjax.planner.problem import Problem
from holmesjax.planner.stage_layouts import Pool, StepSettings, divisors
from holmesjax.schedules.pipeline_schedules import SCHEDULES

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "dots", "full")  # the last keeps least
# Seconds of a stage, to the least that any plan needs: how unevenly stages may be loaded.
LIMITS = (1.0002, 1.03, 1.1, 1.2, 1.4, 1.8, 2.5, 4.0)
MAX_CHOICES = 24  # of how many stages each pool has
MAX_COUNTS = 500  # ways to share out stages over pools that are looked at
MAX_MICROBATCHES = 8192  # of a step
MAX_LISTED = 64  # numbers of microbatches for which a list is made
MAX_SHARES = 128  # loads that the pools before one may have: more are rounded


def step_settings(config: Config) -> Iterator[StepSettings]:
    """All settings of a step that the config allows."""
    parallel, batch = config.parallel, config.train.global_batch
    counts = [parallel.microbatches] if parallel.microbatches else divisors(batch)
    counts = [count for count in counts if count <= MAX_MICROBATCHES]
    policies: Iterable[Checkpointing] = CHECKPOINTING
    if parallel.activation_checkpointing is not None:
        policies = [parallel.activation_checkpointing]
    elif parallel.schedule is not None and SCHEDULES[parallel.schedule].splits_backward:
        policies = ["none"]
    elif parallel.recomputed_layers is not None:
        again = any(parallel.recomputed_layers)
        policies = [policy for policy in CHECKPOINTING if (policy != "none") == again]
    for policy in policies:
        yield from (StepSettings(count, policy) for count in counts)


def thinned(found: Sequence[StepSettings]) -> list[StepSettings]:
    """Settings with at most `MAX_LISTED` numbers of microbatches, evenly spaced."""
    counts = sorted({settings.microbatches for settings in found})
    if len(counts) > MAX_LISTED:
        at = np.linspace(0, len(counts) - 1, MAX_LISTED).round().astype(int)
        counts = [counts[i] for i in at]
    return [settings for settings in found if settings.microbatches in counts]


def numbers_of_stages(config: Config, settings: StepSettings) -> list[int] | None:
    """Numbers of stages that the config allows; None: any number."""
    parallel = config.parallel
    if given := parallel.layers or parallel.clusters or parallel.recomputed_layers:
        return [len(given)]
    if parallel.stages:
        return [parallel.stages]
    own = None if parallel.schedule is None else SCHEDULES[parallel.schedule]
    if own is not None and own.is_in_groups:
        most = config.model.num_layers // (parallel.chunks or min(own.chunks))
        return [n for n in divisors(settings.microbatches) if own.least_stages <= n <= most]
    return None


class Choice(NamedTuple):
    """Pools that may be used together, and whether more than one of them is."""

    offers: tuple[Offers, ...]
    crosses: bool

    def within(self, ranges: LayerRanges, depth: int) -> Callable[[float], bool]:
        """Returns whether the pools hold all layers within a limit, and a stage the largest.

        The function is asked for many limits; what does not depend on them is worked out once.
        """
        join = lambda arrays: np.concatenate(list(arrays))
        offers = self.offers
        fixed_s = join(offer.fixed_load_s for offer in offers)
        layer_s = join(offer.layer_load_s for offer in offers)
        room = join(offer.room.load(depth) for offer in offers)
        least = join(np.full(len(offer.meshes), offer.least) for offer in offers)
        most_stages = join(offer.most_stages for offer in offers)
        way_s = join(offer.way_s * self.crosses for offer in offers)
        starts = np.cumsum([0, *(len(offer.meshes) for offer in offers[:-1])])
        load, largest = ranges.load, max(ranges.loads)

        def holds(limit_s: float) -> bool:
            most = most_load(limit_s, fixed_s, layer_s, room, least, way_s)
            together = np.maximum.reduceat(most_stages * most, starts).sum()
            return bool(together >= load and most.max() >= largest)

        return holds

    def least_limit_s(self, ranges: LayerRanges, depth: int, most_s: float = math.inf) -> float:
        """Just below the least limit within which the pools hold all layers.

        Infinite if there is none, or none up to `most_s`.
        """
        holds = self.within(ranges, depth) if self.offers else lambda limit_s: False
        if not holds(most_s):
            return math.inf
        low_s, high_s = 0.0, 1e-3
        while not holds(high_s):
            low_s, high_s = high_s, 4 * high_s
        while high_s - low_s > 1e-4 * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if holds(middle_s) else (middle_s, high_s)
        return low_s


def choices(problem: Problem, settings: StepSettings, offers: Mapping[int, Offers]) -> list[Choice]:
    """Sets of pools that may be used together: all pools, or one.

    If the config sets the number of stages, the sets are the ways to share out the stages that may
    be fastest.
    """
    numbers = numbers_of_stages(problem.config, settings)
    if numbers is None:
        alone = [Choice((offer,), crosses=False) for offer in offers.values()]
        return alone if len(alone) == 1 else [Choice(tuple(offers.values()), True), *alone]
    counted = [
        Choice(tuple(offers[pool].counted(n) for pool, n in used), crosses=len(used) > 1)
        for number in numbers
        for counts in _shared_out(problem, number)
        for used in [[(pool, n) for pool, n in enumerate(counts) if n]]
        if all(pool in offers for pool, _ in used)
    ]
    best: list[tuple[float, int]] = []
    for i, choice in enumerate(counted):
        most_s = best[-1][0] if len(best) == MAX_CHOICES else math.inf
        limit_s = choice.least_limit_s(problem.ranges, depth=1, most_s=most_s)
        if not math.isinf(limit_s):
            best.append((limit_s, i))
            best = sorted(best)[:MAX_CHOICES]
    return [counted[i] for _, i in best]


def _shared_out(problem: Problem, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Stages of every pool, in the ways that are looked at; a pool with none stays idle.

    If the run names clusters, only these have stages. If there are few ways, all are looked at.
    Otherwise stages are shared out over the largest pools as devices are, or with one stage moved.
    """
    pools, asked = problem.pools, problem.config.parallel.clusters
    if asked is not None:
        of_each = Counter(asked)
        names = list(dict.fromkeys(pool.cluster.name for pool in pools))
        own = {name: [i for i, p in enumerate(pools) if p.cluster.name == name] for name in names}
        if not of_each.keys() <= own.keys():
            return
        for chosen in itertools.product(*(_counts(len(own[n]), of_each[n]) for n in of_each)):
            counts = [0] * len(pools)
            for name, shares in zip(of_each, chosen, strict=True):
                for pool, share in zip(own[name], shares, strict=True):
                    counts[pool] = share
            yield tuple(counts)
    elif _num_counts(problem, num_stages) <= MAX_COUNTS:
        yield from _counts(len(pools), num_stages)
    else:
        yield from dict.fromkeys(_by_size(pools, num_stages))


def _num_counts(problem: Problem, num_stages: int) -> int:
    """Ways in which stages may be shared out over pools."""
    return math.comb(num_stages + len(problem.pools) - 1, num_stages)


def _by_size(pools: Sequence[Pool], num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yields shares of one, two and more of the largest pools, and these with a stage moved."""
    largest = sorted(range(len(pools)), key=lambda i: -pools[i].num_devices)
    for number in range(1, min(len(pools), num_stages) + 1):
        used = largest[:number]
        ends = np.cumsum([pools[i].num_devices for i in used])
        edges = np.round(ends / ends[-1] * num_stages).astype(int)
        counts = np.zeros(len(pools), int)
        counts[used] = np.diff(edges, prepend=0)
        yield tuple(counts.tolist())
        for source, target in itertools.permutations(used, 2):
            if counts[source] > 0:
                moved = counts.copy()
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved.tolist())


def _counts(num_pools: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Stages of every pool, in all ways; a pool with none stays idle."""
    for num_used in range(1, min(num_stages, num_pools) + 1):
        for used in itertools.combinations(range(num_pools), num_used):
            for cuts in itertools.combinations(range(1, num_stages), num_used - 1):
                counts = [0] * num_pools
                for pool, start, stop in zip(used, (0, *cuts), (*cuts, num_stages), strict=True):
                    counts[pool] = stop - start
                yield tuple(counts)


def bound_s(problem: Problem, settings: StepSettings, offers: Mapping[int, Offers]) -> float:
    """A lower bound in seconds on a step with these settings: its slowest stage works that long."""
    alone = {pool: offer.alone for pool, offer in offers.items()}
    numbers = numbers_of_stages(problem.config, settings)
    if alone and any(_num_counts(problem, n) > MAX_COUNTS for n in numbers or ()):
        found = [Choice(tuple(alone.values()), crosses=False)]  # not all ways are looked at
    else:
        found = choices(problem, settings, alone)
    least_s = math.inf
    for choice in found:
        # A limit of one is just below what holds; where that holds nothing, no lower one does.
        least_s = min(least_s, choice.least_limit_s(problem.ranges, depth=1, most_s=least_s))
    return settings.microbatches * least_s


def least_memory(problem: Problem, least: float, most: float) -> float:
    """A factor of the present memory below which no plan fits, from `least` to `most`.

    More than one microbatch in flight is not counted, nor what the ends of the model add.
    """
    for settings in step_settings(problem.config):
        of_pools = [
            (most_stages(pool, meshes), rooms(problem, index, meshes, settings)[1])
            for index, pool in enumerate(problem.pools)
            if (meshes := problem.meshes(index, settings))
        ]
        holds = lambda times, of_pools=of_pools: (
            problem.ranges.load
            <= sum(
                (stages * np.maximum(np.floor(room.load(1, times)), 0)).max()
                for stages, room in of_pools
            )
        )
        if holds(least):
            return least
        if not holds(most):
            continue
        low = least
        while most > low * 1.001:
            middle = math.sqrt(low * most)
            low, most = (low, middle) if holds(middle) else (middle, most)
    return most


def rough_bound_s(problem: Problem, settings: StepSettings) -> float:
    """A looser bound than `bound_s`, found sooner.

    It assumes that layers can be cut and that sending and memory are free.
    """
    load_per_s = 0.0
    for index, pool in enumerate(problem.pools):
        if found := problem.meshes(index, settings):
            layers_s = problem.stage_costs.layers_s(pool, found, settings)
            pairs = zip(layers_s, problem.ranges.loads, strict=True)
            least_s = np.min(np.stack([np.asarray(own_s) / load for own_s, load in pairs]), axis=0)
            devices = np.array([mesh.num_devices for mesh in found])
            load_per_s += pool.num_devices / float(np.min(least_s * devices))
    if not load_per_s:
        return math.inf
    return settings.microbatches * problem.ranges.load / load_per_s


class Listed(NamedTuple):
    """Parts that may make a good plan, in any order."""

    estimate_s: float  # of a step
    settings: StepSettings
    segments: tuple[Segment, ...]


def listed(
    problem: Problem, settings: StepSettings, offers: Mapping[int, Offers], most_s: float
) -> Iterator[Listed]:
    """The best segments for every limit, and for several numbers of microbatches in flight.

    The slowest stage of each works no longer than `most_s` in a step.
    """
    for choice in choices(problem, settings, offers):
        seen: list[float] = []
        for depth in _depths(settings):
            within_s = most_s / settings.microbatches
            limit_s = choice.least_limit_s(problem.ranges, depth, within_s)
            if not settings.microbatches * limit_s <= most_s:
                break
            if limit_s in seen and _is_roomy(choice, problem.ranges.load, depth):
                continue
            seen.append(limit_s)
            for factor in LIMITS:
                if settings.microbatches * factor * limit_s > most_s:
                    break
                most_load_s = factor * limit_s
                fill_s, segments = _knapsack(choice, most_load_s, depth, problem.ranges.load)
                if (
                    segments
                    and sum(segment.num_stages for segment in segments) <= problem.num_layers
                ):
                    estimate_s = fill_s + (settings.microbatches - 1) * factor * limit_s
                    yield Listed(estimate_s, settings, segments)


def _depths(settings: StepSettings) -> list[int]:
    """Microbatches in flight that stages are given memory for, when the list is made."""
    return [n for n in (1, 2, 4, 8, 16, 32) if n <= settings.microbatches]


def _is_roomy(choice: Choice, load: int, depth: int) -> bool:
    """Whether every stage could keep all layers of so many microbatches."""
    return all((offer.room.load(depth) >= load).all() for offer in choice.offers)


def _knapsack(
    choice: Choice, limit_s: float, depth: int, load: int
) -> tuple[float, tuple[Segment, ...]]:
    """The segments that hold all layers in the fewest seconds of a microbatch."""
    held, sizes, place = _shares(load)
    least_s = np.where(held == 0, 0.0, np.inf)  # of all pools so far, by the load that they hold
    steps = []
    for offer in choice.offers:
        most = offer.most(limit_s, depth, choice.crosses)
        own_s, chosen = _fill(offer, most, sizes)
        together = least_s[::-1] + np.append(own_s, np.inf)[place]
        taken = together.argmin(1)
        least_s = together[np.arange(len(held)), taken]
        steps.append((offer, most, chosen, taken))
    if not np.isfinite(least_s[-1]):
        return math.inf, ()
    segments, share = [], len(held) - 1
    for offer, most, chosen, taken in reversed(steps):
        before = len(held) - 1 - int(taken[share])
        if num_own := int(held[share] - held[before]):
            mesh = int(chosen[place[share, taken[share]]])
            num_stages = offer.count or math.ceil(num_own / most[mesh])
            segments.append(Segment(offer.pool, offer.meshes[mesh], num_stages))
            share = before
    return float(least_s[-1]), tuple(segments[::-1])


@functools.cache
def _shares(load: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables of the loads that pools hold together, and of the load that one more pool adds.

    If the load is large, only some numbers are tried. The first array has the loads of all pools,
    the second those that the last pool may have. The third says which of these it has, or one more
    than there are if there is none: a row for the load of all, a column for the load of the pools
    before, the largest first.
    """
    step = -(-load // MAX_SHARES)
    held = np.unique([0, *range(load, 0, -step)])
    own = held[:, None] - held[::-1]
    sizes, place = np.unique(np.maximum(own, 0), return_inverse=True)
    return held, sizes, np.where(own >= 0, place.reshape(own.shape), len(sizes))


def _fill(offer: Offers, most: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a microbatch through such loads on one pool, and by which mesh; 0 is first."""
    used = np.flatnonzero((most >= 1) & (offer.most_stages >= 1))
    if not len(used):
        nothing = np.full(len(sizes), np.inf)
        nothing[0] = 0.0 if offer.count is None else np.inf
        return nothing, np.zeros(len(sizes), int)
    n = sizes[None, :]
    stages = np.ceil(n / most[used, None])
    possible = stages <= offer.most_stages[used, None]
    if offer.count is not None:
        possible &= n >= offer.count * offer.least
        stages = np.full_like(stages, offer.count)
    seconds = n * offer.layer_s[used, None] + stages * offer.fixed_s[used, None]
    seconds[~possible] = np.inf
    seconds[:, 0] = 0.0 if offer.count is None else np.inf
    chosen = seconds.argmin(0)
    return seconds[chosen, np.arange(len(sizes))], used[chosen]
