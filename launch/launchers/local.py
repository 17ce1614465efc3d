"""Starts all processes of a job on this machine.

Every NIC of every node gets a loopback address of its own, so that each socket is bound to the
fabric it belongs to, as on real clusters.
"""

import os
import sys
from collections.abc import Mapping

from holmesjax.hosts.process_environment import visible_devices
from holmesjax.topology.fabrics import OF_CLUSTERS
from holmesjax.topology.machines import Topology
from launch.launchers import hosts
from launch.launchers.launcher import (
    Children,
    EventSink,
    ProcessStart,
    variables_here,
)
from launch.launchers.table import LauncherOptions


def addresses(topology: Topology, node: str) -> dict[str, list[str]]:
    """Returns loopback addresses of a node's NICs, by fabric; `local` is the node itself.

    127.F.N.i is NIC i of node N (two digits of base 256) on fabric F.
    """
    number = [other.name for other in topology.nodes].index(node) + 1
    found: dict[str, list[str]] = {}
    for f, fabric in enumerate(OF_CLUSTERS, start=1):
        nics = [nic for nic in topology.node(node).nics if nic.fabric == fabric]
        count = max(sum(nic.count for nic in nics), 1)  # a link may need no NIC in a topology file
        found[fabric] = [
            f"127.{f * 16 + number // 254}.{number % 254}.{i + 1}" for i in range(min(count, 8))
        ]
    return found


class LocalLauncher:
    """The launcher `local`.

    Args:
      topology: whose nodes are all here.
      run_dirs: node -> its run folder, to try what a run without a shared one does.
    """

    address = "127.0.0.1"
    port = 0
    sees_exits = True
    is_here = True
    files_each = 1

    def __init__(self, topology: Topology, run_dirs: Mapping[str, str | None] | None = None):
        self._topology, self._run_dirs = topology, run_dirs or {}
        self._children = Children()

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of their starts."""
        return self._children.pids

    def start(self, start: ProcessStart, events: EventSink) -> None:
        own = {
            **os.environ,
            **start.env,
            **visible_devices(start.process, os.environ),
            **variables_here(addresses(self._topology, start.process.node)),
        }
        words = start.command_in(self._run_dirs.get(start.process.node))
        argv = [sys.executable, "-m", "launch", *words]
        self._children.start(start.process.number, argv, own, events)

    def end(self) -> None:
        self._children.end()


def for_nodes(topology: Topology, options: LauncherOptions) -> LocalLauncher:
    """Returns the launcher for the nodes of a topology (`table`)."""
    if options.hosts is None:
        return LocalLauncher(topology)
    found = hosts.read(options.hosts, topology)
    return LocalLauncher(topology, {node: host.run_dir for node, host in found.items()})
