"""The parts that Hopper kernels of three warpgroups share, through Pallas's Mosaic GPU backend.

A block of threads has three warpgroups. One copies tiles from memory, ahead of the others by as
many as there are slots; two hold 64 rows each and multiply on the tensor cores as soon as a tile
has arrived. A slot is copied over once both have said that they are done with it. All three walk
the same tiles, so nobody waits for a tile that does not come.

Copies clip what lies behind the end of an array, and read zeros there. Until JAX 0.12 Mosaic
differs in `load` and in how a reference is turned.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COMPUTING = 2  # warpgroups; one more copies
ROWS = 64  # of each: the rows of a product
SWIZZLED = 128  # bytes of a row of a tile that lie together
# Registers of a thread: the copying warpgroup needs few. A block starts with 168 for each of its
# three warpgroups, the most that 64 Ki allow. More in all would never be granted, and the block
# would hang.
REGISTERS_COMPUTING, REGISTERS_COPYING = 240, 24
REGISTERS = (2**16 // ((COMPUTING + 1) * 128)) // 8 * 8
assert COMPUTING * REGISTERS_COMPUTING + REGISTERS_COPYING <= (COMPUTING + 1) * REGISTERS

# Of an H100 and an H200.
MULTIPROCESSORS = 132
L2_BYTES = 50 * 2**20
# Blocks that share what they read from memory beyond L2, with which memory is not the limit: those
# that hold sums of their own, and those that add to numbers of all blocks of the same head.
ENOUGH_READERS, ENOUGH_ADDING = 8, 2

# The simulator of JAX 0.11 wants all threads to have waited for a barrier each time it is complete.
CAN_SIMULATE = jax.__version_info__ >= (0, 12)

Ref = Any  # an array in the GPU's memory, or in that of a block
Shared = dict[str, Ref]  # what a block has, by name

ACROSS = plgpu.Layout.WGMMA  # how registers hold a tile of numbers,
OF_ROWS, OF_COLUMNS = ACROSS.reduce(1), ACROSS.reduce(0)  # and one number for each of its rows


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles that one kernel streams."""

    streamed: int  # keys, or queries, in a tile; a multiple of 64
    slots: int  # tiles that are there at a time


@dataclass(frozen=True, kw_only=True)
class KernelTiles:
    """The tiles of each kernel."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles
    joint: Tiles  # of the kernel for all gradients


# ---- around a kernel -----------------------------------------------------------------------------


def padded(x: jax.Array, size: int, dim: int = 1) -> jax.Array:
    """Pads a dim with zeros to a multiple of `size`."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % size)
    return jnp.pad(x, widths)


def copied(x: jax.Array, size: int, interpret: bool) -> jax.Array:
    """Pads positions for copies of `size` at a time.

    Copies come in groups of eight; simulated ones do not clip.
    """
    return padded(x, size if interpret else 8)


def tiles(*shape: int, dtype: Any) -> Any:
    """Memory of a block for a tile, or for several, as products want them."""
    untyped: Any = plgpu  # JAX 0.12 declares these two as if they were abstract
    across = SWIZZLED // jnp.dtype(dtype).itemsize
    transforms = (untyped.TilingTransform((8, across)), untyped.SwizzleTransform(SWIZZLED))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def numbers(*shape: int) -> Any:
    """Memory of a block for float32 numbers."""
    return plgpu.SMEM(shape, jnp.float32)


def held(names: Sequence[str], like: jax.Array, *, by_all: bool = False) -> Shared:
    """Memory for a tile of some arrays, kept by each computing warpgroup or by all together."""
    found: Shared = {}
    for name in names:
        shape = ROWS, like.shape[-1]
        found[name] = tiles(*(shape if by_all else (COMPUTING, *shape)), dtype=like.dtype)
        found[f"{name}_came"] = plgpu.Barrier(num_barriers=1 if by_all else COMPUTING)
    return found


def meeting() -> Shared:
    """The barrier of `meet`."""
    return {"meeting": plgpu.Barrier(num_arrivals=COMPUTING)}


def slots(memory: Mapping[str, Any], count: int) -> Shared:
    """Memory for `count` tiles of each array that come and go, and their barriers."""
    found: Shared = {}
    for name in memory:
        found[name] = memory[name]
        found[f"{name}_came"] = plgpu.Barrier(num_barriers=count)
        found[f"{name}_done"] = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=count)
    return found


def rows_follow(
    grid: tuple[int, int, int], readers: int, streamed_bytes: int, enough: int = ENOUGH_READERS
) -> bool:
    """Whether the rows of one head come one after the other, and not all heads of one row.

    Blocks run in the order of the grid, as many at once as there are multiprocessors. Of one row,
    all have about equally much to do, and the longest rows come first. But then the blocks at once
    read the keys of all heads and sequences. Where these do not fit into L2, and each is read by
    few blocks, the GPU's memory is too slow. The rows of one head read the same keys.

    Args:
      grid: rows of tiles, heads and sequences.
      readers: heads of the grid that read the same.
      streamed_bytes: what the blocks of a head go through, as keys and values.
      enough: readers of each at once with which memory is fast enough.
    """
    _, num_heads, num_sequences = grid
    at_once = min(MULTIPROCESSORS, num_heads * num_sequences)
    heads = min(num_heads, -(-at_once // num_sequences))
    streams = min(num_sequences, at_once) * -(-heads // readers)
    fits = streams * streamed_bytes <= L2_BYTES
    return not fits and enough * streams > MULTIPROCESSORS


def launch(
    kernel: Callable,
    told: Mapping[str, Any],
    outs: Sequence[tuple[Sequence[int], Any]],
    shared: Shared,
    grid: tuple[int, int, int],
    interpret: bool,
    *,
    rows_follow: bool,
) -> Callable:
    """Makes a function that runs the kernel for each row of tiles, head and sequence.

    Args:
      kernel: takes the arrays, what it is told, and what is shared.
      outs: shapes and dtypes.
      rows_follow: whether the rows of one head come one after the other (`rows_follow`).
    """
    order = -1 if rows_follow else 1  # the last of a grid comes first

    def body(*refs: Ref) -> None:
        told_all = functools.partial(kernel, *refs, **told)
        pl.run_scoped(told_all, collective_axes="warpgroup", **shared)

    # Not `plgpu.kernel`, which until JAX 0.11 takes no array that is changed in place.
    return pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*out) for out in outs],
        mesh=plgpu.Mesh(
            grid=grid[::order],
            grid_names=("row", "head", "sequence")[::order],
            num_threads=COMPUTING + 1,
            thread_name="warpgroup",
        ),
        name=kernel.__name__,
        interpret=simulated() if interpret else False,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def simulated() -> Any:
    """Threads, copies and barriers as a GPU has them; races are errors."""
    if not CAN_SIMULATE:
        raise NotImplementedError("this JAX cannot simulate a GPU kernel: 0.12 or newer can")
    untyped: Any = plgpu  # before JAX 0.11 there is none
    return untyped.InterpretGPUParams(detect_races=True)


# ---- inside a kernel -----------------------------------------------------------------------------


def place() -> tuple[jax.Array, jax.Array, jax.Array]:
    """The place of a block in the grid: row, head and sequence."""
    return lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("sequence")


def run_of(run_ref: Ref, sequence: jax.Array, row: jax.Array) -> tuple[jax.Array, ...]:
    """The run of a row; without segments all sequences have the same."""
    at = (sequence if run_ref.shape[0] > 1 else 0, row)
    return tuple(run_ref[(*at, n)] for n in range(4))


def divide(
    compute: Callable[[jax.Array], None], copy: Callable[[], None], *, interpret: bool
) -> None:
    """Two warpgroups compute, by their numbers, while one copies."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTING)
    def _() -> None:
        if not interpret:
            plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == COMPUTING)
    def _() -> None:
        if not interpret:
            plgpu.set_max_registers(REGISTERS_COPYING, action="decrease")
        copy()


def copy_tiles(
    sources: Mapping[str, Callable[[jax.Array], Ref]], num_tiles: jax.Array, shared: Shared
) -> None:
    """Every tile of some arrays that have slots, in turn; `sources` say where tile n is."""

    def copy(n: jax.Array, _: None) -> None:
        for name, source in sources.items():
            slot = slot_of(name, n, shared)
            wait = functools.partial(plgpu.barrier_wait, shared[f"{name}_done"].at[slot])
            pl.when(n >= shared[name].shape[0])(wait)
            came = shared[f"{name}_came"].at[slot]
            plgpu.copy_gmem_to_smem(source(n), shared[name].at[slot], came)

    lax.fori_loop(jnp.int32(0), num_tiles, copy, None)


def fetch(sources: Mapping[str, Ref], warpgroup: jax.Array | None, shared: Shared) -> None:
    """Copies tiles that a warpgroup, or all together, keep; `wait_for_held` waits for them."""
    for name, source in sources.items():
        here, came = _held(name, warpgroup, shared)
        plgpu.copy_gmem_to_smem(source, here, came)


def wait_for_held(
    names: Sequence[str], warpgroup: jax.Array | None, shared: Shared
) -> tuple[Ref, ...]:
    for name in names:
        plgpu.barrier_wait(_held(name, warpgroup, shared)[1])
    return tuple(_held(name, warpgroup, shared)[0] for name in names)


def _held(name: str, warpgroup: jax.Array | None, shared: Shared) -> tuple[Ref, Ref]:
    """The memory of a kept tile, and the barrier of its copy."""
    here, came = shared[name], shared[f"{name}_came"]
    return (here, came.at[0]) if warpgroup is None else (here.at[warpgroup], came.at[warpgroup])


def store(*results: tuple[jax.Array, Ref, Ref]) -> None:
    """Stores each value at its place in the GPU's memory, through memory of the block."""
    put(*((value, here) for value, here, _ in results))
    send(*((here, target) for _, here, target in results))


def put(*values: tuple[jax.Array, Ref]) -> None:
    """Stores values in the block's memory, to be sent or multiplied."""
    for value, here in values:
        here[...] = value.astype(here.dtype)
    plgpu.commit_smem()


def send(*copies: tuple[Ref, Ref]) -> None:
    """Copies from the block's memory to the GPU's, and waits until all is there."""
    for here, target in copies:
        plgpu.copy_smem_to_gmem(here, target)
    plgpu.wait_smem_to_gmem(0)


def slot_of(name: str, n: jax.Array, shared: Shared) -> jax.Array:
    """The slot of tile n of an array."""
    return lax.rem(n, jnp.int32(shared[name].shape[0]))


def wait_for(name: str, n: jax.Array, shared: Shared) -> Ref:
    """Returns tile n of an array once it has come."""
    slot = slot_of(name, n, shared)
    plgpu.barrier_wait(shared[f"{name}_came"].at[slot])
    return shared[name].at[slot]


def is_done(name: str, n: jax.Array, shared: Shared) -> None:
    """Notes that this warpgroup needs tile n no more."""
    plgpu.barrier_arrive(shared[f"{name}_done"].at[slot_of(name, n, shared)])


def meet(shared: Shared) -> None:
    """Makes both computing warpgroups wait for each other."""
    plgpu.barrier_arrive(shared["meeting"])
    plgpu.barrier_wait(shared["meeting"])


def through(run: tuple[jax.Array, ...], step: Callable, carry: Any) -> Any:
    """Runs `carry = step(masked, tile, carry)` for all tiles of a run, in order."""
    first, first_whole, end_whole, end = run
    carry = lax.fori_loop(first, first_whole, functools.partial(step, True), carry)
    carry = lax.fori_loop(first_whole, end_whole, functools.partial(step, False), carry)
    return lax.fori_loop(end_whole, end, functools.partial(step, True), carry)


Arrays = tuple[jax.Array, ...]
# `products(n, num_later=...)` waits for product n, after which so many have been asked for.
Products = Callable[..., jax.Array]
# `add(n, a, b)` has a @ b added to sum n: a is in the block's memory, or in registers and rounded
# to the dtype of b.
Add = Callable[[int, Any, Ref], None]


def load(ref: Ref, layout: Any) -> jax.Array:
    function: Any = plgpu.load
    index = inspect.signature(function).parameters.get("idx")
    is_needed = index is not None and index.default is inspect.Parameter.empty  # until JAX 0.10
    return function(ref, *([()] if is_needed else []), layout=layout, optimized=False)


def full(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number for each row of a tile, in all columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def by_column(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


def positions(dim: int, start: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The positions of the rows (0) or the columns (1) of a tile."""
    return start + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=ACROSS)


def product(a: Ref, b: Ref, meanwhile: Callable[[], None]) -> jax.Array:
    """a @ b^T, in float32; `meanwhile` is called while the tensor cores do it."""

    def multiply(total: Ref) -> jax.Array:
        plgpu.wgmma(total, a, turned(b))
        meanwhile()
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def turned(ref: Ref) -> Ref:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def sum_of_products(*factors: tuple[Ref, Ref]) -> jax.Array:
    """The sum of a @ b over all pairs."""

    def multiply(total: Ref) -> jax.Array:
        for a, b in factors:
            plgpu.wgmma(total, a, b)
        return total[...]

    (a, b), *_ = factors
    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def multiply(
    body: Callable[[Products, Add], Arrays],
    factors: Sequence[tuple[Ref, Ref]],
    sums: Arrays,
    state: Arrays,
    warpgroup: Any,
    shared: Shared,
) -> tuple[Arrays, Arrays]:
    """The sums, after what `body` has added, and what it returned.

    Args:
      body: what to do with products, and what to add; returns the new state.
      factors: a and b of each product a @ b^T, in their order.
      state: arrays like those that `body` will return.
    """

    def with_products(add: Add, end: Callable[[Arrays], Any]) -> Any:
        def run(*found: Ref) -> Any:
            for product, (a, b) in zip(found, factors, strict=True):
                plgpu.wgmma(product, a, turned(b))
            load = plgpu.wgmma_accumulator_load
            return end(body(lambda n, num_later: load(found[n], wait_n=num_later), add))

        found = [plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in factors]
        return pl.run_scoped(run, *found) if found else run()

    if "factors" not in shared:

        def run(refs: tuple[tuple[Ref, ...], tuple[Ref, ...]]) -> None:
            totals, states = refs

            def add(n: int, a: Any, b: Ref) -> None:
                plgpu.wgmma(totals[n], a.astype(b.dtype) if isinstance(a, jax.Array) else a, b)

            def end(new: Arrays) -> None:
                for ref, value in zip(states, new, strict=True):
                    ref[...] = value

            with_products(add, end)

        return pl.run_state(run)((tuple(plgpu.ACC.init(x) for x in sums), state))

    totals = list(sums)

    def add_simulated(n: int, a: Any, b: Ref) -> None:
        """Both factors are in the block's memory, and a sum starts from zero."""
        if isinstance(a, jax.Array):
            here = shared["factors"].at[warpgroup]
            put((a.astype(b.dtype), here))
            a = here
        totals[n] += sum_of_products((a, b))

    return with_products(add_simulated, lambda new: (tuple(totals), new))


def add_to(target: Ref, value: jax.Array, here: Ref, *, interpret: bool) -> None:
    """Adds to numbers in the GPU's memory, to which other blocks add, too."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the memory of the last copy is free
    put((value, here))
    plgpu.copy_smem_to_gmem(here, target, reduction_op=None if interpret else "add")
