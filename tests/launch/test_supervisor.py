"""The supervisor hears what processes tell, or do not: real ones, which only talk."""

import functools
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import launch.attempt
from holmesjax import job as jobs
from holmesjax.checkpoints import (
    committed,
    committing,
    manifest,
    resume,
    second_reading,
    skipped_data,
)
from holmesjax.checkpoints.scrub import Scrub
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.distributed.messages import Done, Up
from holmesjax.errors import CheckpointError, FatalError, HolmesError, PeerError
from holmesjax.liveness import helper_process, hung_main_thread
from holmesjax.plan.processes import make_processes
from holmesjax.report import metrics, recorder
from holmesjax.runtime.step_timeout import Progress
from launch import process_logs, restarts
from launch.attempt import Attempt
from launch.job_saves import JobSaves
from launch.loop_watch import LoopWatch
from launch.process_logs import is_noise
from launch.restarts import RECORD, Restarts
from launch.supervisor import Supervisor
from tests.disks import disk
from tests.jobs import HANG_S, write_run
from tests.scripted_member import ScriptedLauncher

CLUSTERS = {"a": (1, 1), "b": (1,)}
MISTAKE = {"where": "stage 0", "problem": "has 7 devices, needs 8", "found": "7", "fix": "add one"}
LOSS = {"where": "link a -> b", "problem": "was lost", "found": "a reset", "fix": "start again"}
GLOO = {"where": "", "problem": "JaxRuntimeError: Gloo all-reduce failed: Connection reset by peer"}
BUG = {"where": "", "problem": "TypeError: <layer at 0x7f01> takes 2 arrays", "is_own": True}


@pytest.fixture(autouse=True)
def loops_stand_still_unpunished(monkeypatch):
    """A loop that stands still ends its process with 75, and here that would be pytest.

    On a machine that others use, too, a loop does not turn for longer than the limits of tests.
    """
    go_on = lambda *_: None
    monkeypatch.setattr(launch.attempt, "LoopWatch", functools.partial(LoopWatch, end=go_on))


@pytest.fixture(autouse=True)
def no_end_of_this_process(monkeypatch):
    """A launcher that is to leave ends its process some time later, which here is pytest's."""
    monkeypatch.setattr(hung_main_thread, "end_within", lambda *_: None)


def supervise(tmp_path, *scripts, settings=(), **options):
    """A job whose processes do what each start's scripts say; the supervisor and its launcher."""
    small = ["model.num_layers=2", "model.width=16", *settings]
    job = jobs.load(write_run(tmp_path, CLUSTERS), small)
    launcher = ScriptedLauncher(*scripts)
    return Supervisor(job, launcher, **options), launcher


def told(content, status):
    return ["tell", "failed", {**content, "exit_status": status}]


def count_turns(monkeypatch, owner, name):
    """Returns a list of the turns of the watched loop since that function was last called."""
    turns, turn, function = [], LoopWatch.turn, getattr(owner, name)

    def counted(*args, **kwargs):
        turns.clear()
        return function(*args, **kwargs)

    def noted(watch):
        turns.append(watch)
        turn(watch)

    monkeypatch.setattr(owner, name, counted)
    monkeypatch.setattr(LoopWatch, "turn", noted)
    return turns


# ---- the cause -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content, status", [(MISTAKE, 2), (LOSS, 75)])
def test_one_that_answers_late_is_not_the_cause(tmp_path, content, status):
    """The others are alive, and busy for longer than the second that they are waited for."""
    late = [["late", 1.3]]
    scripts = {0: [["sleep", 0.5], told(content, status), ["exit", status]], 1: late, 2: late}
    supervisor, _ = supervise(tmp_path, scripts)
    with pytest.raises(HolmesError) as error:
        supervisor.run()
    assert error.value.exit_status == status
    assert error.value.where == f"a/a-0 (stage 0, process 0): {content['where']}"


def test_a_death_is_the_cause_however_late_its_launcher_hears_of_it(tmp_path, monkeypatch):
    """CUDA, srun or a long line hold the news up; what others miss is told at once."""
    turns = count_turns(monkeypatch, launch.attempt, "find_cause")
    dying = [["hang up"], ["sleep", 3.0], ["exit", -signal.SIGKILL]]
    scripts = {0: [["sleep", 0.5], told(GLOO, 75)], 1: dying, 2: [told({**LOSS, "peer": 1}, 75)]}
    supervisor, _ = supervise(tmp_path, scripts)
    with pytest.raises(PeerError, match=r"was killed by signal 9 \(SIGKILL\)") as error:
        supervisor.run()
    assert error.value.where == "a/a-1 (stage 0, process 1)"
    assert len(turns) > 5  # the launcher, which waits for news, does not stand still


def test_of_a_start_that_makes_no_progress_the_one_that_stands_still_is_named(
    tmp_path, monkeypatch
):
    """It is stopped, threads and all; the others wait for it, and say what it has said last."""
    turns = count_turns(monkeypatch, Attempt, "_ask_for_stacks")
    starting = [["status", "was starting JAX"], ["tell", "beat"]]
    scripts = {0: starting, 1: [*starting, ["exit", -signal.SIGSTOP]], 2: starting}
    supervisor, _ = supervise(tmp_path, scripts, settings=["distributed.start_timeout_s=12"])
    with pytest.raises(PeerError, match="not ready to train") as error:
        supervisor.run()
    assert error.value.where == "a/a-1 (stage 0, process 1)"
    assert "each of a/a-0, a/a-1 (stage 0) was starting JAX" in str(error.value.found)
    assert len(turns) > 5


class SlowSigns(Progress):
    """Each sign of progress comes after most of the limit; `now_s` is what the clock shows."""

    def __init__(self, config, train):
        self.now_s, self._between_s = 0.0, 0.75 * config.start_timeout_s
        super().__init__(config, train, lambda: self.now_s)

    def _note(self):
        self.now_s += self._between_s
        super()._note()


def test_a_start_may_take_as_long_as_there_is_progress(tmp_path, monkeypatch):
    """Signs of progress take longer than the limit together; then one has none for as long."""
    made = []

    def make(*configs):
        made.append(SlowSigns(*configs))
        return made[-1]

    monkeypatch.setattr(launch.attempt, "Progress", make)
    limit = ["distributed.start_timeout_s=100"]
    ends = [["tell", "up"], ["begin", "step", 1], ["done", 0]]
    starting = {0: [["advance", 3], *ends], 1: [["advance", 4], *ends], 2: ends}
    supervisor, _ = supervise(tmp_path, starting, settings=limit)
    assert supervisor.run() == 75  # asked by nobody to go on to the last step
    # Each comes, is up and is done; and what two of them compile counts, too.
    assert made[-1].num_noted >= 3 * 3 + 2
    assert made[-1].now_s > 5 * 100
    stuck = {**starting, 1: [["sleep", 60]]}
    supervisor, _ = supervise(tmp_path, stuck, settings=limit)
    take = Attempt._take

    def take_and_wait(attempt, event):
        take(attempt, event)
        if isinstance(event.record, Done) and len(attempt.done) == 2:
            made[-1].now_s += 101

    monkeypatch.setattr(Attempt, "_take", take_and_wait)
    with pytest.raises(PeerError, match="no progress within distributed") as error:
        supervisor.run()
    assert error.value.where == "a/a-1 (stage 0, process 1)"


def supervise_a_commit(tmp_path, monkeypatch, before):
    """A job whose only commit, after `before()`, begins when all processes are done."""
    heard = threading.Event()
    take, commit = Attempt._take, committing.commit

    def take_and_tell(attempt, event):
        take(attempt, event)
        if len(attempt.done) == 3:
            heard.set()

    def wait_and_commit(*arguments, **options):
        before(heard.wait(60))
        commit(*arguments, **options)

    monkeypatch.setattr(Attempt, "_take", take_and_tell)
    monkeypatch.setattr(committing, "commit", wait_and_commit)
    ends = [["tell", "up"], ["steps", 1, 10], ["save", 10], ["done", 10]]
    return supervise(tmp_path, {0: ends, 1: [["tell", "up"], ["done", 10]], 2: ends})[0]


def test_a_commit_that_waits_for_a_store_holds_up_nothing_else(tmp_path, monkeypatch):
    """It waits until what comes after it was heard, and the job for it."""
    waited = []
    supervise_a_commit(tmp_path, monkeypatch, waited.append).run()
    assert waited == [True]
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path / "run")] == [10]


@pytest.mark.parametrize("limit", ["start_timeout_s = 0 s", "stop_timeout_s = 100 s of SIGTERM"])
def test_a_commit_that_hangs_ends_the_job_and_nobody_is_blamed(tmp_path, monkeypatch, limit):
    """It returns when the attempt is over, and counts then."""
    ended, close = threading.Event(), JobSaves.__exit__

    def hang(_):
        if "stop" in limit:
            supervisor._stops.add(signal.SIGTERM)
            supervisor._stops._deadline_s = 0.0
        else:
            supervisor._attempt._saves._limit_s = 0.0
        ended.wait(30)

    def return_and_close(*arguments):
        ended.set()
        close(*arguments)

    monkeypatch.setattr(launch.attempt, "LEAST_LEFT_S", 60.0)
    monkeypatch.setattr(JobSaves, "__exit__", return_and_close)
    supervisor = supervise_a_commit(tmp_path, monkeypatch, hang)
    with pytest.raises(PeerError, match=f"has not taken a checkpoint within distributed.{limit}"):
        supervisor.run()
    assert supervisor._attempt.blamed is None
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path / "run")] == [10]


def test_one_that_hangs_is_named_in_time_with_what_the_others_wait_for(tmp_path):
    """It is stopped, threads and all, and its connection stays open."""
    up = ["tell", "up"]
    hanging = {2: [up, ["exit", -signal.SIGSTOP]], 1: [up]}
    waiting = {0: [up, ["status", "waited for F0 of b/b-0"]]}
    limit = ["distributed.heartbeat_timeout_s=24"]  # the others may stand still for a while
    supervisor, _ = supervise(tmp_path, hanging | waiting, settings=limit)
    with pytest.raises(PeerError, match="has been silent for") as error:
        supervisor.run()
    assert error.value.where == "b/b-0 (stage 1, process 2)"
    assert "a/a-0 (stage 0) waited for F0 of b/b-0" in str(error.value.found)


def test_of_a_collective_that_times_out_the_one_that_did_not_come_is_named(tmp_path):
    """It lives, and whoever has waited for it says so first."""
    timeout = {"where": "", "problem": "JaxRuntimeError: Gloo ReduceScatter failed: Read timeout"}
    up, step = ["tell", "up"], ["begin", "step", 22]
    scripts = {
        0: [up, step, ["sleep", 0.5], told(timeout, 75)],
        1: [up, ["status", "was saving a checkpoint"], ["begin", "checkpoint", 21]],
        2: [up, ["status", "was saving a checkpoint"], ["begin", "checkpoint", 21]],  # a stage on
    }
    supervisor, _ = supervise(tmp_path, scripts)
    with pytest.raises(PeerError, match="was waited for in vain by a/a-0: JaxRuntimeErr") as error:
        supervisor.run()
    assert error.value.where == "a/a-1 (stage 0, process 1)"
    assert "a/a-1 (stage 0) was saving a checkpoint" in str(error.value.found)
    assert supervisor._attempt.blamed == "a-1"


def test_what_a_process_hung_in_on_its_gpu_is_named(tmp_path):
    """XLA ends it with lines such as these, of which the interesting ones are not the last."""
    host, gpu = "E1126 14:05:07.123456  99 hang_watchdog.cc:68]", "gpu_executable.cc:812]"
    began = "at 2026-11-26 14:04:02.000001"
    lines = [
        "step 7",
        f"{host} [0] XLA GPU execution `jit_backward` failed to finish in 1m5s.",
        f"{gpu} [0] Pending thunks: 2/12 (unique thunks: 12)",
        f"{gpu} [0] Last completed thunks: size=1",
        f"{gpu}   - exec[6] thunk[6/12] kKernel: loop_add_fusion {began}",
        f"{gpu} [0] First pending thunks: size=2",
        f"{gpu}   - exec[7] thunk[7/12] kAllReduceStart: all-reduce-start.1 {began}",
        f"{gpu}   - exec[8] thunk[8/12] kKernel: wrapped_slice {began}",
        f"{gpu} [0] Last pending thunks: size=1",
        f"{gpu}   - exec[8] thunk[8/12] kKernel: wrapped_slice {began}",
        f"{host} [0] XLA GPU execution `jit_backward`: abort the process to avoid infinite hangs.",
        *["*** SIGABRT received ***", "    @ 0x7f0000000000  (unknown)"] * 5,
    ]
    end = [["status", "was busy in step 7"], ["tell", "up"]]
    scripts = {2: [*end, *(["print", line] for line in lines), ["exit", -signal.SIGABRT]]}
    supervisor, _ = supervise(tmp_path, scripts | {0: [["sleep", 60]], 1: [["sleep", 60]]})
    with pytest.raises(PeerError, match="SIGABRT") as error:
        supervisor.run()
    assert error.value.where == "b/b-0 (stage 1, process 2)"
    hung = (
        "hung for 1m5s in all-reduce-start.1 (kAllReduceStart) of XLA GPU execution `jit_backward`"
    )
    assert str(error.value.problem).endswith(f"it was busy in step 7 and {hung}")


def test_a_flag_that_xla_does_not_know_is_a_mistake(tmp_path):
    """XLA ends its process with status 1, and no other start would end otherwise."""
    line = "F1127 13:33:01.1  99 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_fats"
    waits = [["sleep", 60]]
    scripts = {0: waits, 1: [["print", line], ["print", "*** Check failure stack trace: ***"]]}
    scripts[1].append(["exit", 1])
    supervisor, launcher = supervise(tmp_path, scripts | {2: waits}, max_restarts=3)
    with pytest.raises(HolmesError, match=r"a/a-1 .*: XLA_FLAGS: has what XLA") as error:
        supervisor.run()
    assert (error.value.found, error.value.exit_status) == ("--xla_fats", 2)
    assert launcher.starts == 1


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_all_stop_after_the_same_step_when_the_launcher_is_told_to(
    tmp_path, capsys, monkeypatch, number, status
):
    training = [["tell", "up"], ["train"]]
    supervisor, _ = supervise(tmp_path, dict.fromkeys(range(3), training))
    take = Attempt._take

    def take_and_tell(attempt, event):
        take(attempt, event)
        if isinstance(event.record, Up) and len(attempt.up) == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Attempt, "_take", take_and_tell)
    assert supervisor.run() == status
    [saved] = manifest.find(tmp_path / "run")
    assert f"stopped after step {saved.step} of" in capsys.readouterr().out


def test_what_gloo_prints_stays_in_the_logs_however_it_is_cut_or_mixed():
    line = (
        "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
    )
    cuts = range(1, len(line))
    fragments = [part for at in cuts for part in (line[:at], line[at:]) if part.strip()]
    pieces = ["[Gloo] Rank ", "[Gloo] Rank ", "0", "1", " is connected to ", " is connected to "]
    mixed = ["".join(pieces), "3 peer ranks. 3", " | 1".strip(" |"), "11"]
    assert not [text for text in (line, *fragments, *mixed) if not is_noise(text)]
    said = [
        "",
        "Traceback (most recent call last):",
        "RuntimeError: Gloo all-reduce failed",
        "step 1",
    ]
    assert not [text for text in said if is_noise(text)]


# ---- restarts ------------------------------------------------------------------------------------


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.001)


LOST = [told(LOSS, 75), ["exit", 75]]


MEASURED = {
    **{"step": 1, "loss": 5.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": False},
    **{"intervals": [], "link_bytes": {}, "input_wait_s": 0.0, "step_time_s": 1.0},
}
TRAINED = ["tell", "measurements", {"measured": MEASURED}]


def saving(step):
    """Scripts of a start that commits a checkpoint, and then fails on a-1."""
    return {0: [["save", step]], 2: [["save", step]], 1: [["await", step], *LOST]}


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
    tmp_path, capsys
):
    """Without --max-restarts, too; and it is no failure that counts."""
    spike = [told({**LOSS, "spike": 5}, 75), ["exit", 75]]
    first = {**saving(2), 1: [["await", 2], *spike]}
    ends = [["tell", "up"], ["done", 10]]
    supervisor, launcher = supervise(tmp_path, first, {0: ends, 1: ends, 2: ends})
    assert supervisor.run() == 0
    assert launcher.starts == 2
    assert skipped_data.read(tmp_path / "run") == (Skipped(step=2, spike=5, sequences=24),)
    starts = json.loads((tmp_path / "run" / RECORD).read_text())["starts"]
    assert [(start["status"], start["stopped"]) for start in starts] == [(75, True), (0, False)]
    assert "going back to step 2; 24 sequences behind step 2" in capsys.readouterr().out


def test_a_spike_ends_a_job_that_a_scheduler_starts_again(tmp_path):
    first = {**saving(2), 1: [["await", 2], told({**LOSS, "spike": 4}, 75), ["exit", 75]]}
    supervisor, launcher = supervise(tmp_path, first, starts_again=False)
    with pytest.raises(PeerError, match="it goes back to its last checkpoint") as error:
        supervisor.run()
    assert (error.value.exit_status, launcher.starts) == (75, 1)
    assert [part.sequences for part in skipped_data.read(tmp_path / "run")] == [16]


def test_what_one_process_alone_cannot_read_is_no_damage(tmp_path, no_pause, capsys):
    """Another reads it, and all start again from the same checkpoint; it counts as a restart."""
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


@pytest.mark.parametrize("finds", ["a process", "the start"])
def test_a_stop_ends_the_second_reading_of_a_checkpoint(tmp_path, monkeypatch, capsys, finds):
    """Whoever has found the damage: the other process may read for an hour."""
    run, reading = helper_process.run_module, []

    def read_long(module, arguments, **how):
        assert module == second_reading.__name__
        reading.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)))
        reading[-1].start()
        return run(
            "timeit", ["-n1", "-r1", "print('  1 of 9'); import time; time.sleep(600)"], **how
        )

    monkeypatch.setattr(helper_process, "run_module", read_long)
    where = manifest.folder_of(tmp_path / "run", 2) / manifest.part_name(0)
    unreadable = {**MISTAKE, "where": str(where), "damaged": True}
    second = {0: [told(unreadable, 2), ["exit", 2]]}
    supervisor, _ = supervise(tmp_path, saving(2), second, max_restarts=2)
    if finds == "the start":
        verify = manifest.verify

        def find_damage(checkpoint):
            verify(checkpoint)
            raise manifest.damaged(checkpoint, "part_0", "is damaged", "2")

        monkeypatch.setattr(manifest, "verify", find_damage)
    start_s = time.monotonic()
    with pytest.raises(SystemExit) as end:
        supervisor.run()
    assert end.value.code == 75
    assert time.monotonic() - start_s < HANG_S
    assert len(reading) == 1
    assert where.exists()
    assert json.loads((tmp_path / "run" / RECORD).read_text())["starts"][-1]["status"] == 75
    assert "reads" in capsys.readouterr().out


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


def test_checkpoints_that_are_not_committed_are_an_alarm_until_one_is(
    tmp_path, capsys, monkeypatch
):
    """One stage of two never tells that its part of the first save is written."""
    committed_12, take_step = threading.Event(), JobSaves.step

    def find_damage(scrub, step):  # reads it at once; it is told last of a commit
        scrub.damaged(step)
        committed_12.set()

    def wait_and_take(job_saves, step):
        assert step != 10 or committed_12.wait(HANG_S)
        return take_step(job_saves, step)

    monkeypatch.setattr(Scrub, "committed", find_damage)
    monkeypatch.setattr(JobSaves, "step", wait_and_take)
    begin, go_on = [["tell", "up"], ["verdict", 2]], [["steps", 1, 9], ["verdict", 12]]
    end = [["await", 12], ["steps", 10, 13], ["done", 13]]
    vote, saves = [["vote", 2]], [["save", 12]]
    scripts = {
        0: [*vote, *begin, ["save", 2], *go_on[:1], ["vote", 12], *go_on[1:], *saves, *end],
        1: [*begin, *go_on, *end],
        2: [*vote, *begin, *go_on[:1], ["vote", 12], *go_on[1:], *saves, *end],
    }
    settings = ["checkpoint.every=2", "distributed.stop_timeout_s=20"]
    supervisor, _ = supervise(tmp_path, scripts, settings=settings)
    assert supervisor.run() == 0
    out = capsys.readouterr().out
    [alarm] = [line for line in out.splitlines() if line.startswith("ALARM")]  # not for each step
    assert "no checkpoint was committed for 3.5 intervals, and step 7 is done" in alarm
    assert "the last checkpoint: none in this run" in alarm
    assert alarm.endswith("the save after step 2 waits for b/b-0")
    assert "a checkpoint is committed again, after step 12" in out
    records = metrics.read(tmp_path / "run")
    found = [record.get("steps_without_checkpoint") for record in records]
    assert found == [*[None] * 6, 7, 8, 9, *[None] * 4]
    assert [record["damaged_step"] for record in records if "damaged_step" in record] == [12]


# ---- the end -------------------------------------------------------------------------------------

ENDING = {
    "its time is up": (0, 0, 10, "it took more than "),
    "a signal while it is written": (1, 0, 10, "the job is to end now"),
    "a second signal": (1, 75, 9, "the job is to end now"),
}


@pytest.mark.parametrize("num_signals, status, done, why", ENDING.values(), ids=ENDING)
def test_a_report_that_takes_long_holds_no_end_up(
    tmp_path, monkeypatch, capsys, num_signals, status, done, why
):
    """It is left out, and the last line says how it is written later."""
    begun = tmp_path / "begun"
    text = f"open({str(begun)!r}, 'w').close(); import time; time.sleep(600)"
    (tmp_path / "slow_page.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(recorder, "PAGE", "slow_page")
    limit_s = 1.1 * HANG_S if num_signals else 12  # 5 of them are for what comes behind a report
    settings = ["log.report=true", f"distributed.stop_timeout_s={limit_s}"]
    training = [["tell", "up"], ["steps", 1, done], ["done", done]]
    supervisor, _ = supervise(tmp_path, dict.fromkeys(range(3), training), settings=settings)
    take = Attempt._record

    def take_and_stop(*arguments):
        take(*arguments)
        if status == 75 and not supervisor._stops:
            supervisor._stops.add(signal.SIGTERM)  # a first one, during the steps

    monkeypatch.setattr(Attempt, "_record", take_and_stop)

    def kill():
        while not begun.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    if num_signals:
        threading.Thread(target=kill, daemon=True).start()
    before_s = time.monotonic()
    assert supervisor.run() == status
    assert time.monotonic() - before_s < HANG_S
    again = f"to write it: python -m launch report {tmp_path / 'run'}"
    assert re.search(f"no report: {why}.*; {re.escape(again)}", capsys.readouterr().out)


def test_what_hangs_behind_the_last_step_ends_with_the_status_of_the_job(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(launch.attempt, "LEAST_LEFT_S", 1.0)
    training = [["tell", "up"], ["steps", 1, 10], ["done", 10]]
    settings = ["distributed.stop_timeout_s=1"]
    supervisor, launcher = supervise(tmp_path, dict.fromkeys(range(3), training), settings=settings)
    statuses = []
    end = lambda status, *last_words: (statuses.append(status), ended.set())
    watch = functools.partial(LoopWatch, end=end)
    monkeypatch.setattr(launch.attempt, "LoopWatch", watch)
    real_end = launcher.end
    launcher.end = lambda: (ended.wait(30), real_end())  # `scancel`, say, does not return
    assert supervisor.run() == 0
    assert statuses == [0]


def test_logs_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(process_logs, "LIMIT_BYTES", 1000)
    job = jobs.load(write_run(tmp_path, CLUSTERS), ["model.num_layers=2", "model.width=16"])
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    job.run_dir.mkdir()
    logs = process_logs.ProcessLogs(job.run_dir, processes, Path.rename)
    for number in range(500):
        logs.write(0, f"line {number}")
    files = sorted(logs.folder.iterdir())
    assert [path.name for path in files] == [logs.path(0).name, f"{logs.path(0).name}.1"]
    assert all(path.stat().st_size <= 1010 for path in files)
    kept = "".join(path.read_text() for path in reversed(files)).splitlines()
    assert kept == [f"line {number}" for number in range(500 - len(kept), 500)]


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


def test_a_stop_ends_a_start_that_waits_for_a_store(tmp_path, monkeypatch):
    """It fetches a part, say; and a file system that hangs holds the process for no longer."""
    limits, is_limited = [], threading.Event()

    def fetch(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            is_limited.wait(60)  # a call of the system that hangs

    def limit(*given):
        limits.append(given)
        is_limited.set()

    monkeypatch.setattr(hung_main_thread, "end_within", limit)
    monkeypatch.setattr(resume, "find", fetch)
    supervisor, launcher = supervise(tmp_path, settings=["distributed.stop_timeout_s=50"])
    with pytest.raises(SystemExit) as end:
        supervisor.run()
    assert (end.value.code, limits, launcher.starts) == (75, [(50.0, 75)], 0)
    assert json.loads((tmp_path / "run" / RECORD).read_text())["starts"][0]["stopped"]


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
