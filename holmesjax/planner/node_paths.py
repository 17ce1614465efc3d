"""The paths of what goes from the nodes of one stage to those of another, as the planner sees them.

pair   a node of each stage: each node of the smaller one sends, or receives, an equal part at once
pipe   a capacity of one way between clusters, or of several
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from holmesjax.topology.machines import Link, Node, Pipe, Topology


class FlowPath(NamedTuple):
    """The path of a flow."""

    link: Link  # of each pair of nodes: the slowest, or its part of the pipe
    num_pairs: int  # that send at once


class NodePaths:
    """The paths between nodes of a topology."""

    def __init__(self, topology: Topology):
        self._topology = topology

    @cached_property
    def pipes(self) -> list[Pipe]:
        return self._topology.pipes

    def path(self, sources: Sequence[str], targets: Sequence[str], processes: int) -> FlowPath:
        """The path from the nodes of one stage to those of another.

        Args:
          sources, targets: the names of the nodes.
          processes: that send or receive at once, of the stage that has fewer.
        """
        num_pairs = min(len(sources), len(targets))
        paths = self.links(sources, targets, processes / num_pairs)
        slowest = min(paths, key=lambda link: link.bandwidth_bytes_per_s)
        # Unlike paths count with the worst of each: a faster one makes no other one count.
        slowest = replace(slowest, latency_s=max(link.latency_s for link in paths))
        if (part := self._part_of_pipes(sources, targets)) < slowest.bandwidth_bytes_per_s:
            slowest = replace(slowest, bandwidth_bytes_per_s=part)
        return FlowPath(slowest, num_pairs)

    def links(self, sources: Sequence[str], targets: Sequence[str], processes: float) -> list[Link]:
        """The paths of boundaries from each node of one stage to each of another.

        Equal nodes of a cluster have equal links where none was measured: two are enough, beside
        those of which a link was.
        """
        measured = self._topology.measured
        ends = {*sources, *targets}
        pairs = measured.pairs if measured else ()
        named = {name for pair in pairs if ends.issuperset(pair) for name in pair}
        sources, targets = self._two_of_each(sources, named), self._two_of_each(targets, named)
        return [self._topology.boundary_link(a, b, processes) for a in sources for b in targets]

    def _two_of_each(self, names: Sequence[str], named: Collection[str]) -> list[str]:
        """Two of equal nodes, and all that are named; in the given order."""
        counts = Counter[int]()
        found = []
        for name in names:
            kind = self._node_kinds[name]
            if name in named or counts[kind] < 2:
                found.append(name)
                counts[kind] += name not in named
        return found

    @cached_property
    def _node_kinds(self) -> dict[str, int]:
        """A number for each node, the same for equal nodes of a cluster."""
        seen: list[tuple[str, Node]] = []
        kinds = {}
        for cluster in self._topology.clusters:
            for node in cluster.nodes:
                kind = cluster.name, replace(node, name="")
                if kind not in seen:
                    seen.append(kind)
                kinds[node.name] = seen.index(kind)
        return kinds

    def _part_of_pipes(self, sources: Sequence[str], targets: Sequence[str]) -> float:
        """Returns the share of the pipes for each pair of nodes, if all that may cross one do."""
        if not self.pipes:
            return math.inf
        here, there = (
            Counter(self._topology.cluster_of(node).name for node in nodes)
            for nodes in (sources, targets)
        )
        least = math.inf
        for pipe in self.pipes:
            own = [(a, b) for a, b in pipe.ways if here[a] and there[b]]
            ends = zip((here, there), zip(*own, strict=True), strict=False)
            count = min((sum(at[name] for name in set(names)) for at, names in ends), default=0)
            if count:
                least = min(least, pipe.reached_bytes_per_s / count)
        return least
