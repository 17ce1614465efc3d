"""Tiles that were measured, and where they count."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from benchmarks import kernels_tune
from kernels import attention_mosaic, attention_triton, tuned
from kernels.attention_triton import Tiles
from kernels.tuned import Case

CASE = Case("NVIDIA H200", "triton", "bfloat16", 128, 4096)
DEFAULTS = attention_triton.default_tiles(128, jnp.dtype("bfloat16"))


def entry(case, kernel, **tiles):
    return {**case._asdict(), "kernel": kernel, "tiles": tiles}


@pytest.fixture
def measured(monkeypatch):
    sizes = {"keys": 64, "num_warps": 8, "num_stages": 2}
    found = [
        entry(CASE._replace(length=1024), "forward", queries=16, **sizes),
        entry(CASE._replace(length=8192), "forward", queries=32, **sizes),
        entry(CASE, "dq", queries=128, **sizes),
        entry(CASE._replace(device_kind="NVIDIA A100"), "dkv", queries=256, **sizes),
        entry(CASE._replace(backend="mosaic"), "dkv", streamed=32, slots=3),
    ]
    monkeypatch.setattr(tuned, "entries", lambda: found)


@pytest.mark.usefixtures("measured")
def test_the_nearest_length_counts():
    for length, queries in ((500, 16), (2000, 16), (4096, 32), (100_000, 32)):
        got = tuned.tuned(DEFAULTS, CASE._replace(length=length))
        assert got.forward == Tiles(queries=queries, keys=64, num_warps=8, num_stages=2)
        assert got.dq.queries == 128
        assert got.dkv == DEFAULTS.dkv


@pytest.mark.usefixtures("measured")
def test_others_do_not():
    for change in (
        {"device_kind": "NVIDIA B200"},
        {"dtype": "float16"},
        {"head_width": 64},
    ):
        assert tuned.tuned(DEFAULTS, CASE._replace(**change)) == DEFAULTS
    defaults = attention_mosaic.default_tiles(128)
    got = tuned.tuned(defaults, CASE._replace(backend="mosaic"))
    assert got == dataclasses.replace(defaults, dkv=attention_mosaic.Tiles(streamed=32, slots=3))


def test_the_table_is_one_that_can_be_read():
    names = {*Case._fields, "kernel", "tiles"}
    assert all(names <= set(entry) for entry in tuned.entries())


def test_what_is_measured_is_found_again(monkeypatch, tmp_path):
    """All of it, small and interpreted."""
    *_, entries = kernels_tune.tune("some GPU", rehearse=True)
    assert {entry["kernel"] for entry in entries} == {"forward", "dq", "dkv"}
    other = entry(CASE, "dq", queries=128, keys=64, num_warps=8, num_stages=2)
    monkeypatch.setattr(tuned, "PATH", tmp_path / "tuned.json")
    tuned.PATH.write_text(json.dumps([other, {**other, "device_kind": "some GPU"}]))
    kernels_tune.write(entries, "some GPU")
    found = json.loads(tuned.PATH.read_text())
    assert found == [other, *entries]
    monkeypatch.setattr(tuned, "entries", lambda: found)
    case = Case(**{name: entries[0][name] for name in Case._fields})
    got = tuned.tuned(attention_triton.default_tiles(case.head_width, case.dtype), case)
    for each in entries:
        assert dataclasses.asdict(getattr(got, each["kernel"])) == each["tiles"]


def test_a_rehearsal_writes_nothing(monkeypatch, capsys):
    before = tuned.PATH.read_text()
    monkeypatch.setattr("sys.argv", ["kernels_tune", "--rehearse"])
    assert kernels_tune.main() == 0
    assert capsys.readouterr().out.count("triton") == 3
    assert tuned.PATH.read_text() == before


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    before = tuned.PATH.read_text()
    monkeypatch.setattr("sys.argv", ["kernels_tune"])
    assert kernels_tune.main() == 2
    assert "no GPU here (cpu); not measured" in capsys.readouterr().out
    assert tuned.PATH.read_text() == before
