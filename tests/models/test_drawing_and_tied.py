"""Models of your own with dropout, and with one table at both ends, train as on one device.

The oracle is the model written out by hand, with the draws of each sequence. So this is no row of
`tests/whole_steps.py`, whose oracle computes the layers that are stated here.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.errors import ConfigError
from holmesjax.layer_specs.model_layers import EMBED, HEAD, forget, layers
from holmesjax.models.own_model import functions, next_token_losses
from holmesjax.runtime.pipeline import make_runner
from tests import own_models
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, put, train_step
from tests.one_device import RTOL, SEED, check_gradient, step_inputs
from tests.own_model_steps import initial
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("drawing_and_tied")

TABLE = "embed/token_VD"
EARLY, LATE = 0.25, 0.5  # what a block drops before and behind its products
FIRST_SEQUENCE = 24


def dropping_block(params, x_BLD, random):
    h_BLD = own_models.block(params, random.dropout(x_BLD, EARLY))
    return x_BLD + random.dropout(h_BLD - x_BLD, LATE)


def dropping(settings):
    first = functions(own_models.init_embed, own_models.embed)
    block = functions(own_models.init_block, dropping_block, draws=True)
    last = functions(
        lambda key: {"scale_D": jnp.ones(16)},
        lambda params, x_BLD: (x_BLD * params["scale_D"][None, None]) @ params[TABLE].T,
        loss=next_token_losses,
    )
    return [first, *settings.num_layers * [block], last]


SIZES = {"width": 16, "num_heads": 1, "tied_embeddings": True}
MODEL = make_model(num_layers=2, module=f"{__name__}:dropping", **SIZES)
PLANS = {
    "one program, full": hand_made_plan((2,), 2, 2, fsdp=2, microbatches=2, checkpointing="full"),
    "split backward, unlike stages": hand_made_plan(
        (1, 1), (1, 2), (2, 1), fsdp=(2, 1), microbatches=2, schedule="zero_bubble"
    ),
}


def dropped(x_BLD, rate, layer, number):
    """Each sequence's own numbers, by the seed 0, the layer, the sequence and the call."""
    if number is None:  # a validation
        return x_BLD
    key = jax.random.fold_in(jax.random.key(0), zlib.crc32(layer.encode()))

    def keeps(sequence):
        own = jax.random.fold_in(jax.random.fold_in(key, sequence), number)
        return jax.random.bernoulli(own, 1 - rate, x_BLD.shape[1:])

    keep_BLD = jax.lax.map(keeps, FIRST_SEQUENCE + jnp.arange(len(x_BLD)))
    return jnp.where(keep_BLD, x_BLD / (1 - rate), 0)


def plain_loss(params, inputs, trains=True):
    x_BLD = params[EMBED]["token_VD"][inputs["token_BL"]]
    for layer in sorted(name for name in params if name not in (EMBED, HEAD)):
        early, late = (0, 1) if trains else (None, None)
        x_before_BLD = dropped(x_BLD, EARLY, layer, early)
        h_BLD = own_models.block(params[layer], x_before_BLD)
        x_BLD = x_BLD + dropped(h_BLD - x_BLD, LATE, layer, late)
    logits_BLV = x_BLD * params[HEAD]["scale_D"][None, None] @ params[EMBED]["token_VD"].T
    losses_BL = next_token_losses(logits_BLV, inputs["target_BL"])
    return jnp.sum(losses_BL) / jnp.sum(inputs["target_BL"] >= 0)


@functools.cache
def plain_step():
    params = jax.tree.map(jnp.asarray, initial(MODEL, SEED))
    loss, gradient = jax.jit(jax.value_and_grad(plain_loss))(params, step_inputs(8, 1))
    undrawn = jax.jit(functools.partial(plain_loss, trains=False))(params, step_inputs(8, 0))
    return loss, gradient, undrawn


@pytest.mark.parametrize("plan", rows(PLANS))
def test_a_step_with_dropout_and_a_tied_table_is_that_of_one_device(plan):
    loss, gradient, undrawn = plain_step()
    runner = make_runner(plan, make_chunks(MODEL, plan))
    states = runner.init(SEED)
    tables = [
        np.asarray(of_stage.params[EMBED]["token_VD"]) for of_stage in (states[0], states[-1])
    ]
    np.testing.assert_array_equal(*tables)
    found = runner.evaluate(states, put(runner, step_inputs(8, 0), trains=False))
    assert float(found) / (8 * MODEL.context_length) == pytest.approx(float(undrawn), rel=RTOL)
    states, record = train_step(runner, states, step_inputs(8, 1), first_sequence=FIRST_SEQUENCE)
    assert float(record["loss"]) == pytest.approx(float(loss), rel=RTOL)
    assert len(check_gradient(states, gradient)) == len(jax.tree.leaves(gradient))


def test_the_planner_counts_a_table_at_both_ends_once_and_masks():
    kinds = layers(MODEL)
    assert kinds[HEAD].borrows == (TABLE,)
    assert [parameter.name for parameter in kinds[HEAD].parameters] == ["scale_D"]
    assert [product.columns for product in kinds[HEAD].products] == [256]
    assert kinds["block_000"].draws
    assert not kinds[EMBED].draws
    undrawn = layers(
        make_model(num_layers=4, module="tests.own_models:language_model", width=16, num_heads=1)
    )
    # Two masks, of a byte for each number: as much as one number of bfloat16 each two.
    kept = kinds["block_000"].kept.between.whole - undrawn["block_000"].kept.between.whole
    assert kept == 16


# ---- mistakes ------------------------------------------------------------------------------------

FIRST, *_, LAST = dropping(MODEL)
PLAIN = functions(own_models.init_block, own_models.block)


def rate_of(rate):
    run = lambda params, x_BLD, random: random.dropout(x_BLD, rate)
    return functions(lambda key: {"w": jnp.ones(1)}, run, draws=True)


MISTAKES = {
    "no table": (
        (
            functions(lambda key: {"t": jnp.ones((256, 16))}, lambda p, token: p["t"][token]),
            PLAIN,
            LAST,
        ),
        r"tied_embeddings: ties the last layer to token_VD of the first.*\n  found: t \[256, 16\]",
    ),
    "unread": (
        (FIRST, PLAIN, functions(own_models.init_head, own_models.head, loss=next_token_losses)),
        r"tied_embeddings: ties a last layer that does not read the table: head \(head\)",
    ),
    "rate": ((FIRST, rate_of(1.0), LAST), r"module: drops a share that is no .*\n  found: 1.0"),
    "text": ((FIRST, rate_of("0.1"), LAST), r"module: drops a share that is no .*\n  found: '0.1'"),
    "no random": (
        (FIRST, dataclasses.replace(PLAIN, draws=True), LAST),
        r"module: .* be computed: block_000 \(block\)\n  found: TypeError: block\(\) takes 2",
    ),
}


def test_a_table_without_the_setting_is_told():
    global made
    made = lambda settings: [FIRST, PLAIN, LAST]
    forget()
    sizes = {**SIZES, "tied_embeddings": False}
    message = r"head \(<lambda>\)\n  found: KeyError: 'embed/token_VD'\n  fix: set model.tied_emb"
    with pytest.raises(ConfigError, match=message):
        layers(make_model(num_layers=1, module=f"{__name__}:made", **sizes))


@pytest.mark.parametrize("own, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told(own, message):
    global made
    made = lambda settings: list(own)
    forget()
    with pytest.raises(ConfigError, match=rf"model.{message}"):
        layers(make_model(num_layers=1, module=f"{__name__}:made", **SIZES))
