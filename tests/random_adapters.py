"""States whose adapters are random, and not zero as they start."""

import dataclasses

import jax
import numpy as np

from holmesjax.models.layer import init_params
from tests.one_device import SEED


def apart(params):
    """The parameters of the base, and the adapters, by layer."""
    is_adapter = lambda name: name.endswith("_lora")
    base = {
        n: {k: x for k, x in values.items() if not is_adapter(k)} for n, values in params.items()
    }
    adapters = {
        n: {k: x for k, x in values.items() if is_adapter(k)} for n, values in params.items()
    }
    return base, adapters


def random_bs(model):
    """Initial values, but for B, which are no zeros."""
    random, (base, adapters) = np.random.default_rng(0), apart(init_params(model, SEED))
    draw = lambda x: random.normal(0, 0.1, x.shape).astype(np.float32)
    pick = lambda path, x: draw(x) if path[-1].key.startswith("b_") else x
    return base, jax.tree_util.tree_map_with_path(pick, adapters)


def adapted_states(runner, adapters):
    """The states of all stages with these adapters."""
    return [
        dataclasses.replace(
            state,
            params=jax.tree.map(
                lambda x, new: jax.device_put(new, x.sharding),
                state.params,
                {layer: adapters[layer] for layer in state.params},
            ),
        )
        for state in runner.init(SEED)
    ]
