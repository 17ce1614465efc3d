"""The rounds that have landed on an island that is a job of its own, and its events. No JAX."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holmesjax.files import json_text, run_folder


class IslandRounds(NamedTuple):
    """The content of `rounds.jsonl` in an island's run folder."""

    rounds: int  # that have landed, without the first weights
    left_out: int  # of these, merged without this island
    tokens: Mapping[str, int]  # in these rounds, by island
    events: tuple[str, ...]  # in their order


def read(run_dir: Path) -> IslandRounds | None:
    """Reads the file; None where there is none. A line that is no record is left out."""
    try:
        lines = (run_dir / run_folder.ROUNDS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    landed: dict[
        int, tuple[dict[str, int], bool]
    ] = {}  # a round lands again where a job has gone back
    tokens, events = Counter[str](), list[str]()
    for line in lines:
        try:
            entry: dict[str, Any] = json_text.value_of(line)
            if "event" in entry:
                events.append(str(entry["event"]))
            elif entry["round"]:
                counts = {str(name): int(count) for name, count in entry["islands"].items()}
                landed[int(entry["round"])] = counts, not entry["is_merged"]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    for counts, _ in landed.values():
        tokens.update(counts)
    left_out = sum(is_without for _, is_without in landed.values())
    return IslandRounds(len(landed), left_out, dict(tokens), tuple(events))
