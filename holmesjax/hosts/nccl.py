"""Finds the variables that make NCCL use this host's NICs on the fabric of its cluster. No JAX.

NCCL looks for NICs in each process, and asks no other process. If one host finds InfiniBand and
another does not, the start hangs. If a host has two kinds of NICs, NCCL may take any. XLA has no
setting of its own for this. Every variable has a reason. The user's own variables stay, and a
difference is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmesjax.errors import HolmesError
from holmesjax.hosts.nics import DiscoveredNic, Host, rdma_nics
from holmesjax.topology.fabrics import FABRICS

# Variables that undo what is set here: name -> what they do when they are not 0.
HARMFUL = {
    "NCCL_IB_DISABLE": "keeps NCCL from InfiniBand and RoCE",
    "NCCL_IGNORE_NET_MISMATCH": "turns hosts with different NICs from an error into a silent hang",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One variable for one host."""

    name: str
    value: str
    reason: str
    user_value: str | None  # what the user has set, which stays


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The variables of one host, and the problems of its NICs."""

    variables: tuple[Variable, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def added(self) -> dict[str, str]:
        """The variables that the user has not set."""
        return {v.name: v.value for v in self.variables if v.user_value is None}

    @property
    def warnings(self) -> list[str]:
        """The conflicts with the user's variables, and the problems, for a person to read."""
        conflicts = [
            f"{v.name} stays {v.user_value!r}, as the user set it; this host would get "
            f"{v.value!r}: {v.reason}"
            for v in self.variables
            if v.user_value not in (None, v.value)
        ]
        return [*conflicts, *self.problems]


def user_settings(env: Mapping[str, str], root: str | Path = "/") -> dict[str, str]:
    """Finds the variables that the user has set for NCCL.

    The first source of a variable wins, as in NCCL: the environment, NCCL_CONF_FILE or else
    ~/.nccl.conf, /etc/nccl.conf.
    """
    own = env.get("NCCL_CONF_FILE") or Path(env.get("HOME", root), ".nccl.conf")
    found = dict(env)
    for path in (Path(own), Path(root, "etc/nccl.conf")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, is_set, value = line.partition("=")
            if is_set and not line.startswith("#"):
                found.setdefault(name, value)
    return {name: value for name, value in found.items() if name.startswith("NCCL_")}


def report(host: Host, environment: Environment) -> dict[str, Any]:
    """Describes a host and its variables, for a file."""
    return {
        "host": host.name,
        "nics": [str(nic) for nic in host.nics],
        "variables": {
            v.name: {"value": v.value, "reason": v.reason}
            | ({} if v.user_value is None else {"kept": v.user_value})
            for v in environment.variables
        },
        "problems": list(environment.problems),
    }


def environment(
    host: Host, fabric: str, addresses: Sequence[str], user_env: Mapping[str, str]
) -> Environment:
    """Finds the variables of a process on a host, for a domain that spans hosts of one fabric.

    Args:
      fabric: of the cluster; "local" needs nothing.
      addresses: of this host on it, as in HOLMES_ADDRESSES.
      user_env: from `user_settings`.

    Raises:
      HolmesError: the host has no usable port on an RDMA fabric, which the user did not turn off.
    """
    if fabric == "local":
        return Environment()
    found = _Variables(user_env)
    if FABRICS[fabric].is_rdma:
        name = FABRICS[fabric].title
        found.add("NCCL_NET", "IB", f"verbs, for {name}; without it a host may fall back to TCP")
        if user_env.get("NCCL_NET", "IB").upper() == "IB":
            _add_ports(found, host, fabric)
    else:
        found.add("NCCL_NET", "Socket", "TCP: Ethernet joins the nodes, whatever else they have")
    _add_interface(found, host, fabric, addresses)
    for name, harm in HARMFUL.items():
        if FABRICS[fabric].is_rdma and user_env.get(name, "0") != "0":
            found.problems.append(f"{name} is {user_env[name]!r}: it {harm}; unset it")
    return Environment(variables=tuple(found.variables), problems=tuple(found.problems))


class _Variables:
    """The variables that have been found so far."""

    def __init__(self, user_env: Mapping[str, str]):
        self.user_settings = user_env
        self.variables: list[Variable] = []
        self.problems: list[str] = []

    def add(self, name: str, value: str, reason: str) -> None:
        user_value = self.user_settings.get(name)
        self.variables.append(
            Variable(name=name, value=value, reason=reason, user_value=user_value)
        )


def _add_ports(found: _Variables, host: Host, fabric: str) -> None:
    nics, left_out = rdma_nics(host, fabric)
    if not nics:
        title = FABRICS[fabric].title
        raise HolmesError(
            f"host {host.name}",
            f"has no usable {title} port, and its cluster is on {title}",
            found="; ".join(str(nic) for nic in host.nics if nic.port) or "no RDMA device",
            fix="repair the port, correct the fabric of the cluster in the topology file, or set "
            "NCCL_NET=Socket on every host of the cluster",
        )
    ports = ",".join(f"{nic.port.device}:{nic.port.number}" for nic in nics if nic.port)
    reason = f"the active {FABRICS[fabric].title} ports"
    for why in dict.fromkeys(left_out.values()):
        reason += f"; not {', '.join(name for name in left_out if left_out[name] == why)}: {why}"
    found.add("NCCL_IB_HCA", f"={ports}", reason)
    if fabric == "roce":
        _add_gid_index(found, nics)


def _add_gid_index(found: _Variables, nics: Sequence[DiscoveredNic]) -> None:
    """Adds the index of GIDs: NCCL has one for all ports of a host."""
    indexes = [{gid.index for gid in nic.gids} for nic in nics]
    if common := set.intersection(*indexes):
        index = min(common)
        [gid] = [gid for gid in nics[0].gids if gid.index == index]
        kind = "IPv4" if gid.address.ipv4_mapped else f"IPv6, {gid.address}"
        found.add("NCCL_IB_GID_INDEX", str(index), f"{gid.kind} over {kind} on every port")
    elif "NCCL_IB_GID_INDEX" not in found.user_settings:
        differing = ", ".join(f"{nic.name} has it at {nic.gids[0].index}" for nic in nics)
        found.problems.append(
            f"NCCL_IB_GID_INDEX is not set, since no index suits every port: {differing}; NCCL "
            "before 2.21 would use index 0, newer ones look for RoCE v2 over IPv4 on each port"
        )


def _add_interface(found: _Variables, host: Host, fabric: str, addresses: Sequence[str]) -> None:
    """Adds the interface: the sockets of NCCL take the way of HolmesJAX's own."""
    names = [
        interface.name
        for address in addresses
        for interface in host.interfaces
        if address in (*interface.ipv4, *interface.ipv6)
    ]
    names = list(dict.fromkeys(names))
    if not names:
        where = ", ".join(addresses) or "no address"
        problem = f"NCCL_SOCKET_IFNAME is not set: {where} on {fabric}, on no interface of the host"
        found.problems.append(problem)
    elif FABRICS[fabric].is_rdma:
        reason = f"{addresses[0]}: the host's address on {fabric}, for NCCL's start"
        found.add("NCCL_SOCKET_IFNAME", f"={names[0]}", reason)
    else:
        reason = f"{', '.join(addresses)}: the host's on {fabric}, for all that NCCL sends"
        found.add("NCCL_SOCKET_IFNAME", f"={','.join(names)}", reason)
