"""Rules of how a step is cut over devices: stages, chunks, and what each mesh axis divides."""

import itertools
import math
from collections.abc import Iterator, Mapping

from holmesjax.config.mistakes import multiples, wrong
from holmesjax.config.model_sections import EXPERT_BLOCK, ModelConfig
from holmesjax.config.sections import ParallelConfig
from holmesjax.config.training_sections import TrainConfig
from holmesjax.errors import ConfigError
from holmesjax.schedules.pipeline_schedules import PLAIN, SCHEDULES, chunked


def one_value_per_stage(parallel: ParallelConfig) -> Iterator[ConfigError]:
    stages = parallel.stages
    for name, what in (
        ("layers", "numbers"),
        ("clusters", "names"),
        ("recomputed_layers", "numbers"),
    ):
        values = getattr(parallel, name)
        if values is not None and stages is not None and len(values) != stages:
            problem = f"must have one for each of parallel.stages = {stages} stages"
            fix = f"give {stages} {what}, or set parallel.stages to {len(values)}"
            found = f"{list(values)}: {len(values)} {what}"
            yield wrong(f"parallel.{name}", problem, found, fix)
    layers, clusters = parallel.layers, parallel.clusters
    if layers is not None and clusters is not None and len(layers) != len(clusters):
        problem = f"must have one for each of parallel.layers = {list(layers)}"
        fix = f"give {len(layers)} names, or leave one of the two out"
        yield wrong("parallel.clusters", problem, list(clusters), fix)


def stages_of_a_cluster_are_neighbours(parallel: ParallelConfig) -> Iterator[ConfigError]:
    runs = [name for name, _ in itertools.groupby(parallel.clusters or ())]
    if len(set(runs)) < len(runs):
        twice = next(name for name in runs if runs.count(name) > 1)
        problem = "stages of a cluster must be neighbours in the pipeline"
        fix = f"put those of {twice!r} beside each other"
        yield wrong("parallel.clusters", problem, list(parallel.clusters or ()), fix)


def every_layer_is_placed(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if parallel.layers is not None and sum(parallel.layers) != model.num_layers:
        problem = f"must sum to model.num_layers = {model.num_layers}"
        found = f"{' + '.join(map(str, parallel.layers))} = {sum(parallel.layers)}"
        fix = f"give numbers with sum {model.num_layers}, or leave the key out: the planner chooses"
        yield wrong("parallel.layers", problem, found, fix)


def no_more_layers_compute_again(
    model: ModelConfig, parallel: ParallelConfig
) -> Iterator[ConfigError]:
    numbers = [max(1, number) for number in parallel.recomputed_layers or ()]
    if sum(numbers) > model.num_layers:
        problem = f"must sum to model.num_layers = {model.num_layers} at most"
        if 0 in (parallel.recomputed_layers or ()):
            problem += ", where a stage with 0 has a layer too"
        found = f"{' + '.join(map(str, numbers))} = {sum(numbers)}"
        yield wrong("parallel.recomputed_layers", problem, found, "give smaller numbers")


def every_stage_has_a_layer(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    num_layers, chunks, stages = model.num_layers, parallel.chunks or 1, parallel.stages
    if stages is not None and stages > num_layers:
        problem = f"must be at most model.num_layers = {num_layers}: a layer for each stage"
        fix = f"use {num_layers} or less, or more layers"
        yield wrong("parallel.stages", problem, stages, fix)
    elif stages is not None and stages * chunks > num_layers:
        problem = f"chunks * stages must be at most model.num_layers = {num_layers}"
        most = num_layers // stages
        fix = f"use {most} or less, or more layers" if most > 1 else "use fewer stages"
        yield wrong("parallel.chunks", problem, f"{chunks} * {stages} = {chunks * stages}", fix)


def every_chunk_has_a_layer(parallel: ParallelConfig) -> Iterator[ConfigError]:
    layers, chunks = parallel.layers, parallel.chunks or 1
    if layers is not None and min(layers) < chunks:
        problem = f"must each be at least parallel.chunks = {chunks}: a layer for each chunk"
        fix = f"give each stage {chunks} layers or more, or use fewer chunks"
        yield wrong("parallel.layers", problem, list(layers), fix)


def chunks_are_for_interleaving(parallel: ParallelConfig) -> Iterator[ConfigError]:
    name, where = parallel.schedule, "parallel.chunks"
    if name in chunked() and parallel.chunks == 1:
        problem = f"must be at least 2 for schedule {name}"
        yield wrong(where, problem, 1, f"use 2, or set parallel.schedule to {PLAIN}")
    if name not in chunked() and (parallel.chunks or 1) > 1:
        other = f"not for {name}" if name else "which must be set"
        names = " or ".join(chunked())
        problem = f"is only for schedule {names}, {other}"
        fix = f"remove it, or set parallel.schedule to {names}"
        yield wrong(where, problem, parallel.chunks, fix)


def recomputed_layers_are_layers(parallel: ParallelConfig) -> Iterator[ConfigError]:
    numbers, layers, where = parallel.recomputed_layers, parallel.layers, "recomputed_layers"
    if numbers is None:
        return
    for name in ("layers", "clusters"):
        others = getattr(parallel, name)
        if others is not None and len(others) != len(numbers):
            problem = f"must have one for each of parallel.{name} = {list(others)}"
            fix = f"give {len(others)} numbers, or leave one of the two out"
            yield wrong(f"parallel.{where}", problem, list(numbers), fix)
            return
    if layers is not None and any(n > most for n, most in zip(numbers, layers, strict=True)):
        problem = f"must each be at most the number in parallel.layers = {list(layers)}"
        yield wrong(f"parallel.{where}", problem, list(numbers), "give smaller numbers")
    if parallel.activation_checkpointing == "none" and any(numbers):
        problem = "must all be 0 where parallel.activation_checkpointing is none"
        fix = "set parallel.activation_checkpointing to dots or full, or leave one of the two out"
        yield wrong(f"parallel.{where}", problem, list(numbers), fix)


def split_backwards_compute_nothing_again(parallel: ParallelConfig) -> Iterator[ConfigError]:
    policy, name = parallel.activation_checkpointing, parallel.schedule
    if name is None or not SCHEDULES[name].splits_backward:
        return
    if any(parallel.recomputed_layers or ()):
        problem = f"must all be 0 for schedule {name}"
        fix = f"use 0, or set parallel.schedule to {PLAIN}"
        yield wrong(
            "parallel.recomputed_layers", problem, list(parallel.recomputed_layers or ()), fix
        )
    elif policy not in (None, "none"):
        problem = (
            f"must be none for schedule {name}: "
            "computing layers again would tie the gradients of their weights back to B"
        )
        fix = f"use none, or set parallel.schedule to {PLAIN}"
        yield wrong("parallel.activation_checkpointing", problem, policy, fix)


def tensor_cuts_evenly(
    name: str, model: ModelConfig, parallel: ParallelConfig
) -> Iterator[ConfigError]:
    section, _, setting = name.rpartition(".")
    owner = getattr(model, section) if section else model
    size = None if owner is None else getattr(owner, setting)
    if size is None and owner is not None and name in _widths_by_default(model):
        size = model.mlp_width or 4 * model.width
    if size is not None and parallel.tensor is not None and size % parallel.tensor:
        problem = f"must be a multiple of parallel.tensor = {parallel.tensor}"
        near = multiples(size, parallel.tensor)
        if name == "vocab_size":  # with fewer, the tokens of the corpus may have no room
            near = str(-(-size // parallel.tensor) * parallel.tensor)
        fix = f"use {near}, or change parallel.tensor"
        yield wrong(f"model.{name}", problem, size, fix)


def _widths_by_default(model: ModelConfig) -> Iterator[str]:
    """The widths that the model has where the run leaves them out, by their settings."""
    if any(kind != EXPERT_BLOCK for kind in model.pattern):
        yield "mlp_width"
    if EXPERT_BLOCK in model.pattern:
        yield "experts.width"


def sequences_with_capacity_are_whole(
    model: ModelConfig, parallel: ParallelConfig
) -> Iterator[ConfigError]:
    factor = model.experts and model.experts.capacity_factor
    if factor is not None and (parallel.context or 1) > 1:
        problem = "is for whole sequences, which devices of the axis context share"
        fix = "leave it out, so that no token is left out, or set parallel.context to 1"
        yield wrong("model.experts.capacity_factor", problem, factor, fix)


def experts_cut_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    expert, where = parallel.expert or 1, "parallel.expert"
    for name, plain in (("expert_placement", ("number",)), ("expert_chunks", (None, 1))):
        value = getattr(parallel, name)
        if value not in plain and model.experts is None:
            problem, fix = "is for a model with experts", "leave it out"
            yield wrong(f"parallel.{name}", problem, value, fix)
    if expert == 1:
        return
    if model.experts is None:
        fix = "use 1, or fsdp"
        yield wrong(where, "must be 1 for a model without experts", expert, fix)
    elif model.experts.count % expert:
        problem = f"must divide model.experts.count = {model.experts.count}"
        yield wrong(where, problem, expert, f"use {math.gcd(model.experts.count, expert)}")


def width_cuts_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    sizes = {name: getattr(parallel, name) or 1 for name in ("fsdp", "context", "expert")}
    cuts = {name: size for name, size in sizes.items() if size > 1}
    parts, product = _product(cuts)
    widths: dict[str, int | None] = {"model.width": model.width}
    if (latents := model.latent_attention) is not None:
        for name in ("rank", "query_rank"):
            widths[f"model.latent_attention.{name}"] = getattr(latents, name)
    if model.experts is not None:
        widths["model.experts.latent_width"] = model.experts.latent_width
    for where, width in widths.items():
        if width is not None and width % parts:
            names = " or ".join(f"parallel.{name}" for name in cuts)
            fix = f"use {multiples(width, parts)}, or change {names}"
            yield wrong(where, f"must be a multiple of {product}", width, fix)


def context_cuts_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    context, length = parallel.context or 1, model.context_length
    runs = 2 * context  # of tokens: each part has two
    if context > 1 and length % runs:
        fix = f"use {multiples(length, runs)}, or change parallel.context"
        problem = f"must be a multiple of 2 * parallel.context = 2 * {context} = {runs}"
        yield wrong("model.context_length", problem, length, fix)


def own_sequences_are_whole(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if model.module is not None and (parallel.context or 1) > 1:
        problem = "must be 1 with model.module: your own layers read whole sequences"
        yield wrong("parallel.context", problem, parallel.context, "use 1, or fsdp")


def microbatches_are_equal(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    names = "data", "fsdp", "expert", "microbatches"
    sizes = {name: getattr(parallel, name) for name in names}
    cuts = {name: size for name, size in sizes.items() if size is not None}
    for name in ("fsdp", "expert"):
        if cuts.get(name) == 1:
            del cuts[name]
    if not cuts:
        return
    parts, arithmetic = _product(cuts)
    if train.global_batch % parts:
        left = train.global_batch % parts
        found = f"{train.global_batch} = {train.global_batch // parts} * {parts} + {left}"
        fix = f"use {multiples(train.global_batch, parts)}, or change the number of parts"
        yield wrong("train.global_batch", f"must be a multiple of {arithmetic}", found, fix)


def _product(cuts: Mapping[str, int]) -> tuple[int, str]:
    """Returns the product of settings of `parallel`, and its arithmetic as text."""
    parts = math.prod(cuts.values())
    arithmetic = " * ".join(f"parallel.{name}" for name in cuts)
    if len(cuts) > 1:
        arithmetic += f" = {' * '.join(map(str, cuts.values()))}"
    return parts, f"{arithmetic} = {parts}"
