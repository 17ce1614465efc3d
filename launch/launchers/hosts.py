"""The hosts file: how each node of a topology is reached over SSH.

defaults: {folder: /home/me/HolmesJAX, python: .venv/bin/python}
hosts:
  - {node: ib-0, ssh: me@10.0.0.4, addresses: {infiniband: [10.1.0.4], ethernet: [10.0.0.4]}}
  - {node: roce-0, ssh: me@gateway.example.com, port: 2222}
"""

import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.files import places, schema, yaml_files
from holmesjax.files.yaml_files import Document, Keys
from holmesjax.topology.fabrics import ClusterFabric
from holmesjax.topology.machines import Topology
from holmesjax.transport import addresses as network_addresses
from launch.launchers.variables import wrong_names

Name = Annotated[str, Field(min_length=1, strict=True)]
NO_HOST = re.compile(r"""[/\[\]`"'$\\;&<>|(){}]""")  # ssh refuses most of them, too
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachEntry:
    """The settings that hosts share; a missing one is as on this machine, or is left to `ssh`."""

    port: Port | None = None
    identity_file: Name | None = None  # a private key on this machine
    ssh_options: tuple[Name, ...] = ()  # "ProxyJump=gateway", as for `ssh -o`
    folder: Name | None = None  # the checkout on the host; None: this process's current folder
    python: Name | None = None  # in it, or absolute, or found in PATH; None: this process's
    # The run folder there; None: it is where the launcher has it. One that the launcher does not
    # see is a store of its own: its node writes its part of a checkpoint into it.
    run_dir: Name | None = None
    env: dict[str, str] = field(default_factory=dict)  # more variables


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry(ReachEntry):
    """The entry of one node."""

    node: Name  # its name in the topology
    ssh: Name | None = None  # HOST or USER@HOST, as for `ssh`; None: the name of the node
    addresses: dict[ClusterFabric, tuple[Name, ...]] = field(default_factory=dict)  # of NICs


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsEntry:
    """The whole file."""

    hosts: tuple[HostEntry, ...]
    defaults: ReachEntry = ReachEntry()


@dataclass(frozen=True, kw_only=True, slots=True)
class SshHost:
    """The way to reach a node; only `ssh` may add to it."""

    destination: str
    port: int | None
    identity_file: str | None
    ssh_options: tuple[str, ...]
    folder: str
    python: str
    run_dir: str | None
    env: dict[str, str]
    addresses: dict[str, list[str]]  # by fabric; empty: the process finds them itself


def read(path: str | Path, topology: Topology) -> dict[str, SshHost]:
    """Reads the hosts of all nodes, by name. Raises `Mistakes` with all that is wrong."""
    document = yaml_files.read(path, ConfigError)
    file, mistakes = schema.read(HostsEntry, document)
    for check in (_nodes_match, _destinations_differ, _addresses_differ, _defaults_make_sense):
        mistakes += schema.findings(check, document, file, topology)
    for i, host in enumerate(_known_hosts(file)):
        keys = ("hosts", i)
        mistakes += schema.findings(_destination_makes_sense, document, keys, host)
        mistakes += schema.findings(_addresses_suffice, document, keys, host, topology)
        mistakes += schema.findings(_reach_makes_sense, document, keys, host)
    if mistakes:
        raise Mistakes(mistakes)
    entry: HostsEntry = schema.build(file)
    return {host.node: _filled(host, entry.defaults) for host in entry.hosts}


def _filled(host: HostEntry, defaults: ReachEntry) -> SshHost:
    def of(name: str) -> Any:
        own = getattr(host, name)
        return getattr(defaults, name) if own is None else own

    identity_file = of("identity_file")
    return SshHost(
        destination=host.ssh or host.node,
        port=of("port"),
        identity_file=identity_file and os.path.expanduser(identity_file),
        ssh_options=(*host.ssh_options, *defaults.ssh_options),  # for `ssh` the first one counts
        folder=of("folder") or os.getcwd(),
        python=of("python") or sys.executable,
        run_dir=of("run_dir"),
        env={**defaults.env, **host.env},
        addresses={
            fabric: list(addresses) for fabric, addresses in host.addresses.items() if addresses
        },
    )


# Rules of a file beyond the type of each value. A check reads `schema.Known` entries, so that it
# can run on a file with other mistakes.


def _known_hosts(file: Any) -> tuple[Any, ...]:
    return schema.known_values(file).get("hosts", ())


def _nodes_match(document: Document, file: HostsEntry, topology: Topology) -> Iterator[HolmesError]:
    names = [node.name for node in topology.nodes]
    seen: set[str] = set()
    for i, host in enumerate(file.hosts):
        keys = ("hosts", i, "node")
        if host.node not in names:
            problem = f"no such node in the topology {topology.name}"
            fix = schema.near(host.node, names)
            yield document.mistake(keys, problem, found=host.node, fix=fix)
        elif host.node in seen:
            fix = "remove one of the two"
            yield document.mistake(keys, "is described twice", found=host.node, fix=fix)
        seen.add(host.node)
    if missing := [name for name in names if name not in seen]:
        problem = f"lacks nodes of the topology {topology.name}"
        fix = f"add `- {{node: {missing[0]}, ssh: <how it is reached>}}`"
        yield document.mistake(("hosts",), problem, found=f"no {', '.join(missing)}", fix=fix)


def _destinations_differ(
    document: Document, file: HostsEntry, _: Topology
) -> Iterator[HolmesError]:
    seen: dict[tuple[str, int | None], str] = {}
    for i, host in enumerate(file.hosts):
        destination = host.ssh or host.node
        reached = (destination.rpartition("@")[2].lower(), host.port or file.defaults.port)
        if seen.setdefault(reached, host.node) != host.node:
            keys, found = ("hosts", i, "ssh"), f"{destination}, as {seen[reached]}"
            fix = "a node is a host of its own: correct one of the two"
            yield document.mistake(keys, "is reached as another node is", found=found, fix=fix)


def _addresses_differ(document: Document, file: HostsEntry, _: Topology) -> Iterator[HolmesError]:
    seen: dict[str, str] = {}
    for i, host in enumerate(file.hosts):
        for fabric, addresses in host.addresses.items():
            spelled = [*map(network_addresses.canonical, addresses)]
            for j, address in enumerate(spelled):
                keys = ("hosts", i, "addresses", fabric, j)
                if not network_addresses.is_of_one_host(address):
                    fix = "write an address such as 10.0.0.4, fd00::4 or fe80::4%eth0"
                    problem = "is no address of a host"
                    if network_addresses.needs_scope(address):
                        problem = "is link-local, and lacks its interface behind %"
                    yield document.mistake(keys, problem, found=address, fix=fix)
                elif address in spelled[:j]:
                    fix = "remove one of the two"
                    yield document.mistake(keys, "is there twice", found=address, fix=fix)
                elif seen.setdefault(address, host.node) != host.node:
                    found = f"{address}, as {seen[address]}"
                    fix = "correct one of the two"
                    problem = "is the address of another node"
                    yield document.mistake(keys, problem, found=found, fix=fix)


def _destination_makes_sense(
    document: Document, keys: Keys, host: HostEntry
) -> Iterator[HolmesError]:
    destination = host.ssh or host.node
    if not _is_destination(destination):
        fix = "write HOST or USER@HOST, and the rest in port, identity_file and ssh_options"
        problem = "is nothing that ssh can connect to"
        yield document.mistake((*keys, "ssh"), problem, found=destination, fix=fix)


def _is_destination(text: str) -> bool:
    """Tells whether ssh can connect to it.

    >>> [_is_destination(text) for text in ("ada@gpu-7", "fe80::1%eth0", "gpu-7:2222", "[::1]")]
    [True, True, False, False]
    """
    user, has_user, host = text.rpartition("@")
    if re.search(r"\s", text) or user.startswith("-") or (has_user and not user):
        return False
    if ":" in host:
        try:
            return bool(ipaddress.IPv6Address(host))
        except ValueError:
            return False
    return bool(host) and not host.startswith("-") and not NO_HOST.search(host)


def _addresses_suffice(
    document: Document, keys: Keys, host: HostEntry, topology: Topology
) -> Iterator[HolmesError]:
    """Refuses addresses that lack a fabric of the node's traffic."""
    given = {fabric for fabric, addresses in host.addresses.items() if addresses}
    if given and host.node in [node.name for node in topology.nodes]:
        cluster = topology.cluster_of(host.node)
        links = [link for ends, link in topology.links.items() if cluster.name in ends]
        needed = {cluster.fabric, *(link.fabric for link in links)} - {"local"}
        if missing := sorted(needed - given):
            problem = f"lacks a fabric that {host.node} sends over"
            found = f"only {', '.join(sorted(given))}"
            fix = f"add {missing[0]}: [<its address there>], or leave all addresses out"
            yield document.mistake((*keys, "addresses"), problem, found=found, fix=fix)


def _defaults_make_sense(
    document: Document, file: HostsEntry, _: Topology
) -> Iterator[HolmesError]:
    yield from schema.findings(_reach_makes_sense, document, ("defaults",), file.defaults)


def _reach_makes_sense(document: Document, keys: Keys, reach: ReachEntry) -> Iterator[HolmesError]:
    for i, option in enumerate(reach.ssh_options):
        if not re.match(r"[A-Za-z]+=.", option):
            fix = "write it as ProxyJump=gateway.example.com"
            place = (*keys, "ssh_options", i)
            yield document.mistake(place, "is no option of ssh", found=option, fix=fix)
    yield from wrong_names(document, (*keys, "env"), reach.env)
    if reach.run_dir and (problem := places.mistake_in_run_dir(reach.run_dir)):
        fix = "write /data/runs/llama, or s3://BUCKET/NAME, say"
        yield document.mistake((*keys, "run_dir"), problem, found=reach.run_dir, fix=fix)
    if reach.identity_file and not Path(reach.identity_file).expanduser().is_file():
        fix = "name the file of a private key on this machine"
        place = (*keys, "identity_file")
        yield document.mistake(place, "no such file", found=reach.identity_file, fix=fix)
