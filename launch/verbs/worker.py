"""`launch worker`: one process of a job; launchers start it."""

import argparse
import os

from holmesjax.distributed.worker import work


def run(args: argparse.Namespace) -> int:
    return work(args.run_dir, os.environ)
