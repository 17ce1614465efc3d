"""The states that islands have written, and who goes on with them: islands, or a pipeline.

An island goes on with the moments of the islands that share a cluster with it, or with those of all
where none does: their mean where there are several. A pipeline goes on with the mean of all. No
JAX.
"""

from collections.abc import Iterable, Sequence

from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.plan.meeting_steps import MeetingSteps
from holmesjax.plan.plan import Plan

Clusters = tuple[str, ...]  # of an island, each once


def clusters_of(plan: Plan) -> tuple[Clusters, ...]:
    """The clusters of each island of a plan; none where it is one pipeline."""
    return tuple(_each_once(stage.cluster for stage in island.stages) for island in plan.islands)


def written(checkpoint: Checkpoint) -> tuple[Clusters, ...]:
    """The clusters of each island that has written a checkpoint; none where a pipeline has.

    None either for imported weights, which no island has trained.
    """
    if not any(key.startswith("island_") for key in checkpoint.manifest["arrays"]):
        return ()
    return tuple(_each_once(names) for names in checkpoint.settings["parallel"]["islands"])


def _each_once(names: Iterable[str]) -> Clusters:
    """The clusters of stages; a stage "ib+roce" has two."""
    return tuple(sorted({cluster for name in names for cluster in name.split("+")}))


def are_the_same(old: Sequence[Clusters], new: Sequence[Clusters]) -> bool:
    """Whether the same islands go on, in whatever order.

    >>> are_the_same([("a",), ("b", "c")], [("b", "c"), ("a",)])
    True
    """
    return sorted(old) == sorted(new)


def sources(old: Sequence[Clusters], own: Clusters) -> list[int]:
    """The numbers of the islands whose moments an island goes on with; `own` is () for a pipeline.

    >>> old = [("a",), ("b",), ("c", "d")]
    >>> sources(old, ("a",)), sources(old, ("b", "c")), sources(old, ("e",)), sources(old, ())
    ([0], [1, 2], [0, 1, 2], [0, 1, 2])
    """
    shared = [k for k, names in enumerate(old) if {*names} & {*own}]
    return shared or list(range(len(old)))


def is_between_meetings(checkpoint: Checkpoint) -> bool:
    """Whether islands that have written a checkpoint had other weights than the global ones."""
    arrays = checkpoint.manifest["arrays"]
    islands = range(len(written(checkpoint)))
    return any(
        arrays[f"island_{k}.{name}"]["digest"] != array["digest"]
        for name, array in arrays.items()
        if name.startswith("params.")
        for k in islands
    )


def steps_between(checkpoint: Checkpoint, new: Sequence[Clusters]) -> MeetingSteps | None:
    """The steps after which the same islands met that have written a checkpoint between meetings.

    None where other islands go on, or where all had the global weights.
    """
    old = written(checkpoint)
    if not old or not are_the_same(old, new) or not is_between_meetings(checkpoint):
        return None
    parallel = checkpoint.settings["parallel"]
    # Earlier versions had neither fragments nor a delay.
    fragments, delay = parallel.get("fragments", 1), parallel.get("delay", 0)
    return MeetingSteps(every=parallel["every"], fragments=fragments, delay=delay)


def describe(checkpoint: Checkpoint, new: Sequence[Clusters]) -> list[str]:
    """Lines about what goes on with what islands have written, where other islands go on."""
    old = written(checkpoint)
    if not old or are_the_same(old, new):
        return []
    lines = ["  islands     other ones have written it; those here begin with the global weights"]
    if is_between_meetings(checkpoint):
        lines[0] += ", for which they meet once more"
    for number, clusters in enumerate(new or [()]):
        islands = sources(old, clusters)
        who = f"island {number} ({', '.join(clusters)})" if clusters else "the pipeline"
        names = [f"({', '.join(old[k])})" for k in islands]
        means = "the moments" if len(islands) == 1 else "the mean of the moments"
        lines.append(f"              {who} goes on with {means} of {', '.join(names)}")
    return lines
