"""kill -9 of a process that saves, at random moments: the newest checkpoint can be restored."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holmesjax.checkpoints import manifest, restoring

LONGEST_S = 1.2  # until a kill: three or four saves
START_S = 60.0


@pytest.mark.parametrize("num_kills", [6, pytest.param(500, marks=pytest.mark.exhaustive)])
@pytest.mark.timeout(1800)
def test_a_killed_save_never_costs_the_newest_checkpoint(tmp_path, num_kills, capfd):
    run_dir, told = tmp_path / "run", tmp_path / "told"
    told.touch()
    clock, unfinished, newest = random.Random(), 0, 0
    command = [sys.executable, "-m", "tests.checkpoints.killed_saver", run_dir, told]
    server = subprocess.Popen(
        list(map(str, command)),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HOLMES_PARENT": str(os.getpid()), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        for kill in range(num_kills):
            server.stdin.write("\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            if kill == 0:  # that there is something to lose
                wait_until(told.read_text)
            time.sleep(clock.uniform(0, LONGEST_S))
            os.kill(pid, signal.SIGKILL)
            assert int(server.stdout.readline()) == -signal.SIGKILL
            known = max(map(int, told.read_text().split()))
            unfinished += len(manifest.folders(run_dir)) > len(manifest.finished(run_dir))
            found = manifest.newest(run_dir, pytest.fail)  # as a start: a warning says of damage
            assert found is not None
            assert found.step >= max(known, newest)
            restoring.verify_arrays(found, "part_0")
            newest = found.step
        server.stdin.close()
    with capfd.disabled():
        print(f"\n{num_kills} kills, {unfinished} in a save; {newest} checkpoints were committed")


def wait_until(condition):
    deadline_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
