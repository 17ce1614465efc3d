"""A process of a job that misbehaves: python -m tests.odd_worker RUN_DIR '{...}'

late_s    whatever comes from other stages comes up to so many seconds late, at random
"""

import json
import os
import random
import sys
import time

from holmesjax.tcp import TcpTransport
from holmesjax.worker import work


def receive_late(late_s):
    landed, rng = TcpTransport.landed, random.Random(os.getpid())

    def late(self, channel, frame):
        time.sleep(rng.uniform(0, late_s))
        landed(self, channel, frame)

    TcpTransport.landed = late


def main(run_dir, late_s=0.0):
    if late_s:
        receive_late(late_s)
    return work(run_dir, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], **json.loads(sys.argv[2])))
