"""AdamW in one pass, as a kernel for Hopper GPUs, through Pallas's Mosaic GPU backend.

A tile is 32 runs of 64 numbers: the runs that share a scale where moments are int8. A block of one
warpgroup copies a tile of a parameter, its gradient and its moments into shared memory, computes
`adamw.formula`, and copies all but the gradient back to where it came from. So a number is read
once and written once, and a step that does not apply moves nothing.

    many arrays   a launch takes up to 4 parameters; a block finds its own by its number
    turned        a gradient that lies with its dims exchanged is copied by tiles, and turned as
                  threads read them; also one of several matrices, and of dims that join to a matrix

Operations are those of the reference, and each rounds by itself. Mosaic lets compilers join a
product and a sum into one instruction, which rounds once, and divides with `div.full`, which is off
by up to two units (on an H200, one byte in sixty differed). So products, quotients and square roots
are PTX instructions that round to the nearest, and that nothing may join. The bits are those of the
reference, operation by operation; `adamw_check` tells whether they are on a GPU. XLA, which fuses,
may differ from both in the last bit.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import moments
from kernels.adamw import Hyperparameters, Leaf, Turn, formula
from kernels.attention.warpgroups import load, simulated, turned
from kernels.moments import BLOCK, Kept, Quantized

ROWS = 32  # runs of a tile: then each of 128 threads has 16 numbers
COPIED_BYTES, SCALE_BYTES = 16, 4  # the unit of copies of bytes, and a scale
MOST_LEAVES = 4  # of a launch, each with up to six arrays: compiling 32 takes minutes
FORMATS: tuple[Kept, ...] = ("float32", "bfloat16", "int8")
GRADIENTS = ("float32", "bfloat16")
PARAMETERS = GRADIENTS

# A warp has two runs, and a thread four numbers that lie together: copies between registers and
# shared memory have no conflicts, and the maximum of a run is found inside a half of a warp.
TILE = plgpu.Layout.TILED(
    fragmented_array.Tiling(((8, BLOCK), (2, BLOCK), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# A gradient that is turned has no numbers that lie together in its other dim.
TURNED = plgpu.Layout.TILED(
    fragmented_array.Tiling(((8, BLOCK), (2, 16), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

# The arrays of a parameter, in the order in which the kernel takes them.
NAMES = ("gradient", "parameter", "mu", "nu", "mu_scales", "nu_scales")
MOMENTS: dict[str, moments.Which] = {"mu": "first", "nu": "second"}

Ref = Any  # an array in the GPU's memory, or in that of a block


class PartPlace(NamedTuple):
    """The place of a device's part of an array in the whole array."""

    shape: tuple[int, ...]  # of the whole
    starts: tuple[jax.Array | int, ...]  # of the part, in each dim


class _Told(NamedTuple):
    """The facts that all parameters of a launch share."""

    kept: str
    gradient: str
    parameter: str
    h: Hyperparameters  # without seeds, rate and weight decay
    groups: tuple[tuple[int, int], ...]  # `_groups`
    across: int | None  # runs in a row of a parameter whose gradient is turned
    down: int | None  # rows of each matrix, where there are several

    @property
    def is_turned(self) -> bool:
        return self.across is not None

    @property
    def layout(self) -> Any:
        """How the registers of threads hold a tile."""
        return TURNED if self.is_turned else TILE


class _Work(NamedTuple):
    """One parameter of a launch."""

    leaf: Leaf
    gradient: jax.Array  # in the order in which it lies (`Turn.of`)
    h: Hyperparameters
    offset: jax.Array | int  # the position of the part's first number in the whole array


def unsupported(leaf: Leaf, gradient: Any, place: PartPlace | None = None) -> str | None:
    """Why the kernel cannot update these arrays, and which it can; None if it can.

    Args:
      leaf: a device's part of a parameter and its moments, or their shapes and dtypes.
      gradient: likewise.
      place: in the whole array; None: it is whole.
    """
    size = math.prod(leaf.parameter.shape)
    if not size or size % BLOCK:
        return f"arrays of {size} numbers: supported are multiples of {BLOCK}"
    if str(leaf.parameter.dtype) not in PARAMETERS:
        return f"parameters in {leaf.parameter.dtype}: supported are {', '.join(PARAMETERS)}"
    if str(gradient.dtype) not in GRADIENTS:
        return f"gradients in {gradient.dtype}: supported are {', '.join(GRADIENTS)}"
    if _format(leaf.mu) != _format(leaf.nu) or _format(leaf.mu) not in FORMATS:
        found = f"moments in {_format(leaf.mu)} and {_format(leaf.nu)}"
        return f"{found}: supported is one of {', '.join(FORMATS)}"
    (inner, _), *others = reversed(_groups(leaf.parameter.shape, place))
    if others and inner % BLOCK:
        return f"parts of an array with rows of {inner} numbers: supported are multiples of {BLOCK}"
    if isinstance(leaf.mu, Quantized) and leaf.mu.scales.shape != (
        *leaf.parameter.shape[:-1],
        leaf.parameter.shape[-1] // BLOCK,
    ):
        return "blocks that several devices share: supported are whole ones"
    return None


def can_turn(leaf: Leaf, turn: Turn) -> bool:
    """Whether the kernel can read a gradient that lies so: its matrices have whole tiles."""
    _, rows, columns = turn.sizes(leaf.parameter.shape)
    return rows % ROWS == 0 and columns % BLOCK == 0


def adamw_pallas(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    hyperparameters: Sequence[Hyperparameters],
    *,
    places: Sequence[PartPlace | None] | None = None,
    turns: Sequence[Turn | None] | None = None,
    interpret: bool = False,
) -> list[Leaf]:
    """Parameters and moments after a step, if it applies; in place where they are donated.

    Args:
      leaves: a device's parts of parameters and their moments.
      gradients: of the shapes of the parameters, or as `turns` says.
      factors: those of the step (`adamw.factors`).
      hyperparameters: of each parameter.
      places: of each part in its whole array; None: all are whole.
      turns: of each parameter in which order its gradient is given (`Turn.of`); None: in that of
        the parameter.
      interpret: runs the kernel without a GPU, slowly, with simulated threads; from JAX 0.12 on.

    Raises:
      ValueError: `unsupported` refuses an array.
    """
    places = places or [None] * len(leaves)
    turns = turns or [None] * len(leaves)
    alike: dict[_Told, list[int]] = {}
    works = []
    given = zip(leaves, gradients, hyperparameters, places, turns, strict=True)
    for number, (leaf, gradient, h, place, turn) in enumerate(given):
        if reason := unsupported(leaf, gradient, place):
            raise ValueError(f"adamw_pallas cannot do {reason}")
        shape = leaf.parameter.shape
        if turn and not can_turn(leaf, turn):
            raise ValueError(f"adamw_pallas cannot turn the gradient of {shape}")
        stack, rows, columns = turn.sizes(shape) if turn else (1, 1, 1)
        told = _Told(
            _format(leaf.mu),
            str(gradient.dtype),
            str(leaf.parameter.dtype),
            h._replace(seed=0, rate=1.0, rounding=0, weight_decay=0.0),
            _groups(shape, place) if place else (),
            columns // BLOCK if turn else None,
            rows if stack > 1 else None,
        )
        alike.setdefault(told, []).append(number)
        works.append(_Work(leaf, gradient, h, _offset(place) if place else 0))
    done: dict[int, Leaf] = {}
    for told, numbers in alike.items():
        # Of one shape side by side: launches that are equal are compiled once.
        numbers.sort(key=lambda n: leaves[n].parameter.shape)
        for first in range(0, len(numbers), MOST_LEAVES):
            own = numbers[first : first + MOST_LEAVES]
            found = _launch(told, [works[n] for n in own], factors, interpret)
            done |= dict(zip(own, found, strict=True))
    return [done[number] for number in range(len(works))]


def _format(moment: Any) -> str:
    return "int8" if isinstance(moment, Quantized) else str(moment.dtype)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _groups(shape: Sequence[int], place: PartPlace | None) -> tuple[tuple[int, int], ...]:
    """Sizes of a part, and strides in the whole array, of dims; those not cut join the one before.

    >>> _groups((2, 8, 64), None), _groups((2, 4, 64), PartPlace((2, 8, 64), (0, 4, 0)))
    (((1024, 1),), ((2, 512), (256, 1)))
    """
    whole = place.shape if place else shape
    found: list[tuple[int, int]] = []
    for size, of_whole, stride in zip(shape, whole, _strides(whole), strict=True):
        if found and size == of_whole:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return tuple(found) or ((1, 1),)


def _offset(place: PartPlace) -> jax.Array | int:
    pairs = zip(place.starts, _strides(place.shape), strict=True)
    return sum(jnp.asarray(start).astype(jnp.uint32) * np.uint32(n % 2**32) for start, n in pairs)


# ---- around the kernel ---------------------------------------------------------------------------


def _launch(told: _Told, works: Sequence[_Work], factors: jax.Array, interpret: bool) -> list[Leaf]:
    """Updates some parameters that are alike."""
    views = [_view(told, work.leaf, interpret) for work in works]
    gradients = [_view_of_gradient(told, work, interpret) for work in works]
    num_runs = [work.leaf.parameter.size // BLOCK for work in works]
    num_tiles = [-(-held[0].shape[0] // ROWS) * (held[0].shape[1] // BLOCK) for held in views]
    starts = [sum(num_tiles[:n]) for n in range(len(works))]
    decays = np.asarray([(work.h.rate, work.h.weight_decay) for work in works], np.float32)
    own = jnp.asarray(decays) * jnp.stack([factors[1], jnp.ones((), jnp.float32)])[None]
    step_seed = functools.partial(moments.step_seed, factors[4])
    of_noise = jnp.stack(
        [
            jnp.stack([step_seed(h.seed), jnp.asarray(offset, jnp.uint32), step_seed(h.rounding)])
            for *_, h, offset in works
        ]
    )
    count = len(views[0])

    def run(refs: list[Ref]) -> None:
        def body(factors_ref: Ref, own_ref: Ref, noise_ref: Ref, *given: Ref) -> None:
            held, gradient_refs = given[: count * len(works)], given[count * len(works) :]
            rows = [
                (gradient, *held[count * n : count * (n + 1)])
                for n, gradient in enumerate(gradient_refs)
            ]
            kernel = functools.partial(
                _kernel, told, starts, num_runs, interpret, factors_ref, own_ref, noise_ref, rows
            )
            pl.run_scoped(kernel, **_shared(told))

        # Not `plgpu.kernel`, which until JAX 0.11 takes no array that is changed in place.
        pl.kernel(
            body,
            out_type=(),
            mesh=plgpu.Mesh(grid=(sum(num_tiles),), grid_names=("tile",)),
            name="adamw_kernel",
            interpret=simulated() if interpret else False,
            compiler_params=plgpu.CompilerParams(
                approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
        )(factors, own, of_noise, *refs, *gradients)

    flat = pl.run_state(run)([x for held in views for x in held])
    return [_leaf(work.leaf, flat[count * n : count * (n + 1)]) for n, work in enumerate(works)]


def _view(told: _Told, leaf: Leaf, interpret: bool) -> list[jax.Array]:
    """The arrays of a leaf as the kernel takes them: matrices, and scales behind them.

    Their rows are runs, or those of the matrices where the gradient is turned. Simulated copies do
    not clip, so there the last tile is padded.
    """
    found = [leaf.parameter]
    scales = []
    for moment in (leaf.mu, leaf.nu):
        if isinstance(moment, Quantized):
            scales.append(moment.scales.reshape((-1, told.across) if told.across else (-1,)))
            moment = moment.codes
        found.append(moment)
    width = BLOCK * (told.across or 1)
    found = [x.reshape(-1, width) for x in found] + scales
    return [_padded(x) for x in found] if interpret else found


def _view_of_gradient(told: _Told, work: _Work, interpret: bool) -> jax.Array:
    if told.across:
        return work.gradient.reshape(-1, told.down or work.gradient.size // (BLOCK * told.across))
    runs = work.gradient.reshape(-1, BLOCK)
    return _padded(runs) if interpret else runs


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, -x.shape[0] % ROWS)] + [(0, 0)] * (x.ndim - 1))


def _leaf(like: Leaf, views: Sequence[jax.Array]) -> Leaf:
    """The leaf of views that `_view` has made."""
    arrays = [like.parameter]
    for moment in (like.mu, like.nu):
        arrays.append(moment.codes if isinstance(moment, Quantized) else moment)
    arrays += [moment.scales for moment in (like.mu, like.nu) if isinstance(moment, Quantized)]
    parameter, mu, nu, *scales = (
        x.reshape(-1)[: array.size].reshape(array.shape)
        for x, array in zip(views, arrays, strict=True)
    )
    if not scales:
        return Leaf(parameter, mu, nu)
    return Leaf(parameter, Quantized(mu, scales[0]), Quantized(nu, scales[1]))


def _names(told: _Told) -> tuple[str, ...]:
    return NAMES if told.kept == "int8" else NAMES[:4]


def _shared(told: _Told) -> dict[str, Any]:
    """The memory of a block: a tile of each array, and the barrier at which they have come."""
    dtypes = {"gradient": told.gradient, "parameter": told.parameter}
    dtypes |= dict.fromkeys(MOMENTS, told.kept)
    found: dict[str, Any] = {}
    for name in _names(told):
        lies_across = name == "gradient" and told.is_turned
        shape = (BLOCK, ROWS) if lies_across else (ROWS, BLOCK)
        is_scales = name not in dtypes
        found[name] = plgpu.SMEM(shape[:1] if is_scales else shape, dtypes.get(name, "float32"))
    num_copies = 4 if told.is_turned else len(found)
    return {**found, "came": plgpu.Barrier(num_arrivals=num_copies)}


# ---- the kernel ----------------------------------------------------------------------------------


def _kernel(
    told: _Told,
    starts: Sequence[int],
    num_runs: Sequence[int],
    interpret: bool,
    factors_ref: Ref,
    own_ref: Ref,
    noise_ref: Ref,
    rows: Sequence[Sequence[Ref]],
    *,
    came: Ref,
    **shared: Ref,
) -> None:
    """Updates one tile.

    Args:
      told: what the parameters share.
      starts: the number of the first tile of each parameter.
      num_runs: runs of 64 numbers of each parameter.
      interpret: whether threads are simulated.
      factors_ref: those of the step.
      own_ref: the learning rate and the weight decay of each parameter, float32 [parameters, 2].
      noise_ref: the seed of its moments in the step, the position of the first number, and the
        seed of its own rounding, of each parameter, uint32 [parameters, 3].
      rows: of each parameter the gradient, and the arrays of `_view`.
      came: the barrier of the copies.
      shared: arrays in the shared memory of the block, by name.
    """
    number = lax.axis_index("tile")
    which = sum((number >= start).astype(jnp.int32) for start in starts[1:]) + jnp.int32(0)
    first = sum(jnp.where(which == n, start, 0) for n, start in enumerate(starts))
    tile = number - first

    def own_part(body: Callable[[Sequence[Ref], int], None]) -> None:
        """Calls `body` with the arrays of this block's parameter, and the number of its runs."""
        for n, (refs, count) in enumerate(zip(rows, num_runs, strict=True)):
            pl.when(which == n)(functools.partial(body, refs, count))

    @pl.when(factors_ref[5] > 0)
    def _() -> None:
        own_part(lambda refs, _: _fetch(told, _tiles(told, refs, tile), came, shared))
        plgpu.commit_smem()  # scales that threads have copied
        plgpu.barrier_wait(came)
        numbers = factors_ref[0], own_ref[which, 0], factors_ref[2], factors_ref[3]
        h = told.h._replace(weight_decay=own_ref[which, 1])
        by = moments.Operations(of_blocks=functools.partial(_of_runs, told.layout))
        if not interpret:
            rounded = functools.partial(_rounded, told.layout)
            names = {"times": "mul.rn.f32", "over": "div.rn.f32", "sqrt": "sqrt.rn.f32"}
            by = by._replace(**{name: functools.partial(rounded, x) for name, x in names.items()})
        gradient_ref = shared["gradient"]
        gradient = load(turned(gradient_ref) if told.is_turned else gradient_ref, told.layout)
        parameter = load(shared["parameter"], told.layout).astype(jnp.float32)
        mu, nu = (_widened(told, name, of, by, shared) for name, of in MOMENTS.items())
        parameter, *both = formula(parameter, mu, nu, gradient, numbers, h, by)
        if told.parameter == "bfloat16":
            own_bits, _ = _noise(told, tile, noise_ref[which, 2], noise_ref[which, 1])
            parameter = moments.round_to_bfloat16(parameter, own_bits)
        shared["parameter"][...] = parameter
        bits: Sequence[jax.Array] = both
        if told.kept != "float32":
            bits = _noise(told, tile, noise_ref[which, 0], noise_ref[which, 1])
        for (name, of), x, own_bits in zip(MOMENTS.items(), both, bits, strict=True):
            _narrow(told, name, of, x, own_bits, by, shared)
        plgpu.commit_smem()
        own_part(lambda refs, count: _send(told, refs, count, tile, shared))
        plgpu.wait_smem_to_gmem(0)


def _place(told: _Told, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first row of a tile, and its column of runs, in the arrays of a parameter."""
    if told.across is None:
        return tile * ROWS, jnp.int32(0)
    return lax.div(tile, jnp.int32(told.across)) * ROWS, lax.rem(tile, jnp.int32(told.across))


def _tiles(told: _Told, refs: Sequence[Ref], tile: jax.Array) -> dict[str, Ref]:
    """A tile of each array, in the GPU's memory."""
    row, run = _place(told, tile)
    rows, columns = pl.ds(row, ROWS), pl.ds(run * BLOCK, BLOCK)
    found = {}
    for name, ref in zip(_names(told), refs, strict=True):
        if name == "gradient" and told.is_turned:
            found[name] = ref.at[_across(told, row, run)]
        elif not name.endswith("scales"):
            found[name] = ref.at[rows, columns]
        else:
            found[name] = ref.at[rows, run] if told.is_turned else ref.at[rows]
    return found


def _across(told: _Told, row: jax.Array, run: jax.Array) -> tuple[Any, Any]:
    """The place of a tile in a gradient that is turned: its columns, and its rows in its matrix."""
    first = run * BLOCK
    if told.down is not None:
        assert told.across is not None, "matrices of a stack are turned"
        first += lax.div(row, jnp.int32(told.down)) * (BLOCK * told.across)
        row = lax.rem(row, jnp.int32(told.down))
    return pl.ds(first, BLOCK), pl.ds(row, ROWS)


def _fetch(told: _Told, tiles: dict[str, Ref], came: Ref, shared: dict[str, Ref]) -> None:
    for name, place in tiles.items():
        if _is_copied_by_threads(told, name):
            shared[name][...] = load(place, told.layout.reduce(1))
        else:
            plgpu.copy_gmem_to_smem(place, shared[name], came)


def _send(
    told: _Told, refs: Sequence[Ref], num_runs: int, tile: jax.Array, shared: dict[str, Ref]
) -> None:
    tiles = _tiles(told, refs, tile)
    for name, whole in zip(_names(told), refs, strict=True):
        if _is_copied_by_threads(told, name):
            store(tiles[name], load(shared[name], told.layout.reduce(1)))
        elif name.endswith("scales"):
            _send_scales(shared[name], whole, num_runs, tile * ROWS)
        elif name != "gradient":
            plgpu.copy_smem_to_gmem(shared[name], tiles[name])


def _send_scales(scales: Ref, whole: Ref, num_runs: int, first: jax.Array) -> None:
    """Copies the scales of a tile back, from the run `first` on.

    A copy of what lies together takes 16 bytes at a time, and leaves what is behind the last 16.
    Scales of the last tile are stored one by one if it would leave some of them.
    """
    send = lambda: plgpu.copy_smem_to_gmem(scales, whole.at[pl.ds(first, ROWS)])
    if num_runs * SCALE_BYTES % COPIED_BYTES == 0:
        send()
        return
    is_whole = first + ROWS <= num_runs
    pl.when(is_whole)(send)

    @pl.when(jnp.logical_not(is_whole))
    def _() -> None:
        def send_one(n: jax.Array, carry: None) -> None:
            whole[first + n] = scales[n]

        lax.fori_loop(0, num_runs % ROWS, send_one, None)


def _is_copied_by_threads(told: _Told, name: str) -> bool:
    """Scales of a column of runs do not lie together, as the copies of tiles need it."""
    return told.is_turned and name.endswith("scales")


def _widened(
    told: _Told, name: str, of: moments.Which, by: moments.Operations, shared: dict[str, Ref]
) -> jax.Array:
    """A tile of a moment in float32."""
    found = load(shared[name], told.layout)
    if told.kept != "int8":
        return found.astype(jnp.float32)
    scales = load(shared[f"{name}_scales"], told.layout.reduce(1))
    return moments.decode(found, scales, of, by)


def _narrow(
    told: _Told,
    name: str,
    of: moments.Which,
    x: jax.Array,
    bits: jax.Array,
    by: moments.Operations,
    shared: dict[str, Ref],
) -> None:
    """Puts a tile of a moment into shared memory, as it is kept; float32 needs no `bits`."""
    if told.kept == "bfloat16":
        x = moments.round_to_bfloat16(x, bits)
    elif told.kept == "int8":
        x, shared[f"{name}_scales"][...] = moments.encode(x, bits, of, by)
    shared[name][...] = x


def _noise(
    told: _Told, tile: jax.Array, seed: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The noise of a tile's numbers, by their positions in the whole array, modulo 2^32."""
    index = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, BLOCK), layout=told.layout)
    row, run = _place(told, tile)
    rest = (row + index(0)) * jnp.int32(told.across or 1) + run
    position = offset + index(1).astype(jnp.uint32)
    for size, stride in reversed(told.groups):
        # The last dims of a part have whole runs.
        unit = BLOCK if stride == 1 else 1
        within = lax.rem(rest, jnp.int32(size // unit))
        position += within.astype(jnp.uint32) * np.uint32(stride * unit % 2**32)
        rest = lax.div(rest, jnp.int32(size // unit))
    if not told.groups:
        position += rest.astype(jnp.uint32) * np.uint32(BLOCK)
    return moments.noise(position, seed)


def store(ref: Ref, value: jax.Array) -> None:
    """Stores in the GPU's memory, even a few bytes here and there."""
    function: Any = getattr(plgpu, "store", None)
    if function is None:  # until JAX 0.11
        ref[...] = value
    else:
        function(ref, value, optimized=False)


def _of_runs(layout: Any, x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return plgpu.layout_cast(moments.of_blocks(x, shape), layout)


def _rounded(layout: Any, instruction: str, *args: Any) -> jax.Array:
    """Applies a PTX instruction to each number of tiles; an argument may be one number."""
    shape = args[0].shape
    tiles = [
        x if jnp.shape(x) else plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
        for x in args
    ]
    lifted = fragmented_array.FragmentedArray._lift_fast_instr(instruction)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=layout)
    inline = plgpu.inline_mgpu(arg_types=(layout,) * len(tiles), return_type=result)
    found: jax.Array = inline(lambda _, x, *others: x._pointwise(lifted, *others))(*tiles)
    return found
