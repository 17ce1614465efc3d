"""The launcher `slurm`: its file, what srun says, and whole jobs on a Slurm of the test's own."""

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from holmesjax import job as jobs
from holmesjax.distributed.messages import Exit, Output, ProcessEvent
from holmesjax.errors import HolmesError
from holmesjax.hosts import nics
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.report import metrics
from holmesjax.transport import connections
from launch.launchers import slurm
from launch.launchers.components import make_components, read_options
from tests.distributed.test_whole_jobs import plain_losses
from tests.jobs import ROOT, RunningJob, write_run
from tests.one_device import RTOL

CLUSTERS = {"a": (1, 1), "b": (1,)}
STEPS = 60
SETTINGS = ["model.num_layers=2", "model.width=16", f"train.steps={STEPS}", "checkpoint.every=20"]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
CONFIG = """
ClusterName=holmes
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.3 Port={ports[2]} CPUs=2
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.4 Port={ports[3]} CPUs=2
PartitionName=main Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Slurm with three nodes on this machine: the environment in which its commands find it."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and slurm-wlm and munge; missing: {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munge wants to be reached
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(4)]
        for sock in sockets:
            sock.bind(("", 0))
        ports = [sock.getsockname()[1] for sock in sockets]
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(CONFIG.format(folder=folder, ports=ports, host=host))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(config)}
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    munge += [f"--seed-file={folder}/munge.seed", "--foreground", "--force"]
    with contextlib.ExitStack() as running:

        def start(name: str, *arguments: str) -> None:
            log = running.enter_context((folder / f"{name}.out").open("w"))
            argv = [shutil.which(name, path=PATH), *arguments]
            daemon = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
            running.callback(daemon.wait, 60)
            running.callback(daemon.terminate)

        start("munged", *munge)
        wait_until((folder / "munge.socket").exists)
        start("slurmctld", "-D", "-c", "-f", str(config))
        for node in ("n1", "n2", "n3"):
            start("slurmd", "-D", "-N", node, "-f", str(config))
        try:
            wait_until(lambda: ask(env, "sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 3)
        except AssertionError:
            said = [path.read_text()[-300:] for path in folder.glob("*.out")]
            pytest.skip(f"Slurm does not start here: {said}")
        running.callback(lambda: wait_until(lambda: not ask(env, "squeue", "-h")))
        running.callback(ask, env, "scancel", "--user=root")
        yield env


def ask(env, *argv: str) -> str:
    """The output of a command of Slurm."""
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False).stdout


def nudge(env, number: str) -> None:
    """Makes Slurm look again at a job that may start now; without any event it would not."""
    if "BeginTime" not in ask(env, "squeue", "-h", "-o", "%r"):
        ask(env, "scontrol", "update", f"JobId={number}+1", "StartTime=now")


def wait_until(condition, timeout_s=120.0):  # a hang guard
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.05)


def workers(run_dir: Path) -> dict[int, int]:
    """Process ids, by the number in the job, from what tells a process who it is."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_text().split("\0")
            if line[1:4] == ["-m", "launch", "worker"] and line[4] == str(run_dir):
                env = (path.parent / "environ").read_text().split("\0")
                variables = dict(v.split("=", 1) for v in env if "=" in v)
                assert "HOLMES_PROCESS" not in variables
                numbers = variables["HOLMES_PROCESSES"].split(",")
                found[int(numbers[int(variables["SLURM_PROCID"])])] = int(path.parent.name)
    return found


def test_a_heterogeneous_job_is_restarted_and_requeued(cluster, tmp_path):
    """A process dies, then the job is asked to leave; each step is done once in the end."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    run_dir = folder / "run"
    addresses = {fabric: ["127.0.0.1"] for fabric in ("infiniband", "roce", "ethernet")}
    options = ("--launcher", "slurm", "--max-restarts", 1, "--listen", "127.0.0.1", "--submit")
    env = {**cluster, "HOLMES_ADDRESSES": json.dumps(addresses), "PYTHONPATH": str(ROOT)}
    with RunningJob(write_run(folder, CLUSTERS), *options, *SETTINGS, env=env) as job:
        assert job.end() == 0, job.output
    number = job.lines[-1].split()[-1]
    assert job.lines[-1] == f"Submitted batch job {number}\n"
    output = lambda: "".join(path.read_text() for path in run_dir.glob("slurm-*.out"))
    try:
        wait_until(lambda: sorted(workers(run_dir)) == [0, 1, 2])
        os.kill(workers(run_dir)[1], signal.SIGKILL)
        wait_until(lambda: "starting again" in output())
        wait_until(lambda: "\nstep " in output().split("starting again")[1])
        ask(cluster, "scancel", "--batch", "--signal=TERM", number)
        wait_until(lambda: "back into the queue" in output())
        wait_until(lambda: nudge(cluster, number) or "resuming after step" in output())
        wait_until(lambda: f"step {STEPS}/{STEPS}" in output())
        wait_until(lambda: not ask(cluster, "squeue", "-h"))
    except AssertionError as error:
        raise AssertionError(output()) from error
    text = output()
    assert "error: a/a-1 (stage 0, process 1): was killed by signal 9 (SIGKILL)" in text
    assert "status 75: back into the queue" in text
    assert "Traceback" not in text
    assert workers(run_dir) == {}
    records = metrics.read(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [record["loss"] for record in records]
    np.testing.assert_allclose(losses, plain_losses(*SETTINGS), rtol=RTOL)


def test_an_allocation_of_another_size_is_refused(cluster, tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    argv = ["salloc", "-N1", sys.executable, "-m", "launch", "train", run_file]
    argv += ["--launcher", "slurm", *SETTINGS]
    done = subprocess.run(
        argv, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "the plan needs 2 nodes for a" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the file for sbatch -------------------------------------------------------------------------

GPUS = """
name: gpus
clusters:
  - {name: hopper, fabric: infiniband, nodes: 2, devices: {kind: h100, count: 8},
     nics: [{kind: infiniband_400, count: 8}, {kind: ethernet_25}]}
  - {name: ampere, fabric: roce, nodes: 2, devices: {kind: a100_80gb, count: 4},
     nics: [{kind: roce_200, count: 4}, {kind: ethernet_25}]}
links:
  - {between: [hopper, ampere], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}
"""
OPTIONS = """
time: 2-00:00:00
sbatch: [--account=me]
setup: [module load cuda]
python: /opt/py thon
clusters:
  - {name: ampere, sbatch: ["--constraint=a100&big"]}
"""


def read(path, topology):
    return read_options(slurm.SlurmOptions, path, topology, slurm._options_are_options)


def gpu_job(tmp_path, *settings):
    run_file = write_run(tmp_path, CLUSTERS)
    (tmp_path / "run_topology.yaml").write_text(GPUS)
    # Large enough for replicas on every device to pay.
    model = ["model.width=4096", "model.num_heads=32", "model.context_length=2048"]
    own = ["train.global_batch=64", "run.rehearse=false", "parallel.clusters=[hopper, ampere]"]
    return jobs.load(run_file, [*model, *own, *settings])


def script_of(tmp_path, *settings):
    (tmp_path / "options.yaml").write_text(OPTIONS)
    job = gpu_job(tmp_path, *settings)
    options = read(tmp_path / "options.yaml", job.topology)
    return slurm.script(job, options, listen=None, max_restarts=2)


def test_the_file_has_a_component_for_each_cluster(tmp_path):
    text = script_of(tmp_path)
    first, second = text.split("#SBATCH hetjob\n")
    for lines in (first, second):
        assert "#SBATCH --nodes=2\n" in lines
        assert "#SBATCH --ntasks-per-node=1\n" in lines
        assert "#SBATCH --time=2-00:00:00\n#SBATCH --account=me\n" in lines
    assert "#SBATCH --gpus-per-node=8\n" in first
    assert "#SBATCH --gpus-per-node=4\n" in second
    assert "#SBATCH '--constraint=a100&big'\n" in second
    assert "constraint" not in first
    assert "\ntrap requeue TERM\nmodule load cuda\ntrap " in second
    assert "\n'/opt/py thon' -m launch train " in second
    assert "--launcher slurm --max-restarts 2 &" in second
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_process_for_each_device_is_a_task_for_each(tmp_path):
    text = script_of(tmp_path, "distributed.processes=device")
    assert "--ntasks-per-node=8\n#SBATCH --exclusive\n#SBATCH --gpus-per-node=8\n" in text
    assert "--ntasks-per-node=4\n#SBATCH --exclusive\n#SBATCH --gpus-per-node=4\n" in text


def test_components_list_every_process_once_node_by_node(tmp_path):
    run_file = write_run(tmp_path, {"a": (1, 1), "b": (2, 1, 2)})
    job = jobs.load(run_file, ["train.global_batch=20", "distributed.processes=device"])
    components = make_components(job)
    numbers = [process.number for component in components for process in component.processes]
    assert sorted(numbers) == list(range(7))
    assert [(c.name, c.num_nodes, c.per_node) for c in components] == [
        ("a", 2, 1),
        ("b", 2, 2),
        ("b-1", 1, 1),
    ]
    assert [process.node for process in components[1].processes] == ["b-0", "b-0", "b-2", "b-2"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("clusters: [{name: hoper}]", "did you mean 'hopper'?"),
        ("sbatch: [partition=x]", "sbatch[0]: is no option"),
        ("tine: 1", "did you mean 'time'?"),
        ("stop_before_s: 0", "must be at least 1"),
    ],
)
def test_mistakes_in_the_options_have_a_place(tmp_path, text, words):
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(HolmesError) as caught:
        read(tmp_path / "options.yaml", gpu_job(tmp_path).topology)
    assert f"{tmp_path}/options.yaml:1: " in str(caught.value)
    assert words in str(caught.value)


BODY = """
python() {{ trap 'echo saving; sleep 0.2; exit 75' TERM; {does}; }}
scontrol() {{ echo scontrol "$@"; }}
SLURM_JOB_ID=7
"""
ENDLESS = "while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    "setup, does, asked, status, said",
    [
        ("", "echo started; exit 0", False, 0, []),
        ("", "echo started; exit 1", False, 1, []),
        ("", "echo started; exit 75", False, 75, ["scontrol requeue 7"]),
        ("", f"echo started; {ENDLESS}", True, 75, ["saving", "scontrol requeue 7"]),
        ("", f"trap - TERM; echo started; {ENDLESS}", True, 75, ["scontrol requeue 7"]),
        ("echo started; sleep 0.5", "exit 0", True, 75, ["scontrol requeue 7"]),
    ],
)
def test_the_batch_shell_passes_signals_on_and_requeues(setup, does, asked, status, said):
    """bash itself runs the end of the file, with a stand-in for python and for scontrol.

    A signal may also come before the command begins, or before it can catch one.
    """
    lines = [BODY.format(does=does), slurm.HEAD.format(requeue=75), setup]
    text = "\n".join([*lines, slurm.BODY.format(command="python", requeue=75)])
    argv = ["bash", "-c", text]
    shell = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert shell.stdout.readline() == "started\n"
        if asked:
            shell.terminate()
        assert shell.wait(60) == status
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        with shell.stdout:
            output = shell.stdout.read()
        shell.wait()
    assert [line for line in output.splitlines() if not line.startswith("status")] == said


# ---- who a process is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own, number",
    [
        ({"SLURM_PROCID": "1"}, 1),
        ({"SLURM_PROCID": "1", "HOLMES_PROCESSES": "0,3,4"}, 3),
        ({"JOB_COMPLETION_INDEX": "2", "HOLMES_PROCESSES": "0,3,4"}, 4),
        ({"HOLMES_PROCESS": "1", "HOLMES_PROCESSES": "0,3,4"}, 1),
        ({"SLURM_PROCID": "3", "HOLMES_PROCESSES": "0,3,4"}, None),
        ({"SLURM_PROCID": "0", "HOLMES_PROCESSES": "a,b"}, None),
    ],
)
def test_a_place_in_a_component_is_a_number_in_the_job(tmp_path, own, number):
    connections.make_key_file(tmp_path / "key")
    env = {"HOLMES_CONTROLLER": "10.0.0.1:7000", "HOLMES_KEY_FILE": str(tmp_path / "key")}
    env |= {"HOLMES_ADDRESSES": '{"ethernet": ["10.0.0.2"]}', **own}
    if number is None:
        with pytest.raises(HolmesError, match="makes no sense"):
            ProcessEnvironment.read(env, nics.discover)
    else:
        assert ProcessEnvironment.read(env, nics.discover).number == number


# ---- what srun says ------------------------------------------------------------------------------


def told(lines: list[str], status: int) -> list[tuple]:
    """Events of the processes 4, 5 and 6 of a job, from what their srun says."""
    tasks_of = lambda *numbers: type("C", (), {"processes": [fake(n) for n in numbers]})()
    fake = lambda n: type("P", (), {"number": n})()
    events = queue.Queue()
    tasks = slurm._Tasks(tasks_of(4, 6, 5), events)
    for line in lines:
        tasks.put(ProcessEvent(0, Output(line=line)))
    tasks.put(ProcessEvent(0, Exit(status=status)))
    found = []
    while not events.empty():
        number, record = events.get()
        found.append((number, record.line if isinstance(record, Output) else record.status))
    return found


def test_lines_and_ends_belong_to_the_task_that_srun_names():
    lines = ["1: one", " 2: two: 3", "srun: error: n2: task 1: Killed"]
    assert told(lines, 137) == [
        (6, "one"),
        (5, "two: 3"),
        (4, lines[2]),
        (6, -9),
        (4, 0),
        (5, 0),
    ]
    ended = "srun: error: n[1-2]: tasks 0,2: Exited with exit code 75"
    assert told([ended], 75)[1:] == [(4, 75), (5, 75), (6, 0)]
    dumped = "srun: error: n1: task 0: Segmentation fault (core dumped)"
    assert told([dumped], 139)[1:] == [(4, -11), (6, 0), (5, 0)]


def test_an_srun_that_fails_by_itself_fails_for_all():
    assert told(["srun: error: Unable to create step"], 1)[1:] == [(4, 1), (6, 1), (5, 1)]
    assert told([], 0) == [(4, 0), (6, 0), (5, 0)]
