"""Folders as a source of parameters: parts of them, and every folder that is refused."""

import dataclasses
import functools
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from holmesjax.errors import CheckpointError, HolmesError
from holmesjax.hugging_face import export, folder, safetensors_file, tensor_rows
from holmesjax.hugging_face.block_scales import SUFFIX
from holmesjax.hugging_face.tensors import places
from tests.cases import cases
from tests.hugging_face.families import CONFIGS, model_of, tensors_of, write_config


def write_folder(where: Path, family: str, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A folder as the library `safetensors` writes it."""
    write_config(where, family)
    found = tensors_of(family, model_of(family)) if tensors is None else tensors
    save_file(found, where / folder.WEIGHTS)
    return where


@pytest.mark.parametrize("family", CONFIGS)
def test_any_box_of_a_parameter_is_read(family: str, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_rows, "MAX_BYTES", 700)  # many pieces, of a few rows each
    model = model_of(family)
    tensors = tensors_of(family, model, "BF16")
    weights = folder.open_weights(write_folder(tmp_path, family, tensors), model)
    assert weights.dtype == "BF16"
    random = np.random.default_rng(0)
    for layer, its_places in places(model, family).items():
        for name, boxes in its_places.items():
            parts = [
                place.to_parameter(tensors[place.tensor]).astype(np.float32) for place in boxes
            ]
            whole = parts[0] if boxes[0].expert is None else np.stack(parts)
            ends = [np.sort(random.choice(n + 1, 2, replace=False)) for n in whole.shape]
            box = tuple((int(a), int(b)) for a, b in ends)
            expected = whole[tuple(slice(*bounds) for bounds in box)]
            np.testing.assert_array_equal(weights.read(layer, name, box), expected, err_msg=name)


def test_a_part_of_heads_or_of_a_width_is_read_alone(tmp_path, monkeypatch):
    model = model_of("llama")
    weights = folder.open_weights(write_folder(tmp_path, "llama"), model)
    num_bytes, preadv = [], os.preadv

    def counted(descriptor: int, buffers: list, at: int) -> int:
        num_bytes.append(len(buffers[0]))
        return preadv(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", counted)
    for name in ("query_DHK", "up_DF", "out_HKD", "down_FD"):  # rows of the tensor; then columns
        [place] = weights.places["block_000"][name]
        parameter = place.parameter
        box = tuple(
            (n // 2 if dim in "HF" else 0, n)
            for dim, n in zip(parameter.dims, parameter.shape, strict=True)
        )
        num_bytes.clear()
        weights.read("block_000", name, box)
        assert sum(num_bytes) == 4 * parameter.size() // 2


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_numbers_that_are_not_finite_are_refused_where_they_are_read(dtype, tmp_path, monkeypatch):
    """A box without them is read."""
    monkeypatch.setattr(tensor_rows, "MAX_BYTES", 700)
    tensors = tensors_of("llama", model_of("llama"), dtype)
    tensors[Q][32, 9], tensors[Q][63, 0] = np.nan, -np.inf
    weights = folder.open_weights(write_folder(tmp_path, "llama", tensors), model_of("llama"))
    read = functools.partial(weights.read, "block_003", "query_DHK")
    assert np.isfinite(read(((0, 40), (0, 2), (0, 16)))).all()
    for box, count in ((((0, 40), (0, 4), (0, 16)), 2), (((0, 10), (2, 3), (0, 16)), 1)):
        with pytest.raises(CheckpointError, match=rf"{Q} that are NaN .*\n  found: {count} among"):
            read(box)


def test_codes_in_fp8_are_read_times_the_scales_of_their_blocks(tmp_path, monkeypatch):
    """Blocks at the edges are smaller, and a layer behind the last one is passed by."""
    monkeypatch.setattr(tensor_rows, "MAX_BYTES", 700)
    model, wanted, stored = model_of("deepseek_v3"), {}, {}
    for name, tensor in tensors_of("deepseek_v3", model).items():
        stored[name] = wanted[name] = tensor
        if ".mlp." in name and name.endswith("proj.weight"):
            rows, columns = tensor.shape
            codes = tensor.astype(ml_dtypes.float8_e4m3fn)
            scales = np.random.default_rng(0).uniform(0.5, 2, (-(-rows // 12), -(-columns // 16)))
            scales = scales.astype(np.float32)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            spread = np.repeat(np.repeat(scales, 12, 0), 16, 1)[:rows, :columns]
            wanted[name] = codes.astype(np.float32) * spread
    stored[f"model.layers.{model.num_layers}.eh_proj.weight"] = np.zeros(2, np.float32)
    where = write_folder(tmp_path / "in", "deepseek_v3", stored)
    with pytest.raises(HolmesError, match="F8_E4M3"):
        folder.open_weights(where, model)
    scaled = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [12, 16]}
    changes = {"quantization_config": scaled, "num_nextn_predict_layers": 1}
    write_config(where, "deepseek_v3", **changes)
    weights = folder.open_weights(where, model)
    assert weights.dtype == "F8_E4M3"
    for layer, its_places in weights.places.items():
        for name, boxes in its_places.items():
            parts = [place.to_parameter(wanted[place.tensor]) for place in boxes]
            expected = parts[0] if boxes[0].expert is None else np.stack(parts)
            ends = [(n // 3, n) for n in expected.shape]
            found = weights.read(layer, name, tuple(ends))
            np.testing.assert_array_equal(found, expected[tuple(slice(*x) for x in ends)], name)
    exported = export.config_of(model, where, None, None)
    assert "quantization_config" not in exported
    assert exported["num_nextn_predict_layers"] == 0
    name = next(name for name in stored if name.endswith(SUFFIX))
    for wrong in ({name: stored[name][1:]}, {name: stored[name].astype(np.float16)}):
        write_folder(where, "deepseek_v3", stored | wrong)
        write_config(where, "deepseek_v3", **changes)
        with pytest.raises(CheckpointError, match=name):
            folder.open_weights(where, model)


# ---- folders that are refused --------------------------------------------------------------------

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def header(entries: Any, data: bytes = bytes(8)) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> bytes:
    return header({"a": {**GOOD["a"], **changes}})


FILES: list[tuple[bytes, str]] = [
    (b"", "would not fit"),
    (b"\x01", "would not fit"),
    ((2**63).to_bytes(8, "little") + b"{}", "would not fit"),
    ((99).to_bytes(8, "little") + b"{}", "would not fit"),
    (header(b"[1]"), "must begin with {"),
    (header(b"{" * 50_000), "is no JSON"),
    (header(b"{\xff}"), "is no JSON"),
    (header(b'{"a": NaN}'), "is no JSON"),
    (header(b'{"a": 1, "a": 1}'), "stands twice"),
    (header({"a": 1}), "without dtype"),
    (header({**GOOD, "__metadata__": {"format": 1}}), "metadata that are no texts"),
    (entry(dtype="F33"), "of a dtype"),
    (entry(dtype=["F32"]), "of a dtype"),
    (entry(shape=[-2]), "of a shape"),
    (entry(shape=[2.0]), "of a shape"),
    (entry(shape=[True, 2]), "of a shape"),
    (entry(shape=[2**62, 4]), "are not those of its shape"),
    (entry(shape=[3]), "are not those of its shape"),
    (entry(data_offsets=[8, 0]), "are not those of its shape"),
    (entry(data_offsets=[0]), "data_offsets cannot be"),
    (entry(data_offsets=[4, 12]), "a gap before"),
    (header({**GOOD, "b": GOOD["a"]}), "another tensor under"),
    (header(GOOD, bytes(7)), "is cut off"),
    (header(GOOD, bytes(9)), "has more bytes"),
]


@cases("content, problem", FILES)
def test_a_file_that_is_not_whole_is_refused_at_once(content: bytes, problem: str, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    start_s = time.process_time()
    with pytest.raises(CheckpointError) as error:
        safetensors_file.read_header(path)
    cpu_s, peak = time.process_time() - start_s, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problem in str(error.value)
    assert str(path) in error.value.where
    assert cpu_s < 1
    assert peak < 10 * 2**20


def _index(weight_map: Any) -> Callable[[Path], None]:
    def change(where: Path) -> None:
        (where / folder.WEIGHTS).rename(where / "model-00001-of-00001.safetensors")
        (where / folder.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return change


def _tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def run(where: Path) -> None:
        tensors = tensors_of("llama", model_of("llama"))
        change(tensors)
        save_file(tensors, where / folder.WEIGHTS)

    return run


def _pickled(where: Path) -> None:
    (where / folder.WEIGHTS).rename(where / "pytorch_model.bin")


def _without_index(where: Path) -> None:
    (where / folder.WEIGHTS).rename(where / "model-00001-of-00001.safetensors")


def _both(where: Path) -> None:
    (where / folder.INDEX).write_text("{}")


def _pipe(where: Path) -> None:
    (where / folder.WEIGHTS).unlink()
    os.mkfifo(where / folder.WEIGHTS)


def _gone(where: Path) -> None:
    (where / folder.WEIGHTS).unlink()


Q, UP = "model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
FOLDERS: list[tuple[Callable[[Path], None], str]] = [
    (_gone, "no such file"),
    (_pickled, "save_pretrained(NEW_DIR)"),
    (_without_index, f"download {folder.INDEX} too"),
    (_both, "remove the one that is old"),
    (_pipe, "a device or a pipe"),
    (_index([]), "must have weight_map"),
    (_index({"a": 1}), "must have weight_map"),
    (_index({"a": "../model.safetensors"}), "files of its own folder"),
    (_index({"a": "/etc/model.safetensors"}), "files of its own folder"),
    (_index({"a": "model-00002-of-00002.safetensors"}), "model-00002-of-00002.safetensors"),
    (_index({"a": "model-00001-of-00001.safetensors"}), "does not say that"),
    (_tensors(lambda t: t.pop(Q)), f"{Q} missing"),
    (_tensors(lambda t: t.update(x=np.zeros(3, np.float32))), "x unknown"),
    (_tensors(lambda t: t.update({UP: t[UP].T.copy()})), f"{UP} [40, 48], not [48, 40]"),
    (_tensors(lambda t: t.update({UP: t[UP].astype(np.int32)})), f"{UP} I32"),
    (_tensors(lambda t: t.update({UP[6:]: t[UP]})), f"holds the tensor {UP} twice"),
]


@cases("change, problem", FOLDERS)
def test_a_folder_that_is_not_the_models_is_refused_with_names(
    change: Callable[[Path], None], problem: str, tmp_path
):
    write_folder(tmp_path, "llama")
    change(tmp_path)
    with pytest.raises(CheckpointError) as error:
        folder.open_weights(tmp_path, model_of("llama"))
    assert problem in str(error.value)
    assert str(tmp_path) in error.value.where


def test_names_of_older_folders_are_known(tmp_path):
    model = model_of("gpt2")
    old = {name.removeprefix("transformer."): x for name, x in tensors_of("gpt2", model).items()}
    old["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)  # the causal mask
    found = folder.open_weights(write_folder(tmp_path, "gpt2", old), model)
    np.testing.assert_array_equal(found.read("embed", "token_VD"), old["wte.weight"])


def test_a_tied_table_may_be_there_twice_if_both_are_equal(tmp_path):
    model = model_of("gemma2")
    tensors = tensors_of("gemma2", model)
    head = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"] = head
    folder.open_weights(write_folder(tmp_path / "equal", "gemma2", tensors), model)
    head[-1, -1] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, that is not model\.embed_tokens"):
        folder.open_weights(write_folder(tmp_path / "other", "gemma2", tensors), model)


@pytest.mark.parametrize(
    "family, table", [("gemma2", "model.embed_tokens"), ("gpt2", "transformer.wte")]
)
def test_a_tied_table_may_be_there_as_the_head_alone(family, table, tmp_path):
    model = model_of(family)
    tensors = tensors_of(family, model)
    head = tensors["lm_head.weight"] = tensors.pop(f"{table}.weight")
    found = folder.open_weights(write_folder(tmp_path / "good", family, tensors), model)
    np.testing.assert_array_equal(found.read("embed", "token_VD"), head)
    untied = dataclasses.replace(model, tied_embeddings=False)
    with pytest.raises(CheckpointError, match=rf"{table}\.weight missing"):
        folder.open_weights(tmp_path / "good", untied)
    tensors["lm_head.weight"] = head[1:].copy()
    with pytest.raises(CheckpointError, match=rf"{table}\.weight \[95, 40\], not \[96, 40\]"):
        folder.open_weights(write_folder(tmp_path / "short", family, tensors), model)


def test_the_text_model_of_a_gemma_3_with_images_is_found(tmp_path):
    model = model_of("gemma3_text")
    tensors = tensors_of("gemma3_text", model)
    published = {f"language_model.{name}": x for name, x in tensors.items()}
    published["vision_tower.vision_model.head.bias"] = np.zeros(3, np.float32)
    write_folder(tmp_path, "gemma3_text", published)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = folder.open_weights(tmp_path, model)
    expected = tensors["model.norm.weight"]
    np.testing.assert_array_equal(found.read("head", "norm/scale_D"), expected)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_crash(tmp_path):
    model = model_of("llama")
    weights = folder.open_weights(write_folder(tmp_path, "llama"), model)
    os.truncate(tmp_path / folder.WEIGHTS, 10_000)
    with pytest.raises(HolmesError, match="ends early"):
        weights.read("head", "norm/scale_D")
