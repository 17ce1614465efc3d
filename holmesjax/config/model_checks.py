"""Rules between the settings of a model."""

import dataclasses
import math
from collections.abc import Iterator

from holmesjax.config.mistakes import multiples, wrong
from holmesjax.config.model_sections import (
    ALL_LINEAR,
    EXPERT_BLOCK,
    GATED,
    LORA_TARGETS,
    WINDOW_BLOCK,
    Fp8Config,
    ModelConfig,
    RotaryScalingConfig,
)
from holmesjax.config.rotary import SCALINGS
from holmesjax.errors import ConfigError
from holmesjax.files import schema, yaml_files


def heads_share_width(model: ModelConfig) -> Iterator[ConfigError]:
    if model.head_dim is None and model.width % model.num_heads:
        problem = f"must be a multiple of model.num_heads = {model.num_heads}"
        fix = f"use {multiples(model.width, model.num_heads)}, or set model.head_dim"
        yield wrong("model.width", problem, model.width, fix)


def heads_share_keys(model: ModelConfig) -> Iterator[ConfigError]:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if kv_heads is not None and heads % kv_heads:
        problem = f"must divide model.num_heads = {heads}: {heads} / {kv_heads} is not whole"
        fix = f"use {math.gcd(heads, kv_heads)}, or change model.num_heads"
        yield wrong("model.num_kv_heads", problem, kv_heads, fix)


def rotary_turns_pairs(model: ModelConfig) -> Iterator[ConfigError]:
    problem = "must be even for rotary positions, which turn pairs of numbers"
    if model.positions != "rotary":
        return
    if model.head_dim is not None:
        if model.head_dim % 2:
            yield wrong("model.head_dim", problem, model.head_dim, f"use {model.head_dim + 1}")
    elif (head_width := model.width // model.num_heads) % 2 and not model.width % model.num_heads:
        found = f"width / num_heads = {model.width} / {model.num_heads} = {head_width}"
        fix = f"use model.width = {(head_width + 1) * model.num_heads}, or positions: learned"
        yield wrong("model.width", f"the width of a head {problem}", found, fix)


# What only rotary positions read, by default.
ROTARY_DEFAULTS = {
    "window_rotary_base": None,
    "rotary_fraction": 1.0,
    "rotary_scaling": None,
}


def rotary_settings_are_for_rotary_positions(model: ModelConfig) -> Iterator[ConfigError]:
    if model.positions != "rotary":
        for name, default in ROTARY_DEFAULTS.items():
            if (value := getattr(model, name)) != default:
                problem = f"is only for rotary positions, not for {model.positions} ones"
                fix = "remove it, or set model.positions to rotary"
                yield wrong(f"model.{name}", problem, yaml_files.shown(value), fix)
        return
    head_width = model.head_dim or model.width // model.num_heads
    turning = int(head_width * model.rotary_fraction)
    if model.rotary_fraction < 1 and (turning % 2 or not turning):
        problem = f"must leave an even number of a head's {head_width} numbers to turn"
        found = f"{model.rotary_fraction}: {turning} of {head_width}"
        fix = f"use {max(2, turning + turning % 2) / head_width:g}"
        yield wrong("model.rotary_fraction", problem, found, fix)
    if model.window_rotary_base is not None and WINDOW_BLOCK not in model.pattern:
        problem = f"is only for layers of the kind {WINDOW_BLOCK}"
        fix = f"remove it, or add {WINDOW_BLOCK} to model.pattern"
        yield wrong("model.window_rotary_base", problem, model.window_rotary_base, fix)


def rotary_scaling_is_whole(model: ModelConfig) -> Iterator[ConfigError]:
    if (scaling := model.rotary_scaling) is None:
        return
    where, rule = "model.rotary_scaling", SCALINGS[scaling.type]
    if rule.refused:
        fix = f"use one of {', '.join(n for n, other in SCALINGS.items() if not other.refused)}"
        yield wrong(f"{where}.type", rule.refused, scaling.type, fix)
        return
    for name in (field.name for field in dataclasses.fields(RotaryScalingConfig)[1:]):
        value = getattr(scaling, name)
        if value is None and name in rule.needs:
            problem, fix = f"is missing: type {scaling.type} needs it", "copy it from config.json"
            yield wrong(f"{where}.{name}", problem, "nothing", fix)
        if value is not None and name not in rule.needs + rule.takes:
            types = [n for n, other in SCALINGS.items() if name in other.needs + other.takes]
            problem = f"is only for type {' or '.join(types)}, not for {scaling.type}"
            yield wrong(f"{where}.{name}", problem, yaml_files.shown(value), "remove it")
    yield from _turns_are_in_order(scaling)
    pairs = int((model.head_dim or model.width // model.num_heads) * model.rotary_fraction) // 2
    if model.latent_attention is not None:
        pairs = model.latent_attention.rotary_width // 2
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and scaling.type == "longrope" and len(factors) != pairs:
            problem = f"must have one number for each of the {pairs} pairs of a head that turn"
            found = f"{len(factors)} numbers"
            yield wrong(f"{where}.{name}", problem, found, f"give {pairs} numbers")


def _turns_are_in_order(scaling: RotaryScalingConfig) -> Iterator[ConfigError]:
    where = "model.rotary_scaling"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        problem, fix = f"must be more than low_freq_factor = {low}", "use 1.0 and 4.0, as Llama 3.1"
        yield wrong(f"{where}.high_freq_factor", problem, high, fix)
    fast, slow = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0
    if fast <= slow:
        problem = f"must be more than beta_slow = {slow}"
        yield wrong(f"{where}.beta_fast", problem, fast, "use 32.0 and 1.0, or leave both out")
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        given, other = "mscale", "mscale_all_dim"
        if scaling.mscale is None:
            given, other = other, given
        fix = f"add {other}, or remove {given}"
        yield wrong(f"{where}.{given}", f"counts only beside {other}", getattr(scaling, given), fix)


def windows_have_a_width(model: ModelConfig) -> Iterator[ConfigError]:
    if WINDOW_BLOCK in model.pattern and model.window is None:
        problem, fix = f"is missing: {WINDOW_BLOCK} needs it", "add the keys that a query sees"
        yield wrong("model.window", problem, "nothing", fix)
    if model.window is not None and set(model.pattern) <= {"block"}:
        problem = f"is only for layers of the kind {WINDOW_BLOCK}"
        fix = f"remove it, or add {WINDOW_BLOCK} to model.pattern"
        yield wrong("model.window", problem, model.window, fix)


def experts_are_whole(model: ModelConfig) -> Iterator[ConfigError]:
    experts = model.experts
    if experts is None:
        if EXPERT_BLOCK in model.pattern:
            problem, fix = f"is missing: {EXPERT_BLOCK} needs it", "add count and active"
            yield wrong("model.experts", problem, "nothing", fix)
        return
    if EXPERT_BLOCK not in model.pattern:
        problem = f"is only for layers of the kind {EXPERT_BLOCK}"
        fix = f"remove it, or add {EXPERT_BLOCK} to model.pattern"
        yield wrong("model.experts", problem, "a section", fix)
    if model.biases == "all":
        problem = f"must be none or qkv for layers of the kind {EXPERT_BLOCK}"
        yield wrong("model.biases", problem, model.biases, "use qkv")
    if experts.count % experts.groups:
        problem = f"must divide model.experts.count = {experts.count}"
        fix = f"use {math.gcd(experts.count, experts.groups)}"
        yield wrong("model.experts.groups", problem, experts.groups, fix)
        return
    if experts.active_groups > experts.groups:
        problem = f"must be at most model.experts.groups = {experts.groups}"
        fix = f"use {experts.groups}"
        yield wrong("model.experts.active_groups", problem, experts.active_groups, fix)
        return
    each = experts.count // experts.groups
    if experts.groups > 1 and each < 2:
        problem = "must leave two experts in each group, by which groups are chosen"
        fix = f"use {max(1, experts.count // 2)} or fewer"
        yield wrong("model.experts.groups", problem, experts.groups, fix)
    if experts.active > each * experts.active_groups:
        where = "model.experts.count" if experts.groups == 1 else "the groups that a token chooses"
        problem = f"must be at most the {each * experts.active_groups} experts of {where}"
        fix = f"use {each * experts.active_groups}"
        yield wrong("model.experts.active", problem, experts.active, fix)


def latents_are_whole(model: ModelConfig) -> Iterator[ConfigError]:
    if (own := model.latent_attention) is None:
        return
    if model.head_dim is None:
        problem = "is missing: model.latent_attention needs the width of queries and keys"
        yield wrong("model.head_dim", problem, "nothing", "add it, its part that turns included")
        return
    where, most = "model.latent_attention", model.head_dim
    if own.rotary_width % 2 or own.rotary_width >= most:
        problem = f"must be even and below model.head_dim = {most}"
        yield wrong(f"{where}.rotary_width", problem, own.rotary_width, f"use {most // 4 * 2}")
    if own.value_width is not None and own.value_width > most:
        problem = f"must be at most model.head_dim = {most}"
        yield wrong(f"{where}.value_width", problem, own.value_width, f"use {most}")
    plain = {"positions": "rotary", "rotary_fraction": 1.0, "qk_norm": "none", "biases": "none"}
    plain |= {"num_kv_heads": model.num_kv_heads and model.num_heads}
    for name, value in plain.items():
        if (found := getattr(model, name)) != value:
            problem = f"must be {value} with {where}"
            yield wrong(f"model.{name}", problem, found, f"use {value}")
    for name in ("lora", "fp8"):
        if getattr(model, name) is not None:
            problem = f"cannot be set beside {where}, whose products have neither adapters nor fp8"
            yield wrong(f"model.{name}", problem, "both", "leave one of the two out")


def lora_targets_are_there(model: ModelConfig) -> Iterator[ConfigError]:
    if (lora := model.lora) is None:
        return
    where, found = "model.lora.targets", list(lora.targets)
    weights = [name for target in lora.targets for group in LORA_TARGETS[target] for name in group]
    if twice := sorted({name for name in weights if weights.count(name) > 1}):
        problem = f"must name each weight once: {', '.join(twice)} would have two adapters"
        yield wrong(where, problem, found, "leave one of the two names out")
    if "gate" in weights and ALL_LINEAR not in lora.targets and model.activation not in GATED:
        problem = f"must be weights of the model: a {model.activation} has no gate"
        yield wrong(where, problem, found, f"leave the gate out, or use {' or '.join(GATED)}")


def frozen_or_adapted(model: ModelConfig) -> Iterator[ConfigError]:
    if model.lora is not None and model.frozen:
        problem = "cannot be set beside model.lora, with which nothing but adapters trains"
        yield wrong("model.frozen", problem, list(model.frozen), "leave one of the two out")


def fp8_is_for_whole_training(model: ModelConfig) -> Iterator[ConfigError]:
    if model.fp8 is None:
        return
    for name in ("lora", "frozen"):
        if getattr(model, name):
            problem = f"cannot be set beside model.{name}: frozen weights have no products in fp8"
            yield wrong("model.fp8", problem, "both", "leave one of the two out")
    if model.fp8.scaling == "current" and model.fp8.history != Fp8Config().history:
        problem = "is only for scaling delayed: a current scale reads no earlier step"
        fix = "remove it, or set model.fp8.scaling to delayed"
        yield wrong("model.fp8.history", problem, model.fp8.history, fix)
    first, last = model.fp8.exclude_first, model.fp8.exclude_last
    if first + last >= model.num_layers:
        where = "model.fp8.exclude_first" if first else "model.fp8.exclude_last"
        others = f", with exclude_last = {last}" if first else ""
        problem = f"leaves none of model.num_layers = {model.num_layers} blocks in fp8{others}"
        yield wrong(where, problem, first or last, "exclude fewer, or leave model.fp8 out")


OF_TRANSFORMERS = (
    "pattern",
    "experts",
    "latent_attention",
    "window",
    "hf",
    "lora",
    "z_loss_multiplier",
    "fp8",
)  # they would change more than a layer


def own_models_share_few_settings(model: ModelConfig) -> Iterator[ConfigError]:
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    for name in OF_TRANSFORMERS if model.module is not None else ():
        if (value := getattr(model, name)) != defaults[name]:
            problem = (
                f"is for the built-in layers, not for the layers of model.module = {model.module}"
            )
            is_section = isinstance(value, schema.Known) or dataclasses.is_dataclass(value)
            found = "a section" if is_section else value
            yield wrong(f"model.{name}", problem, found, "leave it out")
