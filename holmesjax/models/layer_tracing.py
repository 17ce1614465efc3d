"""Costs of a layer, read from the programs that JAX traces of it. Starts no device.

A layer is traced on shapes alone: its forward, its forward with the residuals of `jax.vjp`, and its
backward. The costs have the form of a `layer_specs.kind.Kind`, in numbers of the compute dtype per
token. Programs are traced in bfloat16, so an array that a layer keeps in float32 counts twice.

products     matrix products with parameters, and convolutions
mixes        matrix products of activations with each other, as attention has
moved        what is read and written between products, if XLA fuses what is elementwise: an operand
             of a product, a sum and a result are written, and what they are made of is read
kept         residuals of `jax.vjp`, by what each policy of checkpointing leaves of them
needed       the most that the backward holds at a time besides residuals and gradients of weights
collectives  all-reduces of `tensor`: of the result of a product whose depth is cut, and of the
             gradient of what a product reads whose columns are cut

A loop without a fixed length counts once, and of the branches of a condition the first counts.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal as Either

import jax
from jax.extend.core import Jaxpr, Literal

from holmesjax.layer_specs.kind import (
    TENSOR_DIMS,
    ActivationProduct,
    Kept,
    LayerCollective,
    PerToken,
    Use,
    WeightProduct,
)
from holmesjax.models.activation_checkpointing import POLICIES, checkpointed
from holmesjax.models.jaxprs import called
from holmesjax.models.layer import Params

Cut = Either["depth", "columns", "none"]
TRACED = "bfloat16"  # the compute dtype of traced programs
NUMBER_BYTES = 2  # of it
REDUCES = ("reduce_", "arg", "cum", "sort", "top_k", "gather", "scatter", "dynamic")
PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The statements of a `Kind` that programs give."""

    uses: tuple[Use, ...]  # of each parameter, in the order of the tree
    products: tuple[WeightProduct, ...]
    mixes: tuple[ActivationProduct, ...]
    moved: PerToken
    kept: Kept
    needed: PerToken
    collectives: tuple[LayerCollective, ...]


@dataclass(eq=False)
class _Value:
    """The facts that are known of one array of a program."""

    shape: tuple[int, ...]
    numbers: float  # of the compute dtype
    # The parameters that it is made of; None: it depends on the inputs of the layer too.
    weights: frozenset[int] | None = None
    cuts: tuple[bool, ...] = ()  # of what is made of parameters: the dims that `tensor` cuts
    is_cut: bool = False  # of activations: whether `tensor` shares it out
    made_of: frozenset["_Value"] = frozenset()  # arrays in memory; empty: it is one itself

    @property
    def sources(self) -> frozenset["_Value"]:
        return self.made_of or frozenset([self])


@dataclass
class _Counts:
    """The counts of a walk through a program, over all tokens."""

    num_tokens: int  # of all sequences
    products: Counter[WeightProduct] = field(default_factory=Counter)
    mixes: Counter[ActivationProduct] = field(default_factory=Counter)
    moved: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    reads: set[frozenset[_Value]] = field(default_factory=set)  # what sums have read in one pass
    uses: dict[int, set[str]] = field(default_factory=dict)
    summed_forward: list[float] = field(default_factory=list)  # numbers of all-reduces
    summed_backward: dict[_Value, float] = field(default_factory=dict)

    # ---- the walk ------------------------------------------------------------------------------

    def walk(self, jaxpr: Jaxpr, ins: Sequence[_Value], times: int) -> list[_Value]:
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, ins, strict=True))
        known |= {var: _constant(var.aval) for var in jaxpr.constvars}
        read = lambda var: _constant(var.aval) if isinstance(var, Literal) else known[var]
        for equation in jaxpr.eqns:
            own = [read(var) for var in equation.invars]
            known |= zip(equation.outvars, self._equation(equation, own, times), strict=True)
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, equation: Any, ins: list[_Value], times: int) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        if (body := called(equation)) is not None and len(body.invars) == len(ins):
            return self.walk(body, ins, times)
        if name == "scan":
            return self._scan(params, ins, [_value(var.aval) for var in equation.outvars], times)
        if name == "while":
            skipped = params["cond_nconsts"]
            return self.walk(params["body_jaxpr"].jaxpr, ins[skipped:], times)[
                : len(equation.outvars)
            ]
        if name == "cond":
            return self.walk(params["branches"][0].jaxpr, ins[1:], times)
        outs = [_value(var.aval) for var in equation.outvars]
        weights = [value.weights for value in ins if value.weights is not None]
        if len(weights) == len(ins):
            for out in outs:
                out.weights = frozenset().union(*weights)
                out.cuts = _cuts(ins, out.shape, name, params)
            return outs
        self._note_uses(name, ins)
        if name == "dot_general":
            self._product(params, ins, outs[0], times)
        elif name == "conv_general_dilated":
            self._convolution(params, ins, outs[0], times)
        else:
            self._between(name, ins, outs, times)
        return outs

    def _note_uses(self, name: str, ins: list[_Value]) -> None:
        for number, value in enumerate(ins):
            is_rows = name == "gather" and number == 0
            for parameter in value.weights or ():
                self.uses.setdefault(parameter, set()).add("rows" if is_rows else "numbers")

    def _scan(
        self, params: Mapping[str, Any], ins: list[_Value], outs: list[_Value], times: int
    ) -> list[_Value]:
        body, length = params["jaxpr"].jaxpr, params["length"]
        inner = []
        for value, var in zip(ins, body.invars, strict=True):
            part = _value(var.aval)
            if part.shape == value.shape:  # a constant, or carried: each turn has all of it
                part = value
            else:
                part.weights, part.cuts, part.is_cut = value.weights, value.cuts[1:], value.is_cut
            inner.append(part)
        found = self.walk(body, inner, times * length)
        for out, value in zip(outs, found, strict=True):
            out.is_cut, out.weights = value.is_cut, value.weights
            out.cuts = (False,) * len(out.shape)
        return outs

    # ---- products ------------------------------------------------------------------------------

    def _product(
        self, params: Mapping[str, Any], ins: list[_Value], out: _Value, times: int
    ) -> None:
        contracted, batched = params["dimension_numbers"]
        size = lambda own, dims: math.prod(own.shape[i] for i in dims)
        left, right = ins
        free = [
            [i for i in range(len(value.shape)) if i not in (*c, *b)]
            for value, c, b in zip(ins, contracted, batched, strict=True)
        ]
        depth, batch = size(left, contracted[0]), size(left, batched[0])
        if left.weights is not None or right.weights is not None:
            w = 0 if left.weights is not None else 1
            weight, x = ins[w], ins[1 - w]
            is_cut = lambda dims: any(weight.cuts[i] for i in dims)
            rows, columns = size(x, free[1 - w]), size(weight, free[w])
            cut: Cut = "depth" if is_cut(contracted[w]) else "none"
            cut = "columns" if is_cut((*free[w], *batched[w])) else cut
            self._weighted(rows, columns, depth, batch * times, cut, x, out)
            return
        self._write(left, times)
        self._write(right, times)
        out.is_cut = left.is_cut or right.is_cut
        # The sequences are among the products that are done side by side.
        shape = size(left, free[0]), size(right, free[1]), depth
        self.mixes[ActivationProduct(*shape, is_cut=out.is_cut)] += batch * times

    def _convolution(
        self, params: Mapping[str, Any], ins: list[_Value], out: _Value, times: int
    ) -> None:
        x, kernel = ins
        numbers = params["dimension_numbers"]
        columns = kernel.shape[numbers.rhs_spec[0]]
        depth = math.prod(kernel.shape) // columns
        cuts = kernel.cuts if kernel.weights is not None else (False,) * len(kernel.shape)
        cut: Cut = "depth" if cuts[numbers.rhs_spec[1]] else "none"
        cut = "columns" if cuts[numbers.rhs_spec[0]] else cut
        self._weighted(math.prod(out.shape) // columns, columns, depth, times, cut, x, out)

    def _weighted(
        self,
        rows: int,
        columns: int,
        depth: int,
        times: int,
        cut: Cut,
        x: _Value,
        out: _Value,
    ) -> None:
        self._write(x, times)
        self.products[WeightProduct(depth, columns, cut, rows / self.num_tokens)] += times
        out.is_cut = cut == "columns" or (x.is_cut and cut != "depth")
        if cut == "depth":
            self.summed_forward.append(times * out.numbers)
        elif cut == "columns" and not x.is_cut:
            self.summed_backward[x] = times * x.numbers

    # ---- what is between them ------------------------------------------------------------------

    def _between(self, name: str, ins: list[_Value], outs: list[_Value], times: int) -> None:
        own = [x for x in ins if x.weights is None]
        is_cut = any(x.is_cut for x in own)
        if name == "gather" and ins[0].weights and ins[0].cuts[0]:
            self.summed_forward.append(times * outs[0].numbers)
        sources: frozenset[_Value] = frozenset().union(*(x.sources for x in own))
        for out in outs:
            out.is_cut, out.made_of = is_cut, sources
        if name.startswith(REDUCES):
            if sources in self.reads:  # one pass makes several sums
                for out in outs:
                    self._move(out, times)
                    out.made_of = frozenset()
            else:
                for out in outs:
                    self._write(out, times)
                self.reads.add(sources)

    def _write(self, value: _Value, times: int) -> None:
        """Puts an array into memory, if it is not there, and reads what it is made of."""
        if value.made_of:
            for source in value.made_of:
                self._move(source, times)
            self._move(value, times)
            value.made_of = frozenset()

    def _move(self, value: _Value, times: int) -> None:
        self.moved[value.is_cut] += times * value.numbers

    def write_all(self, values: Sequence[_Value]) -> None:
        for value in values:
            self._write(value, 1)


def _value(aval: Any) -> _Value:
    num_bytes = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)
    return _Value(tuple(aval.shape), num_bytes / NUMBER_BYTES)


def _constant(aval: Any) -> _Value:
    found = _value(aval)
    found.weights, found.cuts = frozenset(), (False,) * len(found.shape)
    return found


def _cuts(
    ins: Sequence[_Value], shape: tuple[int, ...], name: str, params: Mapping[str, Any]
) -> tuple[bool, ...]:
    """The dims that `tensor` cuts, of what is made of parameters alone."""
    value = next((operand for operand in ins if any(operand.cuts)), None)
    if value is None:
        return (False,) * len(shape)
    cuts = value.cuts
    if name == "transpose":
        return tuple(cuts[i] for i in params["permutation"])
    if name == "broadcast_in_dim":
        place = params["broadcast_dimensions"]
        return tuple(i in place and cuts[place.index(i)] for i in range(len(shape)))
    if len(shape) == len(value.shape):
        return cuts
    found, done = [], 1  # a dim of the result is cut where a dim that is cut begins inside of it
    edges = [math.prod(value.shape[:i]) for i, cut in enumerate(cuts) if cut]
    for size in shape:
        found.append(any(done <= edge < done * size for edge in edges if size > 1))
        done *= size
    return tuple(found)


# ---- a layer -------------------------------------------------------------------------------------


def trace(
    run: Callable[..., Any],
    params: Params,
    dims: Sequence[str],
    inputs: Sequence[jax.ShapeDtypeStruct],
    *,
    num_tokens: int,
    is_middle: bool,
) -> Traced:
    """The statements about a layer that follow from its programs.

    Args:
      run: the layer, of its parameters and inputs; the first input may be the boundary.
      params: shapes of the parameters, in the compute dtype of traced programs.
      dims: of each parameter.
      inputs: shapes of all sequences' arrays.
      num_tokens: of all sequences.
      is_middle: whether checkpointing may compute it again.
    """
    num_sequences = inputs[0].shape[0]
    names, weights = list(dims), jax.tree.leaves(params)
    per_token = lambda numbers: round(numbers / num_tokens)

    def walk(function: Callable[..., Any]) -> tuple[_Counts, list[_Value], Any]:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
        counts = _Counts(num_tokens)
        ins = [_value(var.aval) for var in closed.jaxpr.invars]
        for number, (value, letters) in enumerate(zip(ins, names, strict=False)):
            value.weights = frozenset([number])
            value.cuts = tuple(letter in TENSOR_DIMS for letter in letters)
        return counts, counts.walk(closed.jaxpr, ins, 1), shapes

    forward, outs, _ = walk(run)
    forward.write_all(outs)
    # A result of which devices have parts is gathered, which counts like a sum.
    forward.summed_forward += [out.numbers for out in outs if out.is_cut and out.shape]
    found = {policy: walk(_with_residuals(run, policy)) for policy in ("none", *POLICIES)}
    held = {policy: _held(values, shapes) for policy, (_, values, shapes) in found.items()}
    of_weights = frozenset().union(
        *(residual.weights for residual in _residuals(*found["none"][1:]) if residual.weights)
    )
    kept = {policy: [per_token(n) for n in numbers] for policy, numbers in held.items()}
    less = lambda a, b: PerToken(*(x - y for x, y in zip(kept[a], kept[b], strict=True)))
    if is_middle:
        stated = Kept(
            input=PerToken(*kept["full"]),
            products=less("dots", "full"),
            between=less("none", "dots"),
        )
    else:
        stated = Kept(input=PerToken(*kept["none"]))
    most = per_token(_most_held(run, params, inputs))
    share = held["none"][1] / max(sum(held["none"]), 1.0)
    moved = PerToken(*(per_token(forward.moved[is_cut]) for is_cut in (False, True)))
    return Traced(
        uses=tuple(_use(forward.uses.get(i, set()), i in of_weights) for i in range(len(weights))),
        products=tuple(
            WeightProduct(product.depth, product.columns, product.cut, product.rows, times)
            for product, times in forward.products.items()
        ),
        mixes=tuple(
            ActivationProduct(mix.rows, mix.columns, mix.depth, times // num_sequences, mix.is_cut)
            for mix, times in forward.mixes.items()
        ),
        moved=moved,
        kept=stated,
        needed=PerToken(round(most * (1 - share)), round(most * share)),
        collectives=_collectives(forward, per_token),
    )


def _use(uses: set[str], is_kept: bool) -> Use:
    if uses == {"rows"}:
        return "looked_up"
    return "multiplied" if is_kept else "added"


def _with_residuals(run: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """The result of a layer, and the arrays that its backward needs."""
    kept = checkpointed(run, policy)

    def both(*args: Any) -> tuple[Any, list[Any]]:
        out, pullback = _pullback(kept, args)
        return out, jax.tree.leaves(pullback)

    return both


def _pullback(run: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Callable[..., Any]]:
    """`jax.vjp` with respect to the parameters and to what has gradients besides."""
    is_smooth = [all(_is_float(leaf) for leaf in jax.tree.leaves(arg)) for arg in args]
    smooth = [
        arg for arg, is_differentiable in zip(args, is_smooth, strict=True) if is_differentiable
    ]

    def function(*own: Any) -> Any:
        rest = iter(own)
        return run(*(next(rest) if s else arg for arg, s in zip(args, is_smooth, strict=True)))

    out, pullback = jax.vjp(function, *smooth)
    return out, pullback


def _is_float(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.floating))


def _residuals(values: list[_Value], shapes: Any) -> list[_Value]:
    """Each array among the residuals once."""
    num_outs = len(jax.tree.leaves(shapes[0]))
    return list(dict.fromkeys(values[num_outs:]))


def _held(values: list[_Value], shapes: Any) -> list[float]:
    """Numbers of the residuals that are not made of parameters: whole, and cut over `tensor`."""
    found = [0.0, 0.0]
    for residual in _residuals(values, shapes):
        if residual.weights is None:
            found[residual.is_cut] += residual.numbers
    return found


def _most_held(run: Callable[..., Any], params: Params, inputs: Sequence[Any]) -> float:
    """The most numbers that the backward has made and still needs, but for what it returns."""
    structures: list[Any] = []

    def forward(*args: Any) -> tuple[Any, list[Any]]:
        out, pullback = _pullback(run, args)
        leaves, structure = jax.tree.flatten(pullback)
        structures.append(structure)
        return out, leaves

    out, leaves = jax.eval_shape(forward, params, *inputs)
    backward = lambda leaves, dy: jax.tree.unflatten(structures[-1], leaves)(dy)
    jaxpr = jax.make_jaxpr(backward)(leaves, out).jaxpr
    return _peak(jaxpr, {weight.shape for weight in jax.tree.leaves(params)})


def _peak(jaxpr: Jaxpr, without: set[tuple[int, ...]]) -> float:
    """The most numbers of arrays in memory that are made here and are still read later.

    Results and operands of products and of sums are in memory; all else fuses with what reads it.
    Arrays with the shapes `without` do not count: they are gradients of parameters.
    """
    steps = list(_inlined(jaxpr, {}))
    counts = lambda var: var.aval.shape not in without
    in_memory, made, last = set[Any](), dict[Any, int](), dict[Any, int]()
    for i, (name, ins, outs) in enumerate(steps):
        if name in PRODUCTS or name.startswith(REDUCES):
            in_memory |= {*ins, *outs}
        made |= dict.fromkeys(outs, i)
        last |= dict.fromkeys(ins, i)
    changes = [0.0] * (len(steps) + 1)
    for var in in_memory & made.keys() & last.keys():
        if counts(var):
            changes[made[var]] += _value(var.aval).numbers
            changes[last[var] + 1] -= _value(var.aval).numbers
    return max(itertools.accumulate(changes), default=0.0)


def _inlined(jaxpr: Jaxpr, names: dict[Any, Any]) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """The equations of a program and of what it calls: primitives, inputs and outputs."""
    of = lambda variables: [
        names.get(var, var) for var in variables if not isinstance(var, Literal)
    ]
    for equation in jaxpr.eqns:
        body = called(equation)
        if body is None or len(body.invars) != len(equation.invars):
            yield equation.primitive.name, of(equation.invars), of(equation.outvars)
            continue
        own = {
            inner: names.get(var, var)
            for inner, var in zip(body.invars, equation.invars, strict=True)
            if not isinstance(var, Literal)
        }
        yield from _inlined(body, own)
        made = zip(equation.outvars, body.outvars, strict=True)
        names |= {out: own.get(var, var) for out, var in made if not isinstance(var, Literal)}


def _collectives(counts: _Counts, per_token: Callable[[float], int]) -> tuple[LayerCollective, ...]:
    found: dict[int, list[int]] = {}
    for numbers in counts.summed_forward:
        found.setdefault(per_token(numbers), [0, 0])[0] += 1
    for numbers in counts.summed_backward.values():
        found.setdefault(per_token(numbers), [0, 0])[1] += 1
    return tuple(
        LayerCollective(axis="tensor", numbers=numbers, forward=forward, backward=back)
        for numbers, (forward, back) in found.items()
        if numbers
    )
