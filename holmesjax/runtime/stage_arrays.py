"""The arrays of a run, as whoever trains from Python sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from holmesjax.models.layer import merged
from holmesjax.optimizers.optimizer import State
from holmesjax.runtime.chunk import Chunk, ChunkState, Tree


@dataclass(frozen=True, kw_only=True)
class StageArrays:
    """The arrays of a stage between two steps.

    These are the arrays that the run trains, and no copies. The next step takes their memory: JAX
    then raises RuntimeError for whoever reads an array that was kept. `jax.tree.map(jnp.copy, ...)`
    keeps one.
    """

    cluster: str
    layers: tuple[str, ...]
    mesh: Mesh
    params: Tree  # by layer and name, also those that do not train
    opt_state: State  # its trees are by layer and name

    @property
    def shardings(self) -> Tree:
        """The sharding of each parameter, by layer and name."""
        return jax.tree.map(lambda x: x.sharding, self.params)


def of(chunks: Sequence[Chunk], states: Sequence[ChunkState]) -> tuple[StageArrays, ...]:
    """The arrays of each stage of the plan, from those of its chunks in model order."""
    pipelines = {chunk.before: chunk.plan for chunk in chunks}  # several where there are islands
    stages = [
        (before, plan, index)
        for before, plan in pipelines.items()
        for index in range(len(plan.stages))
    ]
    arrays = []
    for before, plan, index in stages:
        stage = plan.stages[index]
        held = [
            (chunk, state)
            for chunk, state in zip(chunks, states, strict=True)
            if chunk.before == before and plan.chunks[chunk.index][0] == index
        ]
        arrays.append(
            StageArrays(
                cluster=stage.cluster,
                layers=stage.layers,
                mesh=held[0][0].mesh,
                params=union([params_of(state) for _, state in held]),
                opt_state=union([state.opt_state for _, state in held]),
            )
        )
    return tuple(arrays)


def params_of(state: ChunkState) -> Tree:
    """All parameters of a chunk, whether they train or not."""
    layers = dict.fromkeys([*state.params, *state.fixed])
    return {
        layer: merged(state.params.get(layer, {}), state.fixed.get(layer, {})) for layer in layers
    }


def union(trees: Sequence[Any]) -> Any:
    """One tree with the keys of all dicts; of what several trees have, the first counts.

    >>> union([({"a": 1}, 7), ({"b": 2, "a": 3}, 8)])
    ({'a': 1, 'b': 2}, 7)
    """
    first = trees[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: union([tree[key] for tree in trees if key in tree]) for key in keys}
    if isinstance(first, tuple):
        make = getattr(first, "_make", tuple)
        return make(union(parts) for parts in zip(*trees, strict=True))
    assert jax.tree.leaves(first) in ([first], []), f"{type(first)} is no dict and no tuple"
    return first
