"""A step as it is predicted to run, in the form in which `timeline.json` has one that ran.

Besides the tasks of the schedule, a stage has three tasks once: gathering its parameters (G),
summing its gradients (R), and the update (U), which waits until all stages have summed. A forecast
also has the times of boundaries on their way, which a measured step does not show.
"""

from typing import Any

from holmesjax.plan.plan import Plan

Record = dict[str, Any]


def tasks(plan: Plan) -> list[Record]:
    """Every task: stage, kind, microbatch, `start_s` and `end_s`; none if none were predicted."""
    simulation = plan.simulate()
    if simulation is None:
        return []
    records = [
        _record(event.stage, event.task.kind, event.task.microbatch, event.start_s, event.end_s)
        for event in simulation.events
    ]
    seconds = [stage.task_seconds for stage in plan.stages if stage.task_seconds is not None]
    finish_s = [simulation.finish_s(stage) for stage in range(len(seconds))]
    reduced_s = [end_s + task_s.reduce_s for end_s, task_s in zip(finish_s, seconds, strict=True)]
    for stage, task_s in enumerate(seconds):
        if task_s.gather_s > 0:
            records.append(_record(stage, "G", None, 0.0, task_s.gather_s))
        if task_s.reduce_s > 0:
            records.append(_record(stage, "R", None, finish_s[stage], reduced_s[stage]))
    start_s = max(reduced_s)
    for stage, task_s in enumerate(seconds):
        records.append(_record(stage, "U", None, start_s, start_s + task_s.update_s))
    return records


def _record(stage: int, kind: str, microbatch: int | None, start_s: float, end_s: float) -> Record:
    return {
        "stage": stage,
        "kind": kind,
        "microbatch": microbatch,
        "start_s": start_s,
        "end_s": end_s,
    }


def transfers(plan: Plan) -> list[Record]:
    """Every boundary on its way: source, target, kind and microbatch of what made it, and when."""
    simulation = plan.simulate()
    if simulation is None:
        return []
    return [
        {
            "source": transfer.source,
            "target": transfer.target,
            "kind": transfer.task.kind,
            "microbatch": transfer.task.microbatch,
            "start_s": transfer.start_s,
            "end_s": transfer.end_s,
        }
        for transfer in simulation.transfers
    ]
