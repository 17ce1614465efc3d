"""Finds what is wrong with the nodes of a run before it starts: facts in, findings out. No JAX.

`agent` gathers the facts on every node, and `launch doctor` prints the findings. A finding names
the check, the nodes and the result. If something is wrong, it says what to do.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holmesjax import units
from holmesjax.hosts.agent_messages import KernelFacts, NicFacts, NoAnswer, NodeFacts
from holmesjax.topology import catalogue, windows
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.machines import Node, Topology
from holmesjax.transport import addresses

Level = Literal["ok", "warning", "problem"]

MAX_CLOCK_S = 2.0  # apart: more would mislead whoever compares logs
MIN_FILES = 4096  # sockets of a large domain, and the files of a checkpoint
SLOW_SHARE = 0.9  # of the rate that the topology says
# Kinds of GPUs that NVIDIA's driver does not know, which alone is asked.
OTHER_MAKERS = {
    kind
    for kind, (platform, name, _) in catalogue.AS_JAX_SEES_THEM.items()
    if platform == "gpu" and not name.startswith("NVIDIA")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    what: str  # "clocks"
    level: Level
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.what}: {self.text}"
        return f"{line}\n         fix: {self.fix}" if self.fix else line


def findings(
    topology: Topology,
    facts: Mapping[str, NodeFacts],
    *,
    is_rehearsal: bool,
    needed_bytes: float,
    streams: int,
    url: str | None = None,
    has_partners: bool = False,
) -> list[Finding]:
    """Checks the facts of all nodes together.

    Args:
      topology: the machines, as the run file describes them.
      facts: of the nodes that answered. `now_s` is how far ahead of this machine the clock is.
      is_rehearsal: this machine, or a lab, stands for all nodes: devices and NICs do not count.
      needed_bytes: that the run folder must have room for.
      streams: connections between two processes, at least.
      url: of the run folder in an object store; each node then works in a folder of its own.
      has_partners: whether parts of checkpoints stay in the memory of nodes.
    """
    found = [
        _host_names(topology, facts),
        *_versions(facts),
        _clocks(facts),
        _open_files(facts),
        _windows(topology, facts, streams),
        _mtus(topology, facts),
        _twins(facts),
        _run_folder(facts, needed_bytes, url),
        *([_memory(facts)] if has_partners else []),
    ]
    if is_rehearsal:
        text = "not counted: this machine, or a lab, stands for all nodes"
        return [*found, Finding(what="GPUs and NICs", level="ok", text=text)]
    return [
        *found,
        _locked_memory(topology, facts),
        _gpus(topology, facts),
        _nics(topology, facts),
        *_nic_names(topology, facts),
    ]


def _host_names(topology: Topology, facts: Mapping[str, NodeFacts]) -> Finding:
    bad = {}
    for node, fact in facts.items():
        cluster = topology.cluster_of(node)
        here = fact.addresses.get(cluster.fabric, [])
        if len(cluster.nodes) == 1 or any(map(addresses.is_loopback, here)):
            continue  # nobody looks for it by its name, or all nodes are on one machine
        address = fact.resolves_to
        if address is None or addresses.is_loopback(address):
            bad[node] = f"{fact.host} resolves to {address or 'nothing'}"
    return _judge(
        "host names",
        bad,
        level="warning",
        good="lead to addresses that others can reach",
        fix="give the name its network address in /etc/hosts or the DNS: gloo, JAX's collectives "
        "on CPUs, listens where it leads",
    )


def _versions(facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    values: dict[str, dict[str, str | None]] = defaultdict(dict)
    for node, fact in facts.items():
        values["Python"][node] = fact.python
        values["the source of HolmesJAX"][node] = fact.source
        values["NVIDIA's driver"][node] = ", ".join(fact.drivers) or None
        for package, version in fact.packages.items():
            values[package][node] = version
    differ = {what: of for what, of in values.items() if len(set(of.values())) > 1}
    for what, of in differ.items():
        fix = "install the same on all nodes, from one checkout and constraints.txt"
        # Between clusters it may differ; inside one, NCCL asks for the same.
        level: Level = "warning" if what == "NVIDIA's driver" else "problem"
        yield Finding(what="versions", level=level, text=f"{what}: {_groups(of)}", fix=fix)
    if not differ:
        [one, *_] = facts.values()
        text = f"Python {one.python}, JAX {one.packages['jax']}, source {one.source}"
        yield Finding(what="versions", level="ok", text=f"{text}, everywhere")


def _clocks(facts: Mapping[str, NodeFacts]) -> Finding:
    bad = {n: f"{f.now_s:+.1f} s" for n, f in facts.items() if abs(f.now_s) > MAX_CLOCK_S}
    most_s = max(abs(fact.now_s) for fact in facts.values())
    good = f"at most {most_s:.2f} s from this machine's"
    return _judge("clocks", bad, level="warning", good=good, fix="run an NTP client there")


def _open_files(facts: Mapping[str, NodeFacts]) -> Finding:
    limits = {node: fact.max_open_files for node, fact in facts.items()}
    bad = {n: f"at most {k}" for n, k in limits.items() if k is not None and k < MIN_FILES}
    # Processes raise the soft limit themselves.
    fix = f"ulimit -Hn {MIN_FILES}, or LimitNOFILE= where a service starts the processes"
    return _judge("open files", bad, level="warning", good="enough", fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filling:
    """The connections that fill a link between clusters."""

    rate_bytes_per_s: float
    round_trip_s: float
    streams: int

    @property
    def window_bytes(self) -> float:
        """That each connection must have on its way."""
        return self.rate_bytes_per_s * self.round_trip_s / self.streams


def _windows(topology: Topology, facts: Mapping[str, NodeFacts], streams: int) -> Finding:
    """Compares what a connection may send ahead with what fills the longest link of its cluster."""
    longest: dict[str, _Filling] = {}
    first = {cluster.name: cluster.nodes[0].name for cluster in topology.clusters}
    for (one, other), link in topology.links.items():
        rate = link.bandwidth_bytes_per_s
        round_trip_s = topology.round_trip_s(first[one], first[other])
        filling = max(streams, windows.streams_that_fill(rate, round_trip_s))
        fill = _Filling(rate_bytes_per_s=rate, round_trip_s=round_trip_s, streams=filling)
        for end in (one, other):
            known = longest.get(end, fill)
            longest[end] = max(known, fill, key=lambda each: each.window_bytes)
    bad, most = {}, 0
    for node, fact in facts.items():
        needed, window = longest.get(topology.cluster_of(node).name), fact.max_window_bytes
        if needed is None or window is None or window >= needed.window_bytes:
            continue
        carried = windows.carried_bytes_per_s(
            needed.rate_bytes_per_s, needed.round_trip_s, needed.streams, window
        )
        bad[node] = (
            f"at most {units.show(window, 'B')}, {units.show(needed.window_bytes, 'B')} needed: "
            f"{needed.streams} connections carry {units.show(carried, 'b/s')} of "
            f"{units.show(needed.rate_bytes_per_s, 'b/s')}"
        )
        most = max(most, windows.buffer_bytes(needed.window_bytes))
    fix = (
        f"sysctl -w net.ipv4.tcp_wmem='4096 65536 {most}' net.ipv4.tcp_rmem='4096 131072 {most}' "
        "lets each connection send as much ahead as its link needs"
    )
    return _judge("long links", bad, level="warning", good="windows can fill them", fix=fix)


def _locked_memory(topology: Topology, facts: Mapping[str, NodeFacts]) -> Finding:
    limits = {
        node: fact.max_locked_bytes
        for node, fact in facts.items()
        if fact.gpus and FABRICS[topology.cluster_of(node).fabric].is_rdma
    }
    bad = {n: f"at most {units.show(k, 'B')}" for n, k in limits.items() if k is not None}
    fix = "ulimit -l unlimited: RDMA locks the memory that it sends from"
    return _judge("locked memory", bad, level="problem", good="unlimited for RDMA", fix=fix)


def _mtus(topology: Topology, facts: Mapping[str, NodeFacts]) -> Finding:
    """Compares MTUs: large packets vanish on the way to an interface with a smaller one."""
    networks: dict[str, dict[str, str]] = defaultdict(dict)
    for node, fact in facts.items():
        for fabric, sizes in fact.mtu_bytes.items():
            home = "" if fabric == "ethernet" else f" of {topology.cluster_of(node).name}"
            if sizes and fabric != "local":
                networks[fabric + home][node] = ", ".join(map(str, sizes))
    bad = [f"{name}: {_groups(of)}" for name, of in networks.items() if len(set(of.values())) > 1]
    if not bad:
        return Finding(what="MTU", level="ok", text="the same at all ends of each network")
    fix = "set the same on all interfaces of a network: ip link set dev NAME mtu BYTES"
    return Finding(what="MTU", level="warning", text="; ".join(bad), fix=fix)


def _twins(facts: Mapping[str, NodeFacts]) -> Finding:
    """Asks whether each NIC of a subnet can carry its own traffic."""
    bad = {node: ", ".join(fact.twins) for node, fact in facts.items() if fact.twins}
    return _judge(
        "NICs of one subnet",
        {node: f"{names}: one of them carries the traffic of all" for node, names in bad.items()},
        level="warning",
        good="each carries its own traffic",
        fix=f"sysctl -w {addresses.ARP_SYSCTL}: then connections are bound to their NIC",
    )


def _run_folder(facts: Mapping[str, NodeFacts], needed_bytes: float, url: str | None) -> Finding:
    bad, needed = {}, units.show(needed_bytes, "B")
    for node, fact in facts.items():
        folder = fact.folder
        if folder.problem is not None:
            bad[node] = f"cannot write there ({folder.problem})"
        elif not folder.is_shared and url is None:
            bad[node] = "another folder than here"
        elif folder.free_bytes < needed_bytes:
            bad[node] = f"{units.show(folder.free_bytes, 'B')} free, {needed} needed"
    fix = "put run.dir on a file system that all nodes share and may write to, with enough room"
    how = f"on each node, for {url}" if url else "shared"
    good = f"{how}, writable, room for the {needed} of its checkpoints"
    return _judge("run folder", bad, level="problem", good=good, fix=fix)


def _memory(facts: Mapping[str, NodeFacts]) -> Finding:
    bad = {node: "goes with the last session" for node, fact in facts.items() if fact.loses_memory}
    return _judge(
        "partner's memory",
        bad,
        level="warning",
        good="/dev/shm outlives sessions",
        fix="loginctl enable-linger USER, or RemoveIPC=no in /etc/systemd/logind.conf: else a "
        "start by ssh finds no copies",
    )


def _gpus(topology: Topology, facts: Mapping[str, NodeFacts]) -> Finding:
    bad, unseen = dict[str, str](), set[str]()
    for node, fact in facts.items():
        wanted, gpus = topology.node(node), fact.gpus
        model = wanted.device.name.split("_")[0]  # "a100_80gb"
        if model == "cpu":
            continue
        if wanted.device.name in OTHER_MAKERS:
            unseen.add(wanted.device.name)
            continue
        others = sorted({name for name in gpus if model.upper() not in name.upper()})
        if len(gpus) < wanted.num_devices:
            bad[node] = f"{len(gpus)} of {wanted.num_devices}"
        elif others:
            bad[node] = f"{', '.join(others)} for {wanted.device.name}"
    fix = "correct the topology, or see nvidia-smi there"
    good = "as the topology says"
    if unseen:
        good = f"not looked at: {', '.join(sorted(unseen))}; NVIDIA's driver alone is asked"
    return _judge("GPUs", bad, level="problem", good=good, fix=fix)


def _nics(topology: Topology, facts: Mapping[str, NodeFacts]) -> Finding:
    bad = {
        node: "; ".join(complaints)
        for node, fact in facts.items()
        if (complaints := list(_complaints(topology.node(node), fact.nics)))
    }
    fix = "correct the link or the topology; python -m launch nics says more there"
    return _judge("NICs", bad, level="problem", good="as the topology says", fix=fix)


def _complaints(node: Node, nics: Sequence[NicFacts]) -> Iterator[str]:
    for wanted in node.nics:
        # A RoCE port carries Ethernet as well.
        fabrics = ("ethernet", "roce") if wanted.fabric == "ethernet" else (wanted.fabric,)
        there = [nic for nic in nics if nic.fabric in fabrics]
        enough = SLOW_SHARE * wanted.rate_bytes_per_s
        slow = [nic for nic in there if 0 < (nic.rate_bytes_per_s or 0) < enough]
        if len(there) < wanted.count:
            others = [f"{nic.name}: {nic.reason}" for nic in nics if not nic.fabric]
            found = f"{len(there)} of {wanted.count} {wanted.fabric} NICs work"
            yield f"{found} ({'; '.join(others) or 'there are no others'})"
        elif len(there) - len(slow) < wanted.count:
            rates = [f"{n.name} {units.show(n.rate_bytes_per_s or 0.0, 'b/s')}" for n in slow]
            rate = units.show(wanted.rate_bytes_per_s, "b/s")
            yield f"{', '.join(rates)}, where {wanted.fabric} has {rate}"


def _nic_names(topology: Topology, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    for cluster in topology.clusters:
        names = {
            node.name: ", ".join(
                nic.name for nic in facts[node.name].nics if nic.fabric == cluster.fabric
            )
            for node in cluster.nodes
            if node.name in facts and not list(_complaints(node, facts[node.name].nics))
        }
        if len(set(names.values())) > 1:
            fix = "set no NCCL_IB_HCA for all hosts at once: each process finds its own"
            what = f"NIC names in {cluster.name}"
            yield Finding(what=what, level="warning", text=_groups(names), fix=fix)


def kernels(answers: Mapping[str, KernelFacts | NoAnswer]) -> Finding:
    """The findings of checks of the attention kernels. A run does without kernels that fail."""
    said = {node: str(answer) for node, answer in answers.items()}
    bad = {node: said[node] for node, answer in answers.items() if answer.problem is not None}
    good = _groups(said)
    fix = "nothing, if cuDNN or plain JAX will do; else install the versions that it names"
    late = {n for n, a in answers.items() if isinstance(a, KernelFacts) and not a.has_ended}
    if bad.keys() <= late:
        fix = "see nvidia-smi for what else uses the GPU, and ask again in an hour"
    return _judge("attention kernels", bad, level="warning", good=good, fix=fix)


def reachability(tries: Mapping[tuple[str, str, str], float | str]) -> list[Finding]:
    """Judges attempts to connect: (from, to, fabric) -> seconds, or the reason of a failure."""
    shut = {way: why for way, why in tries.items() if isinstance(why, str)}
    if not shut:
        slowest_s = max((s for s in tries.values() if isinstance(s, float)), default=0.0)
        text = f"{len(tries)} ways, all open; the slowest took {1e3 * slowest_s:.0f} ms"
        return [Finding(what="ports", level="ok", text=text)]
    fix = "let the two reach each other on all ports: a firewall, or a route, is in the way"
    return [
        Finding(
            what="ports",
            level="problem",
            text=f"{source} does not reach {target} over {fabric}: {why}",
            fix=fix,
        )
        for (source, target, fabric), why in shut.items()
    ]


def _judge(what: str, bad: Mapping[str, str], *, level: Level, good: str, fix: str) -> Finding:
    if not bad:
        return Finding(what=what, level="ok", text=good)
    return Finding(what=what, level=level, text=_groups(bad), fix=fix)


def _groups(values: Mapping[str, str | None]) -> str:
    """Lists the nodes that have each value.

    >>> _groups({"a": "1", "b": None, "c": "1"})
    '1 on a, c; nothing on b'
    """
    groups: dict[str | None, list[str]] = defaultdict(list)
    for node, value in values.items():
        groups[value].append(node)
    return "; ".join(f"{value or 'nothing'} on {_list(nodes)}" for value, nodes in groups.items())


def _list(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 4 else f"{nodes[0]} and {len(nodes) - 1} others"
