"""Jobs that lose a process, a link or their patience: what is told, what is left, what is resumed.

Jobs are dear, so one job goes through several troubles where these do not hide one another. What
is marked exhaustive, such as each role killed at each moment, is left to `make test-all`.
"""

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holmesjax.checkpoints import manifest
from holmesjax.plan.plan import Plan
from holmesjax.report import metrics
from tests.disks import disk
from tests.jobs import ROOT, RunningJob, external_job, listening_ports, write_run

# One worker runs them all: they share what is made once.
pytestmark = pytest.mark.xdist_group("failures")

STEPS = 32
CLUSTERS = {"a": (1, 1), "b": (1,)}  # process 0 coordinates two; 2 is a stage by itself
SETTINGS = [
    "model.num_layers=2",
    "model.width=16",
    f"train.steps={STEPS}",
    "checkpoint.every=8",
]
LOCAL = ("--launcher", "local")
ENDLESS = "train.steps=100000"  # for what must not end by itself before the test is done with it
TIMEOUT_S = 10.0  # distributed.heartbeat_timeout_s of these jobs
BUSY_S = 5.0  # on top, for a machine that does other things too


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics.read(folder / "run")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of the job when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with RunningJob(write_run(folder, CLUSTERS), *LOCAL, *SETTINGS) as job:
        assert job.end(120) == 0, job.output
    return losses_of(folder)


def start(folder: Path, *arguments, **options) -> RunningJob:
    return RunningJob(write_run(folder, CLUSTERS), *LOCAL, *SETTINGS, *arguments, **options)


def wait_until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.005)


# ---- a process is killed -------------------------------------------------------------------------


def starting(job, folder):
    wait_until(lambda: len(job.workers()) == 3)


def listening(pids):
    """JAX has started: its coordinator listens, beside the controller and each node's two ports."""
    wait_until(lambda: len(listening_ports(pids)) >= 1 + 3 * 2 + 1)


def compiling(job, folder):
    starting(job, folder)
    listening([job.process.pid, *job.workers()])


def first_step(job, folder):
    job.until("step ")


def middle(job, folder):
    job.until("step  6/")


def writing(job, folder):
    """While a checkpoint is written."""
    folders = lambda: set((folder / "run" / manifest.FOLDER).glob("step_*"))
    before = folders()
    wait_until(lambda: any(any(path.iterdir()) for path in folders() - before))


MOMENTS = {f.__name__: f for f in (starting, compiling, first_step, middle, writing)}
ROLES = {"coordinator": 0, "other of its stage": 1, "other stage": 2, "launcher": None}
NAMES = ("a/a-0", "a/a-1", "b/b-0")


def assert_told(output: str, number: int):
    """That a process was killed."""
    error = f"error: {NAMES[number]} (stage {number // 2}, process {number}): "
    [told] = [line for line in output.splitlines() if line.startswith(error)]
    assert "was killed by signal 9 (SIGKILL)" in told


def test_a_job_that_loses_one_process_after_another_goes_on_exactly(tmp_path, undisturbed):
    """A process of each role dies, at each moment; the launcher dies last, and is started again."""
    losses = [(0, starting), (2, compiling), (1, first_step), (2, writing)]
    restarts = ("--max-restarts", len(losses) + 1)
    with start(tmp_path, *restarts) as job:
        for number, moment in losses:
            seen = len(job.lines)
            moment(job, tmp_path)
            job.note_workers()
            os.kill(job.workers()[number], signal.SIGKILL)
            job.until("starting again")
            assert_told("".join(job.lines[seen:]), number)
        first_step(job, tmp_path)
        job.process.kill()
        job.end(TIMEOUT_S)  # nothing outlives it
        assert "Traceback" not in job.output
    with RunningJob(tmp_path / "run.yaml", *LOCAL, *SETTINGS, *restarts) as job:
        assert job.end(120) == 0, job.output
    assert losses_of(tmp_path) == undisturbed


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ROLES)
def test_a_job_that_lost_a_process_goes_on_exactly(tmp_path, undisturbed, role, moment):
    number = ROLES[role]
    with start(tmp_path, "--max-restarts", 1) as job:
        MOMENTS[moment](job, tmp_path)
        job.note_workers()
        if number is None:
            job.process.kill()
            job.end(TIMEOUT_S)  # nothing outlives it
        else:
            os.kill(job.workers()[number], signal.SIGKILL)
            assert job.end(120) == 0, job.output
            assert_told(job.output, number)
            assert "starting again" in job.output
            assert "Traceback" not in job.output
    if number is None:
        with RunningJob(tmp_path / "run.yaml", *LOCAL, *SETTINGS) as job:  # the user's own restart
            assert job.end(120) == 0, job.output
    assert losses_of(tmp_path) == undisturbed


def test_a_job_that_stops_says_why_and_goes_on_where_it_was(tmp_path, undisturbed):
    """A process is lost, then signals come: all stop after the same step, and a user goes on."""
    with start(tmp_path) as job:
        middle(job, tmp_path)
        held = listening_ports([job.process.pid, *job.workers()])
        start_s = time.monotonic()
        os.kill(job.workers()[1], signal.SIGKILL)
        assert job.end() == 75
        assert time.monotonic() - start_s < TIMEOUT_S
    assert held
    for address in held:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(address)
    [paragraph] = job.output.split("\nerror: ")[1:]
    lines = paragraph.strip().splitlines()
    assert len(lines) == 3, paragraph  # where and what, what the others waited for, what to do
    assert "b/b-0 (stage 1) w" in lines[1]
    assert "--max-restarts" in lines[2]

    done = None
    for number, status, worker in (
        (signal.SIGINT, 0, None),
        (signal.SIGTERM, 75, None),
        (signal.SIGTERM, 75, 1),
    ):
        with RunningJob(tmp_path / "run", *LOCAL) as job:  # the user does what it says
            first_step(job, tmp_path)
            os.kill(job.process.pid if worker is None else job.workers()[worker], number)
            assert job.end() == status, job.output
        assert done is None or f"resuming after step {done}" in job.output
        done = len(losses_of(tmp_path))
        assert f"stopped after step {done} of {STEPS}" in job.output
    with RunningJob(tmp_path / "run", *LOCAL) as job:
        assert job.end() == 0, job.output
    assert f"resuming after step {done}" in job.output
    assert losses_of(tmp_path) == undisturbed


# ---- a process, or a link, is silent -------------------------------------------------------------


def test_a_process_that_hangs_ends_the_job_in_time(tmp_path):
    with start(tmp_path, ENDLESS) as job:
        first_step(job, tmp_path)
        start_s = time.monotonic()
        os.kill(job.workers()[2], signal.SIGSTOP)
        assert job.end() == 75
        assert time.monotonic() - start_s < TIMEOUT_S + BUSY_S
    assert "error: b/b-0 (stage 1, process 2): has been silent for" in job.output
    assert "a/a-0 (stage 0) waited for" in job.output


@pytest.mark.parametrize(
    "clusters, number, name",
    [
        (CLUSTERS, 1, "a/a-1 (stage 0, process 1)"),
        pytest.param(CLUSTERS, 2, "b/b-0 (stage 1, process 2)", marks=pytest.mark.exhaustive),
        pytest.param({"a": (1, 1)}, 1, "a/a-1 (stage 0, process 1)", marks=pytest.mark.exhaustive),
    ],
    ids=["first of two stages", "last of two stages", "one stage"],
)
def test_a_step_that_hangs_ends_the_job_with_stacks(tmp_path, clusters, number, name):
    """All processes beat. Others wait for one in a collective, or for what it should send."""
    odd = {number: {"hangs_in": 6}}
    settings = (*SETTINGS, ENDLESS, "distributed.step_timeout_s=3")
    with external_job(tmp_path, clusters, *settings, odd=odd) as job:
        assert job.end(120) == 75, job.output
    assert f"error: {name}: no progress for 3 s (distributed.step_timeout_s)" in job.output
    assert "was busy in step 6" in job.output
    assert "was late" not in job.output  # what is asked for is no progress
    for other in range(sum(map(len, clusters.values()))):
        text = (tmp_path / f"{other}.out").read_text()
        stack = text.split("thread MainThread")[1].split("\nthread ")[0]
        assert ("in hang\n" in stack) == (other == number), stack


@contextlib.contextmanager
def own_network(name: str):
    """A network namespace with a loopback of its own; gives a function to cut an address off."""
    run = lambda *words: subprocess.run(words, check=True, capture_output=True)
    inside = ("ip", "netns", "exec", name)
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root and iproute2, for a network namespace")
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        tc = (*inside, "tc")
        run(*tc, "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "10")
        for number, rate in (("10", "10gbit"), ("20", "8bit")):  # 8 bit/s: nothing comes through
            class_of = ("class", "add", "dev", "lo", "parent", "1:", "classid", f"1:{number}")
            run(*tc, *class_of, "htb", "rate", rate, "quantum", "1500")
        run(*tc, "qdisc", "add", "dev", "lo", "parent", "1:20", "pfifo", "limit", "1")

        def cut(address: str) -> None:
            to = ("u32", "match", "ip", "dst", address, "flowid", "1:20")
            run(*tc, "filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", *to)

        yield inside, cut
    finally:
        run("ip", "netns", "del", name)


def test_a_link_that_goes_silent_is_named(tmp_path):
    """Nothing is closed: what is sent to the Ethernet of node b-0 is lost from now on."""
    with (
        own_network(f"holmes{os.getpid()}") as (inside, cut),
        start(tmp_path, ENDLESS, prefix=inside) as job,
    ):
        first_step(job, tmp_path)
        start_s = time.monotonic()
        cut("127.64.3.0/24")
        assert job.end() == 75, job.output
        assert time.monotonic() - start_s < TIMEOUT_S + BUSY_S
    assert "link a -> b" in job.output or "link b -> a" in job.output
    assert "silent" in job.output
    assert "Traceback" not in job.output


# ---- strangers and strays ------------------------------------------------------------------------


def test_a_port_that_is_taken_is_told_before_jax_falls_over_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start(tmp_path, f"distributed.port={port}") as job:
            assert job.end() == 2
    assert f"distributed.port, 127.32.1.1:{port}: the coordinator of stage 0" in job.output
    assert "choose another distributed.port" in job.output


def start_stray(job: RunningJob, run_dir: Path) -> subprocess.CompletedProcess:
    """A worker with all that a real one has, but another plan."""
    text = (run_dir / "plan.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("hash:")]
    changed = "\n".join(lines).replace("step_time_s: ", "step_time_s: 1")
    (run_dir / "plan.yaml").write_text(changed)
    env = Path(f"/proc/{job.workers()[0]}/environ").read_text().split("\0")
    variables = dict(v.split("=", 1) for v in env if v and not v.startswith("HOLMES_PARENT"))
    return subprocess.run(
        [sys.executable, "-m", "launch", "worker", run_dir],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_strangers_a_slow_process_and_a_save_that_fails_change_nothing(tmp_path, undisturbed):
    """A scheduler starts the processes: its variable says which is which, the launcher the rest.

    Strangers call at every port, a process stands still for a while, and a file stands where the
    folder of the first checkpoint should.
    """
    rng = random.Random(0)
    greetings = [b"", rng.randbytes(1000), b"\x7f\xff\xff\xff" * 64, b"GET / HTTP/1.0\r\n\r\n"]
    checkpoints = tmp_path / "run" / manifest.FOLDER
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_00000008").touch()
    with external_job(tmp_path, CLUSTERS, *SETTINGS) as job, contextlib.ExitStack() as stack:
        pids = [job.process.pid, *(process.pid for process in job.processes)]
        listening(pids)
        ports = listening_ports(pids)
        for (address, port), greeting in itertools.product(sorted(ports), greetings):
            stranger = stack.enter_context(socket.create_connection((address, port), timeout=5))
            with contextlib.suppress(OSError):  # some doors close at once
                stranger.sendall(greeting)
        first_step(job, tmp_path)
        os.kill(pids[2], signal.SIGSTOP)
        time.sleep(0.5 * TIMEOUT_S)
        os.kill(pids[2], signal.SIGCONT)
        assert job.end(120) == 0, job.output
    assert not any(address == "0.0.0.0" for address, _ in ports)
    [told] = [i for i, line in enumerate(job.lines) if "no checkpoint after step 8: " in line]
    assert "File exists" in job.lines[told]
    assert any(line.startswith(f"step {STEPS}/{STEPS}") for line in job.lines[told:])
    assert "Traceback" not in job.output
    assert [found.step for found in manifest.find(tmp_path / "run")] == [32, 24]
    assert losses_of(tmp_path) == undisturbed


# ---- what all stages decide together -------------------------------------------------------------


def test_gradients_that_stay_infinite_end_the_run(tmp_path):
    with start(tmp_path, "optimizer.learning_rate=1e30", "train.max_skipped=3") as job:
        assert job.end() == 1
    assert "the gradient is not finite, for 3 steps in a row" in job.output
    assert "step " in job.output.split("error: ")[1]
    assert "stage" in job.output.split("error: ")[1]
    skipped = [record["skipped"] for record in metrics.read(tmp_path / "run")]
    assert skipped[:1] == [False]


# ---- what cannot be written ----------------------------------------------------------------------


def test_one_process_that_cannot_write_and_one_of_another_plan_hold_nobody_up(tmp_path):
    """The other process of its stage has written its share, and waits for it.

    The process of another plan is refused with both hashes.
    """
    run_dir, other = tmp_path / "run", tmp_path / "other"
    with start(tmp_path, ENDLESS, "checkpoint.every=100") as job:
        wait_until(lambda: manifest.find(run_dir))
        worker, (soft, hard) = job.workers()[1], resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (1000, hard))
        told = job.until("warning: no checkpoint after step ")
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (soft, hard))
        step = int(told.split(":")[1].split()[-1])
        wait_until(lambda: manifest.find(run_dir)[0].step > step)
        other.mkdir()
        for name in ("config.yaml", "topology.yaml", "plan.yaml"):
            shutil.copy(run_dir / name, other)
        stray = start_stray(job, other)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0, job.output
    assert "a/a-1 says File too large" in told
    assert job.output.count("warning: no checkpoint") == 1
    assert "Traceback" not in job.output
    newest = manifest.newest(run_dir, pytest.fail, set_aside=False)
    assert f"stopped after step {newest.step} of" in job.output
    unfinished = [path.parent for path in run_dir.glob("checkpoints/*/part_*")]
    assert all((path / manifest.MANIFEST).exists() for path in unfinished)
    hashes = [line.split()[1].rstrip(":") for line in job.lines if line.startswith("plan ")]
    assert stray.returncode == 2
    for text in (stray.stderr, job.output):
        assert f"plan hash is {Plan.load(other / 'plan.yaml').hash()}, not {hashes[0]}" in text


@pytest.mark.exhaustive
def test_a_disk_that_stays_full_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    checkpoints = run_dir / manifest.FOLDER
    with disk(checkpoints, "8m"):
        with start(tmp_path, ENDLESS, "checkpoint.every=50") as job:
            wait_until(lambda: manifest.find(run_dir))
            with (checkpoints / "filler").open("wb") as file:
                file.write(bytes(shutil.disk_usage(checkpoints).free - 100_000))
            assert job.end() == 2, job.output
        assert job.output.count("warning: no checkpoint after step ") == 2
        assert job.output.count("No space left on device") == 3  # and the error
        assert "Traceback" not in job.output
        (checkpoints / "filler").unlink()
        newest = manifest.newest(run_dir, pytest.fail, set_aside=False)
        with RunningJob(run_dir, *LOCAL, f"train.steps={newest.step + 3}") as job:
            assert job.end() == 0, job.output
        assert f"resuming after step {newest.step}" in job.output


# ---- what was damaged since ----------------------------------------------------------------------


def test_a_job_goes_on_from_the_older_checkpoint_where_arrays_are_damaged(tmp_path):
    """The launcher reads no arrays: a process of the stage finds it, and all start again."""
    settings = ["model.width=192", "optimizer.schedule=constant", "checkpoint.every=2"]
    with start(tmp_path, *settings, "train.steps=4") as job:
        assert job.end(120) == 0, job.output
    before, run_dir = losses_of(tmp_path), tmp_path / "run"
    newest = manifest.find(run_dir)[0]
    sizes = {path: path.stat().st_size for path in newest.path.glob("part_0/**/d/*")}
    largest = max(sizes, key=sizes.__getitem__)
    assert sizes[largest] > manifest.SMALL_BYTES
    with largest.open("r+b") as file:
        file.seek(sizes[largest] // 2)
        [byte] = file.read(1)
        file.seek(sizes[largest] // 2)
        file.write(bytes([byte ^ 1]))
    with RunningJob(run_dir, *LOCAL, "train.steps=5") as job:
        assert job.end(120) == 0, job.output
    told = job.output.split("resuming after step 4")[1]
    for said in ("part_0: is damaged", "step_00000004.damaged", "resuming after step 2"):
        assert said in told, job.output
    assert "Traceback" not in job.output
    assert losses_of(tmp_path)[:4] == before
