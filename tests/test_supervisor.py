"""What the supervisor makes of what processes tell, or do not: real ones, which only talk."""

import signal

import pytest

from holmesjax import job as jobs
from holmesjax.control import Event
from holmesjax.errors import HolmesError
from launch.causes import cause_of
from launch.supervisor import Supervisor
from tests.jobs import write_run
from tests.scripted_member import ScriptedLauncher

CLUSTERS = {"a": (1, 1), "b": (1,)}
MISTAKE = {"where": "stage 0", "problem": "has 7 devices, needs 8", "found": 7, "fix": "add one"}
LOSS = {"where": "link a -> b", "problem": "was lost", "found": "a reset", "fix": "start again"}
BUG = {"where": "", "problem": "XlaRuntimeError: gloo"}


def supervise(tmp_path, *scripts, **options):
    """A job whose processes do what each start's scripts say; the supervisor and its launcher."""
    job = jobs.load(write_run(tmp_path, CLUSTERS), ["model.num_layers=2", "model.width=16"])
    launcher = ScriptedLauncher(*scripts)
    return Supervisor(job, launcher, **options), launcher


def told(content, status):
    return ["tell", "failed", {**content, "exit_status": status}]


# ---- the cause -----------------------------------------------------------------------------------

FAILURES = {
    "mistake": ("failed", {**MISTAKE, "exit_status": 2}),
    "fatal": ("failed", {**MISTAKE, "exit_status": 1}),
    "exit 2": ("exit", {"status": 2}),
    "killed": ("exit", {"status": -signal.SIGKILL}),
    "silent": ("silent", {"silent_s": 40.0}),
    "bug": ("failed", {**BUG, "exit_status": 1}),
    "loss": ("failed", {**LOSS, "exit_status": 75}),
    "aborted": ("exit", {"status": -signal.SIGABRT}),
    "exit 75": ("exit", {"status": 75}),
    "lost": ("lost", {}),
}


@pytest.mark.parametrize(
    "cause, others",
    [
        ("mistake", ["exit 2", "aborted", "lost", "loss", "bug", "silent", "killed"]),
        ("fatal", ["killed", "silent", "loss"]),  # a scheduler kills what is left
        ("exit 2", ["loss", "lost", "silent"]),
        ("killed", ["loss", "bug", "silent", "aborted", "lost"]),
        ("silent", ["loss", "bug", "aborted", "lost"]),
        ("bug", ["loss", "aborted", "lost"]),
        ("loss", ["aborted", "exit 75", "lost"]),
        ("aborted", ["lost"]),
    ],
)
def test_the_cause_is_found_in_whatever_order_failures_come(cause, others):
    for other in others:
        for names in ([cause, other], [other, cause]):
            events = [Event(number, *FAILURES[name]) for number, name in enumerate(names)]
            assert cause_of(events).process == names.index(cause), names


def test_of_failures_alike_the_first_is_the_cause():
    events = [Event(number, *FAILURES["loss"]) for number in (2, 0, 1)]
    assert cause_of(events).process == 2


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
