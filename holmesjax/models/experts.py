"""A block whose feed-forward is experts: the router, and what becomes of its choices.

E  experts of a layer   k  choices of a token; other dims are those of `models.transformer`
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from holmesjax.config import ExpertsConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.experts import BIAS, COUNT, STEPS, num_expert_blocks
from holmesjax.models import ops
from holmesjax.models.layer import Auxiliary, Context, Params
from holmesjax.models.transformer import attention, feed_forward, norm
from holmesjax.plan.plan import Axis


def expert_block(params: Params, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Auxiliary]:
    """Attention, then experts, each with its norms and added to the residual stream."""

    def normed(name: str, x_BLD: jax.Array) -> jax.Array:
        return norm(params[name], x_BLD, context) if name in params else x_BLD

    if context.cache is None:
        x_BLD = ops.separate(x_BLD)
    y_BLD, cache = attention(params, normed("attention_norm", x_BLD), context)
    x_BLD = ops.separate(x_BLD + normed("attention_post_norm", y_BLD))
    h_BLD = normed("mlp_norm", x_BLD)
    y_BLD, auxiliary = experts(params, h_BLD, context)
    if "up_DF" in params:
        y_BLD = y_BLD + feed_forward(params, h_BLD, context)
    return x_BLD + normed("mlp_post_norm", y_BLD), Auxiliary(cache=cache, **auxiliary)


def experts(
    params: Params, h_BLD: jax.Array, context: Context
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """The sum of what a token's experts give, and the losses, metrics and sums of `Auxiliary`.

    A sequence that is generated leaves no token out: its loads are those of few tokens.

    Raises:
      ConfigError: experts have a capacity for a sequence, and devices share sequences.
    """
    settings, kernels = context.model.experts, context.kernels
    assert settings is not None, "a kind that calls this has experts"
    factor = settings.capacity_factor if context.cache is None else None
    if factor is not None and kernels.context > 1:
        problem = "is for whole sequences, which devices of the axis context share"
        fix = "leave it out, so that no token is left out, or set parallel.context to 1"
        raise ConfigError("model.experts.capacity_factor", problem, found=factor, fix=fix)
    capacity = None
    if factor is not None:
        sizes = h_BLD.shape[1], settings.active, settings.count
        capacity = ops.capacity_rows(*sizes, factor)
    router = params["router"]
    logits_BLE = ops.router_logits(h_BLD, router["weight_DE"])
    bias_E = router.get("bias_E")
    if "steps_E" in router:
        of_steps_E = settings.bias_rate * router["steps_E"]
        bias_E = of_steps_E if bias_E is None else bias_E + of_steps_E
    scores_BLE = _scores(logits_BLE, settings)
    for_choice_BLE = _for_choice(scores_BLE, bias_E, settings)
    choice_BLk = ops.largest(for_choice_BLE, settings.active, kernels.shards)
    choice_BLk = checkpoint_name(choice_BLk, ops.ROUTES)
    weight_BLk = ops.chosen(scores_BLE, choice_BLk)
    if settings.normalized and settings.active > 1:
        weight_BLk = ops.shares(weight_BLk)
    names = ("gate_EDF", "up_EDF") if "gate_EDF" in params else ("up_EDF",)
    is_chosen = choice_BLk[..., None] == jnp.arange(settings.count)[None, None, None]
    place_BLk, groups = choice_BLk, (settings.groups, settings.active_groups)
    if (place_E := router.get("place_E")) is not None:  # a sum, as that of `ops.chosen`
        place_BLk = jnp.sum(jnp.where(is_chosen, place_E, 0), -1).astype(jnp.int32)
        groups = (1, 1)  # the experts of a group lie anywhere
    if "narrow_DC" in params:
        h_BLD = ops.linear(h_BLD, params["narrow_DC"])
    y_BLD = ops.experts_feed_forward(
        context.model.activation,
        h_BLD,
        place_BLk,
        settings.scale * weight_BLk,
        tuple(params[name] for name in names),
        params["down_EFD"],
        capacity=capacity,
        shards=kernels.shards,
        num_chunks=kernels.expert_chunks,
        by_kernel=_by_kernel(h_BLD, params["up_EDF"], context, capacity),
        groups=groups,
    )
    y_BLD = checkpoint_name(y_BLD, ops.RESULTS)
    if "widen_CD" in params:
        y_BLD = ops.linear(y_BLD, params["widen_CD"])
    count_E = jnp.sum(is_chosen, (0, 1, 2), dtype=jnp.float32)
    return y_BLD, _auxiliary(logits_BLE, scores_BLE, count_E, router["count_E"], context)


def _by_kernel(x_BLD: jax.Array, w_EDF: jax.Array, context: Context, capacity: int | None) -> bool:
    """Whether kernels multiply. Raises ConfigError where they are asked for and cannot.

    With a capacity a device that has all experts multiplies them in one batched product.
    """
    kernels = context.kernels
    is_batched = capacity is not None and kernels.size(Axis.EXPERT) == 1
    if kernels.config.experts != "pallas" or is_batched:
        return False
    inner = w_EDF.shape[2] // kernels.size(Axis.TENSOR)
    reason = ops.unsupported_experts(kernels.device, x_BLD.dtype, x_BLD.shape[-1], inner)
    if reason is not None:
        problem = "asks for kernels that cannot multiply here"
        raise ConfigError("kernels.experts", problem, found=reason, fix="use auto or xla")
    return True


def _scores(logits_BLE: jax.Array, settings: ExpertsConfig) -> jax.Array:
    if settings.scores == "sigmoid":
        return jax.nn.sigmoid(logits_BLE)
    return jax.nn.softmax(logits_BLE, axis=-1)


def _for_choice(
    scores_BLE: jax.Array, bias_E: jax.Array | None, settings: ExpertsConfig
) -> jax.Array:
    """The scores by which experts are chosen: with biases, and of the chosen groups alone.

    DeepSeek-V3 chooses so (arXiv:2412.19437, section 2.1.2).
    """
    scores_BLE = scores_BLE if bias_E is None else scores_BLE + bias_E[None, None]
    if settings.active_groups == settings.groups:
        return scores_BLE
    B, L, E = scores_BLE.shape
    scores_BLge = scores_BLE.reshape(B, L, settings.groups, -1)
    of_group_BLg = jnp.sort(scores_BLge, axis=-1)[..., -2:].sum(-1)
    # How many groups come before each; of equal ones the first.
    ahead = of_group_BLg[..., None, :] > of_group_BLg[..., :, None]
    is_equal = of_group_BLg[..., None, :] == of_group_BLg[..., :, None]
    number_g = jnp.arange(settings.groups)
    ahead |= is_equal & (number_g[None, :] < number_g[:, None])[None, None]
    is_chosen = ahead.sum(-1) < settings.active_groups
    return jnp.where(is_chosen[..., None], scores_BLge, -jnp.inf).reshape(B, L, E)


def _auxiliary(
    logits_BLE: jax.Array,
    scores_BLE: jax.Array,
    count_E: jax.Array,
    before_E: jax.Array,
    context: Context,
) -> dict[str, dict[str, jax.Array]]:
    """Losses and metrics, which have the loads of the step before, and the counts of this one.

    The loads of this step are known when its last forward has run on all replicas, which is after
    the first backwards. Those of the step before are the same in every plan, and so is the loss.
    """
    settings, (B, L, _) = context.model.experts, logits_BLE.shape
    assert settings is not None
    mean = before_E.mean()
    load_E = before_E / jnp.where(mean > 0, mean, 1.0)
    losses: dict[str, jax.Array] = {}
    if settings.balance_loss:
        losses["expert_balance"] = jnp.sum(ops.shares(scores_BLE) * load_E[None, None])
    if settings.router_z_loss:
        losses["router_z"] = jnp.sum(jnp.square(jax.nn.logsumexp(logits_BLE, axis=-1)))
    metrics = {
        "expert_peak_load": load_E.max(),
        "idle_experts": jnp.where(mean > 0, jnp.sum(load_E == 0), 0),
    }
    share = B * L / num_expert_blocks(context.model)
    changing = [
        COUNT,
        *([STEPS] if settings.bias_rate else []),
        *([BIAS] if settings.biased else []),
    ]
    return {
        "losses": losses,
        "metrics": {name: share * value for name, value in metrics.items()},
        "sums": dict.fromkeys(changing, count_E),
    }


def changed(old: Mapping[str, jax.Array], counts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`Kind.change`: the choices of each expert in this step, and steps of biases. Fixed ones stay.

    An expert below the mean load goes up, and one above it down.

    Args:
      old: the parameters, by name.
      counts: for each of them the choices of each expert in the whole global batch.
    """
    found = dict(counts)
    if STEPS in old:
        found[STEPS] = old[STEPS] + jnp.sign(counts[COUNT].mean() - counts[COUNT])
    if BIAS in old:
        found[BIAS] = old[BIAS]
    return found
