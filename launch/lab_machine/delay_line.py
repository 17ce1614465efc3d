"""The process that delays packets in a lab: it takes them from a TAP device, and gives them back.

    python -m launch.lab_machine.delay_line late0=0.025 late1=0.005    # seconds, one way

The kernel leads what goes a delayed way to a device `late<k>`, and this process reads it there.
It writes each packet to the same device when it is due, which then comes out on the bridge. It must
be in the namespace of the devices. It ends when its standard input does, so with the lab, however
that ends.

A frame comes as TCP has handed it over, 64 KiB at most, its check sums not made yet: so the 14,000
packets of a gigabit take 2,000 reads. What is to be done with a frame stands in a header of the
kernel's before it, and goes back with it.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

TUN = "/dev/net/tun"
# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN = 0x01, 0x02, 0x04, 0x08
MAX_FRAME_BYTES = 10 + 14 + 65536  # the kernel's header, that of Ethernet, and a packet
READY = "ready"  # is printed when packets are taken


class Delay:
    """Frames on their way: they leave in the order in which they came, each after the latency.

    Nothing is dropped: the rate of the link has been taken before, so bandwidth times latency is
    the most that waits here.
    """

    def __init__(self, latency_s: float):
        self._latency_s = latency_s
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def due_s(self) -> float | None:
        """When the next frame leaves; None: none is on its way."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, frame: bytes, now_s: float) -> None:
        self._waiting.append((now_s + self._latency_s, frame))

    def leaving(self, now_s: float) -> list[bytes]:
        """Removes and returns the frames that are due."""
        frames = []
        while self._waiting and self._waiting[0][0] <= now_s:
            frames.append(self._waiting.popleft()[1])
        return frames


def open_tap(name: str) -> int:
    """Opens a TAP device of this namespace, for reads that do not wait."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
    fcntl.ioctl(device, TUNSETIFF, request)
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN)
    return device


def pass_on(delays: dict[int, Delay], end: int) -> None:
    """Delays what comes from devices, until a file has an end."""
    devices = [*delays, end]
    while True:
        due_s = min((due for d in delays.values() if (due := d.due_s) is not None), default=None)
        wait_s = None if due_s is None else max(due_s - time.monotonic(), 0.0)
        readable, _, _ = select.select(devices, (), (), wait_s)
        if end in readable and not os.read(end, 1):
            return
        for device, delay in delays.items():
            if device in readable:
                _take_all(device, delay)
            for frame in delay.leaving(time.monotonic()):
                os.write(device, frame)


def _take_all(device: int, delay: Delay) -> None:
    """Takes what is there now, up to as much as lets others wait for a millisecond or two."""
    for _ in range(64):
        try:
            frame = os.read(device, MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        delay.take(frame, time.monotonic())


def main(arguments: Sequence[str]) -> None:
    delays = {}
    for argument in arguments:
        name, _, latency_s = argument.partition("=")
        delays[open_tap(name)] = Delay(float(latency_s))
    print(READY, flush=True)
    pass_on(delays, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
