"""Modules of flax train in stages as they do on one device, with axes of their own metadata."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

from holmesjax.errors import ConfigError
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, forget, layers
from holmesjax.models.flax_layers import linen, nnx as nnx_layer
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.timeline import Clock
from tests import own_models
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.one_device import RTOL, SEED, assert_near
from tests.own_models import CLASSES, PATCHES, WIDTH

pytestmark = pytest.mark.xdist_group("flax_layers")

SIZES = {"num_layers": 2, "width": WIDTH, "num_heads": 1, "context_length": PATCHES}
MODEL = make_model(**SIZES, module="tests.own_models:image_model")


def dims(layer):
    return {parameter.name: parameter.dims for parameter in layers(MODEL)[layer].parameters}


def test_axes_come_from_the_metadata_of_a_module():
    encoder, mixer = dims(block_name(0)), dims(block_name(1))
    assert (encoder["Dense_0/kernel"], encoder["Dense_1/kernel"]) == ("DF", "FD")
    assert mixer["numbers/kernel"] == "DF"
    assert {axes for name, axes in mixer.items() if name != "numbers/kernel"} == {"W", "WW"}
    assert [kind.name for kind in layers(MODEL).values()] == [
        "Patches",
        "Encoder",
        "Mixer",
        "Classes",
    ]


def plain_loss(params, patch_BLP, label_B):
    """By flax's own means."""
    apply = lambda module, layer, x: module.apply({"params": params[layer]}, x)
    x_BLD = apply(own_models.Patches(), EMBED, patch_BLP)
    x_BLD = apply(own_models.Encoder(), block_name(0), x_BLD)
    mixer = own_models.Mixer(nnx.Rngs(0))
    own = params[block_name(1)]
    for i, norm in enumerate(mixer.norms):
        of_norm = own["norms"][str(i)]
        norm.scale[...], norm.bias[...] = of_norm["scale"], of_norm["bias"]
    for name in ("patches", "numbers"):
        linear = getattr(mixer, name)
        linear.kernel[...], linear.bias[...] = own[name]["kernel"], own[name]["bias"]
    logits_BC = apply(own_models.Classes(), HEAD, mixer(x_BLD))
    one_hot_BC = jax.nn.one_hot(label_B, CLASSES)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits_BC) * one_hot_BC, -1))


def test_a_step_on_cut_stages_is_that_of_flax_on_one_device():
    plan = hand_made_plan((1, 1), (1, 2), (2, 1), fsdp=2, microbatches=2, checkpointing="none")
    runner = make_runner(plan, make_chunks(MODEL, plan), evaluates=False)
    states, clock = runner.init(SEED), Clock(len(plan.stages))
    params = {layer: values for state in states for layer, values in state.params.items()}
    params = jax.tree.map(np.asarray, params)
    arrays = own_models.images()["train"]
    host = {name: array[: plan.global_batch] for name, array in arrays.items()}
    with nnx.use_eager_sharding(False):
        run = jax.jit(jax.value_and_grad(plain_loss))
        loss, gradient = run(params, host["patches"], host["label"])
    rows = runner.placer.row_MN.ravel()
    inputs = runner.placer.place({k: x[rows] for k, x in host.items()}, plan.global_batch)
    states, found = runner.train_step(states, inputs, clock.timeline())
    clock.close()
    assert float(found["loss"]) == pytest.approx(float(loss), rel=RTOL)
    got = {layer: moments for state in states for layer, moments in state.opt_state.mu.items()}
    for path, wanted in jax.tree_util.tree_leaves_with_path(gradient):
        own = got
        for key in path:
            own = own[key.key]
        if np.linalg.norm(wanted) > 1e-6:  # a bias of keys has no gradient
            assert_near(own, np.asarray(wanted), 1e-4, str(path))


def test_products_in_bfloat16_keep_no_copy_of_a_weight():
    """linen casts and reshapes its kernels; copies for each microbatch would be refused."""
    plan = hand_made_plan((2,), 1, 1, microbatches=2)
    [chunk] = make_chunks(MODEL, plan, dtype="bfloat16")
    compile_chunks([chunk])


class Counting(nn.Module):
    """A module with running statistics."""

    @nn.compact
    def __call__(self, x_BLD):
        return nn.BatchNorm(use_running_average=False)(x_BLD)


def own_model(*changed):
    global made
    first, *_, last = own_models.image_model(MODEL)
    made = lambda settings: [first, *changed, last]
    forget()
    return make_model(**SIZES | {"num_layers": 1}, module=f"{__name__}:made")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: linen(Counting()), r"more than parameters: Counting\n  found: batch_stats"),
        (
            lambda: nnx_layer(lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs)),
            r"more than parameters: BatchNorm\n  found: mean, var",
        ),
        (
            lambda: linen(nn.Dropout(0.1, deterministic=False)),
            r"more than parameters: Dropout\n  found: random numbers: .*\n  fix: .*draws=True",
        ),
        (
            lambda: nnx_layer(lambda rngs: nnx.Dropout(0.1, rngs=rngs)),
            r"more than parameters: Dropout\n  found: rngs.*\n  fix: .*draws=True",
        ),
        (lambda: nn.Dense(WIDTH), r"must give a list of layers\n  found: Dense in its list"),
        (
            lambda: linen(nn.Dense(WIDTH + 1)),
            r"in layer block_000 \(Dense\).*\n  found: \[4, 16\] to \[4, 17\]",
        ),
    ],
)
def test_a_module_that_cannot_be_a_layer_is_refused(make, message):
    with pytest.raises(ConfigError, match=rf"model.module: .*{message}"):
        layers(own_model(make()))


class Scaled(nn.Module):
    scale: float | np.ndarray

    @nn.compact
    def __call__(self, x):
        return self.scale * nn.Dense(WIDTH)(x)


def test_layers_of_equal_modules_are_equal():
    """Also where each is made by itself. One with an array is equal to itself alone."""
    make = lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    assert linen(Scaled(0.5)) == linen(Scaled(0.5)) != linen(Scaled(0.6))
    assert nnx_layer(make) == nnx_layer(make)
    layer = linen(Scaled(np.ones((1, WIDTH))))
    assert len({layer, layer}) == 1
    assert layer.apply(
        layer.init(jax.random.key(0), jnp.ones((1, WIDTH))), jnp.ones((1, WIDTH))
    ).shape
