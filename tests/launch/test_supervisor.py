"""The supervisor hears what processes tell, or do not: real ones, which only talk."""

import json
import signal
import threading
import time
from unittest import mock

import pytest

import launch.attempt
from holmesjax.checkpoints import committing, manifest
from holmesjax.checkpoints.scrub import Scrub
from holmesjax.distributed.controller import NOBODY, Controller
from holmesjax.distributed.messages import Done
from holmesjax.distributed.store_hub import StoreHub
from holmesjax.errors import HolmesError, PeerError
from holmesjax.report import metrics
from holmesjax.runtime.step_timeout import Progress
from launch import failure_diagnosis
from launch.attempt import Attempt
from launch.job_saves import JobSaves
from launch.loop_watch import LoopWatch
from launch.restarts import RECORD
from tests.jobs import HANG_S
from tests.launch.scripted_supervisor import GLOO, LOSS, MISTAKE, supervise, told

pytestmark = pytest.mark.usefixtures("process_goes_on")


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
    turns = count_turns(monkeypatch, failure_diagnosis, "find_cause")
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

    def __init__(self, config, train, shares):
        self.now_s, self._between_s = 0.0, 0.75 * config.start_timeout_s
        super().__init__(config, train, shares, lambda: self.now_s)

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


def test_a_start_that_takes_minutes_hears_a_signal(tmp_path):
    supervisor, launcher = supervise(tmp_path, {})
    launcher.start = lambda *_: started.append(supervisor._stops.add(signal.SIGTERM))
    started = []
    with pytest.raises(SystemExit) as end:
        supervisor.run()
    assert (end.value.code, len(started)) == (75, 1)
    [start] = json.loads((tmp_path / "run" / RECORD).read_text())["starts"]
    assert (start["status"], start["stopped"]) == (75, True)


def test_a_commit_that_waits_for_a_store_holds_up_nothing_else(tmp_path, monkeypatch):
    """It waits until what comes after it was heard, and the job for it."""
    waited = []
    supervise_a_commit(tmp_path, monkeypatch, waited.append).run()
    assert waited == [True]
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path / "run")] == [10]


def test_stores_are_told_of_the_last_checkpoint_before_processes_end(tmp_path, monkeypatch):
    """A store may take long to remove what is superseded; the loop turns meanwhile."""
    turns, told = count_turns(monkeypatch, StoreHub, "committed"), []
    broadcast = Controller.broadcast

    def tell(*_):
        while len(turns) < 3:
            time.sleep(0.01)
        told.append("stores")

    def note(controller, record):
        told.append(type(record).__name__)
        broadcast(controller, record)

    enter = StoreHub.__init__

    def with_a_store(hub, *arguments):
        enter(hub, *arguments)
        hub._stores.append(mock.MagicMock(process=NOBODY))

    monkeypatch.setattr(StoreHub, "__init__", with_a_store)
    monkeypatch.setattr(StoreHub, "_check", lambda *_: None)
    monkeypatch.setattr(StoreHub, "stores_of_parts", lambda *_: {})
    monkeypatch.setattr(StoreHub, "_keep", tell)
    monkeypatch.setattr(Controller, "broadcast", note)
    supervisor = supervise_a_commit(tmp_path, monkeypatch, lambda _: None)
    assert supervisor.run() == 0
    assert told[-2:] == ["stores", "AllDone"]


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
    assert supervisor._attempt.diagnosis.blamed is None
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
    assert supervisor._attempt.diagnosis.blamed == "a-1"


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
