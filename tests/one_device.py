"""Steps on one device, which a step equals however it is cut: every layer by itself, and back.

Each layer's gradient is `jax.vjp` of the layer, compiled once for all depths and batches. The loss
is the textbook cross-entropy; gradients of microbatches are summed in float64.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, layer_names, layers
from holmesjax.models.layer import apply, init_params, statements
from holmesjax.models.transformer import TABLE
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime.timeline import Clock
from kernels.moments import BLOCK, Quantized

MICROBATCH, SEED = 4, 3
MOST_BLOCKS = 8
NUM_STEPS = {"float32": 2, "bfloat16": 3, "int8": 3}  # by how moments are kept
RTOL = 1e-5  # of the norm of each array: sums in another order, in float32
# A moment that is summed in another order rounds otherwise once in a thousand times, by 1 in 128 of
# it, or in int8 by some percent. Parameters after a first step are as near as always.
ROUNDED_RTOL = {"float32": RTOL, "bfloat16": 1e-4, "int8": 3e-4}  # of later parameters
MOMENT_RTOL = {"float32": RTOL, "bfloat16": 2e-3, "int8": 2e-3}
ROUNDED_OTHERWISE = 5e-3  # share of numbers; gradients off by 2e-5 of themselves have more


class Step(NamedTuple):
    loss: float
    z_loss: float
    norm: float  # of the gradient before it is clipped
    gradient: dict
    params: dict  # after the step
    mu: dict  # in float32, however they are kept
    nu: dict


def step_inputs(num_sequences, step) -> dict[str, np.ndarray]:
    """Random tokens. In step 1 few targets of some sequences count, and none of one microbatch."""
    rows = np.random.default_rng([SEED, step]).integers(
        256, size=(num_sequences, 17), dtype=np.int32
    )
    target = rows[:, 1:].copy()
    if step == 1:
        count_B = np.arange(num_sequences) * 7 % 16
        if num_sequences > MICROBATCH:
            count_B[:MICROBATCH] = 0
        target[np.arange(16) >= count_B[:, None]] = -1
    segment = np.repeat([[0, 1]], 8, axis=1) + np.zeros((num_sequences, 1), np.int32)
    return {"token_BL": rows[:, :-1], "target_BL": target, "segment_BL": np.int32(segment)}


# ---- the loss and its gradient -------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, model, token_BL, segment_BL=None):
    """The whole model in one program."""
    arrays = {"token_BL": token_BL, "segment_BL": segment_BL}
    arrays["position_L"] = jnp.arange(token_BL.shape[1])
    x = None
    for layer, kind in layers(model).items():
        borrowed = {path: params[EMBED]["token_VD"] for path in kind.borrows}
        x, _ = apply(layer, model, params[layer] | borrowed, x, **arrays)
    return x


def _summed_cross_entropy(logits, target_BL):
    """The textbook's, of the tokens that count; and their squares of the log-sum-exp."""
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(logits - log_sum, target_BL[..., None], axis=-1)[..., 0]
    total = lambda x: x.sum(where=target_BL >= 0)
    return -total(picked), total(jnp.square(log_sum[..., 0]))


def plain_loss(params, model, inputs, mask=False):
    """The mean over the tokens that count, for `jax.grad`."""
    target_BL, segment_BL = inputs["target_BL"], inputs["segment_BL"] if mask else None
    logits_BLV = logits_of(params, model, inputs["token_BL"], segment_BL)
    loss, squares = _summed_cross_entropy(logits_BLV, target_BL)
    return (loss + model.z_loss_multiplier * squares) / jnp.sum(target_BL >= 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(layer, model, params, x, arrays):
    return apply(layer, model, params, x, **arrays)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(layer, model, dy, params, x, arrays):
    """The gradients of a layer's parameters and of its input, if it has one."""
    run = lambda params, x: apply(layer, model, params, x, **arrays)[0]
    return jax.vjp(run, params, x)[1](dy)


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_gradients(model, params, x, arrays, target_BL):
    """The loss and the z-loss; gradients of their sum with respect to parameters and x."""

    def both(params, x):
        logits = apply(HEAD, model, params, x, **arrays)[0]
        loss, squares = _summed_cross_entropy(logits, target_BL)
        z_loss = model.z_loss_multiplier * squares
        return loss + z_loss, jnp.stack([loss, z_loss])

    (_, losses), gradients = jax.value_and_grad(both, argnums=(0, 1), has_aux=True)(params, x)
    return losses, gradients


def _alike(model):
    """A model whose layers are those of models of other depths, so they are compiled once."""
    return dataclasses.replace(model, num_layers=MOST_BLOCKS, tied_embeddings=False)


def activations(params, model, arrays):
    """The outputs of all layers but the head, in the order of the layers."""
    alike, first = _alike(model), block_name(0)
    xs = [_forward(EMBED, alike, params[EMBED], None, arrays)]
    for i in range(model.num_layers):
        xs.append(_forward(first, alike, params[block_name(i)], xs[-1], arrays))
    return xs


def summed_loss(params, model, inputs, mask):
    """The loss and the z-loss of a few sequences, and the gradient of their sum."""
    alike, first = _alike(model), block_name(0)
    # Without a mask all tokens of a sequence are of one document.
    arrays = {
        "token_BL": inputs["token_BL"],
        "segment_BL": inputs["segment_BL"] * np.int32(mask),
        "position_L": np.arange(model.context_length, dtype=np.int32),
    }
    blocks = [block_name(i) for i in range(model.num_layers)]
    xs = activations(params, model, arrays)
    table = {TABLE: params[EMBED]["token_VD"]} if model.tied_embeddings else {}
    of_head = params[HEAD] | table, xs.pop(), arrays, inputs["target_BL"]
    losses, (found, dx) = _loss_and_gradients(alike, *of_head)
    found = {HEAD: dict(found)}
    of_table = found[HEAD].pop(TABLE, 0.0)
    for name in reversed(blocks):
        found[name], dx = _backward(first, alike, dx, params[name], xs.pop(), arrays)
    found[EMBED], _ = _backward(EMBED, alike, dx, params[EMBED], None, arrays)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    wide[EMBED]["token_VD"] += of_table
    return np.asarray(losses, np.float64), wide


def loss_and_gradient(params, model, inputs, mask):
    """The same as means over the tokens that count, a few sequences at a time."""
    losses, gradient = np.zeros(2), jax.tree.map(lambda x: np.zeros(x.shape), params)
    for start in range(0, len(inputs["token_BL"]), MICROBATCH):
        some = {name: x[start : start + MICROBATCH] for name, x in inputs.items()}
        own, of_own = summed_loss(params, model, some, mask)
        losses, gradient = losses + own, jax.tree.map(np.add, gradient, of_own)
    count = np.count_nonzero(inputs["target_BL"] >= 0)
    return losses / count, jax.tree.map(lambda g: g / count, gradient)


# ---- the steps -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(config, model, params):
    return make_optimizer(config, 100, statements(model)).init(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(config, model, gradient, state, params):
    optimizer = make_optimizer(config, 100, statements(model))
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def wide_moments(moments, which):
    """Moments as float32, by the formulas of `kernels.moments`."""

    def wide(moment):
        if not isinstance(moment, Quantized):
            return np.asarray(moment, np.float32)
        codes, scales = (np.asarray(x, np.float32) for x in moment)
        scales = np.repeat(scales, BLOCK, axis=-1)
        first = codes / 127 * np.abs(codes / 127)
        return scales * (first if which == "first" else ((codes + 128) / 255) ** 4)

    return jax.tree.map(wide, moments, is_leaf=lambda x: isinstance(x, Quantized))


@functools.cache
def steps(model, config, num_sequences, mask=False) -> list[Step]:
    """The first steps of a model with an optimizer's config.

    Args:
      num_sequences: of every step, or of each.
    """
    # Layers are updated one by one: those of the same name are compiled once for many models.
    optimizer = dataclasses.replace(config, clip_norm=None), _alike(model)
    params = init_params(model, SEED)
    states = {layer: _init(*optimizer, {layer: params[layer]}) for layer in params}
    found = []
    num_steps = NUM_STEPS[config.moments]
    counts = [num_sequences] * num_steps if isinstance(num_sequences, int) else num_sequences
    for step, count in zip(range(num_steps), counts, strict=True):
        inputs = step_inputs(count, step)
        (loss, z_loss), gradient = loss_and_gradient(params, model, inputs, mask)
        norm = sum(np.square(g).sum() for g in jax.tree.leaves(gradient)) ** 0.5
        scale = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        gradient = jax.tree.map(lambda g, scale=scale: np.float32(g * scale), gradient)
        new = {}
        for layer in layer_names(model.num_layers):
            own = {layer: gradient[layer]}, states[layer], {layer: params[layer]}
            updated, states[layer] = _update(*optimizer, *own)
            new |= jax.tree.map(np.asarray, updated)
        params = new
        mu, nu = (
            {layer: wide_moments(states[layer][i][layer], which) for layer in states}
            for i, which in ((1, "first"), (2, "second"))
        )
        found.append(Step(loss, z_loss, norm, gradient, params, mu, nu))
    return found


# ---- comparing -----------------------------------------------------------------------------------


def assert_near(got, want, rtol=RTOL, where=""):
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error <= rtol, f"{where}: relative error {error:.1e}"


def pairs(got, want):
    """The arrays of a stage, and those of the model of the same names."""
    for path, x in jax.tree_util.tree_leaves_with_path(got):
        yield path, x, functools.reduce(lambda tree, key: tree[key.key], path, want)


def check_gradient(states, gradient, rtol=RTOL) -> set[str]:
    """The first moments after a first step with beta1 = 0 are the gradient.

    Args:
      gradient: of one device; a model that trains in part has moments of this part alone.

    Returns:
      The names of the parameters that have a moment.
    """
    names = set()
    for state in states:
        for path, moment, wanted in pairs(state.opt_state.mu, gradient):
            assert_near(moment, wanted, rtol, str(path))
            names.add("/".join(key.key for key in path))
    return names


def assert_trees_near(got, want, rtol, where):
    for path, x, wanted in pairs(got, want):
        # One number in a thousand is more of the norm of an array with fewer.
        few = 1.0 if rtol == RTOL else max(1.0, (10_000 / x.size) ** 0.5)
        assert_near(x, wanted, rtol * few, f"{where}, {path}")


def assert_trees_rounded_alike(got, want, where):
    """Few numbers differ by more than sums in another order."""
    for path, x, wanted in pairs(got, want):
        others = np.count_nonzero(np.abs(x - wanted) > 1e-4 * np.abs(wanted))
        assert others <= 8 + ROUNDED_OTHERWISE * x.size, f"{where}, {path}: {others} of {x.size}"


def check(run, plan, wanted, moments="float32", ramp=()):
    """Every loss, norm, gradient, moment and parameter of some steps; the loss of a validation.

    Args:
      ramp: the microbatches of each step, if these are not all of the plan's.
    """
    states, clock = run.init(SEED), Clock(len(plan.stages))
    ramp = ramp or [plan.microbatches] * len(wanted)
    for step, (want, num_microbatches) in enumerate(zip(wanted, ramp, strict=True)):
        inputs = step_inputs(plan.global_batch * num_microbatches // plan.microbatches, step)
        count = np.count_nonzero(inputs["target_BL"] >= 0)
        # Parameters of later steps are as near as roundings of moments leave them.
        rtol = ROUNDED_RTOL[moments] if step else RTOL
        if num_microbatches == plan.microbatches:  # a validation has whole batches
            placed = run.placer.place_all(inputs, trains=False)
            assert abs(float(run.evaluate(states, placed)) / count / want.loss - 1) <= rtol
            placed = run.placer.place_all(inputs)
        else:
            host = {name: inputs[name] for name in run.placer.names}
            placed = run.placer.place(host, count, num_microbatches=num_microbatches)
        states, metrics = run.train_step(states, placed, clock.timeline())
        assert abs(float(metrics["loss"]) / want.loss - 1) <= rtol
        assert abs(float(metrics["grad_norm"]) / want.norm - 1) <= rtol
        if want.z_loss:
            assert abs(float(metrics["z_loss"]) / want.z_loss - 1) <= rtol
        for state in states:
            mu, nu = state.opt_state.mu, state.opt_state.nu
            for which, got, near in (("first", mu, want.mu), ("second", nu, want.nu)):
                got, where = wide_moments(got, which), f"{which} moment, step {step}"
                assert_trees_near(got, near, MOMENT_RTOL[moments], where)
                if moments != "float32" and step == 0:
                    assert_trees_rounded_alike(got, near, where)
            if moments == "float32":  # and beta1 = 0
                assert_trees_near(mu, want.gradient, RTOL, f"gradient, step {step}")
            assert_trees_near(state.params, want.params, rtol, f"parameter, step {step}")
    clock.close()
