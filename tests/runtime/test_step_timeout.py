"""Progress is a signal of its own: when a job is late, who is behind, and how it ends."""

import itertools
import signal
import subprocess
import sys
import time

import pytest

import launch.attempt
from holmesjax import job as jobs
from holmesjax.config import DistributedConfig, RampupConfig, TrainConfig
from holmesjax.errors import PeerError
from holmesjax.liveness import lease
from holmesjax.runtime.step_timeout import Progress
from launch.attempt import Attempt
from launch.process_logs import LOGS
from launch.supervisor import Supervisor
from tests.jobs import HANG_S, ROOT, write_run
from tests.scripted_member import ScriptedLauncher

CLUSTERS = {"a": (1, 1), "b": (1,)}


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def after_steps(durations_s, train=None, shares=(), **settings):
    """A progress after steps of these durations, with its clock; the last step has just begun."""
    clock = Clock()
    progress = Progress(DistributedConfig(start_timeout_s=600.0, **settings), train, shares, clock)
    for step, duration_s in enumerate([0.0, *durations_s], start=1):
        clock.now_s += duration_s
        progress.begin("step", step)
    return progress, clock


def is_late_after(progress, clock, seconds):
    clock.now_s += seconds
    late = progress.is_late()
    clock.now_s -= seconds
    return late


@pytest.mark.parametrize(
    "durations_s, settings, limit_s",
    [
        ([], {}, 600.0),  # the first steps may compile
        ([1.0, 1.0], {}, 600.0),
        ([300.0, 1.0, 1.0], {}, 60.0),
        ([9.0, 7.0, 8.0, 100.0, 7.5], {}, 80.0),
        ([20.0] * 200 + [30.0] * 51, {}, 300.0),  # of the last hundred
        ([], {"step_timeout_s": 5.0}, 600.0),
        ([1.0], {"step_timeout_s": 5.0}, 5.0),
        ([1.0], {"step_timeout_s": 5000.0}, 5000.0),
    ],
)
def test_a_step_may_take_ten_medians(durations_s, settings, limit_s):
    progress, clock = after_steps(durations_s, **settings)
    assert progress.limit_s == limit_s
    assert not is_late_after(progress, clock, limit_s)
    assert is_late_after(progress, clock, limit_s + 1.0)


def test_validation_and_checkpoints_are_no_hang():
    progress, clock = after_steps([1.0] * 5)
    for _ in range(10):  # each batch counts
        clock.now_s += 50.0
        progress.begin("validation", 6)
    assert not is_late_after(progress, clock, 60.0)
    assert is_late_after(progress, clock, 61.0)
    progress.begin("checkpoint", 6, process=1)  # another process of the job
    progress.begin("step", 7, process=0)
    assert not is_late_after(progress, clock, 600.0)
    assert is_late_after(progress, clock, 601.0)
    progress.begin("step", 7, process=1)
    assert is_late_after(progress, clock, 61.0)


def test_a_validation_of_many_islands_takes_its_island_many_steps():
    progress, clock = after_steps([10.0] * 5, shares=[1, 31])
    progress.begin("validation", 6)
    assert not is_late_after(progress, clock, 32 * 10 * 10.0)
    assert is_late_after(progress, clock, 32 * 10 * 10.0 + 1.0)
    progress.begin("step", 7)
    assert progress.limit_s == 10 * 10.0


def test_a_larger_batch_may_take_longer():
    """A batch of validation has as many sequences as the steps behind the ramp."""
    rampup = (RampupConfig(steps=5, global_batch=32), RampupConfig(steps=3, global_batch=1024))
    train = TrainConfig(steps=20, global_batch=2048, rampup=rampup)
    progress, clock = after_steps([2.0] * 4, train)
    assert progress.limit_s == 60.0
    progress.begin("validation", 4, process=1)
    progress.begin("step", 5, process=0)  # while the other validates
    assert progress.limit_s == 10 * 2.0 * 64
    progress.begin("step", 5, process=1)
    assert progress.limit_s == 60.0
    progress.begin("step", 6)
    assert not is_late_after(progress, clock, 10 * 2.0 * 32)
    assert is_late_after(progress, clock, 10 * 2.0 * 32 + 1)
    assert "the median step of 64 s, for 1024 sequences, and" in progress.describe_limit()
    for step in range(7, 10):  # as fast for each sequence as before
        clock.now_s += 64.0
        progress.begin("step", step)
    assert progress.limit_s == 10 * 128.0


def test_of_several_processes_the_first_begins_a_step():
    progress, clock = after_steps([])
    for step, process in itertools.product(range(2, 8), range(3)):
        clock.now_s += 10.0
        progress.begin("step", step, process)
    assert progress.limit_s == 300.0


# ---- jobs of processes that only talk ------------------------------------------------------------


def supervise(tmp_path, script, others, *settings, **options):
    """A job of three, one of which does something else."""
    settings = ["model.num_layers=2", "model.width=16", *settings]
    launcher = ScriptedLauncher({0: others, 1: script, 2: others})
    job = jobs.load(write_run(tmp_path, CLUSTERS), settings)
    return Supervisor(job, launcher, **options), launcher


UP = [["tell", "up"], ["begin", "step", 1], ["begin", "step", 2]]
BUSY = [*UP, ["status", "was busy in step 2"]]
WAITS = [*UP, ["status", "waited for B1 in step 2"]]


class LateInStep2(Progress):
    """Its clock stands still until all three processes are in step 2, and then shows much more."""

    def __init__(self, *configs):
        self.there, self.are_up = set(), False
        is_over = lambda: self.are_up and len(self.there) == 3
        super().__init__(*configs, lambda: 1000.0 if is_over() else 0.0)

    def begin(self, work, step, process=0):
        super().begin(work, step, process)
        if step == 2:
            self.there.add(process)


def test_a_job_without_progress_ends_with_who_is_behind_and_the_stacks_of_all(
    tmp_path, capsys, monkeypatch
):
    made = []
    make = lambda *configs: made.append(LateInStep2(*configs)) or made[-1]
    monkeypatch.setattr(launch.attempt, "Progress", make)
    supervisor, _ = supervise(tmp_path, BUSY, WAITS, "distributed.step_timeout_s=100")
    take, events, logs = Attempt._take, Attempt._events, tmp_path / "run" / LOGS

    def take_and_note(attempt, event):
        take(attempt, event)
        made[0].are_up = len(attempt.up) == 3

    def until_all_have_told(attempt, for_s):
        """However long their stacks take."""
        deadline_s = time.monotonic() + HANG_S
        told = lambda number: attempt._controller.status(number).endswith(" in step 2")
        while time.monotonic() < deadline_s and not all(map(told, range(3))):
            yield from events(attempt, 0.1)
        while time.monotonic() < deadline_s and not all(
            "scripted_member" in path.read_text() for path in logs.iterdir()
        ):
            yield from events(attempt, 0.1)

    monkeypatch.setattr(Attempt, "_take", take_and_note)
    monkeypatch.setattr(Attempt, "_events", until_all_have_told)
    with pytest.raises(PeerError) as error:
        supervisor.run()
    assert error.value.where == "a/a-1 (stage 0, process 1)", error.value
    assert "no progress for 100 s (distributed.step_timeout_s)" in error.value.problem
    assert "b/b-0 (stage 1) waited for B1 in step 2" in error.value.found
    assert "was late" not in capsys.readouterr().out  # what is asked for is no progress
    stacks = [path.read_text() for path in logs.iterdir()]
    assert len(stacks) == 3
    assert all("thread MainThread" in text and "scripted_member" in text for text in stacks)


class SlowValidation(Progress):
    """Each batch of validation begins after most of what a sign of progress may take."""

    def __init__(self, *configs):
        self.now_s = 0.0
        super().__init__(*configs, lambda: self.now_s)

    def begin(self, work, step, process=0):
        if work == "validation":
            self.now_s += 0.75 * self.limit_s
        super().begin(work, step, process)


def test_what_is_told_in_time_is_no_hang(tmp_path, monkeypatch):
    """A step of the others lasts longer than one may, while one validates."""
    made = []
    make = lambda *configs: made.append(SlowValidation(*configs)) or made[-1]
    monkeypatch.setattr(launch.attempt, "Progress", make)
    validates = [["begin", "validation", 2]] * 4
    end = [["done", 10]]
    supervisor, _ = supervise(
        tmp_path, [*UP, *validates, *end], [*UP, *end], "distributed.step_timeout_s=100"
    )
    assert supervisor.run() == 0
    assert made[0].now_s >= 4 * 75


def stop(number):
    return ["tell", "stop", {"signal": number}]


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 0)])
def test_a_signal_to_one_process_stops_all(tmp_path, number, status):
    """A node is drained: whoever started the job starts it again, and not after a Ctrl-C."""
    end = [["done", 3]]
    supervisor, launcher = supervise(
        tmp_path, [*UP, stop(number), ["sleep", 0.5], *end], [*UP, ["sleep", 1.0], *end]
    )
    assert supervisor.run() == status
    assert launcher.starts == 1


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_before_the_first_step_it_ends_at_once(tmp_path, number, status):
    supervisor, _ = supervise(tmp_path, [stop(number)], [])
    with pytest.raises(SystemExit) as ended:
        supervisor.run()
    assert ended.value.code == status


def test_a_stop_that_takes_too_long_is_given_up(tmp_path):
    settings = ["distributed.stop_timeout_s=1"]
    script = [*BUSY, stop(signal.SIGTERM)]
    supervisor, launcher = supervise(tmp_path, script, WAITS, *settings, max_restarts=3)
    with pytest.raises(PeerError, match="its step is given up"):
        supervisor.run()
    assert launcher.starts == 1


# ---- a run in one process ------------------------------------------------------------------------

ALONE = """
import ctypes, sys
from holmesjax import trainer
from launch.__main__ import main

def hang(self, *args):
    for step in range(1, 6):
        self.begins("step", step)
    print("hangs", flush=True)
    while True:
        ctypes.CDLL(None).sleep(1000)  # where the interpreter hears no signal

def stop_and_tell(self):
    stop(self)
    print("is asked to stop", flush=True)

trainer.TrainingLoop.steps = hang
stop, trainer.Trainer.stop = trainer.Trainer.stop, stop_and_tell
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "setting, numbers, status, words",
    [
        ("step_timeout_s=1", [], 75, "no progress for 1 s (distributed.step_timeout_s)"),
        ("stop_timeout_s=1", [signal.SIGTERM], 75, "stop_timeout_s = 1 s of SIGTERM"),
        ("stop_timeout_s=500", [signal.SIGINT] * 2, 130, ""),
    ],
)
def test_a_run_in_one_process_that_hangs_ends(tmp_path, setting, numbers, status, words):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    settings = [f"distributed.{setting}", "model.num_layers=2", "model.width=16"]
    child = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(run_file), *settings],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert any(line == "hangs\n" for line in child.stdout)
        for number in numbers:
            child.send_signal(number)  # one that comes before the last was heard is none
            assert child.stdout.readline() == "is asked to stop\n"
        _, told = child.communicate(timeout=HANG_S)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == status, told
    assert not (tmp_path / "run" / lease.FILE).exists()
    assert words in told
    assert ("thread MainThread" in told) == (status == 75)
