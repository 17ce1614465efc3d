"""The rule that draws tokens: its distribution, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.errors import ConfigError
from holmesjax.generation.sampling import Sampling, draw, processed


def frequencies(logits, sampling, num=4000):
    keys = jax.random.split(jax.random.key(sampling.seed), num)
    drawn = jax.vmap(lambda key: draw(jnp.asarray(logits), key, sampling, 256))
    tokens = jax.jit(drawn)(keys)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / num


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


@pytest.mark.parametrize(
    "rule, want",
    [
        ({"top_k": 2}, (0.5, 0.25, 0.25)),  # both that are as likely as the second
        ({"top_p": 0.6}, (0.6667, 0, 0.3333)),  # of two that are as likely, the later one
        ({"top_p": 0.601}, (0.5, 0.25, 0.25)),
        ({"min_p": 0.25}, (0.4444, 0.2222, 0.2222, 0.1111)),
        ({"top_p": 0.001}, (1.0,)),
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.9}, (1.0,)),
        ({}, (0.4, 0.2, 0.2, 0.1, 0.06, 0.04)),
    ],
)
def test_probabilities_are_those_of_transformers(rule, want):
    """Its `LogitsProcessor`s gave the numbers; temperature 2 undoes the squares."""
    p = np.array([0.4, 0.2, 0.2, 0.1, 0.06, 0.04])
    want = np.array([*want, *[0] * (6 - len(want))])
    for temperature in (1.0, 2.0):
        logits = jnp.asarray(temperature * np.log(p), jnp.float32)
        got = jax.nn.softmax(processed(logits, Sampling(temperature=temperature, **rule)))
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(temperature=0.5), [0, 1, 2, 3]),
        (Sampling(temperature=1.0, top_p=0.6), [0, 2]),  # 0.48 is not enough, 0.77 is
    ],
)
def test_draws_follow_the_distribution(sampling, kept):
    """4,000 draws: the standard error of a share is at most 0.008; four of them are allowed."""
    logits = np.float32([1.0, -0.2, 1.5, 0.3])
    want = np.zeros(4)
    want[kept] = softmax(logits[kept] / sampling.temperature)
    got = frequencies(logits, sampling)
    assert np.all(got[want == 0] == 0)
    np.testing.assert_allclose(got, want, atol=0.032)


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(temperature=0.0), [77]),
        (Sampling(temperature=1.0), [3, 77, 255]),
        (Sampling(temperature=1.0, top_k=2), [3, 77]),
        (Sampling(temperature=0.7, top_p=0.9), [3, 77]),  # 0.37 and 0.57, of the tokens alone
    ],
)
def test_a_padded_vocabulary_changes_nothing(sampling, kept):
    """Ids above a byte are likelier than all others, and are never drawn nor counted."""
    logits = np.full(320, -100.0, np.float32)
    logits[[3, 77, 255]] = [1.0, 1.3, -0.5]
    logits[256:] = np.linspace(5.0, 9.0, 64)
    want = np.zeros(320)
    want[kept] = softmax(logits[kept] / (sampling.temperature or 1.0))
    got = frequencies(logits, sampling)
    assert np.all(got[want == 0] == 0)
    np.testing.assert_allclose(got, want, atol=0.032)


@pytest.mark.parametrize(
    "wrong, where",
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**70}, "--seed"),
        ({"top_k": -3}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"min_p": 1.5}, "--min-p"),
    ],
)
def test_wrong_settings_are_refused(wrong, where):
    with pytest.raises(ConfigError) as error:
        Sampling(**wrong)
    assert error.value.where == where
