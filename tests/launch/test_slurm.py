"""The launcher `slurm`: its file, what srun says, and whole jobs on a Slurm of the test's own."""

import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from holmesjax import job as jobs
from holmesjax.distributed import worker
from holmesjax.distributed.messages import Exit, Output, ProcessEvent
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.hosts import nics
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.plan.processes import make_processes
from holmesjax.report import metrics
from holmesjax.topology import loading
from holmesjax.transport import key_files
from launch.launchers import slurm, slurm_options
from launch.launchers.components import make_components
from launch.launchers.launcher import ProcessStart
from launch.launchers.slurm_options import SlurmOptions
from tests.jobs import HANG_S, ROOT, RunningJob, unused_ports, write_run
from tests.launch.gpu_jobs import CLUSTERS, GPUS, gpu_job
from tests.one_device import RTOL
from tests.plain_losses import plain_losses

# A new worker would start a Slurm of its own.
pytestmark = pytest.mark.xdist_group("slurm")

STEPS = 200  # far more than are done until a signal has come
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
    ports = unused_ports(4)
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


def wait_until(condition):
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.05)


def workers(run_dir: Path) -> dict[int, int]:
    """Process ids, by the number in the job, from what tells a process who it is."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, KeyError):  # it ends, and has no variables any more
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
    python = write_program(
        folder / "python", f'touch "$0.ran"; exec {shlex.quote(sys.executable)} "$@"'
    )
    prolog = write_program(folder / "prolog", f"touch {shlex.quote(str(folder))}/$SLURMD_NODENAME")
    clusters = [{"name": "b", "srun": [f"--task-prolog={prolog}"]}]
    text = yaml.safe_dump({"worker_python": python, "clusters": clusters})
    (folder / "options.yaml").write_text(text)
    options = ("--launcher", "slurm", "--max-restarts", 1, "--listen", "127.0.0.1", "--submit")
    options += ("--options", folder / "options.yaml")
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
    assert [path.name for path in folder.glob("n?")] == ["n3"]  # only the component b has it
    assert (folder / "python.ran").exists()
    records = metrics.read(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [record["loss"] for record in records]
    np.testing.assert_allclose(losses, plain_losses(*SETTINGS), rtol=RTOL)


def write_program(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_slurm_reads_the_file_as_it_is_meant(cluster, tmp_path, monkeypatch):
    """The job is held, and Slurm says of each component what it has understood."""
    folder = tmp_path / "it's there"
    folder.mkdir()
    options = SlurmOptions(
        time="2-00:00:00",
        folder=str(folder),
        python="/opt/py thon",
        sbatch=("--hold", "--comment=a & b"),
        clusters=(slurm_options.SlurmCluster(name="b", sbatch=("--nice=7",)),),
    )
    monkeypatch.chdir(tmp_path)
    job = jobs.load(write_run(tmp_path, CLUSTERS), [*SETTINGS, "run.dir=runs/a job"])
    (tmp_path / "job.sbatch").write_text(slurm.script(job, options, listen=None, max_restarts=2))
    argv = ["sbatch", "--parsable", "job.sbatch"]
    done = subprocess.run(argv, env=cluster, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    try:
        shown = ask(cluster, "scontrol", "show", "job", done.stdout.strip()).split("\n\n")
    finally:
        ask(cluster, "scancel", done.stdout.strip())
    first, second = (component for component in shown if component.strip())
    for component, num_nodes, nice in ((first, 2, 0), (second, 1, 7)):
        assert re.search(rf"NumNodes={num_nodes}(-{num_nodes})? ", component)
        assert f" Nice={nice} " in component
        assert "TimeLimit=2-00:00:00 " in component
        assert "Comment=a & b" in component
        assert f"WorkDir={folder}" in component
        assert "Requeue=1 " in component
    assert f"StdOut={folder}/runs/a job/slurm-{done.stdout.strip()}.out" in first


def test_an_allocation_of_another_size_is_refused(cluster, tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    argv = ["salloc", "-N1", sys.executable, "-m", "launch", "train", run_file]
    argv += ["--launcher", "slurm", *SETTINGS]
    done = subprocess.run(
        argv, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "the plan needs 2 nodes for a" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the file for sbatch -------------------------------------------------------------------------

OPTIONS = """
time: 2-00:00:00
sbatch: [--account=me]
setup: [module load cuda]
python: /opt/py thon
clusters:
  - {name: ampere, sbatch: ["--constraint=a100&big"]}
"""


def script_of(tmp_path, *settings):
    (tmp_path / "options.yaml").write_text(OPTIONS)
    job = gpu_job(tmp_path, *settings)
    options = slurm_options.read(tmp_path / "options.yaml", job.topology)
    return slurm.script(job, options, listen=None, max_restarts=2)


def test_a_cluster_has_its_own_run_folder(tmp_path, monkeypatch):
    (tmp_path / "options.yaml").write_text("clusters: [{name: ampere, run_dir: s3://b/x}]")
    job, started = gpu_job(tmp_path), []
    options = slurm_options.read(tmp_path / "options.yaml", job.topology)
    monkeypatch.setattr(slurm.SlurmLauncher, "_hosts", lambda self: {})
    launcher = slurm.SlurmLauncher(job, {}, "127.0.0.1", options)
    monkeypatch.setattr(launcher._children, "start", lambda n, argv, *_: started.append(argv[-1]))
    for process in make_processes(job.plan, job.topology, job.config.distributed.processes):
        env = {"HOLMES_PROCESS": str(process.number)}
        command = ["worker", "/shared/run"]
        start = ProcessStart(process=process, command=command, env=env, run_dir="/shared/run")
        launcher.start(start, queue.SimpleQueue())
    assert started == ["/shared/run", "s3://b/x"]
    job = gpu_job(tmp_path, "run.dir=s3://b/x")
    with pytest.raises(ConfigError, match="in the allocation works in a folder"):
        slurm.write(job, None, listen=None, max_restarts=None, submit=False)


def test_each_step_has_the_gpus_and_the_memory_of_its_own_component(tmp_path, monkeypatch):
    """The batch script has the values of the first one, which srun would take for all."""
    job, started = gpu_job(tmp_path), []
    monkeypatch.setattr(slurm.SlurmLauncher, "_hosts", lambda self: {})
    env = {"SLURM_GPUS_PER_NODE": "8", "SLURM_MEM_PER_NODE": "900", "SLURM_CPUS_PER_TASK": "96"}
    env |= {"SLURM_MEM_PER_NODE_HET_GROUP_0": "900", "SLURM_MEM_PER_NODE_HET_GROUP_1": "400"}
    launcher = slurm.SlurmLauncher(job, env, "127.0.0.1", SlurmOptions())
    take = lambda n, argv, variables, _: started.append((argv, variables))
    monkeypatch.setattr(launcher._children, "start", take)
    for process in make_processes(job.plan, job.topology, job.config.distributed.processes):
        start = ProcessStart(process=process, command=["worker"], env={"HOLMES_PROCESS": "0"})
        launcher.start(start, queue.SimpleQueue())
    for (argv, variables), gpus, memory in zip(started, ("8", "4"), ("900", "400"), strict=True):
        assert [word for word in argv if "gpu" in word] == [f"--gpus-per-node={gpus}"]
        assert variables["SLURM_MEM_PER_NODE"] == memory
        assert not {"SLURM_GPUS_PER_NODE", "SLURM_CPUS_PER_TASK"} & variables.keys()


def test_each_of_several_processes_of_a_node_takes_its_own_gpus(tmp_path, monkeypatch):
    """Slurm shows each of them all, since NCCL would lose NVLink between GPUs that it hides."""
    job = gpu_job(tmp_path, "distributed.processes=device")
    launcher = slurm.SlurmLauncher.__new__(slurm.SlurmLauncher)
    launcher._components, launcher._options = make_components(job), SlurmOptions()
    options = launcher._srun(launcher._components[1])
    assert [word for word in options if "gpu" in word] == ["--gpus-per-node=4"]
    monkeypatch.setattr(worker.jobs, "load_saved", lambda folder: job)
    monkeypatch.setattr(worker, "join_store", lambda *_: None)
    seen = []
    kind = lambda job, environment, processes, env, *_: SimpleNamespace(
        run=lambda: seen.append(env["CUDA_VISIBLE_DEVICES"])
    )
    kind.trains = True
    for number in range(4):
        env = {"SLURM_PROCID": str(number), "HOLMES_PROCESSES": "19,18,17,16"}
        env |= {"HOLMES_CONTROLLER": "10.0.0.1:7000", "HOLMES_KEY": "00" * 32}
        env |= {"HOLMES_ADDRESSES": "{}", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
        worker.work(str(tmp_path), env, kind)
    assert seen == ["3", "2", "1", "0"]


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


def test_no_two_components_have_one_name(tmp_path):
    """The second kind of node of a cluster has a number that no other cluster's name has."""
    run_file = write_run(tmp_path, {"a": (2, 1, 2), "a-1": (1,)})
    job = jobs.load(run_file, ["train.global_batch=20", "distributed.processes=device"])
    assert [c.name for c in make_components(job)] == ["a", "a-2", "a-1"]


def test_nothing_of_this_machine_is_in_the_file(tmp_path, monkeypatch):
    """The current folder is another one on the nodes; what lies elsewhere has the same place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    job = gpu_job(tmp_path, "run.dir=runs/it")
    options = SlurmOptions(folder="/shared/HolmesJAX")
    slurm_options.refuse_places_of_here(options, None)
    text = slurm.script(job, options, listen=None, max_restarts=None, has_file=True)
    assert str(tmp_path) not in text
    assert "\n#SBATCH --chdir=/shared/HolmesJAX\n" in text
    assert "\n#SBATCH --output=/shared/HolmesJAX/runs/it/slurm-%j.out\n" in text
    [command] = [line for line in text.splitlines() if " -m launch " in line]
    run_dir = "/shared/HolmesJAX/runs/it"
    assert command == (
        f"/shared/HolmesJAX/.venv/bin/python -m launch train {run_dir} --launcher slurm "
        f"--options {run_dir}/slurm.yaml &"
    )
    assert options.on_nodes(Path("/scratch/it")) == "/scratch/it"


@pytest.mark.parametrize(
    "options, has_sbatch, words",
    [
        (SlurmOptions(), True, None),
        (SlurmOptions(python="python3"), True, None),
        (
            SlurmOptions(python="/opt/nowhere/python"),
            True,
            "no /opt/nowhere/python on this machine",
        ),
        (SlurmOptions(), False, "no sbatch on this machine"),
        (SlurmOptions(folder="/shared"), False, "must say which Python the nodes have"),
        (SlurmOptions(folder="/shared", python="/opt/nowhere/python"), False, None),
    ],
)
def test_a_machine_that_shares_no_folder_with_the_nodes_says_theirs(
    tmp_path, monkeypatch, options, has_sbatch, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    if has_sbatch:
        write_program(tmp_path / "sbatch", "")
    if words is None:
        slurm_options.refuse_places_of_here(options, None)
        return
    with pytest.raises(HolmesError) as caught:
        slurm_options.refuse_places_of_here(options, "slurm.yaml")
    assert words in str(caught.value)
    assert "fix: add `" in str(caught.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("clusters: [{name: hoper}]", "did you mean 'hopper'?"),
        ("clusters: [{name: hopper}, {name: hopper}]", "is described twice"),
        ("sbatch: [partition=x]", "sbatch[0]: is no option"),
        ("sbatch: [-p main]", "write it as --partition=hopper"),
        ("sbatch: [--nodes=3]", "the plan says how many"),
        ("sbatch: [--chdir=/a]", "write it as `folder`"),
        ("srun: [--label]", "srun[0]: is set by the launcher"),
        ("clusters: [{name: hopper, srun: [--export=A=1]}]", "clusters[0].srun[0]: is set"),
        ("clusters: [{name: hopper, sran: []}]", "did you mean 'srun'?"),
        ("clusters: [{name: hopper, run_dir: a}]", "clusters[0].run_dir: must be a whole path"),
        ("container: x", "container: no such setting"),
        ("folder: shared", "must be a path from the root"),
        ("tine: 1", "did you mean 'time'?"),
        ("stop_before_s: 0", "must be at least 1"),
    ],
)
def test_mistakes_in_the_options_have_a_place(tmp_path, text, words):
    (tmp_path / "options.yaml").write_text(text)
    (tmp_path / "gpus.yaml").write_text(GPUS)
    with pytest.raises(HolmesError) as caught:
        slurm_options.read(str(tmp_path / "options.yaml"), loading.load(tmp_path / "gpus.yaml"))
    assert f"{tmp_path}/options.yaml:1: " in str(caught.value)
    assert words in str(caught.value)


def test_the_launcher_sets_what_a_user_may_not(tmp_path):
    """The names that are refused are those of the launcher's own srun and sbatch."""
    job = gpu_job(tmp_path, "distributed.processes=device")
    launcher = slurm.SlurmLauncher.__new__(slurm.SlurmLauncher)
    launcher._components, launcher._options = make_components(job), SlurmOptions()
    _, *options = launcher._srun(launcher._components[0])
    names = {option.partition("=")[0] for option in options}
    assert names <= slurm_options.SRUN_IS_SET.keys()


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
    key_files.make_key_file(tmp_path / "key")
    env = {"HOLMES_CONTROLLER": "10.0.0.1:7000", "HOLMES_KEY_FILE": str(tmp_path / "key")}
    env |= {"HOLMES_ADDRESSES": '{"ethernet": ["10.0.0.2"]}', **own}
    if number is None:
        with pytest.raises(HolmesError, match="HOLMES_PROCESSES: makes no sense"):
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
    assert told(["2048: of 4096"], 0)[:1] == [(4, "2048: of 4096")]  # behind a carriage return
    ended = "srun: error: n[1-2]: tasks 0,2: Exited with exit code 75"
    assert told([ended], 75)[1:] == [(4, 75), (5, 75), (6, 0)]
    dumped = "srun: error: n1: task 0: Segmentation fault (core dumped)"
    assert told([dumped], 139)[1:] == [(4, -11), (6, 0), (5, 0)]


def test_an_srun_that_fails_by_itself_fails_for_all():
    assert told(["srun: error: Unable to create step"], 1)[1:] == [(4, 1), (6, 1), (5, 1)]
    assert told([], 0) == [(4, 0), (6, 0), (5, 0)]
