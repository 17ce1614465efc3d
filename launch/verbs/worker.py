"""`launch worker`: one process of a job; launchers start it."""

import argparse
import importlib
import os

from holmesjax.distributed.worker import Worker, work


def run(args: argparse.Namespace) -> int:
    kind = Worker
    if args.generates:  # what trains does not import how text is generated
        kind = importlib.import_module("holmesjax.distributed.generation_worker").Generator
    return work(args.run_dir, os.environ, kind)
