"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. No JAX.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, in]
base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [out, r]
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.config import LORA_TARGETS, LoraConfig, ModelConfig
from holmesjax.data.tokenizer_files import write_json
from holmesjax.errors import CheckpointError, ConfigError
from holmesjax.hugging_face import (
    config_json_export,
    json_file,
    safetensors_file,
    tensor_rows,
)
from holmesjax.hugging_face.config_json import ConfigJson
from holmesjax.hugging_face.export import Layer, whole_folder
from holmesjax.hugging_face.safetensors_file import DTYPES, Tensor
from holmesjax.hugging_face.tensors import Place, adapter_places
from holmesjax.layer_specs.array_boxes import Box
from holmesjax.layer_specs.model_layers import block_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DEFAULT = 8  # of r and of lora_alpha, where a file leaves them out

# Keys of adapter_config.json that change no number of ours, or that we read.
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
HARMLESS = (
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    *("target_modules", "exclude_modules", "fan_in_fan_out", "lora_dropout", "peft_version"),
    *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "bias"),
    *("ensure_weight_tying", "layers_to_transform", "layers_pattern", "init_lora_weights"),
)
# The methods by which A and B begin without another change of the model.
PLAIN_METHODS = (True, False, None, "gaussian", "orthogonal")


def write(
    out: Path, model: ModelConfig, family: str, layers: Iterable[Layer], base: str | None
) -> None:
    """Writes the adapters of a model, in float32.

    Args:
      out: the folder, which is empty or not there.
      model: the model's settings.
      family: of the base.
      layers: the name of each layer in order, and its parameters by name, in a dict that is
        emptied.
      base: the name of the base, as it is to stand in the file.

    Raises:
      ConfigError: a map of the family would have several A.
      CheckpointError: the disk is full.
    """
    assert model.lora is not None, "the model has adapters"
    places = adapter_places(model, family)
    shapes = {
        PREFIX + place.tensor: place.shape
        for places_of_layer in places.values()
        for place in places_of_layer
    }
    config = _config(model, places, family, base)
    with whole_folder(out) as whole:
        safetensors_file.write(whole / WEIGHTS, lambda _: "F32", shapes, _rows(places, layers))
        write_json(whole / CONFIG, config)


def _rows(places: Mapping[str, list[Place]], layers: Iterable[Layer]) -> Iterator[np.ndarray]:
    for layer, values in layers:
        tensors: dict[str, list[Place]] = {}
        for place in places[layer]:
            tensors.setdefault(place.tensor, []).append(place)
        for together in tensors.values():
            yield from tensor_rows.rows_of(together, values)
        values.clear()  # before the next layer is read


def _config(
    model: ModelConfig, places: Mapping[str, list[Place]], family: str, base: str | None
) -> dict[str, Any]:
    lora = model.lora
    assert lora is not None, "the model has adapters"
    numbers = _numbers(lora, places)
    whole = lambda x: int(x) if float(x).is_integer() else x
    unlike = lambda i, of_all: {
        module: whole(rank_and_scale[i])
        for module, rank_and_scale in numbers.items()
        if rank_and_scale[i] != of_all
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": whole(lora.alpha),
        "use_rslora": lora.use_rslora,
        "target_modules": _target_modules(places),
        "fan_in_fan_out": family == "gpt2",  # its maps are stored as [in, out]
        "lora_dropout": lora.dropout or 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "rank_pattern": unlike(0, lora.rank),
        "alpha_pattern": unlike(1, lora.alpha),
        "modules_to_save": None,
    }


def _numbers(lora: LoraConfig, places: Mapping[str, list[Place]]) -> dict[str, tuple[int, float]]:
    """The rank and the alpha of each module, by its path."""
    found: dict[str, tuple[int, float]] = {}
    for layer, places_of_layer in places.items():
        for place in places_of_layer:
            name = place.parameter.name.partition("_")[0]
            [group] = [group for group in lora.adapters if name in group]
            found[place.tensor.rpartition(".lora_")[0]] = lora.rank_and_alpha(layer, group)
    return found


def _target_modules(places: Mapping[str, list[Place]]) -> list[str]:
    """The ends of the modules' paths, sorted: `q_proj`, and `attn.c_proj` where that is not all."""
    ends = {
        ".".join(place.tensor.split(".")[-4:-2])
        for places_of_layer in places.values()
        for place in places_of_layer
    }
    both = {"attn.c_proj", "mlp.c_proj"}
    return sorted({end if end in both and not both <= ends else end.split(".")[1] for end in ends})


def settings_of(name: str) -> dict[str, Any]:
    """The settings of `model.lora` that a folder of that name has.

    Raises:
      CheckpointError: it has adapters of another kind, or is no folder of adapters.
    """
    folder = Path(name)
    config = json_file.read(folder / CONFIG)
    _refuse_other_kinds(folder / CONFIG, config)
    modules = _modules(folder)
    targets = [_target(module) for module in modules]
    odd = [
        module
        for module, target_of_module in zip(modules, targets, strict=True)
        if target_of_module not in LORA_TARGETS
    ]
    if odd:
        raise CheckpointError(
            str(folder / WEIGHTS),
            "has adapters that are not beside a map of a block",
            found=", ".join(sorted(odd)[:5]),
            fix=f"train adapters of {', '.join(sorted(LORA_TARGETS))}, or merge them with PEFT",
        )
    ranks = _of_modules(folder, config, modules, "rank_pattern", "r")
    alphas = _of_modules(folder, config, modules, "alpha_pattern", "lora_alpha")
    usual = lambda values: Counter(values.values()).most_common(1)[0][0]
    rank, alpha = usual(ranks), usual(alphas)
    unlike: dict[str, dict[str, Any]] = {}
    for module, target in zip(modules, targets, strict=True):
        own = {"rank": ranks[module]} if ranks[module] != rank else {}
        own |= {"alpha": float(alphas[module])} if alphas[module] != alpha else {}
        if own:
            unlike[_name_of(folder, module, target)] = own
    return {
        "rank": rank,
        "alpha": float(alpha),
        "use_rslora": bool(config.get("use_rslora", False)),
        "targets": sorted(set(targets)),
        "dropout": _dropout(folder, config),
        "patterns": [{"maps": name, **pattern} for name, pattern in unlike.items()] or None,
    }


def _dropout(folder: Path, config: Mapping[str, Any]) -> float | None:
    value = config.get("lora_dropout") or 0.0
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise CheckpointError(
            str(folder / CONFIG),
            "lora_dropout must be a number from 0 to below 1",
            found=json_file.shown(value),
            fix="write the number with which the adapter was trained, or 0",
        )
    return float(value) or None


def _name_of(folder: Path, module: str, target: str) -> str:
    """The name of an adapter for `model.lora.patterns`: of its layer and its target."""
    number = re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", module)
    if number is None:
        raise CheckpointError(
            str(folder / WEIGHTS),
            "has an adapter of another rank or alpha in an unknown layer",
            found=module,
            fix="merge it with PEFT (merge_and_unload), and import the whole model",
        )
    return f"{block_name(int(number[1]))}/{target}"


def _modules(folder: Path) -> list[str]:
    """The paths of the modules that have an A or a B."""
    found: dict[str, None] = {}
    for name in safetensors_file.read_header(folder / WEIGHTS):
        module = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        if module is None:
            raise CheckpointError(
                str(folder / WEIGHTS),
                "has a tensor that is no A or B of a linear map",
                found=name,
                fix="merge it with PEFT (merge_and_unload), and import the whole model",
            )
        found[module[1]] = None
    if not found:
        fix = "name a folder that PEFT has written"
        raise CheckpointError(str(folder / WEIGHTS), "has no adapters", found="none", fix=fix)
    return list(found)


def _target(module: str) -> str:
    """The name of a module as a target: GPT-2 has two of the name c_proj."""
    *_, parent, name = ("", *module.split("."))
    return {"attn.c_proj": "out", "mlp.c_proj": "down"}.get(f"{parent}.{name}", name)


def _of_modules(
    folder: Path, config: Mapping[str, Any], modules: list[str], pattern: str, key_of_all: str
) -> dict[str, Any]:
    """The number of each module, after the patterns that change it for some."""

    def refusal(problem: str, found: object) -> CheckpointError:
        fix = "merge the adapter with PEFT (merge_and_unload), and import the whole model"
        shown = json_file.shown(found)
        return CheckpointError(str(folder / CONFIG), problem, found=shown, fix=fix)

    patterns = config.get(pattern) or {}
    # PEFT reads keys as regular expressions of a path's end; a dot is one of any character there.
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in patterns):
        raise refusal(f"{pattern} must have ends of paths as keys", patterns)
    found: dict[str, Any] = {}
    for module in modules:
        match = next((key for key in patterns if f".{module}".endswith(f".{key}")), None)
        value = config.get(key_of_all, DEFAULT) if match is None else patterns[match]
        if type(value) not in (int, float) or not value > 0:
            raise refusal(f"{key_of_all} and {pattern} must be numbers above 0", value)
        found[module] = value
    return found


def _refuse_other_kinds(path: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for adapters that change a model in another way than B A does."""

    def refusal(key: str, value: object) -> CheckpointError:
        problem = f"cannot be followed: {key}"
        fix = "merge the adapter with PEFT (merge_and_unload), and import the whole model"
        return CheckpointError(str(path), problem, found=json_file.shown(value), fix=fix)

    if config.get("peft_type") != "LORA":
        raise refusal("peft_type must be LORA", config.get("peft_type"))
    if config.get("bias", "none") != "none":
        raise refusal("bias", config["bias"])
    if (method := config.get("init_lora_weights", True)) not in PLAIN_METHODS:
        raise refusal("init_lora_weights, which changes the base", method)
    for key, value in config.items():
        if key not in READ and key not in HARMLESS and value:
            raise refusal(key, value)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The tensors of a folder that hold a model's adapters."""

    places: Mapping[tuple[str, str], Place]  # by layer and parameter
    tensors: Mapping[str, Tensor]

    def read(self, layer: str, parameter: str, box: Box) -> np.ndarray:
        """The elements in a box of a parameter, float32."""
        place = self.places[layer, parameter]
        return tensor_rows.read([place], {place.tensor: self.tensors[PREFIX + place.tensor]}, box)


def open_adapters(folder: Path, model: ModelConfig) -> Adapters:
    """Finds the adapters of a model in a folder. Reads no data.

    Raises:
      CheckpointError: the files do not hold exactly the model's adapters.
      ConfigError: the model's family has no such adapters.
    """
    _refuse_other_kinds(folder / CONFIG, json_file.read(folder / CONFIG))
    tensors = safetensors_file.read_header(folder / WEIGHTS)
    places = adapter_places(model, family_of(model))
    _refuse_others(folder / WEIGHTS, tensors, places)
    rows = [((layer, place.parameter.name), place) for layer in places for place in places[layer]]
    by_name = dict(rows)
    if len(by_name) < len(rows):
        problem = "make weights share an A, and the folder has an A for each of them"
        fix = "leave targets out: those of the folder count"
        found = list(model.lora.targets) if model.lora else []
        raise ConfigError("model.lora.targets", problem, found=found, fix=fix)
    return Adapters(places=by_name, tensors=tensors)


def family_of(model: ModelConfig) -> str:
    """The family of a model's base: that of its folder, or the first that has such models."""
    if model.hf is not None:
        return ConfigJson.load(Path(model.hf)).family
    return config_json_export.family_of(replace(model, lora=None))


def _refuse_others(
    path: Path, tensors: Mapping[str, Tensor], places: Mapping[str, list[Place]]
) -> None:
    wanted = {
        PREFIX + place.tensor: place.shape
        for places_of_layer in places.values()
        for place in places_of_layer
    }
    problems = [f"{name} missing" for name in wanted if name not in tensors]
    problems += [f"{name} unknown" for name in tensors if name not in wanted]
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name]:
            problems.append(f"{name} {list(tensor.shape)}, not {list(wanted[name])}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{name} {tensor.dtype}, which is none of {', '.join(DTYPES)}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            str(path),
            "does not hold the adapters of model.lora",
            found="; ".join(problems[:5]) + more,
            fix="leave rank, alpha and targets out of model.lora: those of the folder count. "
            "If only some layers have adapters, merge them with PEFT (merge_and_unload)",
        )
