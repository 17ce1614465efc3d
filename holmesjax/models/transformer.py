"""The layers of a decoder-only Transformer, as functions of their parameters.

`holmesjax.layer_specs.transformer` states the parameters. Suffixes of array and parameter names
give their dims, one capital letter each, in order; they are logical dims, and `sharding` maps them
to axes.

    B  sequences in the batch   D  model width            H  query heads       K  width of a head
    L  tokens in a sequence     F  feed-forward width     G  key-value heads   V  vocabulary size
    P  positions                T  tokens in a key-value cache

Positions of tokens are [L], or [B, L] where not all sequences start at the same one.

Matrix products run in the dtype of the kernels, if they say one, else of the parameters; norms,
softmax and the loss compute in float32, and logits are float32.
"""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax.config import TABLE
from holmesjax.config.rotary import frequencies, switch_length
from holmesjax.layer_specs.fp8 import weights_by_input
from holmesjax.models import key_cache, ops
from holmesjax.models.key_cache import Cache
from holmesjax.models.layer import Auxiliary, Context, Params
from holmesjax.models.products import PLAIN, Fp8Products, Products


def embed(params: Params, _: None, context: Context) -> tuple[jax.Array, Auxiliary]:
    """Token vectors, plus position vectors where positions are learned."""
    assert context.token_BL is not None, "an embedding needs tokens"
    x_BLD = ops.embedding(params["token_VD"], context.token_BL, context.kernels.dtype)
    if context.model.scaled_embedding:
        # The factor is rounded as the weights are: so are those of published models.
        x_BLD = x_BLD * jnp.asarray(context.model.width**0.5, x_BLD.dtype)
    if "position_PD" in params:
        vectors = ops.embedding(params["position_PD"], context.position_L)
        # Added in the dtype of the table, in which its gradient is then summed over sequences.
        x_BLD = (x_BLD + vectors.reshape(-1, *x_BLD.shape[1:])).astype(x_BLD.dtype)
    return ops.scattered(x_BLD, context.sequence_cut), Auxiliary()


def block(params: Params, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Auxiliary]:
    """Attention, then feed-forward, each with its norms and added to the residual stream.

    Text is generated without fp8.
    """

    def normed(name: str, x_BLD: jax.Array) -> jax.Array:
        return norm(params[name], x_BLD, context) if name in params else x_BLD

    cut = context.sequence_cut
    products = Products(cut)
    if context.cache is None:
        x_BLD = ops.separate(x_BLD)
        if weights_by_input(context.kind):
            products = Fp8Products(context.kind, params, cut)
    y_BLD, cache = attention(params, normed("attention_norm", x_BLD), context, products)
    x_BLD = ops.separate(x_BLD + normed("attention_post_norm", y_BLD))
    y_BLD = feed_forward(params, normed("mlp_norm", x_BLD), context, products)
    sums = products.sums()
    return x_BLD + normed("mlp_post_norm", y_BLD), Auxiliary(cache=cache, sums=sums)


def head(params: Params, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Auxiliary]:
    """The last norm and the output projection: logits, or the loss where there are targets.

    The loss is the cross-entropy of the next tokens, summed over those whose target is not below 0.
    Its gradient is that of the loss and the z-loss. Logits are computed in chunks where they are
    many.
    """
    h_BLD = ops.gathered(norm(params["norm"], ops.separate(x_BLD), context), context.sequence_cut)
    is_tied = TABLE in params
    w = params[TABLE if is_tied else "output_DV"]
    project = ops.linear_transposed if is_tied else ops.linear
    target_BL, soft_cap = context.target_BL, context.model.logit_soft_cap
    if target_BL is None:
        return ops.capped(project(h_BLD, w, "float32"), soft_cap), Auxiliary()
    num_chunks = context.kernels.logit_chunks(x_BLD, context.model.vocab_size)
    z_loss = context.model.z_loss_multiplier
    if num_chunks > 1:
        loss, squares = ops.linear_cross_entropy(
            h_BLD,
            w,
            target_BL,
            is_transposed=is_tied,
            z_loss=z_loss,
            num_chunks=num_chunks,
            soft_cap=soft_cap,
            shards=context.kernels.shards,
        )
    else:
        logits_BLV = project(h_BLD, w, "float32")
        loss = jnp.sum(ops.cross_entropy(logits_BLV, target_BL, soft_cap, z_loss))
        if not z_loss:
            return loss, Auxiliary()
        still_BLV = ops.capped(jax.lax.stop_gradient(logits_BLV), soft_cap)
        squares_BL = jnp.square(jax.nn.logsumexp(still_BLV, axis=-1))
        squares = jnp.sum(squares_BL, where=target_BL >= 0)
    return loss, Auxiliary(metrics={"z_loss": z_loss * squares} if z_loss else {})


# ---- parts of blocks -----------------------------------------------------------------------------


def norm(params: Params, x: jax.Array, context: Context) -> jax.Array:
    """LayerNorm (Ba et al., arXiv:1607.06450) or RMSNorm (Zhang and Sennrich, arXiv:1910.07467).

    The norm of queries and keys has a scale with the dims of a head, or of all heads.
    """
    model = context.model
    scale = next(array for name, array in params.items() if name.startswith("scale_"))
    how = model.norm_epsilon, float(model.zero_centered_norms)
    if "bias_D" in params:
        return ops.layer_norm(x, scale, params["bias_D"], *how)
    return ops.rms_norm(x, scale, *how)


def attention(
    params: Params, h_BLD: jax.Array, context: Context, products: Products = PLAIN
) -> tuple[jax.Array, Cache | None]:
    """Attention of the tokens to those before, projected back; and the extended cache, if any."""
    assert context.kind.attention is not None, "a kind that calls this states its attention"
    rule = ops.rule_of(context.kind.attention)
    if "latent_DJ" in params:
        return _latent_attention(params, h_BLD, context, rule)
    q_BLHK, k_BLGK, v_BLGK = _project(params, h_BLD, context, products)
    cache: Cache | None = None
    if context.cache is None:
        arrays = q_BLHK, k_BLGK, v_BLGK
        out_BLHK = ops.attention(*arrays, context.segment_BL, context.kernels, rule)
    else:
        position_BL = jnp.broadcast_to(context.position_L, k_BLGK.shape[:2])
        held, cache = key_cache.extended(context.cache, k_BLGK, v_BLGK, position_BL, rule.window)
        out_BLHK = ops.cached_attention(q_BLHK, *held, position_BL, rule)
    ys = products.linears("out", out_BLHK, [params["out_HKD"]], 2)
    [y_BLD] = _with_adapters(ys, params, ["out"], out_BLHK, context)
    return _biased(params, "out_D", y_BLD), cache


def _latent_attention(
    params: Params, h_BLD: jax.Array, context: Context, rule: ops.Rule
) -> tuple[jax.Array, Cache | None]:
    """Attention with latents (`layer_specs.latent_attention`).

    A cache holds the latents. There a head's query is turned into their space, and what it gives
    is turned back, so that no key or value of a token before is computed again.
    """
    settings, w_CHX = context.model.latent_attention, params["key_value_CHX"]
    assert settings is not None, "parameters are those of the settings"
    rank, plain = settings.rank, context.model.head_width - settings.rotary_width
    if "query_DQ" in params:
        q_BLQ = norm(params["query_norm"], ops.contract(h_BLD, params["query_DQ"]), context)
        q_BLHK = ops.contract(q_BLQ, params["query_QHK"])
    else:
        q_BLHK = ops.contract(h_BLD, params["query_DHK"])
    of_token_BLJ = ops.contract(h_BLD, params["latent_DJ"])
    c_BLC = norm(params["latent_norm"], of_token_BLJ[..., :rank], context)
    turned_BLHK = _turn_neighbours(q_BLHK[..., plain:], context)
    key_BLGK = _turn_neighbours(of_token_BLJ[..., None, rank:], context)
    q_BLHK, cache = q_BLHK[..., :plain], None
    if context.cache is None:
        y_BLHX = ops.contract(c_BLC, w_CHX)
        same = (*y_BLHX.shape[:3], settings.rotary_width)
        k_BLHK = jnp.concatenate([y_BLHX[..., :plain], jnp.broadcast_to(key_BLGK, same)], -1)
        v_BLHK, width = y_BLHX[..., plain:], y_BLHX.shape[-1] - plain
        v_BLHK = jnp.pad(v_BLHK, [(0, 0)] * 3 + [(0, k_BLHK.shape[-1] - width)])
        q_BLHK = jnp.concatenate([q_BLHK, turned_BLHK], -1)
        arrays = q_BLHK, k_BLHK, v_BLHK
        out_BLHK = ops.attention(*arrays, context.segment_BL, context.kernels, rule)[..., :width]
    else:
        w_CHX = w_CHX.astype(q_BLHK.dtype)
        q_BLHC = jnp.einsum("blhk,chk->blhc", q_BLHK, w_CHX[..., :plain])
        new_BLGJ = jnp.concatenate([c_BLC[:, :, None], key_BLGK], -1)
        position_BL = jnp.broadcast_to(context.position_L, new_BLGJ.shape[:2])
        held, cache = key_cache.extended(
            context.cache, new_BLGJ, new_BLGJ, position_BL, rule.window
        )
        q_BLHJ = jnp.concatenate([q_BLHC, turned_BLHK], -1)
        of_latents_BLHC = ops.cached_attention(q_BLHJ, *held, position_BL, rule)[..., :rank]
        out_BLHK = jnp.einsum("blhc,chk->blhk", of_latents_BLHC, w_CHX[..., plain:])
    return ops.contract(out_BLHK, params["out_HKD"]), cache


def _turn_neighbours(x_BLHK: jax.Array, context: Context) -> jax.Array:
    """Rotary positions, neighbours paired; the first of each pair come first in the result."""
    pairs = x_BLHK.reshape(*x_BLHK.shape[:-1], -1, 2)
    halves = jnp.concatenate([pairs[..., 0], pairs[..., 1]], -1)
    return ops.rotate(halves, context.position_L, *_frequencies(context))


def feed_forward(
    params: Params, h_BLD: jax.Array, context: Context, products: Products = PLAIN
) -> jax.Array:
    """The feed-forward, with a gate and biases where there are any."""
    names = ("gate", "up") if "gate_DF" in params else ("up",)
    weights = tuple(params[f"{name}_DF"] for name in names)
    biases = tuple(params[f"{name}_F"] for name in names if f"{name}_F" in params)
    activation = context.model.activation
    extra = _adapters(params, names, h_BLD, context)
    down = params.get("down_lora", {})
    a_down = (down["a_FR"],) if down else ()
    mask = _mask("down", (context.model.feed_forward_width,), context) if down else None
    reads = () if mask is None else (None, mask)
    y_BLD, *of_a = products.feed_forward(
        activation, h_BLD, weights, (params["down_FD"], *a_down), biases, extra, reads
    )
    if of_a:
        y_BLD = y_BLD + _times_b(of_a[0], down, "down", context)
    return _biased(params, "down_D", y_BLD)


def _biased(params: Params, name: str, y: jax.Array) -> jax.Array:
    return ops.add_bias(y, params[name]) if name in params else y


def _adapters(
    params: Params, names: Sequence[str], x: jax.Array, context: Context
) -> tuple[jax.Array | None, ...]:
    """s (x A) B of each weight; None of those without an adapter.

    A weight with a B alone shares the A of the one before.
    """
    found: list[jax.Array | None] = []
    of_a_BLR = None
    for name in names:
        if own := params.get(f"{name}_lora"):
            if a := [array for key, array in own.items() if key.startswith("a_")]:
                of_a_BLR = _times_a(x, a[0], name, context)
            assert of_a_BLR is not None, f"{name} has no A"
            found.append(_times_b(of_a_BLR, own, name, context))
        else:
            found.append(None)
    return tuple(found)


def _times_a(x: jax.Array, a: jax.Array, name: str, context: Context) -> jax.Array:
    """x A, with some numbers of x as zeros where the run asks for dropout.

    A backward draws the same again: neither what was drawn nor what is left of x is kept.
    """

    def run(x: jax.Array, a: jax.Array) -> jax.Array:
        mask = _mask(name, x.shape[2:], context)
        assert mask is not None, "this step drops"
        return ops.contract(jnp.where(mask, x, jnp.zeros((), x.dtype)), a)

    return jax.checkpoint(run)(x, a) if _drops(context) else ops.contract(x, a)


def _drops(context: Context) -> bool:
    """Whether random numbers are there to drop by; where text is generated there are none."""
    lora = context.model.lora
    return lora is not None and bool(lora.dropout) and context.key_Bk is not None


def _share(context: Context) -> float:
    """The share of its input that an adapter reads while it trains."""
    assert context.model.lora is not None, "the model has adapters"
    return 1.0 - (context.model.lora.dropout or 0.0)


def _mask(name: str, dims: tuple[int, ...], context: Context) -> jax.Array | None:
    """The numbers of its input that an adapter reads, [B, L, ...]; None: all. In a validation all.

    Args:
      name: of the first weight of the adapter.
      dims: of the input, for a token.
      context: of the layer.
    """
    if not _drops(context):
        return None
    assert context.trains is not None, "a kind that draws knows whether it trains"
    shape, number = (context.model.context_length, *dims), zlib.crc32(name.encode())
    share = _share(context)
    draw = lambda key: jax.random.bernoulli(jax.random.fold_in(key, number), share, shape)
    return context.random(draw) | ~context.trains


def _times_b(of_a_BLR: jax.Array, own: Params, name: str, context: Context) -> jax.Array:
    """s (x A) B, of x A and the adapter of a weight."""
    scale = dict(context.kind.scales)[name]
    b = next(array for key, array in own.items() if key.startswith("b_"))
    scaled_BLR = scale * of_a_BLR
    if _drops(context):
        assert context.trains is not None, "a kind that draws knows whether it trains"
        scaled_BLR = jnp.where(context.trains, scaled_BLR / _share(context), scaled_BLR)
    return ops.contract(scaled_BLR, b)


def _with_adapters(
    ys: Sequence[jax.Array],
    params: Params,
    names: Sequence[str],
    x: jax.Array,
    context: Context,
) -> list[jax.Array]:
    """Products of x with weights, each plus that of its adapter, if it has one."""
    both = zip(ys, _adapters(params, names, x, context), strict=True)
    return [y if extra is None else y + extra for y, extra in both]


def _project(
    params: Params, h_BLD: jax.Array, context: Context, products: Products
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values: projected, biased, normed, and turned by their positions."""
    weights = (params["query_DHK"], params["key_DGK"], params["value_DGK"])
    ys = products.linears("attention", h_BLD, weights)
    projected = _with_adapters(ys, params, ("query", "key", "value"), h_BLD, context)
    names = ("query_HK", "key_GK", "value_GK")
    q_BLHK, k_BLGK, v_BLGK = (
        _biased(params, name, y) for name, y in zip(names, projected, strict=True)
    )
    if "query_norm" in params:
        q_BLHK = norm(params["query_norm"], q_BLHK, context)
        k_BLGK = norm(params["key_norm"], k_BLGK, context)
    if context.model.positions == "rotary":
        turn = _frequencies(context)
        q_BLHK = ops.rotate(q_BLHK, context.position_L, *turn)
        k_BLGK = ops.rotate(k_BLGK, context.position_L, *turn)
    return q_BLHK, k_BLGK, v_BLGK


def _frequencies(context: Context) -> tuple[jax.Array | np.ndarray, float]:
    """The frequencies of a layer's rotary positions, and the factor of cosines and sines.

    Returns:
      Frequencies [R], or [B, R] where texts are generated whose length decides; and the factor.
    """
    model, attention = context.model, context.kind.attention
    assert attention is not None, "a kind that turns its keys states its attention"
    if attention.window is not None and model.window_rotary_base is not None:
        return frequencies(model.rotary_width, model.window_rotary_base)
    of_length = functools.partial(
        frequencies, model.rotary_width, model.rotary_base, model.rotary_scaling
    )
    switch = switch_length(model.rotary_scaling)
    if context.cache is None or switch is None:
        return of_length(model.context_length)
    (short_R, factor), (long_R, _) = of_length(switch), of_length(switch + 1)
    position_BL = context.position_L.reshape(-1, context.position_L.shape[-1])
    is_long_B1 = position_BL.max(axis=1, keepdims=True) >= switch
    return jnp.where(is_long_B1, long_R, short_R), factor
