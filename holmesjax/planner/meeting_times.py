"""The seconds and the dollars of meetings of islands.

A layer goes from the stage that has it in one island to the stage that has it in another, as
boundaries go: each node of the smaller stage sends, or receives, an equal part at once. All layers
that meet are on their way together. So a way takes as long as the node does that sends or receives
longest, or the capacity between clusters that is fullest.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from holmesjax.config import Config, OuterConfig
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.meeting_steps import fragment_of, steps_of
from holmesjax.plan.outer_rule import meeting_bytes, owners, pair_bytes, trained_sizes
from holmesjax.plan.plan import MeetingCost, Plan, StagePlan
from holmesjax.planner.node_paths import FlowPath, NodePaths
from holmesjax.topology.machines import Topology


class MeetingPaths:
    """The seconds and dollars of meetings of some islands, by the layers that meet."""

    def __init__(self, config: Config, topology: Topology, islands: Sequence[Plan]):
        self._topology, self._islands = topology, islands
        self._is_per_device = config.distributed.processes == "device"
        self._node_paths = NodePaths(topology)
        self._paths: dict[tuple[int, int, int, int], FlowPath] = {}
        self._of_pipes: dict[tuple[int, int, int, int], np.ndarray] = {}
        self._homes = [
            {layer: s for s, stage in enumerate(island.stages) for layer in stage.layers}
            for island in islands
        ]
        sizes, count = trained_sizes(config.model), len(islands)
        owner = owners(sizes, count)
        self._numbers: dict[str, Counter[int]] = defaultdict(Counter)  # of each layer, by owner
        for name, n in sizes.items():
            self._numbers[name.partition(".")[0]][owner[name]] += n
        stages = [(k, s) for k, island in enumerate(islands) for s in range(len(island.stages))]
        ends = itertools.product(stages, ("out", "in"))
        self._places = {(k, s, end): number for number, ((k, s), end) in enumerate(ends)}
        self._pipes = self._node_paths.pipes
        # Seconds for one byte of each number of a layer: to the owners, and back.
        self._ways: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for layer, owned in self._numbers.items():
            there, back = self._nothing(), self._nothing()
            for (island, n), k in itertools.product(owned.items(), range(count)):
                if k != island:
                    self._send(there, layer, k, island, n)
                    self._send(back, layer, island, k, n)
            self._ways[layer] = there, back

    @property
    def _latency_s(self) -> float:
        return max(path.link.latency_s for path in self._paths.values())

    @property
    def num_islands(self) -> int:
        return len(self._islands)

    def _nothing(self) -> np.ndarray:
        return np.zeros(len(self._places) + len(self._pipes))

    def _send(self, seconds: np.ndarray, layer: str, a: int, b: int, numbers: float) -> None:
        """Adds what a byte of some numbers of a layer takes from island a to island b."""
        s, t = self._homes[a][layer], self._homes[b][layer]
        path = self._path(a, s, b, t)
        own_s = numbers / (path.num_pairs * path.link.bandwidth_bytes_per_s)
        seconds[self._places[a, s, "out"]] += own_s
        seconds[self._places[b, t, "in"]] += own_s
        if self._pipes:
            seconds[len(self._places) :] += numbers * self._pipe_s(a, s, b, t)

    def _pipe_s(self, a: int, s: int, b: int, t: int) -> np.ndarray:
        """The seconds of a byte from one stage to another on each pipe."""
        key = a, s, b, t
        if key not in self._of_pipes:
            shares = self._shares(self._islands[a].stages[s], self._islands[b].stages[t])
            self._of_pipes[key] = np.array(
                [
                    sum(shares.get(way, 0.0) for way in pipe.ways) / pipe.reached_bytes_per_s
                    for pipe in self._pipes
                ]
            )
        return self._of_pipes[key]

    def _path(self, a: int, s: int, b: int, t: int) -> FlowPath:
        key = a, s, b, t
        if key not in self._paths:
            ends = self._islands[a].stages[s], self._islands[b].stages[t]
            each = [stage.devices if self._is_per_device else stage.nodes for stage in ends]
            there, here = (list(stage.nodes) for stage in ends)
            self._paths[key] = self._node_paths.path(there, here, min(map(len, each)))
        return self._paths[key]

    def _shares(self, source: StagePlan, target: StagePlan) -> dict[tuple[str, str], float]:
        """The share of what goes from one stage to another that goes each way between clusters."""
        ends = [
            Counter(self._topology.cluster_of(node).name for node in stage.nodes)
            for stage in (source, target)
        ]
        whole = len(source.nodes) * len(target.nodes)
        return {
            (a, b): m * n / whole
            for (a, m), (b, n) in itertools.product(*(end.items() for end in ends))
        }

    def both_ways_s(self, met: Collection[str], number_bytes: float) -> tuple[float, float]:
        """The seconds of a meeting of some layers, to the owners and back.

        Args:
          met: the names of the layers.
          number_bytes: of a number that crosses.
        """
        ways = [self._ways[layer] for layer in met if layer in self._ways]
        if not ways or len(self._islands) == 1:
            return 0.0, 0.0
        there_s, back_s = number_bytes * np.sum(ways, axis=0).max(axis=1)
        return float(there_s) + self._latency_s, float(back_s) + self._latency_s

    def pairs_s(self, number_bytes: float) -> float:
        """The seconds of a meeting of the pairs that take longest, at once in both directions."""
        crossed: dict[int, list[float]] = defaultdict(list)  # by the pipe
        most_s = 0.0
        for a, b in itertools.permutations(range(len(self._islands)), 2):
            seconds = self._nothing()
            for layer, owned in self._numbers.items():
                self._send(seconds, layer, a, b, number_bytes * owned.total())
            most_s = max(most_s, float(seconds[: len(self._places)].max()))
            for number, own_s in enumerate(seconds[len(self._places) :]):
                crossed[number].append(float(own_s))
        # An island is in one pair: so many of them send over a pipe at once, and as many receive.
        for own_s in crossed.values():
            most_s = max(most_s, sum(sorted(own_s)[-(len(self._islands) // 2) :]))
        return most_s + self._latency_s

    def egress_dollars(self, outer: OuterConfig) -> float:
        """The dollars for the bytes of a meeting of all layers that leave a cluster, in the mean.

        Args:
          outer: the rule of the meetings. Pairs are drawn: each is as likely as any other.
        """
        count, number_bytes = self.num_islands, codec_of(outer).num_bytes
        dollars = 0.0
        num_bytes: float
        for layer, owned in self._numbers.items():
            for a, b in itertools.permutations(range(count), 2):
                num_bytes = number_bytes * (owned[a] + owned[b])
                if outer.has_pairs:
                    others = count - 1 + count % 2  # of an odd number one sits out
                    num_bytes = pair_bytes(owned.total(), outer) / others
                dollars += num_bytes / 1e9 * self._per_gb(layer, a, b)
        return dollars

    def _per_gb(self, layer: str, a: int, b: int) -> float:
        s, t = self._homes[a][layer], self._homes[b][layer]
        shares = self._shares(self._islands[a].stages[s], self._islands[b].stages[t])
        links = self._topology.links
        return sum(share * links[way].egress_dollars_per_gb for way, share in shares.items())


def meeting_cost(config: Config, paths: MeetingPaths, step_s: float) -> MeetingCost:
    """The cost of one meeting of each fragment, beside steps that take so long.

    Half of the delay of a fragment hides the way to the owners, and half the way back.
    """
    steps, sizes = steps_of(config.parallel), trained_sizes(config.model)
    outer, count = config.parallel.outer_rule, paths.num_islands
    seconds, hidden_s = 0.0, 0.0
    if outer.has_pairs and count > 1:
        seconds = paths.pairs_s(pair_bytes(1, outer))
    fragments = fragment_of(layers(config.model), steps.fragments)
    for number in range(0 if outer.has_pairs else steps.fragments):
        met = [layer for layer, fragment in fragments.items() if fragment == number]
        there_s, back_s = paths.both_ways_s(met, codec_of(outer).num_bytes)
        there = (steps.delay + 1) // 2
        seconds += there_s + back_s
        hidden_s += min(there_s, there * step_s) + min(back_s, (steps.delay - there) * step_s)
    return MeetingCost(
        every=steps.every,
        bytes=tuple(map(float, meeting_bytes(sizes, count, outer))),
        seconds=seconds,
        hidden_s=hidden_s,
        fragments=steps.fragments,
        delay=steps.delay,
        rule=outer.rule,
        codec=outer.codec,
    )
