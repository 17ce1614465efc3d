"""What the kernel has counted in a lab: bytes of every interface, and from cluster to cluster."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holmesjax.lab import FILE
from holmesjax.lab_commands import FIRST_LINK, Commands, port_name
from launch.namespaces import run_line

CLASS = re.compile(r"class htb 1:(\w+) .*\n\s*Sent (\d+) bytes")


class Counters:
    """Of one lab, in whose switch namespace this process must be."""

    def __init__(self, commands: Commands):
        self._commands = commands
        self._told: Counter[str] = Counter()  # by the runtime, for each link
        self._last = self._ports("rx")

    def step(self, record: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """What each interface has sent since the step before, for the record of a step."""
        self._told.update(record["link_bytes"])
        sent = self._ports("rx")
        step = {name: sent[name] - self._last[name] for name in sent}
        self._last = sent
        return {"nic_bytes": step}

    def write(self, run_dir: Path, faults: list[dict[str, Any]]) -> None:
        """Writes the lab, the totals of this session and its faults into the run folder."""
        lab, received = self._commands.lab, self._ports("tx")
        names = [cluster.name for cluster in lab.topology.clusters]
        sent, counted = self._ports("rx"), self._links()
        nodes = [
            {
                "node": node.name,
                "cluster": names[node.cluster],
                "cpu": node.share.quota,
                "cores": list(node.share.cores),
                "interfaces": [
                    {
                        "name": device,
                        "address": address,
                        "rate_bytes_per_s": rate,
                        "sent_bytes": sent[f"{node.name} {device}"],
                        "received_bytes": received[f"{node.name} {device}"],
                    }
                    for device, address, rate in node.interfaces
                ],
            }
            for node in lab.nodes
        ]
        links = [
            {
                "from": names[a],
                "to": names[b],
                "rate_bytes_per_s": link.rate_bytes_per_s,
                "latency_s": link.latency_s if self._commands.has_netem else 0.0,
                "kernel_bytes": counted[a, b],
                "runtime_bytes": self._told[f"{names[a]} -> {names[b]}"],
            }
            for (a, b), link in lab.links.items()
        ]
        values = {"scale": lab.scale, "nodes": nodes, "links": links, "faults": faults}
        (run_dir / FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def _ports(self, way: str) -> Counter[str]:
        """Bytes at the ports of the bridges: what a port receives, its node has sent."""
        # Not /sys/class/net: that shows the namespace in which it was mounted.
        table = Path("/proc/net/dev").read_text()
        column = {"rx": 0, "tx": 8}[way]
        values = dict(re.findall(r"^\s*(n\d+-\w+):\s*(.*)$", table, re.MULTILINE))
        return Counter(
            {
                f"{node.name} {device}": int(values[port_name(node, device)].split()[column])
                for node in self._commands.lab.nodes
                for device, _, _ in node.interfaces
            }
        )

    def _links(self) -> Counter[tuple[int, int]]:
        """What the classes of all nodes have let through, by the numbers of clusters."""
        found: Counter[tuple[int, int]] = Counter()
        for node in self._commands.lab.nodes:
            text = run_line(f"tc -n {self._commands.namespace(node)} -s class show dev eth0")
            for minor, num_bytes in CLASS.findall(text):
                if int(minor, 16) >= FIRST_LINK:
                    found[node.cluster, int(minor, 16) - FIRST_LINK] += int(num_bytes)
        return found
