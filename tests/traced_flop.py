"""The matrix products of traced programs."""

import jax
import numpy as np


def dot_flop(jaxpr) -> int:
    """Two for each multiplication in the matrix products of a jaxpr, at any depth.

    One branch of a choice between platforms counts: all of them multiply the same.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * int(np.prod(out)) * int(np.prod([lhs[i] for i in contracted]))
        values = jax.tree.leaves(tuple(equation.params.values()))
        if equation.primitive.name == "cond":
            values = equation.params["branches"][:1]
        for value in values:
            inner = getattr(value, "jaxpr", value)
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            total += times * dot_flop(inner) if hasattr(inner, "eqns") else 0
    return total
