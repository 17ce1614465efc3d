"""One end of a crossing: the pieces that a process sends or receives, and their devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holmesjax.layer_specs.array_boxes import Box, intersection, num_elements
from holmesjax.parallel.sharding import from_axes
from holmesjax.plan.plan import Plan
from holmesjax.plan.processes import Process
from holmesjax.transport.crossings import Crossing
from holmesjax.transport.routes import Piece, boxes, pieces, wire_spec


@dataclass
class End:
    """The pieces of one crossing that begin or end in one process."""

    index: int  # among the crossings of the plan
    crossing: Crossing
    sends: dict[int, Piece]  # by its place among the pieces of the crossing
    receives: dict[int, Piece]
    held: dict[int, Box]  # by device: what is offered, or what lands
    here: NamedSharding  # the same for JAX
    senders: dict[int, int] = field(default_factory=dict)  # piece -> the device that has it
    rebuild: Callable[[jax.Array], jax.Array] = lambda array: array  # to the target's layout


def make_end(
    index: int,
    crossing: Crossing,
    me: Process,
    plan: Plan,
    processes: Sequence[Process],
    mesh: Mesh,
) -> End | None:
    """Returns the end of a crossing in one process; None for a process of a third stage.

    Args:
      index: index of the crossing among the crossings of the plan.
      crossing: an array that goes from one stage to another.
      me: the process whose part this is.
      plan: source of the mesh of each stage.
      processes: all processes of the job.
      mesh: devices of the stage of `me`.
    """
    if me.stage not in (crossing.source, crossing.target):
        return None
    is_source = crossing.source == me.stage
    spec = crossing.source_spec if is_source else wire_spec(crossing, plan, processes)
    held = boxes(crossing.shape, spec, plan.stages[me.stage])
    numbered = dict(enumerate(pieces(crossing, plan, processes)))
    end = End(
        index=index,
        crossing=crossing,
        sends={i: piece for i, piece in numbered.items() if piece.source == me.number},
        receives={i: piece for i, piece in numbered.items() if piece.target == me.number},
        held={device: held[device] for device in me.devices},
        here=from_axes(mesh, spec),
    )
    for i, piece in end.sends.items():
        has_it = lambda box, piece=piece: intersection(box, piece.box) == piece.box
        end.senders[i] = next(d for d, box in end.held.items() if has_it(box))
    if not is_source and spec != crossing.target_spec:
        target = from_axes(mesh, crossing.target_spec)
        end.rebuild = jax.jit(lambda array: array, out_shardings=target)
    return end


def size_of(box: Box, crossing: Crossing) -> int:
    """Returns the bytes of a box of a crossing's array."""
    return num_elements(box) * np.dtype(crossing.dtype).itemsize
