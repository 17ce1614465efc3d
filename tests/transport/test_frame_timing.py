"""`launch probe` times the frames of boundaries: frames, shared by all streams of a pair."""

import socket
import threading

import numpy as np
import pytest

from holmesjax.transport.frame_timing import Receiver, Sender

SIZES = [1 << 10, 3 << 20, 1 << 23]


@pytest.fixture
def ends():
    """A sender, and the threads of its receiver."""
    opened = []

    def connect(sizes, streams):
        pairs = [socket.socketpair() for _ in range(streams)]
        receiver = Receiver(sizes, silence_s=30.0)
        threads = [threading.Thread(target=receiver.receive, args=(far,)) for _, far in pairs]
        for thread in threads:
            thread.start()
        sender = Sender([near for near, _ in pairs], silence_s=30.0)
        opened.append((sender, threads))
        return sender, receiver

    yield connect
    for sender, threads in opened:
        sender.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("streams", [1, 4])
def test_all_bytes_are_there_when_the_time_ends(ends, streams):
    sender, receiver = ends(SIZES, streams)
    for number, size in enumerate(SIZES):
        block = np.random.default_rng(number).integers(0, 255, size, np.uint8)
        assert sender.seconds(number, block) > 0
        assert bytes(receiver._memory[:size]) == block.tobytes()


def test_more_than_was_agreed_and_an_end_that_is_gone_are_told(ends):
    sender, _ = ends([1 << 10], 2)
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        sender.seconds(0, np.ones(1 << 20, np.uint8))
