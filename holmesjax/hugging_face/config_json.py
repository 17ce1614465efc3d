"""A config.json as settings of a model; `config_json_export` is the way back. No JAX.

    {"model_type": "qwen3", "hidden_size": 1024, ..}  <->  {"width": 1024, "qk_norm": "head", ..}

A key that is absent means the default of the family's class in `transformers`, which is seldom the
value of a published model. So every key is written. A value that we cannot compute is refused.
Rotary positions are read and written in both of their spellings, the older of which has
`rope_theta` and `rope_scaling`, the newer `rope_parameters`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmesjax.config import WINDOW_BLOCK
from holmesjax.config.rotary import ORIGINAL, SCALINGS
from holmesjax.errors import CheckpointError, ConfigError
from holmesjax.hugging_face import json_file

CONFIG = "config.json"
Json = dict[str, Any]
MAX_LAYERS = 2**14  # as `ModelConfig` has it, before a list of them is made
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = {FULL: "block", SLIDING: WINDOW_BLOCK}

# Setting -> key, of a Llama and those like it, and of GPT-2.
LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
GEMMA_KEYS = {
    **LLAMA_KEYS,
    "activation": "hidden_activation",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
GPT2_KEYS = {
    "num_layers": "n_layer",
    "width": "n_embd",
    "num_heads": "n_head",
    "mlp_width": "n_inner",
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "activation_function",
}
# A value of theirs -> ours, and the value that is written.
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
UNGATED = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}

INTEGERS = (
    *("num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "vocab_size"),
    "context_length",
)
MAY_BE_NULL = ("num_kv_heads", "head_dim", "mlp_width", "attention_soft_cap", "logit_soft_cap")

# Keys with the values that we can compute, of all families and of some.
ANY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}
NO_BIAS = {"attention_bias": (False, None)}
ROTATES_ALL = {"partial_rotary_factor": (1, 1.0, None)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The meaning of a config.json of one `model_type`."""

    architecture: str
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    defaults: Mapping[str, Any]  # of keys that are absent
    settings: Mapping[str, Any]  # that all models of the family have
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # besides `ANY`
    # Which layers have a window: none, all where there is a window, or those in a list.
    windows: str = "none"


RMS = {"norm": "rms_norm"}
_llama = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    **{"head_dim": None, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10_000.0},
}
_qwen2 = {
    **_llama,
    **{"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
    **{"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096},
    **{"max_window_layers": 28},
}
_gemma2 = {
    **{key: value for key, value in _llama.items() if key != "hidden_act"},
    **{"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    **{"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    **{"query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0},
}
_gemma = {**RMS, "norms": "both", "zero_centered_norms": True, "scaled_embedding": True}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys=GPT2_KEYS,
        defaults={
            **{"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
            **{"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            **{"activation_function": "gelu_new"},
        },
        settings={"norm": "layer_norm", "positions": "learned", "biases": "all"},
        computes={
            "scale_attn_by_inverse_layer_idx": (False, None),
            "reorder_and_upcast_attn": (False, None),
            "scale_attn_weights": (True,),
        },
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=_llama,
        settings=RMS,
        computes={**NO_BIAS, **ROTATES_ALL, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={
            **_llama,
            **{"intermediate_size": 14336, "num_key_value_heads": 8},
            **{"max_position_embeddings": 131072, "sliding_window": 4096},
        },
        settings=RMS,
        computes={**NO_BIAS, **ROTATES_ALL},
        windows="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=_qwen2,
        settings={**RMS, "biases": "qkv"},
        computes=ROTATES_ALL,
        windows="listed",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={**_qwen2, "head_dim": 128},
        settings={**RMS, "qk_norm": "head"},
        computes={**NO_BIAS, **ROTATES_ALL},
        windows="listed",
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        keys=GEMMA_KEYS,
        defaults={**_gemma2, "attn_logit_softcapping": 50.0},
        settings=_gemma,
        computes={**NO_BIAS, **ROTATES_ALL, "use_bidirectional_attention": (False, None)},
        windows="listed",
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        # The class reads a cap of scores and never uses it.
        keys={key: x for key, x in GEMMA_KEYS.items() if key != "attention_soft_cap"},
        defaults={
            **_gemma2,
            **{"vocab_size": 262208, "max_position_embeddings": 131072},
            **{"final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        },
        settings={**_gemma, "qk_norm": "head"},
        computes={**NO_BIAS, **ROTATES_ALL, "use_bidirectional_attention": (False, None)},
        windows="listed",
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        defaults={**_llama, "vocab_size": 50304, "rms_norm_eps": 1e-5},
        settings={**RMS, "norms": "after", "qk_norm": "all_heads"},
        computes={**NO_BIAS, **ROTATES_ALL},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            **_llama,
            **{"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
            **{ORIGINAL: 4096, "partial_rotary_factor": 1.0},
        },
        settings=RMS,
        computes=NO_BIAS,
        windows="all",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """The config.json of one text model, with the defaults of its family."""

    where: str  # the file, for messages
    family: str
    values: Json

    @classmethod
    def load(cls, folder: Path) -> "ConfigJson":
        """Reads the file in a folder. Raises HolmesError for what is no model that we know."""
        path = folder / CONFIG
        values = json_file.read(path)
        family = values.get("model_type")
        if family == "gemma3":  # with images; its text model is a Gemma 3
            text = values.get("text_config")
            if not isinstance(text, dict):
                problem, fix = "must be an object for model_type gemma3", "download it again"
                found = json_file.shown(text)
                raise CheckpointError(f"{path}: text_config", problem, found=found, fix=fix)
            ids = {key: x for key, x in values.items() if key.endswith("_token_id")}
            family, values = "gemma3_text", {**ids, **text}
        if not isinstance(family, str) or family not in FAMILIES:
            problem = "is of a family that is not supported"
            fix = f"use a model of one of the families {', '.join(FAMILIES)}"
            found = json_file.shown(family)
            raise ConfigError(f"{path}: model_type", problem, found=found, fix=fix)
        return cls(where=str(path), family=family, values=values)

    @property
    def rules(self) -> Family:
        return FAMILIES[self.family]

    def get(self, key: str) -> Any:
        return self.values.get(key, self.rules.defaults.get(key))

    def refusal(self, key: str, problem: str, found: object, fix: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key}", problem, found=json_file.shown(found), fix=fix)

    def number(self, key: str, value: Any, kind: type = float) -> Any:
        """A value, checked to be a number above 0, or a whole one."""
        allowed = (int,) if kind is int else (int, float)
        if type(value) not in allowed or not 0 < value < float("inf"):
            problem = f"must be a {'whole ' if kind is int else ''}number above 0"
            raise self.refusal(key, problem, value, "download config.json again")
        return kind(value)

    def settings(self) -> dict[str, Any]:
        """The settings of `model` that it means. Raises ConfigError for what we cannot compute."""
        rules = self.rules
        for key, values in {**ANY, **rules.computes}.items():
            if (found := self.values.get(key, values[0])) not in values:
                problem = f"has a value that is not supported for a {self.family}"
                fix = f"use a model in which it is {json_file.shown(values[0])}"
                raise self.refusal(key, problem, found, fix)
        settings: dict[str, Any] = dict(rules.settings)
        for name, key in rules.keys.items():
            settings[name] = self._setting(name, key)
        if settings["num_layers"] > MAX_LAYERS:
            problem, found = f"must be at most {MAX_LAYERS}", settings["num_layers"]
            raise self.refusal(
                rules.keys["num_layers"],
                problem,
                found,
                "check that it is the config.json of a model",
            )
        if "query_pre_attn_scalar" in rules.defaults:
            key = "query_pre_attn_scalar"
            settings["attention_scale"] = self.number(key, self.get(key)) ** -0.5
        windowed = self._windows(settings["num_layers"])
        if any(windowed):
            settings["window"] = self.number("sliding_window", self.get("sliding_window"), int)
            settings["pattern"] = shortest([TYPES[SLIDING if x else FULL] for x in windowed])
        if settings.get("positions") != "learned":
            settings |= self._rotary(any(windowed), settings)
        return settings

    def _setting(self, name: str, key: str) -> Any:
        value = self.get(key)
        if name == "activation":
            known = UNGATED if self.family == "gpt2" else GATED
            if not isinstance(value, str) or value not in known:
                problem = f"names a function that is not supported for a {self.family}"
                raise self.refusal(key, problem, value, f"use {' or '.join(known)}")
            return known[value]
        if name == "tied_embeddings":
            if not isinstance(value, bool):
                raise self.refusal(key, "must be true or false", value, "download it again")
            return value
        if value is None and name in MAY_BE_NULL:
            return None
        return self.number(key, value, int if name in INTEGERS else float)

    def _windows(self, num_layers: int) -> list[bool]:
        """Whether each layer has a window."""
        types = self.values.get("layer_types")
        if types is not None and (
            not isinstance(types, list)
            or len(types) != num_layers
            or not all(isinstance(x, str) and x in TYPES for x in types)
        ):
            problem = f"must have {FULL} or {SLIDING} for each of {num_layers} layers"
            raise self.refusal("layer_types", problem, types, "download config.json again")
        expected = self._windows_of_rule(num_layers)
        if types is None:
            return expected
        found = [x == SLIDING for x in types]
        may_differ = self.rules.windows == "listed" and (
            self.get("use_sliding_window") is not False or not any(found)
        )
        if found != expected and not may_differ:
            problem = f"contradicts the other keys of a {self.family}"
            raise self.refusal("layer_types", problem, types, "remove it")
        return found

    def _windows_of_rule(self, num_layers: int) -> list[bool]:
        """Whether each layer has a window, in a file without `layer_types`."""
        layers = range(num_layers)
        if self.rules.windows == "none":
            return [False for _ in layers]
        if self.rules.windows == "all":
            return [self.get("sliding_window") is not None for _ in layers]
        if self.family == "gemma2":
            return [i % 2 == 0 for i in layers]
        if self.family == "gemma3_text":
            key = "sliding_window_pattern"
            turn = self.number(key, self.values.get(key, self.values.get(f"_{key}", 6)), int)
            return [(i + 1) % turn != 0 for i in layers]
        if not self.get("use_sliding_window") or self.get("sliding_window") is None:
            return [False for _ in layers]
        first = self.get("max_window_layers")
        if type(first) is not int or first < 0:
            problem = "must be a whole number"
            raise self.refusal("max_window_layers", problem, first, "download config.json again")
        return [i >= first for i in layers]

    # ---- rotary positions ------------------------------------------------------------------------

    def _rotary(self, has_windows: bool, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of rotary positions."""
        both, scaling = self._section("rope_parameters"), self._section("rope_scaling")
        key = "rope_scaling" if scaling else "rope_parameters"
        found: dict[str, Any] = {}
        if self.family == "gemma3_text":
            window = {}
            if FULL in both or SLIDING in both:
                window, both = self._inner(both, SLIDING), self._inner(both, FULL)
            if (kind := _type_of(window)) != "default":
                problem = "scales the positions of window layers, which is not supported"
                raise self.refusal(f"rope_parameters.{SLIDING}", problem, kind, "use default")
            base = window.get("rope_theta", self.get("rope_local_base_freq"))
            if has_windows:
                found["window_rotary_base"] = self.number("rope_local_base_freq", base)
        full = scaling or both
        theta = full.get("rope_theta", both.get("rope_theta", self.get("rope_theta")))
        found["rotary_base"] = self.number("rope_theta", theta)
        share = full.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        if share not in (None, 1):
            if self.family != "phi3":
                problem = f"has a value that is not supported for a {self.family}"
                raise self.refusal(f"{key}.partial_rotary_factor", problem, share, "use 1.0")
            found["rotary_fraction"] = self.number("partial_rotary_factor", share)
        kind = _type_of(full)
        if kind != "default":
            found["rotary_scaling"] = self._scaling(key, kind, full, settings["context_length"])
        return found

    def _section(self, key: str) -> Json:
        return self._object(key, self.values.get(key))

    def _inner(self, section: Json, key: str) -> Json:
        return self._object(f"rope_parameters.{key}", section.get(key))

    def _object(self, key: str, value: Any) -> Json:
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "must be an object", value, "download config.json again")
        return value or {}

    def _scaling(self, key: str, kind: object, section: Json, context: int) -> Json:
        """The section `rotary_scaling`; its own check says what is missing in it."""
        rule = SCALINGS.get(kind) if isinstance(kind, str) else None
        if rule is None or rule.refused:
            problem = rule.refused if rule else "names a scaling that is not supported"
            known = [name for name, other in SCALINGS.items() if not other.refused]
            fix = f"use one of {', '.join(known)}"
            if kind == "su":
                fix = "write longrope, its new name"
            raise self.refusal(f"{key}.rope_type", problem, kind, fix)
        names = (*rule.needs, *rule.takes)
        found = {name: section[name] for name in names if section.get(name) is not None}
        if ORIGINAL in rule.needs:
            # As the class fills it in.
            found.setdefault(ORIGINAL, self.get(ORIGINAL) or context)
            original = self.number(f"{key}.{ORIGINAL}", found[ORIGINAL], int)
            if kind != "llama3":  # of which the class refuses to go without
                found.setdefault("factor", context / original)
        for name in ("factor", "attention_factor"):
            if name in found:
                found[name] = self.number(f"{key}.{name}", found[name])
        return {"type": kind, **found}


def _type_of(section: Json) -> object:
    """The type of a section of rotary positions, in its new spelling or in the old one."""
    return section.get("rope_type") or section.get("type") or "default"


def shortest(pattern: list[str]) -> list[str]:
    """The shortest list that gives the pattern if it is repeated.

    >>> shortest(["a", "b", "a", "b", "a"]), shortest(["a", "a"])
    (['a', 'b'], ['a'])
    """
    for size in range(1, len(pattern)):
        if all(x == pattern[i % size] for i, x in enumerate(pattern)):
            return pattern[:size]
    return pattern
