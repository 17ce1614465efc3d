"""`launch worker`: one process of a job; launchers start it."""

import argparse
import os

from holmesjax.worker import work


def run(args: argparse.Namespace) -> int:
    return work(args.run_dir, os.environ)
