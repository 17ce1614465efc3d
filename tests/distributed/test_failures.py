"""Jobs that lose a process, a link or their patience: what is told, what is left, what is resumed.

Jobs are dear, so one job goes through several troubles where these do not hide one another. What
is marked exhaustive, such as each role killed at each moment, is left to `make test-all`.
"""

import contextlib
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from holmesjax.checkpoints import manifest, newest_whole
from holmesjax.plan.plan import Plan
from holmesjax.report import metrics
from holmesjax.trainer import Trainer
from tests.disks import disk
from tests.jobs import HANG_S, ROOT, RunningJob, external_job, listening_ports, write_run
from tests.socket_faults import reset_connections

# One worker runs them all: they share what is made once.
pytestmark = pytest.mark.xdist_group("failures")

STEPS = 32  # of a job that ends by itself
CLUSTERS = {"a": (1, 1), "b": (1,)}  # process 0 coordinates two; 2 is a stage by itself
SETTINGS = [
    "model.num_layers=2",
    "optimizer.schedule=constant",  # however many steps there are
    "checkpoint.every=4",
    "train.steps=100000",  # it must not end by itself before the test is done with it
]
LOCAL = ("--launcher", "local")
# distributed.step_timeout_s, where one is to hang in a step; Gloo itself gives up after 30 s.
STEP_TIMEOUT_S, HANGS_IN = 22.0, 14


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics.read(folder / "run")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The first losses of the same stages in one process, where nothing happens to them."""
    known = []

    def losses(count: int) -> list[float]:
        if count > len(known):
            folder = tmp_path_factory.mktemp("undisturbed")
            steps = f"train.steps={count}"
            Trainer(write_run(folder, CLUSTERS), [*SETTINGS, steps], io.StringIO()).train()
            known[:] = losses_of(folder)
        return known[:count]

    return losses


def start(folder: Path, *arguments, **options) -> RunningJob:
    return RunningJob(write_run(folder, CLUSTERS), *LOCAL, *SETTINGS, *arguments, **options)


def wait_until(condition):
    deadline_s = time.monotonic() + HANG_S
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


def damage_an_array(run_dir: Path) -> int:
    """Damages arrays of the newest checkpoint where the launcher does not look; its step.

    The manifest keeps no digest of a large file of arrays: whoever reads them finds the damage.
    How large a file grows is chance, so this one is made large.
    """
    newest = manifest.find(run_dir)[0]
    sizes = {path: path.stat().st_size for path in newest.path.glob("part_1/**/d/*")}
    largest = max(sizes, key=sizes.__getitem__)
    whole = np.fromfile(largest, np.uint8)
    whole[whole.size // 4 : -whole.size // 4] ^= 1
    whole = np.pad(whole, (0, manifest.SMALL_BYTES))  # nothing points to what is behind its end
    whole.tofile(largest)
    content = newest.manifest
    described = {"bytes": whole.size, "sha256": None}
    content["files"][largest.relative_to(newest.path).as_posix()] = described
    content["sha256"] = manifest._manifest_sha256(content)
    (newest.path / manifest.MANIFEST).write_text(json.dumps(content))
    return newest.step


def lose_connections(job: RunningJob) -> None:
    """Resets connections between stages and with the launcher, again and again; all live."""
    rng = random.Random()
    launcher, *workers = [job.process.pid, *job.workers()]
    pairs = [(workers[0], workers[2]), (workers[2], workers[1])]
    pairs += [(launcher, workers[0]), (workers[1], launcher)]
    for one, other in pairs * 6:
        time.sleep(rng.uniform(0.0, 0.1))
        while not reset_connections(one, other):  # those of the last time are not made anew yet
            assert job.process.poll() is None, job.end()
            time.sleep(0.1)


@pytest.mark.timeout(600)  # one job that starts again and again, of 70 s of a core in all
def test_a_job_goes_on_exactly_whatever_befalls_it(tmp_path, undisturbed):
    """Losses of processes, connections and the launcher, a signal and a damaged checkpoint."""
    run_dir = tmp_path / "run"
    with start(tmp_path, "--max-restarts", 3) as job:
        for number, moment in ((0, starting), (2, compiling)):
            seen = len(job.lines)
            moment(job, tmp_path)
            job.note_workers()
            os.kill(job.workers()[number], signal.SIGKILL)
            job.until("starting again")
            assert_told("".join(job.lines[seen:]), number)
        first_step(job, tmp_path)
        job.process.kill()
        job.end()  # nothing outlives it
        assert "Traceback" not in job.output

    with RunningJob(run_dir, *LOCAL) as job:  # the user's own restart
        wait_until(lambda: len(manifest.find(run_dir)) > 1)
        lose_connections(job)  # nothing starts again, and what is lost later is named
        writing(job, tmp_path)
        job.note_workers()
        held = listening_ports([job.process.pid, *job.workers()])
        os.kill(job.workers()[1], signal.SIGKILL)
        assert job.end() == 75
    assert_told(job.output, 1)
    for link in (r"from b/b-0 to a/a-0: \d of 4 connections were", "a/a-1 to the controller: the"):
        assert re.search(link, job.output)
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

    damaged = damage_an_array(run_dir)
    older = manifest.find(run_dir)[1].step
    with RunningJob(run_dir, *LOCAL) as job:  # the user does what it says
        first_step(job, tmp_path)  # behind the older checkpoint
        os.kill(job.workers()[1], signal.SIGTERM)  # all stop after the same step
        assert job.end() == 75, job.output
    told = job.output.split(f"resuming after step {damaged}\n")[1]
    for said in ("part_1: is damaged", f"{damaged:08d}.damaged", f"resuming after step {older}\n"):
        assert said in told, job.output
    done = len(losses_of(tmp_path))
    assert f"stopped after step {done} of " in told
    assert "Traceback" not in job.output

    one_more = [*SETTINGS, f"train.steps={done + 1}"]
    Trainer(tmp_path / "run.yaml", one_more, io.StringIO()).train()  # from what the job has saved
    losses = losses_of(tmp_path)
    assert len(losses) == done + 1
    assert losses == undisturbed(done + 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ROLES)
def test_a_job_that_lost_a_process_goes_on_exactly(tmp_path, undisturbed, role, moment):
    number, steps = ROLES[role], f"train.steps={STEPS}"
    with start(tmp_path, steps, "--max-restarts", 1) as job:
        MOMENTS[moment](job, tmp_path)
        job.note_workers()
        if number is None:
            job.process.kill()
            job.end()  # nothing outlives it
        else:
            os.kill(job.workers()[number], signal.SIGKILL)
            assert job.end() == 0, job.output
            assert_told(job.output, number)
            assert "starting again" in job.output
            assert "Traceback" not in job.output
    if number is None:
        with start(tmp_path, steps) as job:  # the user's own restart
            assert job.end() == 0, job.output
    assert losses_of(tmp_path) == undisturbed(STEPS)


# ---- what comes out of a collective --------------------------------------------------------------


def assert_blamed(output: str, number: int, words: str) -> None:
    """That a paragraph blames one process, which the others of its stage have not survived."""
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    [told] = [line for line in errors if f"process {number}): " in line]
    assert errors == [told]
    assert words in told


def until_said(job, words: str) -> None:
    for line in job.process.stdout:
        job.lines.append(line)
        if words in line:
            return
    raise AssertionError(f"nothing says {words!r} in\n{job.output}")


@pytest.mark.parametrize(
    "signals",
    [
        {0: signal.SIGSEGV},
        pytest.param(
            {1: signal.SIGABRT, 0: signal.SIGSEGV, 2: signal.SIGBUS}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["the coordinator", "each in turn"],
)
def test_what_collectives_raise_and_data_that_are_gone_end_no_job(tmp_path, signals):
    """A connection inside of a stage is reset while both ends live, and processes die by signals.

    All of these make other processes fail in their collectives, at a moment that is left to chance.
    The file of tokens is cut while it is trained on, and missing while the job starts again.
    """
    rng = random.Random()
    file = tmp_path / "tokens.bin"
    whole = np.random.default_rng(0).integers(0, 256, 10**5, dtype=np.uint16).tobytes()
    file.write_bytes(whole)
    # On a machine that others use, too, a step may take longer than 60 s, the least limit.
    settings = ("distributed.step_timeout_s=240", f"data.corpus={file}")
    settings += ("data.source=tokens", "data.dtype=uint16")
    with start(tmp_path, *settings, "--max-restarts", 4) as job:
        first_step(job, tmp_path)
        os.truncate(file, 10)
        until_said(job, "has become shorter while it was read; it is tried again")
        file.write_bytes(whole)
        until_said(job, "the data can be read again")
        for number, sent in {**signals, None: None}.items():
            seen = len(job.lines)
            first_step(job, tmp_path)
            time.sleep(rng.uniform(0.0, 0.5))
            pids = job.workers()
            file.unlink()
            if number is None:
                assert reset_connections(pids[0], pids[1]) >= 1
            else:
                os.kill(pids[number], sent)
            job.until("starting again")
            output = "".join(job.lines[seen:])
            if number is None:
                told = [line for line in output.splitlines() if line.startswith("error: ")]
                assert len(told) == 1
                assert told[0].startswith("error: a/a-")
                assert "JaxRuntimeError" in told[0]
            else:
                assert_blamed(output, number, f"({sent.name})")
            until_said(job, "is not there; it is tried again")
            file.write_bytes(whole)
        first_step(job, tmp_path)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0, job.output
    assert job.output.count("starting again") == len(signals) + 1, job.output
    losses = losses_of(tmp_path)
    (tmp_path / "alone").mkdir()
    run_file = write_run(tmp_path / "alone", CLUSTERS)
    steps = f"train.steps={len(losses)}"
    Trainer(run_file, [*SETTINGS, *settings, steps], io.StringIO()).train()
    assert losses == losses_of(tmp_path / "alone")


def test_a_process_that_dies_where_nobody_sees_its_end_is_named(tmp_path):
    """A scheduler has started it: the launcher hears what the others raise, and that it is gone."""
    with external_job(tmp_path, CLUSTERS, *SETTINGS) as job:
        first_step(job, tmp_path)
        job.processes[1].kill()
        assert job.end() == 75, job.output
        statuses = [process.wait(HANG_S) for process in job.processes]
    assert statuses == [75, -signal.SIGKILL, 75]
    assert_blamed(job.output, 1, "has closed its connection without a word")


def test_who_starts_processes_hears_of_each_that_the_run_is_not_done(tmp_path):
    """A signal to one of them stops all: with 0 nobody would start the others again."""
    clusters = {"a": (1,), "b": (1,)}
    with external_job(tmp_path, clusters, *SETTINGS) as job:
        first_step(job, tmp_path)
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.end() == 75, job.output
        assert [process.wait(HANG_S) for process in job.processes] == [75, 75]
    assert "stopped after step " in job.output
    assert "error: " not in job.output


@pytest.mark.exhaustive
def test_a_launcher_that_stood_still_blames_no_process(tmp_path):
    """Its processes have given it up. Connections that were all reset before cost no restart."""
    silence = "distributed.heartbeat_timeout_s=10"
    with start(tmp_path, silence, "--max-restarts", 3) as job:
        first_step(job, tmp_path)
        job.note_workers()
        assert all(reset_connections(pid, job.process.pid) for pid in job.workers())
        job.until("step ")
        os.kill(job.process.pid, signal.SIGSTOP)
        time.sleep(12.0)
        os.kill(job.process.pid, signal.SIGCONT)
        job.until("starting again")
        [error] = [line for line in job.lines if line.startswith("error: ")]
        assert error.startswith("error: the launcher: stood still for ")
        first_step(job, tmp_path)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0, job.output


# ---- a step hangs --------------------------------------------------------------------------------


def assert_hung(folder: Path, job: RunningJob, number: int, name: str, step: int) -> None:
    """That the job says which process made no progress, and all others wrote where they wait."""
    limit = f"no progress for {STEP_TIMEOUT_S:g} s (distributed.step_timeout_s)"
    assert f"error: {name}: {limit}" in job.output
    assert f"was busy in step {step}" in job.output
    assert "was late" not in job.output  # what is asked for is no progress
    for other in range(len(job.processes)):
        text = (folder / f"{other}.out").read_text()
        stack = text.split("thread MainThread")[1].split("\nthread ")[0]
        assert ("in hang\n" in stack) == (other == number), stack


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "clusters, number, name",
    [
        (CLUSTERS, 2, "b/b-0 (stage 1, process 2)"),
        ({"a": (1, 1)}, 1, "a/a-1 (stage 0, process 1)"),
    ],
    ids=["last of two stages", "one stage"],
)
def test_a_step_that_hangs_ends_the_job_with_stacks(tmp_path, clusters, number, name):
    """All processes beat. Others wait for one in a collective, or for what it should send."""
    odd = {number: {"hangs_in": 6}}
    settings = (*SETTINGS, f"distributed.step_timeout_s={STEP_TIMEOUT_S:g}")
    with external_job(tmp_path, clusters, *settings, odd=odd) as job:
        assert job.end() == 75, job.output
    assert_hung(tmp_path, job, number, name, 6)


# ---- strangers -----------------------------------------------------------------------------------


def test_strangers_a_slow_process_and_a_save_that_fails_change_nothing(tmp_path, undisturbed):
    """Until a step hangs: what came before is the same, and one process is named.

    A scheduler starts the processes: its variable says which is which, the launcher the rest.
    Strangers call at every port, a process stands still for a while, a file stands where the folder
    of the first checkpoint should, and the second finds no room for the folder of its first part.
    All processes beat while one hangs; the others wait for it in a collective, or for what it
    should send.
    """
    rng = random.Random(0)
    greetings = [b"", rng.randbytes(1000), b"\x7f\xff\xff\xff" * 64, b"GET / HTTP/1.0\r\n\r\n"]
    checkpoints = tmp_path / "run" / manifest.FOLDER
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_00000004").touch()
    limit = f"distributed.step_timeout_s={STEP_TIMEOUT_S:g}"
    odd = {0: {"lacks_room": 8}, 1: {"hangs_in": HANGS_IN}}
    with (
        external_job(tmp_path, CLUSTERS, *SETTINGS, limit, odd=odd) as job,
        contextlib.ExitStack() as stack,
    ):
        pids = [job.process.pid, *(process.pid for process in job.processes)]
        listening(pids)
        ports = listening_ports(pids)
        for (address, port), greeting in itertools.product(sorted(ports), greetings):
            stranger = stack.enter_context(
                socket.create_connection((address, port), timeout=HANG_S)
            )
            with contextlib.suppress(OSError):  # some doors close at once
                stranger.sendall(greeting)
        first_step(job, tmp_path)
        os.kill(pids[2], signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pids[2], signal.SIGCONT)
        assert job.end() == 75, job.output
    assert not any(address == "0.0.0.0" for address, _ in ports)
    for step, problem in ((4, "File exists"), (8, "No space left")):
        [told] = [line for line in job.lines if f"no checkpoint after step {step}: " in line]
        assert problem in told
    assert "Traceback" not in job.output
    # It went on. A slow machine may have tried the failed save again on its way.
    assert manifest.find(tmp_path / "run")[0].step == 12
    assert_hung(tmp_path, job, 1, "a/a-1 (stage 0, process 1)", HANGS_IN)
    losses = losses_of(tmp_path)  # of a step whose end is seen with that of the next, not yet
    assert losses == undisturbed(HANGS_IN - 2)[: len(losses)] != []


# ---- a link is silent, and what cannot be written ------------------------------------------------


@contextlib.contextmanager
def own_network(name: str):
    """A network namespace with a loopback of its own: what enters it, and cuts an address off.

    If there can be none, the words are empty and there is nothing to cut with.
    """
    run = lambda *words: subprocess.run(words, check=True, capture_output=True)
    inside = ("ip", "netns", "exec", name)
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        yield (), None
        return
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


@contextlib.contextmanager
def stray(job: RunningJob, run_dir: Path, prefix: tuple[str, ...]):
    """A worker with all that a real one of the job has, but another plan."""
    text = (run_dir / "plan.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("hash:")]
    changed = "\n".join(lines).replace("step_time_s: ", "step_time_s: 1")
    (run_dir / "plan.yaml").write_text(changed)
    env = Path(f"/proc/{job.workers()[0]}/environ").read_text().split("\0")
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "launch", "worker", run_dir],
        cwd=ROOT,
        env={
            **dict(v.split("=", 1) for v in env if v and not v.startswith("HOLMES_PARENT")),
            "PYTHONFAULTHANDLER": "1",
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def words_of(process) -> str:
    """The last words of a process; one that does not leave fails the test with its stacks."""
    try:
        return process.communicate(timeout=HANG_S)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        pytest.fail(process.communicate(timeout=30)[1])


def test_one_that_cannot_write_one_of_another_plan_and_a_silent_link_are_named(tmp_path):
    """The first two hold nobody up; the last ends the job.

    The other process of its stage has written its share, and waits for the one that cannot. The
    process of another plan is refused with both hashes. Nothing closes the link: what is sent to
    the Ethernet of node b-0 is lost.
    """
    run_dir, other = tmp_path / "run", tmp_path / "other"
    with (
        own_network(f"holmes{os.getpid()}") as (inside, cut),
        start(
            tmp_path,
            "checkpoint.every=30",
            "distributed.heartbeat_timeout_s=30",
            prefix=inside,
        ) as job,
        contextlib.ExitStack() as stack,
    ):
        first_step(job, tmp_path)
        other.mkdir()
        for name in ("config.yaml", "topology.yaml", "plan.yaml", "store.json"):
            shutil.copy(run_dir / name, other)
        refused = stack.enter_context(stray(job, other, inside))
        wait_until(lambda: manifest.find(run_dir))
        worker, (soft, hard) = job.workers()[1], resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (1000, hard))
        told = job.until("warning: no checkpoint after step ")
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (soft, hard))
        step = int(told.split(":")[1].split()[-1])
        wait_until(lambda: manifest.find(run_dir)[0].step > step)
        assert not manifest.folder_of(run_dir, step).exists()
        complaint = words_of(refused)
        first_step(job, tmp_path)  # and more of them
        if cut is None:
            job.process.send_signal(signal.SIGINT)
            assert job.end() == 0, job.output
        else:
            cut("127.64.3.0/24")
            assert job.end() == 75, job.output
    assert "a/a-1 says File too large" in told
    assert job.output.count("warning: no checkpoint") == 1
    assert "Traceback" not in job.output
    hashes = [line.split()[1].rstrip(":") for line in job.lines if line.startswith("plan ")]
    assert refused.returncode == 2
    for text in (complaint, job.output):
        assert f"plan hash is {Plan.load(other / 'plan.yaml').hash()}, not {hashes[0]}" in text
    if cut is None:
        pytest.skip("needs root and iproute2, for a network namespace in which a link is cut")
    assert "link a -> b" in job.output or "link b -> a" in job.output
    assert "silent" in job.output


@pytest.mark.exhaustive
def test_a_disk_that_stays_full_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    checkpoints = run_dir / manifest.FOLDER
    with disk(checkpoints, "8m"):
        with start(tmp_path, "checkpoint.every=50") as job:
            wait_until(lambda: manifest.find(run_dir))
            with (checkpoints / "filler").open("wb") as file:
                file.write(bytes(shutil.disk_usage(checkpoints).free - 100_000))
            assert job.end() == 75, job.output
        assert (count := job.output.count("warning: no checkpoint after step ")) >= 2
        assert job.output.count("No space left on device") == count + 1  # and the error
        assert "Traceback" not in job.output
        (checkpoints / "filler").unlink()
        newest = newest_whole.find(run_dir, pytest.fail)
        with RunningJob(run_dir, *LOCAL, f"train.steps={newest.step + 3}") as job:
            assert job.end() == 0, job.output
        assert f"resuming after step {newest.step}" in job.output
