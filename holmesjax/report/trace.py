"""Steps as a trace file, to be opened in https://ui.perfetto.dev or in chrome://tracing.

A predicted and a measured step stand below each other on one axis of time; both begin at 0. The
format is that of Chrome's trace events, "JSON Object Format": microseconds, and an event of type
`X` for what has a start and a duration.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
TraceEvent = dict[str, Any]

FILE = "trace.json"
KINDS = {
    "G": "gathering of parameters",
    "F": "forward",
    "B": "backward",
    "W": "weight gradient",
    "R": "sum of gradients",
    "U": "update",
    "S": "whole step",
}


def events(
    name: str, number: int, tasks: Sequence[Record], transfers: Sequence[Record] = ()
) -> list[TraceEvent]:
    """Returns the events of one step: a row for each stage, then one for each direction of a link.

    Args:
      name: the name of the step, as it is shown.
      number: tells steps of one file apart.
      tasks, transfers: as `forecast` gives them; the first starts at 0.
    """
    zero_s = min((task["start_s"] for task in tasks), default=0.0)
    stages = sorted({task["stage"] for task in tasks})
    ways = sorted({(transfer["source"], transfer["target"]) for transfer in transfers})
    rows = [f"stage {stage}" for stage in stages] + [f"{a} to {b}" for a, b in ways]
    found: list[TraceEvent] = [
        {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}},
    ]
    for row, title in enumerate(rows):
        place = {"ph": "M", "pid": number, "tid": row}
        found.append({**place, "name": "thread_name", "args": {"name": title}})
        found.append({**place, "name": "thread_sort_index", "args": {"sort_index": row}})
    for task in tasks:
        found.append(_event(task, number, stages.index(task["stage"]), zero_s))
    for transfer in transfers:
        row = len(stages) + ways.index((transfer["source"], transfer["target"]))
        found.append(_event(transfer, number, row, zero_s))
    return found


def _event(record: Record, number: int, row: int, zero_s: float) -> TraceEvent:
    microbatch = record["microbatch"]
    return {
        "ph": "X",
        "pid": number,
        "tid": row,
        "name": record["kind"] + ("" if microbatch is None else str(microbatch)),
        "cat": KINDS[record["kind"]],
        "ts": 1e6 * (record["start_s"] - zero_s),
        "dur": 1e6 * (record["end_s"] - record["start_s"]),
    }


def text(found: Sequence[TraceEvent]) -> str:
    """The content of a file with the events of one or more steps."""
    return json.dumps({"traceEvents": list(found), "displayTimeUnit": "ms"})
