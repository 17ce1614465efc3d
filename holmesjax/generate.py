"""Sampling from a checkpoint, on one device, with a key-value cache.

Dims: see `models/gpt.py`. The model runs whole, whatever plan trained it: a checkpoint does not
know the plan. When the text outgrows the model's context, the cache is filled again with its later
half.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax import job as jobs
from holmesjax.checkpoints import checkpoint, manifest
from holmesjax.config import ModelConfig
from holmesjax.data.tokenizer import BEGIN, NUM_TOKENS, encode
from holmesjax.errors import CheckpointError, ConfigError, DamagedError
from holmesjax.models import transformer
from holmesjax.models.transformer import Cache
from holmesjax.plan.plan import EMBED, HEAD, layer_names

Params = dict[str, dict]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The rule that draws the next token from its logits."""

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int = 0  # only of the k likeliest; 0: of all
    top_p: float = 1.0  # only of the likeliest that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            fix = "0 takes the likeliest token, 1 samples the model as it is"
            raise ConfigError("--temperature", "must be 0 or more", found=self.temperature, fix=fix)
        if self.top_k < 0:
            raise ConfigError(
                "--top-k", "must not be negative", found=self.top_k, fix="0: all tokens"
            )
        if not 0 < self.top_p <= 1:
            fix = "1.0 keeps all tokens"
            raise ConfigError("--top-p", "must be above 0, at most 1", found=self.top_p, fix=fix)
        if not 0 <= self.seed < 2**63:
            problem, fix = "must be from 0 to 2**63 - 1", "0, 1 and so on: each gives another text"
            raise ConfigError("--seed", problem, found=self.seed, fix=fix)


def draw(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token; a scalar int32.

    Temperature first, then top-k, then the smallest set of likeliest tokens whose probability
    reaches top-p (Holtzman et al., arXiv:1904.09751). Ids that pad the vocabulary are no tokens.
    """
    logits_V = logits_V[:NUM_TOKENS]
    if sampling.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    logits_V = logits_V / sampling.temperature
    order_V = jnp.argsort(-logits_V)
    sorted_V = logits_V[order_V]
    rank_V = jnp.arange(logits_V.size)
    keep_V = rank_V < sampling.top_k if sampling.top_k else jnp.ones_like(rank_V, bool)
    p_V = jax.nn.softmax(jnp.where(keep_V, sorted_V, -jnp.inf))
    keep_V &= jnp.cumsum(p_V) - p_V < sampling.top_p  # what came before has not reached it
    choice = jax.random.categorical(key, jnp.where(keep_V, sorted_V, -jnp.inf))
    return order_V[choice].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="caches")
def extend(
    params: Params,
    caches: dict[str, Cache],
    token_BL: jax.Array,
    start: jax.Array,
    model: ModelConfig,
) -> tuple[jax.Array, dict[str, Cache]]:
    """Computes the logits after each of the tokens, and adds the tokens to the caches.

    Args:
      params: the parameters by layer.
      caches: keys and values by layer, [B, T, G, K]; donated.
      token_BL: tokens that follow those in the caches.
      start: the number of tokens in the caches; a scalar.
      model: the model's settings; static.

    Returns:
      Logits, [B, L, V] float32, and the caches with the new tokens.
    """
    position_L = start + jnp.arange(token_BL.shape[1])
    caches = dict(caches)
    x_BLD = transformer.apply(EMBED, model, params[EMBED], token_BL, position_L)
    for layer in layer_names(model.num_layers)[1:-1]:
        args = x_BLD, position_L, caches[layer]
        x_BLD, caches[layer] = transformer.apply(
            layer, model, params[layer], *args, method="decode"
        )
    return transformer.apply(HEAD, model, params[HEAD], x_BLD, params[EMBED]["token_VD"]), caches


def empty_caches(model: ModelConfig, num_sequences: int = 1) -> dict[str, Cache]:
    shape = (num_sequences, model.context_length, model.kv_heads, model.head_width)
    return {
        layer: {"key_BTGK": jnp.zeros(shape), "value_BTGK": jnp.zeros(shape)}
        for layer in layer_names(model.num_layers)[1:-1]
    }


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A trained model that continues text."""

    model: ModelConfig
    params: Params

    @classmethod
    def load(cls, run_dir: str | Path, warn: Callable[[str], None] = warnings.warn) -> "Sampler":
        """Loads the newest whole checkpoint of a run, and writes nothing.

        Args:
          warn: takes what is wrong with newer ones.
        """
        jobs.load_config(run_dir)
        known: dict[Path, DamagedError] = {}
        while True:
            found = manifest.newest(run_dir, warn, set_aside=False, known=known)
            if found is None:
                fix = f"train it first: python -m launch train {run_dir}"
                raise CheckpointError(str(run_dir), "has no checkpoint", found="none", fix=fix)
            model = ModelConfig(**found.settings["model"])
            try:
                return cls(model=model, params=checkpoint.restore_params(found, model))
            except DamagedError as error:
                known[found.path] = error

    def stream(self, prompt: str, max_tokens: int, sampling: Sampling) -> Iterator[str]:
        """The continuation, in pieces that are whole characters."""
        pending = b""
        for token in self.tokens(prompt, max_tokens, sampling):
            if token == BEGIN:  # the document has ended
                break
            pending += bytes([token])
            try:
                text, pending = pending.decode(), b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    continue
                text, pending = pending.decode(errors="replace"), b""
            yield text
        if pending:
            yield pending.decode(errors="replace")

    def tokens(self, prompt: str, max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """The tokens that follow the prompt, without end but for `max_tokens`."""
        context = self.model.context_length
        known = encode(prompt).tolist()
        key = jax.random.key(sampling.seed)
        choose = jax.jit(functools.partial(draw, sampling=sampling))
        caches, num_cached = empty_caches(self.model), 0
        for i in range(max_tokens):
            if len(known) > context:
                known, num_cached = known[-max(context // 2, 1) :], 0
            new_BL = np.array([known[num_cached:]], np.int32)
            logits_BLV, caches = extend(
                self.params, caches, new_BL, jnp.int32(num_cached), self.model
            )
            num_cached = len(known)
            token = int(choose(logits_BLV[0, -1], jax.random.fold_in(key, i)))
            known.append(token)
            yield token
