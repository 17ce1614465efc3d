"""Files of a run folder that are damaged, in every verb that reads them."""

import errno
import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from holmesjax.checkpoints import committed, manifest, second_reading, skipped_data, stores
from holmesjax.distributed import worker
from holmesjax.errors import REQUEUE, PeerError
from holmesjax.files import run_folder
from holmesjax.hosts import computing
from holmesjax.liveness import lease
from holmesjax.plan.plan import Plan
from holmesjax.planner import planner
from holmesjax.report import metrics, page, recorder
from holmesjax.trainer import Trainer
from holmesjax.transport import key_files
from launch import attempt
from launch.restarts import RECORD, Restarts
from tests.jobs import run_launch_here, write_run

TERM_S = lease.TERM_S
STEP = Path(manifest.FOLDER, "step_00000002")
SETTINGS = [
    *("train.steps=2", "model.num_layers=1", "model.width=16", "model.positions=learned"),
    *("model.norm=layer_norm", "model.activation=gelu", "model.context_length=8"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that has ended, with all files that a job can leave there."""
    folder = tmp_path_factory.mktemp("whole")
    Trainer(write_run(folder, {"a": (1,)}), SETTINGS, io.StringIO()).train()
    run_dir = folder / "run"
    restarts = Restarts(run_dir, 3, pytest.fail)
    restarts.begin(0)
    restarts.end(0)
    computing.permitted(run_dir, ["source"])
    (run_dir / run_folder.ALLOWED).write_text('[{"step": 9, "name": "a", "was": 1, "now": 2}]')
    (run_dir / skipped_data.RECORD).write_text('[{"step": 9, "spike": 10, "sequences": 8}]')
    committed.note(run_dir, 2)
    (run_dir / "logs").mkdir()
    return run_dir


def empty(path):
    path.write_bytes(b"")


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def no_utf_8(path):
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def other_shape(path):
    path.write_text("[1, 2]\n")


def other_values(path):
    """All names are there, and no value is what it should be."""
    if path.suffix == ".json":
        names = json.loads(path.read_text())
        path.write_text(
            json.dumps({name: [-5] for name in names} if isinstance(names, dict) else -5)
        )
    elif path.suffix == ".yaml":
        lines = path.read_text().splitlines()
        names = dict.fromkeys(line.partition(":")[0] for line in lines if line[:1].isalpha())
        path.write_text("".join(f"{name}: -5\n" for name in names))
    else:
        path.write_text('{"step": -5}\n{"step": "two"}\n')


def nested(path):
    path.write_text("[" * 100_000)


def no_date(path):
    path.write_text("{name: 2026-05-45}")


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_file(path):
    shutil.rmtree(path)
    path.write_text("a file")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def zeros(path):
    path.write_bytes(bytes(64))


WAYS = [empty, cut, no_utf_8, other_shape, other_values, nested, no_date, zeros]
WAYS += [a_folder, a_pipe]
# One of each kind of damage: nothing there, no text, other text, and no file.
UNLIKE_WAYS = [empty, no_utf_8, other_values, a_folder]
JOB = ["train", "RUN", "--launcher", "local", "train.steps=4"]
VERBS = {
    "train": ["train", "RUN"],
    "job": JOB,
    "plan": ["plan", "RUN"],
    "data": ["data", "RUN"],
    "top": ["top", "RUN", "--once"],
    "compare": ["compare", "RUN"],
    "report": ["report", "RUN"],
    "generate": ["generate", "RUN", "--prompt", "a", "--max-tokens", "1"],
    "export": ["export", "RUN", "--out", "OUT"],
    "doctor": ["doctor", "RUN"],
    "worker": ["worker", "RUN"],
}
# The files that verbs read. Those of `NEEDED` they cannot do without, or say that they lack them.
STARTS, MANIFEST = {"train", "job"}, STEP / manifest.MANIFEST
NEEDED = {
    "config.yaml": set(VERBS),
    "topology.yaml": {*STARTS, "plan", "doctor", "worker"},
    "plan.yaml": {"top", "report", "worker"},
    metrics.FILE: {"compare", "report"},
    RECORD: {"job"},
    committed.RECORD: STARTS,
    run_folder.ALLOWED_DIFFERENCES: {"job"},
    run_folder.ALLOWED: STARTS,
    skipped_data.RECORD: STARTS,
    stores.RECORD: {"job", "worker"},
    MANIFEST: {*STARTS, "generate", "export"},
}
READ = {
    "plan.yaml": STARTS,
    "environment.yaml": STARTS,
    metrics.FILE: {"top", "job"},
    recorder.TIMELINE: {"job", "report"},
    lease.FILE: {*STARTS, "top"},
}
FOLDERS = {"logs": {"job"}, manifest.FOLDER: {*STARTS, "generate", "export"}}
FOLDERS |= {STEP: STARTS, STEP / "part_0": FOLDERS[manifest.FOLDER]}


@pytest.fixture
def run(whole, tmp_path, monkeypatch, capsys):
    """Runs a verb on a copy of the folder, which a function has damaged; no process starts."""

    def start_workers(*_, **__):
        raise PeerError("the processes", "are not started", found="a test", fix="none")

    plan = Plan.load(whole / "plan.yaml")
    monkeypatch.setattr(planner, "make_plans", lambda *_, **__: (plan, None))
    monkeypatch.setattr(attempt, "start_workers", start_workers)
    monkeypatch.setattr(manifest, "SEEN_S", 0.0)
    monkeypatch.setattr(lease, "TERM_S", 0.0)
    monkeypatch.setenv("HOLMES_STORE", stores.identifier(whole))
    monkeypatch.setenv("HOLMES_PROCESS", "0")
    monkeypatch.setenv("HOLMES_CONTROLLER", "127.0.0.1:1")
    key_files.make_key_file(tmp_path / "key")
    monkeypatch.setenv("HOLMES_KEY_FILE", str(tmp_path / "key"))
    run_dir, out = tmp_path / "run", tmp_path / "out"

    def run(verb, damage):
        for path in (run_dir, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, run_dir)
        damage(run_dir)
        words = [{"RUN": run_dir, "OUT": out}.get(word, word) for word in VERBS[verb]]
        return run_launch_here(capsys, *words)

    return run


def damages(verb):
    """Each damage to a file that a verb reads: the file, what is done to it, and the words.

    A job reads some files with the functions of a training in one process, which has every damage.
    """
    for name, verbs in {**READ, **NEEDED}.items():
        reading = verbs | READ.get(name, set())
        if verb in reading:
            ways = UNLIKE_WAYS if verb == "job" and "train" in reading else WAYS
            is_yaml = str(name).endswith(".yaml")
            yield from ((name, way, way.__name__) for way in ways if is_yaml or way is not no_date)
    for name, verbs in FOLDERS.items():
        if verb in verbs:
            yield name, a_file, "a_file"


@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_file_is_named_in_every_verb_and_is_no_traceback(run, verb):
    usual = 75 if verb == "job" else 0
    # A process of a run that has trained may have seen what its file server had for a moment.
    allowed = {2, usual, *([75] if verb == "worker" else [])}
    wrong = []
    for name, way, words in damages(verb):

        def damage(run_dir, name=name, way=way):
            if not (path := run_dir / name).exists():
                path.write_text("{}")
            way(path)

        found = run(verb, damage)
        said = found.stdout + found.stderr
        is_named = Path(name).name in said or (name == STEP and "step 2" in said)
        # As a crash leaves it: its last line is not whole.
        is_fine = verb not in NEEDED.get(name, ()) or (name, way) == (metrics.FILE, cut)
        is_told = is_named or (found.returncode == usual and is_fine)
        if not is_told or found.returncode not in allowed or "Traceback" in said:
            wrong.append(f"{words} {name}: {found.returncode} {said[-300:]}")
    assert not wrong, "\n".join(wrong)


def odd_tasks(path):
    times = {"stage": 0, "kind": "F", "microbatch": 0, "start_s": math.nan, "end_s": 1.0}
    path.write_text(json.dumps({"step": 1, "tasks": [times]}))


@pytest.mark.parametrize("way", [*WAYS, odd_tasks], ids=lambda way: way.__name__)
def test_a_damaged_timeline_leaves_a_report_without_it(whole, tmp_path, way):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    way(run_dir / recorder.TIMELINE)
    assert "Predicted" in page.write_report(run_dir).read_text()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_a_write_of_a_launcher_that_fails_is_told_with_its_path(run, tmp_path, monkeypatch, number):
    """Each one in turn: of the lease, of the settings, and of what is kept for a restart."""
    monkeypatch.setattr(lease, "TERM_S", TERM_S)  # of 0 s, a failed renewal would end this process
    calls, fsync, fails_at = [], os.fsync, None

    def sync(file):
        calls.append(file)
        if len(calls) == fails_at:
            raise OSError(number, os.strerror(number))
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    assert run("job", lambda _: None).returncode == REQUEUE
    count = len(calls)
    assert count >= 8
    for fails_at in range(1, count + 1):  # `sync` reads it
        calls.clear()
        found = run("job", lambda _: None)
        said = found.stdout + found.stderr
        statuses = (REQUEUE,) if number == errno.ENOSPC else (2, REQUEUE)
        assert found.returncode in statuses, (fails_at, said)
        told = [line for line in said.splitlines() if os.strerror(number) in line]
        is_start = "are not started" in said  # the failure was of no weight
        assert told or is_start, (fails_at, said)
        assert "Traceback" not in said
        assert is_start or f"{tmp_path}/run" in said, (fails_at, said)


@pytest.mark.parametrize("verb, number", [("job", errno.ESTALE), ("worker", errno.EIO)])
def test_a_file_that_cannot_be_opened_now_is_no_mistake(run, tmp_path, monkeypatch, verb, number):
    """Each file of the run folder in turn: its server comes back, and the next start reads it."""
    run_dir, opened, failing = tmp_path / "run", set(), None

    def opening(call):
        def called(path, *arguments, **options):
            name = Path(os.devnull if isinstance(path, int) else path)
            if name.is_relative_to(run_dir) and name.is_file():
                opened.add(name)
                if name == failing:
                    raise OSError(number, os.strerror(number), str(name))
            return call(path, *arguments, **options)

        return called

    def read_whole(checkpoint, error, **_):
        raise PeerError(error.where, "another process has read it", found=error.found, fix="again")

    def meet_nobody(**_):
        raise PeerError("the controller", "is not there", found="a test", fix="none")

    monkeypatch.setattr(second_reading, "confirm", read_whole)
    monkeypatch.setattr(worker, "Member", meet_nobody)
    for owner in (os, io):
        monkeypatch.setattr(owner, "open", opening(owner.open))
    assert run(verb, lambda _: opened.clear()).returncode == REQUEUE
    wrong = []
    for failing in sorted(opened):  # `called` reads it
        found = run(verb, lambda _: None)
        said = found.stdout + found.stderr
        if found.returncode != REQUEUE or "Traceback" in said:
            wrong.append(f"{failing}: {found.returncode} {said[-400:]}")
    assert len(opened) >= 4
    assert not wrong, "\n".join(wrong)
