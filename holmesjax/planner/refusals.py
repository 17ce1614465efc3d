"""Settings that are refused without a search, with what to write in their place."""

import math
from collections import Counter
from fnmatch import fnmatchcase

from holmesjax.config import Config
from holmesjax.costs import work
from holmesjax.costs.optimizer_state import kept_bytes
from holmesjax.costs.parameters import stage_parameters
from holmesjax.costs.stage_shape import DTYPE_BYTES
from holmesjax.errors import ConfigError, PlanError
from holmesjax.files import schema
from holmesjax.layer_specs.distinct_kinds import block_counts
from holmesjax.layer_specs.kind import PARTS_DIM, TENSOR_DIMS
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.plan import Axis
from holmesjax.planner import prices, shortlist
from holmesjax.planner.offers import MAX_STAGES
from holmesjax.planner.stage_costs import StageCosts
from holmesjax.planner.stage_layouts import (
    MeshShape,
    Role,
    StepSettings,
    divisors,
    exchange_is_fast,
    make_pools,
    most_parts,
)
from holmesjax.schedules.pipeline_schedules import PLAIN, SCHEDULES, PipelineSchedule
from holmesjax.topology.catalogue import CPU, FP8
from holmesjax.topology.machines import Topology
from holmesjax.units import show

ABSURD = 10.0  # times the memory of all devices: nothing near it is looked for


def refuse_impossible(config: Config, topology: Topology) -> None:
    """Raises PlanError for settings that no plan on these machines can have."""
    _refuse_uneven_cuts(config)
    _refuse_devices_without_fp8(config, topology)
    _refuse_absurd_sizes(config, topology)
    _refuse_unpriced(config, topology)
    _refuse_unknown_clusters(config, topology)
    _refuse_number_of_stages(config, topology)
    _refuse_crowded_clusters(config, topology)
    _refuse_slow_exchanges(config, topology)


def _refuse_uneven_cuts(config: Config) -> None:
    """Cuts of parameters that a model of one's own does not have; ours are settings with checks."""
    if config.model.module is None:
        return
    for name, dims in (("tensor", TENSOR_DIMS), ("fsdp", PARTS_DIM)):
        size, most = getattr(config.parallel, name) or 1, most_parts(config.model, dims)
        if most % size:
            raise PlanError(
                f"parallel.{name}",
                f"must divide all dims that {name} cuts in the parameters of {config.model.module}",
                found=f"{size}; of these dims {most} is the greatest common divisor"
                if most > 1
                else f"{size}, and no parameter can be cut",
                fix=f"use {' or '.join(map(str, divisors(most)[-3:]))}, or give parameters axes: "
                'functions(init, apply, axes={"up": ("fsdp", "tensor")})',
            )


def _refuse_devices_without_fp8(config: Config, topology: Topology) -> None:
    """Every device that a plan may have needs the products of the model."""
    if config.model.fp8 is None:
        return
    named = config.parallel.clusters
    able: list[str] = []
    unable: dict[str, str] = {}
    for cluster in topology.clusters:
        kinds = {node.device for node in cluster.nodes}
        others = [kind for kind in kinds if kind.name != CPU]  # which computes with any numbers
        lacking = sorted(kind.name for kind in others if FP8 not in kind.peak_flop_per_s)
        if not lacking:
            able.append(cluster.name)
        elif named is None or cluster.name in named:
            unable[cluster.name] = ", ".join(lacking)
    if unable:
        move = f"name only {', '.join(able)} in parallel.clusters, " if able else ""
        raise PlanError(
            "model.fp8",
            "needs devices with products in fp8, in every cluster that a plan may use",
            found="; ".join(f"{name} has {kinds}" for name, kinds in unable.items()),
            fix=f"{move}leave model.fp8 out, or add peak_flop_per_s.{FP8} of a kind that has "
            "them to the topology",
        )


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
    whole = MeshShape(data=1, fsdp=1, tensor=1)
    ends = Role(is_first=True, is_last=True)
    settings, blocks = StepSettings(1, "none"), block_counts(model)
    shape = StageCosts(config).shape(whole, settings, ends, blocks)
    num_parameters = stage_parameters(model, shape)
    width = DTYPE_BYTES[train.compute_dtype] + DTYPE_BYTES[train.param_dtype]
    least_bytes = float(num_parameters * (width + 4) + kept_bytes(model, shape))
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
        token_bytes = float(work.boundary_bytes(model, tokens, train.compute_dtype))
        if token_bytes > ABSURD * all_bytes:
            raise PlanError(
                name,
                f"gives one microbatch {tokens:,} tokens, which take {show(token_bytes, 'B')} "
                f"between two layers; all {sizes} of the topology have {show(all_bytes, 'B')}",
                found=f"{value:,}",
                fix="use a smaller number",
            )


def _refuse_unpriced(config: Config, topology: Topology) -> None:
    if config.plan.is_by_time:
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
    named = [("parallel.clusters", name) for name in config.parallel.clusters or ()]
    named += [("distributed.calls_out", name) for name in config.distributed.calls_out]
    for setting, name in named:
        if name not in known:
            raise PlanError(
                setting,
                f"topology {topology.name} has no such cluster",
                found=name,
                fix=f"use {' or '.join(known)}",
            )


def _refuse_crowded_clusters(config: Config, topology: Topology) -> None:
    """A cluster that is named more often than it has devices for stages of the mesh."""
    _, mesh = _least_mesh(config)
    for name, num_stages in Counter(config.parallel.clusters or ()).items():
        [cluster] = [cluster for cluster in topology.clusters if cluster.name == name]
        num_devices = sum(node.num_devices for node in cluster.nodes)
        if num_stages > 1 and num_stages * mesh.num_devices > num_devices:
            raise PlanError(
                "parallel.clusters",
                f"names {name!r} {num_stages} times: its stages need at least "
                f"{num_stages * mesh.num_devices} devices, and the cluster has {num_devices}",
                found=str(list(config.parallel.clusters or ())),
                fix=f"name {name!r} at most {max(1, num_devices // mesh.num_devices)} times, once "
                "for each of its stages",
            )


def _refuse_slow_exchanges(config: Config, topology: Topology) -> None:
    """Devices that the config wants to share experts, where no cluster that it allows is fast."""
    parallel, tensor = config.parallel, config.parallel.tensor or 1
    named, expert = parallel.clusters, parallel.expert or 1
    pools = make_pools(topology, by_kind=False)
    slow = [pool for pool in pools if not exchange_is_fast(pool, expert, tensor)]
    unable = [pool for pool in slow if named is None or pool.cluster.name in named]
    if not unable or (named is None and len(unable) < len(pools)):
        return
    raise PlanError(
        "parallel.expert",
        "must leave groups whole inside nodes: devices that share experts exchange tokens in every "
        "layer, over links with RDMA or inside a node alone",
        found=f"{expert}"
        + (f" * parallel.tensor = {expert * tensor}" if tensor > 1 else "")
        + "; "
        + "; ".join(
            f"{pool.cluster.name} has {pool.cluster.fabric} between nodes of "
            f"{' or '.join(map(str, sorted(set(map(len, pool.devices.values())))))}"
            for pool in unable
        ),
        fix="use a smaller number, which divides the devices of each node, or leave it to the "
        "planner",
    )


def _least_mesh(config: Config) -> tuple[dict[str, int], MeshShape]:
    """The sizes of axes that the config sets, and the smallest mesh that has them."""
    parallel = config.parallel
    names = [name for name in MeshShape._fields if name in tuple(Axis)]
    sizes = {name: size for name in names if (size := getattr(parallel, name)) is not None}
    return sizes, MeshShape(**{"data": 1, "fsdp": 1, "tensor": 1} | sizes)


def _num_stages(config: Config) -> int | None:
    """The number of stages that the config sets; None if it sets none."""
    name, parallel = _setting_of_stages(config), config.parallel
    return parallel.stages if name == "stages" else len(getattr(parallel, name))


def _setting_of_stages(config: Config) -> str:
    """The name of the setting that says how many stages there are, if one does."""
    names = "stages", "layers", "clusters", "recomputed_layers"
    return next((name for name in names if getattr(config.parallel, name)), "stages")


def _too_many_stages(config: Config, most: int, why: str, otherwise: str) -> PlanError:
    name, num_stages = _setting_of_stages(config), _num_stages(config)
    is_list, leave = name != "stages", f"or {otherwise}"
    return PlanError(
        f"parallel.{name}",
        "has one for each stage, whose number " * is_list + f"must be at most {most}{why}",
        found=f"{num_stages} stages",
        fix=f"give {most} or less, {leave}"
        if is_list
        else f"set parallel.stages to {most} or less, {leave}",
    )


def _refuse_number_of_stages(config: Config, topology: Topology) -> None:
    parallel, num_layers = config.parallel, config.model.num_layers
    num_stages = _num_stages(config)
    if num_stages is not None:
        limits = (
            (num_layers, "layers of the model"),
            (topology.num_devices, "devices of the topology"),
            (MAX_STAGES, "stages that are planned"),
        )
        most, of = min(limits)
        if num_stages > most:
            raise _too_many_stages(config, most, f", the number of {of}", "leave it to the planner")
    if parallel.schedule is not None:
        _refuse_schedule(config, SCHEDULES[parallel.schedule], num_stages)


def _refuse_schedule(config: Config, own: PipelineSchedule, num_stages: int | None) -> None:
    """Refuses a schedule that was asked for, and that no pipeline of the config can run."""
    parallel, num_layers = config.parallel, config.model.num_layers
    chunks, microbatches = parallel.chunks or min(own.chunks), parallel.microbatches
    stages = num_stages or own.least_stages
    if own.is_chunked and stages * chunks > num_layers:
        most, fix = num_layers // stages, f"set parallel.schedule to {PLAIN}"
        if stages > own.least_stages:
            fix = f"use fewer stages, or {fix}"
        if parallel.chunks and most > 1:
            fix = f"set parallel.chunks to {most} or less"
        raise PlanError(
            "parallel.chunks" if parallel.chunks else "parallel.schedule",
            f"chunks * stages must be at most the number of layers, {num_layers}",
            found=f"{chunks} * {stages} = {chunks * stages}",
            fix=fix,
        )
    if stages < own.least_stages:
        raise PlanError(
            "parallel.schedule",
            f"{parallel.schedule} needs {own.least_stages} stages or more",
            found="1 stage" if stages == 1 else f"{stages} stages",
            fix=f"use {own.least_stages} stages or more, or set parallel.schedule to {PLAIN}",
        )
    if num_stages is None or microbatches is None:
        return
    if own.is_in_groups and microbatches % num_stages:
        below = microbatches // num_stages * num_stages
        values = f"{below} or {below + num_stages}" if below else f"{num_stages}"
        raise PlanError(
            "parallel.microbatches",
            f"must be a multiple of the number of stages, {num_stages}, for {parallel.schedule}",
            found=f"{microbatches} / {num_stages} leaves {microbatches % num_stages}",
            fix=f"use parallel.microbatches={values}, or set parallel.schedule to {PLAIN}",
        )


def refuse_large_meshes(config: Config, topology: Topology) -> None:
    """Every stage lies in one cluster, so that must have the devices of one mesh."""
    sizes, mesh = _least_mesh(config)
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
            f"{names} must be at most {num_devices}: a stage lies in one cluster, and "
            f"{largest.name!r}, the largest, has {num_devices} devices",
            found=arithmetic,
            fix="use smaller numbers, or leave them to the planner",
        )
    raise _too_many_stages(
        config,
        sum(room.values()),
        f": the clusters have no room for more stages of {mesh.num_devices} devices",
        f"use smaller {names}",
    )


def refuse_empty_groups(config: Config) -> None:
    """Raises ConfigError for a group that no parameter of the model is in."""
    if not config.optimizer.groups:
        return
    names = [
        f"{layer}/{parameter.name}"
        for layer, kind in layers(config.model).items()
        for parameter in kind.parameters
        if parameter.trains
    ]
    free = dict.fromkeys(names)
    for number, group in enumerate(config.optimizer.groups):
        fits = [name for name in names if fnmatchcase(name, group.pattern)]
        problem, fix = "fits no parameter that trains", schema.near(group.pattern, names[:20])
        if fits and not any(name in free for name in fits):
            problem = "has no parameter: groups before it take all that it fits"
            fix = "put it before them, or leave it out"
        if not any(name in free for name in fits):
            where = f"optimizer.groups[{number}].pattern"
            raise ConfigError(where, problem, found=group.pattern, fix=fix)
        for name in fits:
            free.pop(name, None)
