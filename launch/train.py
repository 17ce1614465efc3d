"""`launch train`: starts a run, or resumes it from its folder."""

import argparse
import importlib
import os
import signal
from types import FrameType

from holmesjax.errors import REQUEUE, ConfigError
from launch.external import ExternalLauncher
from launch.local import LocalLauncher
from launch.supervisor import Supervisor


def run(args: argparse.Namespace) -> int:
    _refuse_useless_options(args)
    if args.launcher == "local":
        launcher = LocalLauncher(args.job.topology)
        return Supervisor(args.job, launcher, max_restarts=args.max_restarts).run()
    if args.launcher == "external":
        return Supervisor(args.job, ExternalLauncher(args.listen)).run()
    return _run_here(args)


def _refuse_useless_options(args: argparse.Namespace) -> None:
    for option, value, launcher in (
        ("--max-restarts", args.max_restarts, "local"),
        ("--listen", args.listen, "external"),
    ):
        if value and args.launcher != launcher:
            problem = f"is only for --launcher {launcher}"
            fix = f"add --launcher {launcher}, or leave it out"
            raise ConfigError(option, problem, found=value, fix=fix)
    if args.max_restarts < 0:
        fix = "use 0 or more"
        raise ConfigError("--max-restarts", "is no number", found=args.max_restarts, fix=fix)


def _run_here(args: argparse.Namespace) -> int:
    """All stages in this process."""
    variables = args.job.environment(os.environ)
    args.job.save_environment(variables)
    os.environ.update(variables)  # before JAX asks for a device
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
