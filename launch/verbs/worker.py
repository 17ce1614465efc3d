"""`launch worker`: one process of a job; launchers start it."""

import argparse
import os

from holmesjax.distributed.generation_worker import Generator
from holmesjax.distributed.worker import Worker, work


def run(args: argparse.Namespace) -> int:
    return work(args.run_dir, os.environ, Generator if args.generates else Worker)
