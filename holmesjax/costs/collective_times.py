"""Seconds of collectives over a group of devices: closed form, no devices.

    group     the devices of one collective: some in each of some nodes
    step      one hop of a ring or a tree: the latency of its link, and what a message costs
    reached   what the software that runs collectives of a kind makes of the links, where that was
              measured

A ring moves the fewest bytes and takes a step for every device; a tree takes few steps. So which
one is faster depends on the size of the array, and a small one over many devices reaches a
hundredth of the bandwidth that a large one reaches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.file import CollectiveKind
from holmesjax.topology.machines import Collective, Link, Numbers

# Seconds of a collective before its first step, which NCCL's kernels take to start. `START_S`, and
# the latency of NVLink in the catalogue: all-reduces of 1 MiB on 2 to 8 A100 of one node
# (nccl-tests, in VIA-Research/vTrain@f8dda84, trace/a100). `RDMA_STEP_S` of `fabrics`: the shares
# of bandwidth that all-reduces of 16 MiB on 16 to 1,024 GPUs reach (aliyun/SimAI@cef83f9,
# nic_ratio.csv), with NICs of 400 Gb/s.
START_S = 34e-6

# Time of kernels that overlap with collectives, to that of the same kernels alone: measured by
# Galvatron (PKU-DAIR/Hetu-Galvatron@cea12ff, overlap_coefficient.json).
OVERLAP_SLOWDOWN = 1.1256

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Start time and bandwidth of collectives of one kind; by default those of NCCL."""

    start_s: Numbers = START_S
    bandwidth_bytes_per_s: Numbers = math.inf


NCCL = dict.fromkeys(KINDS, Reached())


def _trips(kind: CollectiveKind) -> int:
    """Times that an array goes round a ring."""
    return 2 if kind == "all_reduce" else 1


def sent_bytes(kind: CollectiveKind, num_nodes: int, num_bytes: float) -> float:
    """Bytes that each node of a ring sends for an array of `num_bytes` bytes."""
    return _trips(kind) * (num_nodes - 1) / num_nodes * num_bytes


def reached(measured: Sequence[Collective], step_s: float) -> dict[CollectiveKind, Reached]:
    """Start time and bandwidth that explain collectives measured over equally many nodes.

    Of each kind the seconds are `start_s`, and the bytes that each node sends over the bandwidth,
    by least squares of relative errors. Where larger arrays reach less, as gloo's gathers of
    several MiB do, what the largest reaches counts.

    Args:
      measured: at least one.
      step_s: of one hop between two nodes, which the start is without.

    Example, 3 ms and 1 GB/s on two nodes:
      >>> seconds = {size: 3e-3 + size / 2 / 1e9 for size in (2**16, 2**20, 2**24)}
      >>> found = reached(
      ...     [
      ...         Collective(cluster="a", num_nodes=2, kind="all_gather", size_bytes=size,
      ...                    bandwidth_bytes_per_s=size / 2 / s)
      ...         for size, s in seconds.items()
      ...     ],
      ...     step_s=0.0,
      ... )["all_gather"]
      >>> round(found.start_s, 6), round(found.bandwidth_bytes_per_s)
      (0.003, 1000000000)
    """
    found = dict(NCCL)
    [num_nodes] = {collective.num_nodes for collective in measured}
    for kind in {collective.kind for collective in measured}:
        own = [collective for collective in measured if collective.kind == kind]
        sent = [sent_bytes(kind, num_nodes, c.size_bytes) for c in own]
        seconds = [s / c.bandwidth_bytes_per_s for s, c in zip(sent, own, strict=True)]
        rows = np.stack([np.ones(len(own)), sent], axis=1) / np.array(seconds)[:, None]
        (start_s, s_per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(own)), rcond=None)
        if len(own) == 1 or start_s < 0 or s_per_byte <= 0:
            largest_s, largest_bytes = max(zip(seconds, sent, strict=True), key=lambda own: own[1])
            start_s, s_per_byte = 0.0, largest_s / largest_bytes
        found[kind] = Reached(
            start_s=max(0.0, float(start_s) - _trips(kind) * (num_nodes - 1) * step_s),
            bandwidth_bytes_per_s=1 / float(s_per_byte),
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Group:
    """The devices of one collective, and what it has of the links between them.

    Other groups that use the same links at the same time have been given their share.
    """

    size: int
    nodes: int  # on which its devices are
    inside: Link | None  # between devices of a node; None: one device a node
    between: Link | None  # between nodes; None: one node
    # By collectives that leave a node, of what this group has of the links.
    software: Mapping[CollectiveKind, Reached] = field(default_factory=NCCL.copy, hash=False)

    def __post_init__(self) -> None:
        assert self.size >= self.nodes >= 1, self
        assert self.inside is not None or self.size == self.nodes, self
        assert self.between is not None or self.nodes == 1, self

    @property
    def links(self) -> list[Link]:
        """Asserts that there is one: a single device has none."""
        links = [link for link in (self.between, self.inside) if link is not None]
        assert links, "a single device has no link"
        return links

    @property
    def slowest(self) -> Link:
        """The link that a ring through all devices waits for."""
        return min(self.links, key=lambda link: link.bandwidth_bytes_per_s)

    def reached(self, kind: CollectiveKind) -> Reached:
        """Start time and bandwidth of collectives of a kind on the slowest link."""
        own = self.software[kind] if self.nodes > 1 else NCCL[kind]
        rates = self.slowest.bandwidth_bytes_per_s, own.bandwidth_bytes_per_s
        return Reached(start_s=own.start_s, bandwidth_bytes_per_s=min(rates))

    @property
    def step_s(self) -> float:
        """Seconds of one step of a ring, without its bytes."""
        return max(map(hop_s, self.links))

    @property
    def num_sharing(self) -> int:
        """Devices of a node that send to other nodes at once; 1 on one node."""
        return -(-self.size // self.nodes) if self.nodes > 1 else 1

    @property
    def climb_s(self) -> float:
        """From the leaves of a tree to its root, without bytes.

        The tree is a chain inside every node, and binary over the nodes.
        """
        chain = -(-self.size // self.nodes) - 1
        levels = math.ceil(math.log2(self.nodes))
        inside_s = hop_s(self.inside) if self.inside else 0.0
        return chain * inside_s + levels * (hop_s(self.between) if self.between else 0.0)

    @cached_property
    def row(self) -> tuple[float, ...]:
        """Its numbers, as `Groups` has them; a search asks for the same groups over and over."""
        of_kinds = [self.reached(kind) for kind in KINDS]
        starts_s = (float(reached.start_s) for reached in of_kinds)
        rates = (float(reached.bandwidth_bytes_per_s) for reached in of_kinds)
        return (self.size, self.step_s, self.climb_s, self.num_sharing, *starts_s, *rates)


ALONE = (1, 0.0, 0.0, 1, *(0.0 for _ in KINDS), *(1.0 for _ in KINDS))  # the row of a single device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Many groups in place of one: every function then gives an array, a number for each."""

    size: np.ndarray
    step_s: np.ndarray
    climb_s: np.ndarray
    num_sharing: np.ndarray
    by_kind: dict[CollectiveKind, Reached]  # arrays in it

    @classmethod
    def of(cls, groups: Sequence[Group | None]) -> "Groups":
        rows = [ALONE if group is None or group.size == 1 else group.row for group in groups]
        return cls.of_rows(np.array(rows))

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> "Groups":
        """Those with the numbers of `Group.row`, [groups, numbers]."""
        size, step_s, climb_s, num_sharing, *reach = rows.T
        by_kind = {
            kind: Reached(start_s=start_s, bandwidth_bytes_per_s=rate)
            for kind, start_s, rate in zip(
                KINDS, reach[: len(KINDS)], reach[len(KINDS) :], strict=True
            )
        }
        return cls(
            size=size, step_s=step_s, climb_s=climb_s, num_sharing=num_sharing, by_kind=by_kind
        )

    def reached(self, kind: CollectiveKind) -> Reached:
        return self.by_kind[kind]


def hop_s(link: Link) -> float:
    return link.latency_s + FABRICS[link.fabric].step_s


def reduce_scatter_s(num_bytes: Numbers, group: Group | Groups | None) -> Numbers:
    """Seconds of a ring reduce-scatter; 0.0 without a group, or for one device.

    Each of the n - 1 steps sends one n-th of the array over every link at once:

        t = start + (n - 1) * (step + num_bytes / (n * bandwidth))

    Args:
      num_bytes: size of the array on each device before the reduction, in bytes.
      group: its devices.

    Example, 1 GB over 8 devices at 25 GB/s:
      >>> link = Link(fabric="nvlink", bandwidth_bytes_per_s=25e9, latency_s=0.0)
      >>> group = Group(size=8, nodes=1, inside=link, between=None)
      >>> round(reduce_scatter_s(1e9, group), 3)
      0.035

    Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms ...", JPDC 69(2), 2009.
    """
    return _scatter_s(num_bytes, group, "reduce_scatter")


def all_gather_s(num_bytes: Numbers, group: Group | Groups | None) -> Numbers:
    """Seconds of a ring all-gather: a reduce-scatter backwards, without the sums.

    `num_bytes` is the size of the gathered array; the rest is as in `reduce_scatter_s`.
    """
    return _scatter_s(num_bytes, group, "all_gather")


def permute_s(num_bytes: Numbers, group: Group | Groups | None) -> Numbers:
    """Seconds in which each device sends so many bytes to another one; 0.0 for one device.

    >>> link = Link(fabric="nvlink", bandwidth_bytes_per_s=25e9, latency_s=0.0)
    >>> round(permute_s(1e9, Group(size=8, nodes=1, inside=link, between=None)), 3)
    0.04
    """
    if group is None or (isinstance(group, Group) and group.size == 1):
        return 0.0
    own = group.reached("all_gather")
    return (group.size > 1) * (own.start_s + group.step_s + num_bytes / own.bandwidth_bytes_per_s)


def all_to_all_s(num_bytes: Numbers, group: Group | Groups | None) -> Numbers:
    """Seconds in which each device sends an equal part of an array to each; 0.0 for one device.

    Its own part stays. On one node all links work at once. Between nodes, the q devices of a group
    on a node share the path on which a ring has one of them send:

        t = start + step + num_bytes * q * (n - q) / (n * bandwidth)

    >>> link = Link(fabric="nvlink", bandwidth_bytes_per_s=25e9, latency_s=0.0)
    >>> round(all_to_all_s(1e9, Group(size=8, nodes=1, inside=link, between=None)), 3)
    0.035
    """
    if group is None or (isinstance(group, Group) and group.size == 1):
        return 0.0
    n, q, own = group.size, group.num_sharing, group.reached("all_gather")
    sent_s = num_bytes * q * (n - q) / n / own.bandwidth_bytes_per_s
    return (n > 1) * (own.start_s + group.step_s + sent_s)


def _scatter_s(num_bytes: Numbers, group: Group | Groups | None, kind: CollectiveKind) -> Numbers:
    if group is None or (isinstance(group, Group) and group.size == 1):
        return 0.0
    n, own = group.size, group.reached(kind)
    sent_s = num_bytes / n / own.bandwidth_bytes_per_s
    return (n > 1) * (own.start_s + (n - 1) * (group.step_s + sent_s))


def all_reduce_s(num_bytes: Numbers, group: Group | Groups | None) -> Numbers:
    """Seconds of an all-reduce, in a ring or in a tree, whichever is faster.

    A ring is a reduce-scatter, then an all-gather, with one start. A tree sums along a chain inside
    every node of q devices and up a binary tree over the N nodes, and sends the sum back down; all
    of it in pieces, so that the bytes pass every link once in each direction:

        ring   t = start + 2 (n - 1) * (step + num_bytes / (n * bandwidth))
        tree   t = start + 2 ((q - 1) * step_inside + ceil(log2 N) * step_between
                              + num_bytes / bandwidth)

    Small arrays over many devices: 16 MiB over 1,024 in 128 nodes, as a share of the bandwidth
    that the same ring without steps would have, in a ring and here:
      >>> fast = Link(fabric="nvlink", bandwidth_bytes_per_s=231e9, latency_s=3.5e-6)
      >>> nics = Link(fabric="infiniband", bandwidth_bytes_per_s=50e9, latency_s=2e-6)
      >>> group = Group(size=1024, nodes=128, inside=fast, between=nics)
      >>> ideal_s = 2 * 2**24 / 50e9
      >>> ring_s = 2 * reduce_scatter_s(2**24, group)
      >>> round(ideal_s / ring_s, 3), round(float(ideal_s / all_reduce_s(2**24, group)), 2)
      (0.01, 0.56)

    Reference: Sanders et al., "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", Parallel Computing 35(12), 2009.
    """
    if group is None or (isinstance(group, Group) and group.size == 1):
        return 0.0
    own = group.reached("all_reduce")
    ring_s = 2 * _scatter_s(num_bytes, group, "all_reduce") - own.start_s
    tree_s = own.start_s + 2 * (group.climb_s + num_bytes / own.bandwidth_bytes_per_s)
    return (group.size > 1) * np.minimum(ring_s, tree_s)
