"""Walks through the programs that JAX traces: which inputs does a value depend on?"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

Roots = frozenset[int]  # numbers of the inputs that a value depends on


def roots(jaxpr: Jaxpr, of_inputs: Sequence[Roots]) -> list[Roots]:
    """The inputs on which each output depends; `of_inputs` says it of the inputs themselves."""
    known: dict[Any, Roots] = dict(zip(jaxpr.invars, of_inputs, strict=True))
    read = lambda var: frozenset() if isinstance(var, Literal) else known.get(var, frozenset())
    for equation in jaxpr.eqns:
        ins = [read(var) for var in equation.invars]
        body = called(equation)
        if body is not None and len(body.invars) == len(ins):
            outs = roots(body, ins)
        else:
            outs = [frozenset().union(*ins)] * len(equation.outvars)
        known |= zip(equation.outvars, outs, strict=True)
    return [read(var) for var in jaxpr.outvars]


def called(equation: Any) -> Jaxpr | None:
    """The function that an equation calls once, if it does nothing else."""
    found = [equation.params.get(name) for name in ("jaxpr", "call_jaxpr")]
    for inner in found:
        if inner is not None and equation.primitive.name not in ("scan", "while", "cond"):
            body: Jaxpr = getattr(inner, "jaxpr", inner)
            return body if len(body.outvars) == len(equation.outvars) else None
    return None
