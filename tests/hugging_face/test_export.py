"""An import and an export give back the bits of a folder, and nothing else is left behind."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from holmesjax.data import tokenizer_files
from holmesjax.errors import CheckpointError, ConfigError, DataError
from holmesjax.hugging_face import export, folder, tensor_rows
from holmesjax.hugging_face.safetensors_file import DTYPES, write
from launch.__main__ import main
from tests.data.tokenizer_kinds import SPECIAL, byte_level, write as write_tokenizer
from tests.hugging_face.families import CONFIGS, model_of, tensors_of, write_config
from tests.hugging_face.read_back import layers_of


def load(where: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as the library `safetensors` reads them."""
    found = {}
    for path in sorted(where.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", CONFIGS)
def test_an_import_and_an_export_give_back_all_bits(family: str, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_rows, "MAX_BYTES", 700)  # many pieces, of a few rows each
    model = model_of(family)
    for dtype, name in (("F32", "float32"), ("BF16", "bfloat16")):
        source, out = tmp_path / f"in_{dtype}", tmp_path / f"out_{dtype}"
        write_config(source, family, dtype=name)
        tensors = tensors_of(family, model, dtype)
        save_file(tensors, source / folder.WEIGHTS)
        layers = layers_of(folder.open_weights(source, model))
        config = export.config_of(model, source, None, None)
        names = export.write(out, config, model, layers, max_bytes=50_000, kept=source)
        back = load(out)
        assert back.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert (back[key].dtype, back[key].tobytes()) == (tensor.dtype, tensor.tobytes()), key
        index = json.loads((out / folder.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()
        assert len(names) > 1
        assert all((out / file).stat().st_mode & 0o777 == 0o644 for file in names)
        written = json.loads((out / "config.json").read_text())
        assert written | json.loads((source / "config.json").read_text()) == written
        others = {"config.json", "generation_config.json", folder.INDEX, *names}
        assert {path.name for path in out.iterdir()} == others


def test_an_export_that_fails_leaves_nothing(tmp_path):
    model = model_of("llama")

    def layers() -> Iterator[export.Layer]:
        yield "embed", {"token_VD": np.zeros((model.vocab_size, model.width), np.float32)}
        raise OSError(28, "No space left on device")

    config = export.config_of(model, None, "llama", "float32")
    with pytest.raises(CheckpointError, match="No space left"):
        export.write(tmp_path / "out", config, model, layers(), max_bytes=10**9)
    assert not list(tmp_path.iterdir())


def test_what_an_export_would_lose_is_refused_before_anything_is_written(tmp_path):
    model = model_of("qwen2")
    end = {"content": SPECIAL[2], "lstrip": True, "special": True}
    said = {"eos_token": SPECIAL[2], "added_tokens_decoder": {"2": end}}
    tokenizer = tokenizer_files.load(write_tokenizer(tmp_path / "t", byte_level(), said))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "generation_config.json").write_text("{")
    config = export.config_of(model, None, "qwen2", "float32")
    for lost, problem in (
        ({"tokenizer": tokenizer}, "gives eos_token flags that transformers drops"),
        ({"kept": tmp_path / "kept"}, "generation_config.json: is no JSON"),
    ):

        def layers(problem: str = problem) -> Iterator[export.Layer]:
            pytest.fail(f"begins to write, where {problem!r} is known")
            yield

        out = tmp_path / "absent" / "out"
        with pytest.raises((CheckpointError, DataError), match=problem):
            export.write(out, config, model, layers(), max_bytes=10**9, **lost)
        assert not out.parent.exists()


def test_only_an_empty_folder_is_written(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file", "file/inside"):
        with pytest.raises(ConfigError, match="--out: cannot be written"):
            export.refuse_full(tmp_path / name)
    (tmp_path / "empty").mkdir()
    export.refuse_full(tmp_path / "empty")
    export.refuse_full(tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


sizes = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(sizes=sizes, max_bytes=st.integers(1, 20))
def test_files_have_the_tensors_that_huggingface_hub_gives_them(sizes, max_bytes):
    shapes = {f"t{i}": (size,) for i, size in enumerate(sizes)}
    found = export.shards(shapes, lambda _: 2, max_bytes)
    own = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: 2 * shape[0],
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    assert {name: list(tensors) for name, tensors in found.items()} == own.filename_to_tensors


def test_a_tensor_above_the_limit_has_a_file_and_the_others_theirs(tmp_path):
    """Every tensor is above it, then the tables alone, then nothing."""
    model = model_of("llama")
    tensors = tensors_of("llama", model)
    write_config(tmp_path / "in", "llama")
    save_file(tensors, tmp_path / "in" / folder.WEIGHTS)
    config = export.config_of(model, tmp_path / "in", None, None)
    table = 4 * model.vocab_size * model.width
    for max_bytes, num_files in ((1, len(tensors)), (table - 1, None), (10**9, 1)):
        out = tmp_path / f"out_{max_bytes}"
        layers = layers_of(folder.open_weights(tmp_path / "in", model))
        names = export.write(out, config, model, layers, max_bytes=max_bytes)
        assert num_files in (None, len(names))
        assert {path.name for path in out.glob("*.safetensors")} == set(names)
        back = load(out)
        assert back.keys() == tensors.keys()
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(back[key], tensor, key)
        folder.open_weights(out, model)  # each tensor is where the index says


def test_a_model_of_ones_own_is_refused_whatever_its_settings_are():
    own = dataclasses.replace(model_of("llama"), module="my:model")
    for family in (None, "llama"):
        with pytest.raises(ConfigError, match=r"model\.module: has no place .*\n  found: my:model"):
            export.config_of(own, None, family, None)


def test_a_size_of_files_that_is_none_is_refused_first(capsys):
    for size, message in {
        "10KB": "'KB' is not a unit of size\n  found: 10KB\n  fix: did you mean 10 kB",
        "7": "has no unit\n  found: 7\n  fix: write a number and a unit",
        "0GB": "must be above 0\n  found: 0GB",
    }.items():
        assert main(["export", "nowhere", "--out", "nowhere", "--max-shard-size", size]) == 2
        assert f"error: --max-shard-size: {message}" in capsys.readouterr().err


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(deadline=None, max_examples=30)
@given(shapes=st.dictionaries(names, shapes, max_size=4), dtype=st.sampled_from(sorted(DTYPES)))
def test_a_file_is_what_the_library_reads(shapes: dict, dtype: str, tmp_path_factory):
    shapes.pop("__metadata__", None)
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape[::-1]).T for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    write(path, lambda _: dtype, shapes, arrays.values())
    with safe_open(path, "np") as file:
        assert set(file.keys()) == arrays.keys()
        for name, array in arrays.items():
            expected = np.asarray(array).astype(DTYPES[dtype])
            np.testing.assert_array_equal(file.get_tensor(name), expected)
