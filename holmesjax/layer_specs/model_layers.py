"""The layers of a model in order: the name and the kind of each.

Names are `embed`, `block_000`, `block_001`, ..., `head`, whatever the kinds.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from holmesjax.config import ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs import experts, fp8, lora, transformer
from holmesjax.layer_specs.frozen import freeze
from holmesjax.layer_specs.kind import Kind

Function = TypeVar("Function", bound=Callable[..., Any])
EMBED, HEAD = "embed", "head"  # the first and the last layer of every model

# A kind may also be named as "module:function": a function that returns the kind for a model.
KINDS: dict[str, Callable[[ModelConfig], Kind]] = {
    "embed": transformer.embed_spec,
    "block": transformer.block_spec,
    "window_block": transformer.window_block,
    "expert_block": experts.expert_block,
    "head": transformer.head_spec,
}


# The function that gives the kinds of a model of `model.module`. It traces them, so it needs JAX.
OWN_KINDS = "holmesjax.models.own_kinds:kinds_by_layer"

_CACHES: list[Any] = []


def cached(maxsize: int) -> Callable[[Function], Function]:
    """`functools.lru_cache` for functions of a model's settings, which `forget` empties."""

    def decorate(function: Function) -> Function:
        found: Any = functools.lru_cache(maxsize)(function)
        _CACHES.append(found)
        return cast(Function, found)

    return decorate


def forget() -> None:
    """Empties these caches: the function that `model.module` names may be another one now."""
    for cache in _CACHES:
        cache.cache_clear()


def block_name(index: int) -> str:
    """Name of a Transformer layer.

    >>> block_name(7)
    'block_007'
    """
    return f"block_{index:03d}"


def layer_names(num_layers: int) -> tuple[str, ...]:
    """Names of all layers of a model, in order.

    >>> layer_names(2)
    ('embed', 'block_000', 'block_001', 'head')
    """
    return (EMBED, *map(block_name, range(num_layers)), HEAD)


@cached(64)
def layers(model: ModelConfig) -> dict[str, Kind]:
    """The kind of each layer by its name, in order. Equal layers share one kind.

    Raises:
      ConfigError: `model.pattern` has a name of no kind, or of none between embedding and head, or
        of one that knows no adapters, or no fp8, where the model has some; `model.frozen` matches
        nothing, or all parameters; or a pattern of `model.lora` matches no adapter.

    >>> list(layers(ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4)))
    ['embed', 'block_000', 'head']
    """
    whole = _all_layers(model)
    return freeze(whole, model.frozen) if model.frozen else whole


def _all_layers(model: ModelConfig) -> dict[str, Kind]:
    if model.module is not None:
        own: dict[str, Kind] = import_object(OWN_KINDS)(model)
        return own
    kinds = {
        name: (KINDS.get(name) or _named(name))(model) for name in (EMBED, *model.pattern, HEAD)
    }
    turns = [kinds[name] for name in model.pattern]
    if wrong := [kind.name for kind in turns if kind.place != "middle"]:
        problem = "names a layer that is at an end of the model"
        raise ConfigError("model.pattern", problem, found=wrong[0], fix=_known())
    middle = {block_name(i): turns[i % len(turns)] for i in range(model.num_layers)}
    if model.fp8 is not None:
        coded = {kind: fp8.in_fp8(kind, model) for kind in turns}
        for i, (name, kind) in enumerate(middle.items()):
            if not fp8.is_excluded(i, model.num_layers, model.fp8):
                middle[name] = coded[kind]
    found = {EMBED: kinds[EMBED], **middle, HEAD: kinds[HEAD]}
    return found if model.lora is None else lora.adapted(found, model)


@cached(64)
def auxiliary_names(model: ModelConfig) -> tuple[str, ...]:
    """The names of auxiliary losses and metrics of all layers, each once."""
    names: dict[str, None] = {}
    for kind in layers(model).values():
        names |= dict.fromkeys([*(name for name, _ in kind.losses), *kind.metrics])
    return tuple(names)


def _named(name: str) -> Callable[[ModelConfig], Kind]:
    """The function that "module:function" names."""
    try:
        make: Callable[[ModelConfig], Kind] = import_object(name)
    except (ImportError, AttributeError, ValueError) as error:
        problem = "names no kind of layer"
        raise ConfigError(
            "model.pattern", problem, found=f"{name}: {error}", fix=_known()
        ) from None
    return make


def import_object(name: str) -> Any:
    """Imports the object that "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _known() -> str:
    middle = [name for name in KINDS if name not in (EMBED, HEAD)]
    return f"use {' or '.join(middle)}, or module:function of a kind of your own"
