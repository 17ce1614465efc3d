"""The launcher that a command line names."""

from collections.abc import Mapping

from holmesjax.errors import ConfigError
from holmesjax.topology.machines import Topology
from launch.launchers.external import ExternalLauncher
from launch.launchers.launcher import Launcher
from launch.launchers.local import LocalLauncher
from launch.launchers.ssh import SshLauncher

# option -> the launchers that it means something to; a lab is one, and has a verb of its own
USEFUL = {
    "--max-restarts": ("local", "external", "ssh", "slurm", "kubernetes", "lab"),
    "--listen": ("external", "ssh", "slurm"),
    "--hosts": ("ssh",),
    "--options": ("slurm", "kubernetes"),
    "--submit": ("slurm",),
}


def refuse_useless(options: Mapping[str, object], launcher: str | None) -> None:
    """Raises ConfigError for an option that is given and means nothing to this launcher."""
    for option, value in options.items():
        if value and launcher not in (useful := USEFUL[option]):
            names = " or ".join(name for name in useful if name != "lab")
            fix = f"add --launcher {useful[0]}, or leave it out"
            found = option if value is True else value
            problem = f"is only for --launcher {names}"
            raise ConfigError(option, problem, found=found, fix=fix)


def make(name: str, topology: Topology, *, hosts: str | None, listen: str | None) -> Launcher:
    """One that starts processes now. Raises ConfigError or Mistakes for a wrong option.

    Args:
      name: "local", "external" or "ssh".
      topology: on whose nodes processes are to be started.
      hosts: the hosts file of `ssh`.
      listen: where the controller listens: HOST:PORT.
    """
    if name == "local":
        return LocalLauncher(topology)
    if name == "external":
        return ExternalLauncher(listen)
    assert name == "ssh", name
    return SshLauncher(topology, hosts, listen)
