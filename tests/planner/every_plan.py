"""Plans of small machines, tried one after the other, without the planner's search."""

import functools
import itertools
import math
from typing import NamedTuple

from holmesjax.costs import memory, work as costs
from holmesjax.costs.stage_shape import StageShape
from holmesjax.costs.stage_times import stage_times
from holmesjax.layer_specs import model_layers
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Axis
from holmesjax.planner.mesh_order import Paths, arrangements
from holmesjax.planner.stage_layouts import divisors
from holmesjax.schedules.pipeline_schedules import schedule
from holmesjax.schedules.tasks import max_in_flight
from holmesjax.topology.fabrics import FABRICS
from tests.clock import finish_times, queued_finish_times
from tests.clusters import compositions


def every_depth(p, m, most_at_end):
    """In flight on the stages of eager 1F1B: never fewer than 1F1B, never more towards the end."""
    ranges = [range(min(p - s, m), m + 1) for s in range(p - 1)]
    for depth in itertools.product(*ranges, range(1, most_at_end + 1)):
        steps = [a - b for a, b in itertools.pairwise([*depth])]
        if all(step >= 0 for step in steps):
            yield depth


def every_schedule(config, p, m, policy):
    """(name, chunks) of those that the config allows."""
    wanted = config.parallel.schedule
    for name in ("1f1b", "gpipe", "eager_1f1b", "zero_bubble"):
        if wanted in (None, name) and (name != "zero_bubble" or (policy == "none" and p > 1)):
            yield name, 1
    if wanted in (None, "interleaved_1f1b") and p > 1 and m % p == 0:
        for chunks in [config.parallel.chunks] if config.parallel.chunks else (2, 3, 4, 6, 8):
            yield "interleaved_1f1b", chunks


def every_mesh(config, num_devices, m):
    """(data, fsdp, tensor, context) on at most so many devices."""
    model, parallel = config.model, config.parallel
    wanted = parallel.data, parallel.fsdp, parallel.tensor, parallel.context
    numbers = range(1, num_devices + 1)
    for mesh in itertools.product(numbers, repeat=4):
        data, fsdp, tensor, context = mesh
        cut = (model.num_heads, model.kv_heads, model.feed_forward_width, model.vocab_size)
        if (
            math.prod(mesh) <= num_devices
            and all(want in (None, size) for want, size in zip(wanted, mesh, strict=True))
            and config.train.global_batch % (m * data * fsdp) == 0
            and model.width % (fsdp * context) == 0
            and model.context_length % context == 0
            and (context == 1 or parallel.context or model.context_length // context >= 4096)
            and all(size % tensor == 0 for size in cut)
        ):
            yield mesh


@functools.cache
def cached_schedule(name, p, m, v, in_flight):
    return schedule(name, p, m, num_chunks=v, in_flight=in_flight)


@functools.cache
def cached_in_flight(tasks, shares):
    return max_in_flight(tasks, [*shares])


def chunk_sizes(n, v):
    return [n // v + (c < n % v) for c in range(v)]


class Seat(NamedTuple):
    """The place of a stage."""

    nodes: tuple[str, ...]  # equal parts of its devices on each
    mesh: tuple[int, int, int, int]
    axes: int = 0  # which order of them
    is_cut: bool = False  # whether `tensor` cuts sequences between products


class Definition:
    """Seconds of a step of any plan, worked out by itself; for clusters of equal nodes."""

    def __init__(self, config, topology):
        self.config, self.topology = config, topology
        self.groups = functools.cache(self._groups)
        self.times = functools.cache(self._times)
        self.way_s = functools.cache(self._way_s)
        self.fits = functools.cache(self._fits)
        self.pipes = functools.cache(self._pipes)
        _, *blocks, _ = model_layers.layers(config.model).values()
        self.kinds = list(dict.fromkeys(blocks))
        self.kind_of = [self.kinds.index(kind) for kind in blocks]  # of each Transformer layer

    def blocks(self, start, stop):
        """The number of layers of each kind in a range."""
        own = self.kind_of[start:stop]
        return tuple(own.count(kind) for kind in range(len(self.kinds)))

    def chunks(self, layers, v):
        """The number of layers of each kind in every chunk of each stage."""
        p, found, start = len(layers), [[] for _ in layers], 0
        for virtual in range(p * v):
            size = chunk_sizes(layers[virtual % p], v)[virtual // p]
            found[virtual % p].append(self.blocks(start, start + size))
            start += size
        return found

    def seats(self, cluster, mesh, how, k):
        """Places of so many stages: whole nodes, where these have the devices; else devices."""
        nodes, size = [node.name for node in cluster.nodes], math.prod(mesh)
        in_each, each = cluster.nodes[0].num_devices, len(nodes) // k
        if each * in_each >= size:
            count = math.ceil(size / in_each)
            return [Seat(tuple(nodes[i * each :][:count]), mesh, *how) for i in range(k)]
        share = len(nodes) * in_each // k
        ends = [(i * share // in_each, (i * share + size - 1) // in_each) for i in range(k)]
        assert all(first == last for first, last in ends), "a stage on parts of two nodes"
        return [Seat((nodes[node],), mesh, *how) for node, _ in ends]

    def arrangements(self, nodes, mesh):
        axes = Axis.DATA, Axis.FSDP, Axis.TENSOR, Axis.CONTEXT
        paths = Paths.between(self.topology, nodes)
        devices = {name: tuple(range(math.prod(mesh) // len(nodes))) for name in nodes}
        return arrangements(paths, devices, dict(zip(axes, mesh, strict=True)))

    def every_part(self, cluster, m):
        """(mesh, order of its axes and whether sequences are cut, number of stages with it)."""
        asked = self.config.kernels.sequence_parallel
        num_devices = sum(node.num_devices for node in cluster.nodes)
        for mesh in every_mesh(self.config, num_devices, m):
            can = mesh[2] > 1 and self.config.model.context_length // mesh[3] % mesh[2] == 0
            cuts = {"off": [False], "on": [can], "auto": [False, True][: 1 + can]}[asked]
            for k in range(1, num_devices // math.prod(mesh) + 1):
                nodes = self.seats(cluster, mesh, (), k)[0].nodes
                number = len(self.arrangements(nodes, mesh)) if len(nodes) > 1 else 1
                yield from ((mesh, how, k) for how in itertools.product(range(number), cuts))

    def _groups(self, seat):
        return self.arrangements(seat.nodes, seat.mesh)[seat.axes].groups

    def shape(self, seat, m, policy, blocks, first, last, **held):
        data, fsdp, tensor, context = seat.mesh
        train = self.config.train
        return StageShape(
            blocks=blocks,
            is_first=first,
            is_last=last,
            data=data,
            tensor=tensor,
            fsdp=fsdp,
            context=context,
            sequences=train.global_batch // (m * data * fsdp),
            dtype=train.compute_dtype,
            checkpointing=policy,
            is_whole_step=first and last and m == 1,
            sequence_parallel=seat.is_cut,
            **{"chunks": 1, "in_flight": 1, "head_in_flight": 1, **held},
        )

    def _times(self, seat, m, policy, blocks, first, last):
        found = self.groups(seat)
        return stage_times(
            self.config.model,
            self.shape(seat, m, policy, blocks, first, last),
            [self.topology.node(seat.nodes[0]).device],
            data=found.get(Axis.DATA),
            tensor=found.get(Axis.TENSOR),
            fsdp=found.get(Axis.FSDP),
            context=found.get(Axis.CONTEXT),
        )

    def _fits(self, seat, m, policy, n, first, last, v, in_flight, head_in_flight):
        held = {"chunks": v, "in_flight": in_flight, "head_in_flight": head_in_flight}
        shape = self.shape(seat, m, policy, n, first, last, **held)
        items = memory.stage_memory_bytes(self.config.model, shape)
        device = self.topology.node(seat.nodes[0]).device
        return sum(items.values()) <= USABLE_MEMORY * device.memory_bytes

    def _way_s(self, source, target, m):
        """From one stage's nodes to another's: each of the smaller sends or receives its part."""
        links = [self.topology.effective_link(a, b) for a in source for b in target]
        model, train = self.config.model, self.config.train
        num_tokens = train.global_batch // m * model.context_length
        num_bytes = costs.boundary_bytes(model, num_tokens, train.compute_dtype)
        share = num_bytes / min(len(source), len(target))
        names = {self.topology.cluster_of(node).name for node in (*source, *target)}
        of_process = min(map(self.topology.transport_bytes_per_s, names))
        return max(
            link.latency_s + share / min(link.bandwidth_bytes_per_s, of_process) for link in links
        )

    def _pipes(self, clusters, m, goes_round):
        """Pipes that arrays queue at, as `queued_finish_times` takes them; for one node a stage."""
        model, train = self.config.model, self.config.train
        num_tokens = train.global_batch // m * model.context_length
        num_bytes = costs.boundary_bytes(model, num_tokens, train.compute_dtype)
        ends = [*itertools.pairwise(range(len(clusters)))]
        ends += [(len(clusters) - 1, 0)] * goes_round
        found = {}
        for ways, nominal in self.topology.uplinks.items():
            rate = FABRICS["ethernet"].reached * nominal
            users = [e for a, b in {*ends} for e in ((a, b), (b, a))]
            users = [e for e in users if tuple(clusters[end] for end in e) in ways]
            alone = {e: self.topology.links[tuple(clusters[end] for end in e)] for e in {*users}}
            most = [
                min(rate, FABRICS[link.fabric].reached * link.bandwidth_bytes_per_s)
                for link in alone.values()
            ]
            if sum(most) > rate * (1 + 1e-9):
                for e, link in alone.items():
                    found.setdefault(e, []).append((ways, num_bytes / rate, link.latency_s))
        return found

    def chunk_times(self, stages, layers, m, policy, v):
        """The numbers of the chunks of each stage."""
        p = len(stages)
        return [
            [
                self.times(seat, m, policy, counts, s + c == 0, s == p - 1 and c == v - 1)
                for c, counts in enumerate(chunks)
            ]
            for s, (seat, chunks) in enumerate(zip(stages, self.chunks(layers, v), strict=True))
        ]

    def step_s(self, stages, layers, m, policy, name, v, in_flight):
        p = len(stages)
        tasks = cached_schedule(name, p, m, v, in_flight)
        ends = [(s == 0, s == p - 1) for s in range(p)]
        blocks = [tuple(map(sum, zip(*counts, strict=True))) for counts in self.chunks(layers, v)]
        for s, (seat, n) in enumerate(zip(stages, layers, strict=True)):
            shares = tuple(c / n for c in chunk_sizes(n, v))
            held = [cached_in_flight(tasks[s], parts) for parts in (shares, (0,) * (v - 1) + (1,))]
            if not self.fits(seat, m, policy, blocks[s], *ends[s], v, *held):
                return math.inf
        of_stages = self.chunk_times(stages, layers, m, policy, v)
        virtual = [of_stages[s][c] for c in range(v) for s in range(p)]
        pairs = [*itertools.pairwise(stages)] + ([(stages[-1], stages[0])] if v > 1 else [])
        # The first stage sends while it computes, but not from within a loop over microbatches; so
        # does W, which ends a split backward.
        sends_within = lambda s: s == 0 and (p > 1 or m == 1)
        whole = [
            self.times(seat, m, policy, block, *end)
            for seat, block, end in zip(stages, blocks, ends, strict=True)
        ]
        clusters = tuple(self.topology.cluster_of(seat.nodes[0]).name for seat in stages)
        pipes = self.pipes(clusters, m, v > 1) if self.topology.uplinks else {}
        finish = functools.partial(queued_finish_times, pipes=pipes) if pipes else finish_times
        finish_s = finish(
            tasks,
            [t.whole_forward_s for t in virtual],
            [t.whole_backward_s - (name == "zero_bubble") * t.weight_s for t in virtual],
            [t.weight_s for t in virtual],
            [(self.way_s(a.nodes, b.nodes, m), self.way_s(b.nodes, a.nodes, m)) for a, b in pairs],
            [t.exposed_gather_s if sends_within(s) else t.gather_s for s, t in enumerate(whole)],
        )
        is_split = name == "zero_bubble"
        reduce_s = [
            t.exposed_reduce_s if sends_within(s) or is_split else t.reduce_s
            for s, t in enumerate(whole)
        ]
        reduced_s = max(finish_s[s] + reduce_s[s] for s in range(p))
        return reduced_s + max(t.update_s for t in whole)

    def splits(self, stages, m, policy, name, v, limit_s):
        """Layers of each stage, but for what must take longer than the limit.

        While a stage does all its work, the first microbatch has come to it through the others'
        first chunks, and the last has yet to go back through them: its gradients of inputs, for
        which `zero_bubble` need not wait. Without a limit, these are all ways to share layers out.
        """
        p, num_layers = len(stages), self.config.model.num_layers
        if math.isinf(limit_s):
            yield from (split for split in compositions(num_layers, p) if min(split) >= v)
            return
        assert len(self.kinds) == 1, "the limit knows layers of one kind"
        ways_s = [
            self.way_s(a.nodes, b.nodes, m)
            + (name != "zero_bubble") * self.way_s(b.nodes, a.nodes, m)
            for a, b in itertools.pairwise(stages)
        ]

        def rest(s, left, others_s):
            if s == p:
                if left == 0:
                    yield ()
                return
            for n in range(v, left - v * (p - 1 - s) + 1):
                own = [
                    self.times(stages[s], m, policy, (c,), s + i == 0, s == p - 1 and i == v - 1)
                    for i, c in enumerate(chunk_sizes(n, v))
                ]
                work_s = sum(t.whole_forward_s + t.whole_backward_s for t in own)
                if others_s + m * work_s > limit_s:
                    return
                around_s = own[0].whole_forward_s + sum(ways_s[s : s + 1])
                if name != "zero_bubble":
                    around_s += own[0].whole_backward_s
                yield from ((n, *more) for more in rest(s + 1, left - n, others_s + around_s))

        yield from rest(0, num_layers, 0.0)


def least_step_s(config, topology, limit_s=math.inf, most_at_end=None, least_of=None):
    """One plan after the other, but for those that must take longer than the limit.

    Args:
      most_at_end: of eager 1F1B, how many microbatches are tried in flight on the last stage, for
        whose forwards nobody waits. Any number, if not given.
      least_of: takes the least seconds of each number of microbatches and checkpointing.
    """
    model, parallel, batch = config.model, config.parallel, config.train.global_batch
    definition = Definition(config, topology)
    best_s, num_tried = math.inf, 0
    policies = [parallel.activation_checkpointing or ("none", "dots", "full")]
    policies = policies[0] if isinstance(policies[0], tuple) else policies
    for policy, m in itertools.product(policies, divisors(batch)):
        if parallel.microbatches not in (None, m):
            continue
        options = {}
        for cluster in topology.clusters:
            options[cluster.name] = own = []
            for mesh, how, k in definition.every_part(cluster, m):
                seats = definition.seats(cluster, mesh, how, k)
                most = model.num_layers * math.isinf(limit_s)
                while most < model.num_layers:  # so many take no longer than the limit
                    t = definition.times(seats[0], m, policy, (most + 1,), False, False)
                    if m * (t.whole_forward_s + t.whole_backward_s) > limit_s:
                        break
                    most += 1
                if most:
                    own.append((seats, most * k))
        for number in range(1, len(options) + 1):
            for used in itertools.permutations(options, number):
                for chosen in itertools.product(*(options[name] for name in used)):
                    if sum(most for _, most in chosen) < model.num_layers:
                        continue
                    stages = [seat for seats, _ in chosen for seat in seats]
                    p = len(stages)
                    if p > model.num_layers or parallel.stages not in (None, p):
                        continue
                    for name, v in every_schedule(config, p, m, policy):
                        for layers in definition.splits(stages, m, policy, name, v, limit_s):
                            if parallel.layers not in (None, layers):
                                continue
                            is_eager = name == "eager_1f1b"
                            depths = every_depth(p, m, most_at_end or m) if is_eager else [()]
                            for depth in depths:
                                num_tried += 1
                                order = name, v, depth
                                found_s = definition.step_s(stages, layers, m, policy, *order)
                                best_s = min(best_s, found_s)
                                if least_of is not None:
                                    least_of[m, policy] = min(
                                        found_s, least_of.get((m, policy), math.inf)
                                    )
    return best_s, num_tried
