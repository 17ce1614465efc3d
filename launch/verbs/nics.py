"""`launch nics`: prints this host's NICs and GPUs, its addresses, and what NCCL is told."""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence

from holmesjax import units
from holmesjax.hosts import nccl, nics
from holmesjax.hosts.nccl import Environment
from holmesjax.hosts.nics import DiscoveredNic, Host
from holmesjax.topology.fabrics import FABRICS, NETWORKS, rdma_networks


def run(args: argparse.Namespace) -> int:
    host = nics.discover()
    user_env = nccl.user_settings(os.environ)
    environments = {
        fabric: environment(host, fabric, user_env) for fabric in fabrics(host, args.fabric)
    }
    if args.json:
        print(to_json(host, environments))
    else:
        print(*describe(host), sep="\n")
        for fabric, of_fabric in environments.items():
            print(*describe_environment(fabric, of_fabric), sep="\n")
    return 0


def fabrics(host: Host, asked: str | None) -> list[str]:
    """Returns the fabrics to show variables of: the one asked for, or all that the host is on."""
    if asked is not None:
        return [asked]
    return [fabric for fabric in NETWORKS if fabric in nics.choices(host)]


def environment(host: Host, fabric: str, user_env: Mapping[str, str]) -> Environment:
    """Returns the variables of NCCL if the host's cluster were on this fabric.

    Raises HolmesError if the host is not on it.
    """
    choice = nics.choices(host).get(fabric)
    return nccl.environment(host, fabric, choice.addresses if choice else (), user_env)


def describe(host: Host) -> list[str]:
    """Describes the host's GPUs, its NICs with the reason for each, and its addresses, as lines."""
    lines = [f"host {host.name}: {len(host.gpus)} GPUs"]
    rows = [
        (
            f"GPU {gpu.index}",
            gpu.name,
            units.show(gpu.memory_bytes, "B"),
            gpu.pci[-1] if gpu.pci else "?",
            f"NUMA {_numa(gpu.numa_node)}",
            f"driver {gpu.driver}",
        )
        for gpu in host.gpus
    ]
    lines += _table(rows)
    head = ("NIC", "fabric", "rate", "interface", "address", "NUMA", "GPUs", "why")
    lines += _table([head, *map(_row, host.nics)])
    left_out = [_ for fabric in rdma_networks() for _ in nics.rdma_nics(host, fabric)[1].items()]
    lines += [f"  not for collectives: {name}, {why}" for name, why in left_out]
    lines.append("addresses")
    choices = nics.choices(host).items()
    return lines + _table(
        (fabric, " ".join(c.addresses), " ".join(c.interfaces), c.reason) for fabric, c in choices
    )


def _row(nic: DiscoveredNic) -> tuple[str, ...]:
    return (
        nic.name,
        nic.fabric or "-",
        units.show(nic.rate_bytes_per_s, "b/s") if nic.rate_bytes_per_s else "-",
        nic.interface or "-",
        " ".join(nic.addresses) or "-",
        _numa(nic.numa_node),
        _nearest(nic),
        nic.reason,
    )


def _nearest(nic: DiscoveredNic) -> str:
    """Returns the GPUs that share a PCIe switch with a NIC."""
    near = [str(i) for i, far in enumerate(nic.distances) if far == nics.SAME_SWITCH]
    return ",".join(near) or "-"


def _numa(node: int | None) -> str:
    return "-" if node is None else str(node)


def describe_environment(fabric: str, found: Environment) -> list[str]:
    """Describes the variables of a fabric with their reasons, then the warnings, as lines."""
    rows = [
        (
            f"{v.name}={v.value if v.user_value is None else v.user_value}",
            v.reason if v.user_value is None else "yours",
        )
        for v in found.variables
    ]
    title = f"environment on {FABRICS[fabric].title}"
    return [title, *_table(rows), *(f"  warning: {text}" for text in found.warnings)]


def to_json(host: Host, environments: Mapping[str, Environment]) -> str:
    """Returns all of it as JSON, for programs; rates in bytes per second, memory in bytes."""
    values = {
        **dataclasses.asdict(host),
        "addresses": nics.addresses(host),
        "environments": {
            fabric: {**dataclasses.asdict(of_fabric), "warnings": of_fabric.warnings}
            for fabric, of_fabric in environments.items()
        },
    }
    return json.dumps(values, indent=2, default=str)  # GIDs, as addresses of IPv6


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns rows with their columns aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
