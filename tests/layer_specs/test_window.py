"""Blocks with a window, mixed with others, equal masked dense attention and `jax.grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.config import ModelConfig
from holmesjax.costs import work
from holmesjax.errors import Mistakes
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name
from holmesjax.planner.stage_layouts import context_sizes
from holmesjax.runtime.pipeline import make_runner
from tests.clusters import make_config
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.one_device import MICROBATCH, RTOL, SEED, check_gradient, step_inputs

pytestmark = pytest.mark.xdist_group("window")

WINDOW = 5
MODEL = make_model(
    num_layers=2,
    positions="learned",
    norm="layer_norm",
    pattern=("window_block", "block"),
    window=WINDOW,
)


def textbook_loss(params, inputs):
    """The model as one first writes it, with JAX's own functions."""

    def norm(x, p):
        return jax.nn.standardize(x, epsilon=1e-5) * p["scale_D"] + p["bias_D"]

    length = MODEL.context_length
    behind = jnp.arange(length)[:, None] - jnp.arange(length)
    x = params[EMBED]["token_VD"][inputs["token_BL"]] + params[EMBED]["position_PD"]
    for i in range(MODEL.num_layers):
        p = params[block_name(i)]
        mask = (behind >= 0) & (behind < (WINDOW if i == 0 else length))
        h = norm(x, p["attention_norm"])
        names = ("query_DHK", "key_DGK", "value_DGK")
        q, k, v = (jnp.einsum("bld,dhk->blhk", h, p[name]) for name in names)
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) / MODEL.head_width**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        x = x + jnp.einsum("bhlm,bmhk,hkd->bld", weights, v, p["out_HKD"])
        h = norm(x, p["mlp_norm"])
        x = x + jax.nn.gelu(h @ p["up_DF"]) @ p["down_FD"]
    log_p = jax.nn.log_softmax(norm(x, params[HEAD]["norm"]) @ params[HEAD]["output_DV"])
    return -jnp.take_along_axis(log_p, inputs["target_BL"][..., None], axis=-1).mean()


def textbook_step():
    [chunk] = make_chunks(MODEL, hand_made_plan((2,), 1, 1))
    params = jax.tree.map(np.asarray, chunk.init(SEED).params)
    with jax.numpy_rank_promotion("allow"):
        return jax.jit(jax.value_and_grad(textbook_loss))(params, step_inputs(MICROBATCH, 0))


def test_windows_equal_masked_dense_attention():
    """Devices share sequences, in runs of 4 tokens: a window reaches over each end."""
    loss, gradient = textbook_step()
    plan = hand_made_plan((1, 1), 1, 1, context=2)
    runner = make_runner(plan, make_chunks(MODEL, plan), evaluates=False)
    states = runner.init(SEED)
    states, metrics = train_step(runner, states, step_inputs(MICROBATCH, 0))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=RTOL)
    check_gradient(states, gradient)


def test_keys_of_a_window_come_from_few_devices():
    """The planner cuts sequences with windows as it cuts others, and knows what is sent."""
    model = {"context_length": 16384, "pattern": ("block", "window_block"), "window": 4096}
    config = make_config(model=model)
    assert context_sizes(config, 8) == [1, 2, 4]
    block, window_block = kinds(config.model).blocks
    received = lambda kind: [float(work.parts_received(kind, 16384, n)) for n in (1, 2, 4)]
    assert received(block) == [0, 1, 3]
    assert received(window_block) == [0, 1, 2]  # of runs of 4096 and 2048 tokens: 1 and 2 before


@pytest.mark.parametrize(
    "changes, where",
    [({"pattern": ("block", "window_block")}, "is missing"), ({"window": 4}, "is only for")],
)
def test_a_window_goes_with_its_kind(changes, where):
    with pytest.raises(Mistakes, match=where):
        ModelConfig(num_layers=2, width=8, num_heads=2, context_length=8, **changes)
