"""Reads the kernel's counts in a lab: bytes of every interface, and from cluster to cluster.

The kernel counts more bytes between clusters than the steps report. The parts:

    steps        boundaries and tables of training
    validation   boundaries of validation, which go forward only
    headers      of Ethernet, IP and TCP, of all packets: acknowledgements are nothing else
    again        bytes that found the queue of a shared link full, and were sent again
    rest         headers of frames, PULLs, heartbeats, hellos; and what was lost in a cut
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmesjax.files.whole_files import write_whole
from holmesjax.lab.scaled_topology import FILE
from holmesjax.lab.shell import FIRST_LINK, Commands, port_name
from launch.lab_machine.namespaces import run_line

CLASS = re.compile(r"class htb 1:(\w+) .*\n\s*Sent (\d+) bytes (\d+) pkt")
# Ethernet, IPv4, TCP, and the time stamps that TCP adds to each packet.
HEADERS_BYTES = 14 + 20 + 20 + 12


class Counters:
    """The counts of one lab. This process must be in the lab's switch namespace.

    Args:
      commands: of the lab.
      islands: the clusters of each island of the run; none: it has none.
    """

    def __init__(self, commands: Commands, islands: Sequence[Sequence[str]] = ()):
        self._commands = commands
        # An island of several clusters has links to others from each, which the runtime sums.
        self._cluster_of = {f"island {k}": c[0] for k, c in enumerate(islands) if len(c) == 1}
        self._told: Counter[str] = Counter()  # by the runtime, for each link
        self._validation: Counter[str] = Counter()
        self._last = self._ports("rx")

    def step(self, record: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """Returns what each interface has sent since the step before, for the record of a step."""
        self._told.update(
            {self._clusters(link): count for link, count in record["link_bytes"].items()}
        )
        self._validation.update(record.get("validation_bytes", {}))
        sent = self._ports("rx")
        step = {name: sent[name] - self._last[name] for name in sent}
        self._last = sent
        return {"nic_bytes": step}

    def _clusters(self, link: str) -> str:
        """The link between clusters that is meant by one between islands."""
        return " -> ".join(self._cluster_of.get(end, end) for end in link.split(" -> "))

    def write(self, run_dir: Path, faults: list[dict[str, Any]]) -> None:
        """Writes the lab, the totals of this session and its faults into the run folder."""
        lab, received = self._commands.lab, self._ports("tx")
        names = [cluster.name for cluster in lab.topology.clusters]
        sent, (counted, packets) = self._ports("rx"), self._links()
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
                "latency_s": link.delay_s,
                "kernel_bytes": counted[a, b],
                "runtime_bytes": self._told[f"{names[a]} -> {names[b]}"],
                "parts": self._parts((a, b), counted[a, b], packets[a, b]),
            }
            for (a, b), link in lab.links.items()
        ]
        values = {"scale": lab.scale, "nodes": nodes, "links": links, "faults": faults}
        write_whole(run_dir / FILE, json.dumps(values, indent=2) + "\n")

    def _ports(self, way: str) -> Counter[str]:
        """Reads the bytes at the ports of the bridges: a port receives what its node sends."""
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

    def _parts(self, way: tuple[int, int], num_bytes: int, num_packets: int) -> dict[str, int]:
        """Returns the bytes of a link by their purpose."""
        lab = self._commands.lab
        name = " -> ".join(lab.topology.clusters[end].name for end in way)
        again = 0
        if passed := lab.pipes_of(way):
            through = self._classes(self._commands.switch, f"in{passed[-1]}")
            again = num_bytes - through[lab.pipes[passed[-1]].ways.index(way)][0]
        parts = {
            "steps": self._told[name],
            "validation": self._validation[name],
            "headers": HEADERS_BYTES * num_packets,
            "again": again,
        }
        return {**parts, "rest": num_bytes - sum(parts.values())}

    def _classes(self, namespace: str, device: str) -> dict[int, tuple[int, int]]:
        """Reads the bytes and packets of each class for a link, by its place, of a device."""
        text = run_line(f"tc -n {namespace} -s class show dev {device}")
        return {
            int(minor, 16) - FIRST_LINK: (int(num_bytes), int(num_packets))
            for minor, num_bytes, num_packets in CLASS.findall(text)
            if int(minor, 16) >= FIRST_LINK
        }

    def _links(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
        """Reads the bytes and packets of the classes of all nodes, by the numbers of clusters."""
        found: Counter[tuple[int, int]] = Counter()
        packets: Counter[tuple[int, int]] = Counter()
        for node in self._commands.lab.nodes:
            own = self._classes(self._commands.namespace(node), "eth0")
            for cluster, (num_bytes, num_packets) in own.items():
                found[node.cluster, cluster] += num_bytes
                packets[node.cluster, cluster] += num_packets
        return found, packets
