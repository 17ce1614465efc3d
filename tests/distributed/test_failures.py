"""Jobs that lose a process, a link or their patience: what is told, what is left, what is resumed.

The suite kills each role, and kills at each moment; `pytest --all-faults` kills each role at each.
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
from tests.jobs import (
    ROOT,
    RunningJob,
    external_job,
    listening_ports,
    write_run,
)

CLUSTERS = {"a": (1, 1), "b": (1,)}  # process 0 coordinates two; 2 is a stage by itself
SETTINGS = [
    "model.num_layers=2",
    "model.width=16",
    "train.steps=12",
    "checkpoint.every=4",
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


def compiling(job, folder):
    """JAX has started: its coordinator listens, beside the controller and each node's two ports."""
    starting(job, folder)
    pids = [job.process.pid, *job.workers()]
    wait_until(lambda: len(listening_ports(pids)) >= 1 + 3 * 2 + 1)


def first_step(job, folder):
    job.until("step ")


def middle(job, folder):
    job.until("step  6/12")


def writing(job, folder):
    """While the second checkpoint is written."""
    path = folder / "run/checkpoints/step_00000008"
    wait_until(lambda: path.exists() and any(path.iterdir()))


MOMENTS = {f.__name__: f for f in (starting, compiling, first_step, middle, writing)}
ROLES = {"coordinator": 0, "other of its stage": 1, "other stage": 2, "launcher": None}
EACH = [
    ("coordinator", "starting"),
    ("other of its stage", "compiling"),
    ("other stage", "first_step"),
    ("other of its stage", "writing"),
    ("launcher", "middle"),
]


def pytest_generate_tests(metafunc):
    if "moment" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-faults")
        pairs = list(itertools.product(ROLES, MOMENTS)) if every else EACH
        metafunc.parametrize("role, moment", pairs)


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
    if number is None:
        with RunningJob(tmp_path / "run.yaml", *LOCAL, *SETTINGS) as job:  # the user's own restart
            assert job.end(120) == 0, job.output
        assert losses_of(tmp_path) == undisturbed
        return
    name = ("a/a-0", "a/a-1", "b/b-0")[number]
    assert f"error: {name} (stage {number // 2}, process {number}): " in job.output
    assert "was killed by signal 9 (SIGKILL)" in job.output
    assert "starting again" in job.output
    assert "Traceback" not in job.output
    assert losses_of(tmp_path) == undisturbed


def test_without_restarts_it_ends_with_75_and_one_paragraph(tmp_path, undisturbed):
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
    with RunningJob(tmp_path / "run", *LOCAL) as job:  # the user does what it says
        assert job.end() == 0
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
    [(CLUSTERS, 2, "b/b-0 (stage 1, process 2)"), ({"a": (1, 1)}, 1, "a/a-1 (stage 0, process 1)")],
    ids=["two stages", "one stage"],
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


def test_a_process_that_is_slow_is_waited_for(tmp_path, undisturbed):
    with start(tmp_path) as job:
        first_step(job, tmp_path)
        worker = job.workers()[1]
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.5 * TIMEOUT_S)
        os.kill(worker, signal.SIGCONT)
        assert job.end() == 0, job.output
    assert losses_of(tmp_path) == undisturbed


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


def test_a_process_of_another_plan_is_refused_with_both_hashes(tmp_path):
    other = tmp_path / "other"
    with start(tmp_path, ENDLESS) as job:
        first_step(job, tmp_path)
        other.mkdir()
        for name in ("config.yaml", "topology.yaml", "plan.yaml"):
            shutil.copy(tmp_path / "run" / name, other)
        stray = start_stray(job, other)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0, job.output  # it went on all the while
    hashes = [line.split()[1].rstrip(":") for line in job.lines if line.startswith("plan ")]
    assert stray.returncode == 2
    for text in (stray.stderr, job.output):
        assert f"plan hash is {Plan.load(other / 'plan.yaml').hash()}, not {hashes[0]}" in text


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


def test_strangers_at_every_port_change_nothing(tmp_path, undisturbed):
    rng = random.Random(0)
    greetings = [b"", rng.randbytes(1000), b"\x7f\xff\xff\xff" * 64, b"GET / HTTP/1.0\r\n\r\n"]
    with start(tmp_path) as job, contextlib.ExitStack() as stack:
        compiling(job, tmp_path)
        ports = listening_ports([job.process.pid, *job.workers()])
        for (address, port), greeting in itertools.product(sorted(ports), greetings):
            stranger = stack.enter_context(socket.create_connection((address, port), timeout=5))
            with contextlib.suppress(OSError):  # some doors close at once
                stranger.sendall(greeting)
        assert job.end() == 0, job.output
    assert not any(address == "0.0.0.0" for address, _ in ports)
    assert losses_of(tmp_path) == undisturbed


def test_a_scheduler_starts_the_processes(tmp_path, undisturbed):
    """Slurm's variable says which is which; everything else is what the launcher printed."""
    with external_job(tmp_path, CLUSTERS, *SETTINGS) as job:
        assert job.end(120) == 0, job.output
    assert losses_of(tmp_path) == undisturbed


# ---- what all stages decide together -------------------------------------------------------------


@pytest.mark.parametrize(
    "number, status, worker",
    [(signal.SIGINT, 0, None), (signal.SIGTERM, 75, None), (signal.SIGTERM, 75, 1)],
)
def test_a_signal_stops_all_after_the_same_step(tmp_path, undisturbed, number, status, worker):
    with start(tmp_path) as job:
        first_step(job, tmp_path)
        os.kill(job.process.pid if worker is None else job.workers()[worker], number)
        assert job.end() == status, job.output
    done = len(losses_of(tmp_path))
    assert f"stopped after step {done} of 12" in job.output
    with RunningJob(tmp_path / "run", *LOCAL) as job:
        assert job.end() == 0, job.output
    assert f"resuming after step {done}" in job.output
    assert losses_of(tmp_path) == undisturbed


def test_gradients_that_stay_infinite_end_the_run(tmp_path):
    with start(tmp_path, "optimizer.learning_rate=1e30", "train.max_skipped=3") as job:
        assert job.end() == 1
    assert "the gradient is not finite, for 3 steps in a row" in job.output
    assert "step " in job.output.split("error: ")[1]
    assert "stage" in job.output.split("error: ")[1]
    skipped = [record["skipped"] for record in metrics.read(tmp_path / "run")]
    assert skipped[:1] == [False]


# ---- what cannot be written ----------------------------------------------------------------------


def test_a_save_that_fails_is_told_and_the_run_goes_on(tmp_path, undisturbed):
    """A file stands where the folder of the first checkpoint should."""
    checkpoints = tmp_path / "run" / manifest.FOLDER
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_00000004").touch()
    with start(tmp_path) as job:
        assert job.end() == 0, job.output
    [told] = [i for i, line in enumerate(job.lines) if "no checkpoint after step 4: " in line]
    assert "File exists" in job.lines[told]
    assert any(line.startswith("step 12/12") for line in job.lines[told:])
    assert "Traceback" not in job.output
    assert [found.step for found in manifest.find(tmp_path / "run")] == [12, 8]
    assert losses_of(tmp_path) == undisturbed


def test_one_process_that_cannot_write_holds_nobody_up(tmp_path):
    """The other process of its stage has written its share, and waits for it."""
    run_dir = tmp_path / "run"
    with start(tmp_path, ENDLESS, "checkpoint.every=100") as job:
        wait_until(lambda: manifest.find(run_dir))
        worker, (soft, hard) = job.workers()[1], resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (1000, hard))
        told = job.until("warning: no checkpoint after step ")
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (soft, hard))
        step = int(told.split(":")[1].split()[-1])
        wait_until(lambda: manifest.find(run_dir)[0].step > step)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0, job.output
    assert "a/a-1 says File too large" in told
    assert job.output.count("warning: no checkpoint") == 1
    assert "Traceback" not in job.output
    newest = manifest.newest(run_dir, pytest.fail, set_aside=False)
    assert f"stopped after step {newest.step} of" in job.output
    unfinished = [path.parent for path in run_dir.glob("checkpoints/*/part_*")]
    assert all((path / manifest.MANIFEST).exists() for path in unfinished)


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
