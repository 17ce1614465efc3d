"""The process that delays packets, with sockets that keep frames apart in place of devices."""

import os
import random
import socket
import threading
import time

from launch.lab_machine.delay_line import Delay, pass_on


def test_each_frame_leaves_when_its_latency_is_over_and_none_is_lost():
    """On a clock of the test's own, looked at now and then: against all that has come."""
    rng, latency_s = random.Random(0), 0.025
    for _ in range(50):
        delay, now_s, came, left = Delay(latency_s), 0.0, [], []
        assert delay.due_s is None
        for number in range(300):
            now_s += rng.choice([0.0, 1e-6, 1e-3, 0.02])
            if rng.random() < 0.7:
                delay.take(b"%d" % number, now_s)
                came.append((now_s + latency_s, b"%d" % number))
            else:
                left += delay.leaving(now_s)
                assert left == [frame for due_s, frame in came if due_s <= now_s]
            waiting = came[len(left) :]
            assert delay.due_s == (waiting[0][0] if waiting else None)
        left += delay.leaving(now_s + latency_s)
        assert left == [frame for _, frame in came]


def test_devices_get_their_own_frames_back_in_order_and_none_too_early():
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for _, inner in pairs:
        inner.setblocking(False)
    latencies_s = (0.0, 0.05)
    delays = {
        inner.fileno(): Delay(latency_s)
        for (_, inner), latency_s in zip(pairs, latencies_s, strict=True)
    }
    end, held = os.pipe()
    line = threading.Thread(target=pass_on, args=(delays, end), daemon=True)
    line.start()
    start_s = time.monotonic()
    frames = [[os.urandom(1 + 700 * n) for n in range(20)] for _ in pairs]
    for (outer, _), sent in zip(pairs, frames, strict=True):
        outer.settimeout(60)
        for frame in sent:
            outer.send(frame)
    for (outer, _), sent, latency_s in zip(pairs, frames, latencies_s, strict=True):
        assert [outer.recv(1 << 16) for _ in sent] == sent
        assert time.monotonic() - start_s >= latency_s
    os.close(held)  # as the kernel does when the lab has ended, however it has
    line.join(60)
    assert not line.is_alive()
    os.close(end)
    for pair in pairs:
        for each in pair:
            each.close()
