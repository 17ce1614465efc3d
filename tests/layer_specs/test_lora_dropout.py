"""Dropout of adapters: zeros among their input, in every plan the same.

The oracle draws by the number of each sequence and trains adapters alone. So this is no row of
`tests/whole_steps.py`, whose steps on one device train every parameter and draw nothing.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.config import LoraConfig
from holmesjax.costs import memory
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.model_layers import block_name, layers
from holmesjax.models import transformer
from holmesjax.models.layer import Context, apply, keys_of
from holmesjax.runtime.microbatch import Residuals
from holmesjax.runtime.pipeline import make_runner
from tests.arrays import normal
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, put, train_step
from tests.one_device import RTOL, SEED, assert_near, check_gradient, step_inputs
from tests.random_adapters import adapted_states, random_bs
from tests.shapes import shape_of
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("lora_dropout")

RATE, FIRST = 0.25, 24  # FIRST: the number of the first sequence of the step
LORA = LoraConfig(rank=4, alpha=6.0, targets=("all-linear",), dropout=RATE)
MODEL = make_model(num_layers=2, num_kv_heads=2, positions="learned", lora=LORA)
PLANS = {
    "one program, parts of sequences, computed again": hand_made_plan(
        (2,), 1, 2, context=2, microbatches=2, checkpointing="full"
    ),
    "a divided backward, unlike stages": hand_made_plan(
        (1, 1), (2, 1), (1, 2), fsdp=(1, 2), microbatches=2, schedule="zero_bubble"
    ),
}


def context_of(trains):
    name = block_name(1)
    key_Bk = keys_of(SEED, name, jnp.arange(FIRST, FIRST + 3))
    return Context(
        model=MODEL,
        kind=layers(MODEL)[name],
        position_L=jnp.arange(16),
        key_Bk=key_Bk,
        trains=jnp.asarray(trains),
    )


def test_an_adapter_reads_three_numbers_of_four_and_counts_as_much_more():
    """Each adapter draws by itself; nothing is dropped in a validation, nor where text is made."""
    _, adapters = random_bs(MODEL)
    params = adapters[block_name(1)]
    x = normal(0, 3, 16, 32)
    names = ("query", "key")
    in_validation = transformer._adapters(params, names, x, context_of(False))
    alone = dataclasses.replace(context_of(True), key_Bk=None, trains=None)
    found = transformer._adapters(params, names, x, context_of(True))
    masks = []
    for i, name in enumerate(names):
        a, b = (np.asarray(array) for array in params[f"{name}_lora"].values())
        plain = 1.5 * np.tensordot(np.asarray(x) @ a, b, 1)
        for whole in (in_validation[i], transformer._adapters(params, names, x, alone)[i]):
            np.testing.assert_allclose(whole, plain, rtol=1e-5, atol=1e-6)
        mask = np.asarray(transformer._mask(name, (32,), context_of(True)))
        masks.append(mask)
        dropped = 1.5 / 0.75 * np.tensordot((np.asarray(x) * mask) @ a, b, 1)
        np.testing.assert_allclose(found[i], dropped, rtol=1e-5, atol=1e-6)
        assert abs(mask.mean() - 0.75) < 6 * (0.75 * 0.25 / mask.size) ** 0.5
    assert 0.5 < (masks[0] == masks[1]).mean() < 0.75
    assert len({mask[row].tobytes() for mask in masks for row in range(3)}) == 6


def test_the_feed_forward_drops_behind_its_activation():
    _, adapters = random_bs(MODEL)
    params, h = dict(adapters[block_name(1)]), normal(1, 3, 16, 32)
    params = {"down_lora": params["down_lora"]}
    params |= {"up_DF": normal(2, 32, 128), "down_FD": normal(3, 128, 32)}
    mask = transformer._mask("down", (128,), context_of(True))

    def plain(params, h):
        hidden = jax.nn.gelu(h @ params["up_DF"])
        a, b = params["down_lora"]["a_FR"], params["down_lora"]["b_RD"]
        return hidden @ params["down_FD"] + 2.0 * (jnp.where(mask, hidden, 0.0) @ a @ b)

    ours = lambda params, h: transformer.feed_forward(params, h, context_of(True))
    dy = normal(4, 3, 16, 32)

    def both_ways(run):
        y, pullback = jax.vjp(run, params, h)
        return y, pullback(dy)

    near = lambda got, want: assert_near(got, np.asarray(want, np.float64), RTOL)
    jax.tree.map(near, *(jax.jit(both_ways, static_argnums=0)(run) for run in (ours, plain)))


def plain_loss(adapters, base, inputs, trains):
    """The mean loss on one device, all sequences at once; each sequence draws by its number."""
    x = None
    for layer in layers(MODEL):
        x, _ = apply(
            layer,
            MODEL,
            base[layer] | adapters[layer],
            x,
            position_L=jnp.arange(MODEL.context_length),
            key_Bk=keys_of(0, layer, FIRST + jnp.arange(8)),
            trains=trains,
            **inputs,
        )
    return x / jnp.sum(inputs["target_BL"] >= 0)


@functools.cache
def plain_step():
    """The loss and the gradients of a step, and the loss of a validation."""
    base, adapters = random_bs(MODEL)
    inputs = {name: x for name, x in step_inputs(8, 0).items() if name != "segment_BL"}
    run = jax.jit(jax.value_and_grad(plain_loss))
    (loss, gradient), (whole, _) = (run(adapters, base, inputs, trains) for trains in (True, False))
    return float(loss), gradient, float(whole)


@pytest.mark.parametrize("plan", rows(PLANS))
def test_every_plan_drops_the_same(plan):
    """A plan of several stages also validates, and then drops nothing."""
    loss, gradient, whole = plain_step()
    _, adapters = random_bs(MODEL)
    runner = make_runner(plan, make_chunks(MODEL, plan), evaluates=False)
    states = adapted_states(runner, adapters)
    inputs = step_inputs(8, 0)
    if len(plan.stages) > 1:
        found = runner.evaluate(states, put(runner, inputs, trains=False))
        assert float(found) / inputs["target_BL"].size == pytest.approx(whole, rel=RTOL)
    states, record = train_step(runner, states, inputs, first_sequence=FIRST)
    assert float(record["loss"]) == pytest.approx(loss, rel=RTOL)
    assert abs(loss / whole - 1) > 5 * RTOL  # it does drop
    assert len(check_gradient(states, gradient)) == len(jax.tree.leaves(gradient))


def test_what_is_dropped_is_drawn_again():
    """But for one byte for each number of the feed-forward, stated as half a number of bfloat16."""
    base, adapters = (values[block_name(1)] for values in random_bs(MODEL))
    narrow = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
    x_BLD = jnp.zeros((3, 16, 32), jnp.bfloat16)
    base, adapters = narrow(base), narrow(adapters)

    def kept(adapters, base, x):
        run = lambda own, x: transformer.block({**base, **own}, x, context_of(True))[0]
        return Residuals.of(jax.vjp(run, adapters, x)[1], (adapters, base)).arrays

    arrays = jax.tree.leaves(jax.eval_shape(kept, adapters, base, x_BLD))
    found = sum(array.size * array.dtype.itemsize for array in arrays)
    [kind] = kinds(MODEL).blocks
    stage = shape_of(sequences=3, dtype="bfloat16")
    assert 3 * 16 * memory.residual_bytes(MODEL, kind, stage) == pytest.approx(found, rel=0.04)


def test_all_bits_of_a_seed_count():
    keys = [tuple(keys_of(seed, "embed", jnp.arange(1))[0].tolist()) for seed in (7, 2**40 + 7)]
    of_jax = jax.random.fold_in(jax.random.key(7), zlib.crc32(b"embed"))
    assert keys[0] == tuple(jax.random.key_data(jax.random.fold_in(of_jax, 0)).tolist())
    assert keys[1] != keys[0]
