"""Finds the NICs of this host, the fabric of each, and its addresses there. No JAX.

`hardware` reads, and this module decides. Every decision has its reason as text. One RDMA port, or
one network interface without RDMA, is a `DiscoveredNic`:

    infiniband  an active port whose link layer is InfiniBand; its IP address is that of its IPoIB
    roce        an active port whose link layer is Ethernet and that has a GID of RoCE
    ethernet    an interface that leads out of the host
    None        not usable: down, virtual, part of a bond

The topology names the fabric of a cluster; this module finds the NICs for it.
"""

import ipaddress
import operator
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmesjax import units
from holmesjax.hosts import hardware
from holmesjax.hosts.hardware import Gid, Gpu, Interface, PciPath, Port
from holmesjax.topology.fabrics import FABRICS, Network, rdma_networks

# How far a NIC is from a GPU, nearest first.
SAME_SWITCH, SAME_ROOT, SAME_NUMA, OTHER_SOCKET = (
    "same PCIe switch",
    "same root complex",
    "same NUMA node",
    "other socket",
)
UNKNOWN = "unknown"

# Interfaces that the kernel builds on top of others, and that lead where those do. Tunnels are
# built on others too, and lead elsewhere.
STACKED = ("bond", "bridge", "vlan", "macvlan", "ipvlan")


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveredNic:
    """A port or an interface, with its fabric and the reason."""

    name: str  # "mlx5_0 port 1", "eth0"
    fabric: Network | None
    reason: str
    rate_bytes_per_s: float | None
    port: Port | None
    interface: str | None  # that carries its IP addresses: a bond, where it is part of one
    addresses: tuple[str, ...]  # those that other hosts can reach
    gids: tuple[Gid, ...]  # of a RoCE port: those to use, all equally good
    pci: PciPath
    numa_node: int | None
    distances: tuple[str, ...]  # from each GPU

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host: its NICs, interfaces and GPUs."""

    name: str
    nics: tuple[DiscoveredNic, ...]  # RDMA ports first
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    default_routes: tuple[str, ...]  # interfaces, the preferred one first


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricAddresses:
    """The addresses that a host has on one fabric."""

    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]  # that carry them
    reason: str


def discover(
    root: str | Path = "/",
    *,
    addresses: Mapping[str, Sequence[str]] | None = None,
    gpus: Sequence[Gpu] | None = None,
) -> Host:
    """Reads this host, or a host whose /sys was recorded.

    Args:
      root: the folder that has `sys` and `proc`.
      addresses: IP addresses of each interface; those of the kernel if None.
      gpus: those of NVIDIA's driver if None.

    Raises:
      HolmesError: there is no /sys/class/net that can be read.
    """
    root = Path(root)
    found = hardware.interfaces(
        root, hardware.kernel_addresses() if addresses is None else addresses
    )
    all_gpus = hardware.gpus(root) if gpus is None else tuple(gpus)
    classify = _Classifier(found, hardware.ports(root), hardware.default_routes(root), all_gpus)
    return Host(
        name=socket.gethostname(),
        nics=classify.nics(),
        gpus=all_gpus,
        interfaces=found,
        default_routes=tuple(classify.default_routes),
    )


class _Classifier:
    """Classifies interfaces and ports. It sees all of them: a class depends on the others."""

    def __init__(
        self,
        interfaces: Sequence[Interface],
        ports: Sequence[Port],
        default_routes: Sequence[str],
        gpus: Sequence[Gpu],
    ):
        self.interfaces = {interface.name: interface for interface in interfaces}
        self.ports, self.default_routes, self.gpus = ports, default_routes, gpus

    def nics(self) -> tuple[DiscoveredNic, ...]:
        of_ports = [self._of_port(port) for port in self.ports]
        # The interface of a RoCE port is Ethernet too, in the same row.
        taken = {
            name
            for nic, port in zip(of_ports, self.ports, strict=True)
            if nic.fabric
            for name in (nic.interface, *self._interfaces_of(port))
        }
        others = [i for name, i in self.interfaces.items() if name not in taken]
        return (*of_ports, *map(self._of_interface, others))

    def _of_port(self, port: Port) -> DiscoveredNic:
        gids = self._best_gids(port) if port.link_layer == "Ethernet" else ()
        named = [str(gid.interface) for gid in gids]
        carriers = [self._carrier(name) for name in (*named, *self._interfaces_of(port))]
        # The first that has an address; IPoIB of a partition beside one without any, say.
        carriers.sort(key=lambda interface: not _reachable(interface))
        interface = carriers[0] if carriers else None
        fabric, reason = self._judge_port(port, gids)
        return DiscoveredNic(
            name=f"{port.device} port {port.number}",
            fabric=fabric,
            reason=reason,
            rate_bytes_per_s=port.rate_bytes_per_s,
            port=port,
            interface=interface.name if interface else None,
            addresses=_reachable(interface) if interface else (),
            gids=gids,
            pci=port.pci,
            numa_node=port.numa_node,
            distances=self._distances(port.pci, port.numa_node),
        )

    def _judge_port(self, port: Port, gids: Sequence[Gid]) -> tuple[Network | None, str]:
        layer = f"link layer {port.link_layer}"
        if port.link_layer not in ("InfiniBand", "Ethernet"):
            return None, f"{layer}, which is neither InfiniBand nor RoCE"
        if port.node_type == "RNIC":
            return None, f"{layer}, but RDMA by iWARP, which is not RoCE"
        if port.state != "ACTIVE":
            return None, f"{layer}, {_why_inactive(port)}"
        if port.is_elsewhere:
            return None, f"{layer}, of this host, and not in the /dev/infiniband of this container"
        here = (p for p in self.ports if p.state == "ACTIVE" and not p.is_elsewhere)
        if port.physical_function in {p.device for p in here}:
            return None, f"{layer}, a virtual function of {port.physical_function}, which is here"
        rate = _show_rate(port.rate_bytes_per_s)
        if port.link_layer == "InfiniBand":
            return "infiniband", f"{layer}, {rate}, active"
        if not gids:
            return None, f"{layer}, active, but no GID of RoCE for an interface of this host"
        [gid, *_] = gids
        address = gid.address.ipv4_mapped or gid.address
        which = f"GID {gid.index} is {gid.kind} of {address} on {gid.interface}"
        return "roce", f"{layer}, {rate}, active; {which}"

    def _of_interface(self, interface: Interface) -> DiscoveredNic:
        fabric, reason = self._judge_interface(interface)
        return DiscoveredNic(
            name=interface.name,
            fabric=fabric,
            reason=reason,
            rate_bytes_per_s=interface.speed_bytes_per_s,
            port=None,
            interface=interface.name,
            addresses=_reachable(interface),
            gids=(),
            pci=interface.pci,
            numa_node=interface.numa_node,
            distances=self._distances(interface.pci, interface.numa_node),
        )

    def _judge_interface(self, interface: Interface) -> tuple[Network | None, str]:
        is_way_out = interface.name in self.default_routes
        if interface.kind == "loopback":
            return None, "loopback"
        if interface.kind == "ipoib":
            return None, "IPoIB of an InfiniBand port that is not usable or not visible here"
        if interface.master:
            return None, f"part of {interface.master}"
        if not (is_way_out or self._is_physical(interface)):
            kind = "virtual" if interface.kind == "virtual" else f"virtual ({interface.kind})"
            return None, f"{kind}, and no default route leaves through it"
        if not interface.is_up:
            return None, f"Ethernet, down (operstate {interface.state})"
        facts = ["Ethernet", _show_rate(interface.speed_bytes_per_s), "up"]
        facts += [interface.kind] if interface.kind != "ethernet" else []
        facts += ["default route"] if is_way_out else []
        facts += [] if _reachable(interface) else ["no address that other hosts reach"]
        return "ethernet", ", ".join(facts)

    def _is_physical(self, interface: Interface) -> bool:
        """Whether an interface is hardware, or is built on hardware."""
        if interface.kind not in STACKED:
            return not interface.is_virtual
        below = [self.interfaces[name] for name in interface.lower if name in self.interfaces]
        return any(map(self._is_physical, below))

    def _best_gids(self, port: Port) -> tuple[Gid, ...]:
        """Prefers RoCE v2 to v1, which cannot be routed; then IPv4, IPv6 and link-local."""
        # In a container the table also names interfaces of the host outside.
        found = [gid for gid in port.gids if gid.kind and gid.interface in self.interfaces]
        # Those of other pods may have the same names.
        found = [gid for gid in found if self._is_of_here(gid)] or found

        def rank(gid: Gid) -> tuple[bool, int]:
            ipv4 = gid.address.ipv4_mapped
            of_address = 2 if (ipv4 or gid.address).is_link_local else int(ipv4 is None)
            return gid.kind != "RoCE v2", of_address

        best = min(map(rank, found), default=None)
        return tuple(gid for gid in found if rank(gid) == best)

    def _is_of_here(self, gid: Gid) -> bool:
        """Whether its address is one of its interface, or of the bond or bridge above that."""
        interface = self._carrier(str(gid.interface))
        address = gid.address.ipv4_mapped or gid.address
        listed = (*interface.ipv4, *interface.ipv6)
        return address in {ipaddress.ip_address(text.partition("%")[0]) for text in listed}

    def _interfaces_of(self, port: Port) -> list[str]:
        """Finds the network interfaces on the hardware of a port."""
        return [
            interface.name
            for interface in self.interfaces.values()
            if interface.pci
            and interface.pci == port.pci
            and (port.is_only or interface.dev_port == port.number - 1)
            and (interface.kind == "ipoib") == (port.link_layer == "InfiniBand")
        ]

    def _carrier(self, name: str) -> Interface:
        """Finds the interface with the addresses: the interface itself, its bond or its bridge."""
        interface = self.interfaces[name]
        if interface.master in self.interfaces and not _reachable(interface):
            return self._carrier(str(interface.master))
        return interface

    def _distances(self, pci: PciPath, numa_node: int | None) -> tuple[str, ...]:
        return tuple(distance(pci, numa_node, gpu.pci, gpu.numa_node) for gpu in self.gpus)


def _why_inactive(port: Port) -> str:
    if port.state == "INIT":
        return "but no subnet manager has configured it (state INIT)"
    return f"but down (state {port.state}, {port.phys_state})"


def _reachable(interface: Interface) -> tuple[str, ...]:
    """Returns the IPv4 addresses that other hosts can reach; without any, those of IPv6."""
    for addresses in (interface.ipv4, interface.ipv6):
        parsed = map(ipaddress.ip_address, addresses)
        if found := tuple(str(a) for a in parsed if not (a.is_loopback or a.is_link_local)):
            return found
    return ()


def _show_rate(rate_bytes_per_s: float | None) -> str:
    return units.show(rate_bytes_per_s, "b/s") if rate_bytes_per_s else "speed unknown"


def distance(pci: PciPath, numa_node: int | None, other: PciPath, other_node: int | None) -> str:
    """Returns the distance of two PCI devices, in words.

    >>> gpu = ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0")
    >>> nic = ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0", "0000:19:00.0")
    >>> distance(gpu, 0, nic, 0)
    'same PCIe switch'
    >>> distance(gpu, 0, ("pci0000:e0", "0000:e0:00.0"), 1)
    'other socket'
    """
    shared = [*map(operator.eq, pci, other), False].index(False)
    if shared:  # the host bridge; two devices share a port of it only through a switch
        return SAME_SWITCH if shared > 1 else SAME_ROOT
    if numa_node is None or other_node is None:
        return UNKNOWN
    return SAME_NUMA if numa_node == other_node else OTHER_SOCKET


# ---- what to use of it ---------------------------------------------------------------------------


def rdma_nics(host: Host, fabric: str) -> tuple[list[DiscoveredNic], dict[str, str]]:
    """Chooses the ports for a cluster's collectives; other ports have the reason against them.

    Hosts with many NICs have some for storage, often on a network of their own. They are slower, or
    share no PCIe switch with a GPU where those for collectives do.
    """
    chosen = [nic for nic in host.nics if nic.fabric == fabric]
    left_out: dict[str, str] = {}

    def keep(is_good: Callable[[DiscoveredNic], bool], reason: str) -> None:
        nonlocal chosen
        if any(map(is_good, chosen)):
            left_out.update({nic.name: reason for nic in chosen if not is_good(nic)})
            chosen = [nic for nic in chosen if is_good(nic)]

    keep(lambda nic: SAME_SWITCH in nic.distances, "no PCIe switch with a GPU, unlike others")
    fastest = max((nic.rate_bytes_per_s or 0.0 for nic in chosen), default=0.0)
    keep(
        lambda nic: (nic.rate_bytes_per_s or 0.0) == fastest,
        f"slower than others with {_show_rate(fastest)}",
    )
    return chosen, left_out


def choices(host: Host) -> dict[str, FabricAddresses]:
    """Chooses the addresses of this host on each fabric; a fabric without an address is missing.

    RDMA needs no IP address, but the sockets around it do: those of a cluster's coordinator, and of
    boundaries inside it. Ports without any borrow the address on Ethernet.
    """
    found = {
        "local": FabricAddresses(addresses=("127.0.0.1",), interfaces=("lo",), reason="this host")
    }
    ethernet = _ethernet(host)
    for fabric in rdma_networks():
        nics, _ = rdma_nics(host, fabric)
        if with_address := [nic for nic in nics if nic.addresses]:
            reason = "IPoIB of its ports" if fabric == "infiniband" else "those of its ports"
            found[fabric] = _choice(with_address, reason)
        elif nics and ethernet:
            reason = f"no {FABRICS[fabric].title} port has an address; that on Ethernet stands in"
            found[fabric] = FabricAddresses(
                addresses=ethernet.addresses, interfaces=ethernet.interfaces, reason=reason
            )
    if ethernet:
        found["ethernet"] = ethernet
    return found


def _ethernet(host: Host) -> FabricAddresses | None:
    """Chooses the NIC with the default route, which leads to other clusters, or the fastest NIC."""
    nics = [nic for nic in host.nics if nic.fabric in ("ethernet", "roce") and nic.addresses]
    for name in host.default_routes:
        if routed := [nic for nic in nics if nic.interface == name]:
            return _choice(routed, "it has the default route")
    fastest = max((nic.rate_bytes_per_s or 0.0 for nic in nics), default=0.0)
    best = [nic for nic in nics if (nic.rate_bytes_per_s or 0.0) == fastest]
    return _choice(best, "no default route; the fastest") if best else None


def _choice(nics: Sequence[DiscoveredNic], reason: str) -> FabricAddresses:
    """Takes one address of each NIC, since others may move to other hosts; a bond counts once."""
    return FabricAddresses(
        addresses=tuple(dict.fromkeys(nic.addresses[0] for nic in nics)),
        interfaces=tuple(dict.fromkeys(str(nic.interface) for nic in nics)),
        reason=reason,
    )


def addresses(host: Host) -> dict[str, list[str]]:
    """Returns the addresses of a host by fabric, as in HOLMES_ADDRESSES."""
    return {fabric: list(choice.addresses) for fabric, choice in choices(host).items()}
