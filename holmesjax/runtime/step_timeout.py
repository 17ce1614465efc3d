"""Whether a job makes progress, and how long the next sign of it may take. No JAX.

A heartbeat says that a process lives. One whose main thread waits in a collective for another that
will never come lives, too: only what gets done says that a job works.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from holmesjax.config import DistributedConfig, TrainConfig
from holmesjax.plan.island_shares import EVALUATES

# The phase of a process. Steps have a pace, validation reports each batch, and a checkpoint takes
# as long as the disks take.
Activity = Literal["step", "validation", "checkpoint"]

FACTOR = 10.0  # of the median step, until one is late
LEAST_S = 60.0  # that a step may take, where nobody has set how long
NUM_KNOWN = 3  # steps that a median needs
NUM_RECENT = 100  # the steps that it is of


class Progress:
    """Notes what begins, and says when the next thing is late; safe from several threads.

    Args:
      config: `step_timeout_s`, and `start_timeout_s` for the first steps and for checkpoints.
      train: says how many sequences a step has, where they may be more than before. None: all that
        begins takes as long.
      shares: of the batch, of islands that train together: the first one validates for all.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        config: DistributedConfig,
        train: TrainConfig | None = None,
        shares: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._train, self._clock = config, train, clock
        # The steps of that island that a batch of validation may take as long as.
        self._validation_steps = sum(shares) / shares[EVALUATES] if shares else 1.0
        self._lock = threading.Lock()
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)  # for each sequence
        self._median_s = 0.0  # of them; a job asks for its limit at every message of a process
        self._at: dict[Activity, set[int]] = {work: set() for work in get_args(Activity)}
        self._step, self._step_s, self._noted_s = 0, 0.0, clock()
        self._num_noted = 0

    def note(self) -> None:
        """Something was done."""
        with self._lock:
            self._note()

    def _note(self) -> None:
        self._noted_s, self._num_noted = self._clock(), self._num_noted + 1

    def begin(self, work: Activity, step: int, process: int = 0) -> None:
        """A process begins a step, or a batch of validation or the checkpoint after it.

        The first process that begins a step begins it for all.
        """
        with self._lock:
            self._note()
            for processes in self._at.values():
                processes.discard(process)
            self._at[work].add(process)
            if work == "step" and step > self._step:
                if self._step:
                    step_s = self._noted_s - self._step_s
                    self._recent_s.append(step_s / self._batch_of(self._step))
                    self._median_s = statistics.median(self._recent_s)
                self._step, self._step_s = step, self._noted_s

    @property
    def num_noted(self) -> int:
        """Grows with every sign of progress."""
        return self._num_noted

    @property
    def limit_s(self) -> float:
        """How long the next sign of progress may take."""
        return self._limit()[0]

    def describe_limit(self) -> str:
        """In the words of the settings, with numbers."""
        return self._limit()[1]

    def is_late(self) -> bool:
        limit_s = self.limit_s
        with self._lock:
            return self._clock() - self._noted_s > limit_s

    def _limit(self) -> tuple[float, str]:
        with self._lock:
            set_s, num_recent = self._config.step_timeout_s, len(self._recent_s)
            is_saving, is_validating = bool(self._at["checkpoint"]), bool(self._at["validation"])
            batch = self._batch_of(None if is_validating else self._step)
            median_s = batch * self._median_s
        limit_s, name = self._config.start_timeout_s, "distributed.start_timeout_s"
        if set_s is not None and num_recent:
            limit_s, name = set_s, "distributed.step_timeout_s"
        elif num_recent >= NUM_KNOWN:
            factor = FACTOR * (self._validation_steps if is_validating else 1.0)
            limit_s = max(factor * median_s, LEAST_S)
            ramps = self._train is not None and self._train.rampup
            of_batch = f", for {batch} sequences," if ramps else ""
            name = f"{factor:g} times the median step of {median_s:.3g} s{of_batch}"
            name += f" and at least {LEAST_S:g}"
        if is_saving and limit_s < self._config.start_timeout_s:
            limit_s = self._config.start_timeout_s
            name = "distributed.start_timeout_s, which counts for a checkpoint"
        return limit_s, f"{limit_s:.0f} s ({name})"

    def _batch_of(self, step: int | None) -> int:
        """The sequences of a step; of a batch of validation, which does not ramp, if it is None."""
        if self._train is None:
            return 1
        return self._train.global_batch if step is None else self._train.batch_of(step)
