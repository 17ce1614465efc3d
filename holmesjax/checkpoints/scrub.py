"""Reads the newest checkpoint of a run folder again while the run goes on. No JAX.

A disk may lose bytes that it has taken. Whoever reads them only at the next start finds that out
when the run needs them. So a process of its own (`second_reading`) reads them from the disk, as
fast as `checkpoint.scrub` allows. Nothing is set aside here: a start does that when two processes
find damage.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from holmesjax.checkpoints import manifest, second_reading, stores
from holmesjax.errors import HolmesError
from holmesjax.liveness.helper_process import StoppedError

AGAIN_S, LOOK_S = 60.0, 0.2  # until damage is looked for again; between two looks for the end
FIELD = "damaged_step"  # in the record of a step: that of a checkpoint which was found damaged


class Scrub:
    """Reads checkpoints of a run folder in the background, the newest first; a context manager.

    Each committed checkpoint is read once, but for those that a newer one has overtaken. Parts that
    are in other stores are not read here.

    Args:
      run_dir: the run folder.
      mb_per_s: how fast arrays are read, in MB/s; None: nothing is read.
      say: takes a line for each checkpoint that is damaged, or that could not be read to its end.
    """

    def __init__(self, run_dir: Path, mb_per_s: float | None, say: Callable[[str], object]):
        self._run_dir, self._mb_per_s, self._say = run_dir, mb_per_s, say
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._damaged: queue.SimpleQueue[int] = queue.SimpleQueue()  # steps that no record has yet
        self._all: dict[int, None] = {}  # steps, in the order in which they were found
        self._is_closed = False
        self._thread = threading.Thread(target=self._read_all, name="scrub", daemon=True)

    def __enter__(self) -> Self:
        if self._mb_per_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self._steps.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def committed(self, step: int) -> None:
        """A checkpoint after a step was committed; does not wait."""
        if self._mb_per_s is not None:
            self._steps.put(step)

    def damaged(self, step: int) -> None:
        """The checkpoint after a step is damaged, here or in another store."""
        self._all[step] = None
        self._damaged.put(step)

    def all_damaged(self) -> list[int]:
        """The steps of all that was found damaged; each may have been told before."""
        return list(self._all)

    def step(self) -> dict[str, int]:
        """Additions to the record of a step: what was found since the last."""
        return {} if self._damaged.empty() else {FIELD: self._damaged.get()}

    def _read_all(self) -> None:
        while (step := self._newest()) is not None:
            self._read(step)

    def _newest(self) -> int | None:
        """Waits for a step; the newest that has been told. None: it is over."""
        told = [self._steps.get()]
        while not self._steps.empty():
            told.append(self._steps.get())
        return None if None in told else told[-1]

    def _read(self, step: int) -> None:
        assert self._mb_per_s is not None
        try:
            checkpoint = manifest.at(manifest.folder_of(self._run_dir, step))
            parts = dict.fromkeys(map(manifest.part_of, checkpoint.manifest.get("files", ())))
            away = manifest.elsewhere(checkpoint).keys() - stores.lost(self._run_dir, checkpoint)
            here = [part for part in parts if part not in away]
            read = functools.partial(
                second_reading.read_again, checkpoint, here, mb_per_s=self._mb_per_s
            )
            done = read(pause=self._pause)
            if done.status == second_reading.DAMAGED:
                self._wait(AGAIN_S)  # what a disk or a server cannot give for a moment is no damage
                done = read(pause=self._pause)
        except StoppedError:
            return
        except (OSError, HolmesError) as error:
            self._say(f"warning: the checkpoint after step {step} is not read again: {error}")
            return
        if done.status == second_reading.DAMAGED:
            self.damaged(step)
            self._say(
                f"ALARM: the checkpoint after step {step} is damaged in {self._run_dir}: "
                f"{done.last_line}; see that disk, and keep an older checkpoint"
            )
        elif done.status != 0:
            why = done.last_line or f"status {done.status}"
            self._say(f"warning: the checkpoint after step {step} is not read again: {why}")

    def _wait(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self._pause(LOOK_S)

    def _pause(self, seconds: float) -> None:
        if self._is_closed:
            raise StoppedError
        time.sleep(seconds)
