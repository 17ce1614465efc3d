"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) in one pass over each parameter.

A parameter, its gradient and its two moments are read once, and all but the gradient written once,
in place: 28 bytes for each float32 parameter. XLA makes as little of the plain formula, one program
for each array. The kernel takes many small arrays in one launch.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

BLOCK = 4096  # numbers that a program of the kernel updates
NUM_WARPS = 8
SMALL = 2**20  # numbers; arrays below share a launch
MOST_SHARING = 8  # arrays in a launch, each of which is seven pointers

Ref = Any


class Rule(NamedTuple):
    """What is the same in every step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class Leaf(NamedTuple):
    """A parameter with its moments, all of one shape, float32."""

    parameter: jax.Array
    mu: jax.Array
    nu: jax.Array


def factors(
    count: jax.Array,
    scale: jax.Array | float,
    learning_rate: jax.Array | float,
    beta1: float,
    beta2: float,
) -> jax.Array:
    """What all numbers of a step have in common, as float32[4].

    Args:
      count: of this update; 1 is the first.
      scale: of the gradients, to clip their norm.
    """
    t = count.astype(jnp.float32)
    corrections = [1.0 / (1.0 - jnp.power(beta, t)) for beta in (beta1, beta2)]
    return jnp.stack([jnp.float32(x) for x in (scale, learning_rate, *corrections)])


def _step(leaf: Leaf, gradient: jax.Array, factors: Sequence[jax.Array], rule: Rule) -> Leaf:
    scale, learning_rate, correction1, correction2 = factors
    g = gradient.astype(jnp.float32) * scale
    mu = rule.beta1 * leaf.mu + (1.0 - rule.beta1) * g
    nu = rule.beta2 * leaf.nu + (1.0 - rule.beta2) * (g * g)
    change = mu * correction1 / (jnp.sqrt(nu * correction2) + rule.epsilon)
    change = change + rule.weight_decay * leaf.parameter
    return Leaf(leaf.parameter - learning_rate * change, mu, nu)


def adamw_reference(leaf: Leaf, gradient: jax.Array, factors: jax.Array, rule: Rule) -> Leaf:
    """The leaf after a step."""
    return _step(leaf, gradient, [factors[i] for i in range(4)], rule)


def adamw_triton(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    rules: Sequence[Rule],
    *,
    interpret: bool = False,
) -> list[Leaf]:
    """The leaves after a step; on one device, where donated in place."""
    out: dict[int, Leaf] = {}
    for group in _groups([leaf.parameter.size for leaf in leaves]):
        parts = [(leaves[i], gradients[i], rules[i]) for i in group]
        out |= dict(zip(group, _launch(parts, factors, interpret), strict=True))
    return [out[i] for i in range(len(leaves))]


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Which arrays share a launch, by their numbers.

    >>> _groups([10, 2**21, 0, 20, 30])
    [[1], [0, 3, 4], [2]]
    """
    small = [i for i, size in enumerate(sizes) if 0 < size < SMALL]
    shared = [small[i : i + MOST_SHARING] for i in range(0, len(small), MOST_SHARING)]
    large = [[i] for i, size in enumerate(sizes) if size >= SMALL]
    return [*large, *shared, *([i] for i, size in enumerate(sizes) if not size)]


def _launch(
    parts: Sequence[tuple[Leaf, jax.Array, Rule]], factors: jax.Array, interpret: bool
) -> list[Leaf]:
    if not parts[0][1].size:
        return [leaf for leaf, _, _ in parts]
    shapes = [gradient.shape for _, gradient, _ in parts]
    flat = [x.reshape(-1) for leaf, gradient, _ in parts for x in (*leaf, gradient)]
    outs = [x for i, x in enumerate(flat) if i % 4 < 3]  # of four, all but the gradient
    ends, end = [], 0
    for gradient in flat[3::4]:
        end += pl.cdiv(gradient.size, BLOCK)
        ends.append(end)
    kernel = functools.partial(_kernel, rules=tuple(rule for *_, rule in parts), ends=tuple(ends))
    results = pl.pallas_call(
        kernel,
        grid=(end,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        input_output_aliases={1 + 4 * (i // 3) + i % 3: i for i in range(len(outs))},
        interpret=interpret,
        name="adamw",
        compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
    )(factors, *flat)
    return [
        Leaf(*(x.reshape(shape) for x in results[3 * i : 3 * i + 3]))
        for i, shape in enumerate(shapes)
    ]


def _kernel(factors_ref: Ref, *refs: Ref, rules: tuple[Rule, ...], ends: tuple[int, ...]) -> None:
    ins, outs = refs[: 4 * len(rules)], refs[4 * len(rules) :]
    number = pl.program_id(0)
    start = 0
    for i, (rule, end) in enumerate(zip(rules, ends, strict=True)):
        update = functools.partial(
            _block, factors_ref, ins[4 * i : 4 * i + 4], outs[3 * i : 3 * i + 3], rule
        )
        if len(rules) == 1:
            update(number)
        else:
            block = number - start
            pl.when((number >= start) & (number < end))(functools.partial(update, block))
        start = end


def _block(
    factors_ref: Ref, ins: Sequence[Ref], outs: Sequence[Ref], rule: Rule, block: jax.Array
) -> None:
    start = block * BLOCK
    exists = None
    if ins[0].shape[0] % BLOCK:
        exists = start + jax.lax.iota(jnp.int32, BLOCK) < ins[0].shape[0]
    here = pl.ds(start, BLOCK)
    *leaf, gradient = (pltriton.load(ref.at[here], mask=exists) for ref in ins)
    new = _step(Leaf(*leaf), gradient, [factors_ref[i] for i in range(4)], rule)
    for ref, value in zip(outs, new, strict=True):
        pltriton.store(ref.at[here], value, mask=exists)
