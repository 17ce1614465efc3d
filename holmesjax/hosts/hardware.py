"""Reads what this host has: network interfaces, RDMA ports, default routes, GPUs. No JAX.

The kernel and NVIDIA's driver give these facts; `nics` says what they mean. Rates are in bytes per
second. A fact that cannot be read is None, and no error: `speed` of an interface that is down
fails with EINVAL, as does an empty place in a table of GIDs.

    port  of an RDMA device (HCA): what InfiniBand and RoCE traffic goes through
    GID   an address of a port; RoCE has one for each IP address of its interfaces, and version
"""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from holmesjax.errors import HolmesError

PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
LOOPBACK, IPOIB = 772, 32  # ARPHRD_* of linux/if_arp.h
ROUTE_IS_UP = 1  # RTF_UP of linux/route.h
REJECTS = 0x200  # RTF_REJECT
PciPath = tuple[str, ...]  # ("pci0000:15", "0000:15:01.0", ...): host bridge, bridges, device


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface, as /sys/class/net describes it."""

    name: str
    kind: str  # "ethernet", "ipoib", "loopback", "bond", "bridge", "vlan", "tun", "virtual", ...
    is_virtual: bool  # no hardware of its own
    driver: str | None
    speed_bytes_per_s: float | None
    state: str  # "up", "down", "lowerlayerdown", "unknown", ...
    is_up: bool
    mtu_bytes: int | None
    pci: PciPath  # empty: virtual
    numa_node: int | None
    dev_port: int  # which port of its PCI device, from 0
    master: str | None  # the bond or bridge it is part of
    lower: tuple[str, ...]  # the interfaces it is made of
    ipv4: tuple[str, ...]
    ipv6: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gid:
    """An entry in the table of a port; empty ones are left out."""

    index: int
    address: ipaddress.IPv6Address
    kind: str | None  # "RoCE v2", "IB/RoCE v1"
    interface: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port of an RDMA device, as /sys/class/infiniband/*/ports describes it."""

    device: str  # "mlx5_0"
    number: int  # from 1
    is_only: bool  # the only one of its device
    node_type: str  # "CA"; "RNIC" for iWARP
    link_layer: str  # "InfiniBand", "Ethernet", "Unspecified"
    state: str  # "ACTIVE", "INIT", "DOWN"
    phys_state: str  # "LinkUp", "Polling", "Disabled"
    rate_bytes_per_s: float | None
    lid: str | None
    gids: tuple[Gid, ...]
    pci: PciPath
    numa_node: int | None
    physical_function: str | None  # the RDMA device that this one is a virtual function of
    is_elsewhere: bool  # it is known here, and its file in /dev is not: of a host or another pod


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU. NVIDIA's driver numbers GPUs, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    name: str
    memory_bytes: int
    driver: str
    compute_capability: str  # "9.0"
    pci: PciPath
    numa_node: int | None


def interfaces(root: Path, addresses: Mapping[str, Sequence[str]]) -> tuple[Interface, ...]:
    """Reads the network interfaces, by name. Raises HolmesError if /sys/class/net is unreadable.

    Args:
      root: "/", or a folder with a recorded /sys.
      addresses: IPv4 and IPv6 addresses of each interface.
    """
    folder = root / "sys/class/net"
    try:
        names = sorted(os.listdir(folder), key=natural)
    except OSError as error:
        fix = "discovery needs Linux with /sys; elsewhere set HOLMES_ADDRESSES"
        problem = "cannot be read"
        raise HolmesError(str(folder), problem, found=error.strerror, fix=fix) from None
    found = [name for name in names if (folder / name).is_dir()]  # bonding_masters is a file
    return tuple(_interface(folder / name, addresses.get(name, ())) for name in found)


def _interface(folder: Path, addresses: Sequence[str]) -> Interface:
    device = folder / "device"
    pci, numa_node = _pci(device)
    speed_mbit_per_s = _number(folder / "speed")
    state = _text(folder / "operstate") or "unknown"
    parsed = [ipaddress.ip_address(address) for address in addresses]
    below = {path.name.removeprefix("lower_") for path in folder.glob("lower_*")}
    return Interface(
        name=folder.name,
        kind=_kind(folder),
        is_virtual=not device.exists(),
        driver=_link_name(device / "driver"),
        # -1 (also as an unsigned number) and 0: the driver does not know.
        speed_bytes_per_s=speed_mbit_per_s * 1e6 / 8
        if speed_mbit_per_s and 0 < speed_mbit_per_s < 2**31
        else None,
        state=state,
        # Some drivers never say "up".
        is_up=state == "up" or (state == "unknown" and _number(folder / "carrier") == 1),
        mtu_bytes=_number(folder / "mtu"),
        pci=pci,
        numa_node=numa_node,
        dev_port=_number(folder / "dev_port") or 0,
        master=_link_name(folder / "master"),
        lower=tuple(sorted(below | set((_text(folder / "bonding/slaves") or "").split()))),
        ipv4=tuple(str(address) for address in parsed if address.version == 4),
        ipv6=tuple(str(address) for address in parsed if address.version == 6),
    )


def _kind(folder: Path) -> str:
    if (hardware := _number(folder / "type")) in (LOOPBACK, IPOIB):
        return "loopback" if hardware == LOOPBACK else "ipoib"  # a bond of IPoIB too
    if (folder / "bonding").is_dir():
        return "bond"
    if match := re.search(r"^DEVTYPE=(\w+)", _text(folder / "uevent") or "", re.MULTILINE):
        return match[1]
    if (folder / "tun_flags").exists():
        return "tun"
    return "ethernet" if (folder / "device").exists() else "virtual"


def ports(root: Path) -> tuple[Port, ...]:
    """Reads the RDMA ports, in the order of their numbers; none if there is no RDMA."""
    devices = sorted((root / "sys/class/infiniband").glob("*"), key=lambda path: natural(path.name))
    elsewhere = _elsewhere(root)
    return tuple(port for device in devices for port in _ports(device, device.name in elsewhere))


def _elsewhere(root: Path) -> set[str | None]:
    """Finds the RDMA devices that programs here cannot open, though others can.

    The kernel shows a container those of its whole host, and whoever starts it gives it the files
    of its own.
    """
    openable = {path.name for path in (root / "dev/infiniband").glob("uverbs*")}
    known = (root / "sys/class/infiniband_verbs").glob("uverbs*")
    away = {_text(path / "ibdev") for path in known if path.name not in openable}
    return away if openable else set()


def natural(name: str) -> list[int | str]:
    """Returns a key that sorts numbers in names by their size.

    >>> sorted(["mlx5_10", "mlx5_9", "mlx5_bond_0"], key=natural)
    ['mlx5_9', 'mlx5_10', 'mlx5_bond_0']
    """
    parts = re.split(r"(\d+)", name)  # text and numbers by turns, so that like meets like
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _ports(device: Path, is_elsewhere: bool) -> list[Port]:
    folders = sorted(device.glob("ports/*"), key=lambda path: natural(path.name))
    pci, numa_node = _pci(device / "device")
    physical = sorted(path.name for path in device.glob("device/physfn/infiniband/*"))
    return [
        Port(
            device=device.name,
            number=int(folder.name),
            is_only=len(folders) == 1,
            node_type=_word(device / "node_type"),
            link_layer=_text(folder / "link_layer") or "unknown",
            state=_word(folder / "state"),
            phys_state=_word(folder / "phys_state"),
            rate_bytes_per_s=_rate(_text(folder / "rate")),
            lid=_text(folder / "lid"),
            gids=_gids(folder),
            pci=pci,
            numa_node=numa_node,
            physical_function=physical[0] if physical else None,
            is_elsewhere=is_elsewhere,
        )
        for folder in folders
    ]


def _word(path: Path) -> str:
    """Returns the word in "4: ACTIVE"."""
    return (_text(path) or "unknown").rpartition(": ")[2]


def _rate(text: str | None) -> float | None:
    """Returns the bytes per second of "200 Gb/sec (4X HDR)"."""
    match = re.match(r"([\d.]+) Gb/sec", text or "")
    return float(match[1]) * 1e9 / 8 if match else None


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for path in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
        text = _text(path)
        if text is None or int(address := ipaddress.IPv6Address(text)) == 0:
            continue
        kind, interface = (_text(port / "gid_attrs" / x / path.name) for x in ("types", "ndevs"))
        found.append(Gid(index=int(path.name), address=address, kind=kind, interface=interface))
    return tuple(found)


def default_routes(root: Path) -> list[str]:
    """Reads the interfaces with a default route, the preferred one first; IPv4 before IPv6."""
    found = []
    for line in (_text(root / "proc/net/route") or "").splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask = line.split()[:8]
        if int(destination, 16) == int(mask, 16) == 0 and int(flags, 16) & ROUTE_IS_UP:
            found.append((int(metric), name))
    for line in (_text(root / "proc/net/ipv6_route") or "").splitlines():
        destination, length, _, _, _, six_metric, _, _, six_flags, name = line.split()
        is_up = int(six_flags, 16) & ROUTE_IS_UP and not int(six_flags, 16) & REJECTS
        if int(destination, 16) == int(length, 16) == 0 and is_up:
            found.append((2**32 + int(six_metric, 16), name))
    return list(dict.fromkeys(name for _, name in sorted(found)))


def kernel_addresses() -> dict[str, list[str]]:
    """Reads the IPv4 and IPv6 addresses of the interfaces; `eth0` has the addresses of `eth0:1`."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [e.address for e in entries if e.family.name in ("AF_INET", "AF_INET6")]
        found.setdefault(name.partition(":")[0], []).extend(addresses)
    return found


def gpus(root: Path) -> tuple[Gpu, ...]:
    """Asks NVIDIA's driver for the GPUs; none without it or without the package nvidia-ml-py."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return ()
    found = []
    with suppress(nvml.NVMLError):  # no driver, or no right to ask it
        nvml.nvmlInit()
        driver = nvml.nvmlSystemGetDriverVersion()
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # it has fallen off its bus
                found.append(_gpu(root, nvml, index, driver))
        nvml.nvmlShutdown()
    return tuple(found)


def _gpu(root: Path, nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    domain, _, rest = nvml.nvmlDeviceGetPciInfo(handle).busId.lower().partition(":")
    pci, numa_node = _pci(root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest}")
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        driver=driver,
        compute_capability=".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        pci=pci,
        numa_node=numa_node,
    )


def _pci(device: Path) -> tuple[PciPath, int | None]:
    """Finds the PCI path of a device of /sys, and the NUMA node nearest to it.

    A device that hangs on a PCI device, such as a virtio NIC, has the path of the PCI device.
    """
    real = Path(os.path.realpath(device))
    path = tuple(part for part in real.parts if PCI.fullmatch(part))
    while path and real.name != path[-1]:
        real = real.parent
    node = _number(real / "numa_node")
    return path, None if node == -1 else node  # -1: the firmware does not say


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def _link_name(path: Path) -> str | None:
    return Path(os.path.realpath(path)).name if path.is_symlink() else None
