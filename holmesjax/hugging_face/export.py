"""Writes a model as a folder of Hugging Face's format, one layer at a time. No JAX.

The folder is whole or absent: it is written beside its place and renamed at the end.
"""

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.data import tokenizer_files
from holmesjax.data.tokenizer_files import FileTokenizer, write_json
from holmesjax.data.tokenizer_paths import GENERATION
from holmesjax.errors import CheckpointError, ConfigError
from holmesjax.hugging_face import (
    config_json_export,
    folder,
    json_file,
    safetensors_file,
    tensor_rows,
)
from holmesjax.hugging_face.config_json import CONFIG, ConfigJson, Json
from holmesjax.hugging_face.safetensors_file import DTYPES
from holmesjax.hugging_face.tensors import WIDE, Place, places, shapes_of

DTYPE_OF = {"float32": "F32", "bfloat16": "BF16"}  # names of settings -> names of the format
# Settings of generation that are ids or words of a tokenizer, beside those named as ids of tokens.
OF_TOKENS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"),
    *("forced_decoder_ids", "sequence_bias", "stop_strings"),
)
MODE = 0o755  # of the folder, as `mkdir` gives it

Shapes = dict[str, tuple[int, ...]]
Layer = tuple[str, dict[str, np.ndarray]]  # its name, and its parameters by theirs


def kept_dtype(kept: ConfigJson | None) -> str:
    """The dtype in which a model goes out: that in which it came, if we write it, or float32."""
    found = kept and (kept.values.get("dtype") or kept.values.get("torch_dtype"))
    return found if isinstance(found, str) and found in DTYPE_OF else "float32"


def refuse_full(out: Path) -> None:
    """Raises ConfigError unless a folder can be written here: it is empty, or not there."""
    try:
        is_full = out.exists() and (not out.is_dir() or any(out.iterdir()))
        problem = "there is something in it" if out.is_dir() else "a file"
        if not is_full:
            there = next(path for path in out.absolute().parents if path.exists())
            problem = "" if os.access(there, os.W_OK | os.X_OK) else "no permission to write"
            problem = problem if there.is_dir() else f"{there} is a file"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        where, fix = "--out", "name a folder that is empty or not there"
        raise ConfigError(where, "cannot be written", found=f"{out}: {problem}", fix=fix)


def write(
    out: Path,
    config: Json,
    model: ModelConfig,
    layers: Iterable[Layer],
    *,
    max_bytes: int,
    kept: Path | None = None,
    tokenizer: FileTokenizer | None = None,
) -> list[str]:
    """Writes a folder; returns the names of the files with weights.

    Args:
      out: the folder, which is empty or not there.
      config: its config.json, which says family and dtype (`config_json_export.exported`).
      model: the model's settings.
      layers: the name of each layer in order, and its parameters by name, in a dict that is
        emptied.
      max_bytes: of a file's tensors, unless a single tensor has more.
      kept: the folder with what came with the model, if it came from one.
      tokenizer: of the run, which replaces all that came with the model; None: the run has none.

    Raises:
      CheckpointError: the disk is full, or what came with the model is damaged.
      DataError: the tokenizer has what it would lose. Then nothing is written.
    """
    of_tokens = {} if tokenizer is None else tokenizer.exported(config["model_type"])
    ids = _ids(config, kept, tokenizer)
    generation = _generation(kept, tokenizer) | ids
    with whole_folder(out) as whole:
        names = _write_weights(whole, config, model, layers, max_bytes)
        tokenizer_files.write_all(whole, of_tokens)
        write_json(whole / CONFIG, config | ids)
        write_json(whole / GENERATION, generation)
    return names


def _ids(config: Json, kept: Path | None, tokenizer: FileTokenizer | None) -> Json:
    """The ids of the marks of a run, which stand in two files.

    Those that came with the model count beside the tokenizer that came with it, and no other.
    """
    came = {key: x for key, x in config.items() if key.endswith("_token_id")}
    if tokenizer is None:
        return came
    own = tokenizer.ids()
    if kept is None or not tokenizer.is_of(kept):
        return dict.fromkeys(came) | own
    return came | {key: x for key, x in own.items() if x is not None}


def _generation(kept: Path | None, tokenizer: FileTokenizer | None) -> Json:
    """The settings of generation that came with a model, but for those of its marks.

    Beside another tokenizer than that which came with it, all that are of tokens stay behind.
    """
    if kept is None or not (kept / GENERATION).is_file():
        return {}
    said = json_file.read(kept / GENERATION)
    is_other = tokenizer is not None and not tokenizer.is_of(kept)
    left = ("_token_id", "_token_ids", *(OF_TOKENS if is_other else ()))
    return {k: x for k, x in said.items() if not k.endswith(left) and not k.startswith("_")}


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, and is gone if that never comes.

    Raises CheckpointError if the disk is full.
    """
    refuse_full(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
            whole = Path(temporary) / out.name
            whole.mkdir(mode=MODE)
            yield whole
            whole.rename(out)  # also onto an empty folder
    except OSError as error:
        fix = "make room, or name another folder"
        found = error.strerror or str(error)
        raise CheckpointError(str(out), "cannot be written", found=found, fix=fix) from None


def _write_weights(
    whole: Path, config: Json, model: ModelConfig, layers: Iterable[Layer], max_bytes: int
) -> list[str]:
    dtypes = lambda name: "F32" if name.endswith(WIDE) else DTYPE_OF[config["dtype"]]
    itemsize = lambda name: DTYPES[dtypes(name)].itemsize
    its_places = places(model, config["model_type"])
    shapes: Shapes = shapes_of(its_places)
    files = shards(shapes, itemsize, max_bytes)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    stream = _tensors(its_places, layers)

    def rows_of(name: str) -> Iterator[np.ndarray]:
        """Returns the rows of a file. A larger tensor among them gets a file of its own."""
        left = len(files[name])
        while left:
            tensor, rows = next(stream)
            if weight_map[tensor] == name:
                left -= 1
                yield from rows
            else:
                large = {tensor: shapes[tensor]}
                safetensors_file.write(whole / weight_map[tensor], dtypes, large, rows)

    for name in dict.fromkeys(weight_map[tensor] for tensor in shapes):
        if not (whole / name).exists():
            safetensors_file.write(whole / name, dtypes, files[name], rows_of(name))
    assert next(stream, None) is None, "a layer has other tensors than its places say"
    if len(files) > 1:
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        num_bytes = sum(itemsize(name) * size for name, size in sizes.items())
        metadata = {"total_parameters": sum(sizes.values()), "total_size": num_bytes}
        write_json(whole / folder.INDEX, {"metadata": metadata, "weight_map": weight_map})
    return list(files)


def _tensors(
    its_places: Mapping[str, Mapping[str, tuple[Place, ...]]], layers: Iterable[Layer]
) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """Each tensor's name and rows, in the order of the places."""
    for (layer, by_parameter), (name, values) in zip(its_places.items(), layers, strict=True):
        assert layer == name, f"{name} comes where {layer} should"
        boxes: dict[str, list[Place]] = {}
        for place in itertools.chain.from_iterable(by_parameter.values()):
            boxes.setdefault(place.tensor, []).append(place)
        for tensor, together in boxes.items():
            yield tensor, tensor_rows.rows_of(together, values)
        values.clear()  # before the next layer is read


def shards(shapes: Shapes, itemsize: Callable[[str], int], max_bytes: int) -> dict[str, Shapes]:
    """The tensors of each file, as huggingface_hub shares them out: as many as the limit allows.

    A tensor above the limit has a file of its own, and the one that is being filled goes on.

    >>> shards({"a": (2,), "b": (9,), "c": (3,), "d": (1,)}, lambda name: 1, 5)
    {'model-00001-of-00003.safetensors': {'b': (9,)}, \
'model-00002-of-00003.safetensors': {'a': (2,), 'c': (3,)}, \
'model-00003-of-00003.safetensors': {'d': (1,)}}
    """
    groups: list[Shapes] = []
    filling: Shapes = {}
    num_bytes = 0
    for name, shape in shapes.items():
        size = itemsize(name) * int(np.prod(shape))
        if size > max_bytes:
            groups.append({name: shape})
            continue
        if num_bytes + size > max_bytes:
            groups.append(filling)
            filling, num_bytes = {}, 0
        filling[name] = shape
        num_bytes += size
    if filling:
        groups.append(filling)
    if len(groups) == 1:
        return {folder.WEIGHTS: groups[0]}
    of = f"of-{len(groups):05d}"
    return {f"model-{i:05d}-{of}.safetensors": group for i, group in enumerate(groups, 1)}


def config_of(
    model: ModelConfig, imported: Path | None, family: str | None, dtype: str | None
) -> Json:
    """The config.json of an export.

    Args:
      model: the model's settings.
      imported: the folder with the config.json that came with the model, if it came from one.
      family: that is asked for; None: that of the folder, or the first that has such models.
      dtype: that is asked for; None: that of the folder, or float32.

    Raises ConfigError if the family has no such model.
    """
    if model.module is not None:
        problem = "has no place in the format of Hugging Face, which has layers of known families"
        fix = "write its arrays from Python, with checkpoint.restore_layers"
        raise ConfigError("model.module", problem, found=model.module, fix=fix)
    kept = ConfigJson.load(imported) if imported is not None else None
    family = family or (kept.family if kept else config_json_export.family_of(model))
    return config_json_export.exported(model, kept, family, dtype or kept_dtype(kept))
