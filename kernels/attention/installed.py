"""The implementations of attention that the JAX of this process has."""

import functools
import importlib
import warnings

import jax
import jax.numpy as jnp

from kernels.attention.choice import Implementation

TRITON = "jax.experimental.pallas.ops.gpu.attention"  # since 0.11 a warning says that it will go


@functools.cache
def missing(implementation: Implementation) -> str | None:
    """Returns why JAX cannot run an implementation on this machine; None where it can."""
    if implementation == "cudnn":
        x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
        call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        try:
            jax.eval_shape(call, x, x, x)
        except RuntimeError as error:
            return f"library that JAX finds here: {error}"
    if implementation == "triton":
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(TRITON)
        except ImportError:
            return f"place in JAX {jax.__version__}, which has dropped them"
    return None
