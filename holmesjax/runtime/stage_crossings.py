"""The arrays that cross between the chunks of a plan in a step."""

from collections.abc import Callable, Sequence
from functools import partial

from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.layer_specs.kind import Parameter
from holmesjax.layer_specs.model_layers import EMBED
from holmesjax.models.layer import statements
from holmesjax.parallel import sharding
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.program_shapes import boundary_shape, totals_shape
from holmesjax.transport.crossings import Crossing


def crossings(chunk: Chunk) -> tuple[Crossing, ...]:
    """Everything that crosses between the chunks of a plan, as any one of them can tell.

    Chunk v gives "F<v>" forward and "B<v>" back; with tied embeddings, the first and the last chunk
    give each other "table<v>". Stage s gives the next stage "norms to <s>": the squared norms of
    the gradients of stages 0 to s, with their auxiliary values. It gives the stage before "norms
    from <s>": the same of stage s to the last.
    """
    plan, last = chunk.plan, len(chunk.plan.chunks) - 1
    homes = [home for home, _ in plan.chunks]
    boundary = boundary_shape(chunk)
    found = []

    def add(
        name: str,
        source: int,
        target: int,
        shape: tuple[int, ...],
        dtype: str,
        spec: Callable[..., P],
        is_whole: bool = False,
    ) -> None:
        link = f"{plan.stages[source].cluster} -> {plan.stages[target].cluster}"
        specs = [spec(plan.stages[end].mesh) for end in (source, target)]
        found.append(
            Crossing(
                name=name,
                source=source,
                target=target,
                link=link,
                shape=shape,
                dtype=dtype,
                source_spec=sharding.spec_axes(specs[0], len(shape)),
                target_spec=sharding.spec_axes(specs[1], len(shape)),
                is_whole=is_whole,
            )
        )

    for v in range(last):
        for name, a, b in ((f"F{v}", v, v + 1), (f"B{v + 1}", v + 1, v)):
            ends, dtype = (homes[a], homes[b]), str(boundary.dtype)
            add(name, *ends, boundary.shape, dtype, sharding.batch_spec)
    if chunk.model.sums_table and last > 0:
        table = statements(chunk.model)[EMBED]["token_VD"]
        for a, b in ((0, last), (last, 0)):
            ends = homes[a], homes[b]
            add(f"table{a}", *ends, table.shape, "float32", partial(_table_spec, table))
    replicated = lambda sizes: P()
    for s in range(len(plan.stages) - 1):
        for name, a, b in ((below(s), s, s + 1), (above(s + 1), s + 1, s)):
            add(name, a, b, totals_shape(chunk).shape, "float32", replicated, is_whole=True)
    return tuple(found)


def below(s: int) -> str:
    return f"norms to {s}"


def above(s: int) -> str:
    return f"norms from {s}"


def _table_spec(table: Parameter, sizes: sharding.Sizes) -> P:
    return sharding.master_spec(table.dims, table.shape, sizes)


def local_targets(chunks: Sequence[Chunk]) -> dict[str, tuple[NamedSharding, str | None]]:
    """The sharding at its target of each crossing between stages of a process, and its link.

    None for what is not counted.
    """
    meshes = {chunk.plan.chunks[chunk.index][0]: chunk.mesh for chunk in chunks}
    return {
        crossing.name: (
            sharding.from_axes(meshes[crossing.target], crossing.target_spec),
            None if crossing.is_whole else crossing.link,
        )
        for crossing in crossings(chunks[0])
    }
