"""The launchers that a command line can name: add a launcher here.

This module imports no launcher before it is chosen: the arguments of a command are read at once.
"""

import argparse
import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

from holmesjax.errors import ConfigError

if TYPE_CHECKING:
    from holmesjax.job import Job
    from holmesjax.topology.machines import Topology
    from launch.launchers.launcher import Launcher


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """The options of a command line that launchers read."""

    hosts: str | None = None  # a file
    listen: str | None = None  # HOST or HOST:PORT
    options: str | None = None  # a file
    submit: bool = False
    max_restarts: int | None = None
    allow: Sequence[str] = ()  # settings that may differ from the checkpoint's


@dataclass(frozen=True, kw_only=True)
class LauncherKind:
    """A launcher that a command line can name.

    Args:
      module: has `for_nodes(topology, options)`, which gives a `Launcher`. A module that needs a
        job has `for_job(job, options)`: a launcher, or the exit status of the verb where a
        scheduler starts the job later. One that needs to know the job where there is one has both.
      reads: the options that mean something to it: "--hosts".
      reads_job: `train` gives it the job.
      needs_job: `doctor` and `probe`, which have no job, cannot use it.
      is_here: all nodes are this machine.
      is_passive: somebody else starts the processes, also again, and may give them the key.
    """

    module: str
    reads: Collection[str]
    reads_job: bool = False
    needs_job: bool = False
    is_here: bool = False
    is_passive: bool = False

    def for_job(self, job: "Job", options: LauncherOptions) -> "Launcher | int":
        """Returns a launcher for a job; or an exit status, where the job starts later."""
        if not (self.needs_job or self.reads_job):
            return self.for_nodes(job.topology, options)
        return cast("Launcher | int", importlib.import_module(self.module).for_job(job, options))

    def for_nodes(self, topology: "Topology", options: LauncherOptions) -> "Launcher":
        """Returns a launcher for the nodes of a topology, whether there is a job or not."""
        assert not self.needs_job, f"{self.module} needs a job"
        found = importlib.import_module(self.module).for_nodes(topology, options)
        return cast("Launcher", found)


LAUNCHERS: dict[str, LauncherKind] = {
    "local": LauncherKind(
        module="launch.launchers.local",
        reads=("--max-restarts", "--hosts"),
        is_here=True,
    ),
    "external": LauncherKind(
        module="launch.launchers.external",
        reads=("--max-restarts", "--listen"),
        is_passive=True,
    ),
    "ssh": LauncherKind(
        module="launch.launchers.ssh",
        reads=("--max-restarts", "--listen", "--hosts"),
    ),
    "slurm": LauncherKind(
        module="launch.launchers.slurm",
        reads=("--max-restarts", "--listen", "--options", "--submit"),
        needs_job=True,
    ),
    "kubernetes": LauncherKind(
        module="launch.launchers.kubernetes",
        reads=("--max-restarts", "--options"),
        needs_job=True,
    ),
    "skypilot": LauncherKind(
        module="launch.launchers.skypilot",
        reads=("--max-restarts", "--options"),
        needs_job=True,
    ),
    "ray": LauncherKind(
        module="launch.launchers.ray",
        reads=("--max-restarts", "--listen", "--options"),
        reads_job=True,
    ),
}
LAB_READS = ("--max-restarts",)  # a lab starts processes too, and has a verb of its own


def options_of(args: argparse.Namespace) -> LauncherOptions:
    """Returns the options that the arguments of a verb have."""
    names = [field.name for field in fields(LauncherOptions)]
    return LauncherOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def refuse_useless_options(options: Mapping[str, object], reads: Collection[str]) -> None:
    """Raises ConfigError for an option that is given and is not among those that are read.

    Args:
      options: values of the command line, by option.
      reads: the options that mean something to the launcher.
    """
    for option, value in options.items():
        if value and option not in reads:
            useful = [name for name, kind in LAUNCHERS.items() if option in kind.reads]
            fix = f"add --launcher {useful[0]}, or leave it out"
            found = option if value is True else value
            problem = f"is only for --launcher {' or '.join(useful)}"
            raise ConfigError(option, problem, found=found, fix=fix)


def given_of_agents(args: argparse.Namespace) -> dict[str, object]:
    """Returns the options of launchers that the arguments of a verb without `--submit` have."""
    return {"--hosts": args.hosts, "--listen": args.listen, "--options": args.options}


def make(kind: LauncherKind, topology: "Topology", args: argparse.Namespace) -> "Launcher":
    """Makes a launcher for the nodes of a topology, before there is a job.

    Args:
      kind: a launcher that does not need a job.
      topology: on whose nodes processes are to be started.
      args: of a verb that has `--hosts`, `--listen` and `--options`.

    Raises:
      ConfigError, Mistakes: an option is wrong, or means nothing to the launcher.
    """
    refuse_useless_options(given_of_agents(args), kind.reads)
    return kind.for_nodes(topology, options_of(args))
