"""The facts on which the numbers of a process depend, and the settings of JAX that change them."""

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys

import jax
import pytest

from holmesjax.config import CHECKOUT, OptimizerConfig
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.files import run_folder
from holmesjax.hosts import computing, jax_settings
from holmesjax.parallel import platforms
from tests.hand_made_plans import make_model

FLAG = "--xla_gpu_autotune_level"  # which XLA knows


def test_every_source_file_that_a_process_runs_counts(tmp_path):
    """One comment in one file of a copy of the checkout gives another digest."""
    for package in ("holmesjax", "kernels", "launch"):
        shutil.copytree(CHECKOUT / package, tmp_path / package)
    code = "from holmesjax.hosts import computing; print(computing.source_digest())"

    def digest() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.check_output(command, cwd=tmp_path, text=True, timeout=240).strip()

    assert digest() == computing.source_digest()
    for file in ("kernels/norm.py", "holmesjax/optimizers/adamw.py", "launch/workers.py"):
        with (tmp_path / file).open("a") as changed:
            changed.write("# another\n")
        assert digest() != computing.source_digest()
        shutil.copy(CHECKOUT / file, tmp_path / file)


def test_flags_and_variables_are_facts_by_name_and_places_are_none():
    env = {
        "XLA_FLAGS": f"{FLAG}=1 --xla_cpu_enable_fast_math {FLAG}=2 --xla_dump_to=/tmp/x",
        "NCCL_ALGO": "Ring",
        "HOME": "/root",
    }
    flags = {FLAG: "2", "--xla_cpu_enable_fast_math": "true"}
    found = computing.facts(env, [], {})
    own = {name: value for name, value in found.items() if name not in computing.PACKAGES}
    assert own.pop("source") == computing.source_digest()
    assert own == {**flags, "NCCL_ALGO": "Ring"}
    assert found["jax"] == jax.__version__
    assert all(map(computing.is_fact, found))
    for name in ("train.seed", "--xla_a", "--xla_gpu_autotune_leve", "--xla", ""):
        assert not computing.is_fact(name)


@pytest.mark.parametrize("file", ["alien.py", "alien/layers/norms.py"])
@pytest.mark.parametrize(
    "setting, value",
    [
        ("model.module", "alien:f"),
        ("model.pattern", ("block", "alien.layers:f")),
        ("optimizer.function", "alien:f"),
    ],
)
def test_the_files_of_ones_own_code_are_facts(setting, value, file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "alien" / "layers").mkdir(parents=True)
    section, _, name = setting.partition(".")
    sections = {"model": make_model(), "optimizer": OptimizerConfig(learning_rate=1.0)}
    optax = {"name": "optax"} if section == "optimizer" else {}
    sections[section] = dataclasses.replace(sections[section], **{name: value}, **optax)
    digests = set()
    for text in ("def f(settings): ...\n", "def f(settings): return []\n"):
        (tmp_path / file).write_text(text)
        importlib.invalidate_caches()
        facts = computing.facts({}, [], computing.own_sources(**sections))
        digests.add(facts[f"source of {setting}"])
    assert len(digests) == 2
    assert computing.is_fact(f"source of {setting}")


def test_every_setting_of_jax_is_kept_on_purpose_or_taken_away():
    """Those that JAX has, and one of a JAX to come; a run needs none of what is taken away."""
    names = {"JAX_" + name.removeprefix("jax_").upper() for name in jax.config.values}
    env = dict.fromkeys({*names, "JAX_TO_COME", "PATH"}, "1")
    taken = jax_settings.take_away(env)
    assert {name.lower() for name in taken} >= {*platforms.NUMBERS, "jax_to_come"}
    assert "PATH" in env
    assert {"JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR"} <= set(env)


@pytest.mark.parametrize("name, value", [("jax_enable_x64", True), ("jax_random_seed_offset", 7)])
def test_a_program_that_sets_jax_otherwise_is_refused(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.raises(ConfigError, match=f"jax.config.{name}: changes what a run computes"):
            platforms.use_devices({"cpu"}, 1, rehearse=False)
    finally:
        jax.config.update(name, before)


def test_settings_of_the_shell_are_said_and_have_no_effect(tmp_path):
    """A verb that imports JAX sees none of them."""
    env = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_THREEFRY_PARTITIONABLE": "0"}
    code = (
        "import sys, types\n"
        "from launch import __main__ as launch\n"
        "sys.modules['launch.verbs.nics'] = verb = types.ModuleType('verb')\n"
        "def run(args):\n"
        "    import jax\n"
        "    print(jax.config.jax_enable_x64, jax.config.jax_threefry_partitionable)\n"
        "    return 0\n"
        "verb.run = run\n"
        "sys.exit(launch.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "nics"]
    done = subprocess.run(
        command, env=env, cwd=CHECKOUT, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "False True\n", done.stderr
    for name, value in (("JAX_ENABLE_X64", "1"), ("JAX_THREEFRY_PARTITIONABLE", "0")):
        assert f"note: {name}={value} of the environment is not used" in done.stderr


def test_what_may_differ_is_kept_for_repeated_starts(tmp_path):
    assert computing.permitted(tmp_path, []) == ()
    assert not list(tmp_path.iterdir())
    assert computing.permitted(tmp_path, ["source", "train.seed"]) == ("source",)
    assert computing.permitted(tmp_path, [FLAG, "source"]) == ("source", FLAG)
    assert computing.permitted(tmp_path, []) == ("source", FLAG)
    for damage in (b"\xff", b"5", b"[1]", b"{}"):
        (tmp_path / run_folder.ALLOWED_DIFFERENCES).write_bytes(damage)
        with pytest.raises(HolmesError, match=r"allowed_differences\.json: cannot be read"):
            computing.permitted(tmp_path, [])
