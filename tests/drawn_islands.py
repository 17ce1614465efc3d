"""Unlike islands side by side on the devices here, with random weights."""

import dataclasses

import jax
import numpy as np

from holmesjax.checkpoints.array_keys import flatten
from holmesjax.runtime.chunk import ChunkState
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model

CUTS = [((2, 2), 1, 1), ((4,), 2, 1), ((1, 3), 1, (1, 2))]  # of each island: unlike ones


def islands_of(cuts, model=None):
    """The chunks of islands side by side on the devices here."""
    start, found = 0, {}
    for k, (split, data, tensor) in enumerate(cuts):
        plan = hand_made_plan(split, data, tensor)
        moved = tuple(
            dataclasses.replace(stage, devices=tuple(start + device for device in stage.devices))
            for stage in plan.stages
        )
        start += sum(len(stage.devices) for stage in moved)
        chunks = make_chunks(model or make_model(), dataclasses.replace(plan, stages=moved))
        found[k] = [dataclasses.replace(chunk, island=k) for chunk in chunks]
    return found


def states_of(chunks, random):
    """States with random weights, and nothing else."""
    shapes = [chunk.state_shapes.params for chunk in chunks]
    draw = lambda x: jax.device_put(random.normal(size=x.shape).astype(np.float32), x.sharding)
    return [ChunkState(jax.tree.map(draw, params), {}, {}) for params in shapes]


def numbers(states, what):
    trees = [flatten(what(state)) for state in states]
    return {name: np.asarray(x) for tree in trees for name, x in tree.items()}


def with_arrays(state, new):
    """A state with other weights: `new` takes the name and the array of each."""
    named = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(new(".".join(p.key for p in path), x), x.sharding),
        state.params,
    )
    return type(state)(named, {}, {}, outer=state.outer)


def noise(step, island, name, x):
    """Numbers that a step adds to a parameter of an island."""
    rng = np.random.default_rng([step, island, *name.encode()])
    return 0.1 * rng.normal(size=x.shape).astype(np.float32)
