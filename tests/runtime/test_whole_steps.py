"""A step equals one plain `jax.grad` step on one device, however it is cut, scheduled and computed.

The rows are in `tests/whole_steps.py`.
"""

import dataclasses
import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from holmesjax.models import transformer
from holmesjax.optimizers.adamw import make_optimizer
from holmesjax.plan.plan import EMBED, HEAD, block_name
from holmesjax.runtime.timeline import Clock
from tests.runtime.test_pipeline import MICROBATCH, assert_near, hand_made_plan, make_stages, put
from tests.whole_steps import ROWS, Row, compiled, runner

SEED = 3
NUM_STEPS = {"float32": 2, "bfloat16": 3, "int8": 3}  # by how moments are kept
RTOL = 1e-5  # of the norm of each array: sums in another order, in float32
# A gradient summed in another order rounds one number in ten thousand otherwise, by 1 in 128 of
# it, or in int8 by some percent. Other noise in parameters: 2e-3; 6e-4.
PARAMETER_RTOL = {"float32": RTOL, "bfloat16": 1e-4, "int8": 3e-4}

# What cannot occur together: one stage has no other, the second part of a divided backward would
# compute layers again, and each stage of an interleaved schedule has several microbatches.
NEVER = {
    *((("cut", "one program"), (axis, "unequal")) for axis in ("data", "fsdp")),
    *((("cut", "zero_bubble"), ("remat", policy)) for policy in ("dots", "full")),
    (("cut", "interleaved_1f1b"), ("microbatches", "one")),
}


def test_every_two_values_that_can_occur_together_do():
    factors = {name: {row.values[name] for row in ROWS} for name in ROWS[0].values}
    assert all(len(values) > 1 for values in factors.values())
    every = {
        pair
        for (a, b) in itertools.combinations(factors, 2)
        for pair in itertools.product([(a, x) for x in factors[a]], [(b, y) for y in factors[b]])
    }
    occur = {pair for row in ROWS for pair in itertools.combinations(row.values.items(), 2)}
    assert every - occur == NEVER


# ---- the step of one device ----------------------------------------------------------------------


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


@functools.partial(jax.jit, static_argnums=0)
def apply_layer(module, params, *args):
    return module.apply({"params": params}, *args)


def summed_loss(params, model, inputs, mask):
    """The whole model, one layer after the other, and the textbook cross-entropy."""
    alike = dataclasses.replace(model, num_layers=1)  # layers of all depths are compiled once
    position_L = jnp.arange(model.context_length)
    segment_BL = inputs["segment_BL"] if mask else None
    x = apply_layer(transformer.Embed(alike), params[EMBED], inputs["token_BL"], position_L)
    for i in range(model.num_layers):
        x = apply_layer(transformer.Block(alike), params[block_name(i)], x, position_L, segment_BL)
    logits = apply_layer(transformer.Head(alike), params[HEAD], x, params[EMBED]["token_VD"])
    log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(log_p, inputs["target_BL"][..., None], axis=-1)[..., 0]
    return -picked.sum(where=inputs["target_BL"] >= 0)


def plain_loss_and_gradient(params, model, inputs, mask):
    """Returns both for the mean over the tokens that count, computed a few sequences at a time."""
    loss, gradient = 0.0, jax.tree.map(jnp.zeros_like, params)
    for start in range(0, len(inputs["token_BL"]), MICROBATCH):
        some = {name: x[start : start + MICROBATCH] for name, x in inputs.items()}
        own, of_own = jax.value_and_grad(summed_loss)(params, model, some, mask)
        loss, gradient = loss + own, jax.tree.map(jnp.add, gradient, of_own)
    count = np.count_nonzero(inputs["target_BL"] >= 0)
    return float(loss) / count, jax.tree.map(lambda g: g / count, gradient)


@functools.cache
def plain_steps(row: Row) -> list[tuple]:
    """(loss, norm of the gradient, clipped gradient, parameters) of each step on one device."""
    [stage] = make_stages(row.model, hand_made_plan((row.model.num_layers,), 1, 1))
    params = jax.tree.map(np.asarray, stage.init(SEED).params)
    optimizer = make_optimizer(row.optimizer, 100)
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    found = []
    for step in range(NUM_STEPS[row.moments]):
        inputs = step_inputs(row.plan.global_batch, step)
        loss, gradient = plain_loss_and_gradient(params, row.model, inputs, row.mask)
        norm = float(optax.tree_utils.tree_norm(gradient))
        if row.clip_norm is not None:
            clip = optax.clip_by_global_norm(row.clip_norm)
            gradient, _ = clip.update(gradient, optax.EmptyState())
        updates, opt_state = update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        found.append((loss, norm, gradient, params))
    return found


def test_a_document_does_not_see_the_one_before():
    """Both sides of the table use the same layers, so it would not notice."""
    row = next(row for row in ROWS if row.mask)
    [stage] = make_stages(row.model, hand_made_plan((row.model.num_layers,), 1, 1))
    params, inputs = stage.init(SEED).params, step_inputs(MICROBATCH, 0)
    changed = {**inputs, "token_BL": inputs["token_BL"].copy()}
    changed["token_BL"][:, :8] += 1  # the first document
    target_BL = inputs["target_BL"].copy()
    target_BL[:, :8] = -1  # the second document alone counts
    losses = {
        mask: [
            float(summed_loss(params, row.model, {**own, "target_BL": target_BL}, mask))
            for own in (inputs, changed)
        ]
        for mask in (True, False)
    }
    assert losses[True][0] == losses[True][1]
    assert losses[False][0] != losses[False][1]


# ---- the rows ------------------------------------------------------------------------------------


def assert_trees_near(got, want, rtol, where):
    for layer, arrays in got.items():
        for path, x in jax.tree_util.tree_leaves_with_path(arrays):
            wanted = functools.reduce(lambda tree, key: tree[key.key], path, want[layer])
            # One number in ten thousand is more of the norm of an array with fewer.
            few = 1.0 if rtol == RTOL else max(1.0, (10_000 / x.size) ** 0.5)
            assert_near(x, wanted, rtol * few, f"{where}, {layer} {path}")


def check(row, plan):
    """Every loss, norm, gradient and parameter of some steps, and the loss of a validation."""
    run, wanted = runner(row, plan), plain_steps(row)
    states, clock = run.init(SEED), Clock(len(plan.stages))
    for step, (loss, norm, gradient, params) in enumerate(wanted):
        inputs = step_inputs(plan.global_batch, step)
        placed = put(run, inputs, trains=False)
        count = np.count_nonzero(inputs["target_BL"] >= 0)
        # Parameters of later steps are as near as roundings of moments leave them.
        rtol = PARAMETER_RTOL[row.moments] if step else RTOL
        assert float(run.evaluate(states, placed)) / count == pytest.approx(loss, rel=rtol)
        states, metrics = run.train_step(states, put(run, inputs), clock.timeline())
        assert float(metrics["loss"]) == pytest.approx(loss, rel=rtol)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=rtol)
        for state in states:
            if row.moments == "float32":
                assert_trees_near(state.opt_state.mu, gradient, RTOL, f"gradient, step {step}")
            rtol = PARAMETER_RTOL[row.moments]
            assert_trees_near(state.params, params, rtol, f"parameter, step {step}")
    clock.close()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_row_equals_one_device(row):
    check_row(row)


@pytest.mark.exhaustive
def test_chunks_that_differ_in_names_alone_round_their_moments_by_their_own_names():
    changed = {"split": (3, 3), "chunks": 3, "schedule": "interleaved_1f1b", "microbatches": 4}
    check_row(Row(**changed, moments="int8"))


def check_row(row):
    check(row, row.plan)
    programs = compiled(row)
    if not isinstance(programs, list):
        return
    if row.microbatches == 1:  # what such a plan does not run is not compiled
        for chunk in programs:
            assert max(Counter(key.function for key in chunk.table).values()) == 1
    elif row.schedule == "1f1b":
        in_flight = {2: (3, 1), 3: (4, 3, 1)}[len(row.split)]
        for changes in ({"schedule": "gpipe"}, {"schedule": "eager_1f1b", "in_flight": in_flight}):
            check(row, dataclasses.replace(row.plan, **changes))
