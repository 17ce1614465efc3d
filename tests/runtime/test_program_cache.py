"""Compiled programs are found again, and nothing that befalls their files is noticed."""

import os

import jax
import pytest

from holmesjax.config import AUTO, RunConfig
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.runtime import program_cache
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.program_cache import Store
from tests.disks import files_of_at_most
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model

KEY, VALUE = "jit_f-0123", bytes(range(256)) * 40


@pytest.fixture
def restored():
    """The folder of this session of tests, afterwards."""
    yield
    program_cache.use(AUTO, os.environ, print)


def test_a_run_compiles_nothing_that_one_before_has_compiled(tmp_path, restored):
    """Two chunks that are alike share their programs, too."""
    program_cache.use(str(tmp_path), {}, print)
    events, num_compiled = [], []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
    plan = hand_made_plan((4,), 1, 1, schedule="interleaved_1f1b", chunks=4)
    chunks = make_chunks(make_model(), plan)[1:3]

    def compile_all():
        events.clear(), num_compiled.clear(), jax.clear_caches()
        programs = compile_chunks(chunks, lambda: num_compiled.append(1))
        assert [p.chunk for p in programs] == chunks
        return len(num_compiled), events.count("cache_misses")

    count = 6  # forward, backward, gather, zero_gradients, chunk_totals, update
    compiled, misses = compile_all()
    assert compiled == count
    assert misses >= count  # JAX has small ones of its own
    assert compile_all() == (count, 0)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:9] + b"?" + b[10:], lambda b: b""]
)
def test_a_damaged_file_is_a_program_to_be_compiled_again(tmp_path, damage):
    store = Store(tmp_path)
    store.put(KEY, VALUE)
    (tmp_path / KEY).write_bytes(damage((tmp_path / KEY).read_bytes()))
    assert store.get(KEY) is None
    store.put(KEY, VALUE)
    assert Store(tmp_path).get(KEY) == VALUE


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path):
    store = Store(tmp_path)
    with files_of_at_most(1000):
        store.put(KEY, VALUE)
    assert store.get(KEY) is None
    assert not list(tmp_path.iterdir())


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch, restored):
    folder = tmp_path / "jax-0.1" / "any"
    folder.mkdir(parents=True)
    store = Store(folder)
    for key in "abc":
        store.put(key, VALUE)
    store.get("a")
    monkeypatch.setattr(program_cache, "MAX_BYTES", 2.5 * len(VALUE))
    program_cache.use(str(tmp_path), {}, print)
    assert [key for key in "abc" if store.get(key)] == ["a", "c"]


def test_a_place_that_cannot_be(tmp_path, restored):
    told = []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        program_cache.use(str(tmp_path / "file"), {}, told.append)
    for bad in ("programs", "", "a/b"):
        with pytest.raises((HolmesError, ValueError)):
            RunConfig(dir="x", compilation_cache=bad)
    program_cache.use("/proc/holmes", {}, told.append)
    assert len(told) == 1
    assert jax.config.jax_compilation_cache_dir is None
