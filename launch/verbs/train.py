"""`launch train`: starts a run, or resumes it from its folder."""

import argparse
import importlib
import os
import signal

from holmesjax import lease
from holmesjax.errors import REQUEUE, ConfigError
from holmesjax.lease import Lease
from launch.launchers import kubernetes, slurm, table
from launch.launchers.launcher import Launcher
from launch.supervisor import Supervisor, Watch
from launch.watchdog import Watchdog

OPTIONS = ("--max-restarts", "--listen", "--hosts", "--options", "--submit")


def run(
    args: argparse.Namespace, launcher: Launcher | None = None, watch: Watch | None = None
) -> int:
    """With a launcher that is given, a lab's, instead of one that `args` names."""
    _refuse_useless_options(args, "lab" if launcher else args.launcher)
    if launcher is not None:
        return Supervisor(
            args.job,
            launcher,
            max_restarts=args.max_restarts,
            watch=watch,
            allow=args.allow,
        ).run()
    if args.launcher is None:
        return _run_here(args)
    if args.launcher == "kubernetes":
        return kubernetes.write(
            args.job, args.options, max_restarts=args.max_restarts, allow=args.allow
        )
    if args.launcher == "slurm" and not slurm.is_inside(os.environ):
        return slurm.write(
            args.job,
            args.options,
            listen=args.listen,
            max_restarts=args.max_restarts,
            submit=args.submit,
            allow=args.allow,
        )
    if args.launcher == "slurm":
        launcher = slurm.SlurmLauncher(args.job, os.environ, args.listen)
    else:
        launcher = table.make(
            args.launcher, args.job.topology, hosts=args.hosts, listen=args.listen
        )
    return Supervisor(
        args.job,
        launcher,
        max_restarts=args.max_restarts,
        starts_again=args.launcher != "external",
        # Of a scheduler that gives the processes theirs.
        key_file=os.environ.get("HOLMES_KEY_FILE") if args.launcher == "external" else None,
        allow=args.allow,
    ).run()


def _refuse_useless_options(args: argparse.Namespace, launcher: str | None) -> None:
    options = {name: getattr(args, name.removeprefix("--").replace("-", "_")) for name in OPTIONS}
    table.refuse_useless(options, launcher)
    if args.max_restarts is not None and args.max_restarts < 0:
        fix, found = "use 0 or more", args.max_restarts
        raise ConfigError("--max-restarts", "must be 0 or more", found=found, fix=fix)


def _run_here(args: argparse.Namespace) -> int:
    """All stages in this process."""
    with Lease(args.job.run_dir, on_loss=lease.end_process) as held:
        return _train_here(args, held)


def _train_here(args: argparse.Namespace, held: Lease) -> int:
    variables = args.job.environment(os.environ)
    args.job.save_environment(variables)
    os.environ.update(variables)  # before JAX asks for a device
    # Imported here: a supervisor needs no JAX.
    make = importlib.import_module("holmesjax.trainer").Trainer
    trainer = make(args.job, allow=args.allow, lease=held)
    watchdog = Watchdog(trainer, args.job.config.distributed.stop_timeout_s, held.release)
    trainer.train()
    watchdog.end()
    return 0 if trainer.finished or signal.SIGINT in watchdog.signals else REQUEUE
