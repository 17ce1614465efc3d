"""Starts all processes of a job on this machine.

Every NIC of every node gets a loopback address of its own, so that each socket is bound to the
fabric it belongs to, as on real clusters.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import get_args

from holmesjax.plan.processes import Process
from holmesjax.topology.fabrics import ClusterFabric
from holmesjax.topology.machines import Topology
from launch.launchers.launcher import Children, EventSink, variables_here, visible_devices

FABRICS = get_args(ClusterFabric)


def addresses(topology: Topology, node: str) -> dict[str, list[str]]:
    """Loopback addresses of a node's NICs, by fabric; `local` is the node itself.

    127.F.N.i is NIC i of node N (two digits of base 256) on fabric F.
    """
    number = [other.name for other in topology.nodes].index(node) + 1
    found: dict[str, list[str]] = {}
    for f, fabric in enumerate(FABRICS, start=1):
        nics = [nic for nic in topology.node(node).nics if nic.fabric == fabric]
        count = max(sum(nic.count for nic in nics), 1)  # a link may need no NIC in a topology file
        found[fabric] = [
            f"127.{f * 16 + number // 254}.{number % 254}.{i + 1}" for i in range(min(count, 8))
        ]
    return found


class LocalLauncher:
    """The launcher `local`."""

    address = "127.0.0.1"
    port = 0
    sees_exits = True
    files_each = 1

    def __init__(self, topology: Topology):
        self._topology = topology
        self._children = Children()

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started, in that order."""
        return self._children.pids

    def start(
        self,
        process: Process,
        command: Sequence[str],
        env: Mapping[str, str],
        events: EventSink,
    ) -> None:
        own = {
            **os.environ,
            **env,
            **visible_devices(process, os.environ),
            **variables_here(addresses(self._topology, process.node)),
        }
        argv = [sys.executable, "-m", "launch", *command]
        self._children.start(process.number, argv, own, events)

    def end(self) -> None:
        self._children.end()
