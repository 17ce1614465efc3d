"""Blocks whose products are in fp8: on any plan, step after step, and beside bfloat16."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.config import Fp8Config, OptimizerConfig
from holmesjax.costs.products import layer_products, train_flop
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import PerToken
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import ops
from holmesjax.models.layer import apply, init_params, merged
from holmesjax.runtime import microbatch
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.program_shapes import batch_shapes, gradient_shapes, replica_shapes
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.one_device import SEED, assert_near, check_gradient, step_inputs
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("fp8")

HISTORY = 3
MODEL = make_model(
    num_layers=2,
    num_kv_heads=2,
    activation="swiglu",
    norm="rms_norm",
    fp8=Fp8Config(history=HISTORY),
)
# A sum in another order moves a number over the middle of two codes once in a million times, and
# then by a sixteenth of itself. A weight's gradient is a sum over few such numbers here.
FLIPPED_RTOL = 2e-3
# The settings of each, and the plan.
CASES = {
    "one program, sequences cut, computed again": (
        Fp8Config(history=HISTORY),
        hand_made_plan((2,), 2, 1, context=2, microbatches=2, checkpointing="full"),
    ),
    "split backward, unlike stages": (
        Fp8Config(history=HISTORY, exclude_down=True),
        hand_made_plan((1, 1), (1, 2), (2, 1), fsdp=(2, 1), microbatches=2, schedule="zero_bubble"),
    ),
    "two stages, computed again": (
        Fp8Config(scaling="current", exclude_last=1),
        hand_made_plan((1, 1), (2, 1), 2, fsdp=(1, 2), checkpointing="dots"),
    ),
}


def plain_loss(trained, fixed, model, inputs):
    """The mean loss on one device, all sequences at once, and the largest magnitudes by layer."""
    x, maxima = None, {}
    for layer in layers(model):
        own = merged(trained[layer], fixed.get(layer, {}))
        position_L = jnp.arange(model.context_length)
        x, auxiliary = apply(layer, model, own, x, position_L=position_L, **inputs)
        maxima[layer] = auxiliary.sums.get("fp8/maxima_ST")
    return x / jnp.sum(inputs["target_BL"] >= 0), maxima


@functools.cache
def plain_gradient(model):
    return jax.jit(functools.partial(jax.value_and_grad(plain_loss, has_aux=True), model=model))


def on_host(states, name):
    """The arrays of all stages by layer."""
    found = {}
    for state in states:
        found |= jax.tree.map(np.asarray, getattr(state, name))
    return found


@pytest.mark.parametrize("fp8, plan", rows(CASES))
def test_every_plan_trains_as_one_device(fp8, plan):
    """Two steps: in the first no magnitude is known, and the second has the scales of the first."""
    model = dataclasses.replace(MODEL, fp8=fp8)
    runner = make_runner(plan, make_chunks(model, plan), evaluates=False)
    states = runner.init(SEED)
    for step in range(2):
        params, fixed = on_host(states, "params"), on_host(states, "fixed")
        inputs = step_inputs(plan.global_batch, step)
        names = ("token_BL", "target_BL")
        plain = {name: inputs[name] for name in names}
        (loss, maxima), gradient = plain_gradient(model)(params, fixed, inputs=plain)
        states, found = train_step(runner, states, inputs)
        assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-4)
        check_gradient(states, gradient, FLIPPED_RTOL)
        for layer, values in on_host(states, "fixed").items():
            assert_near(values["fp8"]["maxima_ST"], maxima[layer], 1e-4, layer)
            assert np.count_nonzero(values["fp8"]["maxima_ST"][:, ::-1].all(0)) == step + 1
    assert bool(on_host(states, "fixed")) == (fp8.scaling == "delayed")


def test_the_largest_magnitudes_are_those_of_the_inputs():
    """Magnitudes of the first product and of the last, by other means."""
    params, inputs = init_params(MODEL, SEED), step_inputs(2, 0)
    run = jax.jit(apply, static_argnums=(0, 1))
    x, _ = run("embed", MODEL, params["embed"], None, position_L=None, token_BL=inputs["token_BL"])
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + MODEL.norm_epsilon)
    own = params["block_000"]
    own = {**own, "fp8": {"maxima_ST": np.float32([[5, 3, 4]] * 4)}}
    _, found = run("block_000", MODEL, own, x, position_L=np.arange(16))
    maxima = np.asarray(found.sums["fp8/maxima_ST"])
    np.testing.assert_array_equal(maxima[:, :2], [[3, 4]] * 4)
    assert maxima[0, 2] == pytest.approx(np.abs(normed).max(), rel=1e-5)


DOT = re.compile(r"stablehlo.dot_general .*: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\) ->")


def dots(model, layer):
    """The types of both operands of all products of a layer's forward and backward."""
    d, own = model.width, init_params(model, SEED, [layer])[layer]
    x = None if layer == "embed" else jax.ShapeDtypeStruct((2, 16, d), jnp.bfloat16)
    token = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def both(params, x, token):
        arrays = {"position_L": jnp.arange(16), "token_BL": token, "target_BL": token}
        run = lambda params, x: apply(layer, model, params, x, **arrays)[0]
        out, pullback = jax.vjp(run, params, x)
        return pullback(out)

    text = jax.jit(both).lower(own, x, token).as_text()
    return Counter(tuple(sorted(dims)) for dims in DOT.findall(text))


def test_all_products_of_a_block_are_of_fp8_operands_and_no_others():
    """Seven weights, each with a product in the forward and one for either gradient."""
    codes = {("f8E4M3FN", "f8E4M3FN"): 7, ("f8E4M3FN", "f8E5M2"): 14}
    plain = dataclasses.replace(MODEL, fp8=None)
    found, without = dots(MODEL, "block_000"), dots(plain, "block_000")
    assert {pair: found[pair] for pair in codes} == codes
    assert sum(found.values()) == sum(without.values())
    excluding = lambda **names: dataclasses.replace(MODEL, fp8=Fp8Config(**names))
    found = dots(excluding(exclude_down=True, history=HISTORY), "block_001")
    assert [found[pair] for pair in codes] == [6, 12]
    assert sum(found.values()) == sum(without.values())
    assert dots(excluding(exclude_first=1), "block_000") == without
    assert dots(excluding(exclude_last=1), "block_001") == without
    assert not any(name.startswith("f8") for pair in without for name in pair)
    assert dots(MODEL, "head") == dots(plain, "head")


FP8_DOT = re.compile(
    r"dot_general .*contracting_dims = (.*), precision = \[(\w+, \w+)\] : "
    r"\(tensor<\w+xf8(\w+)>, tensor<\w+xf8(\w+)>\)"
)
PRODUCTS = (  # of a forward, and of a backward
    ("[1] x [1]", "DEFAULT, DEFAULT", "E4M3FN", "E4M3FN"),
    ("[1] x [1]", "HIGHEST, HIGHEST", "E4M3FN", "E5M2"),
)


@pytest.mark.parametrize(
    "cut", [{}, {"fsdp": 2, "checkpointing": "full"}], ids=["one device", "fsdp"]
)
def test_no_microbatch_codes_a_weight_or_transposes_codes(cut):
    """Both operands of a product have the contracted dim last; gradients are added up precisely.

    cuBLAS has no other products of fp8 on Hopper: XLA would transpose an operand before each. XLA
    lets it add up fast where the precision is DEFAULT.
    """
    chunk, _ = make_chunks(MODEL, hand_made_plan((1, 1), 1, 1, **cut), dtype="bfloat16")
    fixed, replicas, batch = chunk.state_shapes.fixed, replica_shapes(chunk), batch_shapes(chunk)
    forward = functools.partial(microbatch.forward, chunk)
    dy, _, saved = jax.eval_shape(forward, fixed, replicas, None, batch)
    backward = functools.partial(microbatch.backward, chunk, weight=None)
    held = fixed, replicas, saved, gradient_shapes(chunk)
    text_of = lambda run, *args: jax.jit(run).lower(*args).as_text()
    gather = text_of(chunk.gather, chunk.state_shapes.params)
    texts = [text_of(forward, fixed, replicas, None, batch), text_of(backward, *held, dy)]
    again = 6 * ("checkpointing" in cut)  # a backward does not read the result of `down`
    for text, counts in zip(texts, [(7, 0), (again, 14)], strict=True):
        found = Counter((*product[:2], *sorted(product[2:])) for product in FP8_DOT.findall(text))
        assert found == +Counter(dict(zip(PRODUCTS, counts, strict=True)))
        assert not re.search(r"transpose .*xf8", text)
    weights = [
        weight for weight in chunk.held["block_000"].values() if isinstance(weight, ops.Coded)
    ]
    shapes = ["x".join(map(str, codes.shape)) for w in weights for codes in (w.codes, w.transposed)]
    assert len(weights) == 7
    coded = lambda text: Counter(re.findall(r"convert .* -> tensor<(\w+)xf8E4M3FN>", text))
    assert coded(gather) == Counter(f"1x{shape}" for shape in shapes)
    # The numbers are transposed, and not their codes: both are made in one kernel.
    assert not re.search(r"transpose .*xf8", gather)
    assert gather.count("@LayoutConstraint") == 2 * len(weights)
    of_steps = [shape for text in texts for shape in coded(text)]
    assert not any(shape.endswith(gathered) for shape in of_steps for gathered in shapes)


def test_a_layer_that_knows_no_fp8_is_refused():
    own = "tests.layer_specs.test_toy_kind:toy"
    with pytest.raises(
        ConfigError, match=r"model.fp8: other layers have no products in fp8\n  found: toy"
    ):
        layers(dataclasses.replace(MODEL, pattern=("block", own)))


def test_costs_know_fp8():
    plain = dataclasses.replace(MODEL, fp8=None)
    [block], [before] = kinds(MODEL).blocks, kinds(plain).blocks
    assert {product.dtype for product in layer_products(block, 8)} == {"float8"}
    assert {product.dtype for product in layer_products(kinds(MODEL).head, 8)} == {""}
    assert train_flop(MODEL, 8) == train_flop(plain, 8)
    assert block.kept == dataclasses.replace(before.kept, codes=PerToken(2 * MODEL.width))
    assert block.size() - before.size() == 4 * HISTORY


TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(400)).encode()


def trained(model):
    """Losses of some steps on text, on one device."""
    plan = hand_made_plan((2,), 1, 1)
    config = OptimizerConfig(learning_rate=1e-2, schedule="constant")
    [chunk] = make_chunks(model, plan, config=config, dtype="bfloat16")
    runner = make_runner(plan, [chunk], evaluates=False)
    states, losses = runner.init(SEED), []
    random, length = np.random.default_rng(0), model.context_length
    text = np.frombuffer(TEXT, np.uint8).astype(np.int32)
    for _ in range(60):
        starts = random.integers(len(text) - length - 1, size=plan.global_batch)
        rows = np.stack([text[start : start + length + 1] for start in starts])
        inputs = {"token_BL": rows[:, :-1], "target_BL": rows[:, 1:]}
        states, found = train_step(runner, states, inputs)
        losses.append(float(found["loss"]))
    return np.array(losses)


def test_losses_are_near_those_of_bfloat16():
    sizes = {"num_layers": 2, "activation": "swiglu", "norm": "rms_norm"}
    last = lambda **changes: trained(make_model(**sizes, **changes))[-20:].mean()
    wanted = last()
    assert wanted < 2.5  # of log(256) = 5.5 before
    assert last(fp8=Fp8Config()) == pytest.approx(wanted, rel=0.02)
    assert last(fp8=Fp8Config(scaling="current")) == pytest.approx(wanted, rel=0.02)
