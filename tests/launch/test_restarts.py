"""A job starts again after some ends and not after others, as often as its record permits."""

import json
import os
import signal
import threading
from unittest import mock

import pytest

from holmesjax.checkpoints import committed, manifest, resume, skipped_data
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.errors import CheckpointError, FatalError, HolmesError, PeerError
from holmesjax.hosts import computing
from holmesjax.report import metrics
from launch import restarts
from launch.attempt import Attempt
from launch.restarts import RECORD, Restarts
from tests.disks import disk
from tests.launch.scripted_supervisor import GLOO, LOSS, LOST, MISTAKE, saving, supervise, told

pytestmark = pytest.mark.usefixtures("process_goes_on")

BUG = {"where": "", "problem": "TypeError: <layer at 0x7f01> takes 2 arrays", "is_own": True}
MEASURED = {
    **{"step": 1, "loss": 5.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": False},
    **{"intervals": [], "link_bytes": {}, "input_wait_s": 0.0, "step_time_s": 1.0},
}
TRAINED = ["tell", "measurements", {"measured": MEASURED}]


def test_restarts_have_an_end_and_a_new_step_sets_their_count_back(tmp_path, no_pause, capsys):
    lost = [{number: LOST} for number in range(3)]
    scripts = [lost[1], saving(1), saving(2), lost[0], lost[2], lost[0]]
    supervisor, launcher = supervise(tmp_path, *scripts, max_restarts=2)
    with pytest.raises(FatalError) as error:
        supervisor.run()
    assert launcher.starts == len(scripts)
    assert "no new step since step 2, in the last 3 of its starts" in str(error.value)
    found = str(error.value.found)
    assert found.startswith("a-0 (2 of 3): a/a-0 (stage 0, process 0): link a -> b: was lost; b-0 ")
    out = capsys.readouterr().out
    assert out.count("starting again in") == 3
    assert out.count("starting again; the newest checkpoint is after step ") == 2
    assert out.count("with the same command, as --max-restarts does") == 6
    assert "add --max-restarts" not in out
    starts = json.loads((tmp_path / "run" / RECORD).read_text())["starts"]
    assert [(start["step"], start["status"], start["node"]) for start in starts] == [
        *[(step, 75, "a-1") for step in (0, 0, 1)],
        (2, 75, "a-0"),
        (2, 75, "b-0"),
        (2, 1, "a-0"),
    ]


def test_a_spike_lets_all_start_again_from_the_last_checkpoint_without_the_data_since(
    tmp_path, monkeypatch, capsys
):
    """Without --max-restarts, too; and it is no failure that counts.

    Somebody has edited the run's own code meanwhile, which the new processes read.
    """
    spike = [told({**LOSS, "spike": 5}, 75), ["exit", 75]]
    first = {**saving(2), 1: [["await", 2], *spike]}
    ends = [["tell", "up"], ["done", 10]]
    supervisor, launcher = supervise(tmp_path, first, {0: ends, 1: ends, 2: ends})
    digest = lambda *_: {"source of model.module": str(launcher.starts)}
    monkeypatch.setattr(computing, "own_sources", digest)
    assert supervisor.run() == 0
    assert launcher.starts == 2
    assert skipped_data.read(tmp_path / "run") == (Skipped(step=2, spike=5, sequences=24),)
    starts = json.loads((tmp_path / "run" / RECORD).read_text())["starts"]
    assert [(start["status"], start["stopped"]) for start in starts] == [(75, True), (0, False)]
    out = capsys.readouterr().out
    assert "going back to step 2; 24 sequences behind step 2" in out
    assert "  versions.source of model.module: 0 -> 1\n" in out


def test_a_spike_ends_a_job_that_a_scheduler_starts_again(tmp_path):
    first = {**saving(2), 1: [["await", 2], told({**LOSS, "spike": 4}, 75), ["exit", 75]]}
    supervisor, launcher = supervise(tmp_path, first, starts_again=False)
    with pytest.raises(PeerError, match="it goes back to its last checkpoint") as error:
        supervisor.run()
    assert (error.value.exit_status, launcher.starts) == (75, 1)
    assert [part.sequences for part in skipped_data.read(tmp_path / "run")] == [16]


def test_what_one_process_alone_cannot_read_is_no_damage(tmp_path, no_pause, monkeypatch, capsys):
    """Another reads it, and all start again from the same checkpoint; it counts as a restart.

    So does a record that somebody has cut: the launcher knows what it has written there.
    """
    end, record_of_commits = Restarts.end, tmp_path / "run" / committed.RECORD

    def end_and_cut(*arguments, **options):
        end(*arguments, **options)
        record_of_commits.write_text("{")

    monkeypatch.setattr(Restarts, "end", end_and_cut)
    where = manifest.folder_of(tmp_path / "run", 2) / manifest.part_name(0)
    unreadable = {**MISTAKE, "where": str(where), "damaged": True}
    second = {0: [told(unreadable, 2), ["exit", 2]]}
    ends = [["tell", "up"], ["done", 10]]
    last = dict.fromkeys(range(3), ends)
    supervisor, launcher = supervise(tmp_path, saving(2), second, last, max_restarts=2)
    assert supervisor.run() == 0
    assert launcher.starts == 3
    assert [path.name for path in where.parents[1].iterdir()] == ["step_00000002"]
    assert "needs 8, and another process has read it as it was written" in capsys.readouterr().out
    starts = json.loads((tmp_path / "run" / RECORD).read_text())["starts"]
    assert [(start["step"], start["status"]) for start in starts] == [(0, 75), (2, 75), (2, 0)]


def test_a_job_whose_checkpoints_are_gone_is_refused(tmp_path, no_pause, monkeypatch):
    """By what it has committed, or by its starts, and its metrics stay."""
    monkeypatch.setattr(manifest, "SEEN_S", 0.0)
    lines = '{"step": 1}\n{"step": 2}\n'
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / metrics.FILE).write_text(lines)
    record(run_dir, (2, FAILED))
    for _ in range(2):
        supervisor, launcher = supervise(tmp_path, {})
        with pytest.raises(CheckpointError, match="had a checkpoint after step 2") as error:
            supervisor.run()
        assert (error.value.exit_status, launcher.starts) == (2, 0)
        assert (run_dir / metrics.FILE).read_text() == lines
    assert str(run_dir / committed.RECORD) in error.value.fix
    (run_dir / committed.RECORD).unlink()
    (run_dir / RECORD).unlink()
    ends = [["tell", "up"], ["done", 10]]
    assert supervise(tmp_path, dict.fromkeys(range(3), ends))[0].run() == 0


def test_whoever_starts_the_launcher_again_shares_the_count(tmp_path, no_pause):
    """Slurm and Kubernetes do so; once the job has ended with 1, the next start is a person's."""
    (tmp_path / "run").mkdir()
    record(tmp_path / "run", *[(0, FAILED)] * (restarts.DEFAULT - 1))
    start = lambda **options: supervise(tmp_path, {0: LOST}, **options)[0].run()
    for expected in (PeerError, FatalError, PeerError):
        with pytest.raises(expected):
            start()
    with pytest.raises(FatalError):
        start(max_restarts=1, starts_again=False)
    with pytest.raises(FatalError):  # not even one
        start(max_restarts=0)


def test_an_exception_that_nothing_outside_can_cause_ends_the_job_at_its_second_start(
    tmp_path, no_pause
):
    """Before the first step; what a collective raises is limited by the restarts alone."""
    fails = lambda content: {0: [["tell", "up"], told(content, 75)]}
    elsewhere = {**BUG, "problem": BUG["problem"].replace("7f01", "7f02")}
    supervisor, launcher = supervise(tmp_path, fails(BUG), fails(elsewhere), max_restarts=9)
    with pytest.raises(FatalError, match="failed in the same way before their first step") as error:
        supervisor.run()
    assert launcher.starts == 2
    assert "a/a-0 (stage 0, process 0): TypeError: <layer at" in str(error.value.found)

    trained = {0: [TRAINED, *fails(BUG)[0]]}
    for scripts in (fails(GLOO), trained):
        supervisor, launcher = supervise(tmp_path, scripts, max_restarts=1)
        with pytest.raises(FatalError, match="no new step since step 0, in the last 2"):
            supervisor.run()
        assert launcher.starts == 2


@pytest.mark.parametrize(
    ("fails", "starts", "status"),
    [
        ([told(MISTAKE, 2)], 3, 1),  # no restart is left
        ([TRAINED, told(MISTAKE, 2)], 2, 2),  # a step has met it
    ],
)
def test_a_mistake_at_a_start_behind_steps_may_go_away(tmp_path, no_pause, fails, starts, status):
    """No setting has changed since: a node has lost a device, say, or its mount is not there."""
    scripts = {0: [TRAINED, *LOST]}, {1: fails}
    supervisor, launcher = supervise(tmp_path, *scripts, max_restarts=2)
    with pytest.raises(HolmesError) as error:
        supervisor.run()
    assert (launcher.starts, error.value.exit_status) == (starts, status)
    assert "a/a-1 (stage 0, process 1): " in str(error.value)
    found = json.loads((tmp_path / "run" / RECORD).read_text())["starts"][1]
    assert (found["node"], "fix: if it is so again: " in found["cause"]) == ("a-1", starts == 3)


def test_what_the_launcher_meets_at_a_start_behind_steps_may_go_away_too(tmp_path, no_pause):
    supervisor, launcher = supervise(tmp_path, {0: [TRAINED, *LOST]}, max_restarts=2)
    start = launcher.start

    def start_once(process, events):
        start(process, events)
        if launcher.starts == 2:
            raise HolmesError("node a-0", "has no such program", found="nothing", fix="install it")
        assert launcher.starts == 1

    launcher.start = start_once
    with pytest.raises(AssertionError):  # it has started a third time
        supervisor.run()


@pytest.mark.parametrize(
    ("settings", "status"),
    [([], 75), (["train.log_every_s=0"], 75), (["optimizer.learning_rate=0.01"], 2)],
)
def test_a_new_launcher_takes_a_mistake_for_one_only_if_a_setting_has_changed(
    tmp_path, settings, status
):
    """A scheduler starts the launcher again, and the run has a checkpoint."""
    with pytest.raises(PeerError):
        supervise(tmp_path, saving(5))[0].run()
    supervisor, _ = supervise(tmp_path, {1: [told(MISTAKE, 2)]}, settings=settings)
    with pytest.raises(HolmesError, match="has 7 devices") as error:
        supervisor.run()
    assert error.value.exit_status == status


def test_a_later_start_may_find_its_port_free_but_not_the_order_of_other_code(
    tmp_path, monkeypatch
):
    with pytest.raises(PeerError):
        supervise(tmp_path, saving(5))[0].run()
    read = {"digests": {"order": "12"}, "source": "here"}
    reads = {number: [["tell", "compiled", read]] for number in range(3)}
    other = CheckpointError("data", "has another order", found="new code", fix="use the old one")
    monkeypatch.setattr(resume.Start, "check_data", mock.Mock(side_effect=other))
    with pytest.raises(CheckpointError, match="has another order"):
        supervise(tmp_path, reads)[0].run()
    taken = HolmesError("--listen", "is taken", found="127.0.0.1:7", fix="end who has it")
    monkeypatch.setattr(Attempt, "_open_controller", mock.Mock(side_effect=taken))
    with pytest.raises(PeerError, match="is taken"):
        supervise(tmp_path, reads)[0].run()


def test_a_pause_ends_when_the_job_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 200.0)
    supervisor, launcher = supervise(tmp_path, {0: LOST}, max_restarts=3)
    pause = supervisor._pause

    def signalled_pause(*arguments):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        pause(*arguments)

    supervisor._pause = signalled_pause
    assert supervisor.run() == 75
    assert launcher.starts == 1


def record(tmp_path, *ends, limit=3):
    """A record after these starts: the step before each and how it ended, None: not at all."""
    found = Restarts(tmp_path, limit, pytest.fail)
    for step, end in ends:
        found.begin(step)
        if end is not None:
            found.end(**end)
    return Restarts(tmp_path, limit, pytest.fail)


FAILED, STOPPED = {"status": 75}, {"status": 75, "stopped": True}


@pytest.mark.parametrize(
    "ends, step, num_failed",
    [
        ([], 0, 0),
        ([(0, FAILED)] * 3, 0, 3),
        ([(0, FAILED)] * 3, 5, 0),  # a checkpoint after step 5
        ([(0, FAILED), (5, FAILED), (5, FAILED)], 5, 2),
        ([(5, FAILED), (3, FAILED)], 3, 2),  # the newest checkpoint was damaged
        ([(0, FAILED), *[(0, STOPPED)] * 9, (0, FAILED)], 0, 2),
        ([(0, None)] * 3, 0, 3),  # the launcher was killed each time
        ([(0, FAILED), (0, {"status": 2}), (0, FAILED)], 0, 1),  # a person has repaired it
        ([(0, FAILED), (0, {"status": 0})], 0, 0),
    ],
)
def test_what_counts_as_a_restart_without_a_new_step(tmp_path, ends, step, num_failed):
    assert len(record(tmp_path, *ends).failed(step)) == num_failed


def test_pauses_grow_to_five_minutes(tmp_path):
    found = Restarts(tmp_path, 20, pytest.fail)
    pauses = []
    for _ in range(11):
        pauses.append(found.pause_s(0))
        found.begin(0)
        found.end(75)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"starts": [{"stop": 1}]}', '{"starts": [{"step": "1"}]}', '{"starts": 3}', "\xff"],
)
def test_a_record_that_makes_no_sense_is_told_and_begun_again(tmp_path, text):
    (tmp_path / RECORD).write_text(text, encoding="latin-1")
    warnings = []
    found = Restarts(tmp_path, 3, warnings.append)
    assert len(warnings) == 1
    found.begin(7)
    assert [start.step for start in record(tmp_path)._starts] == [7]


def test_restarts_have_an_end_however_many_there_may_be(tmp_path):
    restarts = Restarts(tmp_path, 120, print)
    for _ in range(121):
        assert not restarts.is_spent(0)
        restarts.begin(0)
        restarts.end(75)
    assert restarts.is_spent(0)


def test_a_record_that_cannot_be_written_is_counted_in_memory_and_written_later(tmp_path):
    folder, warnings = tmp_path / "run", []
    with disk(folder, "8k"):
        (folder / "rest").write_bytes(bytes(8192))
        restarts = Restarts(folder, 1, warnings.append)
        for _ in range(2):
            assert not restarts.is_spent(0)
            restarts.begin(0)
            restarts.end(75)
        assert restarts.is_spent(0)
        assert len(warnings) == 4
        assert all("No space left on device" in text for text in warnings)
        assert sorted(path.name for path in folder.iterdir()) == ["rest"]
        (folder / "rest").unlink()
        assert restarts.give_up(0).exit_status == 1
        assert len(record(folder)._starts) == 2
