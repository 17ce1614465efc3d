"""A kind of layer that is defined here alone trains, is saved, and goes on on another plan.

It has an auxiliary loss, a metric, a frozen parameter, one that each step changes without a
gradient, one without the model width, and it draws random numbers.
"""

import dataclasses
import functools
import io
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from holmesjax import config as configs
from holmesjax.checkpoints import manifest
from holmesjax.data.batches import model_inputs
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import (
    Constant,
    Kept,
    Kind,
    LayerCollective,
    Normal,
    Parameter,
    PerToken,
    WeightProduct,
)
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import ops
from holmesjax.models.layer import Auxiliary, apply, init_params, merged, statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.pipeline import make_runner
from holmesjax.trainer import Trainer
from holmesjax.training_setup import read_batches
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, put, train_step
from tests.jobs import RunningJob, run_launch_here, write_run
from tests.one_device import RTOL, SEED, assert_near, check_gradient, step_inputs
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("toy_kind")

TOY = f"{__name__}:toy"
WEIGHT, NOISE = 0.3, 0.1


def toy(model):
    """A frozen projection, a norm of its results, and a projection back."""
    d, f = model.width, 2 * model.width
    return Kind(
        name="toy",
        function=f"{__name__}:apply_toy",
        parameters=(
            Parameter(name="mix_DF", shape=(d, f), initial=Normal(0.2), trains=False),
            Parameter(name="norm/scale_F", shape=(f,), initial=Constant(1.5)),
            Parameter(name="down_FD", shape=(f, d), initial=Normal(0.1), decays=True),
            Parameter(
                name="balance/shift_F",
                shape=(f,),
                initial=Constant(0.0),
                trains=False,
                changes=True,
            ),
        ),
        products=(WeightProduct(d, f, "columns"), WeightProduct(f, d, "depth")),
        moved=PerToken(2 * d, 3 * f),
        kept=Kept(input=PerToken(d), products=PerToken(0, f), between=PerToken(0, f)),
        needed=PerToken(d, 2 * f),
        collectives=(LayerCollective(axis="tensor", numbers=d, forward=1, backward=1),),
        losses=(("size", WEIGHT),),
        metrics=("largest",),
        change=f"{__name__}:change_toy",
        draws=True,
    )


def apply_toy(params, x_BLD, context):
    if context.key_Bk is not None:
        noise_BLD = context.random(lambda key: jax.random.normal(key, x_BLD.shape[1:]))
        x_BLD = x_BLD + (jnp.where(context.trains, NOISE, 0.0) * noise_BLD).astype(x_BLD.dtype)
    mixed_BLF = ops.linear(ops.separate(x_BLD), params["mix_DF"])
    h_BLF = ops.rms_norm(mixed_BLF, params["norm"]["scale_F"])
    h_BLF = h_BLF + params["balance"]["shift_F"][None, None].astype(h_BLF.dtype)
    out_BLD = ops.linear(h_BLF, params["down_FD"])
    auxiliary = Auxiliary(
        losses={"size": jnp.sum(jnp.mean(jnp.square(out_BLD.astype(jnp.float32)), -1))},
        metrics={"largest": jnp.sum(jnp.max(jnp.abs(x_BLD), -1))},
        sums={"balance/shift_F": jnp.sum(h_BLF, (0, 1))},
    )
    return x_BLD + out_BLD, auxiliary


def change_toy(old, sums):
    """Towards a mean of zero, as a router's bias goes towards equal loads."""
    name = "balance/shift_F"
    return {name: old[name] - 1e-3 * sums[name]}


def bits(seed, layer, sequence):
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(layer.encode()))
    return jax.random.key_data(jax.random.fold_in(key, sequence))


def plain_loss(trained, fixed, model, inputs, seed=0, first=None):
    """The loss that a step lowers; what it reports, and `fixed` after it: on one device.

    `first` is the number of the first sequence in the run; None: nothing is drawn.
    """
    num_targets = jnp.sum(inputs["target_BL"] >= 0)
    x, sums, after = None, {"size": 0.0, "largest": 0.0}, {}
    arrays = {"position_L": jnp.arange(model.context_length), **inputs}
    for layer in layers(model):
        own = fixed.get(layer, {})
        if first is not None:
            sequences = first + jnp.arange(len(inputs["token_BL"]))
            keys = [bits(seed, layer, sequence) for sequence in sequences]
            arrays |= {"key_Bk": jnp.stack(keys), "trains": True}
        x, auxiliary = apply(layer, model, merged(trained[layer], own), x, **arrays)
        for name, value in {**auxiliary.losses, **auxiliary.metrics}.items():
            sums[name] += value
        if own:
            new = change_toy({"balance/shift_F": own["balance"]["shift_F"]}, auxiliary.sums)
            after[layer] = {**own, "balance": {"shift_F": new["balance/shift_F"]}}
    found = {"loss": x, **sums}
    found = {name: value / num_targets for name, value in found.items()}
    return found["loss"] + WEIGHT * found["size"], (found, after)


def initial(model, seed):
    """Initial values, those that train apart from those that do not."""
    trained, own = init_params(model, seed), ("mix_DF", "balance")
    toys = [layer for layer in trained if "mix_DF" in trained[layer]]
    return trained, {layer: {name: trained[layer].pop(name) for name in own} for layer in toys}


def wasteful(model):
    return dataclasses.replace(toy(model), name="wasteful", function=f"{__name__}:apply_wasteful")


def apply_wasteful(params, x_BLD, context):
    """The same, with a product by JAX's own gradient of a weight that is cast before it."""
    narrow_FD = params["down_FD"].astype(jnp.bfloat16)
    mixed_BLF = ops.linear(x_BLD, params["mix_DF"])
    h_BLF = ops.rms_norm(mixed_BLF, params["norm"]["scale_F"]).astype(jnp.bfloat16)
    _, auxiliary = apply_toy(params, x_BLD, context)
    return x_BLD + (h_BLF @ narrow_FD).astype(x_BLD.dtype), auxiliary


@pytest.mark.parametrize("cuts", [{}, {"fsdp": 2}, {"data": 2}])
def test_a_copy_of_a_weight_for_each_microbatch_is_refused_by_the_weights_name(cuts):
    """With fsdp it is kept too, between the forward and the backward of its layer."""
    model = make_model(num_layers=2, pattern=(f"{__name__}:wasteful",))
    plan = hand_made_plan((1, 1), cuts.get("data", 1), 1, fsdp=cuts.get("fsdp", 1), microbatches=2)
    with pytest.raises(ConfigError, match=r"down_FD for each microbatch"):
        compile_chunks(make_chunks(model, plan))


FIRST = 24  # the number of the first sequence of the step
MODEL = make_model(num_layers=3, pattern=(TOY, "block"))
PLANS = {
    "one program, computed again": hand_made_plan(
        (3,), 2, 2, fsdp=2, microbatches=2, checkpointing="full"
    ),
    "split backward, unlike stages": hand_made_plan(
        (1, 2), (1, 2), (2, 1), fsdp=(2, 1), microbatches=2, schedule="zero_bubble"
    ),
}


@functools.cache
def plain_step():
    trained, fixed = initial(MODEL, SEED)
    inputs = {n: x for n, x in step_inputs(8, 0).items() if n != "segment_BL"}
    run = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)
    (_, (found, after)), gradient = run(trained, fixed, MODEL, inputs, 0, FIRST)
    (_, (undrawn, _)), _ = run(trained, fixed, MODEL, inputs)
    return found, gradient, fixed, after, undrawn["loss"]


@pytest.mark.parametrize("plan", rows(PLANS))
def test_auxiliary_losses_reach_all_gradients_and_all_stages(plan):
    wanted, gradient, fixed, after, undrawn = plain_step()
    runner = make_runner(plan, make_chunks(MODEL, plan), evaluates=False)
    states = runner.init(SEED)
    if len(plan.stages) > 1:
        loss = runner.evaluate(states, put(runner, step_inputs(8, 0), trains=False))
        assert float(loss) / (8 * MODEL.context_length) == pytest.approx(float(undrawn), rel=RTOL)
    states, found = train_step(runner, states, step_inputs(8, 0), first_sequence=FIRST)
    for name, value in wanted.items():
        assert float(found[name]) == pytest.approx(float(value), rel=RTOL), name
    seen = check_gradient(states, gradient)
    for state in states:
        for layer, frozen in state.fixed.items():
            np.testing.assert_array_equal(frozen["mix_DF"], fixed[layer]["mix_DF"])
            assert_near(
                frozen["balance"]["shift_F"], after[layer]["balance"]["shift_F"], RTOL, layer
            )
    assert len(seen) == len(jax.tree.leaves(gradient))
    assert not any(name.endswith(("mix_DF", "shift_F")) for name in seen)


# A schedule would end with the first of the two sessions.
SETTINGS = (
    *("train.steps=4", "model.num_layers=2", f"model.pattern=[block,'{TOY}']"),
    "optimizer.schedule=constant",
)


def plain_records(run_file):
    """Every step's loss and auxiliary values by `jax.grad` and optax on one device."""
    config = configs.load(run_file, SETTINGS)
    model, batches = config.model, read_batches(config)
    params, fixed = initial(model, config.train.seed)
    optimizer = make_optimizer(config.optimizer, config.train.steps, statements(model))
    clip = optax.clip_by_global_norm(config.optimizer.clip_norm)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    run = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)
    for step in range(config.train.steps):
        first, names = step * batches.global_batch, ("token_BL", "target_BL")
        inputs = model_inputs(batches.train(first), names)
        args = params, fixed, model, inputs, config.train.seed, first
        (_, (found, fixed)), gradient = run(*args)
        gradient, _ = clip.update(gradient, clip.init(params))
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        yield {name: float(value) for name, value in found.items()}


@pytest.mark.one_version
def test_it_trains_in_processes_is_saved_and_goes_on_on_another_plan(tmp_path, capsys):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    two, one = [*SETTINGS, "parallel.stages=2"], [*SETTINGS, "parallel.clusters=[a]"]
    with RunningJob(run_file, *two, "train.steps=2", "--launcher", "local") as job:
        assert job.end() == 0, job.output
    [saved] = manifest.find(tmp_path / "run")
    assert {"fixed.block_001.mix_DF", "fixed.block_001.balance.shift_F"} <= saved.manifest[
        "arrays"
    ].keys()
    assert not [key for key in saved.manifest["arrays"] if "opt_state" in key and "mix_DF" in key]
    done = run_launch_here(capsys, "plan", run_file, *one, "--explain")
    assert done.returncode == 0, done.stderr
    records = Trainer(run_file, [*one, "run.rehearse=true"], io.StringIO()).train()
    wanted = list(plain_records(run_file))
    assert len(records) == len(wanted)
    for record, want in zip(records, wanted, strict=True):
        assert {name: record[name] for name in want} == pytest.approx(want, rel=RTOL)
