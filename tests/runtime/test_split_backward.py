"""A divided backward equals `jax.vjp`, and computes nothing twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.runtime.split_backward import split_backward

N, D = 3, 4


def chain(params, x):
    for name in ("a", "b", "c"):
        x = x + jnp.tanh(x @ params[name])
    return x


def used_twice(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"] @ params["a"]


def with_scale(params, x):
    return (x * params["a"][:1] @ params["b"]) ** 2 @ params["c"]


def barriers(params, x):
    """Equations with several results: gradients of two weights, or of one and of what is before."""
    x, a = jax.lax.optimization_barrier((x, params["a"]))
    b, c = jax.lax.optimization_barrier((params["b"], params["c"]))
    return jnp.sin(jnp.sin(x @ a) @ b) @ c


@jax.custom_vjp
def opaque(x, w):
    return x @ w


def opaque_forward(x, w):
    return x @ w, (x, w)


def opaque_backward(residuals, dy):
    x, w = residuals
    dy, w = jax.lax.optimization_barrier((dy, w))
    return jax.lax.optimization_barrier((dy @ w.T, x.T @ dy))


opaque.defvjp(opaque_forward, opaque_backward)


def opaque_product(params, x):
    return opaque(jnp.tanh(x @ params["b"]), params["a"]) @ params["c"]


def called(params, x):
    return jax.jit(chain)(params, jax.checkpoint(chain)(params, x))


def looped(params, x):
    return jax.lax.scan(lambda x, _: (chain(params, x), None), x, length=2)[0]


# Of the products in the backward: how many come second.
FUNCTIONS = {
    chain: 3,
    used_twice: 3,
    with_scale: 2,
    barriers: 0,  # its products end in one equation for two
    opaque_product: 2,  # its own two come out of one
    called: None,  # what `jit`, `checkpoint` and `scan` call is one equation
    looped: None,
}


def num_products(jaxpr) -> int:
    """Also in what its equations call."""
    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    inside = jax.tree.leaves([list(e.params.values()) for e in jaxpr.eqns], is_leaf=is_jaxpr)
    own = sum(e.primitive.name == "dot_general" for e in jaxpr.eqns)
    return own + sum(num_products(getattr(x, "jaxpr", x)) for x in inside if is_jaxpr(x))


def count(function, *args) -> int:
    return num_products(jax.make_jaxpr(function)(*args).jaxpr)


def make_backward(function):
    """The arrays that it saves, and `backward(saved, dy) -> (weights, rest)`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    params, x, dy = {name: draw(D, D) for name in "abc"}, draw(N, D), draw(N, D)
    _, pullback = jax.vjp(function, params, x)
    saved, structure = jax.tree.flatten(pullback)
    return lambda saved, dy: jax.tree.unflatten(structure, saved)(dy), (saved, dy)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_both_parts_are_the_backward_and_no_more(function):
    backward, args = make_backward(function)
    want_weights, want_rest = backward(*args)
    parts, leaves = split_backward(backward, *args), jax.tree.leaves(args)
    rest, passed = parts.first(*leaves)
    kept = [leaves[i] for i in parts.keeps]
    weights = parts.second(*kept, *passed)
    for got, want in ((rest, want_rest), (weights, want_weights)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    whole, first = count(backward, *args), count(parts.first, *leaves)
    second = count(parts.second, *kept, *passed)
    assert first + second == whole >= 4
    if FUNCTIONS[function] is not None:
        assert second == FUNCTIONS[function]


def test_what_the_second_part_does_not_read_is_not_kept():
    backward, args = make_backward(chain)
    parts, leaves = split_backward(backward, *args), jax.tree.leaves(args)
    assert len(parts.keeps) < len(leaves)
    shapes = [leaves[i].shape for i in parts.keeps]
    assert (D, D) not in shapes  # a weight's gradient needs no weight


def test_a_function_without_rest_does_everything_that_one_weight_needs_second():
    """The first chunk of a model has no input to differentiate."""
    backward, args = make_backward(chain)
    parts, leaves = split_backward(lambda *a: (backward(*a)[0], ()), *args), jax.tree.leaves(args)
    rest, passed = parts.first(*leaves)
    weights = parts.second(*[leaves[i] for i in parts.keeps], *passed)
    assert rest == ()
    for got, want in zip(
        jax.tree.leaves(weights), jax.tree.leaves(backward(*args)[0]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    # Of b's activation gradient a alone has need; c's is for both.
    assert count(parts.first, *leaves) == 1


def test_a_weight_whose_gradient_is_a_constant_or_an_argument():
    backward = lambda x, dy: ((jnp.zeros(3), dy, 2.0 * dy), x * dy)
    args = jnp.arange(3.0), jnp.ones(3)
    parts = split_backward(backward, *args)
    rest, passed = parts.first(*args)
    weights = parts.second(*[args[i] for i in parts.keeps], *passed)
    np.testing.assert_array_equal(rest, args[0])
    for got, want in zip(weights, ([0] * 3, [1] * 3, [2] * 3), strict=True):
        np.testing.assert_array_equal(got, want)
