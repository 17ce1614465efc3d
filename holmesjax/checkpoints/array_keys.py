"""The names of a state's arrays in a checkpoint."""

from typing import Any

import jax

Arrays = dict[str, Any]  # key -> array, or its shape with a sharding


def key_of(path: tuple) -> str:
    """The name of an array of the state, from its path in the tree."""
    return ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def flatten(state: Any) -> Arrays:
    return {key_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
