"""Addresses of processes: IPv4, IPv6 with or without a scope, and names of hosts. No JAX.

A place is an address with a port: `10.0.0.1:7000`, `[fd00::1]:7000`, `[fe80::1%eth0]:7000`. The
scope of a link-local address, behind %, is the interface of whoever uses the address. So it means
something on one machine only, and a caller puts its own there. `process 3@relay:7443` is the place
of whoever has this name at a relay.
"""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

MAX_PORT = 65535
RELAYED = "@"  # between the name of a process and the address of the relay
IPV4_SETTINGS = Path("/proc/sys/net/ipv4/conf")
ARP_SYSCTL = (
    "net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=2"
)


def show(address: str, port: int) -> str:
    """Writes a place.

    >>> show("10.0.0.1", 7000), show("fe80::1%eth0", 7000)
    ('10.0.0.1:7000', '[fe80::1%eth0]:7000')
    """
    name, relayed, address = address.rpartition(RELAYED)
    if relayed:
        return f"{name}{relayed}{show(address, port)}"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse(text: str) -> tuple[str, int]:
    """Reads a place; without a port the port is 0.

    An IPv6 address with a port has brackets: without them the port would be its last part.
    Raises ValueError for what is no place.

    >>> parse("[fe80::1%eth0]:7000"), parse("node-3:7000"), parse("fd00::1")
    (('fe80::1%eth0', 7000), ('node-3', 7000), ('fd00::1', 0))
    >>> parse("launcher@[fd00::1]:7443")
    ('launcher@fd00::1', 7443)
    """
    name, relayed, of_relay = text.rpartition(RELAYED)
    if relayed:
        place = parse(of_relay)
        if not (name and place[1]):
            raise ValueError(f"{text!r} needs a name, and the port of a relay")
        return f"{name}{relayed}{place[0]}", place[1]
    if text.startswith("["):
        address, closing, port = text[1:].partition("]")
        if not closing or (port and not port.startswith(":")):
            raise ValueError(f"{text!r} has no ] before its port")
        colon, port = port[:1], port[1:]
    elif is_ip(text):  # fd00::1
        if ":" in text.partition("%")[2]:
            raise ValueError(f"{text!r} needs brackets, as in [ADDRESS]:PORT")
        address, colon, port = text, "", ""
    else:
        address, colon, port = text.partition(":")
    if not address or address.startswith("-") or any(map(str.isspace, address)):
        raise ValueError(f"{text!r} has no address")
    if ":" in address and not is_ip(address):
        raise ValueError(f"{address!r} is no IPv6 address")
    if not colon:
        return address, 0
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= MAX_PORT):
        raise ValueError(f"{text!r} has no port from 1 to {MAX_PORT}; IPv6 needs [ADDRESS]:PORT")
    return address, int(port)


def is_ip(text: str) -> bool:
    """Whether it is an address, and not the name of a host."""
    return _parsed(text) is not None


def canonical(text: str) -> str:
    """An address as the system spells it; the name of a host as it is.

    >>> canonical("FD00:0:0::1"), canonical("fe80::0:4%eth0"), canonical("node-3")
    ('fd00::1', 'fe80::4%eth0', 'node-3')
    """
    found = _parsed(text)
    return text if found is None else str(found)


def is_of_one_host(text: str) -> bool:
    """Whether it is an address that a host can have for itself.

    >>> [is_of_one_host(text) for text in ("10.0.0.4", "fe80::4%eth0", "fe80::4", "::", "node-4")]
    [True, True, False, False, False]
    """
    found = _parsed(text)
    if found is None or found.is_unspecified or found.is_multicast or text == "255.255.255.255":
        return False
    return not needs_scope(text)


def needs_scope(text: str) -> bool:
    """Whether it is a link-local address of IPv6 that lacks its interface."""
    found = _parsed(text)
    return isinstance(found, ipaddress.IPv6Address) and found.is_link_local and not found.scope_id


def is_loopback(text: str) -> bool:
    """Whether it is an address of loopback; the name of a host is none."""
    found = _parsed(text)
    return found is not None and found.is_loopback


def as_seen_from(address: str, source: str | None) -> str:
    """Returns another's address as it is used here, where `source` is this end's own address.

    >>> as_seen_from("fe80::2%ib0", "fe80::1%eth3"), as_seen_from("fd00::2", "fe80::1%eth3")
    ('fe80::2%eth3', 'fd00::2')
    """
    theirs, mine = _parsed(address), _parsed(source or "")
    if not (isinstance(theirs, ipaddress.IPv6Address) and theirs.is_link_local):
        return address
    if not (isinstance(mine, ipaddress.IPv6Address) and mine.scope_id):
        return address
    return f"{address.partition('%')[0]}%{mine.scope_id}"


def resolve(address: str, port: int) -> Iterator[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Yields the family and the system's form of each address that a name leads to.

    Raises OSError if it leads nowhere.
    """
    if port > MAX_PORT:  # the system would take its lower bits
        raise OSError(errno.EINVAL, f"port must be 0-{MAX_PORT}")
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of more than 63 letters, say
        raise OSError(errno.EINVAL, f"no name of a host: {error}") from None
    for family, _, _, _, place in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            yield family, place


def of(place: tuple[object, ...]) -> tuple[str, int]:
    """Returns the address, with its scope, and the port of what the system calls a place."""
    address, port, *more = place
    assert isinstance(address, str), f"{place} is of another family"
    assert isinstance(port, int), f"{place} is of another family"
    scope = more[1] if len(more) == 2 else 0
    if isinstance(scope, int) and scope and "%" not in address:
        address = f"{address}%{socket.if_indextoname(scope)}"
    return address, port


def twins(address: str, peer: str | None = None) -> tuple[str, ...]:
    """Returns the interface of an address of this host, and others in the same subnet.

    Nothing, if there are no others, or if a peer is not in the subnet: others may have the route to
    it. The scope of a link-local address names its interface already.
    """
    wanted = _parsed(address)
    if wanted is None or wanted.is_loopback or "%" in address:
        return ()
    names, network = [], None
    found = psutil.net_if_addrs()
    for name, entries in found.items():
        for entry in entries:
            if entry.address == address and entry.netmask:
                ones = bin(int(ipaddress.ip_address(entry.netmask))).count("1")
                network = ipaddress.ip_network((address, ones), strict=False)
                names.append(name)
    if network is None or (peer is not None and _parsed(peer) not in network):
        return ()
    for name, entries in found.items():
        others = (_parsed(entry.address) for entry in entries)
        if name not in names and any(other in network for other in others if other is not None):
            names.append(name)
    return tuple(names) if len(names) > 1 else ()


def mixed_up(used: Iterable[str]) -> list[str]:
    """The interfaces of addresses in use whose traffic another of them may carry.

    They share a subnet, and the system's settings do not keep packets on their own interface.
    """
    of = {names[0]: (address, names) for address in used if (names := twins(address))}
    return sorted(
        name
        for name, (address, names) in of.items()
        if not stays_on(name, address) and any(other in names[1:] for other in of)
    )


def stays_on(device: str, address: str) -> bool:
    """Whether packets for an address come in by its own interface alone, and are taken there.

    Linux answers for each IPv4 address on every interface of a subnet unless `arp_ignore` forbids
    it, and with `rp_filter` 1 it drops what came by another way than its answer would take. Unless
    `arp_announce` is 2, what leaves by another interface teaches the peer that one's address.
    """
    if ":" in address:
        return True
    try:
        [ignore, reverse, announce] = [
            max(int((IPV4_SETTINGS / one / name).read_text()) for one in ("all", device))
            for name in ("arp_ignore", "rp_filter", "arp_announce")
        ]
    except (OSError, ValueError):
        return False
    return ignore > 0 and reverse != 1 and announce == 2


def keep_on_nic(sock: socket.socket) -> None:
    """Lets a connection send by the interface of its address, where others share the peer's subnet.

    Without this all packets would leave by one of them, whatever their source. Raises OSError if
    the connection is lost.
    """
    (address, _), (peer, _) = of(sock.getsockname()), of(sock.getpeername())
    names = twins(address, peer) if hasattr(socket, "SO_BINDTODEVICE") else ()
    if not names or not stays_on(names[0], address):
        return
    with contextlib.suppress(PermissionError):  # Linux before 5.7 asks for CAP_NET_RAW
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, names[0].encode())


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
