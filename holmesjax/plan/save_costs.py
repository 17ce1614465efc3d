"""The costs of a run beside its steps: bytes and seconds of saves, of copies and of encryption.

No topology says how fast a disk is, so a disk of 1 GB/s is taken. Object stores are reached over
Ethernet, and may be slower. The time of a save passes beside steps.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

from holmesjax.config import Config, update_rules
from holmesjax.costs.optimizer_state import saved_bytes
from holmesjax.files import places
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan import partners
from holmesjax.plan.outer_rule import kept_by, owner_of, trained_sizes
from holmesjax.plan.plan import Plan
from holmesjax.plan.processes import make_processes
from holmesjax.topology.machines import FABRICS, Topology
from holmesjax.units import show

DISK_BYTES_PER_S = 1e9
# What one core encrypts or decrypts, and sends or takes: `benchmarks.transports` at 16 MiB on two
# virtual cores that serve both ends (docs/security.md).
TLS_BYTES_PER_S = 0.57e9
FLOAT_BYTES = 4  # of a number that islands keep between meetings
STANDING_BYTES = 16  # of a layer, where an island is a job of its own (`islands.landing`)
NAMED = 4  # nodes, in a line


def describe(config: Config, topology: Topology, plan: Plan) -> list[str]:
    """Lines for the console.

    Args:
      config: of the run.
      topology: the machines.
      plan: of the run.
    """
    return [
        *_saves(config, topology, plan),
        *_partners(config, topology, plan),
        *_encryption(config, plan),
    ]


def part_bytes(config: Config, plan: Plan) -> list[float]:
    """Bytes of each part of a checkpoint, in the order of the parts."""
    kept, train = update_rules.kept(config.optimizer), config.train
    sizes = {
        name: saved_bytes(kind.parameters, kept, train.param_dtype, train.compute_dtype)
        for name, kind in layers(config.model).items()
    }
    of_meetings: Counter[tuple[int, str]] = Counter()  # by island and layer
    if config.parallel.is_mailbox:
        for island, _ in enumerate(plan.islands):
            of_meetings += {(island, layer): STANDING_BYTES for layer in layers(config.model)}
        for name, count in trained_sizes(config.model).items():
            for island, _ in enumerate(plan.islands):  # the momentum is in the mailbox
                of_meetings[island, name.partition(".")[0]] += FLOAT_BYTES * count
    elif plan.islands:
        owner, numbers = owner_of(config.model, len(plan.islands)), trained_sizes(config.model)
        by_rule = kept_by(config.parallel.outer_rule)
        for name, island in owner.items():
            layer, num_bytes = name.partition(".")[0], FLOAT_BYTES * numbers[name]
            of_meetings[island, layer] += len(by_rule.owned) * num_bytes
            for k in range(len(plan.islands)):
                of_meetings[k, layer] += len(by_rule.own) * num_bytes
    return [
        sum(sizes[layer] + of_meetings[island, layer] for layer in names)
        for island, pipeline in enumerate(plan.pipelines)
        for _, names in pipeline.chunks
    ]


def _saves(config: Config, topology: Topology, plan: Plan) -> Iterator[str]:
    sizes, stages = part_bytes(config, plan), [s for s, _ in partners.part_layers(plan)]
    of_stage: Counter[int] = Counter()
    for stage, size in zip(stages, sizes, strict=True):
        of_stage[stage] += size  # type: ignore[assignment]
    steps, minutes = config.checkpoint.every, config.checkpoint.minutes
    every = f"{steps} steps" if steps else f"{minutes:g} min"
    largest = max(of_stage.values())
    if places.is_url(config.run.dir):
        rates = {stage: _ethernet(topology, plan.stages[stage].nodes[0]) for stage in of_stage}
        where = f"to {config.run.dir}, at an unknown rate"
        if all(rates.values()):
            slowest = max(num_bytes / rates[stage] for stage, num_bytes in of_stage.items())
            where = f"{show(slowest, 's')} over Ethernet to {config.run.dir}"
    else:
        where = f"{show(largest / DISK_BYTES_PER_S, 's')} on a disk of 1 GB/s"
    yield (
        f"saves       {show(sum(sizes), 'B')} every {every}, {show(largest, 'B')} by the largest "
        f"stage: {where}, beside steps"
    )


def _ethernet(topology: Topology, node: str) -> float:
    """Bytes per second of a node's Ethernet; without any, of its fastest network, or 0."""
    rates: Counter[bool] = Counter()
    for nic in topology.node(node).nics:
        reached = FABRICS[nic.fabric].reached * nic.count * nic.rate_bytes_per_s
        is_ethernet = nic.fabric == "ethernet"
        rates[is_ethernet] = max(rates[is_ethernet], reached)  # type: ignore[assignment]
    return rates[True] or rates[False]


def _partners(config: Config, topology: Topology, plan: Plan) -> Iterator[str]:
    if not config.checkpoint.partner:
        return
    processes = make_processes(plan, topology, config.distributed.processes)
    found = partners.partners(plan, processes)
    if not found:
        yield "partner     none: the plan has no node of another cluster than the one that writes"
        return
    sizes, held = part_bytes(config, plan), Counter[str]()
    for partner in found:
        held[partner.holder.node] += 2 * sizes[partner.part]  # type: ignore[assignment]
    copied = sum(sizes[partner.part] for partner in found)
    rate = partners.copy_bytes_per_s(topology, found)
    nodes = [f"{node} {show(size, 'B')}" for node, size in held.most_common(NAMED)]
    nodes += [f"and {len(held) - NAMED} more nodes"] if len(held) > NAMED else []
    yield (
        f"partner     {show(copied, 'B')} after each save, in {show(copied / rate, 's')} at "
        f"{show(rate, 'B/s')}; memory of hosts: {', '.join(nodes)}"
    )


def _encryption(config: Config, plan: Plan) -> Iterator[str]:
    """The line of what is encrypted between stages, and in meetings of islands."""
    if config.distributed.encrypt == "never":
        return
    of_node: Counter[str] = Counter()
    num_bytes, names = 0.0, set[str]()
    for pipeline in plan.islands or (plan,):
        neighbours = itertools.pairwise(pipeline.stages[stage] for stage, _ in pipeline.chunks)
        pairs = [(a, b) for a, b in neighbours if a.nodes != b.nodes]
        if config.distributed.encrypt == "auto":
            pairs = [(a, b) for a, b in pairs if a.cluster != b.cluster]
        of_pair = 2 * pipeline.microbatches * pipeline.boundary_bytes
        for a, b in pairs:
            # The nodes of the smaller stage share what crosses, each with one of the other stage.
            flows = list(zip(a.nodes, b.nodes, strict=False))
            for node in itertools.chain.from_iterable(flows):
                of_node[node] += of_pair / len(flows)  # type: ignore[assignment]
        num_bytes += of_pair * len(pairs)
        names |= {" and ".join(sorted({a.cluster, b.cluster})) for a, b in pairs}
    if len(plan.islands) > 1 and plan.meeting is not None and plan.meeting.mailbox is None:
        for island, sent in zip(plan.islands, plan.meeting.bytes, strict=True):
            nodes = {node for stage in island.stages for node in stage.nodes}
            for node in nodes:  # which receives as much as it sends
                of_node[node] += 2 * sent / plan.meeting.every / len(nodes)  # type: ignore[assignment]
        num_bytes += sum(plan.meeting.bytes) / plan.meeting.every
        names.add("islands")
    if not num_bytes:
        return
    yield (
        f"encrypted   {show(num_bytes, 'B')} a step, between {', '.join(sorted(names))}: "
        f"{show(max(of_node.values()) / TLS_BYTES_PER_S, 's')} of a core of the busiest node; "
        "nothing on one machine"
    )
