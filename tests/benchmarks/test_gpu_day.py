"""A day on a GPU loses nothing to a part that fails, and is rehearsed without a GPU."""

import importlib
import json
import time

import psutil
import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import PARTS
from benchmarks.gpu_day_processes import DayPart, run_part, run_parts


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
    assert files.keys() == {"gpu_day.json", "gpu_day.md", "gpu_day.log"}
    assert json.loads(files["gpu_day.json"].read_text()) == result
    text = files["gpu_day.md"].read_text()
    assert text.startswith("A rehearsal on a CPU: no number here means anything.")
    assert "| note | b |  | 1 TFLOP/s; spread 50.0% |" in text
    assert "| crash | crash |  | FAILED: exit status 1: RuntimeError: CUDA_ERROR" in text
    assert "cuDNN 9.19 on an H200" in text
    assert "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS" in files["gpu_day.log"].read_text()

    again = run_parts([*parts, late._replace(name="late")], out, 25, rehearse=True)
    assert [*again["parts"]] == ["note", "crash", "die", "hang", "late"]
    assert ran.read_text() == "ran\n" * 2  # `note` once, and then `late`


def test_without_time_nothing_is_run(tmp_path, capsys):
    result = run_parts([planted("crash")], tmp_path, 0, rehearse=True)
    assert result["parts"] == {}
    assert "crash: no time left" in capsys.readouterr().out


def test_results_of_another_commit_do_not_count(tmp_path):
    part = planted("note", argument=str(tmp_path / "ran"))
    result = run_parts([part], tmp_path / "out", 25, rehearse=True)
    path = tmp_path / "out/gpu_day.json"
    path.write_text(json.dumps(result | {"commit": "0000000"}))
    run_parts([part], tmp_path / "out", 25, rehearse=True)
    assert (tmp_path / "ran").read_text() == "ran\n" * 2


def test_parts_have_names_of_their_own_and_functions_that_exist():
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, function = part.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert json.loads(json.dumps(part.argument)) == part.argument  # as its process reads it


@pytest.mark.parametrize("name", ["values of cuDNN 1", "values of Pallas 7"])
def test_values_are_rehearsed(name):
    [part] = [part for part in PARTS if part.name == name]
    [row], _ = run_part(part, 250, rehearse=True)
    assert (row["is"], row["problem"]) == ("ok", None), row


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_whole_day_is_rehearsed(tmp_path, monkeypatch, capsys):
    argv = ["gpu_day", "--rehearse", "--out", str(tmp_path), "--minutes", "20"]
    monkeypatch.setattr("sys.argv", argv)
    assert gpu_day.main() == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "gpu_day.json").read_text())
    assert [*result["parts"]] == [part.name for part in PARTS]
    assert all(result["parts"].values())
