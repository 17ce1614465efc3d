"""Rules of steps, batches, the optimizer and its learning rate."""

import itertools
from collections.abc import Iterator

from holmesjax.config.data_sections import DataConfig
from holmesjax.config.mistakes import wrong
from holmesjax.config.model_sections import ModelConfig
from holmesjax.config.sections import KernelsConfig, ParallelConfig
from holmesjax.config.training_sections import OptimizerConfig, TrainConfig
from holmesjax.config.update_rules import RATE_SCHEDULES, RULES
from holmesjax.errors import ConfigError
from kernels.attention.choice import HALF_PRECISION


def decay_keeps_signs(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    """A step takes rate * weight_decay of a parameter away; more than all of it turns its sign."""
    own = {"optimizer": (optimizer.learning_rate, optimizer.weight_decay)}
    for number, group in enumerate(optimizer.groups):
        rate, decay = group.learning_rate, group.weight_decay
        own[f"optimizer.groups[{number}]"] = (
            optimizer.learning_rate if rate is None else rate,
            optimizer.weight_decay if decay is None else decay,
        )
    for where, (rate, decay) in own.items():
        if rate * decay > 1:
            problem = f"times the learning rate {rate:g} must be at most 1: a step takes that share"
            problem += " of a parameter away"
            yield wrong(f"{where}.weight_decay", problem, decay, f"use {1 / rate:g} or less")


def function_is_for_optax(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    is_own, where = RULES[optimizer.name].takes_function, "optimizer.function"
    if is_own and optimizer.function is None:
        fix = "name a function of the section `optimizer` that gives a transformation of optax"
        yield wrong(where, f"is missing: {optimizer.name} needs it", "nothing", fix)


def schedule_has_one_unit(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    unit = optimizer.schedule_by
    other = "steps" if unit == "tokens" else "tokens"
    for name in ("warmup", "decay"):
        if found := getattr(optimizer, f"{name}_{other}"):
            where, problem = f"optimizer.{name}_{other}", f"is only for a schedule by {other}"
            fix = f"give optimizer.{name}_{unit}, or set optimizer.schedule_by to {other}"
            yield wrong(where, problem, found, fix)


def decay_is_for_schedules_with_one(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    has_decay, unit = RATE_SCHEDULES[optimizer.schedule].has_decay, optimizer.schedule_by
    where, decay = f"optimizer.decay_{unit}", getattr(optimizer, f"decay_{unit}")
    if has_decay and decay is None:
        fix = f"add the number of {unit} at the end in which the learning rate falls"
        problem = f"is missing: schedule {optimizer.schedule} needs it"
        yield wrong(where, problem, "nothing", fix)
    if not has_decay and decay is not None:
        names = " or ".join(
            name for name, rate_schedule in RATE_SCHEDULES.items() if rate_schedule.has_decay
        )
        fix = f"remove it, or set optimizer.schedule to {names}"
        problem = f"is only for schedule {names}, not for {optimizer.schedule}"
        yield wrong(where, problem, decay, fix)


def schedule_fits_run(
    train: TrainConfig, model: ModelConfig, optimizer: OptimizerConfig
) -> Iterator[ConfigError]:
    """A warm-up may outlast a short run, but stable steps and a decay have to fit behind it."""
    unit, whole, total = optimizer.schedule_by, "train.steps", train.steps
    if unit == "tokens":
        whole = "the tokens of the run"
        # The function of the class: what stands for a section has only its settings.
        total = TrainConfig.sequences_after(train, train.steps) * model.context_length
    warmup = getattr(optimizer, f"warmup_{unit}") or 0
    decay = getattr(optimizer, f"decay_{unit}") or 0
    if RATE_SCHEDULES[optimizer.schedule].has_decay and warmup + decay > total:
        problem = f"warmup_{unit} + decay_{unit} must be at most {whole} = {total}"
        found = f"{warmup} + {decay} = {warmup + decay}"
        fix = f"use {total - warmup} or less, or more steps" if warmup < total else "use more steps"
        yield wrong(f"optimizer.decay_{unit}", problem, found, fix)


def profiled_steps_are_of_the_run(train: TrainConfig) -> Iterator[ConfigError]:
    if train.profile_steps and max(train.profile_steps) > train.steps:
        problem = f"must each be at most train.steps = {train.steps}"
        fix = "use earlier steps, or more train.steps"
        yield wrong("train.profile_steps", problem, list(train.profile_steps), fix)


def gradients_have_exponents(train: TrainConfig) -> Iterator[ConfigError]:
    fix = "use bfloat16, which has the exponents of float32"
    if train.compute_dtype == "float16":
        problem = (
            "must not be float16: its least number is 6e-8 and its largest 65504, so gradients "
            "vanish and sums overflow, and no step scales its loss"
        )
        yield wrong("train.compute_dtype", problem, train.compute_dtype, fix)
    if train.param_dtype == "float16":
        problem = (
            "must not be float16: a parameter or a change below 6e-8 would become zero, and one "
            "above 65504 infinite"
        )
        yield wrong("train.param_dtype", problem, train.param_dtype, fix)


def gradients_cross_as_they_are(train: TrainConfig) -> Iterator[ConfigError]:
    if train.reduction_dtype == "bfloat16" and train.compute_dtype == "float32":
        problem = "must not round gradients more than train.compute_dtype rounds products, float32"
        fix = "use float32, or set train.compute_dtype to bfloat16"
        yield wrong("train.reduction_dtype", problem, train.reduction_dtype, fix)


def rounded_gradients_cross(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if train.reduction_dtype == "bfloat16" and parallel.data == 1:
        problem = "is of gradients that cross `data`, and parallel.data is 1: none do"
        fix = "use float32, or more replicas, or leave parallel.data to the planner"
        yield wrong("train.reduction_dtype", problem, train.reduction_dtype, fix)


def rampup_grows(train: TrainConfig) -> Iterator[ConfigError]:
    sizes = [part.global_batch for part in train.rampup] + [train.global_batch]
    for number, (size, following) in enumerate(itertools.pairwise(sizes)):
        if size >= following:
            where, problem = f"train.rampup[{number}].global_batch", "must be below the next batch"
            yield wrong(where, f"{problem}, of {following}", size, f"use {following - 1} or less")


def validated_average_is_kept(
    train: TrainConfig, optimizer: OptimizerConfig
) -> Iterator[ConfigError]:
    if train.eval_ema and optimizer.ema_decay is None:
        problem = "needs optimizer.ema_decay: without it there is no average of the weights"
        yield wrong("train.eval_ema", problem, True, "set optimizer.ema_decay, such as 0.999")


def kernel_has_adamw(
    train: TrainConfig, optimizer: OptimizerConfig, kernels: KernelsConfig
) -> Iterator[ConfigError]:
    if kernels.optimizer != "pallas":
        return
    if not RULES[optimizer.name].has_adamw:
        problem = f"has only the kernel of AdamW's step, which {optimizer.name} does not take"
        fix = "use auto, or the optimizer adamw or muon"
        yield wrong("kernels.optimizer", problem, "pallas", fix)


def attention_is_deterministic_too(
    train: TrainConfig, kernels: KernelsConfig
) -> Iterator[ConfigError]:
    if train.deterministic and not kernels.deterministic_attention:
        problem = "must be true for train.deterministic: without it two runs differ"
        fix = "set it to true, or train.deterministic to false"
        yield wrong("kernels.deterministic_attention", problem, False, fix)


def experts_lie_still(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if train.deterministic and parallel.expert_placement == "load":
        problem = "must be number for train.deterministic: else the moments of saves change sums"
        fix = "use number, or set train.deterministic to false"
        yield wrong("parallel.expert_placement", problem, "load", fix)


def kernels_have_experts(kernels: KernelsConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if kernels.experts == "pallas" and model.experts is None:
        yield wrong("kernels.experts", "is for a model with experts", "pallas", "leave it out")


def cudnn_computes_as_trained(train: TrainConfig, kernels: KernelsConfig) -> Iterator[ConfigError]:
    if train.compute_dtype not in HALF_PRECISION:
        fix = "set train.compute_dtype to bfloat16"
        yield from _cudnn_lacks(kernels, train.compute_dtype, "train.compute_dtype", fix)
    if kernels.deterministic_attention:
        what, name = "gradients of the same bits each time", "kernels.deterministic_attention"
        yield from _cudnn_lacks(kernels, what, name, f"set {name} to false")


def cudnn_joins_documents(data: DataConfig, kernels: KernelsConfig) -> Iterator[ConfigError]:
    if data.documents == "mask":
        fix = "set data.documents to concatenate"
        yield from _cudnn_lacks(kernels, "documents", "data.documents", fix)


def cudnn_caps_no_scores(kernels: KernelsConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if model.attention_soft_cap is not None:
        name = "model.attention_soft_cap"
        yield from _cudnn_lacks(kernels, "soft cap of scores", name, f"leave {name} out")


def _cudnn_lacks(kernels: KernelsConfig, what: str, name: str, fix: str) -> Iterator[ConfigError]:
    if kernels.attention == "cudnn":
        problem = f"cudnn has no {what}, which {name} asks for"
        yield wrong("kernels.attention", problem, kernels.attention, f"use auto, or {fix}")


def cudnn_has_gradients(kernels: KernelsConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if kernels.attention == "cudnn" and model.context_length % 2:
        problem = (
            f"cudnn has no gradients for an odd model.context_length, {model.context_length}: JAX "
            "takes the bias that attention does not have for one"
        )
        fix = f"use auto, which adds a token, or {model.context_length + 1} tokens"
        yield wrong("kernels.attention", problem, kernels.attention, fix)
