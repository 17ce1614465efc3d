"""AdamW and its learning-rate schedules, as an optax chain.

Clipping is not in the chain: its norm is global over all stages, so `stage` scales the gradients
before the chain sees them.
"""

from typing import Any

import jax
import optax

from holmesjax import sharding
from holmesjax.config import OptimizerConfig
from holmesjax.plan import EMBED

Tree = Any


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of update n = 0, 1, ...: a linear warm-up, then the schedule of the config.

    The last update, `num_steps - 1`, has `final_fraction` of the peak, except for "constant".
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup_steps
    rest = max(num_steps - 1 - warmup, 1)
    if config.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, final, rest)
    else:  # warm-up, stable, decay: Hu et al., "MiniCPM", arXiv:2404.06395
        assert config.decay_steps is not None
        stable = max(num_steps - 1 - warmup - config.decay_steps, 0)
        decay = optax.linear_schedule(peak, final, config.decay_steps)
        after = optax.join_schedules([optax.constant_schedule(peak), decay], [stable])
    if not warmup:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def decays(path: tuple) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases and embeddings."""
    return len(sharding.dims(sharding.name_of(path))) > 1 and path[0].key != EMBED


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW with decoupled weight decay. Loshchilov and Hutter, arXiv:1711.05101."""
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: decays(path), tree),
        ),
        optax.scale_by_learning_rate(learning_rate(config, num_steps)),
    )
