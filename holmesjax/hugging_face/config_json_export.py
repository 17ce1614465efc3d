"""Settings of a model as a config.json: the way back of `config_json`. No JAX."""

import dataclasses

from holmesjax.config import EXPERT_BLOCK, ModelConfig
from holmesjax.config.rotary import ORIGINAL
from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.hugging_face.config_families import FAMILIES, GATED, ROTATES_ALL, UNGATED
from holmesjax.hugging_face.config_json import (
    CONFIG,
    FULL,
    SLIDING,
    TYPES,
    ConfigJson,
    Json,
    shortest,
)
from holmesjax.layer_specs import latent_attention
from holmesjax.layer_specs.experts import expert_width

# Settings of experts that count in training alone.
OF_TRAINING = ("balance_loss", "router_z_loss", "capacity_factor", "bias_rate")


def write(model: ModelConfig, family: str, dtype: str) -> Json:
    """The config.json of a model as one of a family, with every key.

    Args:
      dtype: of the weights, such as bfloat16.

    Raises ConfigError if it does not mean the same model, read back.
    """
    rules = FAMILIES[family]
    values: Json = {"architectures": [rules.architecture], "model_type": family}
    values |= {"dtype": dtype, "torch_dtype": dtype}
    whole = canonical(model)
    for name, key in rules.keys.items():
        values[key] = whole[name]
    known = UNGATED if family == "gpt2" else GATED
    names = {setting: name for name, setting in reversed(known.items())}
    if model.activation not in names:
        problem, fix = f"has no name in the config.json of a {family}", f"use {' or '.join(names)}"
        raise ConfigError("model.activation", problem, found=model.activation, fix=fix)
    values[rules.keys["activation"]] = names[model.activation]
    values |= {key: allowed[0] for key, allowed in rules.computes.items() if key not in ROTATES_ALL}
    values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if rules.experts:
        values |= _experts(model, family)
    if "kv_lora_rank" in rules.defaults:
        values |= _latents(model, family)
    if "query_pre_attn_scalar" in rules.defaults:
        values["query_pre_attn_scalar"] = max(1, round(whole["attention_scale"] ** -2))
    if family != "gpt2":
        values |= _windows(model, family) | _rotary(model, family)
    read = ConfigJson(where=CONFIG, family=family, values=values)
    bias_rate = model.experts.bias_rate if model.experts and not model.experts.biased else 0.0
    _refuse_other_model(read, whole, family, bias_rate)
    return values


def _refuse_other_model(read: ConfigJson, whole: Json, family: str, bias_rate: float) -> None:
    """Raises ConfigError unless a config.json means the model for which it was written."""
    problem = f"has no meaning in the config.json of a {family}"
    fix = "export it as another family, or use a model that has the settings of one"
    try:
        back = canonical(ModelConfig(**read.settings()))
    except HolmesError as error:  # it lacks a setting that the others need
        first = error.mistakes[0] if isinstance(error, Mistakes) else error
        found = f"{first.where}: {first.problem}: {first.found}"
        raise ConfigError("the model", problem, found=found, fix=fix) from None
    for name, value in whole.items():
        if value != back.get(name):
            if name == "experts.biased" and bias_rate:  # of biases that steps make
                where = "model.experts.bias_rate"
                fix = f"use 0: experts of a {family} have no biases"
                raise ConfigError(where, problem, found=bias_rate, fix=fix)
            found = f"{value}, which reads back as {back.get(name)}"
            raise ConfigError(f"model.{name}", problem, found=found, fix=fix)


def canonical(model: ModelConfig) -> Json:
    """The settings of a model, alike for models that compute the same."""
    settings = dataclasses.asdict(model)
    del settings["hf"], settings["frozen"], settings["z_loss_multiplier"]  # of training alone
    settings["num_kv_heads"], settings["head_dim"] = model.kv_heads, model.head_width
    settings["mlp_width"] = model.feed_forward_width
    settings["attention_scale"] = model.attention_scale or model.head_width**-0.5
    turns = _layer_kinds(model)
    settings["pattern"] = tuple(shortest(turns))
    if model.window_rotary_base == model.rotary_base and model.rotary_scaling is None:
        settings["window_rotary_base"] = None
    if model.latent_attention is not None:
        settings["latent_attention"]["value_width"] = latent_attention.value_width(model)
    experts = settings.pop("experts")
    settings["experts"] = experts is not None
    if model.experts is not None:
        own = {name: value for name, value in experts.items() if name not in OF_TRAINING}
        own["width"] = expert_width(model)
        own["normalized"] = model.experts.normalized and model.experts.active > 1
        own["biased"] = model.experts.biased or model.experts.bias_rate > 0
        settings |= {f"experts.{name}": value for name, value in own.items()}
        if set(turns) == {EXPERT_BLOCK}:  # no layer has the other width
            settings["mlp_width"] = None
    return settings


def _layer_kinds(model: ModelConfig) -> list[str]:
    """The kind of each layer."""
    return [model.pattern[i % len(model.pattern)] for i in range(model.num_layers)]


def _experts(model: ModelConfig, family: str) -> Json:
    """The keys of experts. Raises ConfigError for a model without any."""
    if model.experts is None:
        problem, fix = f"is missing: a {family} has experts", "export it as another family"
        raise ConfigError("model.experts", problem, found="none", fix=fix)
    whole = canonical(model)
    found = {key: whole[f"experts.{name}"] for name, key in FAMILIES[family].experts.items()}
    if family == "mixtral":
        return found | {"intermediate_size": expert_width(model)}
    if family == "deepseek_v3":
        kinds, experts = _layer_kinds(model), model.experts
        first = kinds.index(EXPERT_BLOCK) if EXPERT_BLOCK in kinds else len(kinds)
        found |= {"first_k_dense_replace": first, "intermediate_size": model.feed_forward_width}
        found |= {"n_shared_experts": (experts.shared_width or 0) // expert_width(model)}
        return found | {"num_nextn_predict_layers": 0}
    dense = [i for i, kind in enumerate(_layer_kinds(model)) if kind != EXPERT_BLOCK]
    found |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return found | {"intermediate_size": model.feed_forward_width}


def _latents(model: ModelConfig, family: str) -> Json:
    """The keys of attention with latents. Raises ConfigError for a model without any."""
    if (own := model.latent_attention) is None:
        problem, fix = f"is missing: a {family} has latents", "export it as another family"
        raise ConfigError("model.latent_attention", problem, found="none", fix=fix)
    return {
        "kv_lora_rank": own.rank,
        "q_lora_rank": own.query_rank,
        "qk_rope_head_dim": own.rotary_width,
        "qk_nope_head_dim": model.head_width - own.rotary_width,
        "v_head_dim": latent_attention.value_width(model),
        "num_key_value_heads": model.num_heads,
    }


def _windows(model: ModelConfig, family: str) -> Json:
    """The keys of windows."""
    names = {kind: name for name, kind in TYPES.items()}
    types = [names.get(kind, kind) for kind in _layer_kinds(model)]
    rule = FAMILIES[family].windows
    if rule == "none":
        return {}
    if rule == "all":
        return {"sliding_window": model.window}
    found: Json = {"sliding_window": model.window, "layer_types": types}
    if family in ("qwen2", "qwen3"):
        has_windows = SLIDING in types
        found |= {"use_sliding_window": has_windows}
        found |= {"max_window_layers": types.index(SLIDING) if has_windows else model.num_layers}
    if family == "gemma3_text":
        turn = types.index(FULL) + 1 if FULL in types else model.num_layers + 1
        found |= {"sliding_window_pattern": turn}
    return found


def _rotary(model: ModelConfig, family: str) -> Json:
    """The keys of rotary positions, in both spellings."""
    scaling: Json = {"rope_type": "default"}
    if model.rotary_scaling is not None:
        section = dataclasses.asdict(model.rotary_scaling)
        scaling = {"rope_type": section.pop("type")}
        scaling |= {name: value for name, value in section.items() if value is not None}
    old = None if model.rotary_scaling is None else {**scaling, "type": scaling["rope_type"]}
    found: Json = {"rope_theta": model.rotary_base, "rope_scaling": old}
    parameters = {**scaling, "rope_theta": model.rotary_base}
    if family == "phi3":
        found["partial_rotary_factor"] = model.rotary_fraction
        parameters["partial_rotary_factor"] = model.rotary_fraction
        original = scaling.get(ORIGINAL, model.context_length)
        found[ORIGINAL] = original
    if family != "gemma3_text":
        return {**found, "rope_parameters": parameters}
    window = model.window_rotary_base or model.rotary_base
    nested = {FULL: parameters, SLIDING: {"rope_type": "default", "rope_theta": window}}
    return {**found, "rope_local_base_freq": window, "rope_parameters": nested}


def exported(model: ModelConfig, kept: ConfigJson | None, family: str, dtype: str) -> Json:
    """The config.json of an export.

    Keys of the folder from which the run came stay as they are, where the run has not changed what
    the model computes. A shorter context is no such change: the rotary positions are the same.

    Args:
      kept: of the folder from which the run came, if it came from one.
      family: of the export.
      dtype: of the weights.

    Raises ConfigError as `write` does.
    """
    written = write(model, family, dtype)
    if kept is None:
        return written
    # An export holds no codes, and no code.
    left = ("quantization_config", "auto_map")
    came = {key: value for key, value in kept.values.items() if key not in left}
    own = {key: value for key, value in came.items() if key.endswith("_token_id")}
    if kept.family != family:
        return {**written, **own}
    before = ModelConfig(**kept.settings())
    length = model.context_length
    if model.positions == "rotary":  # a shorter context is no other model
        length = max(length, before.context_length)
    if canonical(before) != canonical(dataclasses.replace(model, context_length=length)):
        return {**came, **written, **own}
    types: Json = {"dtype": dtype, "torch_dtype": dtype, "model_type": family}
    types["architectures"] = written["architectures"]
    if "num_nextn_predict_layers" in written:  # layers that are not imported
        types["num_nextn_predict_layers"] = 0
    return {**write(before, family, dtype), **came, **types}


def family_of(model: ModelConfig) -> str:
    """The first family of which a config.json can mean the model. Raises ConfigError for none."""
    families: dict[str, list[str]] = {}  # that have no such model, by the reason
    for family in FAMILIES:
        try:
            write(model, family, "float32")
        except ConfigError as error:
            families.setdefault(f"{error.where} {error.found}", []).append(family)
        else:
            return family
    problem = "is a model of none of the families that have a format of Hugging Face"
    fix = f"use the settings of one of {', '.join(FAMILIES)}"
    found = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in families.items())
    raise ConfigError("model", problem, found=found, fix=fix)
