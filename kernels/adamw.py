"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) in one pass over each parameter.

A parameter, its gradient and its two moments are read once, and all but the gradient written once,
in place: 28 bytes for each float32 parameter, 20 with moments in bfloat16, and 16.25 in int8
(`moments`). XLA makes as little of the plain formula, one program for each array, but for int8,
where it reads the new moments again for their scales. The kernel takes many small arrays in one
launch.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels import moments
from kernels.moments import Moment, Quantized

BLOCK = 4096  # numbers that a program of the kernel updates
NUM_WARPS = 8
SMALL = 2**20  # numbers; arrays below share a launch
MOST_SHARING = 8  # arrays in a launch, each of which is seven pointers or more

Ref = Any


class Rule(NamedTuple):
    """What is the same in every step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    seed: int = 0  # of the noise that rounds the moments; another for each parameter


class Leaf(NamedTuple):
    """A parameter, float32, with its moments, all of one shape."""

    parameter: jax.Array
    mu: Moment
    nu: Moment


class Part(NamedTuple):
    """Which part of an array a device has: noise goes by the place in the whole."""

    whole: tuple[int, ...]  # shape
    start: jax.Array  # int32 [dims]


def factors(
    count: jax.Array,
    scale: jax.Array | float,
    learning_rate: jax.Array | float,
    beta1: float,
    beta2: float,
    applies: jax.Array | bool = True,
) -> jax.Array:
    """What all numbers of a step have in common, as float32[6].

    Args:
      count: of this update; 1 is the first.
      scale: of the gradients, to clip their norm.
      applies: whether there is a step at all.
    """
    t = count.astype(jnp.float32)
    corrections = [1.0 / (1.0 - jnp.power(beta, t)) for beta in (beta1, beta2)]
    return jnp.stack([jnp.float32(x) for x in (scale, learning_rate, *corrections, t, applies)])


def _step(
    parameter: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    gradient: jax.Array,
    factors: Sequence[jax.Array],
    rule: Rule,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next parameter and moments, all float32."""
    scale, learning_rate, correction1, correction2, *_ = factors
    g = gradient.astype(jnp.float32) * scale
    mu = rule.beta1 * mu + (1.0 - rule.beta1) * g
    nu = rule.beta2 * nu + (1.0 - rule.beta2) * (g * g)
    change = mu * correction1 / (jnp.sqrt(nu * correction2) + rule.epsilon)
    change = change + rule.weight_decay * parameter
    return parameter - learning_rate * change, mu, nu


def _is_rounded(leaf: Leaf) -> bool:
    """Whether its moments are kept in fewer bits."""
    return isinstance(leaf.mu, Quantized) or leaf.mu.dtype != jnp.float32


def adamw_reference(leaf: Leaf, gradient: jax.Array, factors: jax.Array, rule: Rule) -> Leaf:
    """The leaf after a step, even if it does not apply."""
    wide = moments.widen(leaf.mu, "first"), moments.widen(leaf.nu, "second")
    parameter, mu, nu = _step(leaf.parameter, *wide, gradient, [*factors], rule)
    if not _is_rounded(leaf):
        return Leaf(parameter, mu, nu)
    seed = moments.step_seed(factors[4], rule.seed)
    first, second = moments.noise(moments.positions(parameter.shape), seed)
    return Leaf(
        parameter,
        moments.narrow(mu, leaf.mu, first, "first"),
        moments.narrow(nu, leaf.nu, second, "second"),
    )


def adamw_triton(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    rules: Sequence[Rule],
    parts: Sequence[Part | None] = (),
    *,
    interpret: bool = False,
) -> list[Leaf]:
    """The leaves after a step, if it applies; on one device, where donated in place.

    Args:
      parts: which parts the leaves are, where they are not whole.
    """
    parts = parts or [None] * len(leaves)
    out: dict[int, Leaf] = {}
    for group in _groups([leaf.parameter.size for leaf in leaves]):
        work = [(leaves[i], gradients[i], rules[i], parts[i]) for i in group]
        out |= dict(zip(group, _launch(work, factors, interpret), strict=True))
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


class _Layout(NamedTuple):
    """What the kernel has to know of an array."""

    rule: Rule
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None  # of what it is a part, where that counts
    num_state: int  # arrays that are changed: parameter and moments, two more with scales
    is_rounded: bool
    end: int  # of its blocks, in the launch

    @property
    def num_inputs(self) -> int:
        return self.num_state + (1 if self.whole is None else 2)

    @property
    def width(self) -> int:
        """Numbers in a row of its arrays, as the kernel has them: a block that shares a scale."""
        return moments.BLOCK if self.num_state > 3 else 1


def _launch(
    work: Sequence[tuple[Leaf, jax.Array, Rule, Part | None]], factors: jax.Array, interpret: bool
) -> list[Leaf]:
    if not work[0][1].size:
        return [leaf for leaf, *_ in work]
    layouts: list[_Layout] = []
    inputs, outs, aliases, end = [factors], list[jax.Array](), dict[int, int](), 0
    for leaf, gradient, rule, part in work:
        state, is_rounded = jax.tree.leaves(leaf), _is_rounded(leaf)
        part = part if is_rounded else None  # noise is all that goes by it
        whole = None if part is None else part.whole
        end += pl.cdiv(gradient.size, BLOCK)
        layout = _Layout(rule, gradient.shape, whole, len(state), is_rounded, end)
        in_rows = (-1,) if layout.width == 1 else (-1, layout.width)
        flat = [x.reshape(in_rows if x.shape == gradient.shape else -1) for x in (*state, gradient)]
        aliases |= {len(inputs) + i: len(outs) + i for i in range(len(state))}
        inputs += [*flat, *([] if part is None else [part.start])]
        outs += flat[:-1]
        layouts.append(layout)
    results = iter(
        pl.pallas_call(
            functools.partial(_kernel, layouts=tuple(layouts)),
            grid=(end,),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
            input_output_aliases=aliases,
            interpret=interpret,
            name="adamw",
            compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        )(*inputs)
    )
    return [jax.tree.map(lambda x: next(results).reshape(x.shape), leaf) for leaf, *_ in work]


def _kernel(factors_ref: Ref, *refs: Ref, layouts: tuple[_Layout, ...]) -> None:
    ins = iter(refs)
    outs = iter(refs[sum(layout.num_inputs for layout in layouts) :])
    number = pl.program_id(0)
    start = 0
    for layout in layouts:
        own = list(itertools.islice(ins, layout.num_inputs))
        new = list(itertools.islice(outs, layout.num_state))
        update = functools.partial(_block, factors_ref, own, new, layout)
        if len(layouts) == 1:
            update(number)
        else:
            block = number - start
            is_here = (number >= start) & (number < layout.end)
            pl.when(is_here)(functools.partial(update, block))
        start = layout.end


def _block(
    factors_ref: Ref, ins: Sequence[Ref], outs: Sequence[Ref], layout: _Layout, block: jax.Array
) -> None:
    size, width = math.prod(layout.shape), layout.width
    rows = BLOCK // width
    here = pl.ds(block * rows, rows)
    exists = None
    if size % BLOCK:
        exists = block * rows + jax.lax.iota(jnp.int32, rows) < size // width

    def mask(ref: Ref) -> jax.Array | None:
        if exists is None or len(ref.shape) == 1:
            return exists
        return jnp.broadcast_to(exists[:, None], (rows, width))

    state = ins[: layout.num_state]
    parameter, *kept, gradient = (
        pltriton.load(ref.at[here], mask=mask(ref)) for ref in (*state, ins[layout.num_state])
    )
    old = [parameter, *kept]
    factors = [factors_ref[i] for i in range(6)]
    if width > 1:
        mu = moments.decode(kept[0], kept[1], "first")
        nu = moments.decode(kept[2], kept[3], "second")
    else:
        mu, nu = (x.astype(jnp.float32) for x in kept)
    parameter, mu, nu = _step(parameter, mu, nu, gradient, factors, layout.rule)
    new = [parameter, mu, nu]
    if layout.is_rounded:
        number = block * BLOCK + _count(rows, width)
        if layout.whole is None:
            position = number.astype(jnp.uint32)
        else:
            first = [ins[-1][i] for i in range(len(layout.shape))]
            position = moments.positions_in_whole(number, layout.shape, layout.whole, first)
        bits = moments.noise(position, moments.step_seed(factors[4], layout.rule.seed))
        if width > 1:
            new[1:] = [
                *moments.encode(mu, bits[0], "first"),
                *moments.encode(nu, bits[1], "second"),
            ]
        else:
            new[1:] = [moments.round_to_bfloat16(x, b) for x, b in zip((mu, nu), bits, strict=True)]
    for ref, value, before in zip(outs, new, old, strict=True):
        value = jnp.where(factors[5] > 0, value, before)
        pltriton.store(ref.at[here], value, mask=mask(ref))


def _count(rows: int, width: int) -> jax.Array:
    """0, 1, ... along rows of so many numbers; of one, without a dim for them."""
    if width == 1:
        return jax.lax.iota(jnp.int32, rows)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (rows, width), dim) for dim in (0, 1))
    return row * width + column
