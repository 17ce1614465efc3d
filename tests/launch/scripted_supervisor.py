"""Supervised jobs whose processes are scripts: what they say, and when."""

from holmesjax import job as jobs
from launch.supervisor import Supervisor
from tests.jobs import write_run
from tests.scripted_member import ScriptedLauncher

CLUSTERS = {"a": (1, 1), "b": (1,)}
MISTAKE = {"where": "stage 0", "problem": "has 7 devices, needs 8", "found": "7", "fix": "add one"}
LOSS = {"where": "link a -> b", "problem": "was lost", "found": "a reset", "fix": "start again"}
GLOO = {"where": "", "problem": "JaxRuntimeError: Gloo all-reduce failed: Connection reset by peer"}


def supervise(tmp_path, *scripts, settings=(), **options):
    """A job whose processes do what each start's scripts say; the supervisor and its launcher."""
    small = ["model.num_layers=2", "model.width=16", *settings]
    job = jobs.load(write_run(tmp_path, CLUSTERS), small)
    launcher = ScriptedLauncher(*scripts)
    return Supervisor(job, launcher, **options), launcher


def told(content, status):
    return ["tell", "failed", {**content, "exit_status": status}]


LOST = [told(LOSS, 75), ["exit", 75]]


def saving(step):
    """Scripts of a start that commits a checkpoint, and then fails on a-1."""
    return {0: [["save", step]], 2: [["save", step]], 1: [["await", step], *LOST]}
