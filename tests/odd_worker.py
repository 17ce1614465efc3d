"""A process of a job that misbehaves: python -m tests.odd_worker RUN_DIR '{...}'

late_s      whatever comes from other stages comes up to so many seconds late, at random
hangs_in    the step in which its main thread stops for ever, before what others wait for
ends_in     a signal, which it sends to itself inside a meeting of islands, and after how many parts
            of arrays that come there
"""

import itertools
import json
import os
import random
import sys
import threading
import time

from holmesjax.distributed.worker import work
from holmesjax.runtime.prefetch import Feed
from holmesjax.transport.tcp import TcpTransport


def receive_late(late_s):
    landed, rng = TcpTransport.landed, random.Random(os.getpid())

    def late(self, channel, frame):
        time.sleep(rng.uniform(0, late_s))
        landed(self, channel, frame)

    TcpTransport.landed = late


def hang_in(number):
    take, calls = Feed.take, itertools.count(1)

    def hang(feed):
        if next(calls) == number:
            threading.Event().wait()
        return take(feed)

    Feed.take = hang


def end_in_meeting(number, after):
    landed, counts = TcpTransport.landed, itertools.count(1)

    def last(self, channel, frame):
        landed(self, channel, frame)
        is_met = self._by_index[frame.crossing].crossing.link.startswith("island")
        if is_met and next(counts) == after:
            os.kill(os.getpid(), number)

    TcpTransport.landed = last


def main(run_dir, late_s=0.0, hangs_in=0, ends_in=None):
    if ends_in:
        end_in_meeting(*ends_in)
    if hangs_in:
        hang_in(hangs_in)
    if late_s:
        receive_late(late_s)
    return work(run_dir, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], **json.loads(sys.argv[2])))
