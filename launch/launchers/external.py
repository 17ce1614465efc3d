"""Waits for processes that somebody else starts: a scheduler, or a person on each node."""

import shlex
from collections.abc import Mapping

from holmesjax.errors import ConfigError
from holmesjax.topology.machines import Topology
from launch.launchers.launcher import EventSink, ProcessStart, parse_listen
from launch.launchers.table import LauncherOptions

# Not the same for each process, or each start of the job: whoever sets it once leaves them out.
OF_A_START = ("HOLMES_PROCESS", "HOLMES_RESTART", "HOLMES_KEY_DIGEST")


class ExternalLauncher:
    """The launcher `external`: `--listen HOST:PORT` is where the processes find the controller.

    Raises ConfigError if `listen` is not an address and a port.
    """

    sees_exits = False
    is_here = False
    files_each = 0

    def __init__(self, listen: str | None):
        self.address, self.port = parse_listen(listen) if listen else ("", 0)
        if not self.port:
            raise ConfigError(
                "--listen",
                "the launcher `external` needs an address of this machine and a port",
                found=listen or "nothing",
                fix="write --listen 10.0.0.1:7000, with an address that all nodes reach",
            )

    def start(self, start: ProcessStart, events: EventSink) -> None:
        if start.command[0] == "store":
            node = start.process.node
            print(f"{node} has a part of the checkpoint; start there, with these set:")
            _print_variables(start.env)
            print("  python -m launch store <its run folder>", flush=True)
        elif start.process.number == 0:
            print("waiting for the processes; start each on its node with these set:")
            _print_variables(start.env)
            print("  HOLMES_PROCESS=<number>        # or let Slurm, Open MPI or Kubernetes say it")
            print("  # where `python -m launch nics` finds the wrong addresses of a node:")
            print("""  HOLMES_ADDRESSES='{"<fabric>": ["<its address there>"]}'""")
            print(f"  python -m launch {shlex.join(start.command)}", flush=True)

    def end(self) -> None:
        """Does nothing: processes end by themselves when the controller has gone."""


def _print_variables(env: Mapping[str, str]) -> None:
    for name in [name for name in env if name not in OF_A_START]:
        print(f"  {name}={shlex.quote(env[name])}")


def for_nodes(topology: Topology, options: LauncherOptions) -> ExternalLauncher:
    """Returns the launcher for the nodes of a topology (`table`)."""
    return ExternalLauncher(options.listen)
