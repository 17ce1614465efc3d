"""The states that islands have written, and who goes on with them: islands, or a pipeline.

An island goes on with the moments of the islands that share a cluster with it, or with those of all
where none does: their mean where there are several. A pipeline goes on with the mean of all. No
JAX.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import OuterConfig
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


def shares(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The share of the batch that each island took that has written a checkpoint."""
    unlike = checkpoint.settings["parallel"].get("shares")  # None in earlier versions, too
    return tuple(unlike or [1] * len(written(checkpoint)))


def are_the_same(old: Sequence[Clusters], new: Sequence[Clusters]) -> bool:
    """Whether the same islands go on, in whatever order.

    >>> are_the_same([("a",), ("b", "c")], [("b", "c"), ("a",)])
    True
    """
    return sorted(old) == sorted(new)


def rule(checkpoint: Checkpoint) -> OuterConfig:
    """The rule by which the islands met that have written a checkpoint."""
    return OuterConfig(**checkpoint.settings["parallel"]["outer"])


def go_on_exactly(
    checkpoint: Checkpoint,
    new: Sequence[Clusters],
    outer: OuterConfig,
    new_shares: Sequence[int] = (),
) -> bool:
    """Whether the same islands go on, and keep the same arrays between their meetings.

    Islands with other shares of the batch (`new_shares`; empty: equal ones) do not: what they have
    trained since their last meeting has the weight of their old shares.
    """
    before = rule(checkpoint)
    is_the_same = (before.rule, before.codec) == (outer.rule, outer.codec)
    return is_the_same and _are_alike(checkpoint, new, new_shares)


def _are_alike(checkpoint: Checkpoint, new: Sequence[Clusters], new_shares: Sequence[int]) -> bool:
    """Whether islands of the same clusters go on, with the same shares of the batch."""
    old = zip(written(checkpoint), shares(checkpoint), strict=True)
    return sorted(old) == sorted(zip(new, new_shares or [1] * len(new), strict=True))


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


def meeting_steps(
    checkpoint: Checkpoint,
    new: Sequence[Clusters],
    outer: OuterConfig,
    new_shares: Sequence[int] = (),
) -> MeetingSteps | None:
    """The steps after which the islands met that have written a checkpoint; None for other islands.

    `new` are the islands that go on, by the rule `outer`; by another rule, or with other shares of
    the batch, they count as others.
    `since` is such that `in_flight` gives what was on its way.
    """
    if not written(checkpoint) or not go_on_exactly(checkpoint, new, outer, new_shares):
        return None
    parallel, steps = checkpoint.settings["parallel"], checkpoint.settings["train"]["steps"]
    # Earlier versions had neither fragments nor a delay, or did not tell since when.
    fragments, delay = parallel.get("fragments", 1), parallel.get("delay", 0)
    since = parallel.get("since", checkpoint.step)
    if checkpoint.step == steps:  # all has landed
        since = checkpoint.step
    return MeetingSteps(every=parallel["every"], fragments=fragments, delay=delay, since=since)


def since(
    checkpoint: Checkpoint | None,
    new: Sequence[Clusters],
    steps: MeetingSteps,
    outer: OuterConfig,
    new_shares: Sequence[int] = (),
) -> int:
    """The step since which islands meet after such steps, for the checkpoints of a session.

    Args:
      checkpoint: with which the session begins.
      new: its islands.
      steps: after which they meet.
      outer: by which rule.
      new_shares: of the batch, of each; empty: equal ones.
    """
    if checkpoint is None:
        return 0
    before = meeting_steps(checkpoint, new, outer, new_shares)
    is_the_same = before is not None and replace(before, since=0) == steps
    return before.since if before is not None and is_the_same else checkpoint.step


def describe(
    checkpoint: Checkpoint,
    new: Sequence[Clusters],
    outer: OuterConfig,
    new_shares: Sequence[int] = (),
) -> list[str]:
    """Lines about what goes on with what islands have written, where others, or another rule do."""
    old = written(checkpoint)
    if not old or (new and go_on_exactly(checkpoint, new, outer, new_shares)):
        return []
    others = "other ones have"
    if are_the_same(old, new):
        has_shares = _are_alike(checkpoint, new, new_shares)
        others = f"islands of {'another rule' if has_shares else 'other shares'} have"
    lines = [f"  islands     {others} written it; those here begin with the global weights"]
    if is_between_meetings(checkpoint):
        before = rule(checkpoint)
        once = "for which they meet once more"
        if before.has_pairs:
            once = "the mean of what islands have"
        elif before.is_late:
            once = "with the mean of what islands have learned since"
        lines[0] += f", {once}"
    for number, clusters in enumerate(new or [()]):
        islands = sources(old, clusters)
        who = f"island {number} ({', '.join(clusters)})" if clusters else "the pipeline"
        names = [f"({', '.join(old[k])})" for k in islands]
        means = "the moments" if len(islands) == 1 else "the mean of the moments"
        lines.append(f"              {who} goes on with {means} of {', '.join(names)}")
    return lines
