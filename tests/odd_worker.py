"""A process of a job that misbehaves: python -m tests.odd_worker RUN_DIR '{...}'

late_s      whatever comes from other stages comes up to so many seconds late, at random
lacks_room  the step whose checkpoint finds no room on the disk for the folder of its part
hangs_in    the step in which its main thread stops for ever, before what others wait for
ends_in     a signal, which it sends to itself inside a meeting of islands, and after how many parts
            of arrays that come there
"""

import errno
import itertools
import json
import os
import random
import signal
import sys
import threading
import time

import orbax.checkpoint as ocp

from holmesjax.distributed.worker import work
from holmesjax.runtime.prefetch import Feed
from holmesjax.transport.tcp import TcpTransport


def receive_late(late_s):
    landed, rng = TcpTransport.landed, random.Random(os.getpid())

    def late(self, channel, frame):
        time.sleep(rng.uniform(0, late_s))
        landed(self, channel, frame)

    TcpTransport.landed = late


def lack_room(step):
    folder = ocp.path.atomicity.AtomicRenameTemporaryPath
    create = folder.create

    async def fail(self):
        if f"step_{step:08d}" in str(self.get_final()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return await create(self)

    folder.create = fail


def hang_in(number):
    take, calls = Feed.take, itertools.count(1)

    def hang(feed):
        if next(calls) == number:
            threading.Event().wait()
        return take(feed)

    Feed.take = hang


def die_at(number):
    take, calls = Feed.take, itertools.count(1)

    def die(feed):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(feed)

    Feed.take = die


def end_in_meeting(number, after):
    landed, counts = TcpTransport.landed, itertools.count(1)

    def last(self, channel, frame):
        landed(self, channel, frame)
        is_met = self._by_index[frame.crossing].crossing.link.startswith("island")
        if is_met and next(counts) == after:
            os.kill(os.getpid(), number)

    TcpTransport.landed = last


def main(run_dir, late_s=0.0, lacks_room=0, hangs_in=0, ends_in=None):
    if lacks_room:
        lack_room(lacks_room)
    if ends_in:
        end_in_meeting(*ends_in)
    if hangs_in:
        hang_in(hangs_in)
    if late_s:
        receive_late(late_s)
    return work(run_dir, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], **json.loads(sys.argv[2])))
