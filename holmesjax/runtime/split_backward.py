"""Splits a backward in two: the gradient of the input first, the gradients of the weights second.

Zero-bubble schedules (Qi et al., arXiv:2401.10241) send the gradient of a stage's input as soon as
it is there, and compute the gradients of the weights when there is nothing else to do. Running
`jax.vjp` once for each half would run the chain of activation gradients twice. So the backward is
traced once, and its equations are divided: an equation on which a single weight's gradient depends,
and nothing else, belongs to the second half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Tree = Any


@dataclass(frozen=True)
class SplitBackward:
    """The two halves, over flat lists of arrays.

    `first(*leaves) -> (rest, passed)` and `second(*kept, *passed) -> weights`, where `kept` are the
    arguments with the numbers `keeps`.
    """

    first: Callable[..., tuple[Tree, list[jax.Array]]]
    second: Callable[..., Tree]
    keeps: tuple[int, ...]


def split_backward(function: Callable[..., tuple[Tree, Tree]], *args: Tree) -> SplitBackward:
    """Divides `function(*args) -> (weights, rest)`, where `rest` is wanted first.

    Args:
      function: any JAX function.
      args: trees of arrays, or of their shapes.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    num_weights = len(jax.tree.leaves(shapes[0]))
    weights, rest = jaxpr.outvars[:num_weights], jaxpr.outvars[num_weights:]

    reaches: dict[Var, int] = {}  # the outputs that depend on it, a bit each
    for bit, out in enumerate(jaxpr.outvars):
        _add(reaches, [out], 1 << bit)
    ours: list[JaxprEqn] = []
    later: list[JaxprEqn] = []
    for equation in reversed(jaxpr.eqns):
        outputs = 0
        for var in equation.outvars:
            outputs |= reaches.get(var, 0)
        _add(reaches, equation.invars, outputs)
        is_weights = outputs.bit_count() == 1 and outputs.bit_length() <= num_weights
        if outputs:  # without any, nobody wants it
            (later if is_weights else ours).append(equation)
    ours.reverse()
    later.reverse()
    read = dict.fromkeys(var for e in later for var in e.invars if not isinstance(var, Literal))
    read |= dict.fromkeys(var for var in weights if not isinstance(var, Literal))
    made = {var for e in ours for var in e.outvars}
    passed = [var for var in read if var in made]
    keeps = tuple(i for i, var in enumerate(jaxpr.invars) if var in read)
    kept = [jaxpr.invars[i] for i in keeps]

    def run(equations: list, invars: Sequence, outvars: Sequence) -> Callable[..., list]:
        half = jaxpr.replace(
            eqns=equations,
            invars=list(invars),
            outvars=list(outvars),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        return jaxpr_as_fun(ClosedJaxpr(half, closed.consts))

    first = run(ours, jaxpr.invars, [*rest, *passed])
    second = run(later, [*kept, *passed], weights)
    structures = [jax.tree.structure(shape) for shape in shapes]

    def run_first(*leaves: jax.Array) -> tuple[Tree, list[jax.Array]]:
        outputs = first(*leaves)
        return jax.tree.unflatten(structures[1], outputs[: len(rest)]), outputs[len(rest) :]

    def run_second(*leaves: jax.Array) -> Tree:
        return jax.tree.unflatten(structures[0], second(*leaves))

    return SplitBackward(run_first, run_second, keeps)


def _add(reaches: dict[Var, int], variables: Sequence, outputs: int) -> None:
    for var in variables:
        if not isinstance(var, Literal):
            reaches[var] = reaches.get(var, 0) | outputs
