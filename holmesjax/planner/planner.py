"""Topology + config -> plan: which devices hold which layers, and how long a step takes.

`search` finds the layout; this module says what it costs, or why there is none.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from holmesjax.config import Config, PlanConfig
from holmesjax.costs import memory, work
from holmesjax.costs.stage_times import StageTimes
from holmesjax.errors import PlanError
from holmesjax.plan.plan import EMBED, HEAD, Axis, Plan, StagePlan, TaskSeconds, block_name
from holmesjax.planner import prices, shortlist
from holmesjax.planner.problem import (
    Problem,
    StageSeconds,
    chunk_roles,
    link_bytes,
    roles,
    split_chunks,
    step_seconds,
    table_times,
    transfer_times,
)
from holmesjax.planner.search import EFFORT, Candidate, Found, search
from holmesjax.planner.stage_layouts import (
    USABLE_MEMORY,
    Mesh,
    Pass,
    Role,
    StageCosts,
    clusters_of,
    has_unlike_devices,
    joined_name,
    joined_pool,
    make_pools,
)
from holmesjax.topology import upgrades
from holmesjax.topology.machines import Topology
from holmesjax.units import show

Saying = Callable[[str], None]  # what is worked on now


def silently(what: str) -> None:
    """For who does not ask what is worked on."""


def make_plan(config: Config, topology: Topology, say: Saying = silently) -> Plan:
    """The fastest plan by prediction.

    Args:
      say: is called with what is being tried, several times.

    Raises:
      PlanError: no plan satisfies the config on these machines; says what to change.
    """
    problem, found = find(config, topology, say)
    return as_plan(problem, found.best[0], found.bound_s)


def make_changed_plan(
    config: Config, topology: Topology, changed: Topology, say: Saying = silently
) -> Plan:
    """The plan on changed machines: no slower there than the plans of the machines as they are.

    Raises PlanError as `make_plan`.
    """
    now, best = find(config, topology, say)
    then, found = find(config, changed, say)
    again = timed_again(now, best, changed) if config.plan == PlanConfig() else None
    if again is None or again[1].step_s >= found.best[0].step_s:
        return as_plan(then, found.best[0], found.bound_s)
    return as_plan(*again, min(found.bound_s, again[1].step_s))


def timed_again(
    problem: Problem, found: Found, changed: Topology
) -> tuple[Problem, Candidate] | None:
    """The fastest of some plans on changed machines that still have their nodes and devices.

    None where they have not, or where no plan fits them.
    """
    kept = {node.name: node.num_devices for node in changed.nodes}
    nodes = (node for pool in problem.pools for node in pool.devices)
    if any(kept.get(name) != problem.topology.node(name).num_devices for name in nodes):
        return None
    again = problem.on(changed)
    timed = []
    for candidate in found.best:
        case, passing, order = candidate.case, candidate.passing, candidate.order
        [step_s] = step_seconds(again, [case], passing, order)
        timed.append(dataclasses.replace(candidate, step_s=float(step_s)))
    best = min(timed, key=lambda candidate: candidate.step_s)
    return (again, best) if math.isfinite(best.step_s) else None


def find(config: Config, topology: Topology, say: Saying = silently) -> tuple[Problem, Found]:
    """The best plans there are, with what they were found in. Raises PlanError as `make_plan`."""
    _refuse_absurd_sizes(config, topology)
    _refuse_unpriced(config, topology)
    _refuse_unknown_clusters(config, topology)
    _refuse_number_of_stages(config, topology)
    problems = make_problems(config, topology)
    try:
        _refuse_large_meshes(config, topology)
        is_possible = _least_memory(problems) <= 1.0
        result = find_within(problems, say=say) if is_possible else None
        if result is None:
            say("the plan that comes nearest, as none fits the memory")
            raise _memory_refusal(problems)
    except PlanError as refusal:
        say("stages that lie in several clusters")
        result = _find_across(config, topology, refusal)
        if result is None:
            say("the mildest change with which a plan fits")
            raise _with_remedy(refusal, problems) from None
    return result


def _find_across(
    config: Config, topology: Topology, refusal: PlanError
) -> tuple[Problem, Found] | None:
    """Plans whose stages may lie in several clusters, for what is refused without them.

    None where there is no such plan either, or where the config says which clusters stages are in
    or what a plan may cost: what collectives send between clusters has no price here.
    """
    is_open = config.parallel.clusters is None and config.plan == PlanConfig()
    if len(topology.clusters) == 1 or not is_open:
        return None
    problem = Problem(
        config=config,
        topology=topology,
        pools=[joined_pool(topology)],
        stage_costs=StageCosts(config),
        crosses_because=f"{refusal.where}: {refusal.problem}",
    )
    found = search(problem)
    return (problem, found) if found is not None else None


def make_problem(config: Config, topology: Topology, by_kind: bool = False) -> Problem:
    """With the pools of `make_pools`."""
    return Problem(
        config=config,
        topology=topology,
        pools=make_pools(topology, by_kind),
        stage_costs=StageCosts(config),
    )


def make_problems(config: Config, topology: Topology) -> list[Problem]:
    """One whose stages may lie anywhere in a cluster, and one for each kind of device if unlike."""
    kinds = (False, True) if has_unlike_devices(topology) else (False,)
    return [make_problem(config, topology, by_kind) for by_kind in kinds]


def find_within(
    problems: Sequence[Problem], effort: float = EFFORT, say: Saying = silently
) -> tuple[Problem, Found] | None:
    """The best plans of some problems; None where no plan was found that fits the memory.

    Raises PlanError where none is within the budget.
    """
    config = problems[0].config
    is_priced = config.plan != PlanConfig()
    results = []
    for whole, by_kind in zip(problems, (False, True), strict=False):
        for pools in prices.selections(whole.pools) if is_priced else [whole.pools]:
            problem = whole.on(whole.topology, pools) if is_priced else whole
            used = ", ".join(dict.fromkeys(pool.cluster.name for pool in pools))
            say(f"plans on {used}" + " with stages of one kind of device" * by_kind)
            if (found := search(problem, effort)) is not None:
                results.append((problem, found))
    if not results:
        return None
    bound_s = min(found.bound_s for _, found in results)
    if is_priced:
        problem, best = _best_for_its_price(config, results)
        return problem, Found(best=best, bound_s=bound_s)
    problem, found = min(results, key=lambda result: result[1].best[0].step_s)
    return problem, dataclasses.replace(found, bound_s=bound_s)


def _best_for_its_price(
    config: Config, results: Sequence[tuple[Problem, Found]]
) -> tuple[Problem, tuple[Candidate, ...]]:
    """Of all that was tried, within the budget; with the others of the same machines behind it."""
    priced = [
        (problem, candidate, sum(prices.step_dollars(problem, candidate).values()))
        for problem, found in results
        for candidate in found.best
    ]
    steps, budget = config.train.steps, config.plan.budget_dollars
    within = [item for item in priced if budget is None or item[2] * steps <= budget]
    if not within:
        least = min(dollars for _, _, dollars in priced) * steps
        raise PlanError(
            "plan.budget_dollars",
            f"the cheapest plan that was found takes {least:.2f} dollars for {steps} steps",
            found=f"{budget:g}",
            fix="raise the budget, train for fewer steps, or give cheaper machines",
        )
    is_cheapest = config.plan.objective == "tokens_per_dollar"
    rank = lambda item: (item[2], item[1].step_s) if is_cheapest else (item[1].step_s, item[2])
    in_order = sorted(within, key=rank)
    problem = in_order[0][0]
    return problem, tuple(candidate for own, candidate, _ in in_order if own is problem)


# ---- a plan of what was found --------------------------------------------------------------------


def as_plan(problem: Problem, candidate: Candidate, bound_s: float) -> Plan:
    """The plan of a candidate, with what each of its stages costs."""
    config, case, passing = problem.config, candidate.case, candidate.passing
    order, num_stages = candidate.order, len(case.layers)
    sends_s = _send_times(problem, candidate)
    tables_s = [0.0] * num_stages
    tables_s[0], tables_s[-1] = table_times(problem, case)
    chunks = _chunks(case.layers, order.chunks)
    parts = [_part_seconds(problem, candidate, stage) for stage in range(num_stages)]
    ways_s: list[Sequence[float]] = [*transfer_times(problem, case, passing, order.chunks), ()]
    stages = []
    for i, (seat, role) in enumerate(zip(case.seats, roles(num_stages), strict=True)):
        nodes, placement = problem.nodes(seat), problem.placement(seat, passing)
        in_flight = problem.in_flight(order, i, case.layers[i])
        shape = problem.stage_costs.shape(seat.mesh, passing, role, case.layers[i], in_flight)
        items = memory.stage_memory_bytes(config.model, shape)
        sent_s = passing.microbatches * sends_s[i] + tables_s[i]
        stages.append(
            StagePlan(
                cluster=joined_name(problem.topology, nodes),
                nodes=tuple(nodes),
                chunks=chunks[i],
                devices=placement.devices,
                mesh=placement.sizes,
                fabrics=dict(placement.fabrics),
                memory_bytes={name: float(size) for name, size in items.items()},
                seconds=parts[i] | {"boundary": sent_s},
                task_seconds=_task_seconds(problem, candidate, i, ways_s[i]),
            )
        )
    assert sum(case.layers) == config.model.num_layers, f"{case.layers} drops layers"
    return Plan(
        topology=problem.topology.name,
        topology_hash=problem.topology.hash(),
        stages=tuple(stages),
        idle=_idle(problem.topology, stages),
        global_batch=config.train.global_batch,
        microbatches=passing.microbatches,
        schedule=order.schedule,
        in_flight=order.in_flight,
        activation_checkpointing=passing.checkpointing,
        boundary_bytes=problem.boundary_bytes(passing) if num_stages > 1 else 0.0,
        step_time_s=candidate.step_s,
        bound_s=bound_s,
        step_dollars=prices.step_dollars(problem, candidate),
        shares=_shares(problem, candidate, parts),
        pipes=_pipe_shares(problem, candidate),
        queues=tuple(problem.queues(case, passing, order.chunks)),
        exception=_exception(problem, stages),
    )


def _exception(problem: Problem, stages: Sequence[StagePlan]) -> str:
    """Which stages break the rule that collectives stay within one fabric, and why."""
    crossing = [
        f"stage {i} crosses clusters {' and '.join(names)}"
        for i, stage in enumerate(stages)
        if len(names := clusters_of(problem.topology, stage.nodes)) > 1
    ]
    if not crossing:
        return ""
    return (
        f"{', '.join(crossing)}, against the rule that collectives stay within one fabric: no "
        f"other plan is possible ({problem.crosses_because})"
    )


def _pipe_shares(problem: Problem, candidate: Candidate) -> dict[str, float]:
    """The share of each pipe's capacity that a step uses."""
    sent = link_bytes(problem, candidate.case, candidate.passing, candidate.order.chunks)
    return {
        " -> ".join(pipe): sent[pipe]
        / (problem.topology.capacity_bytes_per_s(*pipe) * candidate.step_s)
        for pipe in problem.pipes
        if pipe in sent
    }


def _times(problem: Problem, candidate: Candidate, stage: int) -> StageTimes:
    case, passing = candidate.case, candidate.passing
    seat, role = case.seats[stage], roles(len(case.layers))[stage]
    pool, placement = problem.pools[seat.pool], problem.placement(seat, passing)
    layers = case.layers[stage]
    return problem.stage_costs.times(pool, placement, seat.mesh, passing, role, layers)


def _task_seconds(
    problem: Problem, candidate: Candidate, stage: int, ways_s: Sequence[float]
) -> TaskSeconds:
    """As `step_seconds` takes them."""
    case, passing, order = candidate.case, candidate.passing, candidate.order
    seat, is_split = case.seats[stage], order.schedule == "zero_bubble"
    own_roles = chunk_roles(roles(len(case.layers))[stage], order.chunks)
    sizes = split_chunks(case.layers[stage], order.chunks)
    chunks = [
        problem.seconds(seat, passing, role, n, is_split)
        for role, n in zip(own_roles, sizes, strict=True)
    ]
    whole = _whole(problem, candidate, stage)
    return TaskSeconds(
        forward_s=tuple(chunk.forward for chunk in chunks),
        backward_s=tuple(chunk.backward for chunk in chunks),
        weight_s=tuple(is_split * chunk.weight for chunk in chunks),
        transfer_s=tuple(ways_s),
        gather_s=whole.gather,
        reduce_s=whole.reduce,
        update_s=whole.update,
    )


def _whole(problem: Problem, candidate: Candidate, stage: int) -> StageSeconds:
    """Of all chunks of a stage."""
    case, is_split = candidate.case, candidate.order.schedule == "zero_bubble"
    role, layers = roles(len(case.layers))[stage], case.layers[stage]
    return problem.seconds(case.seats[stage], candidate.passing, role, layers, is_split)


def _part_seconds(problem: Problem, candidate: Candidate, stage: int) -> dict[str, float]:
    """Seconds of a stage in a step, by what they go into; `fsdp` and `context` where used."""
    times, whole = _times(problem, candidate, stage), _whole(problem, candidate, stage)
    microbatches = candidate.passing.microbatches
    fsdp_s = microbatches * (times.forward_fsdp_s + times.backward_fsdp_s)
    context_s = microbatches * (times.forward_context_s + times.backward_context_s)
    meshes = [part.mesh for part in candidate.case.parts]
    uses_context = any(mesh.context > 1 for mesh in meshes)
    uses_fsdp = uses_context or any(mesh.fsdp > 1 for mesh in meshes)
    return {
        "compute": microbatches * (times.forward_s + times.backward_s) + times.update_s,
        "tensor": microbatches * (times.forward_tensor_s + times.backward_tensor_s),
        **({"fsdp": fsdp_s} if uses_fsdp else {}),
        **({"context": context_s} if uses_context else {}),
        "data": whole.gather + whole.reduce,
    }


def _shares(
    problem: Problem, candidate: Candidate, parts: Sequence[dict[str, float]]
) -> dict[str, float]:
    """The shares of a step's parts, averaged over stages.

    `boundary` is what a step would be shorter if transfers took no time; `bubble` is the rest of
    the time without work.
    """
    step_s = candidate.step_s
    mean_s = {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
    shares = {name: part_s / step_s for name, part_s in mean_s.items()}
    [alone_s] = step_seconds(
        problem, [candidate.case], candidate.passing, candidate.order, with_links=False
    )
    shares["boundary"] = 1.0 - float(alone_s) / step_s
    shares["bubble"] = max(0.0, 1.0 - math.fsum(shares.values()))
    return shares


def _send_times(problem: Problem, candidate: Candidate) -> list[float]:
    """Seconds in which each stage sends boundaries, both ways, per microbatch."""
    num_stages, chunks = len(candidate.case.layers), candidate.order.chunks
    transfer_s = transfer_times(problem, candidate.case, candidate.passing, chunks)
    sends_s = [0.0] * num_stages
    for virtual in range(chunks * num_stages - 1):
        stage, after = virtual % num_stages, (virtual + 1) % num_stages
        there_s, back_s = transfer_s[stage]
        sends_s[stage] += there_s
        sends_s[after] += back_s
    return sends_s


def _chunks(num_blocks: Sequence[int], num_chunks: int) -> list[tuple[tuple[str, ...], ...]]:
    """The layers of each stage, by chunk; model order goes through all stages chunk by chunk.

    >>> _chunks([2, 2], 2)
    [(('embed', 'block_000'), ('block_002',)), (('block_001',), ('block_003', 'head'))]
    """
    shares = [split_chunks(n, num_chunks) for n in num_blocks]
    names = iter(map(block_name, range(sum(num_blocks))))
    take = lambda n: tuple(itertools.islice(names, n))
    in_order = [[take(share[chunk]) for share in shares] for chunk in range(num_chunks)]
    in_order[0][0] = (EMBED, *in_order[0][0])
    in_order[-1][-1] = (*in_order[-1][-1], HEAD)
    return list(zip(*in_order, strict=True))


def _idle(topology: Topology, stages: Sequence[StagePlan]) -> dict[str, int]:
    """Devices of each node that no stage uses; nodes without any are left out."""
    used = {device for stage in stages for device in stage.devices}
    numbers = itertools.count()
    idle = {
        node.name: sum(next(numbers) not in used for _ in range(node.num_devices))
        for node in topology.nodes
    }
    return {node: num_devices for node, num_devices in idle.items() if num_devices}


# ---- refusals ------------------------------------------------------------------------------------

ABSURD = 10.0  # times the memory of all devices: nothing near it is looked for


def _refuse_absurd_sizes(config: Config, topology: Topology) -> None:
    """Numbers that no plan comes near: without a search, which would take long or overflow."""
    model, train, parallel = config.model, config.train, config.parallel
    sizes = f"{topology.num_devices} devices"
    all_bytes = sum(node.num_devices * node.device.memory_bytes for node in topology.nodes)
    if (parallel.microbatches or 1) > shortlist.MAX_MICROBATCHES:
        raise PlanError(
            "parallel.microbatches",
            f"must be at most {shortlist.MAX_MICROBATCHES:,} for a step to be planned",
            found=f"{parallel.microbatches:,}",
            fix="use fewer, or leave the number to the planner",
        )
    whole = Mesh(data=1, fsdp=1, tensor=1)
    ends = Role(is_first=True, is_last=True)
    shape = StageCosts(config).shape(whole, Pass(1, "none"), ends, model.num_layers)
    num_parameters = work.stage_parameters(model, shape)
    width = work.DTYPE_BYTES[train.compute_dtype]
    least_bytes = num_parameters * (4 + width + 4) + 2 * work.moment_bytes(model, shape)
    if least_bytes > ABSURD * all_bytes:
        raise PlanError(
            "model",
            f"has {num_parameters:.3g} parameters, which take at least {show(least_bytes, 'B')}; "
            f"all {sizes} of the topology have {show(all_bytes, 'B')}",
            found=f"num_layers {model.num_layers:,}, width {model.width:,}, "
            f"vocab_size {model.vocab_size:,}",
            fix="use a smaller model, or at least "
            f"{math.ceil(least_bytes / all_bytes):,} times as many devices",
        )
    microbatches = parallel.microbatches or min(shortlist.MAX_MICROBATCHES, train.global_batch)
    sequences = math.ceil(train.global_batch / microbatches)
    for name, value, number in (
        ("model.context_length", model.context_length, 1),
        ("train.global_batch", train.global_batch, sequences),
    ):
        tokens = number * model.context_length
        token_bytes = work.boundary_bytes(model, tokens, train.compute_dtype)
        if token_bytes > ABSURD * all_bytes:
            raise PlanError(
                name,
                f"gives one microbatch {tokens:,} tokens, which take {show(token_bytes, 'B')} "
                f"between two layers; all {sizes} of the topology have {show(all_bytes, 'B')}",
                found=f"{value:,}",
                fix="use a smaller number",
            )


def _refuse_unpriced(config: Config, topology: Topology) -> None:
    if config.plan == PlanConfig():
        return
    for name in prices.unpriced(topology):
        setting = "objective" if config.plan.budget_dollars is None else "budget_dollars"
        raise PlanError(
            f"plan.{setting}",
            f"needs the price of every device, and the topology has none for those of {name!r}",
            found=f"no `price` in the devices of {name}",
            fix="add what an hour of a device costs, such as price: 2.5 $/h",
        )


def _refuse_unknown_clusters(config: Config, topology: Topology) -> None:
    known = [cluster.name for cluster in topology.clusters]
    for name in config.parallel.clusters or ():
        if name not in known:
            raise PlanError(
                "parallel.clusters",
                f"topology {topology.name} has no such cluster",
                found=name,
                fix=f"use {' or '.join(known)}",
            )


def _num_stages(config: Config) -> int | None:
    """What the config says of it."""
    parallel = config.parallel
    return len(given) if (given := parallel.layers or parallel.clusters) else parallel.stages


def _refuse_number_of_stages(config: Config, topology: Topology) -> None:
    parallel, num_layers = config.parallel, config.model.num_layers
    num_stages = _num_stages(config)
    if num_stages is not None:
        limits = (
            (num_layers, "layers of the model"),
            (topology.num_devices, "devices of the topology"),
            (shortlist.MAX_STAGES, "stages that are planned"),
        )
        most, of = min(limits)
        if num_stages > most:
            raise PlanError(
                "parallel.stages",
                f"must be at most {most}, the number of {of}",
                found=f"{num_stages} stages",
                fix=f"set parallel.stages to {most} or less, or leave it to the planner",
            )
    if parallel.schedule == "interleaved_1f1b":
        _refuse_interleaving(config, num_stages)


def _refuse_interleaving(config: Config, num_stages: int | None) -> None:
    parallel, num_layers = config.parallel, config.model.num_layers
    chunks, microbatches = parallel.chunks or 2, parallel.microbatches
    if (num_stages or 2) * chunks > num_layers:
        most = num_layers // (num_stages or 2)
        raise PlanError(
            "parallel.chunks",
            f"chunks * stages must be at most the number of layers, {num_layers}",
            found=f"{chunks} * {num_stages or 2} = {chunks * (num_stages or 2)}",
            fix=f"set parallel.chunks to {most} or less" if most > 1 else "use fewer stages",
        )
    if num_stages == 1:
        raise PlanError(
            "parallel.schedule",
            "interleaved_1f1b needs two stages or more",
            found="1 stage",
            fix="set parallel.stages to 2 or more, or parallel.schedule to 1f1b",
        )
    if num_stages is not None and microbatches is not None and microbatches % num_stages:
        below = microbatches // num_stages * num_stages
        values = f"{below} or {below + num_stages}" if below else f"{num_stages}"
        raise PlanError(
            "parallel.microbatches",
            f"must be a multiple of the number of stages, {num_stages}, for interleaved_1f1b",
            found=f"{microbatches} / {num_stages} leaves {microbatches % num_stages}",
            fix=f"use parallel.microbatches={values}, or set parallel.schedule to 1f1b",
        )


def _refuse_large_meshes(config: Config, topology: Topology) -> None:
    """Every stage lies in one cluster, so that must have the devices of one mesh."""
    parallel = config.parallel
    sizes = {name: size for name in Mesh._fields if (size := getattr(parallel, name)) is not None}
    mesh = Mesh(**dict.fromkeys(Mesh._fields, 1) | sizes)
    num_stages = _num_stages(config) or 1
    room = {
        cluster.name: sum(node.num_devices for node in cluster.nodes) // mesh.num_devices
        for cluster in topology.clusters
    }
    if sum(room.values()) >= num_stages:
        return
    names = " * ".join(f"parallel.{name}" for name in sizes)
    arithmetic = " * ".join(map(str, sizes.values()))
    if len(sizes) > 1:
        arithmetic += f" = {mesh.num_devices}"
    largest = max(topology.clusters, key=lambda c: sum(node.num_devices for node in c.nodes))
    num_devices = sum(node.num_devices for node in largest.nodes)
    if not any(room.values()):
        raise PlanError(
            f"parallel.{max(sizes, key=lambda name: sizes[name])}",
            f"a stage lies in one cluster, and {largest.name!r}, the largest, has {num_devices} "
            f"devices: {names} must be at most that",
            found=arithmetic,
            fix="use smaller numbers, or leave them to the planner",
        )
    raise PlanError(
        "parallel.stages",
        f"must be at most {sum(room.values())}: so many stages of {mesh.num_devices} devices have "
        "room in the clusters",
        found=f"{num_stages} stages",
        fix=f"set parallel.stages to {sum(room.values())} or less, or use smaller {names}",
    )


MEMORY_STEPS = (1.0, 1.05, 1.2, 1.5, 2.0, 4.0, 10.0, 100.0)  # to the least that was worked out
MOST_MEMORY = 1e9  # times what there is, in which all fits that fits at all
LITTLE = EFFORT / 20  # for a plan that need not be the best
NODES_STEPS = (1.0, 1.3, 1.7, 2.5)  # times the nodes that should do, each with one more
MOST_DEVICES = 512  # for which it is tried how many nodes would do
# What may be left to the planner, in the order in which a change is the milder.
FREED = (
    "activation_checkpointing",
    "microbatches",
    "fsdp",
    "data",
    "tensor",
    "context",
    "layers",
    "stages",
    "clusters",
)


def _memory_refusal(problems: Sequence[Problem]) -> PlanError:
    """The refusal says what the nearest plan lacks; the fix is left to `_with_remedy`."""
    config, topology = problems[0].config, problems[0].topology
    lean, least = [_leanest(problem) for problem in problems], _least_memory(problems)

    @functools.cache
    def within(factor: float) -> tuple[Problem, Found] | None:
        share = least * factor * USABLE_MEMORY
        return find_within([own.set_to(own.config.parallel, share) for own in lean], LITTLE)

    step = bisect.bisect_left(MEMORY_STEPS, True, key=lambda factor: within(factor) is not None)
    nearest = within(MEMORY_STEPS[step]) if step < len(MEMORY_STEPS) else None
    if least < MOST_MEMORY and nearest is None:
        return PlanError(
            "memory",
            f"no plan was found that fits: each needs at least {least:.3g} times what there is",
            found=f"{topology.num_devices} devices, {config.model.num_layers:,} layers, "
            f"train.global_batch {config.train.global_batch:,}",
            fix="",
        )
    if nearest is None:
        return PlanError(
            "parallel",
            "no mesh, number of microbatches and schedule go together as they are set",
            found=f"train.global_batch {config.train.global_batch}, {topology.num_devices} devices",
            fix="leave more of parallel: to the planner",
        )
    problem, found = nearest
    plan = as_plan(problem, found.best[0], found.bound_s)
    kinds = [problem.pools[seat.pool].kinds for seat in found.best[0].case.seats]
    usable = [USABLE_MEMORY * min(kind.memory_bytes for kind in own) for own in kinds]
    excess = [
        sum(stage.memory_bytes.values()) - room
        for stage, room in zip(plan.stages, usable, strict=True)
    ]
    i = max(range(len(excess)), key=excess.__getitem__)
    stage, kind = plan.stages[i], min(kinds[i], key=lambda kind: kind.memory_bytes)
    items = stage.memory_bytes
    largest = sorted(items, key=lambda name: -items[name])[:3]
    return PlanError(
        f"stage {i}",
        f"does not fit {kind.name} in cluster {stage.cluster!r}: {show(excess[i], 'B')} more than "
        f"{USABLE_MEMORY:.0%} of its {show(kind.memory_bytes, 'B')}, in the plan that comes "
        "nearest",
        found=f"{show(sum(items.values()), 'B')} per device for {stage.num_blocks} Transformer "
        "layers: " + ", ".join(f"{name} {show(items[name], 'B')}" for name in largest),
        fix="",
    )


def _least_memory(problems: Sequence[Problem]) -> float:
    """How many times the memory there is no plan can do without."""
    most = MOST_MEMORY
    for problem in problems:
        most = shortlist.least_memory(_leanest(problem), 1.0, most)
    return most


def _leanest(problem: Problem) -> Problem:
    """With the checkpointing that keeps least, unless the config says which."""
    parallel = problem.config.parallel
    if parallel.schedule == "zero_bubble" or parallel.activation_checkpointing is not None:
        return problem
    return problem.set_to(dataclasses.replace(parallel, activation_checkpointing="full"))


def _with_remedy(refusal: PlanError, problems: Sequence[Problem]) -> PlanError:
    """A refusal that says what helps: the mildest change of the settings, or more machines."""
    if refusal.fix:
        return refusal
    fix = _milder_settings(problems) or _more_machines(problems)
    return PlanError(refusal.where, refusal.problem, found=refusal.found, fix=fix)


def _milder_settings(problems: Sequence[Problem]) -> str | None:
    """The mildest change of one setting that makes a plan fit, with the value that is best."""
    parallel = problems[0].config.parallel
    set_here = [name for name in FREED if getattr(parallel, name) is not None]
    without = lambda names: [
        problem.set_to(dataclasses.replace(parallel, **dict.fromkeys(names)))
        for problem in problems
    ]
    free = without(set_here)
    if not set_here or _least_memory(free) > 1.0:
        return None
    for name in set_here:
        if (result := find_within(without([name]), LITTLE)) is not None:
            plan = as_plan(result[0], result[1].best[0], result[1].bound_s)
            return f"set parallel.{name}={_value(plan, name)}, or leave it to the planner"
    if find_within(free, LITTLE) is not None:
        return f"leave to the planner: {', '.join(f'parallel.{name}' for name in set_here)}"
    return None


def _more_machines(problems: Sequence[Problem]) -> str:
    """More nodes of the cluster whose nodes have most memory, if so many were found to do.

    Where no plan is tried, so many hold the layers: "about" them.
    """
    config, topology = problems[0].config, problems[0].topology
    node_bytes = lambda node: node.num_devices * node.device.memory_bytes
    cluster = max(topology.clusters, key=lambda own: node_bytes(own.nodes[-1]))
    lacks = (_least_memory(problems) - 1.0) * sum(map(node_bytes, topology.nodes))
    found = ""
    for extra, step in enumerate(NODES_STEPS):
        more = extra + math.ceil(max(1.0, step * lacks / node_bytes(cluster.nodes[-1])))
        is_tried = topology.num_devices + more * cluster.nodes[-1].num_devices <= MOST_DEVICES
        if not is_tried and not lacks:
            break
        changed = make_problems(config, upgrades.with_more_nodes(topology, cluster.name, more))
        if _least_memory(changed) <= 1.0 and (not is_tried or find_within(changed, LITTLE)):
            found = f", {'such as' if is_tried else 'about'} {more:,} more in {cluster.name!r}"
            break
    return (
        f"use more nodes{found}, or devices with more memory, or a smaller model, "
        "train.global_batch or model.context_length"
    )


def _value(plan: Plan, name: str) -> object:
    """What a plan has for a setting."""
    if name in ("microbatches", "activation_checkpointing"):
        return getattr(plan, name)
    if name == "clusters":
        return [stage.cluster for stage in plan.stages]
    if name in ("stages", "layers"):
        layers = [stage.num_blocks for stage in plan.stages]
        return len(layers) if name == "stages" else layers
    return max(dict(stage.mesh).get(Axis(name), 1) for stage in plan.stages)
