"""`launch train`: starts a run, or resumes it from its folder."""

import argparse
import importlib
import signal
from types import FrameType

from holmesjax.errors import REQUEUE
from launch.local import LocalLauncher
from launch.supervisor import Supervisor


def run(args: argparse.Namespace) -> int:
    if args.launcher == "local":
        launcher = LocalLauncher(args.job.topology)
        return Supervisor(args.job, launcher, max_restarts=args.max_restarts).run()
    return _run_here(args)


def _run_here(args: argparse.Namespace) -> int:
    """All stages in this process."""
    # Imported here: a supervisor needs no JAX.
    trainer = importlib.import_module("holmesjax.trainer").Trainer(args.job)
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if received:  # asked twice: do not wait for the step
            raise SystemExit(128 + number)
        received.append(number)
        trainer.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    trainer.train()
    return REQUEUE if signal.SIGTERM in received and not trainer.finished else 0
