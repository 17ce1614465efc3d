"""The rule that draws the next token from its logits.

Dims: V vocabulary size. The order of the rules, and what they do with equal logits, are those of
Hugging Face's `transformers`: temperature, top-k, top-p, min-p.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from holmesjax.errors import ConfigError

LEAST, LARGEST = 1e-30, 1e30  # temperatures by which float32 can divide a logit


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The settings of the rule."""

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int = 0  # only of the k likeliest, and of those as likely as the last; 0: of all
    top_p: float = 1.0  # only of the likeliest that together have this probability
    min_p: float = 0.0  # only of those with this share of the likeliest one's probability
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST <= self.temperature <= LARGEST:
            problem = f"must be 0, or from {LEAST:g} to {LARGEST:g}"
            fix = "0 takes the likeliest token, 1 samples the model as it is"
            raise ConfigError("--temperature", problem, found=self.temperature, fix=fix)
        if self.top_k < 0:
            raise ConfigError(
                "--top-k", "must not be negative", found=self.top_k, fix="0: all tokens"
            )
        if not 0 < self.top_p <= 1:
            fix = "1.0 keeps all tokens"
            raise ConfigError("--top-p", "must be above 0, at most 1", found=self.top_p, fix=fix)
        if not 0 <= self.min_p <= 1:
            fix = "0.0 keeps all tokens"
            raise ConfigError("--min-p", "must be from 0 to 1", found=self.min_p, fix=fix)
        if not 0 <= self.seed < 2**63:
            problem, fix = "must be from 0 to 2**63 - 1", "0, 1 and so on: each gives another text"
            raise ConfigError("--seed", problem, found=self.seed, fix=fix)


def processed(logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits of the distribution that is sampled; -inf where a token is left out.

    Top-p (Holtzman et al., arXiv:1904.09751) leaves out the least likely tokens while their
    probabilities together are at most 1 - p: of two equal ones the first goes first.
    """
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < logits_V.size:
        least = jax.lax.top_k(logits_V, sampling.top_k)[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    if sampling.top_p < 1:
        order_V = jnp.argsort(logits_V)
        goes_V = jnp.cumsum(jax.nn.softmax(logits_V[order_V])) <= 1 - sampling.top_p
        goes_V = jnp.zeros_like(goes_V).at[order_V[:-1]].set(goes_V[:-1])
        logits_V = jnp.where(goes_V, -jnp.inf, logits_V)
    if sampling.min_p > 0:
        p_V = jax.nn.softmax(logits_V)
        logits_V = jnp.where(p_V < sampling.min_p * jnp.max(p_V), -jnp.inf, logits_V)
    return logits_V


def draw(logits_V: jax.Array, key: jax.Array, sampling: Sampling, num_tokens: int) -> jax.Array:
    """One token; a scalar int32. Ids from `num_tokens` on pad the vocabulary."""
    logits_V = logits_V[:num_tokens].astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    return jax.random.categorical(key, processed(logits_V, sampling)).astype(jnp.int32)
