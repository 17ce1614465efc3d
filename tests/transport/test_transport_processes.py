"""Real processes: domains of unlike sizes, and peers that die, hang, or are only slow."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holmesjax.errors import PeerError
from holmesjax.transport.crossings import Key
from holmesjax.transport.ports import Ports
from tests.jobs import HANG_S
from tests.two_stages import addresses, make_crossing, make_plan, start

ROOT = Path(__file__).parents[2]
SILENCE_S = 6.0  # a link between processes that are stopped


class Child:
    """A process of `transport_process`, and what it says."""

    def __init__(self, number, about):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport_process", str(number), json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._said = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))

    def says(self, what, timeout_s=HANG_S):
        said = self._said.get(timeout=timeout_s)
        assert what in said, said
        return said

    def tell(self, what):
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def children():
    """Starts processes; they end with the test."""
    started = []

    def start_them(numbers, about):
        started.extend(Child(number, about) for number in numbers)
        return list(started)

    yield start_them
    for child in started:
        child.end()


def settings(**changes):
    nothing = [[], []]
    return {
        "meshes": [[1, 1], [1, 1]],
        "devices": [1, 1],
        "shape": [8, 4],
        "specs": [nothing, nothing],
        "steps": 3,
        "silence_s": 20.0,
    } | changes


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param([[["data"], []], [[], []]], id="replicas"),
        pytest.param(
            [[["data"], []], [["data"], []]], id="cut over data", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            [[[], ["data"]], [[], ["tensor"]]], id="other dims", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_two_processes_and_one(children, specs):
    """Four devices in two processes, two in one; and back, where replicas are put together again.

    The stage with the two gets every byte once: what it received is the array, not two.
    """
    about = settings(meshes=[[4, 1], [1, 2]], devices=[2, 2, 2], specs=specs, steps=4)
    found = children(range(3), about)
    others = [child.says("book") for child in found]
    for child in found:
        child.tell(others)
    for child in found:
        child.says("connected")
    received = [child.says("done")["done"] for child in found]
    assert [child.process.wait(HANG_S) for child in found] == [0, 0, 0]
    whole = 4 * 8 * 4 * 4
    assert received[2] == {"ib -> roce": whole}
    assert [r["roce -> ib"] for r in received[:2]] == [whole // 2, whole // 2]


@pytest.fixture
def start_partner(children):
    """The second stage here, the first in another process that waits for it."""
    opened = []

    def start_it(**changes):
        about = settings(steps=1000, silence_s=SILENCE_S, **changes)
        [child] = children([0], about)
        theirs = child.says("book")
        ports = Ports.open(addresses())
        child.tell([theirs, {"book": ports.book}])
        shape = tuple(about["shape"])
        failures = []
        opened.append(
            start(
                1,
                make_plan((1, 1), (1, 1)),
                [make_crossing("F0", shape), make_crossing("B1", shape, back=True)],
                ports,
                [theirs["book"], ports.book],
                silence_s=SILENCE_S,
                on_failure=failures.append,
            )
        )
        child.says("connected")
        return child.process, opened[-1], failures

    yield start_it
    for transport in opened:
        transport.close()


@pytest.fixture
def partner(start_partner):
    return start_partner()


def fail(transport, key, failures):
    """The error, which is told both ways."""
    with pytest.raises(PeerError) as caught:
        transport.wait([key])
    while not failures:
        time.sleep(0.01)
    assert failures == [caught.value]
    return caught.value


@contextlib.contextmanager
def time_passes(clock, failures):
    """Moves the clock until there is a failure: what was on its way is heard before."""

    def move():
        while not failures:
            clock.now_s += 1.1 * SILENCE_S
            time.sleep(0.02)

    moving = threading.Thread(target=move)
    moving.start()
    yield
    moving.join()


def test_a_slow_process_is_not_lost_and_a_killed_one_is(partner, clock):
    process, transport, failures = partner
    first, second = Key("F0", 0, 0), Key("F0", 1, 0)
    transport.expect([first, second])
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        clock.now_s += 0.7 * SILENCE_S
        process.send_signal(signal.SIGCONT)
        while not all(c._silence.heard_s == clock.now_s for c in transport._peer_of):
            time.sleep(0.01)
    transport.fetch(first)
    assert not failures
    process.kill()
    error = fail(transport, second, failures)  # and not for silence: the clock stands still
    assert error.where == "link ib -> roce, from ib/ib-0 to roce/roce-0"
    assert "the connection was lost, while waiting for F0 of microbatch 0" in str(error)


def test_a_stopped_process_is_silent(partner, clock):
    process, transport, failures = partner
    transport.expect([Key("F0", 0, 0), Key("F0", 1, 0)])
    transport.fetch(Key("F0", 0, 0))
    process.send_signal(signal.SIGSTOP)
    with time_passes(clock, failures):
        error = fail(transport, Key("F0", 1, 0), failures)
    assert f"silent for {SILENCE_S:g} s, while waiting for F0" in str(error)


@pytest.mark.parametrize(
    "number, problem",
    [
        (signal.SIGKILL, "the connection was lost"),
        (signal.SIGSTOP, f"silent for {SILENCE_S:g} s"),
    ],
)
def test_a_process_that_fails_in_the_middle_of_an_array(start_partner, clock, number, problem):
    process, transport, failures = start_partner(shape=[1 << 12, 1 << 12])  # 64 MiB
    clock.now_s += 0.01
    transport.expect([Key("F0", 0, 0), Key("F0", 1, 0)])
    while not any(channel.payload_s == clock.now_s for channel in transport._peer_of):
        time.sleep(0.001)
    process.send_signal(number)
    stands = contextlib.nullcontext()
    with time_passes(clock, failures) if number == signal.SIGSTOP else stands:
        error = fail(transport, Key("F0", 1, 0), failures)
    assert problem in str(error)
