"""The nodes that keep copies of checkpoints in their memory: each part has one in another cluster.

Copies are made after each save, and go through the launcher. All of them together take a share of
the slowest link between two partners, and leave the rest to the boundaries of steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holmesjax.plan.plan import Plan
from holmesjax.plan.processes import Process
from holmesjax.topology.machines import Topology

SHARE = 0.25  # of a link, for all copies together


@dataclass(frozen=True, kw_only=True, slots=True)
class Partner:
    """A part of a checkpoint, with the processes that write it and that keep its copy."""

    part: int
    layers: tuple[str, ...]
    writer: Process
    holder: Process


def part_layers(plan: Plan) -> list[tuple[int, tuple[str, ...]]]:
    """The stage of each part of a checkpoint, and the layers in it, in the order of the parts."""
    found, before = [], 0
    for pipeline in plan.pipelines:
        found += [(before + stage, layers) for stage, layers in pipeline.chunks]
        before += len(pipeline.stages)
    return found


def partners(plan: Plan, processes: Sequence[Process]) -> list[Partner]:
    """The partner of each part, one process for a node; none where the plan has one cluster.

    Args:
      plan: of the run.
      processes: all of the job, in the order of their numbers.
    """
    first_of_node = {process.node: process for process in reversed(processes)}
    nodes = sorted(first_of_node.values(), key=lambda process: process.number)
    held: Counter[int] = Counter()
    found = []
    for part, (stage, layers) in enumerate(part_layers(plan)):
        own = [process for process in processes if process.stage == stage]
        clusters = {process.cluster for process in own}
        if others := [process for process in nodes if process.cluster not in clusters]:
            holder = min(others, key=lambda process: (held[process.number], process.number))
            held[holder.number] += 1
            found.append(Partner(part=part, layers=layers, writer=own[0], holder=holder))
    return found


def copy_bytes_per_s(topology: Topology, found: Sequence[Partner]) -> float:
    """How fast all copies together are made."""
    link = lambda partner: topology.boundary_link(partner.writer.node, partner.holder.node)
    return SHARE * min(link(partner).bandwidth_bytes_per_s for partner in found)
