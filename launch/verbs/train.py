"""`launch train`: starts a run, or resumes it from its folder."""

import argparse
import importlib
import os
import signal
from collections.abc import Collection

from holmesjax import job_files
from holmesjax.errors import REQUEUE, ConfigError
from holmesjax.liveness import lease
from holmesjax.liveness.lease import Lease
from launch.launchers import table
from launch.launchers.launcher import Launcher
from launch.supervisor import Supervisor, Watch
from launch.watchdog import Watchdog

OPTIONS = ("--max-restarts", "--listen", "--hosts", "--options", "--submit")


def run(
    args: argparse.Namespace, launcher: Launcher | None = None, watch: Watch | None = None
) -> int:
    """Returns the exit status. A given launcher is a lab's, in place of one of `args`."""
    kind = table.LAUNCHERS[args.launcher] if args.launcher else None
    _refuse_useless_options(args, table.LAB_READS if launcher else kind.reads if kind else ())
    if launcher is None:
        if kind is None:
            return _run_here(args)
        made = kind.for_job(args.job, table.options_of(args))
        if isinstance(made, int):
            return made
        launcher = made
    is_passive = kind is not None and kind.is_passive
    return Supervisor(
        args.job,
        launcher,
        max_restarts=args.max_restarts,
        starts_again=not is_passive,
        # A scheduler gives the processes their key.
        key_file=os.environ.get("HOLMES_KEY_FILE") if is_passive else None,
        watch=watch,
        allow=args.allow,
    ).run()


def _refuse_useless_options(args: argparse.Namespace, reads: Collection[str]) -> None:
    options = {name: getattr(args, name.removeprefix("--").replace("-", "_")) for name in OPTIONS}
    table.refuse_useless_options(options, reads)
    if args.max_restarts is not None and args.max_restarts < 0:
        fix, found = "use 0 or more", args.max_restarts
        raise ConfigError("--max-restarts", "must be 0 or more", found=found, fix=fix)


def _run_here(args: argparse.Namespace) -> int:
    """Runs all stages in this process."""
    with Lease(args.job.run_dir, on_loss=lease.end_process) as held:
        return _train_here(args, held)


def _train_here(args: argparse.Namespace, held: Lease) -> int:
    variables = args.job.environment(os.environ)
    job_files.save_environment(args.job, variables)
    os.environ.update(variables)  # before JAX asks for a device
    # Imported here: a supervisor needs no JAX.
    make = importlib.import_module("holmesjax.trainer").Trainer
    trainer = make(args.job, allow=args.allow, lease=held)
    stop_timeout_s = args.job.config.distributed.stop_timeout_s
    with Watchdog(trainer, stop_timeout_s, held.release) as watchdog:
        trainer.run()
    return 0 if trainer.finished or signal.SIGINT in watchdog.signals else REQUEUE
