"""A schedule: microbatches go through in pairs, with split backwards."""

from holmesjax.schedules.pipeline_schedules import SCHEDULES, PipelineSchedule, TaskOrder
from holmesjax.schedules.tasks import Task

NAME = "toy_pairs"


def tasks(stage: int, order: TaskOrder) -> tuple[Task, ...]:
    """For each pair: both forwards, both backwards, then the gradients of the weights."""
    pairs = [range(m, min(m + 2, order.microbatches)) for m in range(0, order.microbatches, 2)]
    return tuple(Task(kind, m) for pair in pairs for kind in ("F", "B", "W") for m in pair)


RECORD = PipelineSchedule(tasks=tasks, bound=lambda stage, order: 2, splits_backward=True)


def add():
    SCHEDULES[NAME] = RECORD
