"""From logical dims to mesh axes: where every dim of every array of a stage lives.

A parameter states its dims, a letter each, and its sharding follows from them. Three layouts of the
same parameter tree exist during a step:

    master      float32, cut over `tensor`, `fsdp`, `context`, `expert` and, where a dim divides,
                over `data` (ZeRO-1); the optimizer's moments and the reduced gradients lie the same
                way
    replicas    compute dtype, or codes of fp8, one copy for each data replica, stacked along a
                leading dim R that is cut over `data`; inside a replica, cut over `tensor`, `fsdp`,
                `context` and `expert`. The forward and the backward gather a layer over the last
                three when they come to it (ZeRO-3), but leave experts cut over `expert`
    gradients   float32, like replicas: each replica's own sum, not yet reduced over `data`

Sequences are shared out over `data`, `fsdp` and `expert`, and each is cut over `context`. A mesh
without one of the last three has a single part there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax.layer_specs.array_boxes import Box, from_index, num_elements, within
from holmesjax.layer_specs.kind import PARTS_DIM, TENSOR_DIMS, Parameter, begins_with_experts
from holmesjax.plan.plan import Axis

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name
Sizes = Mapping[Any, int]  # axis -> size, of a mesh or of a stage's plan

PART_AXES = (Axis.FSDP, Axis.CONTEXT, Axis.EXPERT)  # which cut a replica's parameters


def num_parts(sizes: Sizes) -> int:
    """Devices over which the parameters of a replica are cut, besides `tensor`."""
    return math.prod(sizes.get(axis, 1) for axis in PART_AXES)


def computed_spec(dims: str, sizes: Sizes) -> P:
    """How a parameter is cut while its layer computes: over `tensor`, and experts over `expert`.

    >>> tuple(computed_spec("DHK", {"expert": 2})), tuple(computed_spec("EDF", {"expert": 2}))
    ((None, 'tensor', None), ('expert', None, 'tensor'))
    """
    spec: list[Any] = [Axis.TENSOR.value if dim in TENSOR_DIMS else None for dim in dims]
    if begins_with_experts(dims):
        spec[0] = _axes(sizes, Axis.EXPERT)
    return P(*spec)


def shard_spec(dims: str, sizes: Sizes) -> P:
    """How one replica of a parameter is cut between its uses: over all axes but `data`."""
    spec = list(computed_spec(dims, sizes))
    if PARTS_DIM in dims:
        spec[dims.index(PARTS_DIM)] = _axes(sizes, *_axes_of_parts(dims))
    return P(*spec)


def _axes_of_parts(dims: str) -> tuple[Axis, ...]:
    """The axes that cut the model width of a parameter with these dims."""
    return PART_AXES[:2] if begins_with_experts(dims) else PART_AXES


def _axes(sizes: Sizes, *axes: Axis) -> str | tuple[str, ...] | None:
    """Returns the axes that a mesh has, as an entry of a partition spec."""
    found = tuple(axis.value for axis in axes if axis in sizes)
    return found if len(found) > 1 else found[0] if found else None


def data_dim(dims: str, shape: tuple[int, ...], sizes: Sizes) -> int | None:
    """The dim of a master parameter that is cut over `data`: the first free one that divides.

    Args:
      dims: of the parameter, a letter each.
      shape: of the parameter.
      sizes: of the axes of the mesh.

    >>> data_dim("DHK", (192, 6, 32), {"data": 2})
    0
    >>> data_dim("DHK", (6, 6, 32), {"data": 2, "fsdp": 2})  # D has 3 left for each part
    2
    >>> data_dim("D", (191,), {"data": 2}) is None
    True
    """
    for i, (axes, size) in enumerate(zip(shard_spec(dims, sizes), shape, strict=True)):
        if dims[i] in TENSOR_DIMS:
            continue
        cuts = math.prod(sizes[axis] for axis in (Axis.DATA, *spec_axes(P(axes), 1)[0]))
        if size % cuts == 0:
            return i
    return None


def master_spec(dims: str, shape: tuple[int, ...], sizes: Sizes) -> P:
    """How a master is cut: as `shard_spec`, and over `data` inside each part of a replica."""
    spec = list(shard_spec(dims, sizes))
    if (dim := data_dim(dims, shape, sizes)) is not None:
        data = Axis.DATA.value
        axes = spec_axes(P(spec[dim]), 1)[0]
        spec[dim] = (*axes, data) if axes else data
    return P(*spec)


def master_sharding(parameter: Parameter, mesh: Mesh) -> NamedSharding:
    """The sharding of a parameter's master, and of what an optimizer keeps of its shape."""
    return NamedSharding(mesh, master_spec(parameter.dims, parameter.shape, mesh.shape))


def master_specs(parameters: Sequence[Parameter], mesh: Mesh | None) -> list[P] | None:
    """`master_spec` of each parameter; None without a mesh."""
    if mesh is None:
        return None
    return [master_sharding(parameter, mesh).spec for parameter in parameters]


def replica_spec(dims: str, sizes: Sizes) -> P:
    return P(Axis.DATA.value, *shard_spec(dims, sizes))


def batch_sharding(mesh: Mesh, num_leading: int = 0) -> NamedSharding:
    """The sharding of arrays whose dims, after `num_leading` others, begin with B and L."""
    return NamedSharding(mesh, batch_spec(mesh.shape, num_leading))


def batch_spec(sizes: Sizes, num_leading: int = 0) -> P:
    """The partition spec of `batch_sharding`, for a mesh with axes of these sizes."""
    lead = (None,) * num_leading
    sequences = _axes(sizes, Axis.DATA, Axis.FSDP, Axis.EXPERT)
    if Axis.CONTEXT not in sizes:
        return P(*lead, sequences)
    return P(*lead, sequences, Axis.CONTEXT.value)


def part_spec(sizes: Sizes) -> P:
    """How parts of sequences are cut inside one replica, all first parts first (`ops.to_parts`)."""
    return P(_axes(sizes, Axis.CONTEXT, Axis.FSDP, Axis.EXPERT))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def put(host: np.ndarray | np.float32, where: NamedSharding) -> jax.Array:
    """Puts an array that every process has whole on its host onto devices."""
    if where.is_fully_addressable:
        return jax.device_put(host, where)
    # `device_put` would compare the values of all processes first.
    return jax.make_array_from_callback(host.shape, where, lambda index: np.asarray(host)[index])


def build(
    shape: tuple[int, ...], where: NamedSharding, make: Callable[[Box], np.ndarray]
) -> jax.Array:
    """An array of which no process has the whole.

    A process makes the boxes of its devices once, and compares them with no other process. Boxes
    that lie next to each other are made together.

    Args:
      make: what is in a box of the array; a function of the box alone.
    """
    indices = where.addressable_devices_indices_map(shape).values()
    boxes = {from_index(index, shape) for index in indices}
    around = tuple(
        (min(start for start, _ in ends), max(stop for _, stop in ends))
        for ends in zip(*boxes, strict=True)
    )
    if sum(map(num_elements, boxes)) == num_elements(around):
        whole = make(around)
        made = {box: whole[within(box, around)] for box in boxes}
    else:
        made = {box: make(box) for box in boxes}
    return jax.make_array_from_callback(shape, where, lambda index: made[from_index(index, shape)])


def spec_axes(spec: P, num_dims: int) -> tuple[tuple[str, ...], ...]:
    """For each dim, the mesh axes that cut it.

    >>> spec_axes(P("data", None, ("fsdp", "tensor")), 4)
    (('data',), (), ('fsdp', 'tensor'), ())
    """
    entries = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    return tuple(map(tuple, entries)) + ((),) * (num_dims - len(entries))


def from_axes(mesh: Mesh, axes: tuple[tuple[str, ...], ...]) -> NamedSharding:
    """The opposite of `spec_axes`."""
    dims_axes = [None if not a else a[0] if len(a) == 1 else a for a in axes]
    while dims_axes and dims_axes[-1] is None:
        dims_axes.pop()
    return NamedSharding(mesh, P(*dims_axes))
