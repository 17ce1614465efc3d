"""Folders of Hugging Face's format as a source of a model's parameters. No JAX.

All names and shapes are compared with the model's before any number is read.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.data import tokenizer_paths
from holmesjax.data.tokenizer_paths import ENDS
from holmesjax.errors import CheckpointError
from holmesjax.hugging_face import (
    block_scales,
    config_json_export,
    json_file,
    safetensors_file,
    tensor_rows,
)
from holmesjax.hugging_face.block_scales import Scaled
from holmesjax.hugging_face.config_json import ConfigJson
from holmesjax.hugging_face.safetensors_file import DTYPES, Tensor
from holmesjax.hugging_face.tensors import Place, places, shapes_of
from holmesjax.layer_specs.array_boxes import Box
from holmesjax.layer_specs.model_layers import EMBED

KEPT = "hugging_face"  # in a run folder: the files of a folder that are not its weights
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD_TENSOR = "lm_head.weight"  # in all families
MAX_INDEX_BYTES = 50_000_000
SHOWN = 5  # names in a message

# Tensors that hold no parameters: frequencies and causal masks of old files.
WITHOUT_PARAMETERS = re.compile(
    r".*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
)
# A Gemma 3 with images: the prefixes of its text model's names, and of its other parts.
TEXT_MODEL = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
OTHER_MODELS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
HOW_TO_CONVERT = (
    "pickled files can run code when they are read; convert them where you trust them: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) of transformers"
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of a folder that hold a model's parameters."""

    places: Mapping[str, Mapping[str, tuple[Place, ...]]]  # by layer and parameter
    tensors: Mapping[str, Tensor | Scaled]

    @property
    def dtype(self) -> str:
        """The dtype that most of its tensors have, such as BF16."""
        found = [self.tensors[name].dtype for name in sorted(self.tensors)]
        return max(dict.fromkeys(found), key=found.count)

    def read(self, layer: str, parameter: str, box: Box | None = None) -> np.ndarray:
        """The elements in a box of a parameter, or all of them, float32."""
        places = self.places[layer][parameter]
        if box is None:
            of_experts = () if places[0].expert is None else (len(places),)
            box = tuple((0, size) for size in (*of_experts, *places[0].parameter.shape))
        return tensor_rows.read(places, self.tensors, box)


def settings_of(folder: str) -> dict[str, Any]:
    """The settings of `model` in a folder's config.json. Raises HolmesError."""
    return ConfigJson.load(Path(folder)).settings()


def keep(folder: Path, run_dir: Path) -> None:
    """Copies the settings and the tokenizer of a folder into a run folder that has none."""
    target = run_dir / KEPT
    if target.is_dir():
        return
    # A folder that is whole or absent.
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=f".{KEPT}.") as temporary:
        whole = Path(temporary) / KEPT
        whole.mkdir()
        if tokenizer_paths.has_one(folder):
            tokenizer_paths.copy(folder, whole)
        for name in ENDS:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, whole / name)
        whole.rename(target)


def open_weights(folder: Path, model: ModelConfig) -> Weights:
    """Finds the tensors of a model in a folder. Reads no data, unless a tied table is there twice.

    Raises CheckpointError if the files are not whole, or do not hold exactly the model's tensors.
    ConfigError if the folder's family has no such model.
    """
    config = ConfigJson.load(folder)
    family = config.family
    config_json_export.write(model, family, "float32")  # as a check
    plain = _by_our_names(folder, _all_tensors(folder), family)
    for i in range(config.num_later_layers()):
        prefix = f"model.layers.{model.num_layers + i}."
        plain = {name: x for name, x in plain.items() if not name.startswith(prefix)}
    found: dict[str, Tensor | Scaled] = dict(plain)
    if (block := config.blocks_of_scales()) is not None:
        found = block_scales.joined(plain, block, folder)
    layers = places(model, family)
    shapes = shapes_of(layers)
    table = layers[EMBED]["token_VD"][0].tensor
    tied = {HEAD_TENSOR} if model.tied_embeddings and HEAD_TENSOR in found else set()
    if tied and table not in found:  # the same numbers, under the other name
        found[table] = found.pop(HEAD_TENSOR)
        tied = set()
    problems = []
    if missing := [name for name in shapes if name not in found]:
        problems.append(f"{_some(missing)} missing")
    if unknown := [name for name in found if name not in shapes and name not in tied]:
        problems.append(f"{_some(unknown)} unknown")
    both = [name for name in shapes if name in found]
    if wrong := [name for name in both if found[name].shape != shapes[name]]:
        whole = [f"{name} {list(found[name].shape)}, not {list(shapes[name])}" for name in wrong]
        problems.append(f"{_some(whole)} of another shape")
    if odd := [f"{name} {found[name].dtype}" for name in both if not _is_read(found[name])]:
        problems.append(f"{_some(odd)}, which is none of {', '.join(DTYPES)}")
    if problems:
        raise CheckpointError(
            str(folder),
            f"does not hold the tensors of the model, a {family}",
            found="; ".join(problems),
            fix="check config.json and the overrides of model, or download the folder again",
        )
    if tied:
        _refuse_untied(folder, table, found)
    tensors = {name: found[name] for name in shapes}
    return Weights(places=layers, tensors=tensors)


def _is_read(tensor: Tensor | Scaled) -> bool:
    return isinstance(tensor, Scaled) or tensor.dtype in DTYPES


def _refuse_untied(folder: Path, name: str, found: Mapping[str, Tensor | Scaled]) -> None:
    """Raises CheckpointError if the output projection of a tied model is not its token table."""
    table, head = found[name], found[HEAD_TENSOR]
    problem = ""
    if (table.shape, table.dtype) != (head.shape, head.dtype):
        problem = f"{list(head.shape)} {head.dtype}, not {list(table.shape)} {table.dtype}"
    else:
        rows = max(1, tensor_rows.MAX_BYTES * table.shape[0] // table.size)
        for at in range(0, table.shape[0], rows):
            end = min(at + rows, table.shape[0])
            one, two = (x.rows(at, end, slice(None)).view(np.uint8) for x in (table, head))
            if not np.array_equal(one, two):
                problem = f"other numbers in rows {at} to {end}"
                break
    if problem:
        raise CheckpointError(
            str(folder),
            f"has a tied output projection, {HEAD_TENSOR}, that is not {name}",
            found=problem,
            fix="set tie_word_embeddings to false in config.json, or remove the tensor",
        )


def _some(names: Sequence[str]) -> str:
    """The first of several names, and how many there are.

    >>> _some(["a", "b"]), _some([str(i) for i in range(8)])
    ('a, b', '0, 1, 2, 3, 4 and 3 more')
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _by_our_names(folder: Path, found: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Returns tensors by the names of the family's tables, without buffers such as masks."""
    base = "transformer." if family == "gpt2" else "model."
    plain = ("h.", "wte.", "wpe.", "ln_f.") if family == "gpt2" else ("layers.", "embed_", "norm.")
    ours: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if WITHOUT_PARAMETERS.fullmatch(name):
            continue
        own = name
        if family == "gemma3_text":
            if OTHER_MODELS.fullmatch(name):
                continue
            prefix, other = next((x for x in TEXT_MODEL.items() if name.startswith(x[0])), ("", ""))
            own = other + name.removeprefix(prefix)
        if own.startswith(plain):
            own = base + own
        if own in ours:
            problem = f"holds the tensor {own} twice"
            raise CheckpointError(str(folder), problem, found=name, fix="remove one of the two")
        ours[own] = tensor
    return ours


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files of a folder."""
    index, single = folder / INDEX, folder / WEIGHTS
    if index.exists() and single.exists():
        # transformers would read the single file, without a word about the others.
        problem = f"has both {WEIGHTS} and {INDEX}, which may be of different models"
        raise CheckpointError(str(folder), problem, found="both", fix="remove the one that is old")
    if single.exists():
        return safetensors_file.read_header(single)
    if index.exists():
        return _tensors_of(index)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    pickled += sorted(path.name for path in folder.glob("*.pt*"))
    found, fix = "no such file", f"name a folder with {WEIGHTS} or {INDEX}"
    if not folder.is_dir():
        found = "no such folder" if not folder.exists() else "a file"
    elif shards := sorted(path.name for path in folder.glob("*.safetensors")):
        found, fix = _some(shards), f"download {INDEX} too, which says what is in these files"
    elif pickled:
        found, fix = _some(pickled), HOW_TO_CONVERT
    problem = f"has neither {WEIGHTS} nor {INDEX}"
    raise CheckpointError(str(folder), problem, found=found, fix=fix)


def _tensors_of(index: Path) -> dict[str, Tensor]:
    """The tensors of the files that an index names, each where the index says, and no others."""

    def refusal(problem: str, found: object) -> CheckpointError:
        fix = "download the folder again"
        return CheckpointError(str(index), problem, found=found, fix=fix)

    weight_map = json_file.read(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise refusal("must have weight_map, from names to files", json_file.shown(weight_map))
    names = sorted(set(weight_map.values()))
    if odd := [name for name in names if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)]:
        raise refusal("must name files of its own folder", json_file.shown(odd[0]))
    if missing := [name for name in names if not (index.parent / name).exists()]:
        raise refusal("names files that are not there", _some(missing))
    found: dict[str, Tensor] = {}
    for name in names:
        tensors = safetensors_file.read_header(index.parent / name)
        if wrong := [key for key in tensors if weight_map.get(key) != name]:
            problem = f"does not say that {name} holds tensors which are in it"
            raise refusal(problem, _some(wrong))
        found |= tensors
    if lost := [key for key in weight_map if key not in found]:
        problem = "names tensors that are not in its files"
        raise refusal(problem, _some([f"{key} of {weight_map[key]}" for key in lost]))
    return found
