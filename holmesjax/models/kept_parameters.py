"""Functions whose residuals hold no array that is computed from parameters alone.

A residual is kept for each microbatch in flight. JAX's own gradient of a product keeps its weight
as the function has cast, reshaped or transposed it, so a stage would hold that weight many times.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.tree_util import Partial

from holmesjax.models.jaxprs import roots

Tree = Any


def without_weights(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(params, *inputs)`, whose backward makes again what is made of `params` alone.

    The parameters themselves are kept as they are, so that a caller may leave them out.
    """

    @jax.custom_vjp
    def function(params: Tree, *inputs: Any) -> Any:
        return run(params, *inputs)

    def forward(params: Tree, *inputs: Any) -> tuple[Any, tuple[Tree, Partial]]:
        structures: list[Any] = []

        def both(params: Tree, *inputs: Any) -> tuple[Any, list[jax.Array]]:
            out, pullback = jax.vjp(run, params, *inputs)
            leaves, structure = jax.tree.flatten(pullback)
            structures.append(structure)
            return out, leaves

        closed, (shape, _) = jax.make_jaxpr(both, return_shape=True)(params, *inputs)
        num_outs, leaves = len(jax.tree.leaves(shape)), jax.tree.leaves((params, *inputs))
        num_weights, count = len(jax.tree.leaves(params)), len(leaves)
        of = roots(closed.jaxpr, [frozenset([i]) for i in range(count)])[num_outs:]
        again = [
            all(number < num_weights for number in argument_numbers) for argument_numbers in of
        ]
        found = jaxpr_as_fun(closed)(*leaves)
        kept = [x for x, is_again in zip(found[num_outs:], again, strict=True) if not is_again]
        make = _only(closed, [False] * num_outs + again)
        pull = Partial(_Pull(make, structures[-1], tuple(again)), *kept)
        return jax.tree.unflatten(jax.tree.structure(shape), found[:num_outs]), (params, pull)

    def backward(residuals: tuple[Tree, Partial], dy: Any) -> tuple:
        params, pull = residuals
        gradients: tuple = pull(params, dy)
        return gradients

    function.defvjp(forward, backward)
    return function


def _only(closed: ClosedJaxpr, wanted: list[bool]) -> Callable[..., list[jax.Array]]:
    """The function that computes some outputs of a program, of the inputs that they need."""
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return lambda leaves: run(*(x for x, is_used in zip(leaves, used, strict=False) if is_used))


class _Pull:
    """The backward, of what is kept, the parameters and a cotangent; static in a tree of arrays."""

    def __init__(self, make: Callable[..., list], structure: Any, again: tuple[bool, ...]):
        self._make, self._structure, self._again = make, structure, again

    def __call__(self, *args: Any) -> tuple:
        *kept, params, dy = args
        made, held = iter(self._make(jax.tree.leaves(params))), iter(kept)
        leaves = [next(made) if is_again else next(held) for is_again in self._again]
        gradients: tuple = jax.tree.unflatten(self._structure, leaves)(dy)
        return gradients
