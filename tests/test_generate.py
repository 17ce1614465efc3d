"""Sampling with the cache equals running the whole model again for every token."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax import job as jobs
from holmesjax.checkpoints import checkpoint, manifest
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import ConfigError
from holmesjax.generate import Sampler, Sampling, draw, empty_caches, extend
from holmesjax.models import transformer
from holmesjax.plan.plan import EMBED, HEAD, block_name
from launch.__main__ import main
from tests.checkpoints.test_checkpoint import damage, folders, write
from tests.runtime.test_pipeline import VARIANTS, make_model

GREEDY = Sampling(temperature=0.0)


def logits_without_cache(params, model, token_BL):
    position_L = jnp.arange(token_BL.shape[1])
    x = transformer.Embed(model).apply({"params": params[EMBED]}, token_BL, position_L)
    for i in range(model.num_layers):
        x = transformer.Block(model).apply({"params": params[block_name(i)]}, x, position_L, None)
    return transformer.Head(model).apply({"params": params[HEAD]}, x, params[EMBED]["token_VD"])


def loud(params):
    """Larger weights, so that the likeliest token changes from place to place."""
    return jax.tree.map(lambda x: x * np.float32(8) if x.ndim > 1 else x, params)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [(16,), (1,) * 16, (5, 1, 1, 9)])
def test_cache_equals_no_cache(variant, cuts):
    model = make_model(**VARIANTS[variant])
    params = loud(transformer.init_params(model, 0))
    token_BL = np.random.default_rng(0).integers(256, size=(2, 16), dtype=np.int32)
    want = logits_without_cache(params, model, token_BL)
    caches, start = empty_caches(model, num_sequences=2), 0
    for cut in cuts:
        new_BL = token_BL[:, start : start + cut]
        got, caches = extend(params, caches, new_BL, jnp.int32(start), model)
        np.testing.assert_allclose(got, want[:, start : start + cut], rtol=1e-4, atol=1e-4)
        start += cut


def test_greedy_continuation_beyond_the_context():
    """Token by token against the model without a cache, with the same sliding of the context."""
    model = make_model()
    sampler = Sampler(model=model, params=loud(transformer.init_params(model, 1)))
    whole = jax.jit(logits_without_cache, static_argnums=1)
    known, want = [BEGIN, *b"def"], []
    for _ in range(40):
        known = known[-8:] if len(known) > 16 else known
        padded = known + [BEGIN] * (16 - len(known))  # what follows a token does not change it
        logits = whole(sampler.params, model, np.array([padded], np.int32))
        want.append(int(jnp.argmax(logits[0, len(known) - 1])))
        known.append(want[-1])
    got = list(sampler.tokens("def", 40, GREEDY))
    assert got == want
    assert len(set(want)) > 3


def frequencies(logits, sampling, num=4000):
    keys = jax.random.split(jax.random.key(sampling.seed), num)
    tokens = jax.vmap(lambda key: draw(jnp.asarray(logits), key, sampling))(keys)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / num


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(temperature=1.0), [0, 1, 2, 3]),
        (Sampling(temperature=0.5), [0, 1, 2, 3]),
        (Sampling(temperature=1.0, top_k=2), [0, 2]),
        (Sampling(temperature=1.0, top_p=0.6), [0, 2]),  # 0.48 is not enough, 0.77 is
        (Sampling(temperature=1.0, top_p=0.4), [2]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.99), [0, 2, 3]),
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


def test_a_model_of_more_ids_than_bytes_makes_text():
    """Untrained, so that all 320 ids are about as likely: one of five draws would be no byte."""
    model = make_model(vocab_size=320)
    sampler = Sampler(model=model, params=transformer.init_params(model, 0))
    tokens = list(sampler.tokens("x", 100, Sampling(temperature=1.0)))
    assert max(tokens) < 256
    assert "".join(sampler.stream("x", 100, Sampling(temperature=1.0))) is not None


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, monkeypatch):
    model = make_model()
    write(tmp_path, model, steps=(1, 2))
    damage(tmp_path, 2)
    monkeypatch.setattr(jobs, "load_config", lambda _: SimpleNamespace(model=model))
    said, before = [], folders(tmp_path)
    sampler = Sampler.load(tmp_path, said.append)
    assert "is damaged" in said[0]
    assert folders(tmp_path) == before
    [found] = [found for found in manifest.find(tmp_path) if found.step == 1]
    wanted = checkpoint.flatten(checkpoint.restore_params(found, model))
    for key, got in checkpoint.flatten(sampler.params).items():
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted[key]))


def test_a_seed_repeats_and_another_differs():
    model = make_model()
    sampler = Sampler(model=model, params=transformer.init_params(model, 0))
    runs = [list(sampler.tokens("x", 20, Sampling(seed=seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "wrong, where",
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**70}, "--seed"),
        ({"top_k": -3}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
    ],
)
def test_wrong_settings_are_refused(wrong, where):
    with pytest.raises(ConfigError) as error:
        Sampling(**wrong)
    assert error.value.where == where


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [("--max-tokens", "-3", "-3"), ("--prompt", "caf\udce9", r"'caf\udce9'")],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(capsys, option, value, found):
    assert main(["generate", "/nowhere", f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {option}: ")
    assert f"found: {found}\n" in said


def test_text_comes_in_whole_characters(monkeypatch):
    sampler = Sampler(model=make_model(), params={})
    stream = "añ→z".encode() + b"\xff!" + "é".encode()[:1]
    monkeypatch.setattr(Sampler, "tokens", lambda *_: iter(stream))
    pieces = list(sampler.stream("", 99, GREEDY))
    assert "".join(pieces) == "añ→z\ufffd!\ufffd"
    assert pieces[:4] == ["a", "ñ", "→", "z"]
