"""The launcher that a command line names."""

from holmesjax.topology import Topology
from launch.external import ExternalLauncher
from launch.launcher import Launcher
from launch.local import LocalLauncher
from launch.ssh import SshLauncher


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
