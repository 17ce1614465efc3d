"""Optax transformations through the pipeline equal optax on one device, checkpoints included."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from holmesjax import config as configs
from holmesjax.checkpoints import manifest, restoring
from holmesjax.config import OptimizerConfig, ParameterGroupConfig
from holmesjax.config.update_rules import RULES, kept
from holmesjax.costs import memory
from holmesjax.errors import ConfigError, Mistakes
from holmesjax.layer_specs.model_layers import EMBED
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.pipeline import in_one_process
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.jobs import write_run
from tests.one_device import assert_trees_near, plain_loss, step_inputs
from tests.optimizers.muon_steps import numpy_steps
from tests.shapes import shape_of
from tests.stated_parameters import stated
from tests.versions import rows
from tests.written_checkpoints import write_states

pytestmark = pytest.mark.xdist_group("elementwise")

SEED, NUM_STEPS, RTOL = 3, 3, 1e-5
SETTINGS = {"learning_rate": 1e-2, "schedule": "constant", "weight_decay": 0.2, "clip_norm": 0.5}
# Parameters of a group go twice as fast. The average's decay is reached in its fifth update.
OTHERS = {"groups": (ParameterGroupConfig(pattern="block_001/*", learning_rate=2e-2),)}
DECAY = 0.35
CONFIGS = {
    "sgd": OptimizerConfig(name="sgd", beta1=0.9, ema_decay=DECAY, **OTHERS, **SETTINGS),
    "adafactor": OptimizerConfig(name="adafactor", **SETTINGS),
    "muon": OptimizerConfig(name="muon", epsilon=1e-3, **SETTINGS),
}
# Adafactor factors matrices of 128 rows and columns or more; some of these are square. All
# optimizers have the same model, so that its programs are compiled once.
FACTORED = {"num_layers": 2, "width": 128, "mlp_width": 128}


def optax_of(config):
    """Optax's own, with the clipping that the pipeline does by itself."""
    is_matrix = lambda path, x: x.ndim > 1 and path[0].key != EMBED
    is_decayed = lambda params: jax.tree_util.tree_map_with_path(is_matrix, params)
    c, decay = config, {"weight_decay": config.weight_decay, "mask": is_decayed}
    after = optax.chain(
        optax.trace(c.beta1),
        optax.add_decayed_weights(**decay),
        optax.scale_by_learning_rate(c.learning_rate),
        optax.masked(optax.scale(2.0), lambda params: {k: k == "block_001" for k in params}),
    )
    factored = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(**decay),
        optax.scale_by_learning_rate(c.learning_rate),
    )
    matrices = optax.chain(
        plain_muon(), optax.add_decayed_weights(c.weight_decay), optax.scale(-c.learning_rate)
    )
    rest = optax.adamw(c.learning_rate, c.beta1, c.beta2, c.epsilon, **decay)
    muon = optax.partition(
        {True: matrices, False: rest},
        lambda params: jax.tree_util.tree_map_with_path(is_hidden, params),
    )
    clip = optax.clip_by_global_norm(c.clip_norm)
    own = {"sgd": after, "adafactor": factored, "muon": muon}[c.name]
    return optax.chain(clip, own)


def is_hidden(path, x):
    return path[0].key.startswith("block") and x.ndim > 1


def plain_muon():
    """The directions of hidden matrices, in float64: Moonlight's scale, without bias correction."""

    def update(gradients, momentum, params=None):
        mean = lambda m, g: 0.95 * m + 0.05 * g
        momentum = jax.tree.map(mean, momentum, gradients)

        def direction(path, m, g):
            x = np.asarray(mean(m, g), np.float64)
            rows = int(np.prod(x.shape[: 2 if path[-1].key == "out_HKD" else 1]))
            whole = numpy_steps(x.reshape(rows, -1))
            return np.float32(0.2 * max(whole.shape) ** 0.5 * whole.reshape(x.shape))

        return jax.tree_util.tree_map_with_path(direction, momentum, gradients), momentum

    zeros = lambda params: jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)
    return optax.GradientTransformation(zeros, update)


GRADIENT = jax.jit(jax.grad(plain_loss), static_argnums=1)


def steps_on_one_device(model, config, num_sequences):
    """Parameters after each step, and their average."""
    [chunk] = make_chunks(model, hand_made_plan((model.num_layers,), 1, 1))
    params = jax.tree.map(np.asarray, chunk.init(SEED).params)
    optimizer = optax_of(config)
    state = optimizer.init(params)
    average = params

    def updated(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    if config.name != "muon":  # which is NumPy's
        updated = jax.jit(updated)
    for step in range(NUM_STEPS):
        gradient = GRADIENT(params, model, step_inputs(num_sequences, step))
        params, state = updated(gradient, state, params)
        params = jax.tree.map(np.asarray, params)
        keep = min(DECAY, (1 + step) / (10 + step))
        average = jax.tree.map(lambda a, p, k=keep: k * a + (1 - k) * p, average, params)
        yield params, average


@pytest.mark.parametrize("name", rows({name: name for name in CONFIGS}))
def test_steps_are_those_of_optax_before_and_after_a_resume_on_another_plan(name, tmp_path):
    config, model = CONFIGS[name], make_model(tied_embeddings=True, **FACTORED)
    plans = [hand_made_plan((1, 1), 2, 1), hand_made_plan((2,), 1, 2, fsdp=2)]
    chunks, others = (make_chunks(model, plan, config=config) for plan in plans)
    runner = in_one_process(plans[0], compile_chunks(chunks))
    states, batch = runner.init(SEED), plans[0].global_batch
    wanted = steps_on_one_device(model, config, batch)
    for step, want in zip(range(NUM_STEPS - 1), wanted, strict=False):
        states, _ = train_step(runner, states, step_inputs(batch, step))
        check(states, want)
    write_states(tmp_path, model, chunks, (NUM_STEPS - 1,), states=states)
    [found] = manifest.find(tmp_path)
    restored = restoring.restore(found, others)
    saved = {key: x for state in states for key, x in restoring.flatten(state).items()}
    for key, x in restoring.flatten(restored[0]).items():
        np.testing.assert_array_equal(x, saved[key], key)
    runner = in_one_process(plans[1], compile_chunks(others))
    states, _ = train_step(runner, restored, step_inputs(batch, NUM_STEPS - 1))
    check(states, next(wanted))


def check(states, want):
    for state in states:
        averages = () if state.average is None else (state.average.weights,)
        for tree, wanted in zip((state.params, *averages), want, strict=False):
            assert_trees_near(tree, wanted, RTOL, "a parameter or its average")


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("name", RULES)
def test_memory_and_updates_are_those_of_what_an_optimizer_keeps(name, ema_decay):
    function = "tests.own_models:signs" if RULES[name].takes_function else None
    config = OptimizerConfig(name=name, learning_rate=1.0, function=function, ema_decay=ema_decay)
    model = make_model(**FACTORED)
    [chunk] = make_chunks(model, hand_made_plan((2,), 1, 1), config=config)
    state = chunk.state_shapes
    held = sum(x.size * 4 for x in jax.tree.leaves((state.opt_state, state.average)) if x.shape)
    shape = shape_of(num_blocks=2, is_first=True, is_last=True, kept=kept(config))
    assert memory.stage_memory_bytes(model, shape)["optimizer"] == held


def test_an_update_that_does_not_apply_changes_nothing():
    params = {"block_000": {"up_DF": np.ones((2, 2), np.float32)}}
    optimizer = make_optimizer(CONFIGS["sgd"], 10, stated(params))
    state, gradient = optimizer.init(params), jax.tree.map(lambda x: x * np.nan, params)
    new, after = optimizer.apply(gradient, state, params, applies=False)
    for got, want in zip(
        jax.tree.leaves((new, after)), jax.tree.leaves((params, state)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_the_rate_that_is_logged_is_the_one_that_moved_the_parameters():
    """Signs move each number by the rate: that of the section, times the function's."""
    settings = {"learning_rate": 1e-2, "schedule": "linear", "final_fraction": 0.0}
    settings |= {"weight_decay": 0.0, "function": "tests.own_models:with_schedule"}
    params = {"block_000": {"up_DF": np.ones((2, 2), np.float32)}}
    optimizer = make_optimizer(OptimizerConfig(name="optax", **settings), 5, stated(params))
    state = optimizer.init(params)
    for update in range(5):
        logged = float(optimizer.learning_rate(state))
        new, state = optimizer.apply(jax.tree.map(np.ones_like, params), state, params)
        moved = params["block_000"]["up_DF"] - np.asarray(new["block_000"]["up_DF"])
        np.testing.assert_allclose(moved, 1e-2 * (1 - update / 4) * 0.5**update, atol=1e-7)
        np.testing.assert_allclose(moved, logged, atol=1e-7)  # a rounding of 1.0 - rate


def test_a_state_of_other_shapes_is_our_mistake():
    """Optax's Adafactor's, say: it is not elementwise."""
    chunk = make_chunks(make_model(width=128), hand_made_plan((4,), 1, 1))[0]
    factored = make_optimizer(CONFIGS["sgd"], 10, chunk.statements)
    factored = dataclasses.replace(factored, direction=optax.scale_by_factored_rms())
    with pytest.raises(AssertionError, match="not elementwise"):
        factored.shardings(chunk.state_shapes.params, chunk.mesh)


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["optimizer.name=lion", "optimizer.moments=int8"], "is only for optimizer adamw"),
        (["optimizer.name=lyon"], "must be one of adamw, lion"),
    ],
)
def test_what_cannot_be_is_refused(settings, problem, tmp_path):
    with pytest.raises((ConfigError, Mistakes), match=problem):
        configs.load(write_run(tmp_path, {"a": (1,)}), settings)


@pytest.mark.parametrize("name", RULES)
def test_a_stage_may_train_nothing(name):
    """The first stage of a model whose first layers are frozen is such a one."""
    function = "tests.own_models:signs" if RULES[name].takes_function else None
    config = OptimizerConfig(name=name, learning_rate=1.0, function=function)
    params = {"block_000": {}}
    optimizer = make_optimizer(config, 10, stated(params))
    new, state = optimizer.apply(params, optimizer.init(params), params)
    assert new == params
    assert all(x.ndim == 0 for x in jax.tree.leaves(state))
