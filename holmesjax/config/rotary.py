"""The frequencies of rotary positions, and the ways to scale them by name. Does not import JAX.

A head's first R numbers turn in pairs: number i with number i + R / 2, by an angle that is the
position times the frequency base^(-2i/R) (Su et al., arXiv:2104.09864). A scaling makes some
frequencies smaller, so that longer sequences have angles that the model knows. Keys of settings are
those of a config.json.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """One way to scale frequencies. Its functions take the section `rotary_scaling` of a model."""

    needs: tuple[str, ...] = ()  # settings that must be given
    takes: tuple[str, ...] = ()  # others that may be
    # (section, frequencies, base, length of sequences) -> scaled frequencies
    scale: Callable[[Any, np.ndarray, float, int], np.ndarray]
    factor: Callable[[Any], float] = lambda section: 1.0  # of cosines and sines
    refused: str = ""  # why no run may name it


def frequencies(
    width: int, base: float, section: Any = None, length: int = 0
) -> tuple[np.ndarray, float]:
    """The frequency of each pair, float32, and the factor of cosines and sines.

    Scaled ones are computed in float64 and rounded once: an error of a frequency grows with the
    position. Others have exponents in float32, as they always had, so that losses keep their bits.

    Args:
      width: numbers of a head that turn.
      base: of the frequencies.
      section: the section `rotary_scaling` of a model; None: unscaled.
      length: the tokens of a sequence, which longrope asks for.

    >>> numbers, factor = frequencies(4, 10_000.0)
    >>> numbers.tolist(), factor
    ([1.0, 0.009999999776482582], 1.0)
    """
    half = width // 2
    if section is None:
        exponents = -np.arange(half, dtype=np.float32) * np.float32(1 / half)
        return (base ** exponents.astype(np.float64)).astype(np.float32), 1.0
    plain = base ** (-np.arange(half, dtype=np.float64) / half)
    scaling = SCALINGS[section.type]
    return scaling.scale(section, plain, base, length).astype(np.float32), scaling.factor(section)


def switch_length(section: Any) -> int | None:
    """The tokens up to which a text has other frequencies than a longer one; None: all have one.

    Args:
      section: the section `rotary_scaling` of a model, or None.
    """
    if section is None or section.type != "longrope":
        return None
    length: int = section.original_max_position_embeddings
    return length


def _linear(section: Any, plain: np.ndarray, base: float, length: int) -> np.ndarray:
    """Chen et al., arXiv:2306.15595."""
    scaled: np.ndarray = plain / section.factor
    return scaled


def _llama3(section: Any, plain: np.ndarray, base: float, length: int) -> np.ndarray:
    """Pairs that turn seldom are scaled, others are not, with a ramp between (Llama 3.1)."""
    low, high = section.low_freq_factor, section.high_freq_factor
    turns = section.original_max_position_embeddings * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    scaled: np.ndarray = share * plain + (1 - share) * plain / section.factor
    return scaled


def _yarn(section: Any, plain: np.ndarray, base: float, length: int) -> np.ndarray:
    """Scales as `_llama3` does, with a ramp over pairs (Peng et al., arXiv:2309.00071)."""
    width = 2 * plain.size

    def pair(turns: float) -> float:
        """The pair that turns so often in the original context."""
        context = section.original_max_position_embeddings
        return width * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = pair(section.beta_fast or 32.0), pair(section.beta_slow or 1.0)
    if section.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (high == low)  # a step, where the ramp would have no length
    ramp = np.clip((np.arange(plain.size) - low) / (high - low), 0, 1)
    scaled: np.ndarray = plain * (1 - ramp) + plain / section.factor * ramp
    return scaled


def _yarn_factor(section: Any) -> float:
    grown = lambda m: 0.1 * m * math.log(section.factor) + 1 if section.factor > 1 else 1.0
    if section.attention_factor:
        return float(section.attention_factor)
    if section.mscale and section.mscale_all_dim:
        return grown(section.mscale) / grown(section.mscale_all_dim)
    return grown(1.0)


def _longrope(section: Any, plain: np.ndarray, base: float, length: int) -> np.ndarray:
    """A factor for each pair (Ding et al., arXiv:2402.13753); the length of a sequence says which.

    All sequences of a training have one length, the model's `context_length`. A text that is
    generated has the factors of its own length, and all its keys have others once it is longer
    than `switch_length`.
    """
    is_long = length > section.original_max_position_embeddings
    scaled: np.ndarray = plain / np.array(section.long_factor if is_long else section.short_factor)
    return scaled


def _longrope_factor(section: Any) -> float:
    if section.attention_factor:
        return float(section.attention_factor)
    if section.factor <= 1:
        return 1.0
    original = section.original_max_position_embeddings
    return math.sqrt(1 + math.log(section.factor) / math.log(original))


def _unscaled(section: Any, plain: np.ndarray, base: float, length: int) -> np.ndarray:
    return plain


SCALINGS: dict[str, Scaling] = {
    "linear": Scaling(needs=("factor",), scale=_linear),
    "llama3": Scaling(
        needs=("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), scale=_llama3
    ),
    "yarn": Scaling(
        needs=("factor", ORIGINAL),
        takes=(
            *("beta_fast", "beta_slow", "truncate"),
            *("attention_factor", "mscale", "mscale_all_dim"),
        ),
        scale=_yarn,
        factor=_yarn_factor,
    ),
    "longrope": Scaling(
        needs=("factor", ORIGINAL, "short_factor", "long_factor"),
        takes=("attention_factor",),
        scale=_longrope,
        factor=_longrope_factor,
    ),
    "dynamic": Scaling(
        scale=_unscaled,
        refused="changes frequencies with the length of each text, so keys that are cached would "
        "turn otherwise than new ones",
    ),
}
