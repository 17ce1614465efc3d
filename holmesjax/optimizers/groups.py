"""Learning rates and weight decay of groups of parameters, by pattern. Does not import JAX."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from holmesjax.config import Config, OptimizerConfig
from holmesjax.errors import ConfigError
from holmesjax.files import schema
from holmesjax.layer_specs.kind import Parameter
from holmesjax.layer_specs.model_layers import layers


class OwnSettings(NamedTuple):
    """The settings of an update that a parameter has for itself."""

    rate: float  # by which the learning rate of a step is multiplied
    weight_decay: float


def own_settings(config: OptimizerConfig, path: Sequence[Any], parameter: Parameter) -> OwnSettings:
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
            return OwnSettings(
                1.0 if own_rate is None else own_rate / config.learning_rate,
                decay if own_decay is None else own_decay,
            )
    return OwnSettings(1.0, decay)


def refuse_useless(config: Config) -> None:
    """Raises ConfigError for a group that no parameter of the model is in."""
    if not config.optimizer.groups:
        return
    names = [
        f"{layer}/{parameter.name}"
        for layer, kind in layers(config.model).items()
        for parameter in kind.parameters
        if parameter.trains
    ]
    free = dict.fromkeys(names)
    for number, group in enumerate(config.optimizer.groups):
        fits = [name for name in names if fnmatchcase(name, group.pattern)]
        problem, fix = "fits no parameter that trains", schema.near(group.pattern, names[:20])
        if fits and not any(name in free for name in fits):
            problem = "has no parameter: groups before it take all that it fits"
            fix = "put it before them, or leave it out"
        if not any(name in free for name in fits):
            where = f"optimizer.groups[{number}].pattern"
            raise ConfigError(where, problem, found=group.pattern, fix=fix)
        for name in fits:
            free.pop(name, None)
