"""The checkpoints of an attempt: when they are due, who has told of them, and their commits.

Commits have a thread of their own, which does one after the other: one may wait for an object store
while the launcher hears processes and signals. A commit that hangs ends the attempt, as a turn of
the supervising loop does that hangs (`loop_watch`).
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from holmesjax.checkpoints import committing, manifest
from holmesjax.checkpoints.commit_alarm import CommitAlarm
from holmesjax.checkpoints.committing import Saves
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.resume import Start
from holmesjax.checkpoints.retention import Retention
from holmesjax.checkpoints.save_schedule import SaveSchedule
from holmesjax.distributed.messages import Saved, Unsaved
from holmesjax.distributed.store_hub import StoreHub
from holmesjax.errors import PeerError
from holmesjax.files import places
from holmesjax.liveness.lease import Lease
from holmesjax.plan.processes import Process

TURN_S = 1.0  # of a turn of the loop, at most: a launcher that was stopped has not waited


class JobSaves:
    """The saves of one attempt, whose loop calls all methods; a `with` waits for their commits.

    Args:
      start: where the attempt goes on.
      start_name: of the attempt, in stores.
      processes: all of the job.
      lease: on the run folder.
      mirror: the run folder's copy in an object store.
      hub: knows which store has which part.
      retention: removes what need not stay.
      data: digests, for manifests; filled before the first save.
      committed: told of each step after which a checkpoint was committed, in the commits' thread.
      say: takes lines for the console.
    """

    def __init__(
        self,
        start: Start,
        start_name: str,
        processes: Sequence[Process],
        *,
        lease: Lease,
        mirror: Mirror | None,
        hub: StoreHub,
        retention: Retention,
        data: Mapping[str, str],
        committed: Sequence[Callable[[int], object]],
        say: Callable[[str], None],
    ):
        job, self._processes, self._say = start.job, processes, say
        self._place = places.shown(job.run_dir)
        self._limit_s = job.config.distributed.start_timeout_s
        leaders = [process.name for process in processes if process.leads]
        self._alarm = CommitAlarm(job.config.checkpoint, start.step, leaders)
        self._part_of: dict[str, int] = {}  # part -> the process that writes it
        self._thread = ThreadPoolExecutor(1, "commits")
        self._commits: deque[Future[None]] = deque()  # that have not ended, in order
        self._busy_s, self._looked_s = 0.0, time.monotonic()  # of the first of them
        commit = functools.partial(
            committing.commit,
            start,
            data=data,
            stores=lambda: hub.stores_of_parts(self._part_of, start_name),
            owner=lease,
            mirror=mirror,
        )

        def tell(step: int) -> None:
            for told in (self._alarm.committed, *committed):
                told(step)

        self._saves = Saves(
            job.run_dir,
            len(job.plan.stages),
            commit,
            retention,
            say,
            tell,
            in_turn=self._in_turn,
            limit_s=60 * job.config.checkpoint.failing_minutes,
        )
        self._alarm.attach(self._saves.outstanding, say)
        # Asked in the controller's thread, once about each step.
        self.is_due = SaveSchedule(
            job.config.checkpoint,
            begun=self._saves.begun,
            retries=self._saves.is_retry_due,
            may_begin=self._saves.may_begin,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not all(commit.done() for commit in self._commits):
            self._say(f"the commit of a checkpoint in {self._place} is waited for")
        self._thread.shutdown()

    def _in_turn(self, commit: Callable[[], None]) -> None:
        if not self._commits:
            self._busy_s, self._looked_s = 0.0, time.monotonic()
        self._commits.append(self._thread.submit(commit))

    def saved(self, number: int, saved: Saved) -> None:
        """A process has written its part."""
        parts = {manifest.part_of(file): number for file in saved.files}
        self._part_of = {**self._part_of, **parts}  # a commit may be reading the old one
        name = self._processes[number].name
        self._saves.saved(saved.step, saved.arrays, saved.files, name)

    def unsaved(self, number: int, unsaved: Unsaved) -> None:
        """A process cannot write its part."""
        process = self._processes[number]
        why = f"{process.name} says {unsaved.reason}" if unsaved.reason else ""
        self._saves.failed(unsaved.step, why, process.name, counts=process.leads)

    def step(self, step: int) -> dict[str, Any]:
        """Takes a step that is done; returns additions to its record."""
        return self._alarm.step(step)

    @property
    def is_busy(self) -> bool:
        """Whether a commit has not ended, as far as `check` has seen."""
        return bool(self._commits)

    def check(self) -> None:
        """Raises what has come of the saves; to be called in each turn of the loop.

        Raises as `Saves.check`, LostLeaseError, and PeerError if a commit takes too long.
        """
        while self._commits and self._commits[0].done():
            self._busy_s = 0.0
            self._commits.popleft().result()
        self._saves.check()
        now_s = time.monotonic()
        self._busy_s += min(now_s - self._looked_s, TURN_S)
        self._looked_s = now_s
        if self._commits and self._busy_s > self._limit_s:
            raise self.late(f"distributed.start_timeout_s = {self._limit_s:g} s")

    def late(self, limit: str) -> PeerError:
        """The error of a commit that has not ended within a limit."""
        return PeerError(
            self._place,
            f"has not taken a checkpoint within {limit}",
            found="all stages have written their parts, and the commit has not returned",
            fix="see whether its file system or object store answers, then start again with the "
            "same command: it resumes from the last checkpoint",
        )

    def end(self) -> None:
        """Waits for all commits. Raises as `check`, and PeerError if the last save has failed."""
        while self._commits:
            self._commits.popleft().result()
        self._saves.check(at_end=True)
