"""The shell lines that build a lab, start a process in it, disturb it, and take it away.

Everything lives in network namespaces of the lab's name, so nothing of the host's own network is
touched: `holmes-<id>` has the bridges and the supervisor, `holmes-<id>.<node>` is a node. Rates are
shaped where packets leave: at the node, and at its port of the bridge.

    holmes-<id>           br-eth  (all nodes, 198.18.255.1)    br-<cluster>  (its nodes)
                             |                                    |
                          n<node>-eth                          n<node>-fast
                             |                                    |
    holmes-<id>.<node>    eth0    198.18.<cluster>.<node>      fast0    198.19.<cluster>.<node>

A cluster's own fast addresses lead over `fast0`, all other addresses over `eth0`.

A packet that goes a way of a pipe passes a pair of interfaces with the capacity of the pipe, and
then those of the next pipe on its way, before the bridge sees it:

    n<node>-eth   in<pipe> ---- out<pipe>   in<pipe> ---- out<pipe>   br-eth

A packet that goes a way with a latency passes a TAP device behind these, which leads through a
process that holds it for so long. There is one for all ways of a latency:

    n<node>-eth   late<number> ---- process ---- late<number>   br-eth

The bridge does not learn from such packets where a node is, so it is told. A packet is delayed
after the rates of its sender and of the pipes, and before that of the port of its receiver.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holmesjax.lab.injected_faults import Fault
from holmesjax.lab.scaled_topology import FAST, SLOW, SUPERVISOR, Lab, LabNode, LabPipe

STATE = "/run/holmesjax"  # a folder for each lab
CGROUPS = {"v1": "/sys/fs/cgroup/cpu", "v2": "/sys/fs/cgroup"}
PERIOD_US = 25_000  # of the quota: how long a node may stand still; shorter ones cost caches
BRIDGE = "02:00:00:00:00:01"  # each bridge is a network by itself
MTU_BYTES = 9000  # jumbo frames: headers are 1% of the traffic
BURST_S = 200e-6  # what a class may send at once after a pause, as time at its rate
# The queue where nodes share a link: as time at its rate, and at least so many frames, since
# each connection keeps some on their way.
QUEUE_S, QUEUE_FRAMES = 0.1, 32
CHUNK_S = 1e-3  # the most that TCP hands over at once, as time at the rate
LATE_FRAMES = 10_000  # that the process that delays may be behind
FRAME_BYTES = MTU_BYTES + 14
TAKEN_AWAY_S = 60  # for the processes of a lab to be gone

# The file of a control group's weight beside others, and the largest.
WEIGHTS = {"v1": ("cpu.shares", 262144), "v2": ("cpu.weight", 10000)}

# Classes of `eth0`: the NIC, its share for what stays in the cluster, and one for each other
# cluster. At its port of the bridge there is one for what is lost.
NIC, OWN, LOST, FIRST_LINK = 0x1, 0x2, 0x3, 0x10
CUT, CLASSIFY = 100, 1000  # preferences of filters: a cut comes first

Version = Literal["v1", "v2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """Shell commands of one lab on one machine."""

    lab: Lab
    id: str
    cgroup_version: Version

    @property
    def switch(self) -> str:
        """The namespace of the bridges."""
        return f"holmes-{self.id}"

    def namespace(self, node: LabNode) -> str:
        return f"{self.switch}.{node.name}"

    def cgroup(self, node: LabNode) -> str:
        return f"{CGROUPS[self.cgroup_version]}/{self.switch}/{node.name}"

    @property
    def line_cgroup(self) -> str:
        """That of the process that delays; no node has such a name."""
        return f"{CGROUPS[self.cgroup_version]}/{self.switch}/+line"

    def hosts(self, cluster: int) -> str:
        """The hosts file of a cluster's nodes: neighbours by their fast addresses."""
        return f"{STATE}/{self.id}/hosts-{cluster}"

    # ---- build ---------------------------------------------------------------------------------

    def build(self) -> list[str]:
        lines = [f"mkdir -p {STATE}/{self.id}", f"ip netns add {self.switch}"]
        lines += self._bridge("br-eth")
        lines.append(f"ip -n {self.switch} addr add {SUPERVISOR}/16 dev br-eth")
        for c in range(len(self.lab.topology.clusters)):
            if any(node.fast_address for node in self.lab.members(c)):
                lines += self._bridge(f"br-{c}")
            lines.append(self._write_hosts(c))
        for number in range(len(self.lab.delays_s)):
            lines += self._late(number)
        for number, pipe in enumerate(self.lab.pipes):
            lines += self._pipe(number, pipe)
        for number, pipe in enumerate(self.lab.pipes):
            lines += self._lead(f"out{number}", pipe.ways, behind=number)
        lines += self._cgroup_root()
        for node in self.lab.nodes:
            lines += [*self._network(node), *self._shaping(node), *self._quota(node)]
        return lines

    def _bridge(self, name: str) -> list[str]:
        # With an address of its own: otherwise it has that of a port, until the port is taken out.
        add = f"ip -n {self.switch} link add name {name} address {BRIDGE} mtu {MTU_BYTES}"
        return [f"{add} type bridge", f"ip -n {self.switch} link set dev {name} up"]

    def _pipe(self, number: int, pipe: LabPipe) -> list[str]:
        """A pair of interfaces that lets through what a pipe can, each way with its own queue."""
        ip, tc = f"ip -n {self.switch}", f"tc -n {self.switch}"
        into, out, rate = f"in{number}", f"out{number}", pipe.rate_bytes_per_s
        limit = max(round(rate * QUEUE_S), QUEUE_FRAMES * FRAME_BYTES)
        add = f"{tc} class add dev {into} parent 1:"
        lines = [
            f"{ip} link add name {into} mtu {MTU_BYTES} type veth peer name {out} mtu {MTU_BYTES}",
            f"{ip} link set dev {into} up",
            f"{ip} link set dev {out} master br-eth up",
            f"bridge -n {self.switch} link set dev {out} learning off flood off mcast_flood off",
            f"{tc} qdisc add dev {into} root handle 1: htb",
            f"{add} classid 1:{NIC:x} htb {_rates(rate, rate)}",
        ]
        for i, way in enumerate(pipe.ways):
            minor = FIRST_LINK + i
            lines += [
                f"{add}{NIC:x} classid 1:{minor:x} htb {_rates(rate / len(pipe.ways), rate)}",
                f"{tc} qdisc add dev {into} parent 1:{minor:x} bfifo limit {limit}",
                f"{tc} filter add dev {into} parent 1: protocol ip pref {CLASSIFY + i} "
                f"u32 {_between(way)} flowid 1:{minor:x}",
            ]
        return lines

    def _late(self, number: int) -> list[str]:
        """A device through which packets go to the process that delays, and come back."""
        ip, tc, late = f"ip -n {self.switch}", f"tc -n {self.switch}", late_name(number)
        return [
            f"{ip} tuntap add dev {late} mode tap",
            f"{ip} link set dev {late} mtu {MTU_BYTES} txqueuelen {LATE_FRAMES}",
            f"{ip} link set dev {late} addrgenmode none master br-eth up",
            # What the bridge sent there would come back; its own calls go to all ports.
            f"bridge -n {self.switch} link set dev {late} "
            "learning off flood off mcast_flood off bcast_flood off",
            f"{tc} qdisc add dev {late} root handle 1: htb default {LOST:x}",
            f"{tc} class add dev {late} parent 1: classid 1:{NIC:x} htb rate 100gbit burst 1mb "
            f"cburst 1mb quantum {FRAME_BYTES}",
            f"{tc} filter add dev {late} parent 1: protocol ip pref {CLASSIFY} "
            f"u32 match ip dst {SLOW}.0.0/15 flowid 1:{NIC:x}",  # both addresses of all nodes
            *self._loss(late),
        ]

    def _lead(self, device: str, ways: Sequence[tuple[int, int]], behind: int = -1) -> list[str]:
        """Leads what comes from a device to the next pipe of its way, after the pipe `behind`.

        After the last pipe it is led to the delay of its way, if that has one.
        """
        tc = f"tc -n {self.switch}"
        add = f"{tc} filter add dev {device} parent ffff: protocol ip"
        nexts = [(way, self._next(way, behind)) for way in ways]
        lines = [
            f"{add} pref {CLASSIFY + i} u32 {_between(way)} "
            f"action mirred egress redirect dev {next_device}"
            for i, (way, next_device) in enumerate(nexts)
            if next_device
        ]
        return [f"{tc} qdisc add dev {device} ingress", *lines] if lines else []

    def _next(self, way: tuple[int, int], behind: int) -> str | None:
        """The device of a way that comes after the pipe `behind`; None: the bridge."""
        if pipes := [number for number in self.lab.pipes_of(way) if number > behind]:
            return f"in{pipes[0]}"
        delay_s = self.lab.links[way].delay_s
        return late_name(self.lab.delays_s.index(delay_s)) if delay_s else None

    @property
    def _is_led(self) -> bool:
        """Whether packets go by other devices than the ports of their nodes."""
        return bool(self.lab.pipes or self.lab.delays_s)

    def _lead_node(self, node: LabNode) -> list[str]:
        ways = [way for way in self.lab.links if way[0] == node.cluster]
        return self._lead(port_name(node, "eth0"), ways)

    def _place(self, node: LabNode) -> str:
        """Tells the bridge at which port a node is."""
        port = port_name(node, "eth0")
        return f"bridge -n {self.switch} fdb replace {_mac(node)} dev {port} master static"

    def _write_hosts(self, cluster: int) -> str:
        entries = ["127.0.0.1 localhost"]
        for node in self.lab.nodes:
            is_near = node.cluster == cluster and node.fast_address is not None
            entries.append(f"{node.fast_address if is_near else node.slow_address} {node.name}")
        return f"printf '%s\\n' {shlex.join(entries)} > {self.hosts(cluster)}"

    def _network(self, node: LabNode) -> list[str]:
        inside = f"ip -n {self.namespace(node)}"
        lines = [f"ip netns add {self.namespace(node)}", f"{inside} link set dev lo up"]
        lines += self._interface(node, "eth0", "br-eth", f"{node.slow_address}/16")
        if self._is_led:
            lines.append(f"{inside} link set dev eth0 address {_mac(node)}")
            lines += [self._place(node), *self._lead_node(node)]
        if node.fast_address:
            lines += self._interface(node, "fast0", f"br-{node.cluster}", f"{node.fast_address}/24")
        # The fast addresses of other clusters, for links that are not called Ethernet.
        lines.append(f"{inside} route add {FAST}.0.0/16 dev eth0")
        return lines

    def _interface(self, node: LabNode, name: str, bridge: str, address: str) -> list[str]:
        inside, switch = f"ip -n {self.namespace(node)}", f"ip -n {self.switch}"
        port = port_name(node, name)
        return [
            f"{switch} link add name {port} mtu {MTU_BYTES} type veth "
            f"peer name {name} mtu {MTU_BYTES} netns {self.namespace(node)}",
            f"{switch} link set dev {port} master {bridge} up",
            f"{inside} addr add {address} dev {name}",
            f"{inside} link set dev {name} up",
        ]

    def _shaping(self, node: LabNode) -> list[str]:
        lines = []
        if (rate := node.fast_rate_bytes_per_s) is not None:
            lines += self._shape(self.namespace(node), "fast0", rate)
            lines += self._shape(self.switch, port_name(node, "fast0"), rate)
        if (rate := node.slow_rate_bytes_per_s) is not None:
            lines += self._shape_links(node, rate)
            lines += self._shape(self.switch, port_name(node, "eth0"), rate)
            lines += self._loss(port_name(node, "eth0"))
        return lines

    def _loss(self, port: str) -> list[str]:
        """A class of a port that loses packets on their way.

        A queue of the sender's own would tell its TCP, which then gives the connection up in 8 s.
        """
        tc = f"tc -n {self.switch}"
        return [
            f"{tc} class add dev {port} parent 1: classid 1:{LOST:x} "
            f"htb rate 8bit ceil 8bit quantum {FRAME_BYTES}",
            f"{tc} qdisc add dev {port} parent 1:{LOST:x} pfifo limit 0",
        ]

    def _shape(self, namespace: str, device: str, rate: float) -> list[str]:
        """One rate for all that leaves by a device."""
        tc = f"tc -n {namespace}"
        return [
            _limit_chunks(namespace, device, rate),
            f"{tc} qdisc add dev {device} root handle 1: htb default {NIC:x}",
            f"{tc} class add dev {device} parent 1: classid 1:{NIC:x} htb {_rates(rate, rate)}",
        ]

    def _shape_links(self, node: LabNode, rate: float) -> list[str]:
        """The rate of the slow NIC, and within it that of the link to each other cluster."""
        links = {b: link for (a, b), link in self.lab.links.items() if a == node.cluster}
        tc = f"tc -n {self.namespace(node)}"
        add = f"{tc} class add dev eth0 parent"
        rates = [link.rate_bytes_per_s for link in links.values()]
        passed = {pipe for b in links for pipe in self.lab.pipes_of((node.cluster, b))}
        rates += [self.lab.pipes[number].rate_bytes_per_s for number in passed]
        slowest = min([rate, *rates])
        lines = [
            _limit_chunks(self.namespace(node), "eth0", slowest),
            f"{tc} qdisc add dev eth0 root handle 1: htb default {OWN:x}",
            f"{add} 1: classid 1:{NIC:x} htb {_rates(rate, rate)}",
            f"{add} 1:{NIC:x} classid 1:{OWN:x} htb {_rates(rate / (1 + len(links)), rate)}",
        ]
        for b in links:
            minor = FIRST_LINK + b
            lines.append(f"{add} 1:{NIC:x} classid 1:{minor:x} htb {self._link_rates(node, b)}")
            lines += _filters(tc, "eth0", b, CLASSIFY + b, minor)
        return lines

    def _link_rates(self, node: LabNode, target: int) -> str:
        """Rates of the class of a node for another cluster.

        A class may always send at its own rate, so the rates of the classes of a NIC must not add
        up to more than the NIC's. A class may borrow up to the rate of the link.
        """
        links = sum(a == node.cluster for a, _ in self.lab.links)
        link_rate = self.lab.links[node.cluster, target].rate_bytes_per_s
        assert node.slow_rate_bytes_per_s is not None, f"{node.name} has links and no rate"
        return _rates(min(node.slow_rate_bytes_per_s / (1 + links), link_rate), link_rate)

    # ---- processes -----------------------------------------------------------------------------

    def _cgroup_root(self) -> list[str]:
        root = f"{CGROUPS[self.cgroup_version]}/{self.switch}"
        line = []
        if self.lab.delays_s:  # a packet is due at its moment, whatever the nodes compute
            file, weight = WEIGHTS[self.cgroup_version]
            line = [f"mkdir {self.line_cgroup}", f"echo {weight} > {self.line_cgroup}/{file}"]
        if self.cgroup_version == "v1":
            return [f"mkdir {root}", *line]
        enable = "echo +cpu > {}/cgroup.subtree_control"
        return [enable.format(CGROUPS["v2"]), f"mkdir {root}", enable.format(root), *line]

    def _quota(self, node: LabNode) -> list[str]:
        path, quota_us = self.cgroup(node), round(node.share.quota * PERIOD_US)
        if self.cgroup_version == "v2":
            return [f"mkdir {path}", f"echo '{quota_us} {PERIOD_US}' > {path}/cpu.max"]
        return [
            f"mkdir {path}",
            f"echo {PERIOD_US} > {path}/cpu.cfs_period_us",
            f"echo {quota_us} > {path}/cpu.cfs_quota_us",
        ]

    def enter(self, node: LabNode, command: Sequence[str]) -> list[str]:
        """The words that run a command on a node, in the same process."""
        inside = (
            f"echo {node.name} > /proc/sys/kernel/hostname"
            f' && mount --bind {self.hosts(node.cluster)} /etc/hosts && exec "$@"'
        )
        cores = ",".join(map(str, node.share.cores))
        outside = (
            f"echo $$ > {self.cgroup(node)}/cgroup.procs && exec taskset --cpu-list {cores}"
            f" ip netns exec {self.namespace(node)} unshare --uts"
            f' sh -c {shlex.quote(inside)} sh "$@"'
        )
        return ["sh", "-c", outside, "sh", *command]

    def delaying(self, command: Sequence[str]) -> list[str]:
        """The words that run the command that delays: its arguments are devices and seconds."""
        delays = [f"{late_name(n)}={delay_s:g}" for n, delay_s in enumerate(self.lab.delays_s)]
        outside = (
            f'echo $$ > {self.line_cgroup}/cgroup.procs && exec ip netns exec {self.switch} "$@"'
        )
        return ["sh", "-c", outside, "sh", *command, *delays]

    # ---- faults --------------------------------------------------------------------------------

    def fault(self, fault: Fault) -> tuple[list[str], list[str]]:
        """Returns the lines that inject a fault, and the lines that undo it."""
        if fault.kind in ("kill", "freeze"):
            [node] = [node for node in self.lab.nodes if node.name == fault.node]
            processes = f"{self.cgroup(node)}/cgroup.procs"
            # At the start of a job its processes may not be there yet.
            wait = f"timeout 60 sh -c 'until grep -q . {processes}; do sleep 0.05; done'"
            send = f"xargs -r kill -{{}} < {processes}"
            if fault.kind == "kill":
                return [wait, send.format("KILL")], []
            return [wait, send.format("STOP")], [send.format("CONT")]
        if fault.node:
            return self._unplug(fault.node)
        doing, undoing = [], []
        for a, b in fault.ways:
            source, target = self.lab.cluster_number(a), self.lab.cluster_number(b)
            if fault.kind == "cut":
                tc, preference = f"tc -n {self.switch}", CUT + source
                for node in self.lab.members(target):
                    port = port_name(node, "eth0")
                    doing += _filters(tc, port, source, preference, LOST, end="src")
                    undoing.append(f"{tc} filter del dev {port} parent 1: pref {preference}")
                continue
            for node in self.lab.members(source):
                change = f"tc -n {self.namespace(node)} class change dev eth0 "
                change += f"classid 1:{FIRST_LINK + target:x} htb "
                doing.append(change + _rates(fault.rate_bytes_per_s, fault.rate_bytes_per_s))
                undoing.append(change + self._link_rates(node, target))
        return doing, undoing

    def _unplug(self, name: str) -> tuple[list[str], list[str]]:
        """Takes a node's ports out of their bridges, and puts them back: nobody is told."""
        [node] = [node for node in self.lab.nodes if node.name == name]
        out, back = [], []
        for device, _, _ in node.interfaces:
            is_slow = device == "eth0"
            bridge = "br-eth" if is_slow else f"br-{node.cluster}"
            port = f"ip -n {self.switch} link set dev {port_name(node, device)}"
            out.append(f"{port} nomaster")
            back.append(f"{port} master {bridge}")
            if is_slow and self._is_led:
                # What is led elsewhere would reach the others without the bridge.
                lead = self._lead_node(node)
                device = port_name(node, "eth0")
                out += [f"tc -n {self.switch} qdisc del dev {device} ingress"] * bool(lead)
                back += [self._place(node), *lead]
        return out, back


def tear_down(id: str, version: Version) -> list[str]:
    """Takes away what a lab of this name has made, however far it came. Kills what runs in it.

    A process may end before it is killed, or start another. One that no signal ends is given up
    after TAKEN_AWAY_S, and `launch lab clean` finds it again.
    """
    cgroup = f"{CGROUPS[version]}/holmes-{id}"
    kill = f"cat {cgroup}/*/cgroup.procs 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true"
    remove = f"find {cgroup} -depth -type d -exec rmdir {{}} + 2>/dev/null"
    return [
        kill,
        f"ip netns list | grep -o '^holmes-{id}[^ ]*' | xargs -r -n 1 ip netns del",
        f"timeout {TAKEN_AWAY_S} sh -c "
        f"'while [ -d {cgroup} ]; do {kill}; {remove} || sleep 0.05; done'",
        f"rm -rf {STATE}/{id}",
    ]


def port_name(node: LabNode, device: str) -> str:
    """The other end of a node's interface, at its bridge."""
    return f"n{node.number}-{'eth' if device == 'eth0' else 'fast'}"


def late_name(number: int) -> str:
    """The device of a delay, by the place of this delay among those of the lab."""
    return f"late{number}"


def _mac(node: LabNode) -> str:
    """The hardware address of a node's slow interface."""
    return f"02:00:00:01:{node.number >> 8:02x}:{node.number & 255:02x}"


def _between(way: tuple[int, int]) -> str:
    """Matches packets from one cluster to another, by either address of their nodes."""
    (high, low), mask = SLOW.split("."), "0xfffeff00"
    prefix = int(high) << 24 | int(low) << 16
    a, b = (f"{prefix | number << 8:#010x}" for number in way)
    return f"match u32 {a} {mask} at 12 match u32 {b} {mask} at 16"


def _rates(rate: float, ceil: float) -> str:
    """A class that may borrow up to `ceil`, both in bytes per second."""
    burst = max(round(ceil * BURST_S), 3000)
    return (
        f"rate {round(8 * rate)}bit ceil {round(8 * ceil)}bit "
        f"burst {burst}b cburst {burst}b quantum {FRAME_BYTES}"
    )


def _limit_chunks(namespace: str, device: str, rate: float) -> str:
    """The command that limits segments: TCP hands over 64 KiB at once, long on a slow link."""
    size = min(max(round(rate * CHUNK_S), MTU_BYTES), 65536)
    return f"ip -n {namespace} link set dev {device} gso_max_size {size}"


def _filters(
    tc: str,
    device: str,
    cluster: int,
    preference: int,
    minor: int,
    end: Literal["src", "dst"] = "dst",
) -> list[str]:
    """Lines that put packets to or from a cluster, by either address of its nodes, into a class."""
    add = f"{tc} filter add dev {device} parent 1: protocol ip pref {preference}"
    return [
        f"{add} u32 match ip {end} {network}.{cluster}.0/24 flowid 1:{minor:x}"
        for network in (SLOW, FAST)
    ]
