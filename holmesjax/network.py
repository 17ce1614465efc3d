"""Seconds of collectives over a group of devices: closed form, no devices.

    group   the devices of one collective: some in each of some nodes
    step    one hop of a ring or a tree: the latency of its link, and what a message costs to start

A ring moves the fewest bytes and takes a step for every device; a tree takes few steps. So which
one is faster depends on the size of the array, and a small one over many devices reaches a
hundredth of the bandwidth that a large one reaches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holmesjax.topology import Link

# Seconds of a collective before its first step, and of each step beyond the latency of the link:
# what NCCL's kernels take to start, and to synchronise with a neighbour. `START_S`, and the latency
# of NVLink in the catalogue: all-reduces of 1 MiB on 2 to 8 A100 of one node (nccl-tests, in
# VIA-Research/vTrain@f8dda84, trace/a100). Over RDMA: the shares of bandwidth that all-reduces of
# 16 MiB on 16 to 1,024 GPUs reach (aliyun/SimAI@cef83f9, nic_ratio.csv), with NICs of 400 Gb/s.
START_S = 34e-6
STEP_S = {"infiniband": 30e-6, "roce": 30e-6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The devices of one collective, and what it has of the links between them.

    Other groups that use the same links at the same time have been given their share.
    """

    size: int
    nodes: int  # on which its devices are
    inside: Link | None  # between devices of a node; None: one device a node
    between: Link | None  # between nodes; None: one node

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

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.slowest.bandwidth_bytes_per_s

    @property
    def step_s(self) -> float:
        """Of a ring, without its bytes."""
        return max(map(_step_s, self.links))

    @property
    def climb_s(self) -> float:
        """From the leaves of a tree to its root, without bytes.

        The tree is a chain inside every node, and binary over the nodes.
        """
        chain = -(-self.size // self.nodes) - 1
        levels = math.ceil(math.log2(self.nodes))
        inside_s = _step_s(self.inside) if self.inside else 0.0
        return chain * inside_s + levels * (_step_s(self.between) if self.between else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Many groups in place of one: every function then gives an array, a number for each."""

    size: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    step_s: np.ndarray
    climb_s: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Group | None]) -> "Groups":
        rows = [
            (group.size, group.bandwidth_bytes_per_s, group.step_s, group.climb_s)
            if group is not None and group.size > 1
            else (1, 1.0, 0.0, 0.0)
            for group in groups
        ]
        size, bandwidth, step_s, climb_s = np.array(rows).T
        return cls(size=size, bandwidth_bytes_per_s=bandwidth, step_s=step_s, climb_s=climb_s)


def least(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of each two of arrays."""
    return np.minimum(a, b) if np.ndim(a) or np.ndim(b) else min(a, b)


def most(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each two of arrays."""
    return np.maximum(a, b) if np.ndim(a) or np.ndim(b) else max(a, b)


def _step_s(link: Link) -> float:
    return link.latency_s + STEP_S.get(link.fabric, 0.0)


def reduce_scatter_s(num_bytes: Any, group: Group | Groups | None) -> Any:
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
    if group is None or (isinstance(group, Group) and group.size == 1):
        return 0.0
    n = group.size
    sent_s = num_bytes / n / group.bandwidth_bytes_per_s
    return (n > 1) * (START_S + (n - 1) * (group.step_s + sent_s))


def all_gather_s(num_bytes: Any, group: Group | Groups | None) -> Any:
    """Seconds of a ring all-gather: a reduce-scatter backwards, without the sums.

    `num_bytes` is the size of the gathered array; the rest is as in `reduce_scatter_s`.
    """
    return reduce_scatter_s(num_bytes, group)


def all_reduce_s(num_bytes: Any, group: Group | Groups | None) -> Any:
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
      >>> round(ideal_s / ring_s, 3), round(ideal_s / all_reduce_s(2**24, group), 2)
      (0.01, 0.56)

    Reference: Sanders et al., "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", Parallel Computing 35(12), 2009.
    """
    if group is None or (isinstance(group, Group) and group.size == 1):
        return 0.0
    ring_s = 2 * reduce_scatter_s(num_bytes, group) - START_S
    tree_s = START_S + 2 * (group.climb_s + num_bytes / group.bandwidth_bytes_per_s)
    return (group.size > 1) * least(ring_s, tree_s)
