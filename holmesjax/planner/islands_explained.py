"""The words of `launch plan --explain` about islands: meetings beside a pipeline, and each island.

Times are for equal tokens. What islands cost in loss for equal tokens is not in them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from holmesjax.config import Config
from holmesjax.errors import PlanError
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan
from holmesjax.planner.explain import Explanation, aligned, describe, explain
from holmesjax.planner.islands import clusters_of, island_config, part_of, without_islands
from holmesjax.planner.planner import make_plan
from holmesjax.planner.selection import Saying, silently
from holmesjax.topology.machines import Topology
from holmesjax.units import show

OTHER_EVERY = (1, 10, 100)  # steps between meetings that are compared with the run's


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to train over all clusters."""

    what: str
    step_s: float | None = None  # None: not possible
    sent_bytes: float = 0.0  # in a step, one way, where most are sent: by an island, or over a link
    exposed_s: float = 0.0  # of a step, in which devices wait for what is sent
    hidden_s: float = 0.0  # of a step, in which they compute while it is sent
    why: str = ""  # it is not possible


@dataclass(frozen=True, kw_only=True, slots=True)
class IslandsExplanation:
    """Islands beside a pipeline over all clusters, and the explanation of each island."""

    tokens: int  # of a step
    ways: tuple[Way, ...]  # the first is the plan
    clusters: tuple[tuple[str, ...], ...]  # of each island
    islands: tuple[Explanation, ...]


def explain_run(
    config: Config, topology: Topology, say: Saying = silently, usable_memory: float = USABLE_MEMORY
) -> Explanation | IslandsExplanation:
    """The explanation of a run, with islands or without. Raises PlanError as `make_plan`."""
    if not config.parallel.has_islands:
        return explain(config, topology, say, usable_memory)
    plan = make_plan(config, topology, say, usable_memory)
    names = clusters_of(config, topology)
    own = island_config(config, len(names))
    say("one pipeline")
    pipeline = _pipeline(config, topology, say, usable_memory)
    islands = tuple(
        explain(own, part_of(topology, clusters), say, usable_memory) for clusters in names
    )
    return IslandsExplanation(
        tokens=config.train.global_batch * config.model.context_length,
        ways=(*_ways(plan), pipeline),
        clusters=names,
        islands=islands,
    )


def _ways(plan: Plan) -> Iterator[Way]:
    """Yields the plan's own way, and that of other steps between meetings."""
    meeting = plan.meeting
    assert meeting is not None, "the plan has islands"
    alone_s = plan.step_time_s - meeting.exposed_s / meeting.every
    plain = replace(meeting, hidden_s=0.0, fragments=1, delay=0)
    others = [replace(plain, every=every) for every in OTHER_EVERY if every != meeting.every]
    if meeting.delay:
        others.insert(0, replace(meeting, hidden_s=0.0, delay=0))
    for cost in (meeting, *others):
        every = cost.every
        what = f"islands that meet {f'every {every} steps' if every > 1 else 'in every step'}"
        if cost.fragments > 1:
            what += f", in {cost.fragments} fragments"
        if cost.delay:
            what += f", {cost.delay} late"
        yield Way(
            what=what,
            step_s=alone_s + cost.exposed_s / every,
            sent_bytes=max(cost.bytes) / every,
            exposed_s=cost.exposed_s / every,
            hidden_s=cost.hidden_s / every,
        )


def _pipeline(config: Config, topology: Topology, say: Saying, usable_memory: float) -> Way:
    """The best plan without islands: a pipeline over clusters, or one of them alone."""
    what = "a pipeline over the links"
    try:
        plan = make_plan(without_islands(config), topology, say, usable_memory)
    except PlanError as error:
        return Way(what=what, why=f"not possible: {error.problem}")
    homes = [plan.stages[home].cluster for home, _ in plan.chunks]
    ways = Counter((a, b) for a, b in pairwise(homes) if a != b)
    busiest = max(ways.values(), default=0)
    return Way(
        what=what if ways else f"no islands, and {homes[0]} alone",
        step_s=plan.step_time_s,
        sent_bytes=busiest * plan.microbatches * plan.boundary_bytes,
        exposed_s=plan.shares.get("boundary", 0.0) * plan.step_time_s,
    )


def describe_run(explanation: Explanation | IslandsExplanation) -> list[str]:
    """Lines of an explanation for the console."""
    if isinstance(explanation, Explanation):
        return describe(explanation)
    rows: list[tuple[str, ...]] = [("", "step", "tokens/s", "sent a step", "exposed", "hidden")]
    for way in explanation.ways:
        numbers: tuple[str, ...] = (way.why, "", "", "", "")
        if way.step_s is not None:
            rate = f"{explanation.tokens / way.step_s:,.0f}"
            seconds = show(way.exposed_s, "s"), show(way.hidden_s, "s")
            sent = show(way.sent_bytes, "B"), *seconds
            numbers = (show(way.step_s, "s"), rate, *sent)
        rows.append((way.what, *numbers))
    lines = ["islands and a pipeline, side by side", *(f"  {line}" for line in aligned(rows))]
    lines.append(
        "  for equal tokens; islands train otherwise: their loss grows with parallel.every"
    )
    for number, of_island in enumerate(explanation.islands):
        lines.append(f"island {number}: {', '.join(explanation.clusters[number])}")
        lines += [f"  {line}" for line in describe(of_island)]
    return lines
