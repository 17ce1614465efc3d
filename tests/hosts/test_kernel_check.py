"""A verdict on the kernels costs one check, whatever the check does to its process."""

import dataclasses
import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax.config import KernelsConfig
from holmesjax.hosts import kernel_check
from holmesjax.hosts.kernel_check import miscompiles, verdict
from kernels.attention.check import checks
from tests.clusters import make_config
from tests.host_files import gpu
from tests.kernels.attention import planted

LAYER = {"head_width": 8, "window": None, "soft_cap": None, "scale": None}
ASKED = {
    "kernels": "pallas",
    "dtype": "bfloat16",
    "has_documents": True,
    "deterministic": False,
    "is_cut": False,
    "layers": [LAYER],
}
GPUS = (gpu(0, "pci0000:15/0000:15:01.0/0000:1b:00.0"),)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Judges a planted kernel, on a machine that has a sound assembler."""
    monkeypatch.setattr(kernel_check, "find_assembler", lambda: (13, 1, 80))
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    said = []

    def run(name, limit_s=240.0, gpus=GPUS, asked=ASKED):
        attention = f"tests.kernels.attention.planted:{name}"
        check = ["--attention", attention, "--small"]
        said.clear()
        found = verdict(asked, gpus, env, said.append, check=check, limit_s=limit_s)
        return found, [line.split(":")[0] for line in said]

    return run


CHECKING, WARNING = "checking the attention kernels on this machine, once", "warning"


def test_right_kernels_pass_and_are_not_checked_again(judge):
    found, said = judge("right")
    assert found.problem is None
    assert said == [CHECKING]
    assert str(found).startswith("passed (devices NVIDIA H100 80GB HBM3, driver ")
    assert str(found).endswith(", ptxas 13.1.80)")
    again, said = judge("crashing")  # is not even started
    assert again == found
    assert said == []


@pytest.mark.parametrize(
    "name, is_for_good, problem",
    [
        ("wrong", True, "2 x 20 tokens, .*: the key gradient is off by"),
        ("crashing", False, "2 x 20 tokens, .*: the check ended with signal 11: "),
        ("raising", False, "2 x 20 .*: the check ended with exit status 1: RuntimeError: CUDA_ERR"),
    ],
)
def test_a_failure_is_named_and_kept(judge, name, is_for_good, problem):
    """Only a wrong number is a kernel's fault: another may have had the GPU's memory."""
    found, said = judge(name, 120.0)
    assert re.search(problem, found.problem)
    assert found.has_ended == is_for_good
    assert said == [CHECKING, WARNING]
    assert judge("right") == (found, [])


def test_a_check_that_did_not_end_is_repeated_an_hour_later(judge, tmp_path, monkeypatch):
    """A hang is found by each start once, and a machine that was only busy is not judged by it."""
    found, said = judge("hanging", 2.0)
    assert found.problem.endswith(": no end within 2 s")
    assert found.lack == f"finished check: {found.problem}"
    assert str(found).startswith("not finished: ")
    assert said == [CHECKING, WARNING]
    assert judge("right") == (found, [])
    [kept] = tmp_path.rglob("*.json")
    written_s = kept.stat().st_mtime
    for changed_s in (10 * kernel_check.RETRY_S, -kernel_check.RETRY_S):  # of a clock set back, too
        os.utime(kept, (written_s + changed_s, written_s + changed_s))
        assert kernel_check._read(kept) is None
    monkeypatch.setattr(kernel_check, "_run", lambda *args: None)
    assert judge("right")[1] == [CHECKING]
    assert judge("hanging")[1] == []


def test_a_verdict_of_which_half_is_written_is_none(judge, tmp_path, monkeypatch):
    """A process may be killed at any time, and leaves the whole file or none."""

    def full(*args):
        raise OSError(errno.ENOSPC, "no space left on the device")

    monkeypatch.setattr(kernel_check, "_run", lambda *args: None)
    assert judge("right")[1] == [CHECKING]
    [kept] = tmp_path.rglob("*.json")
    kept.write_text(kept.read_text()[:40])
    monkeypatch.setattr(Path, "replace", full)
    assert judge("right")[1] == [CHECKING]
    assert len(kept.read_text()) == 40


@pytest.mark.parametrize("error", [BlockingIOError(), OSError(errno.ENOLCK, "no locks")])
def test_a_process_checks_for_itself_where_it_gets_no_lock(judge, monkeypatch, error):
    """Some file systems have none, and a process that holds one may hang in the driver."""

    def flock(*args):
        raise error

    monkeypatch.setattr(kernel_check.fcntl, "flock", flock)
    monkeypatch.setattr(kernel_check, "_run", lambda *args: "bad")
    found, said = judge("right", limit_s=0.0)
    assert found.problem == "bad"
    assert said == [CHECKING, WARNING]


def test_a_check_that_cannot_be_killed_is_left_behind(judge, monkeypatch):
    """SIGKILL does not end what hangs in the driver."""
    check = Scripted(monkeypatch, {})
    assert judge("right", 10.0)[0].problem == "the start of JAX: no end within 10 s"
    assert check.waits[-2:] == [kernel_check.PAUSE_S, kernel_check.KILLED_S]
    assert sum(check.waits[:-1]) == pytest.approx(10.0, abs=0.3)
    assert check.killed == [12345]


class Scripted:
    """A process that prints lines at the seconds of its own clock, and ends at one of them."""

    pid = 12345

    def __init__(self, monkeypatch, lines, end_s=math.inf):
        self.lines, self.end_s = sorted(lines.items()), end_s
        self.now_s, self.waits, self.killed = 0.0, [], []
        clock = SimpleNamespace(**{n: getattr(time, n) for n in ("time", "sleep")})
        clock.monotonic = lambda: self.now_s
        monkeypatch.setattr(kernel_check, "time", clock)
        monkeypatch.setattr(kernel_check.subprocess, "Popen", self.start)
        monkeypatch.setattr(kernel_check.os, "killpg", lambda pid, _: self.killed.append(pid))

    def start(self, command, env, stdout, **_):
        self.out, self.env = stdout, env
        return self

    def wait(self, timeout):
        self.waits.append(timeout)
        self.now_s += timeout
        while self.lines and self.lines[0][0] <= self.now_s:
            print(json.dumps(self.lines.pop(0)[1]), file=self.out, flush=True)
        if self.now_s < self.end_s:
            raise subprocess.TimeoutExpired("check", timeout)
        return 0


def case(name, left=None):
    return {"begins": name} if left is None else {"what": name, "problem": None, "left": left}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ({}, "the start of JAX: no end within 60 s"),
        ({50: case("one")}, "one: no end within 60 s"),
        ({50: case("one"), 105: case("one", 1), 106: case("two")}, "two: no end within 60 s"),
        ({50: case("one"), 105: case("one", 0)}, "its end: no end within 60 s"),
    ],
)
def test_a_check_that_ran_out_of_time_names_the_case(judge, monkeypatch, lines, problem):
    check = Scripted(monkeypatch, lines)
    found, _ = judge("right", 60.0)
    assert (found.problem, found.has_ended) == (problem, False)
    assert check.now_s == pytest.approx(max(lines, default=0) + 60 + kernel_check.KILLED_S, abs=1)


def test_the_limit_follows_the_number_of_cases(judge, monkeypatch):
    """A sound H200 took 34 s for a case: one limit for all of them would end eight of them."""
    lines, now_s = {}, 20.0
    for left in range(7, -1, -1):
        lines |= {now_s: case(f"case {left}"), now_s + 34: case(f"case {left}", left)}
        now_s += 35
    check = Scripted(monkeypatch, lines, end_s=now_s)
    advances = []
    problem = kernel_check._run([], 60.0, lambda: advances.append(check.now_s))
    assert problem is None
    assert check.now_s == pytest.approx(now_s + kernel_check.KILLED_S, abs=1)
    assert now_s == 300
    assert len(advances) == len(lines) == 16  # a start that may take so long is seen to go on


def test_a_check_tries_out_no_algorithms_and_leaves_memory_to_others(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=3 --xla_a=1")
    check = Scripted(monkeypatch, {0: case("one"), 1: case("one", 0)}, end_s=2)
    assert kernel_check._run([], 60.0, lambda: None) is None
    # XLA takes the last value of a flag, which is the user's.
    assert check.env["XLA_FLAGS"].split() == [
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_autotune_level=3",
        "--xla_a=1",
    ]
    assert check.env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_no_check_has_more_cases_than_its_longest_time_is_for():
    layers = [LAYER | {"window": window} for window in (None, 5, 9)]
    for is_cut in (False, True):
        asked = ASKED | {"is_cut": is_cut, "layers": layers}
        assert len(checks(asked, planted.right, small=False)) + 1 <= kernel_check.longest_s(
            asked, 1
        )


def test_a_check_ends_by_itself_where_its_caller_is_gone():
    words = [json.dumps(ASKED), "--attention", "tests.kernels.attention.planted:hanging", "--small"]
    done = subprocess.run(
        [sys.executable, "-m", "kernels.attention.check", *words, "--limit-s", "0.1"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == -signal.SIGALRM


def test_another_machine_or_another_question_is_another_check(judge, monkeypatch):
    monkeypatch.setattr(kernel_check, "_run", lambda *args: "bad")
    assert judge("right")[1] == [CHECKING, WARNING]
    assert judge("right")[1] == []
    newer = (dataclasses.replace(GPUS[0], driver="999.1"),)
    monkeypatch.setattr(kernel_check, "_run", lambda *args: None)
    assert judge("right", gpus=newer)[1] == [CHECKING]
    assert judge("right", asked=ASKED | {"layers": [LAYER | {"window": 9}]})[1] == [CHECKING]
    monkeypatch.setattr(kernel_check, "source_digest", lambda: "0123456789abcdef")
    assert judge("right")[1] == [CHECKING]
    monkeypatch.setattr(kernel_check, "find_assembler", lambda: (13, 2, 1))
    assert judge("right")[1] == [CHECKING]


@pytest.mark.parametrize(
    "version, bad",
    [
        ((12, 6, 85), False),
        ((12, 8, 61), True),
        ((12, 8, 93), True),
        ((12, 9, 41), True),
        ((12, 9, 86), False),
        ((13, 0, 88), True),
        ((13, 1, 80), False),
        (None, False),
    ],
)
def test_an_assembler_that_miscompiles_is_refused(judge, monkeypatch, version, bad):
    monkeypatch.setattr(kernel_check, "find_assembler", lambda: version)
    monkeypatch.setattr(kernel_check, "_run", lambda *args: None)
    found, said = judge("right")
    assert (found.problem is not None) == bad == (miscompiles(version) is not None)
    assert judge("right", asked=ASKED | {"kernels": "triton"})[0].problem is None  # XLA compiles it
    found, said = judge("right")
    if bad:
        name = ".".join(map(str, version))
        install = "install nvidia-cuda-nvcc 13.1 or newer, and put its ptxas first on PATH"
        assert found.problem == f"ptxas {name} miscompiles Hopper kernels: {install}"
        assert said == []


def test_a_check_is_asked_for_the_rules_that_layers_have():
    """The model has windows of 1,024 in every second layer, and a soft cap and a scale in all."""
    config = make_config(
        parallel={"tensor": 1},
        model={
            "num_layers": 4,
            "num_heads": 2,
            "width": 128,
            "head_dim": 32,
            "pattern": ("window_block", "block"),
            "window": 1024,
            "attention_soft_cap": 50.0,
            "attention_scale": 0.125,
        },
    )
    both = {"head_width": 32, "soft_cap": 50.0, "scale": 0.125}
    asked = kernel_check.asked_of(config, is_cut=True)
    assert asked["is_cut"]
    assert asked["layers"] == [both | {"window": 1024}, both | {"window": None}]
    assert "moments" not in asked
    asking = dataclasses.replace(config, kernels=KernelsConfig(optimizer="pallas"))
    assert kernel_check.asked_of(asking, is_cut=True) == asked | {"moments": "float32"}
    assert kernel_check.asked_of_update(config) == {
        "kernels": "pallas",
        "layers": [],
        "moments": "float32",
    }


def test_a_gpu_checks_the_kernels_that_would_compute_its_layers():
    """On an A100 the layers of a run with documents whose windows are whole; on an H100 all."""
    near = LAYER | {"head_width": 64, "window": 1024}
    asked = ASKED | {"attention": "auto", "layers": [near, near | {"window": None}]}
    ampere = [dataclasses.replace(gpu, compute_capability="8.0") for gpu in GPUS]
    checks = lambda gpus, **changes: [
        (check["kernels"], check["layers"]) for check in kernel_check.checks(asked | changes, gpus)
    ]
    assert checks(GPUS) == [("pallas", asked["layers"])]
    assert checks(ampere) == [("triton", asked["layers"][1:])]
    assert checks(ampere, attention="triton") == [("triton", asked["layers"])]
    assert checks(()) == checks(GPUS, attention="reference") == []
    assert checks(GPUS, has_documents=False) == []  # cuDNN


def test_the_assembler_is_the_first_on_path(tmp_path, monkeypatch):
    """Mosaic takes that one, so a sound one of a package does not excuse it."""
    package = tmp_path / "site/nvidia/cu13/bin/ptxas"
    for path, number in ((tmp_path / "path/ptxas", "13.0.88"), (package, "13.1.80")):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho release 13, V{number}\n")
        path.chmod(0o755)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "site/nvidia")])
    monkeypatch.setattr(kernel_check.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin")
    assert kernel_check.find_assembler() == (13, 0, 88)
    monkeypatch.setenv("PATH", "/bin")
    assert kernel_check.find_assembler() == (13, 1, 80)
