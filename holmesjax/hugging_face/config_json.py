"""A config.json as settings of a model; `config_json_export` is the way back. No JAX.

    {"model_type": "qwen3", "hidden_size": 1024, ..}  <->  {"width": 1024, "qk_norm": "head", ..}

A key that is absent means the default of the family's class in `transformers`, which is seldom the
value of a published model. So every key is written. A value that we cannot compute is refused.
Rotary positions are read and written in both of their spellings, the older of which has
`rope_theta` and `rope_scaling`, the newer `rope_parameters`.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmesjax.config import EXPERT_BLOCK, WINDOW_BLOCK
from holmesjax.config.rotary import ORIGINAL, SCALINGS
from holmesjax.errors import CheckpointError, ConfigError
from holmesjax.hugging_face import json_file
from holmesjax.hugging_face.config_families import (
    ANY,
    EXPERT_COUNTS,
    FAMILIES,
    GATED,
    INTEGERS,
    MAY_BE_NULL,
    NO_EXPERTS,
    UNGATED,
    Family,
)

CONFIG = "config.json"
Json = dict[str, Any]
MAX_LAYERS = 2**14  # as `ModelConfig` has it, before a list of them is made
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = {FULL: "block", SLIDING: WINDOW_BLOCK}


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

    @property
    def dropouts(self) -> dict[str, float]:
        """The shares that training with `transformers` would drop out; a run drops nothing out."""
        names = [key for key in self.values if key.endswith(("dropout", "pdrop"))]
        shares = {key: self.values[key] for key in names}
        return {key: share for key, share in shares.items() if type(share) is float and share}

    def get(self, key: str) -> Any:
        return self.values.get(key, self.rules.defaults.get(key))

    def refusal(self, key: str, problem: str, found: object, fix: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key}", problem, found=json_file.shown(found), fix=fix)

    def number(self, key: str, value: Any, kind: type = float) -> Any:
        """A value, checked to be a number above 0, or a whole one."""
        allowed = (int,) if kind is int else (int, float)
        if type(value) not in allowed or not 0 < value <= sys.float_info.max:
            problem = f"must be a {'whole ' if kind is int else ''}number above 0"
            raise self.refusal(key, problem, value, "download config.json again")
        return kind(value)

    def settings(self) -> dict[str, Any]:
        """The settings of `model` that it means. Raises ConfigError for what we cannot compute."""
        rules = self.rules
        self.blocks_of_scales()  # as a check, like the next line
        self.num_later_layers()
        self._refuse_own_code()
        others = {} if rules.experts else NO_EXPERTS
        for key, values in {**ANY, **others, **rules.computes}.items():
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
        kinds = [TYPES[SLIDING if x else FULL] for x in windowed]
        if any(windowed):
            settings["window"] = self.number("sliding_window", self.get("sliding_window"), int)
            settings["pattern"] = shortest(kinds)
        if rules.experts and any(has := self._has_experts(settings["num_layers"])):
            kinds = [EXPERT_BLOCK if x else kind for x, kind in zip(has, kinds, strict=True)]
            settings["pattern"] = shortest(kinds)
            settings["experts"] = self._experts()
        if "kv_lora_rank" in rules.defaults:
            settings |= self._latents(settings["num_heads"])
        if settings.get("positions") != "learned":
            settings |= self._rotary(any(windowed), settings)
        if "latent_attention" in settings:
            settings["attention_scale"] = _scale_of_latents(settings)
        return settings

    def _refuse_own_code(self) -> None:
        """Raises ConfigError for a model that is another than the family's class computes.

        Published folders also name copies of the classes that transformers has, which takes its own
        unless it is told to trust the folder's.
        """
        key = "auto_map"
        if (found := self.values.get(key)) is None:
            return
        name = self.rules.architecture
        config = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        wanted = {"AutoModelForCausalLM": name, "AutoConfig": config}
        said = found if isinstance(found, dict) else {}
        named = {auto: str(said[auto]).rpartition(".")[2] for auto in wanted if auto in said}
        if not named or any(wanted[auto] != code for auto, code in named.items()):
            problem = f"names other code than {config} and {name}"
            fix = "use a model of the classes that transformers has"
            raise self.refusal(key, problem, found, fix)

    def blocks_of_scales(self) -> tuple[int, int] | None:
        """Rows and columns of a block of weights in fp8; None: weights are no codes."""
        key, value = "quantization_config", self.values.get("quantization_config")
        if value is None:
            return None
        own = value if isinstance(value, dict) else {}
        block, is_fp8 = own.get("weight_block_size"), own.get("quant_method") == "fp8"
        if not is_fp8 or own.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list):
            fix = "use a model whose weights are numbers, or fp8 (e4m3) with weight_block_size"
            raise self.refusal(key, "has codes that are not supported", value, fix)
        if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            problem = "must be rows and columns of a block"
            raise self.refusal(f"{key}.weight_block_size", problem, block, "write [128, 128]")
        return block[0], block[1]

    def num_later_layers(self) -> int:
        """Layers behind the others that predict later tokens, which are not imported."""
        key = "num_nextn_predict_layers"
        found = self.values.get(key) or 0
        if type(found) is not int or not 0 <= found <= MAX_LAYERS:
            raise self.refusal(key, "must be a whole number", found, "download config.json again")
        return found

    def _latents(self, num_heads: int) -> Json:
        """The settings of attention with latents."""
        whole = lambda key: self.number(key, self.get(key), int)
        if (found := self.get("num_key_value_heads")) not in (None, num_heads):
            problem = f"must be num_attention_heads = {num_heads}: each head has keys of its own"
            raise self.refusal("num_key_value_heads", problem, found, f"use {num_heads}")
        own = {"rank": whole("kv_lora_rank"), "query_rank": self.get("q_lora_rank")}
        if own["query_rank"] is not None:
            own["query_rank"] = whole("q_lora_rank")
        own |= {"rotary_width": whole("qk_rope_head_dim"), "value_width": whole("v_head_dim")}
        head_dim = whole("qk_nope_head_dim") + own["rotary_width"]
        return {"latent_attention": own, "head_dim": head_dim}

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

    # ---- experts ---------------------------------------------------------------------------------

    def _has_experts(self, num_layers: int) -> list[bool]:
        """Whether each layer has experts, in a family with experts."""
        if self.family == "mixtral":
            return [True] * num_layers
        if self.family == "deepseek_v3":
            first = self.get("first_k_dense_replace")
            if type(first) is not int or first < 0:
                problem = "must be a whole number"
                raise self.refusal("first_k_dense_replace", problem, first, "download it again")
            return [i >= first for i in range(num_layers)]
        turn = self.number("decoder_sparse_step", self.get("decoder_sparse_step"), int)
        dense = self.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(i) is int for i in dense):
            problem = "must be a list of numbers of layers"
            raise self.refusal("mlp_only_layers", problem, dense, "download config.json again")
        return [(i + 1) % turn == 0 and i not in dense for i in range(num_layers)]

    def _experts(self) -> Json:
        """The settings of experts."""
        keys = self.rules.experts
        given = {key: self.values[key] for key in EXPERT_COUNTS if key in self.values}
        if len({json_file.shown(value) for value in given.values()}) > 1:
            problem = f"must be the number of experts, as {' and '.join(given)} are"
            raise self.refusal(keys["count"], problem, given, "remove the one that is wrong")
        count = next(iter(given.values()), self.rules.defaults[keys["count"]])
        found: Json = {"count": self.number(keys["count"], count, int)}
        for name, key in keys.items():
            if name == "normalized":
                if not isinstance(value := self.get(key), bool):
                    raise self.refusal(key, "must be true or false", value, "download it again")
                found[name] = value
            elif name != "count":
                found[name] = self.number(key, self.get(key), float if name == "scale" else int)
        if "n_shared_experts" in self.rules.defaults:
            num_shared = self.number("n_shared_experts", self.get("n_shared_experts"), int)
            found["shared_width"] = num_shared * found["width"]
        if found["active"] == 1 and found.get("normalized", True):
            # The weight of its only expert is 1 there, and its score in ours.
            problem = "must be above 1 where the weights of a token's experts are made to sum to 1"
            raise self.refusal(keys["active"], problem, 1, "use a model with two or more")
        return found | dict(self.rules.expert_settings)

    # ---- rotary positions ------------------------------------------------------------------------

    def _rotary(self, has_windows: bool, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of rotary positions."""
        both, scaling = self._section("rope_parameters"), self._section("rope_scaling")
        key = "rope_scaling" if scaling else "rope_parameters"
        is_gemma3 = self.family == "gemma3_text"
        if both and is_gemma3 != (is_by_kind := FULL in both or SLIDING in both):
            # Values that the class does not look for, and takes its defaults.
            problem = f"must {'not ' if is_by_kind else ''}have values by kind of layer"
            fix = f"write {{{FULL}: {{...}}, {SLIDING}: {{...}}}}" if is_gemma3 else "write {...}"
            raise self.refusal("rope_parameters", problem, both, fix)
        found: dict[str, Any] = {}
        if is_gemma3:
            window, both = self._inner(both, SLIDING), self._inner(both, FULL)
            if (kind := self._type_of(f"rope_parameters.{SLIDING}", window)) != "default":
                problem = "scales the positions of window layers, which is not supported"
                raise self.refusal(f"rope_parameters.{SLIDING}", problem, kind, "use default")
            base = window.get("rope_theta", self.get("rope_local_base_freq"))
            if has_windows:
                found["window_rotary_base"] = self.number("rope_local_base_freq", base)
        full = scaling or both
        if is_gemma3:  # whose class puts one into the other
            full = {**both, **scaling}
        theta = full.get("rope_theta", self.get("rope_theta"))
        found["rotary_base"] = self.number("rope_theta", theta)
        share = full.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        if share not in (None, 1):
            if self.family != "phi3":
                problem = f"has a value that is not supported for a {self.family}"
                raise self.refusal(f"{key}.partial_rotary_factor", problem, share, "use 1.0")
            found["rotary_fraction"] = self.number("partial_rotary_factor", share)
        kind = self._type_of(key, full)
        if self.family == "phi3" and kind == "yarn":  # whose class takes it for longrope
            problem, fix = "names longrope by another name", "write longrope"
            raise self.refusal(f"{key}.rope_type", problem, kind, fix)
        if kind != "default":
            found["rotary_scaling"] = self._scaling(key, kind, full, settings["context_length"])
        return found

    def _type_of(self, key: str, section: Json) -> object:
        """The type of a section of rotary positions, in its new spelling or in the old one."""
        new, old = section.get("rope_type"), section.get("type")
        if new and old and new != old:
            problem, fix = f"contradicts rope_type = {new}", "remove the one that is wrong"
            raise self.refusal(f"{key}.type", problem, old, fix)
        if (
            old not in (None, "default")
            and not new
            and self.family == "gemma3_text"
            and key == "rope_scaling"
        ):
            problem, fix = "is scaled by version 4 of transformers and not by 5", "write rope_type"
            raise self.refusal(f"{key}.type", problem, old, fix)
        return new or old or "default"

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
            of_both = {self.get(ORIGINAL), found.get(ORIGINAL)} - {None}
            if len(of_both) > 1:  # version 5 takes the outer one, and version 4 mostly the other
                problem = f"contradicts {key}.{ORIGINAL} = {found[ORIGINAL]}"
                fix = "make both what the model was trained with"
                raise self.refusal(ORIGINAL, problem, self.get(ORIGINAL), fix)
            # As the class fills it in.
            found.setdefault(ORIGINAL, self.get(ORIGINAL) or context)
            original = self.number(f"{key}.{ORIGINAL}", found[ORIGINAL], int)
            if kind != "llama3":  # of which the class refuses to go without
                found.setdefault("factor", context / original)
        for name in ("factor", "attention_factor"):
            if name in found:
                found[name] = self.number(f"{key}.{name}", found[name])
        return {"type": kind, **found}


def _scale_of_latents(settings: Mapping[str, Any]) -> float:
    """The factor of scores of attention with latents: yarn raises it for long sequences."""
    scaling = settings.get("rotary_scaling") or {}
    factor, share = scaling.get("factor", 1.0), scaling.get("mscale_all_dim") or 0.0
    raised = 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(settings["head_dim"] ** -0.5 * raised * raised)


def shortest(pattern: list[str]) -> list[str]:
    """The shortest list that gives the pattern if it is repeated.

    >>> shortest(["a", "b", "a", "b", "a"]), shortest(["a", "a"])
    (['a', 'b'], ['a'])
    """
    for size in range(1, len(pattern)):
        if all(x == pattern[i % size] for i, x in enumerate(pattern)):
            return pattern[:size]
    return pattern
