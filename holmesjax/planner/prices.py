"""The cost of a step: whole nodes for its duration, and bytes that leave a cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holmesjax.planner.problem import Problem
from holmesjax.planner.stage_layouts import Pool
from holmesjax.planner.step_time import link_bytes
from holmesjax.planner.trials import Candidate
from holmesjax.topology.machines import Topology

# Up to so many clusters, every choice is tried. With more: all, each, and all but each.
MAX_SUBSETS = 4


def unpriced(topology: Topology) -> list[str]:
    """Clusters with a device that has no price."""
    return [
        cluster.name
        for cluster in topology.clusters
        if any(node.device.price_dollars_per_h is None for node in cluster.nodes)
    ]


def step_dollars(problem: Problem, candidate: Candidate) -> dict[str, float]:
    """Dollars of a step: `nodes` that any stage uses, idle devices included, and `egress`.

    The result is empty if a device in use has no price. It is also empty if stages cross clusters,
    because the bytes of their collectives are not counted.
    """
    if problem.crosses_because:
        return {}
    names = {name for slot in candidate.assignment.slots for name in problem.nodes(slot)}
    nodes = [problem.topology.node(name) for name in sorted(names)]
    rents = [node.device.price_dollars_per_h for node in nodes]
    if None in rents:
        return {}
    per_h = sum(n.num_devices * (rent or 0.0) for n, rent in zip(nodes, rents, strict=True))
    return {
        "nodes": per_h * candidate.step_s / 3600,
        "egress": _egress_dollars(problem, candidate),
    }


def _egress_dollars(problem: Problem, candidate: Candidate) -> float:
    assignment, settings, chunks = candidate.assignment, candidate.settings, candidate.order.chunks
    return sum(
        num_bytes / 1e9 * problem.topology.links[way].egress_dollars_per_gb
        for way, num_bytes in link_bytes(problem, assignment, settings, chunks).items()
    )


def selections(pools: Sequence[Pool]) -> Iterator[list[Pool]]:
    """Machines that may be rented: some clusters whole, or a half, a quarter, ... of one."""
    names = list(dict.fromkeys(pool.cluster.name for pool in pools))
    of = lambda chosen: [pool for pool in pools if pool.cluster.name in chosen]
    if len(names) <= MAX_SUBSETS:
        for number in range(2 ** len(names) - 1, 0, -1):
            yield of({name for i, name in enumerate(names) if number >> i & 1})
    else:
        yield list(pools)
        yield from (of({*names} - {name}) for name in names)
        yield from (of({name}) for name in names)
    for name in names:
        own = of({name})
        while any(len(pool.devices) > 1 for pool in own):
            own = [_halved(pool) for pool in own]
            yield own


def _halved(pool: Pool) -> Pool:
    """The first half of its nodes, at least one."""
    keep = max(1, len(pool.devices) // 2)
    return replace(pool, devices=dict(list(pool.devices.items())[:keep]))
