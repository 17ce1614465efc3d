"""Learning rates and weight decay of groups of parameters, by pattern. Does not import JAX."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from holmesjax.config import OptimizerConfig
from holmesjax.layer_specs.kind import Parameter


class UpdateSettings(NamedTuple):
    """The settings of an update that a parameter has for itself."""

    rate: float  # by which the learning rate of a step is multiplied
    weight_decay: float


def update_settings(
    config: OptimizerConfig, path: Sequence[Any], parameter: Parameter
) -> UpdateSettings:
    """Returns the settings of the first group whose pattern fits, else those of the section.

    Args:
      config: the section.
      path: JAX's, in a tree of parameters by layer.
      parameter: what is stated of it.
    """
    decay = config.weight_decay if parameter.decays else 0.0
    name = "/".join(key.key for key in path)
    for group in config.groups:
        if fnmatchcase(name, group.pattern):
            own_rate, own_decay = group.learning_rate, group.weight_decay
            return UpdateSettings(
                1.0 if own_rate is None else own_rate / config.learning_rate,
                decay if own_decay is None else own_decay,
            )
    return UpdateSettings(1.0, decay)
