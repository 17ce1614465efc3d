"""A model of your own trains as one device does, is drawn alike on every plan, and says its costs.

Mistakes in it are told by layer.
"""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from holmesjax import config as configs, job
from holmesjax.costs import memory
from holmesjax.data.batches import model_inputs
from holmesjax.errors import ConfigError, Mistakes, PlanError
from holmesjax.generation.sampler import Sampler
from holmesjax.layer_specs.model_layers import EMBED, HEAD, forget, layers
from holmesjax.models.layer import apply
from holmesjax.models.own_kinds import draw
from holmesjax.models.own_model import functions, layers_of, name_of, next_token_losses
from holmesjax.optimizers.optimizer import learning_rate
from holmesjax.parallel import platforms
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.programs import ProgramKey
from holmesjax.trainer import Trainer
from holmesjax.training_setup import read_batches
from tests import own_models as own_model
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.jobs import RunningJob, write_run
from tests.one_device import MICROBATCH, RTOL, SEED, check_gradient, pairs, step_inputs
from tests.own_model_steps import initial, plain_loss
from tests.shapes import shape_of
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("own_model")

MODEL = make_model(num_layers=4, width=16, num_heads=1, module="tests.own_models:language_model")
PLANS = {
    "one program, dots": hand_made_plan((4,), 2, 2, fsdp=2, microbatches=2, checkpointing="dots"),
    "split backward, unlike stages": hand_made_plan(
        (1, 3), (1, 2), (2, 1), fsdp=(2, 1), microbatches=2, schedule="zero_bubble"
    ),
}


@functools.cache
def plain_step():
    params = jax.tree.map(jnp.asarray, initial(MODEL, SEED))
    loss, gradient = jax.jit(jax.value_and_grad(plain_loss))(params, step_inputs(8, 1))
    return params, loss, gradient


@pytest.mark.parametrize("plan", rows(PLANS))
def test_a_step_is_that_of_one_device(plan):
    params, loss, gradient = plain_step()
    runner = make_runner(plan, make_chunks(MODEL, plan), evaluates=False)
    states = runner.init(SEED)
    for state in states:
        for path, got, want in pairs(state.params, params):
            np.testing.assert_array_equal(got, want, str(path))
    states, found = train_step(runner, states, step_inputs(8, 1))
    assert float(found["loss"]) == pytest.approx(float(loss), rel=RTOL)
    assert len(check_gradient(states, gradient)) == len(jax.tree.leaves(gradient))


def test_a_device_draws_its_own_part_alone():
    """Whole layers are on no device, and so on no host, while they are drawn."""
    model = make_model(num_layers=1, width=16, num_heads=1, module=f"{__name__}:wide")
    forget()
    plan = hand_made_plan((1,), 2, 2, fsdp=2)
    [chunk] = make_chunks(model, plan)
    shapes = chunk.state_shapes.params["block_000"]
    where = jax.tree.map(lambda x: x.sharding, shapes)
    own = jax.jit(lambda: draw(model, "block_000", SEED, where), out_shardings=where)
    used = own.lower().compile().memory_analysis()
    whole = sum(4 * x.size for x in jax.tree.leaves(shapes))
    # Of 8 devices each has an eighth; the words of the random numbers take as much again, or twice.
    assert used.output_size_in_bytes == pytest.approx(whole / 8, rel=0.01)
    assert used.temp_size_in_bytes < whole / 2


def wide(settings):
    """A model with a large block."""
    block = functions(
        lambda key: {"up_DF": jax.random.normal(key, (16, 2**16))},
        lambda params, x_BLD: x_BLD + params["up_DF"].mean(),
    )
    return [FIRST, block, LAST]


# ---- a run ---------------------------------------------------------------------------------------

SETTINGS = (
    "model.width=16",
    "model.num_heads=1",
    "model.num_layers=2",
    "parallel.tensor=1",
    "train.global_batch=4",
    "optimizer.schedule=constant",  # another would end with the first of two sessions
)


def plain_records(run_file):
    """Every step's loss by `jax.grad` and optax on one device."""
    module = f"model.module={name_of(own_model.language_model)}"
    config = configs.load(run_file, [*SETTINGS, module, "train.steps=4"])
    model, batches, c = config.model, read_batches(config), config.optimizer
    params = jax.tree.map(jnp.asarray, initial(model, config.train.seed))
    decays = {layer: layer != EMBED for layer in params}
    is_decayed = {
        layer: jax.tree.map(lambda x, decay=decay: decay and x.ndim > 1, params[layer])
        for layer, decay in decays.items()
    }
    update = optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.scale_by_adam(c.beta1, c.beta2, c.epsilon),
        optax.add_decayed_weights(c.weight_decay, is_decayed),
        optax.scale_by_learning_rate(learning_rate(c, 4)),
    )
    state, run = update.init(params), jax.jit(jax.value_and_grad(plain_loss))
    for step in range(4):
        inputs = model_inputs(batches.train(step * 4), ("token_BL", "target_BL"))
        loss, gradient = run(params, inputs)
        changes, state = jax.jit(update.update)(gradient, state, params)
        params = optax.apply_updates(params, changes)
        yield float(loss)


@pytest.mark.one_version
def test_it_trains_in_processes_and_resumes_on_another_plan(tmp_path):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    module = f"model.module={name_of(own_model.language_model)}"
    words = [*SETTINGS, module, "train.steps=2", "--launcher", "local"]
    with RunningJob(run_file, *words) as running:
        assert running.end() == 0, running.output
    assert "2 stages" in running.output
    jax.devices()  # of the session, before a run says how many it needs
    settings = [*SETTINGS, "parallel.clusters=[a]", "train.steps=4", "run.rehearse=true"]
    trainer = Trainer(run_file, settings, io.StringIO(), model=own_model.language_model)
    assert len(trainer.job.plan.stages) == 1
    losses = [record["loss"] for record in trainer.train()]
    with pytest.raises(ConfigError, match=r"model\.module: cannot be sampled"):
        Sampler.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="model: must be left out beside a job"):
        Trainer(trainer.job, model=own_model.language_model)
    np.testing.assert_allclose(losses, list(plain_records(run_file)), rtol=RTOL)


# ---- mistakes ------------------------------------------------------------------------------------

FIRST = functions(own_model.init_embed, own_model.embed)
MIDDLE = functions(own_model.init_block, own_model.block)
LAST = functions(own_model.init_head, own_model.head, loss=next_token_losses)


def model_of(*layers):
    """The settings of a model with these layers, under a name of this module."""
    global made
    made = lambda settings: list(layers)
    forget()
    return make_model(num_layers=1, width=16, num_heads=1, module=f"{__name__}:made")


def changed(layer, **changes):
    return dataclasses.replace(layer, **changes)


@dataclasses.dataclass
class Unlike:
    """A function that Python cannot hash."""

    scale: float

    def __call__(self, params, x):
        return self.scale * x


NARROW = functions(own_model.init_block, lambda params, x: x[..., :8])
NOTHING = functions(own_model.init_block, lambda params, x: None)
MISTAKES = {
    "no input": (
        (changed(FIRST, reads=()), MIDDLE, LAST),
        r"has a first layer that reads nothing: embed \(embed\)",
    ),
    "no hash": (
        (FIRST, changed(MIDDLE, apply=Unlike(1.0)), LAST),
        r"must give layers that can be compared\n  found: block: unhashable type: 'Unlike'",
    ),
    "no layer": ((FIRST, 3, LAST), r"must give a list of layers\n  found: int in its list"),
    "number": (
        (FIRST, MIDDLE, MIDDLE, LAST),
        r"must give model.num_layers = 1 layers .*\n  found: 4 layers in all"
        r"\n  fix: set model.num_layers=2, and parallel.layers",
    ),
    "shape": (
        (FIRST, NARROW, LAST),
        r"takes in layer block_000 \(<lambda>\).*\n  found: \[16, 16\] to \[16, 8\]",
    ),
    "nothing": ((FIRST, NOTHING, LAST), r"one array .* in layer block_000.*\n  found: nothing"),
    "width": (
        (changed(FIRST, apply=lambda params, x: jnp.zeros((2, 16, 4))), MIDDLE, LAST),
        r"= 256 numbers in layer embed .*\n  found: \[16, 4\]: 64 for each sequence"
        r"\n  fix: set model.width=4 and model.context_length=16",
    ),
    "no name": (
        (FIRST, functions(lambda key: [jnp.ones(3)], own_model.block), LAST),
        r"a parameter without a name in layer block_000 \(block\)\n  found: \[0\] in what init",
    ),
    "slash": (
        (FIRST, functions(lambda key: {"a/b": jnp.ones(3)}, own_model.block), LAST),
        r"a slash in the name of a parameter in layer block_000 \(block\)\n  found: a/b",
    ),
    "whole numbers": (
        (FIRST, functions(lambda key: {"n": jnp.arange(3)}, own_model.block), LAST),
        r"a parameter that cannot train in layer block_000 \(block\)\n  found: n of int32",
    ),
    "axes": (
        (FIRST, changed(MIDDLE, axes=(("up_DF", ("tensor", "tensor")),)), LAST),
        r"axes that do not fit its parameter up_DF in layer block_000 \(block\)\n  found: "
        r"\('tensor', 'tensor'\) for the shape \(16, 64\)",
    ),
    "init": (
        (FIRST, functions(lambda key: 1 / 0, own_model.block), LAST),
        r"cannot be initialised: block_000 \(block\)\n  found: ZeroDivisionError: division by zero",
    ),
    "apply": (
        (FIRST, functions(own_model.init_head, own_model.block), LAST),
        r"cannot be computed: block_000 \(block\)\n  found: KeyError: 'norm'",
    ),
    "loss": (
        (FIRST, MIDDLE, changed(LAST, loss=lambda logits: 0.0)),
        r"cannot be computed: head \(head\)\n  found: TypeError",
    ),
}


@pytest.mark.parametrize("own, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_by_layer(own, message):
    with pytest.raises(ConfigError, match=rf"model.module: .*{message}") as error:
        layers(model_of(*own))
    assert "\n  fix: " in str(error.value)


def alone(settings):
    """A layer and no list."""
    return FIRST


def test_a_model_that_gives_no_list_is_refused():
    with pytest.raises(ConfigError, match=r"must give a list of layers\n  found: Layer\n"):
        layers(make_model(module=f"{__name__}:alone"))


def test_a_last_layer_may_give_its_loss_and_read_nothing():
    own = functions(own_model.init_head, lambda params, x: jnp.square(x @ params["out"]), reads={})
    model = model_of(FIRST, MIDDLE, own)
    params = {layer: layers_of(model)[layer].init(jax.random.key(0)) for layer in (HEAD,)}
    x_BLD = jnp.ones((2, 16, 16))
    loss, _ = apply(HEAD, model, params[HEAD], x_BLD, position_L=jnp.arange(16))
    assert float(loss) == pytest.approx(float(jnp.sum((x_BLD @ params[HEAD]["out"]) ** 2)))


def test_a_model_must_be_found_by_its_name():
    with pytest.raises(ConfigError, match=r"top level of a module.*\n.*<locals>.<lambda>"):
        name_of(lambda settings: [])
    for name, message in {
        "nothing:x": "names no model\n  found: nothing:x: No module named 'nothing'",
        "tests.own_models:x": "names no model",
        "__main__:x": "in a notebook or a script, which other processes cannot import",
    }.items():
        with pytest.raises(ConfigError, match=message):
            layers(make_model(module=name))


def test_a_model_that_starts_jax_before_its_run_is_refused(monkeypatch):
    has_devices = iter([False, True])
    monkeypatch.setattr(platforms, "has_devices", lambda: next(has_devices))
    with pytest.raises(ConfigError, match="makes arrays of JAX before the run has its devices"):
        layers(make_model(module=name_of(own_model.language_model), num_layers=1))


def defined_again(middle):
    """The same name for another function, as a cell of a notebook that is run again gives it."""

    def again(settings):
        return [FIRST, middle, LAST]

    again.__qualname__ = "again"
    globals()["again"] = again
    return again


def test_a_function_that_is_defined_again_is_traced_again(tmp_path):
    run_file = write_run(tmp_path, {"a": (1,)})
    settings = ["model.num_layers=1", *SETTINGS[:2], "run.rehearse=true"]
    jax.devices()
    found = []
    for label in ("one", "other", "third"):
        model = defined_again(changed(MIDDLE, label=label))
        by_name = [*settings, f"model.module={name_of(model)}"]
        run = Trainer(
            run_file,
            by_name if label == "third" else settings,
            model=None if label == "third" else model,
        )
        found.append(layers(run.job.config.model)["block_000"].name)
    assert found == ["one", "other", "third"]


def test_settings_of_our_own_layers_are_refused():
    with pytest.raises(
        Mistakes, match=r"model.window: is for the built-in layers, not for .*:made"
    ):
        make_model(module="my:made", window=8)


def test_a_cut_that_no_parameter_has_is_refused(tmp_path):
    run_file = write_run(tmp_path, {"a": (4,)})
    module = f"model.module={name_of(own_model.language_model)}"
    sizes = ["model.width=16", "model.num_heads=1", module]
    for cuts, message in {
        "parallel.tensor=3": r"parallel.tensor: must divide all dims that tensor cuts .*"
        r"\n  found: 3; of these dims 64 is .*\n  fix: use 16 or 32 or 64",
        "parallel.fsdp=32": r"parallel.fsdp: must divide .*\n  found: 32; of these dims 16 is",
    }.items():
        with pytest.raises(PlanError, match=message):
            job.load(run_file, [*sizes, cuts, "train.global_batch=192"])


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_planner_predicts_what_compiled_programs_hold(checkpointing):
    """In bfloat16, in which layers are traced; parameters, gradients and state to the byte."""
    plan = hand_made_plan((2, 2), 1, 1, microbatches=2, checkpointing=checkpointing)
    for i, programs in enumerate(compile_chunks(make_chunks(MODEL, plan, dtype="bfloat16"))):
        shape = shape_of(
            is_first=i == 0,
            is_last=i == 1,
            sequences=MICROBATCH,
            checkpointing=checkpointing,
            dtype="bfloat16",
        )
        items = memory.stage_memory_bytes(MODEL, shape)
        forward, backward, update = (
            programs.table[ProgramKey(name, False)].memory_analysis()
            for name in ("forward", "backward", "update")
        )
        boundary = items["boundaries"] / 4  # to the one neighbour, twice each way
        kept = items["activations"] + items["logits"] + (i == 0) * boundary
        assert forward.output_size_in_bytes == pytest.approx(kept, rel=0.05)
        assert backward.alias_size_in_bytes == items["gradients"]
        count_bytes = 4  # of updates
        state = items["parameters"] + items["optimizer"] + count_bytes
        assert update.alias_size_in_bytes == state
