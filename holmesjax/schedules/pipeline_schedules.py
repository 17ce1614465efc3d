"""Pipeline schedules: the order in which each stage runs its forwards (F) and backwards (B, W).

A schedule is plain data, `tuple[Task, ...]` per stage. It knows nothing of arrays or devices, so it
can be printed, simulated and tested on its own; `pipeline` executes it. `SCHEDULES` has a record
for each: no other module compares a schedule's name.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holmesjax.schedules.simulation import simulate
from holmesjax.schedules.tasks import Task, TaskKind, max_in_flight, max_waiting


def gpipe(num_microbatches: int) -> tuple[Task, ...]:
    """GPipe: all forwards, then all backwards, on every stage; all microbatches are in flight.

    >>> print(*gpipe(3))
    F0 F1 F2 B0 B1 B2

    Reference: Huang et al., "GPipe", arXiv:1811.06965.
    """
    return one_f_one_b(num_microbatches, in_flight=num_microbatches)


def one_f_one_b(num_microbatches: int, *, in_flight: int) -> tuple[Task, ...]:
    """1F1B: warm up with forwards, then alternate, then drain the backwards.

    Stage s of `1f1b` keeps at most `num_stages - s` microbatches in flight, whatever their total
    number; that bound on activation memory is the point of the schedule:
      >>> for stage in range(3):
      ...     print(stage, *one_f_one_b(4, in_flight=3 - stage))
      0 F0 F1 F2 B0 F3 B1 B2 B3
      1 F0 F1 B0 F2 B1 F3 B2 B3
      2 F0 B0 F1 B1 F2 B2 F3 B3

    `eager_1f1b` keeps more of them in flight on the stages before a slow link, so that these have
    work while a microbatch travels there and back. A stage may never hold fewer than the next one.

    References: Narayanan et al., "PipeDream", arXiv:1806.03377; Zhuang et al., arXiv:2211.05322,
    section 4 (eager).
    """
    forwards = [Task("F", m) for m in range(num_microbatches)]
    return _alternate(forwards, [Task("B", m) for m in range(num_microbatches)], in_flight)


def interleaved_1f1b(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[Task, ...]:
    """Interleaved 1F1B: a stage holds several chunks, so the pipeline fills in smaller steps.

    Microbatches go through a stage in groups of `num_stages`, each group through all chunks. The
    bubble shrinks by `num_chunks`; the traffic between stages, and with the wrap-around from the
    last stage to the first, grows by it.

    >>> for stage in range(2):
    ...     print(stage, *interleaved_1f1b(stage, 2, num_microbatches=2, num_chunks=2))
    0 F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
    1 F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1

    Reference: Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    assert num_microbatches % num_stages == 0, f"{num_microbatches} in groups of {num_stages}"
    forwards, backwards = [], []
    for first in range(0, num_microbatches, num_stages):
        group = range(first, first + num_stages)
        forwards += [Task("F", m, c) for c in range(num_chunks) for m in group]
        backwards += [Task("B", m, c) for c in reversed(range(num_chunks)) for m in group]
    num_warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages
    return _alternate(forwards, backwards, num_warmup + 1)


def zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
    """ZB-H1: 1F1B with split backwards, whose weights fill what is a bubble in 1F1B.

    Stage s runs a W after its B has run for s more microbatches: s + 1 are between the two. Every
    stage holds at most `num_stages` microbatches in flight: none more than the first one of 1F1B.

    >>> for stage in range(2):
    ...     print(stage, *zero_bubble(stage, 2, num_microbatches=3))
    0 F0 F1 B0 W0 F2 B1 W1 B2 W2
    1 F0 B0 F1 B1 W0 F2 B2 W1 W2

    Reference: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.
    """
    tasks = []
    for task in one_f_one_b(num_microbatches, in_flight=num_stages - stage):
        tasks.append(task)
        if task.kind == "B" and task.microbatch >= stage:
            tasks.append(Task("W", task.microbatch - stage))
    num_done = max(num_microbatches - stage, 0)
    return (*tasks, *(Task("W", m) for m in range(num_done, num_microbatches)))


def _alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], in_flight: int
) -> tuple[Task, ...]:
    """`in_flight` forwards, then a backward and a forward in turn, then the other backwards."""
    assert in_flight >= 1, f"a stage needs a microbatch in flight, not {in_flight}"
    num_warmup = min(in_flight, len(forwards)) - 1
    tasks = list(forwards[:num_warmup])
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        tasks += pair
    return (*tasks, *backwards[len(forwards) - num_warmup :])


# ---- the table -----------------------------------------------------------------------------------


class TaskOrder(NamedTuple):
    """A schedule and the numbers that fix the order of the tasks of every stage.

    >>> [TaskOrder("1f1b", num_stages=2, microbatches=4).bound(stage) for stage in range(2)]
    [2, 1]
    """

    schedule: str  # a name of `SCHEDULES`
    num_stages: int
    microbatches: int
    chunks: int = 1  # of a stage
    in_flight: tuple[int, ...] = ()  # on each stage, if the schedule leaves it to the planner

    @property
    def splits_backward(self) -> bool:
        return SCHEDULES[self.schedule].splits_backward

    @property
    def chooses_in_flight(self) -> bool:
        return SCHEDULES[self.schedule].chooses_in_flight

    @property
    def num_tasks(self) -> int:
        """The forwards and backwards of a step."""
        return 2 * self.num_stages * self.microbatches * self.chunks

    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of every stage."""
        own, name = SCHEDULES[self.schedule], self.schedule
        assert (self.chunks > 1) == own.is_chunked, f"{name} of {self.chunks} chunks"
        num_depths = self.num_stages * own.chooses_in_flight
        assert len(self.in_flight) == num_depths, f"{name} of {self.in_flight} in flight"
        return tuple(own.tasks(stage, self) for stage in range(self.num_stages))

    def bound(self, stage: int) -> int:
        """The most chunks of microbatches that a stage may hold in flight."""
        return min(SCHEDULES[self.schedule].bound(stage, self), self.microbatches * self.chunks)

    def waiting_bound(self, stage: int) -> int:
        """The most of these that may be between their B and their W."""
        own = SCHEDULES[self.schedule]
        if not own.splits_backward:
            return 0
        most = self.bound(stage)
        return most if own.waiting is None else min(own.waiting(stage, self), most)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """One way to order the tasks of a step, and all that config, planner and runtime ask of it.

    A new schedule is one of these in `SCHEDULES`. `validate` asserts what its tasks must be like.
    """

    tasks: Callable[[int, TaskOrder], tuple[Task, ...]]  # of one stage, in order
    # A promise about memory: the most chunks of microbatches that a stage holds in flight. It may
    # be more than there are in a step.
    bound: Callable[[int, TaskOrder], int]
    splits_backward: bool = False  # the gradients of weights are tasks of their own, W
    # Of those in flight, the most between their B and their W; None: all of them may be.
    waiting: Callable[[int, TaskOrder], int] | None = None
    # Numbers of chunks of a stage that the planner tries; a config may ask for more.
    chunks: tuple[int, ...] = (1,)
    is_in_groups: bool = False  # microbatches come in groups of the size of the pipeline
    least_stages: int = 1
    chooses_in_flight: bool = False  # the planner says how many each stage holds, as 1F1B or more
    # Another schedule that never holds more in flight on a stage, whatever the numbers.
    leaner: str | None = None
    # The planner tries it unless the config names another; needs a chain of `leaner` to 1F1B.
    is_tried: bool = False

    @property
    def is_chunked(self) -> bool:
        """Whether a stage holds several chunks."""
        return min(self.chunks) > 1

    def suits(self, num_stages: int, microbatches: int) -> bool:
        """Whether the tasks exist for a pipeline of this size."""
        fits = not self.is_in_groups or microbatches % num_stages == 0
        return fits and num_stages >= self.least_stages


PLAIN = "1f1b"  # what others are compared with
SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(
        tasks=lambda stage, order: gpipe(order.microbatches),
        bound=lambda stage, order: order.microbatches,
        leaner=PLAIN,
    ),
    PLAIN: PipelineSchedule(
        tasks=lambda stage, order: one_f_one_b(
            order.microbatches, in_flight=order.num_stages - stage
        ),
        bound=lambda stage, order: order.num_stages - stage,
        is_tried=True,
    ),
    "eager_1f1b": PipelineSchedule(
        tasks=lambda stage, order: one_f_one_b(
            order.microbatches, in_flight=order.in_flight[stage]
        ),
        bound=lambda stage, order: order.in_flight[stage],
        chooses_in_flight=True,
        leaner=PLAIN,
        is_tried=True,
    ),
    "interleaved_1f1b": PipelineSchedule(
        tasks=lambda stage, order: interleaved_1f1b(
            stage, order.num_stages, order.microbatches, order.chunks
        ),
        bound=lambda stage, order: (
            2 * (order.num_stages - 1 - stage) + (order.chunks - 1) * order.num_stages + 1
        ),
        chunks=(2, 3, 4, 6, 8),
        is_in_groups=True,
        least_stages=2,
        leaner=PLAIN,
        is_tried=True,
    ),
    "zero_bubble": PipelineSchedule(
        tasks=lambda stage, order: zero_bubble(stage, order.num_stages, order.microbatches),
        bound=lambda stage, order: order.num_stages,
        splits_backward=True,
        waiting=lambda stage, order: stage + 1,
        least_stages=2,
        leaner=PLAIN,
        is_tried=True,
    ),
}


def chunked() -> list[str]:
    """The schedules in which a stage holds several chunks."""
    return [name for name, order in SCHEDULES.items() if order.is_chunked]


def allowed(name: str | None) -> list[str]:
    """The schedules that a planner may choose from: one that is asked for, or all it tries."""
    return (
        [order_name for order_name in SCHEDULES if SCHEDULES[order_name].is_tried]
        if name is None
        else [name]
    )


def leanest(name: str, *, of_its_kind: bool = False) -> str:
    """The schedule that holds the fewest microbatches in flight, of those a name leads to.

    Args:
      name: of a schedule.
      of_its_kind: whether to stay among those with as many chunks and with the same backwards.

    >>> leanest("zero_bubble"), leanest("zero_bubble", of_its_kind=True)
    ('1f1b', 'zero_bubble')
    """
    kind = lambda own: (own.is_chunked, own.splits_backward)
    own = SCHEDULES[name]
    while own.leaner is not None:
        if of_its_kind and kind(SCHEDULES[own.leaner]) != kind(own):
            break
        name, own = own.leaner, SCHEDULES[own.leaner]
    return name


def schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    in_flight: Sequence[int] = (),
) -> tuple[tuple[Task, ...], ...]:
    """The tasks of every stage, under a schedule of `SCHEDULES`.

    Args:
      name: `schedule` of `ParallelConfig`.
      num_stages, num_microbatches: of the pipeline.
      num_chunks: chunks of a stage.
      in_flight: microbatches in flight on each stage, if the schedule leaves that to the planner.

    Example:
      >>> for tasks in schedule("eager_1f1b", 2, num_microbatches=4, in_flight=(3, 1)):
      ...     print(*tasks)
      F0 F1 F2 B0 F3 B1 B2 B3
      F0 B0 F1 B1 F2 B2 F3 B3
    """
    return TaskOrder(name, num_stages, num_microbatches, num_chunks, tuple(in_flight)).tasks()


def validate(
    name: str,
    schedules: Sequence[Sequence[Task]],
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    in_flight: Sequence[int] = (),
) -> None:
    """Asserts the properties of a schedule that `pipeline` relies on.

    Every task runs once. For each chunk and microbatch F runs first, then B, then W. No stage holds
    more in flight than the schedule's bound promises. No stage waits forever.

    Args:
      name: `schedule` of `ParallelConfig`.
      schedules: tasks of each stage, in the order in which they run.
      num_microbatches: microbatches of a step.
      num_chunks: chunks of a stage.
      in_flight: microbatches in flight on each stage, if the schedule leaves that to the planner.

    Raises:
      AssertionError: the schedule lacks one of these properties.
    """
    num_stages = len(schedules)
    order = TaskOrder(name, num_stages, num_microbatches, num_chunks, tuple(in_flight))
    kinds: tuple[TaskKind, ...] = ("F", "B", "W") if order.splits_backward else ("F", "B")
    passes = list(itertools.product(range(num_microbatches), range(num_chunks)))
    for stage, tasks in enumerate(schedules):
        position = {task: i for i, task in enumerate(tasks)}
        expected = {Task(kind, m, c) for kind in kinds for m, c in passes}
        runs = f"stage {stage} must run every task once, runs {' '.join(map(str, tasks))}"
        assert position.keys() == expected, runs
        assert len(tasks) == len(expected), runs
        for first, second in itertools.pairwise(kinds):
            for m, c in passes:
                before, after = Task(first, m, c), Task(second, m, c)
                assert position[before] < position[after], f"stage {stage}: {after} before {before}"
        most, bound = max_in_flight(tasks), order.bound(stage)
        assert most <= bound, f"stage {stage}: {most} in flight, {name} promises {bound}"
        most, bound = max_waiting(tasks), order.waiting_bound(stage)
        assert most <= bound, f"stage {stage}: {most} wait for their W, {name} promises {bound}"
    ones = [1.0] * num_stages * num_chunks
    num_links = num_stages - (num_chunks == 1)
    simulate(schedules, ones, ones, [(0.0, 0.0)] * num_links, weight_s=ones)
