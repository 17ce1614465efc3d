"""Activation checkpointing: what of a forward its backward reads, and what it computes again."""

from collections.abc import Callable
from typing import Any

import jax

from holmesjax.models import ops


def _keeps(primitive: Any, *arrays: Any, **parameters: Any) -> Any:
    """The policy of `dots`: it keeps the results of matrix products and of attention.

    cuDNN's have no name that a policy could keep, but those of its primitive.
    """
    if primitive.name == ops.CUDNN_PRIMITIVE:
        return True
    return _products_and_names(primitive, *arrays, **parameters)


_products_and_names = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names(ops.SAVED, ops.ROUTES, ops.RESULTS),
)
POLICIES = {
    "dots": _keeps,
    "full": jax.checkpoint_policies.save_only_these_names(ops.ROUTES),
}


def checkpointed(run: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """The function of a layer with a policy by its name; as it is with `none`."""
    if policy == "none":
        return run
    return jax.checkpoint(run, policy=POLICIES[policy], prevent_cse=False)
