"""The optimizers and schedules that a run may name, and what each keeps. Does not import JAX.

Planner, config and console read these records; the optimizer itself, which a record names, is for
those that have devices (`optimizers`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Literal

NumberFormat = Literal["float32", "bfloat16", "int8"]  # int8: with a scale for 64 numbers
# An array of the parameter's shape, or of a parameter that `factored_dims` names two dims of, two
# arrays in float32, each without one of these dims; or float32 of parameters that are no hidden
# matrices (`Parameter.matrix`), and nothing of those.
Kept = NumberFormat | Literal["factored", "others"]
MIN_FACTORED = 128  # of the second largest dim, as in optax


def factored_dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The largest dim and the second largest, if Adafactor keeps means over each of them.

    The later of two equal dims counts as larger.

    >>> factored_dims((128, 4, 256)), factored_dims((128, 128)), factored_dims((512, 4, 64))
    ((2, 0), (1, 0), None)
    """
    *_, second, largest = (0, 0, *sorted(range(len(shape)), key=lambda dim: shape[dim]))
    if len(shape) < 2 or shape[second] < MIN_FACTORED:
        return None
    return largest, second


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSchedule:
    """A learning rate behind its warm-up, which falls from its peak to `final_fraction` of it.

    Args:
      fallen: which part of the fall is done after a share of the updates in which the rate falls:
        0 after 0, and 1 after 1. The share is a number or an array, and the second argument the
        module whose functions compute it, `numpy` or `jax.numpy`. None: the rate stays.
      has_decay: whether it falls in the last `decay_steps` or `decay_tokens` alone.
    """

    fallen: Callable[[Any, ModuleType], Any] | None
    has_decay: bool = False


# By `optimizer.schedule`.
RATE_SCHEDULES: dict[str, RateSchedule] = {
    "constant": RateSchedule(fallen=None),
    "cosine": RateSchedule(fallen=lambda share, xp: 0.5 * (1.0 - xp.cos(xp.pi * share))),
    "linear": RateSchedule(fallen=lambda share, xp: share),
    # Warm-up, stable, decay: Hu et al., arXiv:2404.06395.
    "wsd": RateSchedule(fallen=lambda share, xp: share, has_decay=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRule:
    """The facts about an optimizer that need no arrays.

    `kept` and `describe` take the section `optimizer` of a run, an `OptimizerConfig`.
    """

    # Its `make(config, schedule, statements)` gives an `optimizers.optimizer.Optimizer`.
    module: str
    # The format of each array that it keeps besides a parameter, of the parameter's shape unless
    # it is factored. An update reads and writes all of them.
    kept: Callable[[Any], tuple[Kept, ...]]
    describe: Callable[[Any], str]  # how numbers are kept, for the console
    # The settings of `OF_RULES` that change its steps.
    reads: tuple[str, ...]
    has_adamw: bool = False  # some parameters have AdamW's step
    takes_function: bool = False  # whether `optimizer.function` says what it is


# Settings of the section `optimizer` that only some optimizers read.
OF_RULES = (
    *("beta1", "beta2", "epsilon", "moments"),
    *("muon_beta", "muon_consistent_rms", "function"),
)


def kept(config: Any) -> tuple[Kept, ...]:
    """The formats of all arrays that a run keeps of a parameter besides itself.

    `config` is the section `optimizer` of a run: it may ask for an average of the weights.
    """
    own = RULES[config.name].kept(config)
    return own if config.ema_decay is None else (*own, "float32")


def describe(config: Any) -> str:
    """How these numbers are kept, for the console."""
    average = ", an average of the weights in float32" * (config.ema_decay is not None)
    return RULES[config.name].describe(config) + average


def _one_array(config: Any) -> tuple[NumberFormat, ...]:
    return ("float32",)


def _of_function(config: Any) -> tuple[NumberFormat, ...]:
    """The arrays of a transformation of the user's own, which needs JAX to be asked."""
    kept: tuple[NumberFormat, ...] = resolve_name(f"{ELEMENTWISE}:kept_by_function")(config)
    return kept


ELEMENTWISE = "holmesjax.optimizers.elementwise"
RULES: dict[str, UpdateRule] = {
    "adamw": UpdateRule(
        module="holmesjax.optimizers.adamw",
        kept=lambda config: (config.moments, config.moments),
        describe=lambda config: f"moments in {config.moments}",
        reads=("beta1", "beta2", "epsilon", "moments"),
        has_adamw=True,
    ),
    "lion": UpdateRule(
        module=ELEMENTWISE,
        kept=_one_array,
        describe=lambda config: "the momentum of lion in float32",
        reads=("beta1", "beta2"),
    ),
    "sgd": UpdateRule(
        module=ELEMENTWISE,
        kept=lambda config: ("float32",) if config.beta1 else (),
        describe=lambda config: "the momentum of sgd in float32" if config.beta1 else "plain sgd",
        reads=("beta1",),
    ),
    "rmsprop": UpdateRule(
        module=ELEMENTWISE,
        kept=_one_array,
        describe=lambda config: "the mean squares of rmsprop in float32",
        reads=("beta2", "epsilon"),
    ),
    "optax": UpdateRule(
        module=ELEMENTWISE,
        kept=_of_function,
        describe=lambda config: f"the state of {config.function}",
        reads=("beta1", "beta2", "epsilon", "function"),  # its function may
        takes_function=True,
    ),
    "muon": UpdateRule(
        module="holmesjax.optimizers.muon",
        kept=lambda config: ("float32", "others"),
        describe=lambda config: "the momentum of matrices and AdamW's moments of others in float32",
        reads=("beta1", "beta2", "epsilon", "muon_beta", "muon_consistent_rms"),
        has_adamw=True,
    ),
    "adafactor": UpdateRule(
        module="holmesjax.optimizers.adafactor",
        kept=lambda config: ("factored",),
        describe=lambda config: "the mean squares of adafactor's rows and columns in float32",
        reads=(),
    ),
}
# Optimizers that cannot be: what is wrong, and what to do.
REFUSED = {
    "sophia": (
        "must not be sophia: it estimates the Hessian by a second backward, which no pipeline "
        "schedule has",
        "use adamw, or lion, which steps by signs as sophia does where it clips; or muon",
    ),
}
