"""Twelve families against golden logits of `transformers` and an oracle in float64 NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.config import KernelsConfig, RotaryScalingConfig
from holmesjax.config.rotary import frequencies
from holmesjax.layer_specs.experts import COUNT, STEPS
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import key_cache, ops
from holmesjax.models.layer import Context, function_of
from holmesjax.models.transformer import TABLE
from tests.models import family_oracle
from tests.models.families import GOLDEN, MODELS, TOKENS, params, tensors

NEAR = 1e-4
UNLIKE = ("gpt2", "gemma3_text", "deepseek_v3")  # these have the layers of all the others


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_layer(model, kind, kernels, params, x, arrays):
    """A layer by its kind: layers of one kind are compiled once."""
    context = Context(model=model, kind=kind, kernels=kernels, **arrays)
    x, auxiliary = function_of(kind)(params, x, context)
    return x, auxiliary.cache


def run(family, arrays, caches=None, kernels=ops.DEFAULT, given=None):
    """The logits, or the loss where there are targets; and the caches with the new tokens."""
    model, found, x = MODELS[family], given or params(family), None
    caches = caches or {}
    for layer, kind in layers(model).items():
        borrowed = {TABLE: found["embed"]["token_VD"]} if kind.borrows else {}
        own = arrays | {"cache": caches.get(layer)}
        x, caches[layer] = run_layer(model, kind, kernels, found[layer] | borrowed, x, own)
    return x, caches


def logits_of(family, arrays, caches=None, kernels=ops.DEFAULT):
    """The logits of the only sequence, and the caches."""
    x, caches = run(family, arrays, caches, kernels)
    return np.asarray(x[0]), caches


def arrays_of(tokens, start=0):
    position_L = jnp.arange(start, start + len(tokens))
    return {"token_BL": jnp.asarray(tokens)[None], "position_L": position_L}


def log_probabilities(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def loss_of(logits):
    """The mean over the 39 tokens that follow others."""
    return -log_probabilities(logits)[np.arange(39), TOKENS[1:]].mean()


@pytest.mark.parametrize(
    "family",
    [
        name if name in UNLIKE else pytest.param(name, marks=pytest.mark.one_version)
        for name in MODELS
    ],
)
def test_logits_are_those_of_transformers(family):
    golden, wanted = GOLDEN[family], family_oracle.logits(family, tensors(family), TOKENS)
    stated = [
        parameter for kind in layers(MODELS[family]).values() for parameter in kind.parameters
    ]
    of_run = (COUNT, STEPS)
    sizes = [parameter.size() for parameter in stated if parameter.name not in of_run]
    assert sum(sizes) == golden.parameters
    got, _ = logits_of(family, arrays_of(TOKENS))
    for name, logits in (("oracle", wanted), ("ours", np.float64(got))):
        assert np.abs(logits[-1, :4] - golden.last).max() < NEAR, name
        assert np.argmax(logits[-1]) == golden.likeliest, name
        assert abs(np.abs(logits).sum() - golden.total) < 0.05, name
        assert abs(loss_of(logits) - golden.loss) < NEAR, name
    assert np.abs(got - wanted).max() < NEAR
    check_parts_through_the_cache(family, wanted)
    check_gradient(family)
    rounded, _ = logits_of(family, arrays_of(TOKENS), kernels=ops.Kernels(dtype="bfloat16"))
    of_token = np.square(rounded - wanted).mean(-1)
    # Rounding sends a few tokens to other experts.
    typical = np.median(of_token) if MODELS[family].experts else of_token.mean()
    assert np.sqrt(typical) / wanted.std() < 0.08


def check_gradient(family):
    """The slope of the loss in a random direction: half the logits in each chunk.

    The step is so small that no token changes its experts.
    """
    rng, here, size = np.random.default_rng(0), tensors(family), 1e-7
    direction = {name: rng.standard_normal(x.shape) for name, x in here.items()}
    moved = lambda step: {name: x + step * direction[name] for name, x in here.items()}
    ahead, back = (
        loss_of(family_oracle.logits(family, moved(step), TOKENS)) for step in (size, -size)
    )
    targets = {"target_BL": np.append(TOKENS[1:], -1)[None]}
    kernels = ops.Kernels(KernelsConfig(cross_entropy="chunked"))
    loss = lambda own: run(family, arrays_of(TOKENS) | targets, kernels=kernels, given=own)[0] / 39
    value, slopes = jax.value_and_grad(loss)(params(family))
    assert abs(float(value) - GOLDEN[family].loss) < NEAR
    products = jax.tree.map(
        lambda g, d: np.vdot(np.float64(g), d), slopes, params(family, direction)
    )
    assert sum(jax.tree.leaves(products)) == pytest.approx((ahead - back) / (2 * size), rel=1e-4)


def check_parts_through_the_cache(family, wanted):
    """Ten tokens at a time: those of a part see the parts before."""
    caches = {
        layer: key_cache.empty(dataclasses.replace(kind.attention, window=None), 1, 64)
        for layer, kind in layers(MODELS[family]).items()
        if kind.attention is not None
    }
    for i in range(0, 40, 10):
        got, caches = logits_of(family, arrays_of(TOKENS[i : i + 10], i), caches)
        assert np.abs(got - wanted[i : i + 10]).max() < NEAR, i


# Number of a pair: its frequency, as transformers 5.23.0 has it.
LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "type": "longrope",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "short_factor": tuple(1 + i / 100 for i in range(48)),
    "long_factor": tuple(1 + i / 2 for i in range(48)),
}
FREQUENCIES = [
    (128, 5e5, None, {0: 1.0, 1: 0.81461722, 32: 1.4142134e-3, 63: 2.4551407e-6}),
    (
        *(128, 5e5, LLAMA3 | {"factor": 8.0}),
        {
            **{0: 1.0, 1: 0.81461722, 16: 0.03760603, 28: 3.2114461e-3, 29: 2.1665706e-3},
            **{30: 1.3718937e-3, 31: 8.5675146e-4, 32: 5.2484602e-4, 33: 3.1269365e-4},
            **{34: 1.7850779e-4, 35: 9.5562122e-5, 36: 7.7846555e-5, 63: 3.0689259e-7},
        },
    ),
    (
        *(64, 5e5, LLAMA3 | {"factor": 32.0}),
        {
            **{1: 0.66360128, 14: 3.2114461e-3, 15: 1.2905480e-3, 16: 4.2955671e-4},
            **{17: 9.7082862e-5, 18: 1.9461639e-5, 31: 9.4183065e-8},
        },
    ),
    (
        *(128, 1e6, YARN),
        {
            **{1: 0.80584222, 23: 6.9783060e-3, 24: 5.3753215e-3, 26: 3.1684227e-3},
            **{30: 1.0643610e-3, 36: 1.7984115e-4, 39: 6.4903943e-5, 40: 4.4456985e-5},
            63: 3.1023444e-7,
        },
    ),
    (128, 1e6, YARN | {"truncate": False}, {24: 5.5172704e-3, 39: 6.1878076e-5}),
    (128, 1e6, YARN | {"beta_fast": 64.0, "beta_slow": 2.0}, {24: 4.6310463e-3}),
    (
        *(128, 1e4, {"type": "linear", "factor": 4.0}),
        {0: 0.25, 1: 0.21649109, 63: 2.8869548e-5},
    ),
    (
        *(256, 1e6, {"type": "linear", "factor": 8.0}),
        {0: 0.125, 1: 0.11221089, 64: 1.2500001e-4, 127: 1.3924674e-7},
    ),
    (256, 1e4, None, {1: 0.93057203, 64: 0.01, 127: 1.0746078e-4}),
    (96, 1e4, LONGROPE, {1: 0.81723183, 24: 8.0645159e-3, 47: 8.2416838e-5}),
]
ATTENTION_FACTORS = [
    (YARN, 1.138629436111989),
    (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    (YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1)),
    (YARN | {"attention_factor": 0.7}, 0.7),
    (LONGROPE, 1.1902380714238083),
    (LONGROPE | {"attention_factor": 0.7}, 0.7),
    ({"type": "linear", "factor": 4.0}, 1.0),
]


def test_frequencies_are_those_of_transformers():
    section = lambda settings: settings and RotaryScalingConfig(**settings)
    for width, base, settings, wanted in FREQUENCIES:
        got, _ = frequencies(width, base, section(settings), 4096)
        assert got.shape == (width // 2,)
        for pair, value in wanted.items():
            assert got[pair] == pytest.approx(value, rel=1e-6, abs=0), (settings, pair)
    got, _ = frequencies(96, 1e4, section(LONGROPE), 4097)  # longer than in the first training
    assert got[[1, 24, 47]] == pytest.approx([0.55026942, 7.6923077e-4, 4.9450105e-6], rel=1e-6)
    for settings, factor in ATTENTION_FACTORS:
        assert frequencies(96, 1e4, section(settings))[1] == pytest.approx(factor, rel=1e-12)
