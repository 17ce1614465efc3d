"""A day on a GPU loses nothing to a part that fails, and is rehearsed without a GPU."""

import functools
import importlib
import json
import re
import time

import jax
import psutil
import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import FORMATS, PARTS
from benchmarks.gpu_day_parts import TILES, is_deterministic, tiles_of
from benchmarks.gpu_day_processes import DayPart, _batches, report, run_parts, run_together
from benchmarks.provenance import RESULTS, commit
from kernels.attention.pallas import attention_pallas
from tests.kernels.attention.gpus import lowered_for_cuda


def planted(name, limit_s=60.0, argument=None):
    return DayPart(name, limit_s, f"tests.benchmarks.planted_parts:{name}", argument)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_failure_is_a_row_and_what_ended_is_not_run_again(tmp_path):
    out, ran, child = tmp_path / "out", tmp_path / "ran", tmp_path / "child"
    note, late = planted("note", argument=str(ran)), planted("note", argument=str(ran))
    parts = [note, planted("crash"), planted("die"), planted("hang", 15.0, str(child))]
    result = run_parts(parts, out, 25, rehearse=True)
    assert result["parts"]["note"] == [
        {"what": "a", "is": "rehearsal True"},
        {"what": "b", "rate": "1 TFLOP/s", "spread": 0.5},
    ]
    problems = {}
    for name in ("crash", "die", "hang"):
        before, failed = result["parts"][name]
        assert before == {"what": "before", "is": "well"}
        problems[name] = failed["problem"]
    assert problems == {
        "crash": "exit status 1: RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS",
        "die": "exit status 7: ",
        "hang": "no end within 15 s",
    }
    deadline_s = time.monotonic() + 30
    while not is_gone(int(child.read_text())) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert is_gone(int(child.read_text()))

    files = {path.name: path for path in out.iterdir()}
    assert files.keys() == {f"gpu_day_rehearsal.{kind}" for kind in ("json", "md", "log")}
    assert json.loads(files["gpu_day_rehearsal.json"].read_text()) == result
    text = files["gpu_day_rehearsal.md"].read_text()
    assert text.startswith("A rehearsal on a CPU: no number here means anything.")
    assert "| note | b |  | 1 TFLOP/s; spread 50.0% |" in text
    assert "| crash | crash |  | FAILED: exit status 1: RuntimeError: CUDA_ERROR" in text
    assert "cuDNN 9.19 on an H200" in text
    assert "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS" in files["gpu_day_rehearsal.log"].read_text()

    again = run_parts([*parts, late._replace(name="late")], out, 25, rehearse=True)
    assert [*again["parts"]] == ["note", "crash", "die", "hang", "late"]
    assert ran.read_text() == "ran\n" * 2  # `note` once, and then `late`


def test_a_part_that_the_end_of_the_day_cuts_short_is_run_again(tmp_path, capsys):
    parts = [planted("hang", argument=str(tmp_path / "child")), planted("crash")]
    result = run_parts(parts, tmp_path, 3 / 60, rehearse=True)
    assert "no end within" in result["parts"]["hang"][-1]["problem"]
    assert "crash: no time left" in capsys.readouterr().out
    parts = [planted("note", argument=str(tmp_path / "ran"))._replace(name="hang")]
    again = run_parts(parts, tmp_path, 25, rehearse=True)
    assert again["parts"]["hang"][0]["what"] == "a"


def test_nothing_more_is_run_where_the_first_part_finds_no_device(tmp_path):
    note = planted("note", argument=str(tmp_path / "ran"))
    parts = [planted("absent"), note]
    for part in (parts[0], note._replace(name="absent")):
        result = run_parts([part, note], tmp_path, 25, rehearse=True)
    assert [rows[0]["what"] for rows in result["parts"].values()] == ["a", "a"]
    assert (tmp_path / "ran").read_text() == "ran\n" * 2


def test_checks_run_at_the_same_time_and_other_parts_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    met = tmp_path / "met"
    met.mkdir()
    parts = [planted("meet", argument=str(met))._replace(name=name) for name in "abcd"]
    checks = [part._replace(is_check=True) for part in parts]
    sizes = lambda parts: [len(batch) for batch in _batches(parts)]
    assert sizes([*parts, *checks[1:]]) == [1, 1, 1, 1, 2, 1]
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert sizes(2 * checks) == [5, 3]
    result = run_parts(checks[:2], tmp_path / "out", 25, rehearse=True)
    assert [rows[0]["is"] for rows in result["parts"].values()] == ["2", "2"]


def test_a_check_tunes_nothing_and_leaves_the_others_their_memory(tmp_path):
    names = ["XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"]
    found = {}
    for is_check in (False, True):
        part = planted("environment", argument=names)._replace(is_check=is_check)
        [outcome] = run_together([part], 60, rehearse=False)
        found[is_check] = [row["is"] for row in outcome.rows]
    assert "--xla_gpu_autotune_level=0" in found[True][0].split()
    assert found[True][1] == "false"
    assert "autotune" not in found[False][0]


def test_a_part_is_not_begun_with_less_time_than_it_needs(tmp_path, capsys):
    long = planted("crash")._replace(needs_s=120)
    parts = [long, planted("note", argument=str(tmp_path / "ran"))]
    result = run_parts(parts, tmp_path, 1, rehearse=True)
    assert [*result["parts"]] == ["note"]
    assert "crash: no time left, it needs 120 s" in capsys.readouterr().out


def test_what_was_never_measured_comes_first():
    names = [part.name for part in PARTS]
    unmeasured = ["pipeline"]
    unmeasured += [f"values of AdamW in {x}" for x in FORMATS]
    unmeasured += ["adamw", "cross-entropy"]
    # `current` scales were never measured; what they cost is the difference of the two.
    unmeasured += ["training 1.3B-fp8", "training 1.3B-fp8-current"]
    unmeasured += ["profile", "quickstart"]
    assert names[: 1 + len(unmeasured)] == ["machine", *unmeasured]
    tiles = [part for part in PARTS if part.name.startswith("tiles")]
    assert [*tiles[0].argument] == ["dkv"]
    needs_s = {part.name: part.needs_s for part in PARTS}
    assert (needs_s["training 3.6B"], needs_s["training 1.3B, PyTorch"]) == (120, 100)
    # What must be begun does fit into a quarter of an hour.
    assert sum(needs_s[name] for name in unmeasured) < 0.8 * 15 * 60


def test_a_result_keeps_its_commit_and_another_device_has_its_own(tmp_path):
    part = planted("note", argument=str(tmp_path / "ran"))
    result = run_parts([part], tmp_path, 25, rehearse=False)
    assert result["parts"]["note"][0]["is"] == "rehearsal False"
    path = tmp_path / "gpu_day_not_known.json"  # there is no GPU
    path.write_text(json.dumps(result | {"commits": {"note": "0000000"}}))
    assert run_parts([part], tmp_path, 25, rehearse=False)["commits"] == {"note": "0000000"}
    assert "commit 0000000" in report(json.loads(path.read_text()))
    run_parts([part], tmp_path, 25, rehearse=True)
    assert (tmp_path / "ran").read_text() == "ran\n" * 2
    found = run_parts([part], tmp_path, 25, rehearse=False, again=["no"])
    assert found["commits"] == {"note": commit()}


def test_a_result_file_says_what_its_numbers_say():
    for path in RESULTS.glob("gpu_day_*.json"):
        assert path.with_suffix(".md").read_text() == report(json.loads(path.read_text())), path


def test_a_copy_without_git_has_a_digest_in_place_of_a_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert re.fullmatch(r"not known, source [0-9a-f]{16}", commit())


def test_parts_have_names_of_their_own_and_functions_that_exist():
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, function = part.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert json.loads(json.dumps(part.argument)) == part.argument  # as its process reads it


@pytest.mark.parametrize("name", ["values of cuDNN 1", "values of Pallas 7"])
def test_values_are_rehearsed(name):
    [part] = [part for part in PARTS if part.name == name]
    [outcome] = run_together([part._replace(limit_s=250)], 250, rehearse=True)
    [row] = outcome.rows
    assert (row["is"], row["problem"]) == ("ok", None), row


@pytest.mark.exhaustive
@pytest.mark.parametrize("argument", TILES, ids=str)
def test_tiles_fit_into_the_memory_of_a_block(argument):
    arrays = [jax.ShapeDtypeStruct((1, 4096, heads, 128), "bfloat16") for heads in (64, 8, 8)]
    own = {"tiles": tiles_of(argument), "deterministic": is_deterministic(argument)}
    attention = functools.partial(attention_pallas, **own)
    loss = lambda *arrays: attention(*arrays)[0].astype("float32").sum()
    assert "mosaic_gpu" in lowered_for_cuda(jax.grad(loss, (0, 1, 2)), *arrays)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_whole_day_is_rehearsed(tmp_path, monkeypatch, capsys):
    argv = ["gpu_day", "--rehearse", "--out", str(tmp_path), "--minutes", "20"]
    monkeypatch.setattr("sys.argv", argv)
    assert gpu_day.main() == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "gpu_day_rehearsal.json").read_text())
    assert [*result["parts"]] == [part.name for part in PARTS]
    assert all(result["parts"].values())
