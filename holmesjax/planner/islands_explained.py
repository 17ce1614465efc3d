"""The words of `launch plan --explain` about islands: meetings beside a pipeline, and each island.

Steps are for equal tokens. The last column adds the tokens that islands are taken to need more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holmesjax.config import Config
from holmesjax.errors import HolmesError
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan
from holmesjax.plan.ways import ChosenWay, Way
from holmesjax.planner.across import PIPELINE, way_of_islands, way_of_pipeline
from holmesjax.planner.explain import Explanation, explain
from holmesjax.planner.explanation_description import aligned, describe
from holmesjax.planner.islands import (
    clusters_of,
    island_config,
    part_of,
    without_islands,
)
from holmesjax.planner.meeting_times import MeetingPaths, meeting_cost
from holmesjax.planner.planner import choose, make_plan
from holmesjax.planner.selection import Saying, silently
from holmesjax.topology.machines import Topology
from holmesjax.units import show

OTHER_EVERY = (1, 10, 100)  # steps between meetings that are compared with the run's
SHOWN = 6  # ways with a plan, and as many without


@dataclass(frozen=True, kw_only=True, slots=True)
class IslandsExplanation:
    """Islands beside a pipeline over all clusters, and the explanation of each island."""

    tokens: int  # of a step
    ways: tuple[Way, ...]  # the first is the plan, or the best that `plan.allow` does not have
    clusters: tuple[tuple[str, ...], ...]  # of each island; none: the plan is one pipeline
    islands: tuple[Explanation, ...]  # of each island, or of the pipeline
    notes: tuple[str, ...] = ()  # about the ways, in lines


def explain_run(
    config: Config,
    topology: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
    choice: ChosenWay | None = None,
) -> Explanation | IslandsExplanation:
    """The explanation of a run, with islands or without.

    Args:
      config, topology, say, usable_memory: those of `make_plan`.
      choice: how the planner came to islands or to a pipeline; None: the run says it.

    Raises PlanError as `make_plan`.
    """
    explain_one = lambda own, machines: explain(own, machines, say, usable_memory)
    if choice is None and not config.parallel.has_islands:
        return explain_one(config, topology)
    names: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    if config.parallel.has_islands:
        names = clusters_of(config, topology)
    if choice is not None:
        plan = choice.plan
        ways, notes = _compared(choice, topology, say, usable_memory)
    else:
        plan = make_plan(config, topology, say, usable_memory)
        equal = _equal_islands(plan, config, topology, say, usable_memory)
        say("one pipeline")
        pipeline = _pipeline(config, topology, say, usable_memory)
        ways = (*_ways(plan, config, topology), *equal, pipeline)
    own = [island_config(config, island.global_batch) for island in plan.islands] or [config]
    parts = [part_of(topology, clusters) for clusters in names] or [topology]
    return IslandsExplanation(
        tokens=config.train.global_batch * config.model.context_length,
        ways=ways,
        clusters=names,
        islands=tuple(map(explain_one, own, parts)),
        notes=notes,
    )


def _compared(
    choice: ChosenWay, topology: Topology, say: Saying, usable_memory: float
) -> tuple[tuple[Way, ...], tuple[str, ...]]:
    """The ways of a choice, also where islands are not allowed; and lines about them."""
    notes = []
    if not choice.ways:
        allowed = replace(choice.asked.plan, allow=("local_updates",))
        try:
            choice = choose(replace(choice.asked, plan=allowed), topology, say, usable_memory)
        except HolmesError as error:  # also of the checks of settings
            why = f"{error.where}: {error.problem}"
            return (way_of_pipeline(choice.plan),), (f"islands are not possible: {why}",)
        notes.append("islands need plan.allow=[local_updates]: the run is a pipeline without it")
    if choice.num_slower:
        notes.append(
            f"groupings of clusters that were not planned, since others looked better: "
            f"{choice.num_slower}"
        )
    return choice.ways, tuple(notes)


def _ways(plan: Plan, config: Config, topology: Topology) -> Iterator[Way]:
    """Yields the plan's own way, and that of other steps between meetings."""
    meeting = plan.meeting
    assert meeting is not None, "the plan has islands"
    other_every = [every for every in OTHER_EVERY if every != meeting.every]
    if config.parallel.outer_rule.is_late:  # it has no meetings that stop all
        alone_s = plan.step_time_s - meeting.exposed_s / meeting.every
        often = replace(config, train=replace(config.train, eval_every=0))
        with_every = lambda n: replace(often, parallel=replace(config.parallel, every=n))
        paths = MeetingPaths(config, topology, plan.islands)
        others = [meeting_cost(with_every(n), paths, alone_s) for n in other_every]
    else:
        plain = replace(meeting, hidden_s=0.0, fragments=1, delay=0)
        others = [replace(plain, every=every) for every in other_every]
        if meeting.delay:
            others.insert(0, replace(meeting, hidden_s=0.0, delay=0))
    for cost in (meeting, *others):
        yield way_of_islands(plan, cost, config.plan.islands_more_tokens)


def _equal_islands(
    plan: Plan, config: Config, topology: Topology, say: Saying, usable_memory: float
) -> Iterator[Way]:
    """Yields the way of the same islands with equal shares, if those of the plan are unlike."""
    if len(set(plan.batch_shares)) == 1:
        return
    say(what := "islands of equal shares")
    try:
        alike = replace(config, parallel=replace(config.parallel, shares=None))
        equal = make_plan(alike, topology, say, usable_memory)
    except HolmesError as error:
        yield Way(what=what, why=f"not possible: {error.problem}")
        return
    assert equal.meeting is not None, "the plan has islands"
    way = way_of_islands(equal, equal.meeting, config.plan.islands_more_tokens)
    yield replace(way, what=what)


def _pipeline(config: Config, topology: Topology, say: Saying, usable_memory: float) -> Way:
    """The best plan without islands."""
    try:
        return way_of_pipeline(make_plan(without_islands(config), topology, say, usable_memory))
    except HolmesError as error:
        return Way(what=PIPELINE, why=f"not possible: {error.problem}")


def describe_run(explanation: Explanation | IslandsExplanation) -> list[str]:
    """Lines of an explanation for the console."""
    if isinstance(explanation, Explanation):
        return describe(explanation)
    lines = ["islands and a pipeline, side by side"]
    lines += [f"  {line}" for line in aligned(_rows(explanation))]
    refused = [way for way in explanation.ways if way.step_s is None]
    lines += [f"  {way.what}: {way.why}" for way in refused[:SHOWN]]
    if len(refused) > SHOWN:
        lines.append(f"  and {len(refused) - SHOWN} more that are not possible")
    lines += [f"  {note}" for note in explanation.notes]
    lines += [
        "  steps are for equal tokens; the last column adds those that islands are taken to need",
        "  more for the same loss, by plan.islands_more_tokens",
    ]
    if not explanation.clusters:
        return [*lines, *describe(explanation.islands[0])]
    for number, of_island in enumerate(explanation.islands):
        lines.append(f"island {number}: {', '.join(explanation.clusters[number])}")
        lines += [f"  {line}" for line in describe(of_island)]
    return lines


def _rows(explanation: IslandsExplanation) -> Sequence[tuple[str, ...]]:
    """The numbers of the best ways, and of the pipeline."""
    titles = "", "step", "tokens/s", "sent a step", "exposed", "hidden", "more tokens", "priced"
    possible = [way for way in explanation.ways if way.step_s is not None]
    shown = possible[:SHOWN] + [way for way in possible[SHOWN:] if not way.more_tokens]
    return [titles, *(_numbers(way, explanation.tokens) for way in shown)]


def _numbers(way: Way, tokens: int) -> tuple[str, ...]:
    assert way.step_s is not None, "the way is possible"
    return (
        way.what,
        show(way.step_s, "s"),
        f"{tokens / way.step_s:,.0f}",
        show(way.sent_bytes, "B"),
        show(way.exposed_s, "s"),
        show(way.hidden_s, "s"),
        f"{way.more_tokens:.1%}",
        show(way.priced_s, "s"),
    )
