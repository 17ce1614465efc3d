"""The kernel of AdamW on a mesh: each device updates its own parts of parameters, in place.

XLA cannot cut a kernel (`kernels.attention.shards`), so `jax.shard_map` gives each device its part.
No device needs anything of another: the noise that rounds moments has the place in the whole array.
Arrays that the kernel refuses are left to XLA.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from kernels.adamw import Hyperparameters, Leaf, Turn, adamw_step
from kernels.adamw_pallas import PartPlace, adamw_pallas, can_turn, unsupported


def adamw_on_shards(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    hyperparameters: Sequence[Hyperparameters],
    mesh: Mesh | None = None,
    specs: Sequence[Leaf] | None = None,
    turns: Sequence[Turn | None] | None = None,
    *,
    interpret: bool = False,
) -> list[Leaf]:
    """Parameters and moments after a step, if it applies; in place where they are donated.

    Args:
      leaves: parameters and their moments, whole.
      gradients: of the shapes of the parameters, cut as they are.
      factors: those of the step (`adamw.factors`).
      hyperparameters: of each leaf.
      mesh: of the devices; None: one device.
      specs: the partition spec of each array of the leaves; None: all is on one device.
      turns: how gradients lie, as products of this program leave them; None: as the parameters.
      interpret: see `adamw_pallas`.
    """
    if mesh is None or mesh.size == 1 or specs is None:
        mesh, specs = None, [jax.tree.map(lambda _: P(), leaf) for leaf in leaves]
    turns = turns or [None] * len(leaves)
    parts = [_local(*pair, mesh) for pair in zip(leaves, specs, strict=True)]
    taken = []
    for number, (local, leaf, gradient) in enumerate(zip(parts, leaves, gradients, strict=True)):
        start = (0,) * len(leaf.parameter.shape)
        if unsupported(local, gradient, PartPlace(leaf.parameter.shape, start)) is None:
            taken.append(number)
    pick = lambda rows: [rows[number] for number in taken]
    turned = [
        turn if turn and can_turn(part, turn) else None
        for turn, part in zip(pick(turns), pick(parts), strict=True)
    ]

    def update(own: list[Leaf], gradients: list[jax.Array], factors: jax.Array) -> list[Leaf]:
        rows = zip(own, pick(leaves), pick(specs), strict=True)
        places = [_place(part, leaf, spec, mesh) for part, leaf, spec in rows]
        pairs = zip(gradients, turned, strict=True)
        given = [turn.of(g) if turn else g for g, turn in pairs]
        told = factors, pick(hyperparameters)
        return adamw_pallas(own, given, *told, places=places, turns=turned, interpret=interpret)

    if mesh is not None:
        of_gradients = [spec.parameter for spec in pick(specs)]
        update = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(pick(specs), of_gradients, P()),
            out_specs=pick(specs),
            check_vma=False,  # a Pallas call fails it
        )
    found = update(pick(leaves), pick(gradients), factors) if taken else []
    new = dict(zip(taken, found, strict=True))
    for number, leaf in enumerate(leaves):
        if number not in new:
            plain = adamw_step(leaf, gradients[number], factors, hyperparameters[number])
            kept = lambda new, old: jnp.where(factors[5] > 0, new, old)
            new[number] = jax.tree.map(kept, plain, leaf)
    return [new[number] for number in range(len(leaves))]


def _local(leaf: Leaf, spec: Leaf, mesh: Mesh | None) -> Any:
    """The shapes of a device's part."""
    if mesh is None:
        return leaf

    def part(x: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(part, leaf, spec)


def _place(part: Leaf, leaf: Leaf, spec: Leaf, mesh: Mesh | None) -> PartPlace | None:
    """The place of this device's part; None where it is the whole."""
    shape, local = leaf.parameter.shape, part.parameter.shape
    if mesh is None or shape == local:
        return None
    entries = [*spec.parameter, *(None,) * (len(shape) - len(spec.parameter))]
    starts = [
        0 if entry is None else lax.axis_index(entry) * size
        for entry, size in zip(entries, local, strict=True)
    ]
    return PartPlace(shape, tuple(starts))
