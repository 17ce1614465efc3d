"""AdamW against its formulas in float64, and the schedules against their shapes."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from holmesjax.config import ModelConfig, OptimizerConfig, RampupConfig, TrainConfig
from holmesjax.layer_specs.model_layers import layers
from holmesjax.optimizers.learning_rates import (
    StepTokens,
    learning_rate as plain_learning_rate,
    step_tokens,
)
from holmesjax.optimizers.optimizer import learning_rate, make_optimizer
from tests.arrays import normal
from tests.stated_parameters import stated

NUM_STEPS = 40


def rates(**settings):
    schedule = learning_rate(OptimizerConfig(learning_rate=2.0, **settings), NUM_STEPS)
    return np.array([float(schedule(step)) for step in range(NUM_STEPS)])


def test_cosine_with_warmup():
    got = rates(schedule="cosine", warmup_steps=8, final_fraction=0.1)
    progress = (np.arange(NUM_STEPS) - 8) / (NUM_STEPS - 1 - 8)
    want = 2.0 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress)))
    want[:8] = 2.0 * np.arange(1, 9) / 8
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_linear_without_warmup():
    got = rates(schedule="linear", final_fraction=0.25)
    np.testing.assert_allclose(got, np.linspace(2.0, 0.5, NUM_STEPS), rtol=1e-6)


def test_constant():
    np.testing.assert_allclose(rates(schedule="constant"), 2.0)


def test_warmup_stable_decay():
    got = rates(schedule="wsd", warmup_steps=4, decay_steps=10, final_fraction=0.0)
    np.testing.assert_allclose(got[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(got[4:30], 2.0)
    np.testing.assert_allclose(got[29:], np.linspace(2.0, 0.0, 11), atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    steps=st.integers(1, 12),
    warmup=st.integers(0, 12),
    decay=st.integers(1, 12),
    begun=st.integers(0, 12),
)
@example(schedule="wsd", steps=10, warmup=2, decay=8, begun=0)  # 0.2125 of the peak, once
@example(schedule="wsd", steps=3, warmup=0, decay=3, begun=0)
@example(schedule="linear", steps=10, warmup=9, decay=1, begun=0)
@example(schedule="cosine", steps=10, warmup=10, decay=1, begun=0)
def test_a_rate_rises_falls_and_ends_at_its_final_fraction(schedule, steps, warmup, decay, begun):
    """By steps and by tokens; of the first, `begun` steps have half a batch."""
    assume(warmup + (decay if schedule == "wsd" else 0) <= steps)
    final = {"learning_rate": 1.0, "schedule": schedule, "final_fraction": 0.1}
    by_steps = {"warmup_steps": warmup, "decay_steps": decay if schedule == "wsd" else None}
    whole = 12 * LENGTH
    by_tokens = {"schedule_by": "tokens", "warmup_tokens": warmup * whole // 2 or None}
    by_tokens["decay_tokens"] = decay * whole // 2 if schedule == "wsd" else None
    growing = StepTokens(whole, ((min(begun, steps - 1), 0.5),))
    for of_schedule, tokens in ((by_steps, None), (by_tokens, growing)):
        config, n = OptimizerConfig(**final, **of_schedule), np.arange(steps + 2)
        rate = np.broadcast_to(plain_learning_rate(config, steps, n, tokens=tokens), n.shape)
        np.testing.assert_allclose(rate[steps - 1 :], 0.1, rtol=1e-12)
        top = int(np.argmax(rate[:-3])) if steps > 1 else 0
        assert (np.diff(rate[: top + 1]) > 0).all()
        assert (np.diff(rate[top:]) <= 1e-12).all()
        assert rate.max() <= 1.0
        assert steps <= warmup + 1 or rate.max() == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_run_shorter_than_its_warmup_only_rises(schedule):
    got = rates(schedule=schedule, warmup_steps=100)
    # float32 sums with the peak: an error of a rounding of the peak, wherever the rate is.
    np.testing.assert_allclose(got, 2.0 * np.arange(1, NUM_STEPS + 1) / 100, rtol=0, atol=2.0**-22)


BY_TOKENS = [
    {"schedule": "constant", "warmup": 6},
    {"schedule": "cosine", "warmup": 6},
    {"schedule": "linear"},
    {"schedule": "wsd", "warmup": 6, "decay": 10, "final_fraction": 0.0},
]
LENGTH = 48  # tokens of a sequence


def rates_by_tokens(train, *, warmup=None, decay=None, **settings):
    """The rates as a program computes them, all at once; the lengths are in steps of the batch."""
    whole = train.global_batch * LENGTH
    settings |= {
        "warmup_tokens": warmup and round(warmup * whole),
        "decay_tokens": decay and round(decay * whole),
    }
    config = OptimizerConfig(learning_rate=2.0, schedule_by="tokens", **settings)
    schedule = learning_rate(config, train.steps, step_tokens(train, LENGTH))
    return np.asarray(jax.jit(schedule)(np.arange(train.steps)) + np.zeros(train.steps))


@pytest.mark.parametrize("case", BY_TOKENS, ids=lambda case: case["schedule"])
def test_by_tokens_equal_batches_have_the_rates_of_steps(case):
    train = TrainConfig(steps=NUM_STEPS, global_batch=12)
    names = {"warmup": "warmup_steps", "decay": "decay_steps"}
    by_steps = OptimizerConfig(
        learning_rate=2.0, **{names.get(name, name): value for name, value in case.items()}
    )
    schedule = learning_rate(by_steps, NUM_STEPS)
    want = np.asarray(jax.jit(schedule)(np.arange(NUM_STEPS)) + np.zeros(NUM_STEPS))
    np.testing.assert_array_equal(rates_by_tokens(train, **case), want)


@pytest.mark.parametrize("case", BY_TOKENS, ids=lambda case: case["schedule"])
def test_by_tokens_the_rates_follow_a_batch_that_grows(case):
    """The tokens of every step are counted one by one, in float64."""
    rampup = RampupConfig(steps=7, global_batch=2), RampupConfig(steps=9, global_batch=8)
    train = TrainConfig(steps=NUM_STEPS, global_batch=12, rampup=rampup)
    ends = np.cumsum([2] * 7 + [8] * 9 + [12] * (NUM_STEPS - 16)) * LENGTH
    begins = np.r_[0, ends[:-1]]
    warmup = case.get("warmup", 0) * 12 * LENGTH
    length = begins[-1] - warmup if "decay" not in case else case["decay"] * 12 * LENGTH
    fallen = np.clip((begins - (begins[-1] - length)) / length, 0, 1)
    shape = {
        "constant": np.zeros(NUM_STEPS),
        "cosine": (1 - np.cos(np.pi * fallen)) / 2,
    }.get(case["schedule"], fallen)
    want = 2 * (1 - (1 - case.get("final_fraction", 0.1)) * shape)
    want = np.where(ends < warmup, 2 * ends / max(warmup, 1), want)
    np.testing.assert_allclose(rates_by_tokens(train, **case), want, rtol=1e-5, atol=1e-6)
    if warmup:
        assert 0 < np.count_nonzero(ends < warmup) - 6 < 10  # more steps than of the whole batch


def test_matrices_decay_and_nothing_else():
    model = ModelConfig(
        num_layers=1,
        width=8,
        num_heads=2,
        context_length=4,
        positions="learned",
        activation="swiglu",
        norm="layer_norm",
    )
    found = {
        f"{layer}/{p.name}": p for layer, kind in layers(model).items() for p in kind.parameters
    }
    block = ("query_DHK", "key_DGK", "value_DGK", "out_HKD", "gate_DF", "up_DF", "down_FD")
    assert {name for name, parameter in found.items() if parameter.decays} == {
        "head/output_DV",
        *(f"block_000/{name}" for name in block),
    }
    assert found.keys() >= {"embed/token_VD", "embed/position_PD", "block_000/mlp_norm/bias_D"}


@pytest.mark.parametrize("begun, jump", [(0, None), (0, 7), (25, -3)])
def test_adamw_equals_its_formulas(begun, jump):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, in float64.

    Moments count their own updates where other islands move the schedule, which begins late and
    jumps: their bias is corrected from zero.
    """
    config = OptimizerConfig(
        learning_rate=0.1, schedule="linear", warmup_steps=3, weight_decay=0.2, epsilon=1e-6
    )
    random = np.random.default_rng(0)
    params = {"block_000": {"up_DF": random.normal(size=(4, 3)), "scale_D": random.normal(size=4)}}
    rate = learning_rate(config, NUM_STEPS)
    optimizer = make_optimizer(config, NUM_STEPS, stated(params))
    optimizer = optimizer.with_jumps() if jump else optimizer
    got = {"block_000": {k: np.float32(v) for k, v in params["block_000"].items()}}
    state = optimizer.init(got)
    moments = {k: [np.zeros_like(v), np.zeros_like(v)] for k, v in params["block_000"].items()}
    for step in range(10):
        if jump and (change := {0: begun, 4: jump}.get(step)):
            state = state._replace(updates=state.updates + change, missed=state.missed + change)
        position = int(state.updates)
        gradient = {k: random.normal(size=v.shape) for k, v in params["block_000"].items()}
        updates, state = optimizer.update(
            {"block_000": {k: np.float32(v) for k, v in gradient.items()}}, state, got
        )
        got = optax.apply_updates(got, updates)
        for name, g in gradient.items():
            m, v = moments[name]
            m[:] = config.beta1 * m + (1 - config.beta1) * g
            v[:] = config.beta2 * v + (1 - config.beta2) * g * g
            m_hat = m / (1 - config.beta1 ** (step + 1))
            v_hat = v / (1 - config.beta2 ** (step + 1))
            theta = params["block_000"][name]
            decay = config.weight_decay * theta if name == "up_DF" else 0.0
            theta -= float(rate(position)) * (m_hat / (np.sqrt(v_hat) + config.epsilon) + decay)
    for name, want in params["block_000"].items():
        np.testing.assert_allclose(got["block_000"][name], want, rtol=2e-5, atol=1e-6)
    assert int(state.updates) == 10 + begun + (jump or 0)


def test_it_is_one_of_optax_transformations():
    """In a chain with optax's clipping, it does what optax's own AdamW does."""
    config = OptimizerConfig(learning_rate=0.1, schedule="constant", weight_decay=0.2)
    clip, c = optax.clip_by_global_norm(0.5), config
    start = {"block_000": {"up_DF": normal(0, 4, 3)}}
    ours = optax.chain(clip, make_optimizer(config, NUM_STEPS, stated(start)))
    theirs = optax.adamw(0.1, c.beta1, c.beta2, c.epsilon, weight_decay=c.weight_decay)
    theirs = optax.chain(clip, theirs)
    trees = []
    for optimizer in (ours, theirs):
        params, state = start, optimizer.init(start)
        for step in range(5):
            gradients = {"block_000": {"up_DF": normal(step, 4, 3)}}
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        trees.append(params["block_000"]["up_DF"])
    np.testing.assert_allclose(*trees, rtol=1e-5)
    assert np.abs(trees[0] - start["block_000"]["up_DF"]).max() > 0.1


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_moments_in_fewer_bits_lead_to_the_same_place(moments, beta2):
    """Least squares with noisy gradients, of parameters whose gradients are of unlike size."""
    random = np.random.default_rng(0)
    slopes = 10.0 ** random.uniform(-1, 1, (16, 128))
    noise = random.normal(size=(400, 16, 128))

    def distance(moments):
        config = OptimizerConfig(
            learning_rate=0.03, schedule="linear", beta2=beta2, weight_decay=0.0, moments=moments
        )
        params = {"block_000": {"up_DF": np.zeros((16, 128), np.float32)}}
        optimizer = make_optimizer(config, len(noise), stated(params))

        def step(carry, noise):
            params, state = carry
            x = params["block_000"]["up_DF"]
            gradients = {"block_000": {"up_DF": slopes * (x - 1 + noise)}}
            return optimizer.apply(gradients, state, params), None

        carry = params, optimizer.init(params)
        (params, _), _ = jax.jit(lambda *args: jax.lax.scan(step, *args))(carry, np.float32(noise))
        return np.sqrt(np.mean(np.square(params["block_000"]["up_DF"] - 1.0)))

    assert distance("float32") < 0.3
    assert distance(moments) == pytest.approx(distance("float32"), rel=0.02)
