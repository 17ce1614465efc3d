"""The choice between a pipeline over clusters and islands, where `parallel.across` is auto.

Near clusters can be one island, joined by a pipeline, and far ones others. All groupings of few
clusters are looked at, and of more those that the rates of links suggest (`groupings`). A grouping
that cannot win is not planned: its devices take longer than the best way without any meeting, at
their peak or by the plans of single clusters. Of mixtures the most promising are planned.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from holmesjax.config import Config, ParallelConfig
from holmesjax.config.sections import SPEED
from holmesjax.costs.products import attention_products, train_flop
from holmesjax.errors import HolmesError, PlanError
from holmesjax.layer_specs.distinct_kinds import block_counts, kinds
from holmesjax.plan.plan import MeetingCost, Plan
from holmesjax.plan.ways import ChosenWay, Grouping, Way, more_tokens
from holmesjax.planner.groupings import groupings
from holmesjax.planner.islands import (
    island_config,
    part_of,
    plan_islands,
    refuse_unknown_clusters,
    without_islands,
)
from holmesjax.planner.meeting_times import MeetingPaths, meeting_cost
from holmesjax.topology.calibration import flop
from holmesjax.topology.machines import Topology

Make = Callable[[Config, Topology], Plan]

# What is tried of settings that a run leaves out.
EVERY = (10, 20, 50, 100, 200, 500)
FRAGMENTS = (1, 2, 4, 8)
DELAYS = (0, 2, 4, 8)  # half of each for one way
BLEND = 0.5  # with a delay, or the steps meanwhile are lost
MOST_MIXTURES = 4  # groupings with an island of several clusters that have a plan
MOST_REFUSED = 16  # of those without: then no more are tried
MOST_REASONS = 3  # why islands are not possible, in a refusal
# Of the time that its clusters would take together, each by its own plan, an island of several is
# taken to need this share at least: layers that single clusters compute again it may keep.
LEAST_SHARE, LEAST_SHARE_KEPT = 0.95, 0.7
SAME = 1.001  # times the least time: then fewer fragments, and a shorter delay, are better


def choose(
    config: Config,
    topology: Topology,
    make: Make,
    usable_memory: float,
    say: Callable[[str], None],
    make_or_remedy: Make | None = None,
) -> ChosenWay:
    """The best way to train, by the time for equal loss as `more_tokens` prices it.

    Without `local_updates` in `plan.allow` it is the pipeline, and nothing else is looked at.

    Args:
      config: of the run, with `parallel.across: auto`.
      topology: all machines.
      make: makes the plan of a pipeline, as `make_plan`.
      usable_memory: the share of each device's memory that a stage may fill.
      say: takes lines about the search.
      make_or_remedy: `make`, whose refusal has the mildest change with which a plan fits; it is
        asked where nothing else is left. None: `make`.

    Raises PlanError where no way has a plan, or where `parallel.islands` names no cluster.
    """
    alone = without_islands(config)
    make_or_remedy = make_or_remedy or make
    refuse_unknown_clusters(config.parallel.islands or (), topology)
    if not config.plan.allow:
        return ChosenWay(asked=config, config=alone, plan=make_or_remedy(alone, topology))
    best: ChosenWay | None = None
    refusal: PlanError | None = None
    try:
        plan = make(alone, topology)
    except PlanError as error:
        pipeline, refusal = Way(what=PIPELINE, why=f"not possible: {error.problem}"), error
    else:
        pipeline = way_of_pipeline(plan)
        best = ChosenWay(asked=config, config=alone, plan=plan)
    best_s = pipeline.priced_s if best else float("inf")
    settings, why = _settings(config)
    if not settings:
        ways, num_slower = [Way(what="islands", why=f"not possible: {why}")], 0
    else:
        planned, ways, num_slower = _islands(
            config, topology, make, usable_memory, say, settings, best_s
        )
        best = planned or best
    if best is None:
        assert refusal is not None, "there is no pipeline"
        raise _no_way(refusal, alone, topology, make_or_remedy, ways)
    ways.append(pipeline)
    ways.sort(key=lambda way: way.priced_s if way.step_s is not None else float("inf"))
    return replace(best, ways=tuple(ways), num_slower=num_slower)


def _no_way(
    refusal: PlanError, alone: Config, topology: Topology, make: Make, ways: Sequence[Way]
) -> PlanError:
    """The refusal of a pipeline with its remedy, and why there are no islands either."""
    try:
        make(alone, topology)
    except PlanError as error:
        refusal = error
    reasons = [f"{way.what}: {way.why}" for way in ways]
    shown = [refusal.found, *reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        shown.append(f"and {len(reasons) - MOST_REASONS} more that are not possible")
    return PlanError(
        refusal.where, refusal.problem, found="; ".join(map(str, shown)), fix=refusal.fix
    )


def _islands(
    config: Config,
    topology: Topology,
    make: Make,
    usable_memory: float,
    say: Callable[[str], None],
    settings: Sequence[ParallelConfig],
    best_s: float,
) -> tuple[ChosenWay | None, list[Way], int]:
    """The best islands that take less than so many seconds; all that were planned; and how many
    groupings were not: they cannot be faster, or others look better."""
    rate = config.plan.islands_more_tokens
    least_every = min(parallel.meets_every for parallel in settings)
    price = lambda grouping: 1.0 + more_tokens(rate, len(grouping), least_every)
    best, ways, num_planned, num_refused = None, list[Way](), 0, 0
    make_once = _remembering(make)

    def least_s(grouping: Grouping) -> float:
        if _size(grouping) == 1:
            return _least_s(config, topology, grouping) * price(grouping)
        return _least_alone_s(config, topology, grouping, make_once) * price(grouping)

    known = list(_groupings(config, topology))
    for grouping in _in_order(known, least_s):
        if least_s(grouping) >= best_s:
            continue
        is_mixed = _size(grouping) > 1
        if is_mixed and (num_planned == MOST_MIXTURES or num_refused == MOST_REFUSED):
            break
        say(f"islands {_text(grouping)}")
        asked = [replace(parallel, islands=grouping) for parallel in settings]
        try:
            found, plan = _with_meetings(config, topology, make_once, usable_memory, asked)
        except HolmesError as error:
            why = f"not possible: {str(error).splitlines()[0]}"
            ways.append(Way(what=f"islands {_text(grouping)}", why=why))
            num_refused += is_mixed
            continue
        num_planned += is_mixed
        assert plan.meeting is not None, "the plan has islands"
        way = way_of_islands(plan, plan.meeting, rate, _text(grouping))
        ways.append(way)
        if way.priced_s < best_s:
            best_s = way.priced_s
            best = ChosenWay(asked=config, config=found, plan=plan)
    return best, ways, len(known) - len(ways)


def _in_order(
    known: Sequence[Grouping], least_s: Callable[[Grouping], float]
) -> Iterator[Grouping]:
    """Yields single clusters as islands, and then mixtures, each with the fastest first."""
    for mixed in (False, True):
        these = [grouping for grouping in known if (_size(grouping) > 1) == mixed]
        yield from sorted(these, key=least_s)


def _with_meetings(
    config: Config,
    topology: Topology,
    make: Make,
    usable_memory: float,
    settings: Sequence[ParallelConfig],
) -> tuple[Config, Plan]:
    """The plan of a grouping with the best of some settings of its meetings, and its config.

    Raises PlanError where memory holds none, or what the checks of the settings of islands raise.
    """
    plain = replace(settings[0], fragments=None, delay=None, blend=None)
    with_settings = lambda parallel: replace(config, parallel=parallel)
    plan_of = lambda own: plan_islands(own, topology, make, usable_memory)
    names = settings[0].islands
    assert names is not None, "the grouping is known"
    islands = plan_of(with_settings(plain)).islands
    paths = MeetingPaths(config, topology, islands)
    alone_s = max(island.step_time_s for island in islands)
    timed = []
    for parallel in settings:
        cost = meeting_cost(with_settings(parallel), paths, alone_s)
        price = more_tokens(config.plan.islands_more_tokens, len(names), cost.every)
        timed.append(((alone_s + cost.exposed_s / cost.every) * (1.0 + price), cost, parallel))
    error: HolmesError | None = None
    made: list[tuple[float, Config, Plan]] = []
    while timed:
        least_s = min(seconds for seconds, _, _ in timed)
        # A delay may leave less room, so that more layers compute again.
        if made and min(seconds for seconds, _, _ in made) <= least_s * SAME:
            break
        close = [item for item in timed if item[0] <= least_s * SAME]
        best = min(close, key=lambda item: (item[1].delay, item[1].fragments, item[0]))
        timed.remove(best)
        found = with_settings(best[2])
        try:
            plan = plan_of(found)
        except HolmesError as refusal:  # it has no room for what is on its way
            error = error or refusal
        else:
            price = more_tokens(config.plan.islands_more_tokens, len(names), best[1].every)
            made.append((plan.step_time_s * (1.0 + price), found, plan))
    if not made:
        assert error is not None, "there are settings"
        raise error
    _, found, plan = min(made, key=lambda item: item[0])
    return found, plan


def _settings(config: Config) -> tuple[list[ParallelConfig], str]:
    """The settings of meetings that a run may have; where there are none, why."""
    own, found, why = config.parallel, list[ParallelConfig](), ""
    train = config.train
    every = [n for n in EVERY if train.eval_every % n == 0 and n <= train.steps]
    every = every or [train.eval_every or train.steps]
    delays = (None,) if own.outer_rule.is_late else DELAYS  # of which a late rule has its own
    for n, parts, delay in itertools.product(
        [own.every] if own.every else every,
        FRAGMENTS if own.fragments is None else [own.fragments],
        delays if own.delay is None else [own.delay],
    ):
        blend = BLEND if own.blend is None and delay else own.blend
        try:
            # Both make their checks.
            parallel = replace(
                own, across="local_updates", every=n, fragments=parts, delay=delay, blend=blend
            )
            replace(config, parallel=parallel)
            found.append(parallel)
        except HolmesError as error:
            why = why or str(error).splitlines()[0]
    return found, why


def _groupings(config: Config, topology: Topology) -> Iterator[Grouping]:
    if config.parallel.islands is not None:
        return iter([config.parallel.islands])
    nodes = {cluster.name: cluster.nodes[0].name for cluster in topology.clusters}

    def rate_between(a: str, b: str) -> float:
        links = [topology.boundary_link(nodes[x], nodes[y]) for x, y in ((a, b), (b, a))]
        return min(link.bandwidth_bytes_per_s for link in links)

    return groupings(list(nodes), rate_between)


def _least_s(config: Config, topology: Topology, grouping: Grouping) -> float:
    """The seconds of a step in which all devices of the slowest island compute at their peak.

    It is a lower bound: of each device the largest peak counts, and no attention, whose kernels
    leave pairs out. Where shares are by speed, islands are as one of all their devices.
    """
    clusters, model = {c.name: c for c in topology.clusters}, config.model
    if config.parallel.shares == SPEED:
        grouping = (tuple(name for island in grouping for name in island),)
    tokens = config.train.global_batch * model.context_length / len(grouping)
    counts = (1, *block_counts(model), 1)
    attention_flop = sum(
        count * flop(attention_products(kind, model.context_length, tokens))
        for count, kind in zip(counts, kinds(model).in_order, strict=True)
    )
    least_flop = train_flop(model, tokens) - 3.0 * attention_flop
    peaks = [
        sum(
            node.num_devices * max(node.device.peak_flop_per_s.values(), default=float("inf"))
            for name in island
            for node in (clusters[name].nodes if name in clusters else ())
        )
        for island in grouping
    ]
    return least_flop / min(peaks) if min(peaks) else 0.0


def _size(grouping: Grouping) -> int:
    """The clusters of the largest island."""
    return max(map(len, grouping))


def _least_alone_s(config: Config, topology: Topology, grouping: Grouping, make: Make) -> float:
    """The seconds of a step that the slowest island needs by the plans of its clusters alone.

    Plans are for equal shares. By speed, each island is as fast as they are, and takes its share.
    """
    times_s, count = list[float](), len(grouping)
    if config.train.global_batch < count:  # planning the islands says why
        return 0.0
    try:
        own = island_config(config, config.train.global_batch // count)
    except HolmesError:  # the same
        return 0.0
    for island in grouping:
        rate = 0.0
        for name in island:
            try:
                plan = make(own, part_of(topology, (name,)))
            except HolmesError:
                part_s, share = _least_s(own, topology, ((name,),)), 1.0
            else:
                again = plan.activation_checkpointing != "none"
                part_s, share = plan.step_time_s, LEAST_SHARE_KEPT if again else LEAST_SHARE
            rate += 1.0 / (part_s * share) if part_s else float("inf")
        times_s.append(1.0 / rate)
    if config.parallel.shares == SPEED:  # of `count` equal parts
        return count / sum(1.0 / seconds if seconds else float("inf") for seconds in times_s)
    return max(times_s)


def _remembering(make: Make) -> Make:
    """The same function, which plans each set of clusters once for a batch and a checkpointing."""
    known: dict[tuple[object, ...], Plan | PlanError] = {}

    def plan(config: Config, topology: Topology) -> Plan:
        names = tuple(cluster.name for cluster in topology.clusters)
        key = names, config.train.global_batch, config.parallel.activation_checkpointing
        if key not in known:
            try:
                known[key] = make(config, topology)
            except PlanError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, PlanError):
            raise found
        return found

    return plan


# ---- ways ----------------------------------------------------------------------------------------

PIPELINE = "a pipeline over the links"


def way_of_pipeline(plan: Plan) -> Way:
    """The way of a plan without islands: a pipeline over clusters, or one of them alone.

    Bytes are those of boundaries between stages: what the collectives of a stage over several
    clusters send is not counted.
    """
    homes = [plan.stages[home].cluster for home, _ in plan.chunks]
    crossed = Counter((a, b) for a, b in pairwise(homes) if a != b)
    busiest = max(crossed.values(), default=0)
    what = PIPELINE if crossed else f"no islands, and {homes[0]} alone"
    if any("+" in home for home in homes):  # what their collectives send has no price
        what = "stages over the links"
    return Way(
        what=what,
        step_s=plan.step_time_s,
        sent_bytes=busiest * plan.microbatches * plan.boundary_bytes,
        exposed_s=plan.shares.get("boundary", 0.0) * plan.step_time_s,
    )


def way_of_islands(plan: Plan, meeting: MeetingCost, rate: float, names: str = "") -> Way:
    """The way of islands with a meeting, which may be another than that of their plan.

    Args:
      plan: of the islands.
      meeting: its cost.
      rate: `plan.islands_more_tokens`.
      names: of the islands, for the words; empty: without.
    """
    assert plan.meeting is not None, "the plan has islands"
    alone_s = plan.step_time_s - plan.meeting.exposed_s / plan.meeting.every
    every = meeting.every
    what = f"islands {names}, " if names else "islands that meet "
    what += f"every {every} steps" if every > 1 else "in every step"
    if meeting.fragments > 1:
        what += f", in {meeting.fragments} fragments"
    if meeting.delay:
        what += f", {meeting.delay} late"
    return Way(
        what=what,
        step_s=alone_s + meeting.exposed_s / every,
        sent_bytes=max(meeting.bytes) / every,
        exposed_s=meeting.exposed_s / every,
        hidden_s=meeting.hidden_s / every,
        more_tokens=more_tokens(rate, len(plan.islands), every),
    )


def _text(grouping: Grouping) -> str:
    return " | ".join("+".join(island) for island in grouping)
