"""The sequences of a step that each island takes: those that a run says, or the planner's choice.

By speed, the slowest island is to be done as soon as can be. How fast an island is depends on how
many sequences it takes: a plan cuts them over devices and microbatches. So divisions are planned,
coarse ones first, by the speeds of the best that is known so far.
"""

from collections.abc import Callable, Iterator, Sequence

from holmesjax.config import Config, TrainConfig
from holmesjax.config.island_checks import as_asked
from holmesjax.config.mistakes import multiples
from holmesjax.errors import ConfigError, HolmesError, Mistakes, PlanError
from holmesjax.plan.island_shares import (
    EVALUATES,
    allotted,
    batches_to_validate,
    can_validate,
)
from holmesjax.plan.plan import Plan
from holmesjax.topology.machines import Topology
from holmesjax.units import counted

MOST_LOOKS = 3  # at the speeds of the best division
LESS = 0.98  # of the time of coarser divisions, by speeds alone, to be worth a plan

PlanIslands = Callable[[Sequence[int]], Sequence[Plan]]


def sizes_of(config: Config, count: int) -> tuple[int, ...]:
    """The sequences of a step that each of so many islands takes, by the shares of the run.

    Raises PlanError where shares do not give whole batches, or the first island cannot validate.
    """
    shares, batch, where = config.parallel.shares, config.train.global_batch, "parallel.shares"
    if shares is None:
        return (batch // count,) * count
    assert not isinstance(shares, str), "the planner chooses these"
    if len(shares) != count:
        problem, fix = f"must have a number for each of the {count} islands", "count them"
        raise PlanError(where, problem, found=as_asked(shares), fix=fix)
    if batch % sum(shares):
        problem = f"must be a multiple of {sum(shares)}, the sum of parallel.shares"
        fix = f"use {multiples(batch, sum(shares))}, or other shares"
        raise PlanError("train.global_batch", problem, found=batch, fix=fix)
    sizes = tuple(batch * share // sum(shares) for share in shares)
    parts = config.parallel.microbatches or 1
    if any(size % parts for size in sizes):
        problem = f"must give each island a multiple of {parts} sequences, its microbatches"
        fix = "use other shares, another batch or fewer microbatches"
        raise PlanError(where, problem, found=list(sizes), fix=fix)
    if not can_validate(size := sizes[EVALUATES], config):
        need = batches_to_validate(size, batch)
        problem = f"must be a multiple of {need}: the first island validates {size} at once, of "
        problem += f"batches of {batch}"
        fix = f"use {multiples(config.train.eval_batches, need)}, or other parallel.shares"
        raise PlanError("train.eval_batches", problem, found=config.train.eval_batches, fix=fix)
    return sizes


def by_speed(
    config: Config, parts: Sequence[Topology], plan_islands: PlanIslands
) -> Sequence[Plan]:
    """The plans of islands that take such parts of the batch that the slowest is fastest.

    Equal parts are among those that are compared. Other divisions that are as fast do not count.

    Args:
      config: of the run.
      parts: the machines of each island.
      plan_islands: plans the islands for so many sequences of each, or raises PlanError,
        or what the checks of their settings raise.

    Raises such an error where no division has a plan.
    """
    count, units = len(parts), config.train.global_batch // (config.parallel.microbatches or 1)
    if units < count:
        problem = f"must be at least {count} times parallel.microbatches, which each island has"
        raise PlanError(
            "train.global_batch", problem, found=config.train.global_batch, fix="use a larger one"
        )
    best: Sequence[Plan] | None = None
    refusal: HolmesError | None = None
    tried = set[tuple[int, ...]]()
    speeds = list(map(_peak, parts))
    equal = (config.train.global_batch // count,) * count
    for look in range(MOST_LOOKS):
        divisions = _divisions(config, speeds)
        if look == 0 and sum(equal) == config.train.global_batch and _suits(config, equal):
            divisions = [equal, *divisions]
        new = [sizes for sizes in divisions if sizes not in tried]
        if not new and look:
            break
        for sizes in new:
            tried.add(sizes)
            try:
                islands = plan_islands(sizes)
            except (PlanError, ConfigError, Mistakes) as error:  # settings exclude these sizes
                refusal = refusal or error
                continue
            if best is None or _slowest_s(islands) < _slowest_s(best):
                best = islands
        if best is None:
            break
        speeds = [island.global_batch / island.step_time_s for island in best]
    if best is None:
        raise refusal or _none_validates(config)
    return best


def _divisions(config: Config, speeds: Sequence[float]) -> list[tuple[int, ...]]:
    """Divisions of the batch by speeds, in units of powers of two, the largest units first.

    Those of smaller units are left out unless they are more even.
    """
    found, least_s = list[tuple[int, ...]](), float("inf")
    for unit in _units(config.train, len(speeds), config.parallel.microbatches or 1):
        numbers = allotted(speeds, config.train.global_batch // unit)
        sizes = tuple(unit * number for number in numbers)
        slowest_s = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
        if slowest_s < LESS * least_s and _suits(config, sizes):
            found.append(sizes)
            least_s = slowest_s
    return found


def _units(train: TrainConfig, count: int, microbatches: int) -> Iterator[int]:
    """Yields the units of sequences in which a batch may be divided, from the largest on."""
    unit = microbatches
    while train.global_batch % (2 * unit) == 0 and 2 * unit * count <= train.global_batch:
        unit *= 2
    while unit >= microbatches:
        yield unit
        unit //= 2


def _suits(config: Config, sizes: Sequence[int]) -> bool:
    is_whole = all(size % (config.parallel.microbatches or 1) == 0 for size in sizes)
    return is_whole and can_validate(sizes[EVALUATES], config)


def _peak(part: Topology) -> float:
    """The FLOP/s of the machines of an island at most; 1 where their devices say none."""
    peaks = [
        node.num_devices * max(node.device.peak_flop_per_s.values(), default=0.0)
        for node in part.nodes
    ]
    return sum(peaks) or 1.0


def _slowest_s(islands: Sequence[Plan]) -> float:
    return max(island.step_time_s for island in islands)


def _none_validates(config: Config) -> PlanError:
    return PlanError(
        "parallel.shares",
        "speed finds no division of the batch with which the first island can validate",
        found=f"train.eval_batches {counted(config.train.eval_batches, 'batch', 'es')} of "
        f"{counted(config.train.global_batch, 'sequence')}",
        fix="use more train.eval_batches, or give shares as numbers",
    )
