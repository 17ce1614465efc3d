"""Addresses as they are: IPv6, scopes, and several NICs in one subnet of a namespace."""

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax.transport import addresses, connections
from tests.labs import needs_lab
from tests.transport.calls import DEADLINE_S, GUEST, Inn

ROOT = Path(__file__).parents[2]
SIZE = 1 << 20
SERVER = """
import sys
from holmesjax.transport import connections
from tests.transport.calls import Inn
inn = Inn(sock=connections.listen(sys.argv[1]))
print(inn.address[1], flush=True)
theirs = inn.entered.get(timeout=240)
theirs.send({"length": len(theirs.receive()["text"])})
sys.stdin.read()
"""
CLIENT = """
import sys
from tests.transport.calls import call_at
ours = call_at((sys.argv[1], int(sys.argv[2])), source=sys.argv[3], encrypt=False)
ours.send({"text": "x" * int(sys.argv[4])})
print(ours.receive()["length"], *ours.sock.getpeername()[:1])
"""


@pytest.mark.parametrize(
    "text, found",
    [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("[10.0.0.1]:7000", ("10.0.0.1", 7000)),  # as a pod's file writes it
        ("[fe80::1%eth0]:7000", ("fe80::1%eth0", 7000)),
        ("fe80::1%eth0", ("fe80::1%eth0", 0)),
        *((bad, None) for bad in ("", ":7", "[::1", "[::1]7", "a:0", "a:65536", "a:b:7", "a: 7")),
        ("fe80::1%eth0:7000", None),
    ],
)
def test_a_place_is_read_and_written(text, found):
    if found is None:
        with pytest.raises(ValueError, match=r"no |needs"):
            addresses.parse(text)
        return
    assert addresses.parse(text) == found
    if found[1]:
        assert addresses.parse(addresses.show(*found)) == found


def test_a_call_over_ipv6_names_both_ends():
    inn = Inn(sock=connections.listen("::1"))
    try:
        with contextlib.closing(inn.call(source="::1")) as ours:
            with contextlib.closing(inn.entered.get(timeout=DEADLINE_S)) as theirs:
                assert theirs.hello == GUEST
            assert inn.address[0] == ours.sock.getpeername()[0] == "::1"
    finally:
        inn.admission.close()


@pytest.fixture
def subnet():
    """Two hosts, each with two NICs on one bridge; runs a program on one of them."""
    lab = f"holmes-t{secrets.token_hex(2)}"
    lines = [f"ip netns add {lab}{end}" for end in "abs"]
    lines += [f"ip -n {lab}s link add name br0 type bridge", f"ip -n {lab}s link set br0 up"]
    for number, (end, nic) in enumerate([("a", "x0"), ("a", "x1"), ("b", "y0"), ("b", "y1")], 1):
        there = f"ip -n {lab}{end}"
        lines += [
            f"ip -n {lab}s link add p{number} type veth peer name {nic} netns {lab}{end}",
            f"ip -n {lab}s link set p{number} master br0 up",
            f"{there} addr add 10.9.0.{number}/24 dev {nic}",
            f"{there} addr add fe80::{number}/64 dev {nic} nodad",
            f"{there} link set {nic} up",
        ]
    for end in "ab":
        lines.append(f"ip netns exec {lab}{end} sysctl -qw {addresses.ARP_SYSCTL}")
    with contextlib.ExitStack() as stack:
        for end in "abs":
            gone = ["ip", "netns", "del", lab + end]
            stack.callback(subprocess.run, gone, check=False, capture_output=True)
        subprocess.run(["sh", "-ec", "\n".join(lines)], check=True)

        def begin(end, *words):
            child = subprocess.Popen(
                ["ip", "netns", "exec", lab + end, *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield begin


@needs_lab
@pytest.mark.parametrize(
    "listens, called, source",
    [
        # The scope of a caller is its own, whatever interface the other end has.
        pytest.param("fe80::4%y1", "fe80::4%y1", "fe80::2%x1", id="link-local"),
        pytest.param("10.9.0.4", "10.9.0.4", "10.9.0.2", id="IPv4"),
    ],
)
def test_each_nic_of_a_subnet_carries_its_own_traffic(subnet, listens, called, source):
    """Linux would send by the first NIC of a subnet, whatever the source is."""
    server = subnet("b", sys.executable, "-c", SERVER, listens)
    port = server.stdout.readline().strip()
    client = subnet("a", sys.executable, "-c", CLIENT, called, port, source, str(SIZE))
    told, _ = client.communicate(timeout=DEADLINE_S)
    assert told.split()[0] == str(SIZE)
    counters = [f"/sys/class/net/{nic}/statistics/tx_bytes" for nic in ("x0", "x1")]
    by_first, by_second = map(int, subnet("a", "cat", *counters).communicate()[0].split())
    assert by_first < SIZE / 10 < SIZE < by_second


def test_nics_are_mixed_up_only_where_several_of_a_subnet_are_used(monkeypatch):
    """Two interfaces are in one subnet, and the system's settings let either carry all traffic."""
    entry = lambda address: SimpleNamespace(address=address, netmask="255.255.255.0")
    nics = {"eth0": [entry("10.0.0.1")], "eth1": [entry("10.0.0.2")], "ib0": [entry("10.1.0.1")]}
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: nics)
    monkeypatch.setattr(addresses, "stays_on", lambda device, address: False)
    assert addresses.mixed_up(["10.0.0.1", "10.0.0.2", "10.1.0.1"]) == ["eth0", "eth1"]
    assert addresses.mixed_up(["10.0.0.1", "10.1.0.1"]) == []
    monkeypatch.setattr(addresses, "stays_on", lambda device, address: device == "eth0")
    assert addresses.mixed_up(["10.0.0.1", "10.0.0.2"]) == ["eth1"]
