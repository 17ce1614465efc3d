"""Rules of islands: which settings they need, and which they cannot have so far."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from holmesjax.config.data_sections import DataConfig
from holmesjax.config.mistakes import multiples, wrong
from holmesjax.config.sections import SPEED, OuterConfig, ParallelConfig, PlanConfig, Shares
from holmesjax.config.training_sections import OptimizerConfig, TrainConfig
from holmesjax.errors import ConfigError
from holmesjax.files import places, schema

# Settings of islands, all None without them: those that the planner may compare with a pipeline,
# and those of a job that has islands.
OF_ISLANDS = (
    *("islands", "shares", "every", "outer", "fragments", "delay", "blend"),
    "outer_memory",
)
OF_LOCAL_UPDATES = ("island", "mailbox", "quorum", "grace_s", "place")
PIPELINE = "or set parallel.across to pipeline"
WITH_NESTEROV = ("nesterov", "eager")  # rules whose momentum is Nesterov's, or plain
OF_RULES = {"pull": ("noloco",), "clip": ("co2",), "penalty": ("co2",)}  # settings of some alone


def settings_are_for_islands(parallel: ParallelConfig) -> Iterator[ConfigError]:
    for name in OF_ISLANDS:
        if parallel.across == "pipeline" and getattr(parallel, name) is not None:
            problem = "is only for parallel.across: local_updates or auto"
            fix = "remove it, or set parallel.across to local_updates"
            yield wrong(f"parallel.{name}", problem, getattr(parallel, name), fix)
    for name in OF_LOCAL_UPDATES:
        if not parallel.has_islands and getattr(parallel, name) is not None:
            problem = "is only for parallel.across: local_updates"
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


def shares_suit_islands(parallel: ParallelConfig) -> Iterator[ConfigError]:
    """Unlike shares of the batch need islands that take steps together; numbers, known ones."""
    if parallel.shares is None or parallel.across == "pipeline":
        return
    problem = fix = ""
    if parallel.across == "auto" and parallel.shares != SPEED:
        problem = "must be speed with parallel.across: auto, which chooses the islands"
        fix = f"use {SPEED}; or set parallel.across to local_updates, and parallel.islands"
    elif parallel.is_mailbox:
        problem = "is only for parallel.meet: direct: through a mailbox a fast island makes more "
        problem += "steps, which count by their tokens"
        fix = "remove it"
    elif parallel.outer_rule.has_pairs:
        problem = f"cannot be set with parallel.outer.rule: {parallel.outer_rule.rule}, whose "
        problem += "pairs weigh alike"
        fix = "remove it, or use the rule nesterov"
    if problem:
        yield wrong("parallel.shares", problem, as_asked(parallel.shares), fix)


def as_asked(shares: Shares) -> str | list[int]:
    """Shares as a run file has them, for a message."""
    return shares if isinstance(shares, str) else list(shares)


def mailbox_has_its_settings(parallel: ParallelConfig) -> Iterator[ConfigError]:
    if not parallel.is_mailbox:
        for name in ("mailbox", "quorum", "grace_s", "island", "place"):
            if parallel.has_islands and (value := getattr(parallel, name)) is not None:
                problem, fix = "is only for parallel.meet: mailbox", "remove it, or set that"
                yield wrong(f"parallel.{name}", problem, value, fix)
        return
    if not parallel.has_islands:
        problem, fix = "is only for islands", "remove it, or set parallel.across to local_updates"
        yield wrong("parallel.meet", problem, parallel.meet, fix)
    for name in ("fragments", "delay", "blend"):
        if (value := getattr(parallel, name)) is not None:
            problem = "is only for parallel.meet: direct: through a mailbox all of the model meets"
            fix = "remove it (steps hide the transfers all the same; a larger parallel.every sends "
            fix += "less), or meet directly"
            yield wrong(f"parallel.{name}", problem, value, fix)
    if parallel.outer_memory is not None:
        problem, fix = "is only for parallel.meet: direct", "remove it, or meet directly"
        yield wrong("parallel.outer_memory", problem, parallel.outer_memory, fix)
    outer = parallel.outer_rule
    for name, plain in (("rule", "nesterov"), ("codec", "float32")):
        if (value := getattr(outer, name)) != plain:
            problem, fix = "is only for parallel.meet: direct", f"use {plain}"
            yield wrong(f"parallel.outer.{name}", problem, value, fix)
    where = parallel.mailbox
    if where and places.is_url(where) and (mistake := places.mistake_in(where)):
        problem = f"is a URL that names no folder in a store: {mistake}"
        yield wrong(
            "parallel.mailbox", problem, where, "write s3://BUCKET/NAME or gs://BUCKET/NAME"
        )
    if (place := parallel.place) and place.number >= len(place.names):
        problem = f"must be less than {len(place.names)}, the names of the islands"
        yield wrong("parallel.place.number", problem, place.number, "count islands from 0")
    count = len(parallel.place.names) if parallel.place else len(parallel.islands or ())
    if count and parallel.quorum and parallel.quorum > count:
        problem = f"must be at most {count}, the islands of the run"
        yield wrong("parallel.quorum", problem, parallel.quorum, "use fewer")


def fragments_meet_in_turn(parallel: ParallelConfig) -> Iterator[ConfigError]:
    if parallel.across == "pipeline" or (parallel.across == "auto" and parallel.every is None):
        return
    if parallel.outer_rule.rule != "nesterov":
        return  # which has neither
    every, fragments, delay = parallel.meets_every, parallel.fragments or 1, parallel.delay or 0
    if every % fragments:
        problem = f"must divide parallel.every = {every}: fragments meet at equal distances"
        yield wrong("parallel.fragments", problem, fragments, "use a divisor of it")
    elif delay > every // fragments:
        problem = f"must be at most {every // fragments}, the steps from one meeting to the next"
        fix = "use fewer steps, fewer parallel.fragments or a larger parallel.every"
        yield wrong("parallel.delay", problem, delay, fix)


def the_outer_rule_suits_islands(parallel: ParallelConfig) -> Iterator[ConfigError]:
    """Also where the planner has the choice: a mistake must not become a pipeline."""
    outer = parallel.outer_rule
    if parallel.across == "pipeline":
        return
    for name, rules in OF_RULES.items():
        if outer.rule not in rules and getattr(outer, name) is not None:
            problem = f"is only for parallel.outer.rule: {', '.join(rules)}"
            yield wrong(f"parallel.outer.{name}", problem, getattr(outer, name), "remove it")
    if outer.rule not in WITH_NESTEROV and not outer.nesterov:
        problem = f"is only for parallel.outer.rule: {', '.join(WITH_NESTEROV)}"
        yield wrong("parallel.outer.nesterov", problem, outer.nesterov, "remove it")
    if outer.rule == "nesterov":
        return
    when = "of one round" if outer.is_late else "of none"
    plain = {"fragments": 1, "delay": None if outer.is_late else 0, "blend": 1.0}
    for name, value in plain.items():
        if getattr(parallel, name) not in (None, value):
            problem = f"cannot be set with parallel.outer.rule: {outer.rule}, whose delay is {when}"
            fix = "remove it, or use the rule nesterov"
            yield wrong(f"parallel.{name}", problem, getattr(parallel, name), fix)
    if outer.has_pairs:
        yield from _pairs_come_together(outer)


def _pairs_come_together(outer: OuterConfig) -> Iterator[ConfigError]:
    """The bounds in which the analysis of NoLoCo holds (arXiv 2506.10911, Eq. 74)."""
    if outer.decay >= outer.rate:
        problem = f"must be less than parallel.outer.rate = {outer.rate:g}, or pairs drift apart"
        yield wrong("parallel.outer.momentum", problem, outer.decay, "use 0.5")
    most = math.sqrt(2 + outer.decay**2)
    if not outer.decay < outer.pulls < most:
        problem = f"must lie between the momentum {outer.decay:g} and {most:.3f}"
        yield wrong("parallel.outer.pull", problem, outer.pulls, "use 1")


def training_suits_islands(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    every = parallel.meets_every
    is_every_set = parallel.has_islands or (parallel.across == "auto" and parallel.every)
    if is_every_set and train.eval_every % every and not parallel.is_mailbox:
        problem = f"must be a multiple of parallel.every = {every}: islands differ between meetings"
        fix = f"use {multiples(train.eval_every, every)}, or another parallel.every"
        yield wrong("train.eval_every", problem, train.eval_every, fix)
    if not parallel.has_islands:
        return
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


def mixtures_are_of_islands(data: DataConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    """The planner looks at the names where the clusters of the topology are the islands."""
    if data.mixture_by_island is None:
        return
    where = "data.mixture_by_island"
    if not parallel.has_islands:
        problem = "is only for parallel.across: local_updates"
        fix = "remove it, or set parallel.across to local_updates"
        yield wrong(where, problem, data.mixture_by_island, fix)
    if parallel.place:
        yield from unknown_islands(data, parallel.place.names)


def unknown_islands(data: DataConfig, names: Sequence[str]) -> Iterator[ConfigError]:
    """A mistake for each mixture of an island that is none of these."""
    for name in data.mixture_by_island or ():
        if name not in names:
            where = "data.mixture_by_island"
            yield wrong(where, "names no island", name, schema.near(name, names))


def islands_are_compared_by_time(
    parallel: ParallelConfig, plan: PlanConfig
) -> Iterator[ConfigError]:
    """Each island is planned by itself: none knows what the others take of a budget."""
    if plan.is_by_time:
        return
    why = "beside an objective or a budget in dollars so far"
    if parallel.has_islands:
        fix = "leave plan.objective and plan.budget_dollars out, or set it to pipeline"
        yield wrong("parallel.across", f"cannot be local_updates {why}", parallel.across, fix)
    if parallel.across == "auto" and plan.allow:
        fix = f"remove it, {PIPELINE}"
        yield wrong("plan.allow", f"cannot have local_updates {why}", list(plan.allow), fix)
