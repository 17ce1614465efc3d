"""Rules of islands: which settings they need, and which they cannot have so far."""

from collections import Counter
from collections.abc import Iterator

from holmesjax.config.mistakes import multiples, wrong
from holmesjax.config.sections import ParallelConfig, PlanConfig
from holmesjax.config.training_sections import OptimizerConfig, TrainConfig
from holmesjax.errors import ConfigError

PIPELINE = "or set parallel.across to pipeline"


def settings_are_for_islands(parallel: ParallelConfig) -> Iterator[ConfigError]:
    for name in ("islands", "every", "outer", "fragments", "delay", "blend"):
        if parallel.across == "pipeline" and getattr(parallel, name) is not None:
            problem = "is only for parallel.across: local_updates or auto"
            fix = "remove it, or set parallel.across to local_updates"
            yield wrong(f"parallel.{name}", problem, getattr(parallel, name), fix)
    if parallel.across != "pipeline" and parallel.clusters is not None:
        problem, found = "is for one pipeline, and islands have one each", list(parallel.clusters)
        yield wrong("parallel.clusters", problem, found, f"use parallel.islands, {PIPELINE}")


def clusters_are_of_one_island(parallel: ParallelConfig) -> Iterator[ConfigError]:
    counts = Counter(name for island in parallel.islands or () for name in island)
    if twice := [name for name, count in counts.items() if count > 1]:
        problem, fix = "must have each cluster once", f"leave {twice[0]!r} in one of them"
        yield wrong("parallel.islands", problem, list(map(list, parallel.islands or ())), fix)


def fragments_meet_in_turn(parallel: ParallelConfig) -> Iterator[ConfigError]:
    if parallel.across == "pipeline" or (parallel.across == "auto" and parallel.every is None):
        return
    every, fragments, delay = parallel.meets_every, parallel.fragments or 1, parallel.delay or 0
    if every % fragments:
        problem = f"must divide parallel.every = {every}: fragments meet at equal distances"
        yield wrong("parallel.fragments", problem, fragments, "use a divisor of it")
    elif delay > every // fragments:
        problem = f"must be at most {every // fragments}, the steps from one meeting to the next"
        fix = "use fewer steps, fewer parallel.fragments or a larger parallel.every"
        yield wrong("parallel.delay", problem, delay, fix)


def training_suits_islands(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if not parallel.has_islands:
        return
    every = parallel.meets_every
    if train.eval_every % every:
        problem = f"must be a multiple of parallel.every = {every}: islands differ between meetings"
        fix = f"use {multiples(train.eval_every, every)}, or another parallel.every"
        yield wrong("train.eval_every", problem, train.eval_every, fix)
    lacking = {
        "rampup": (bool(train.rampup), "islands have batches of one size so far", "remove it"),
        "spike_policy": (train.spike_policy != "none", "islands cannot have so far", "use none"),
        "param_dtype": (
            train.param_dtype != "float32",
            "must be float32: islands have no other weights so far",
            "use float32",
        ),
    }
    for name, (is_wrong, problem, fix) in lacking.items():
        if is_wrong:
            yield wrong(f"train.{name}", problem, getattr(train, name), f"{fix}, {PIPELINE}")


def islands_have_no_average(
    optimizer: OptimizerConfig, parallel: ParallelConfig
) -> Iterator[ConfigError]:
    if parallel.has_islands and optimizer.ema_decay is not None:
        problem, fix = "islands keep no average of weights so far", f"remove it, {PIPELINE}"
        yield wrong("optimizer.ema_decay", problem, optimizer.ema_decay, fix)


def islands_are_compared_by_time(
    parallel: ParallelConfig, plan: PlanConfig
) -> Iterator[ConfigError]:
    if parallel.across == "auto" and plan.allow and not plan.is_by_time:
        problem = "cannot have local_updates beside an objective or a budget in dollars so far"
        fix = f"remove it, {PIPELINE}"
        yield wrong("plan.allow", problem, list(plan.allow), fix)
