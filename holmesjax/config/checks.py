"""Rules between settings.

A check yields a mistake for each rule that is broken; `where` is the dotted path of the setting to
blame. `files.load` runs it on files with other mistakes, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from holmesjax import schema, yaml_files
from holmesjax.config.sections import (
    ALL_LINEAR,
    AUTO,
    CHECKS,
    GATED,
    LORA_TARGETS,
    MIXTURE,
    PYTHON_STDLIB,
    WINDOW_BLOCK,
    CheckpointConfig,
    DataConfig,
    Fp8Config,
    KernelsConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RotaryScalingConfig,
    RunConfig,
    TrainConfig,
)
from holmesjax.data_sources import SOURCES
from holmesjax.errors import ConfigError
from holmesjax.rotary import SCALINGS
from holmesjax.schedules.pipeline_schedules import PLAIN, SCHEDULES, chunked
from holmesjax.update_rules import RULES


def _wrong(where: str, problem: str, found: object, fix: str) -> ConfigError:
    return ConfigError(where, problem, found=found, fix=fix)


def _multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`: "60 or 66"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _cache_is_a_place(run: RunConfig) -> Iterator[ConfigError]:
    folder = run.compilation_cache
    if folder not in (None, AUTO) and not str(folder).startswith(("/", "~/")):
        problem = "must be auto, null, or a path from / or ~ on: processes start in other folders"
        fix = "write the whole path, or null to keep nothing"
        yield _wrong("run.compilation_cache", problem, folder, fix)


def _heads_share_width(model: ModelConfig) -> Iterator[ConfigError]:
    if model.head_dim is None and model.width % model.num_heads:
        problem = f"must be a multiple of model.num_heads = {model.num_heads}"
        fix = f"use {_multiples(model.width, model.num_heads)}, or set model.head_dim"
        yield _wrong("model.width", problem, model.width, fix)


def _heads_share_keys(model: ModelConfig) -> Iterator[ConfigError]:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if kv_heads is not None and heads % kv_heads:
        problem = f"must divide model.num_heads = {heads}: {heads} / {kv_heads} is not whole"
        fix = f"use {math.gcd(heads, kv_heads)}, or change model.num_heads"
        yield _wrong("model.num_kv_heads", problem, kv_heads, fix)


def _rotary_turns_pairs(model: ModelConfig) -> Iterator[ConfigError]:
    problem = "must be even for rotary positions, which turn pairs of numbers"
    if model.positions != "rotary":
        return
    if model.head_dim is not None:
        if model.head_dim % 2:
            yield _wrong("model.head_dim", problem, model.head_dim, f"use {model.head_dim + 1}")
    elif (head_width := model.width // model.num_heads) % 2 and not model.width % model.num_heads:
        found = f"width / num_heads = {model.width} / {model.num_heads} = {head_width}"
        fix = f"use model.width = {(head_width + 1) * model.num_heads}, or positions: learned"
        yield _wrong("model.width", f"the width of a head {problem}", found, fix)


def _rotary_settings_are_for_rotary_positions(model: ModelConfig) -> Iterator[ConfigError]:
    if model.positions != "rotary":
        for name, default in ROTARY_DEFAULTS.items():
            if (value := getattr(model, name)) != default:
                problem = f"is only for rotary positions, not for {model.positions} ones"
                fix = "remove it, or set model.positions to rotary"
                yield _wrong(f"model.{name}", problem, yaml_files.shown(value), fix)
        return
    head_width = model.head_dim or model.width // model.num_heads
    turning = int(head_width * model.rotary_fraction)
    if model.rotary_fraction < 1 and (turning % 2 or not turning):
        problem = f"must leave an even number of a head's {head_width} numbers to turn"
        found = f"{model.rotary_fraction}: {turning} of {head_width}"
        fix = f"use {max(2, turning + turning % 2) / head_width:g}"
        yield _wrong("model.rotary_fraction", problem, found, fix)
    if model.window_rotary_base is not None and WINDOW_BLOCK not in model.pattern:
        problem = f"is only for layers of the kind {WINDOW_BLOCK}"
        fix = f"remove it, or add {WINDOW_BLOCK} to model.pattern"
        yield _wrong("model.window_rotary_base", problem, model.window_rotary_base, fix)


def _rotary_scaling_is_whole(model: ModelConfig) -> Iterator[ConfigError]:
    if (scaling := model.rotary_scaling) is None:
        return
    where, rule = "model.rotary_scaling", SCALINGS[scaling.type]
    if rule.refused:
        fix = f"use one of {', '.join(n for n, other in SCALINGS.items() if not other.refused)}"
        yield _wrong(f"{where}.type", rule.refused, scaling.type, fix)
        return
    for name in (field.name for field in dataclasses.fields(RotaryScalingConfig)[1:]):
        value = getattr(scaling, name)
        if value is None and name in rule.needs:
            problem, fix = f"is missing: type {scaling.type} needs it", "copy it from config.json"
            yield _wrong(f"{where}.{name}", problem, "nothing", fix)
        if value is not None and name not in rule.needs + rule.takes:
            types = [n for n, other in SCALINGS.items() if name in other.needs + other.takes]
            problem = f"is only for type {' or '.join(types)}, not for {scaling.type}"
            yield _wrong(f"{where}.{name}", problem, yaml_files.shown(value), "remove it")
    yield from _turns_are_in_order(scaling)
    pairs = int((model.head_dim or model.width // model.num_heads) * model.rotary_fraction) // 2
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and scaling.type == "longrope" and len(factors) != pairs:
            problem = f"must have one number for each of the {pairs} pairs of a head that turn"
            found = f"{len(factors)} numbers"
            yield _wrong(f"{where}.{name}", problem, found, f"give {pairs} numbers")


def _turns_are_in_order(scaling: RotaryScalingConfig) -> Iterator[ConfigError]:
    where = "model.rotary_scaling"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        problem, fix = f"must be more than low_freq_factor = {low}", "use 1.0 and 4.0, as Llama 3.1"
        yield _wrong(f"{where}.high_freq_factor", problem, high, fix)
    fast, slow = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0
    if fast <= slow:
        problem = f"must be more than beta_slow = {slow}"
        yield _wrong(f"{where}.beta_fast", problem, fast, "use 32.0 and 1.0, or leave both out")
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        given, other = "mscale", "mscale_all_dim"
        if scaling.mscale is None:
            given, other = other, given
        fix = f"add {other}, or remove {given}"
        yield _wrong(
            f"{where}.{given}", f"counts only beside {other}", getattr(scaling, given), fix
        )


def _windows_have_a_width(model: ModelConfig) -> Iterator[ConfigError]:
    if WINDOW_BLOCK in model.pattern and model.window is None:
        problem, fix = f"is missing: {WINDOW_BLOCK} needs it", "add the keys that a query sees"
        yield _wrong("model.window", problem, "nothing", fix)
    if model.window is not None and set(model.pattern) <= {"block"}:
        problem = f"is only for layers of the kind {WINDOW_BLOCK}"
        fix = f"remove it, or add {WINDOW_BLOCK} to model.pattern"
        yield _wrong("model.window", problem, model.window, fix)


def _lora_targets_are_there(model: ModelConfig) -> Iterator[ConfigError]:
    if (lora := model.lora) is None:
        return
    where, found = "model.lora.targets", list(lora.targets)
    weights = [name for target in lora.targets for group in LORA_TARGETS[target] for name in group]
    if twice := sorted({name for name in weights if weights.count(name) > 1}):
        problem = f"must name each weight once: {', '.join(twice)} would have two adapters"
        yield _wrong(where, problem, found, "leave one of the two names out")
    if "gate" in weights and ALL_LINEAR not in lora.targets and model.activation not in GATED:
        problem = f"must be weights of the model: a {model.activation} has no gate"
        yield _wrong(where, problem, found, f"leave the gate out, or use {' or '.join(GATED)}")


def _frozen_or_adapted(model: ModelConfig) -> Iterator[ConfigError]:
    if model.lora is not None and model.frozen:
        problem = "cannot be set beside model.lora, with which nothing but adapters trains"
        yield _wrong("model.frozen", problem, list(model.frozen), "leave one of the two out")


def _fp8_is_for_whole_training(model: ModelConfig) -> Iterator[ConfigError]:
    if model.fp8 is None:
        return
    for name in ("lora", "frozen"):
        if getattr(model, name):
            problem = f"cannot be set beside model.{name}: frozen weights have no products in fp8"
            yield _wrong("model.fp8", problem, "both", "leave one of the two out")
    if model.fp8.scaling == "current" and model.fp8.history != Fp8Config().history:
        problem = "is only for scaling delayed: current scales look at no step before"
        fix = "remove it, or set model.fp8.scaling to delayed"
        yield _wrong("model.fp8.history", problem, model.fp8.history, fix)


def _vocabulary_holds_tokens(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    named = [SOURCES[each.source] for each in data.mixture or ()] or [SOURCES[data.source]]
    source = max(named, key=lambda own: own.num_tokens(data))
    if model.vocab_size < (least := source.num_tokens(data)):
        problem = f"must be at least {least}: the tokens of the corpus are {source.tokens_are}"
        fix = f"use {least}, or a padded size"
        yield _wrong("model.vocab_size", problem, model.vocab_size, fix)


def _one_value_per_stage(parallel: ParallelConfig) -> Iterator[ConfigError]:
    stages = parallel.stages
    for name, what in (("layers", "numbers"), ("clusters", "names")):
        values = getattr(parallel, name)
        if values is not None and stages is not None and len(values) != stages:
            problem = f"must have one for each of parallel.stages = {stages} stages"
            fix = f"give {stages} {what}, or set parallel.stages to {len(values)}"
            found = f"{list(values)}: {len(values)} {what}"
            yield _wrong(f"parallel.{name}", problem, found, fix)
    layers, clusters = parallel.layers, parallel.clusters
    if layers is not None and clusters is not None and len(layers) != len(clusters):
        problem = f"must have one for each of parallel.layers = {list(layers)}"
        fix = f"give {len(layers)} names, or leave one of the two out"
        yield _wrong("parallel.clusters", problem, list(clusters), fix)


def _stages_of_a_cluster_are_neighbours(parallel: ParallelConfig) -> Iterator[ConfigError]:
    runs = [name for name, _ in itertools.groupby(parallel.clusters or ())]
    if len(set(runs)) < len(runs):
        twice = next(name for name in runs if runs.count(name) > 1)
        problem = "stages of a cluster must be neighbours in the pipeline"
        fix = f"put those of {twice!r} beside each other"
        yield _wrong("parallel.clusters", problem, list(parallel.clusters or ()), fix)


def _every_layer_is_placed(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if parallel.layers is not None and sum(parallel.layers) != model.num_layers:
        problem = f"must sum to model.num_layers = {model.num_layers}"
        found = f"{' + '.join(map(str, parallel.layers))} = {sum(parallel.layers)}"
        fix = f"give numbers with sum {model.num_layers}, or leave the key out: the planner chooses"
        yield _wrong("parallel.layers", problem, found, fix)


def _every_stage_has_a_layer(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    num_layers, chunks, stages = model.num_layers, parallel.chunks or 1, parallel.stages
    if stages is not None and stages > num_layers:
        problem = f"must be at most model.num_layers = {num_layers}: a layer for each stage"
        fix = f"use {num_layers} or less, or more layers"
        yield _wrong("parallel.stages", problem, stages, fix)
    elif stages is not None and stages * chunks > num_layers:
        problem = f"chunks * stages must be at most model.num_layers = {num_layers}"
        most = num_layers // stages
        fix = f"use {most} or less, or more layers" if most > 1 else "use fewer stages"
        yield _wrong("parallel.chunks", problem, f"{chunks} * {stages} = {chunks * stages}", fix)


def _every_chunk_has_a_layer(parallel: ParallelConfig) -> Iterator[ConfigError]:
    layers, chunks = parallel.layers, parallel.chunks or 1
    if layers is not None and min(layers) < chunks:
        problem = f"must each be at least parallel.chunks = {chunks}: a layer for each chunk"
        fix = f"give each stage {chunks} layers or more, or use fewer chunks"
        yield _wrong("parallel.layers", problem, list(layers), fix)


def _chunks_are_for_interleaving(parallel: ParallelConfig) -> Iterator[ConfigError]:
    name, where = parallel.schedule, "parallel.chunks"
    if name in chunked() and parallel.chunks == 1:
        problem = f"must be at least 2 for schedule {name}"
        yield _wrong(where, problem, 1, f"use 2, or set parallel.schedule to {PLAIN}")
    if name not in chunked() and (parallel.chunks or 1) > 1:
        other = f"not for {name}" if name else "which must be set"
        names = " or ".join(chunked())
        problem = f"is only for schedule {names}, {other}"
        fix = f"remove it, or set parallel.schedule to {names}"
        yield _wrong(where, problem, parallel.chunks, fix)


def _split_backwards_compute_nothing_again(parallel: ParallelConfig) -> Iterator[ConfigError]:
    policy, name = parallel.activation_checkpointing, parallel.schedule
    if name is not None and SCHEDULES[name].splits_backward and policy not in (None, "none"):
        problem = (
            f"must be none for schedule {name}: "
            "computing layers again would tie the gradients of their weights back to B"
        )
        fix = f"use none, or set parallel.schedule to {PLAIN}"
        yield _wrong("parallel.activation_checkpointing", problem, policy, fix)


def _tensor_cuts_evenly(
    name: str, model: ModelConfig, parallel: ParallelConfig
) -> Iterator[ConfigError]:
    size = getattr(model, name)
    if size is not None and parallel.tensor is not None and size % parallel.tensor:
        problem = f"must be a multiple of parallel.tensor = {parallel.tensor}"
        fix = f"use {_multiples(size, parallel.tensor)}, or change parallel.tensor"
        yield _wrong(f"model.{name}", problem, size, fix)


def _width_cuts_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    sizes = {"fsdp": parallel.fsdp or 1, "context": parallel.context or 1}
    cuts = {name: size for name, size in sizes.items() if size > 1}
    parts, product = _product(cuts)
    if model.width % parts:
        names = " or ".join(f"parallel.{name}" for name in cuts)
        fix = f"use {_multiples(model.width, parts)}, or change {names}"
        yield _wrong("model.width", f"must be a multiple of {product}", model.width, fix)


def _context_cuts_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    context, length = parallel.context or 1, model.context_length
    runs = 2 * context  # of tokens: each part has two
    if context > 1 and length % runs:
        fix = f"use {_multiples(length, runs)}, or change parallel.context"
        problem = f"must be a multiple of 2 * parallel.context = 2 * {context} = {runs}"
        yield _wrong("model.context_length", problem, length, fix)


def _microbatches_are_equal(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    sizes = {"data": parallel.data, "fsdp": parallel.fsdp, "microbatches": parallel.microbatches}
    cuts = {name: size for name, size in sizes.items() if size is not None}
    if parallel.fsdp == 1:
        del cuts["fsdp"]
    if not cuts:
        return
    parts, arithmetic = _product(cuts)
    if train.global_batch % parts:
        left = train.global_batch % parts
        found = f"{train.global_batch} = {train.global_batch // parts} * {parts} + {left}"
        fix = f"use {_multiples(train.global_batch, parts)}, or change the number of parts"
        yield _wrong("train.global_batch", f"must be a multiple of {arithmetic}", found, fix)


def _product(cuts: Mapping[str, int]) -> tuple[int, str]:
    """Returns the product of settings of `parallel`, and its arithmetic as text."""
    parts = math.prod(cuts.values())
    arithmetic = " * ".join(f"parallel.{name}" for name in cuts)
    if len(cuts) > 1:
        arithmetic += f" = {' * '.join(map(str, cuts.values()))}"
    return parts, f"{arithmetic} = {parts}"


def _optimizer_is_possible(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    rule, name = RULES[optimizer.name], optimizer.name
    if optimizer.moments != "float32" and not rule.rounds:
        names = " or ".join(n for n, other in RULES.items() if other.rounds)
        problem = f"is only for optimizer {names}: {name} keeps its numbers in float32"
        yield _wrong("optimizer.moments", problem, optimizer.moments, "leave it out")


def _muon_settings_are_for_muon(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    for name in () if RULES[optimizer.name].has_muon else ("muon_beta", "muon_consistent_rms"):
        if (value := getattr(optimizer, name)) != defaults[name]:
            problem = f"is only for optimizer muon, not for {optimizer.name}"
            fix = "leave it out, or set optimizer.name to muon"
            yield _wrong(f"optimizer.{name}", problem, value, fix)


def _function_is_for_optax(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    is_own, where = RULES[optimizer.name].takes_function, "optimizer.function"
    if is_own and optimizer.function is None:
        fix = "name a function of the section `optimizer` that gives a transformation of optax"
        yield _wrong(where, f"is missing: {optimizer.name} needs it", "nothing", fix)
    if not is_own and optimizer.function is not None:
        names = " or ".join(name for name, rule in RULES.items() if rule.takes_function)
        problem = f"is only for optimizer {names}, not for {optimizer.name}"
        fix = f"remove it, or set optimizer.name to {names}"
        yield _wrong(where, problem, optimizer.function, fix)


def _profiled_steps_are_of_the_run(train: TrainConfig) -> Iterator[ConfigError]:
    if train.profile_steps and max(train.profile_steps) > train.steps:
        problem = f"must each be at most train.steps = {train.steps}"
        fix = "use earlier steps, or more train.steps"
        yield _wrong("train.profile_steps", problem, list(train.profile_steps), fix)


def _gradients_have_exponents(train: TrainConfig) -> Iterator[ConfigError]:
    fix = "use bfloat16, which has the exponents of float32"
    if train.compute_dtype == "float16":
        problem = (
            "must not be float16: its least number is 6e-8 and its largest 65504, so gradients "
            "vanish and sums overflow, and no step scales its loss"
        )
        yield _wrong("train.compute_dtype", problem, train.compute_dtype, fix)
    if train.param_dtype == "float16":
        problem = (
            "must not be float16: a parameter or a change below 6e-8 would become zero, and one "
            "above 65504 infinite"
        )
        yield _wrong("train.param_dtype", problem, train.param_dtype, fix)


def _decay_is_for_wsd(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    is_wsd, where = optimizer.schedule == "wsd", "optimizer.decay_steps"
    if is_wsd and optimizer.decay_steps is None:
        fix = "add the number of steps at the end in which the learning rate falls"
        yield _wrong(where, "is missing: schedule wsd needs it", "nothing", fix)
    if not is_wsd and optimizer.decay_steps is not None:
        fix = "remove it, or set optimizer.schedule to wsd"
        problem = f"is only for schedule wsd, not for {optimizer.schedule}"
        yield _wrong(where, problem, optimizer.decay_steps, fix)


def _schedule_fits_run(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    """A warm-up may outlast a short run, but stable steps and a decay have to fit behind it."""
    warmup, decay, steps = optimizer.warmup_steps, optimizer.decay_steps, train.steps
    if optimizer.schedule == "wsd" and decay is not None and warmup + decay > steps:
        problem = f"warmup_steps + decay_steps must be at most train.steps = {steps}"
        found = f"{warmup} + {decay} = {warmup + decay}"
        fix = f"use {steps - warmup} or less, or more steps" if warmup < steps else "use more steps"
        yield _wrong("optimizer.decay_steps", problem, found, fix)


def _rampup_grows(train: TrainConfig) -> Iterator[ConfigError]:
    sizes = [part.global_batch for part in train.rampup] + [train.global_batch]
    for number, (size, following) in enumerate(itertools.pairwise(sizes)):
        if size >= following:
            where, problem = f"train.rampup[{number}].global_batch", "must be below the next batch"
            yield _wrong(where, f"{problem}, of {following}", size, f"use {following - 1} or less")


def _rampup_has_no_statistics(train: TrainConfig, log: LogConfig) -> Iterator[ConfigError]:
    if train.rampup and log.statistics:
        problem = "must be false beside train.rampup: means over microbatches need equal batches"
        yield _wrong("log.statistics", problem, True, "leave one of the two out")


def _validated_average_is_kept(
    train: TrainConfig, optimizer: OptimizerConfig
) -> Iterator[ConfigError]:
    if train.eval_ema and optimizer.ema_decay is None:
        problem = "needs optimizer.ema_decay: without it there is no average of the weights"
        yield _wrong("train.eval_ema", problem, True, "set optimizer.ema_decay, such as 0.999")


def _attention_is_deterministic_too(
    train: TrainConfig, kernels: KernelsConfig
) -> Iterator[ConfigError]:
    if train.deterministic and not kernels.deterministic_attention:
        problem = "must be true for train.deterministic: faster gradients differ"
        fix = "set it to true, or train.deterministic to false"
        yield _wrong("kernels.deterministic_attention", problem, False, fix)


def _validation_has_data(train: TrainConfig, data: DataConfig) -> Iterator[ConfigError]:
    if train.eval_every and not data.validation_fraction and not data.validation:
        problem = f"must be more than 0: train.eval_every = {train.eval_every} asks for validation"
        fix = "use 0.05, or set train.eval_every to 0"
        yield _wrong("data.validation_fraction", problem, data.validation_fraction, fix)


def _pattern_is_for_folders(data: DataConfig) -> Iterator[ConfigError]:
    if data.corpus == PYTHON_STDLIB and data.pattern is not None:
        problem = f"is only for a folder: {PYTHON_STDLIB} has its own files"
        yield _wrong("data.pattern", problem, data.pattern, "remove it, or name a data.corpus")


def _home_is_written_out(
    name: str, section: RunConfig | ModelConfig | DataConfig
) -> Iterator[ConfigError]:
    if (path := getattr(section, name.partition(".")[2]) or "").startswith("~"):
        problem = (
            "must be a path as it is: only a shell knows what ~ is, and at the start of a word"
        )
        yield _wrong(name, problem, path, f"write it out, as /home/NAME{path[1:]}")


def _steps_or_minutes(checkpoint: CheckpointConfig) -> Iterator[ConfigError]:
    if checkpoint.every is not None and checkpoint.every_minutes is not None:
        problem = f"cannot be set beside checkpoint.every = {checkpoint.every}"
        fix = "leave one of the two out, or set it to null"
        yield _wrong("checkpoint.every_minutes", problem, checkpoint.every_minutes, fix)


# What only rotary positions read, by default.
ROTARY_DEFAULTS = {
    "window_rotary_base": None,
    "rotary_fraction": 1.0,
    "rotary_scaling": None,
}


def _own_models_share_few_settings(model: ModelConfig) -> Iterator[ConfigError]:
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    for name in OF_TRANSFORMERS if model.module is not None else ():
        if (value := getattr(model, name)) != defaults[name]:
            problem = f"is for our own layers, not for those of model.module = {model.module}"
            is_section = isinstance(value, schema.Known) or dataclasses.is_dataclass(value)
            found = "a section" if is_section else value
            yield _wrong(f"model.{name}", problem, found, "leave it out")


def _own_sequences_are_whole(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if model.module is not None and (parallel.context or 1) > 1:
        problem = "must be 1 with model.module: your own layers read whole sequences"
        yield _wrong("parallel.context", problem, parallel.context, "use 1, or fsdp")


def _corpus_or_mixture(data: DataConfig) -> Iterator[ConfigError]:
    if data.mixture is None:
        if data.corpus == MIXTURE:
            fix = "add `corpus:` to section 'data', or `mixture:`, a list of corpora"
            yield _wrong("data.corpus", "is missing", "nothing", fix)
        if data.mixture_changes is not None:
            fix = "leave it out, or name the corpora in data.mixture"
            problem, found = "is only for a mixture", f"{len(data.mixture_changes)} changes"
            yield _wrong("data.mixture_changes", problem, found, fix)
        return
    if data.corpus != MIXTURE:
        problem, fix = "must be left out beside data.mixture", "add it to the list of the mixture"
        yield _wrong("data.corpus", problem, data.corpus, fix)
    for name, default in (("source", "text"), ("pattern", None)):
        if (value := getattr(data, name)) != default:
            fix = f"write {name}: {value} below each corpus of the mixture that has it"
            yield _wrong(f"data.{name}", "must be left out beside data.mixture", value, fix)


def _names_are_of_one(data: DataConfig) -> Iterator[ConfigError]:
    """No two corpora have the same name, and each corpus can be read as it is written."""
    seen = {"corpus"} if data.mixture is None else set()
    for setting, entries in (("mixture", data.mixture), ("validation", data.validation)):
        if entries == ():
            fix = "name a corpus, or leave it out"
            yield _wrong(f"data.{setting}", "must not be empty", "[]", fix)
        for number, entry in enumerate(entries or ()):
            where = f"data.{setting}[{number}]"
            if entry.name in seen:
                fix = "give each corpus and each validation set a name of its own"
                yield _wrong(f"{where}.name", "must be of one corpus alone", entry.name, fix)
            seen.add(entry.name)
            if entry.corpus.startswith("~"):
                problem = "must be a path as it is: only a shell knows what ~ is"
                yield _wrong(f"{where}.corpus", problem, entry.corpus, "write the whole path")
            if entry.source == "arrays":
                fix = "use files of tokens or text, or give all arrays in data.corpus"
                problem = "cannot be one of several: arrays are no sequences of tokens"
                yield _wrong(f"{where}.source", problem, entry.source, fix)
            if entry.corpus == PYTHON_STDLIB and entry.pattern is not None:
                problem = f"is only for a folder: {PYTHON_STDLIB} has its own files"
                yield _wrong(f"{where}.pattern", problem, entry.pattern, "remove it")


def _weights_are_of_the_mixture(data: DataConfig) -> Iterator[ConfigError]:
    if not data.mixture:
        return
    names = [entry.name for entry in data.mixture]
    if not any(entry.weight for entry in data.mixture):
        problem, fix = "must have a weight above 0", "give one corpus a weight"
        yield _wrong("data.mixture", problem, "all weights are 0", fix)
    before = 0
    for number, change in enumerate(data.mixture_changes or ()):
        where = f"data.mixture_changes[{number}]"
        if change.tokens <= before:
            problem = "must be after the change before it"
            fix = f"use more than {before:,}, and write the changes in their order"
            yield _wrong(f"{where}.tokens", problem, change.tokens, fix)
        before = change.tokens
        for name in change.weights:
            if name not in names:
                fix = schema.near(name, names)
                yield _wrong(f"{where}.weights", "names no corpus of the mixture", name, fix)
        if not any(change.weights.values()):
            problem, fix = "must have a weight above 0", "give one corpus a weight"
            yield _wrong(f"{where}.weights", problem, dict(change.weights), fix)


def _packs(data: DataConfig) -> bool:
    """Whether documents are packed into rows: all, or those of a source that always does it."""
    named = [*(data.mixture or (data,)), *(data.validation or ())]
    return data.packing is not None or any(SOURCES[each.source].packs for each in named)


def _packed_documents_are_apart(data: DataConfig) -> Iterator[ConfigError]:
    if _packs(data) and data.documents != "mask":
        problem = "must be mask where documents are packed: those of a row have nothing in common"
        fix = "use mask" + ("" if data.packing is None else ", or no data.packing")
        yield _wrong("data.documents", problem, data.documents, fix)
    if data.packing is not None and data.source == "arrays":
        problem, fix = "is for documents of tokens, and not for arrays", "leave it out"
        yield _wrong("data.packing", problem, data.packing, fix)


def _packed_documents_begin_at_0(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    if _packs(data) and model.positions == "learned":
        problem = "must be rotary where documents are packed: each begins at its own position 0"
        fix = "use rotary" + ("" if data.packing is None else ", or no data.packing")
        yield _wrong("model.positions", problem, model.positions, fix)


def _own_models_read_no_documents(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    if model.module is not None and data.documents == "mask":
        problem = "must be concatenate with model.module: only our own attention knows documents"
        yield _wrong("data.documents", problem, data.documents, "use concatenate")


def _of_transformers(check: Callable[..., Iterator[ConfigError]]) -> Callable[..., Any]:
    """A check that is for our own layers alone."""

    def run(model: ModelConfig, *others: Any) -> Iterator[ConfigError]:
        return check(model, *others) if model.module is None else iter(())

    return run


OF_TRANSFORMERS = (
    "tied_embeddings",
    "pattern",
    "window",
    "hf",
    "lora",
    "z_loss_multiplier",
    "fp8",
)  # they would change more than a layer
CUT_BY_TENSOR = ("num_heads", "num_kv_heads", "mlp_width", "vocab_size")
CHECKS |= {
    ("run",): (_cache_is_a_place, partial(_home_is_written_out, "run.dir")),
    ("train",): (
        _gradients_have_exponents,
        _profiled_steps_are_of_the_run,
        _rampup_grows,
    ),
    ("model",): (
        _of_transformers(_heads_share_width),
        _heads_share_keys,
        _of_transformers(_rotary_turns_pairs),
        _rotary_settings_are_for_rotary_positions,
        _rotary_scaling_is_whole,
        _of_transformers(_windows_have_a_width),
        _of_transformers(_lora_targets_are_there),
        _frozen_or_adapted,
        _fp8_is_for_whole_training,
        _own_models_share_few_settings,
        partial(_home_is_written_out, "model.hf"),
    ),
    ("parallel",): (
        _one_value_per_stage,
        _stages_of_a_cluster_are_neighbours,
        _every_chunk_has_a_layer,
        _chunks_are_for_interleaving,
        _split_backwards_compute_nothing_again,
    ),
    ("optimizer",): (
        _optimizer_is_possible,
        _muon_settings_are_for_muon,
        _function_is_for_optax,
        _decay_is_for_wsd,
    ),
    ("data",): (
        _corpus_or_mixture,
        _names_are_of_one,
        _weights_are_of_the_mixture,
        _packed_documents_are_apart,
        _pattern_is_for_folders,
        partial(_home_is_written_out, "data.corpus"),
        partial(_home_is_written_out, "data.tokenizer"),
    ),
    ("checkpoint",): (_steps_or_minutes,),
    ("model", "data"): (
        _vocabulary_holds_tokens,
        _own_models_read_no_documents,
        _packed_documents_begin_at_0,
    ),
    ("model", "parallel"): (
        _every_layer_is_placed,
        _every_stage_has_a_layer,
        *(_of_transformers(partial(_tensor_cuts_evenly, name)) for name in CUT_BY_TENSOR),
        _of_transformers(_width_cuts_evenly),
        _context_cuts_evenly,
        _own_sequences_are_whole,
    ),
    ("train", "parallel"): (_microbatches_are_equal,),
    ("train", "optimizer"): (_schedule_fits_run, _validated_average_is_kept),
    ("train", "log"): (_rampup_has_no_statistics,),
    ("train", "kernels"): (_attention_is_deterministic_too,),
    ("train", "data"): (_validation_has_data,),
}
