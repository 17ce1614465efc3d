"""The launcher that a command line names."""

import os

from holmesjax.job import Job
from launch.external import ExternalLauncher
from launch.launcher import Launcher
from launch.local import LocalLauncher
from launch.slurm import SlurmLauncher
from launch.ssh import SshLauncher


def make(name: str, job: Job, *, hosts: str | None, listen: str | None) -> Launcher:
    """One that starts processes now. Raises ConfigError or Mistakes for a wrong option.

    Args:
      name: "local", "external", "ssh" or "slurm".
      job: whose processes are to be started.
      hosts: the hosts file of `ssh`.
      listen: where the controller listens: HOST:PORT.
    """
    if name == "local":
        return LocalLauncher(job.topology)
    if name == "external":
        return ExternalLauncher(listen)
    if name == "ssh":
        return SshLauncher(job, hosts, listen)
    return SlurmLauncher(job, os.environ, listen)
