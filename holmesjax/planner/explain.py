"""Why a plan: what comes near it, what binds it, what it gains, what would make it faster.

    binds      how much longer the step gets where one thing is slower: devices, the links of
               nodes, a network, a link between clusters. 90%: a step is 0.9% longer for each 1%.
               In a balanced plan several things have nearly 100%. The rest of a step goes with
               latencies: of links, and of starting collectives.
    against    the same model without what the planner knows
    upgrades   the best plans on other machines, each with its step, and with its cost if these
               machines have the same price

Everything is predicted, by the cost model that chose the plan. If a run asks for the best plan for
its price, plans are compared by their dollars. Plans whose collectives may leave a cluster have no
price.
"""

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holmesjax.config import Config, ParallelConfig
from holmesjax.costs.expert_exchange import CHUNKS
from holmesjax.errors import HolmesError, PlanError
from holmesjax.layer_specs import distinct_kinds
from holmesjax.plan import pins, plan_description
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.planner import prices
from holmesjax.planner.assembly import as_plan, stage_seconds
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.layer_ranges import split_chunks, sum_counts
from holmesjax.planner.planner import find, timed_again
from holmesjax.planner.problem import Problem
from holmesjax.planner.recomputation import with_fewest
from holmesjax.planner.search import SearchResult
from holmesjax.planner.selection import Saying, find_within, make_problems, silently
from holmesjax.planner.shortlist import step_settings
from holmesjax.planner.stage_costs import StageCosts
from holmesjax.planner.stage_kernels import (
    StageKernel,
    stage_attention,
    stage_recomputed,
    stage_sequences,
    stage_update,
)
from holmesjax.planner.stage_layouts import (
    Devices,
    MeshShape,
    StepSettings,
    clusters_of,
    divisors,
    joined_pool,
)
from holmesjax.planner.step_time import step_seconds
from holmesjax.planner.trials import Candidate
from holmesjax.schedules.pipeline_schedules import PLAIN, TaskOrder
from holmesjax.topology import upgrades
from holmesjax.topology.machines import Pipe, Topology, Ways, backwards

NUM_PLANS = 5  # side by side
NUDGE = 0.99  # how fast a thing is made, of what it is, to see what the step loses
LEAST_SHARE = 0.005  # of a step, to be named
UPGRADE = 2.0  # how much faster a network is made
NUM_SHUFFLES = 9  # of the nodes
ENOUGH_MEMORY = 1e6  # times what there is: no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """One of the best plans."""

    step_s: float
    dollars: float | None  # of a step; None: without prices
    pipeline: str  # clusters, layers and meshes, in order
    microbatches: int
    checkpointing: str
    schedule: str
    memory_share: float  # of the fullest device's memory
    binds: dict[str, float]  # what -> share of its slowness that the step takes, largest first


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Another plan, and the time of its step."""

    what: str
    step_s: float | None  # None: not possible
    dollars: float | None = None
    why: str = ""  # it is not


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A plan beside its alternatives, and the gains of better machines."""

    by_dollars: bool  # whether the best plan is the cheapest, and not the fastest
    is_pinned: bool  # whether all plans have what the run sets of a plan (`pins`)
    best: tuple[Ranked, ...]  # the first is the plan
    attention: tuple[StageKernel, ...]  # of the plan
    update: tuple[StageKernel, ...]
    sequences: tuple[StageKernel, ...]  # of stages with `tensor`
    recomputed: tuple[StageKernel, ...]
    against: tuple[Alternative, ...]
    clusters: tuple[Alternative, ...]  # without each that is used, with each that is not
    upgrades: tuple[Alternative, ...]

    @property
    def step_s(self) -> float:
        return self.best[0].step_s


def explain(
    config: Config,
    topology: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
) -> Explanation:
    """The best plans and what is behind them. Raises PlanError as `planner.make_plan`.

    A run with islands is explained by `islands_explained`.
    """
    say("the best plans")
    problem, found = find(config, topology, usable_memory=usable_memory)
    chosen = found.best[0]
    ranked = []
    for number, candidate in enumerate(found.best[:NUM_PLANS], start=1):
        say(f"what binds plan {number}")
        ranked.append(_ranked(problem, candidate))
    return Explanation(
        by_dollars=_is_by_dollars(config),
        is_pinned=bool(pins.pins(config.parallel)),
        best=tuple(ranked),
        attention=tuple(stage_attention(problem, chosen)),
        update=tuple(stage_update(problem, chosen)),
        sequences=tuple(stage_sequences(problem, chosen)),
        recomputed=tuple(stage_recomputed(problem, chosen)),
        against=tuple(_against(problem, chosen, say)),
        clusters=tuple(_clusters(problem, found.best, say)),
        upgrades=(_unlimited(problem, chosen, say), *_upgrades(problem, found, say)),
    )


def _is_by_dollars(config: Config) -> bool:
    return config.plan.objective == "tokens_per_dollar"


def _dollars(problem: Problem, candidate: Candidate, step_s: float | None = None) -> float | None:
    """Dollars of a step of a candidate; `step_s` replaces its predicted seconds."""
    if step_s is not None:
        candidate = replace(candidate, step_s=step_s)
    dollars = prices.step_dollars(problem, candidate)
    return sum(dollars.values()) if dollars else None


# ---- the best plans ------------------------------------------------------------------------------


def _ranked(problem: Problem, candidate: Candidate) -> Ranked:
    settings, order = candidate.settings, candidate.order
    plan = as_plan(problem, candidate, candidate.step_s)
    room = [problem.usable_bytes(slot.pool) for slot in candidate.assignment.slots]
    shares = [
        problem.usable_memory * sum(stage.memory_bytes.values()) / usable
        for stage, usable in zip(plan.stages, room, strict=True)
    ]
    return Ranked(
        step_s=candidate.step_s,
        dollars=_dollars(problem, candidate),
        pipeline=_pipeline(problem, candidate),
        microbatches=settings.microbatches,
        checkpointing=_checkpointing(candidate),
        schedule=order.schedule,
        memory_share=max(shares),
        binds=_binds(problem, candidate),
    )


def _checkpointing(candidate: Candidate) -> str:
    """`full`, or `full for 5 of 8 layers`."""
    again = candidate.assignment.recomputed
    held = f" for {sum(again)} of {sum(candidate.assignment.layers)} layers" if again else ""
    return candidate.settings.checkpointing + held


def _pipeline(problem: Problem, candidate: Candidate) -> str:
    """`ib 14 (data 4 x tensor 8) > roce 9 + 9 (data 2 x tensor 8)`; runs of many stages as one.

    Layers of several kinds are counted by kind: `14: 7 block, 7 window_block`.
    """
    texts, layers = [], iter(candidate.assignment.layers)
    chunks = iter(problem.ranges.chunks(candidate.assignment.layers, candidate.order.chunks))
    kinds = distinct_kinds.kinds(problem.config.model).blocks
    for segment in candidate.assignment.segments:
        own = list(itertools.islice(layers, segment.num_stages))
        held = " + ".join(map(str, own))
        if len(own) > 3:
            held = f"{sum(own)} in {len(own)} stages"
        if len(kinds) > 1:
            counts = sum_counts([*itertools.chain(*itertools.islice(chunks, segment.num_stages))])
            pairs = zip(kinds, counts, strict=True)
            names = (kind.name for kind, n in pairs for _ in range(n))
            held += f": {plan_description.of_kinds(names)}"
        mesh = " x ".join(f"{axis} {size}" for axis, size in segment.mesh.sizes.items() if size > 1)
        mesh += ", sequences cut" * segment.mesh.sequence_parallel
        texts.append(f"{problem.pools[segment.pool].cluster.name} {held} ({mesh or 'one device'})")
    return " > ".join(texts)


def _binds(problem: Problem, candidate: Candidate) -> dict[str, float]:
    def share(changed: Topology) -> float:
        return (_step_s(problem.on(changed), candidate) / candidate.step_s - 1) / (1 / NUDGE - 1)

    shares = {what: share(changed) for what, changed in _things(problem, candidate)}
    shares["latencies"] = 1 - share(upgrades.faster_everything(problem.topology, NUDGE))
    largest = sorted(shares, key=lambda what: -shares[what])
    return {what: shares[what] for what in largest if shares[what] >= LEAST_SHARE}


def _things(problem: Problem, candidate: Candidate) -> Iterator[tuple[str, Topology]]:
    """Everything that a plan uses, and the machines on which it is a little slower."""
    topology = problem.topology
    nodes = _nodes(problem, candidate)
    names = [topology.cluster_of(node).name for node in nodes]
    for cluster in dict.fromkeys(names):
        kinds = [
            topology.node(node).device.name
            for node, name in zip(nodes, names, strict=True)
            if name == cluster
        ]
        for kind in dict.fromkeys(kinds):
            slower = upgrades.faster_devices(topology, cluster, kind, NUDGE)
            yield f"{kind} of {cluster}", slower
        yield (
            f"links inside nodes of {cluster}",
            upgrades.faster_node_links(topology, cluster, NUDGE),
        )
        [fabric] = [c.fabric for c in topology.clusters if c.name == cluster]
        if fabric != "local":
            yield f"{fabric} of {cluster}", upgrades.faster_fabric(topology, cluster, NUDGE)
    pairs = upgrades.neighbouring_pairs([*names, names[0]])  # chunks and tied tables go round
    for pair in pairs:
        yield _link_name(topology, pair), upgrades.faster_link(topology, pair, NUDGE)
    for name, pipe in _pipes(topology):
        if not {*pairs, *(pair[::-1] for pair in pairs)}.isdisjoint(pipe.ways):
            yield name, upgrades.wider_pipe(topology, pipe.ways, NUDGE)
    yield "what a process sends over TCP", upgrades.faster_transport(topology, NUDGE)


def _nodes(problem: Problem, candidate: Candidate) -> list[str]:
    """Nodes of all stages, in the order of the pipeline."""
    return [node for slot in candidate.assignment.slots for node in problem.nodes(slot)]


def _link_name(topology: Topology, pair: upgrades.Way) -> str:
    return f"{topology.links[pair].fabric} {'<->'.join(pair)}"


def _pipes(topology: Topology) -> Iterator[tuple[str, Pipe]]:
    """Each capacity with its name, once for both directions."""
    done: set[Ways] = set()
    for pipe in topology.pipes:
        if backwards(pipe.ways) not in done:
            what = "uplink" if pipe.is_uplink else "capacity"
            yield f"{what} {str(pipe).replace(' -> ', '<->')}", pipe
        done.add(pipe.ways)


def _step_s(problem: Problem, candidate: Candidate) -> float:
    """Seconds of a step of the same plan in another problem; infinite if memory is too small."""
    [step_s] = step_seconds(problem, [candidate.assignment], candidate.settings, candidate.order)
    return float(step_s)


# ---- what it is compared with --------------------------------------------------------------------


def _against(problem: Problem, chosen: Candidate, say: Saying) -> Iterator[Alternative]:
    say("data parallelism")
    yield _data_parallel(problem.config, problem.topology, problem.usable_memory)
    num_stages = len(chosen.assignment.layers)
    if num_stages > 1:
        say("an even split")
        assignment = chosen.assignment._replace(layers=split_chunks(problem.num_layers, num_stages))
        even = with_fewest(problem, chosen, [assignment._replace(recomputed=())])
        yield _alternative("as many layers on every stage", even.step_s, problem, even)
    if len(problem.topology.nodes) > 1:
        say("a random order")
        yield _shuffled(problem, chosen)
    if any(slot.mesh.expert > 1 for slot in chosen.assignment.slots):
        say("experts placed otherwise")
        yield _with_setting(problem, chosen, "expert_placement", _other_placement(problem))
        times = [stage_seconds(problem, chosen, i) for i in range(num_stages)]
        chosen_chunks = {int(of_stage.exchange_chunks) for of_stage in times}
        for chunks in CHUNKS:
            if chosen_chunks != {chunks}:
                say(f"exchanges in {chunks} chunks")
                yield _with_setting(problem, chosen, "expert_chunks", chunks)


def _alternative(
    what: str, step_s: float, problem: Problem | None = None, candidate: Candidate | None = None
) -> Alternative:
    """An alternative, with its dollars if the candidate has a price."""
    if not math.isfinite(step_s):
        return Alternative(what=what, step_s=None, why="does not fit the devices' memory")
    dollars = None
    if problem is not None and candidate is not None:
        dollars = _dollars(problem, candidate, step_s)
    return Alternative(what=what, step_s=step_s, dollars=dollars)


def _data_parallel(
    config: Config, topology: Topology, usable_memory: float = USABLE_MEMORY
) -> Alternative:
    """One stage on all devices, its gradients summed over every link between its nodes."""
    pool = joined_pool(topology)
    one_stage = replace(config, parallel=ParallelConfig(stages=1, tensor=1))
    problem = Problem(
        config=one_stage,
        topology=topology,
        pools=[pool],
        stage_costs=StageCosts(one_stage),
        usable_memory=usable_memory,
    )
    fits = [n for n in divisors(config.train.global_batch) if n <= topology.num_devices]
    steps_s = [
        _one_stage_s(problem, MeshShape(fits[-1] // fsdp, fsdp, 1), settings)
        for fsdp in {1, pool.most_in_a_node, fits[-1]} & set(divisors(fits[-1]))
        for settings in step_settings(one_stage)
        if config.train.global_batch % (settings.microbatches * fits[-1]) == 0
        and config.model.width % fsdp == 0
    ]
    return _alternative("data parallelism over all devices", min(steps_s))


def _one_stage_s(problem: Problem, mesh: MeshShape, settings: StepSettings) -> float:
    assignment = Assignment((Segment(0, mesh, num_stages=1),), (problem.num_layers,))
    order = TaskOrder(PLAIN, num_stages=1, microbatches=settings.microbatches)
    [step_s] = step_seconds(problem, [assignment], settings, order)
    return float(step_s)


def _shuffled(problem: Problem, chosen: Candidate) -> Alternative:
    """The same stages on nodes in a random order; the median of several."""
    topology = problem.topology
    everything = joined_pool(topology)
    slots = chosen.assignment.slots
    assignment = chosen.assignment._replace(
        segments=tuple(Segment(i, slot.mesh, num_stages=1) for i, slot in enumerate(slots))
    )
    nodes = list(everything.devices)
    generator = random.Random(0)
    steps_s = []
    for _ in range(NUM_SHUFFLES):
        generator.shuffle(nodes)
        devices = iter([(node, number) for node in nodes for number in everything.devices[node]])
        pools = []
        for slot in slots:
            share: Devices = {}
            for node, number in itertools.islice(devices, slot.mesh.num_devices):
                share[node] = (*share.get(node, ()), number)
            pools.append(replace(everything, devices=share))
        steps_s.append(_step_s(problem.on(topology, pools), replace(chosen, assignment=assignment)))
    return _alternative("the same on nodes in a random order", statistics.median(steps_s))


def _other_placement(problem: Problem) -> str:
    return "number" if problem.config.parallel.expert_placement == "load" else "load"


def _with_setting(problem: Problem, chosen: Candidate, name: str, value: Any) -> Alternative:
    """The same stages with another setting of `parallel` that is no choice of the planner's."""
    config, what = problem.config, f"parallel.{name}={value}"
    try:
        config = replace(config, parallel=replace(config.parallel, **{name: value}))
    except HolmesError as error:  # settings exclude it
        return Alternative(what=what, step_s=None, why=error.problem)
    changed = Problem(
        config=config,
        topology=problem.topology,
        pools=problem.pools,
        stage_costs=StageCosts(config),
        usable_memory=problem.usable_memory,
    )
    return _alternative(what, _step_s(changed, chosen), problem, chosen)


# ---- other machines ------------------------------------------------------------------------------


def _clusters(problem: Problem, best: Sequence[Candidate], say: Saying) -> Iterator[Alternative]:
    """The worth of each cluster: a plan without it, or a tried plan that uses it."""
    topology = problem.topology
    if len(topology.clusters) == 1:
        return
    on = lambda candidate: clusters_of(topology, _nodes(problem, candidate))
    for name in [cluster.name for cluster in topology.clusters]:
        if name in on(best[0]):
            say(f"without {name}")
            yield _planned(f"without {name}", problem, upgrades.without_cluster(topology, name))
        else:
            other = next((c for c in best if name in on(c)), None)
            why = "none of the plans that were tried in the end uses it"
            none = Alternative(what=f"with {name}", step_s=None, why=why)
            yield none if other is None else _as_it_is(f"with {name}", problem, other)


def _planned(
    what: str, problem: Problem, topology: Topology, usable_memory: float | None = None
) -> Alternative:
    """The best plan on other machines."""
    try:
        problems = make_problems(problem.config, topology, problem.usable_memory)
        parallel = problem.config.parallel
        found = find_within([each.set_to(parallel, usable_memory) for each in problems])
    except PlanError as refusal:  # none is within the budget
        return Alternative(what=what, step_s=None, why=refusal.problem)
    if found is None:
        return Alternative(what=what, step_s=None, why="no plan is possible")
    return _as_it_is(what, found[0], found[1].best[0])


def _best(config: Config, alternatives: Sequence[Alternative]) -> Alternative:
    """The best of the possible alternatives; the first one is always possible."""
    dollars = lambda a: math.inf if a.dollars is None else a.dollars
    rank = lambda a: (dollars(a), a.step_s) if _is_by_dollars(config) else (a.step_s, dollars(a))
    return min((a for a in alternatives if a.step_s is not None), key=rank)


def _unlimited(problem: Problem, chosen: Candidate, say: Saying) -> Alternative:
    say("memory")
    what = "as much memory as could be used"
    # No plan where stages cross clusters for want of devices.
    found = _planned(what, problem, problem.topology, usable_memory=ENOUGH_MEMORY)
    return _best(problem.config, [_as_it_is(what, problem, chosen), found])


def _as_it_is(what: str, problem: Problem, chosen: Candidate) -> Alternative:
    return Alternative(what=what, step_s=chosen.step_s, dollars=_dollars(problem, chosen))


def _upgrades(problem: Problem, found: SearchResult, say: Saying) -> Iterator[Alternative]:
    for what, changed in _upgraded(problem.topology):
        say(what)
        options = [_as_it_is(what, problem, found.best[0])]  # what is better need not be used
        options.append(_planned(what, problem, changed))
        if (again := timed_again(problem, found, changed)) is not None:
            options.append(_as_it_is(what, *again))
        yield _best(problem.config, options)


def _upgraded(topology: Topology) -> Iterator[tuple[str, Topology]]:
    """Machines that could be bought, each beside the topology with them."""
    names = [cluster.name for cluster in topology.clusters]
    for pair in itertools.combinations(names, 2):
        what = f"{_link_name(topology, pair)} {UPGRADE:g} times as fast"
        yield what, upgrades.faster_link(topology, pair, UPGRADE)
    for name, pipe in _pipes(topology):
        yield (
            f"{name} {UPGRADE:g} times as large",
            upgrades.wider_pipe(topology, pipe.ways, UPGRADE),
        )
    for cluster in topology.clusters:
        if cluster.fabric != "local":
            what = f"{cluster.fabric} of {cluster.name} {UPGRADE:g} times as fast"
            yield what, upgrades.faster_fabric(topology, cluster.name, UPGRADE)
    for cluster in topology.clusters:
        if cluster.fabric != "local":
            yield (
                f"a node more in {cluster.name}",
                upgrades.with_more_nodes(topology, cluster.name),
            )


# ---- as text -------------------------------------------------------------------------------------
