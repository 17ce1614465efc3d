"""kill -9 of a process that saves, at random moments: the newest checkpoint can be restored."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holmesjax.checkpoints import fetching, manifest, mirror, newest_whole, reading
from holmesjax.files import places
from holmesjax.liveness.lease import Lease
from tests.checkpoints import killed_uploader
from tests.data.object_store import object_store

LONGEST_S = 1.2  # until a kill: three or four saves
START_S = 240.0


@pytest.mark.parametrize("num_kills", [6, pytest.param(500, marks=pytest.mark.exhaustive)])
@pytest.mark.timeout(1800)
def test_a_killed_save_never_costs_the_newest_checkpoint(tmp_path, num_kills, capfd):
    run_dir, told = tmp_path / "run", tmp_path / "told"
    told.touch()
    clock, unfinished, newest = random.Random(), 0, 0
    with forking("killed_saver", run_dir, told) as server:
        for kill in range(num_kills):
            pid = fork(server)
            if kill == 0:  # that there is something to lose
                wait_until(told.read_text)
            kill_soon(server, pid, clock)
            known = max(map(int, told.read_text().split()))
            unfinished += len(manifest.folders(run_dir)) > len(manifest.finished(run_dir))
            found = newest_whole.find(run_dir, pytest.fail)  # as a start: a warning says of damage
            assert found is not None
            assert found.step >= max(known, newest)
            reading.verify_arrays(found, "part_0")
            newest = found.step
    with capfd.disabled():
        print(f"\n{num_kills} kills, {unfinished} in a save; {newest} checkpoints were committed")


@pytest.mark.parametrize("num_kills", [6, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.timeout(5400)
def test_a_killed_upload_never_costs_the_newest_checkpoint(tmp_path, num_kills, monkeypatch, capfd):
    """Another machine restores all bytes of the newest checkpoint, which never becomes an older."""
    url, clock, newest, unfinished = "s3://killed/run", random.Random(), 0, 0

    def is_there():
        return mirror.Mirror(url).steps()

    with object_store("killed"), forking("killed_uploader", url) as server:
        for kill in range(num_kills):
            pid = fork(server)
            if kill == 0:  # that there is something to lose
                wait_until(is_there)
            kill_soon(server, pid, clock)
            with monkeypatch.context() as machine:
                machine.setenv("XDG_CACHE_HOME", str(tmp_path / str(kill)))
                found = restored(url)
            assert found.step >= newest
            newest, last = found.step, mirror.Mirror(url)._steps()[-1]
            unfinished += last > newest
    with capfd.disabled():
        print(f"\n{num_kills} kills, {unfinished} in an upload; {newest} were committed")


def restored(url):
    """The newest checkpoint at a URL, all of whose bytes a new machine has fetched."""
    folder = places.folder_of(url)
    with Lease(folder) as lease:
        mirror.open_run(url, lease, lambda line: None)
        found = newest_whole.find(folder, pytest.fail, move=lease.move, fetches=True)
        fetching.fetch(folder, found, ["part_0", "part_1"], None, lambda: None, lambda line: None)
    for file in killed_uploader.FILES:
        assert (found.path / file).read_bytes() == killed_uploader.content_of(file, found.step)
    shutil.rmtree(folder)
    return found


@contextlib.contextmanager
def forking(module, *arguments):
    """A process that forks one which saves, for each line that it is told."""
    server = subprocess.Popen(
        [sys.executable, "-m", f"tests.checkpoints.{module}", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HOLMES_PARENT": str(os.getpid()), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        yield server
        server.stdin.close()


def fork(server):
    """The id of a new process that saves, once it has begun."""
    server.stdin.write("\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def kill_soon(server, pid, clock):
    time.sleep(clock.uniform(0, LONGEST_S))
    os.kill(pid, signal.SIGKILL)
    assert int(server.stdout.readline()) == -signal.SIGKILL


def wait_until(condition):
    deadline_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
