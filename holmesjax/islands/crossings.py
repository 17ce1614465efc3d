"""The crossings of meetings of islands, for the transport of boundaries."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import ModelConfig, OuterConfig
from holmesjax.errors import PlanError
from holmesjax.layer_specs.kind import Parameter
from holmesjax.models.layer import split_trained, statements
from holmesjax.parallel import sharding
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.outer_rule import owner_of
from holmesjax.plan.plan import Plan
from holmesjax.plan.processes import Process
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.stage_crossings import crossings
from holmesjax.transport.crossings import Crossing
from holmesjax.transport.routes import wire_spec


def to_owner(island: int, name: str) -> str:
    """The crossing of an island's weights of a parameter to their owner."""
    return f"weights {island} {name}"


def from_owner(island: int, name: str) -> str:
    """The crossing of a parameter's global weights from their owner to an island."""
    return f"global {island} {name}"


def again(island: int, name: str) -> str:
    """The crossing of whole global weights to an island, where others of their way are rounded."""
    return f"again {island} {name}"


def in_pair(what: str, source: int, target: int, name: str) -> str:
    """The crossing of one of a pair to the other: its "delta", or its "slow" weights."""
    return f"{what} {source} {target} {name}"


class Passage(NamedTuple):
    """A crossing of a parameter from one island to another."""

    crossing: str
    source: int  # island
    target: int
    dtype: str


def ways_of(
    outer: OuterConfig, owners: Mapping[str, int], num_islands: int
) -> Iterator[tuple[str, Passage]]:
    """Yields the name of each parameter with each of its crossings, in one order everywhere.

    Args:
      outer: the rule of the meetings.
      owners: the island that owns each parameter, by its name.
      num_islands: of the run.
    """
    codec, exact = codec_of(outer), "float32"
    for name, owner in owners.items():
        for k in (k for k in range(num_islands) if k != owner):
            dtype = exact if outer.has_pairs else codec.dtype  # pairs: means alone
            yield name, Passage(to_owner(k, name), k, owner, dtype)
            yield name, Passage(from_owner(k, name), owner, k, dtype)
            if not codec.is_exact and not outer.has_pairs:
                yield name, Passage(again(k, name), owner, k, exact)
        if outer.has_pairs:
            for a, b in itertools.permutations(range(num_islands), 2):
                yield name, Passage(in_pair("delta", a, b, name), a, b, codec.dtype)
                yield name, Passage(in_pair("slow", a, b, name), a, b, exact)


def link(source: int, target: int) -> str:
    """The link from one island to another, as metrics name it."""
    return f"island {source} -> island {target}"


def trained(model: ModelConfig) -> dict[str, Parameter]:
    """The statements of all parameters that train, by layer and name: "block_000.up_DF"."""
    return flatten(split_trained(statements(model))[0])


def first_stages(plan: Plan) -> list[int]:
    """The number in the run of each island's first stage."""
    sizes = [len(island.stages) for island in plan.islands]
    return [sum(sizes[:k]) for k in range(len(sizes))]


def crossings_of(plan: Plan, chunk: Chunk, processes: Sequence[Process]) -> tuple[Crossing, ...]:
    """All that crosses between the processes of a run with islands, as those of one island know it.

    Meetings come first: both ends of a crossing give it the same number, and islands may have
    unlike stages.

    Args:
      plan: of the run.
      chunk: any one of the island.
      processes: all of the run.
    """
    assert chunk.island is not None, "the chunk is of an island"
    first = first_stages(plan)[chunk.island]
    move = lambda own: replace(own, source=first + own.source, target=first + own.target)
    meeting = _of_meetings(plan, chunk.model, chunk.outer, processes)
    return (*meeting, *map(move, crossings(chunk)))


def _of_meetings(
    plan: Plan, model: ModelConfig, outer: OuterConfig, processes: Sequence[Process]
) -> Iterator[Crossing]:
    parameters, count = trained(model), len(plan.islands)
    owner, firsts = owner_of(model, count), first_stages(plan)
    homes = [
        {layer: first + s for s, stage in enumerate(island.stages) for layer in stage.layers}
        for first, island in zip(firsts, plan.islands, strict=True)
    ]
    for name, way in ways_of(outer, owner, count):
        layer, parameter = name.partition(".")[0], parameters[name]
        stages = [homes[end][layer] for end in (way.source, way.target)]
        specs = [_spec(parameter, plan, stage) for stage in stages]
        found = Crossing(
            name=way.crossing,
            source=stages[0],
            target=stages[1],
            link=link(way.source, way.target),
            shape=parameter.shape,
            dtype=way.dtype,
            source_spec=specs[0],
            target_spec=specs[1],
        )
        yield _whole_where_it_must_be(found, plan, processes)


def _spec(parameter: Parameter, plan: Plan, stage: int) -> tuple[tuple[str, ...], ...]:
    """How a stage cuts a parameter's master."""
    spec = sharding.master_spec(parameter.dims, parameter.shape, plan.stages[stage].mesh)
    return sharding.spec_axes(spec, len(parameter.shape))


def _whole_where_it_must_be(
    crossing: Crossing, plan: Plan, processes: Sequence[Process]
) -> Crossing:
    """The crossing, which goes to each process where processes with copies cannot share it."""
    try:
        wire_spec(crossing, plan, processes)
    except PlanError:
        return replace(crossing, is_whole=True)
    return crossing
