"""A text has the rotary factors of its own length: against the oracle in float64."""

import dataclasses
import math

import numpy as np
import pytest

from holmesjax.config import RotaryScalingConfig
from holmesjax.data.byte_tokenizer import ByteTokenizer
from holmesjax.generation.decoder import Decoder, on_devices
from holmesjax.generation.sampler import Sampler
from holmesjax.generation.sampling import Sampling
from tests.generation.odd_models import extended
from tests.models import family_oracle
from tests.models.families import MODELS, TOKENS, params, tensors
from tests.one_device import logits_of

ATOL = 5e-4  # of logits up to 7 in float32: JAX 0.12 is off by 2.2e-4, and other factors by 0.05
ORIGINAL = 16  # tokens of a text of the first training; the model has a context of 64
SHORT, LONG = (1.0, 1.6), (2.0, 5.0)
SCALING = RotaryScalingConfig(
    type="longrope",
    factor=4.0,
    original_max_position_embeddings=ORIGINAL,
    short_factor=SHORT,
    long_factor=LONG,
)
MODEL = dataclasses.replace(MODELS["phi3"], rotary_scaling=SCALING)
HERE = tensors("phi3")
HERE |= {name: 3 * x for name, x in HERE.items() if x.ndim > 1}


def decoder_of(model=MODEL):
    return Decoder(model=model, parts=on_devices(model), params=params("phi3", HERE))


def oracle(tokens, monkeypatch):
    """The logits [L, V] of one text, as `transformers` computes it by the length of the text."""
    f = family_oracle.plain_frequencies(1e4, 4) / (LONG if len(tokens) > ORIGINAL else SHORT)
    own = {"f": f, "a": math.sqrt(1 + math.log(4) / math.log(ORIGINAL))}
    monkeypatch.setitem(family_oracle.FAMILIES, "phi3", family_oracle.FAMILIES["phi3"] | own)
    return family_oracle.logits("phi3", HERE, np.array(tokens))


@pytest.mark.parametrize("length", [5, ORIGINAL, ORIGINAL + 1, 40])
def test_a_text_has_the_factors_of_its_length(length, monkeypatch):
    want = oracle(TOKENS[:length], monkeypatch)
    rows = np.stack([TOKENS[:length], TOKENS[:length]]).astype(np.int32)
    got, _ = extended(decoder_of(), rows, (length,), most=64)
    np.testing.assert_allclose(got[1], want, rtol=0, atol=ATOL)
    of_run = dataclasses.replace(MODEL, context_length=length)  # a training has one length
    trained = logits_of(params("phi3", HERE), of_run, rows[:1])
    np.testing.assert_allclose(trained[0], want, rtol=0, atol=ATOL)
    f = oracle(TOKENS[: ORIGINAL if length > ORIGINAL else ORIGINAL + 1], monkeypatch)
    assert np.abs(f[: len(want)] - want[: len(f)]).max() > 0.05  # the others would be seen


def test_a_generated_text_has_other_factors_once_it_is_long(monkeypatch):
    """Rows pass the length at different tokens, and each is what it is alone and without caches."""
    sampler = Sampler(decoder=decoder_of(), tokenizer=ByteTokenizer())
    prompts = [TOKENS[:10].tolist(), TOKENS[:20].tolist(), TOKENS[:14].tolist()]
    rows = np.array(list(sampler.tokens(prompts, 12, Sampling(temperature=0.0)))).T.tolist()
    for prompt, row in zip(prompts, rows, strict=True):
        known = list(prompt)
        for token in row:
            logits = oracle(known, monkeypatch)[-1]
            assert logits[token] > logits.max() - 1e-3, (len(prompt), len(known))
            known.append(token)
