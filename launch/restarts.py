"""Limits how often a job starts again, by a record of its starts in the run folder.

    restarts.json    one entry for each start: the step it began after, how it ended, and why

A restart counts while it brings no new step. A start that begins after a later step than the one
before it, from a checkpoint that was committed in between, sets the count back to zero. A job that
was asked to stop has not failed, and does not count.

A start that fails before its first step with the exception of the start before it is the last one,
if nothing outside of the process can have caused the exception: the next would fail so, too.

The record outlives the launcher, so whoever starts the launcher again (itself, Slurm, Kubernetes, a
person) shares one count. Once that is spent the job ends with status 1, which no scheduler takes
for "start me again"; the next start is then a person's, and counts from zero. A run folder at a URL
has the record there, too: the next launcher may come on another machine, whose folder is empty.
"""

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holmesjax.checkpoints.mirror import Mirror
from holmesjax.errors import REQUEUE, FatalError
from holmesjax.files import json_text, run_folder
from holmesjax.files.whole_files import write_whole
from launch.process_logs import LOGS

RECORD = run_folder.RESTARTS
DEFAULT = 3  # restarts without a new step
KEPT = 100  # entries, or as many as the limit needs
PUBLISHED_S = 5.0  # for a copy at a URL, which holds up neither a start nor an end for longer
ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, which no other process has
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0


@dataclass(frozen=True, kw_only=True)
class StartEntry:
    """One start of all processes."""

    step: int  # optimizer steps that were done before it
    status: int | None = None  # exit status; None: it runs, or its launcher was killed
    stopped: bool = False  # somebody asked for the end, or the run goes back from a spike
    node: str = ""  # where the cause of the end was
    cause: str = ""  # the error as it was printed
    exception: str = ""  # before the first step, if nothing outside of the process can cause it


class Restarts:
    """The record of one run folder.

    Args:
      limit: restarts without a new step that a job may have.
      warn: told of a record that cannot be read or written, which ends no job.
      mirror: the copy of the run folder at a URL, if it has one.
    """

    def __init__(
        self,
        run_dir: Path,
        limit: int,
        warn: Callable[[str], object],
        mirror: Mirror | None = None,
    ):
        self._path, self._warn, self.limit = run_dir / RECORD, warn, limit
        self._mirror = mirror
        self._newest, self._publishing = "", threading.Lock()
        self._starts = self._read()

    @property
    def last_step(self) -> int | None:
        """The step after which the newest start began; None before the first."""
        return self._starts[-1].step if self._starts else None

    def failed(self, step: int) -> list[StartEntry]:
        """Returns the failed starts since a new step, up to `step`; the newest is last."""
        found: list[StartEntry] = []
        for start in reversed(self._starts):
            if start.stopped:
                continue
            if start.step < step or start.status not in (REQUEUE, None):
                break
            found.insert(0, start)
        return found

    def is_spent(self, step: int) -> bool:
        """Whether a job that has done `step` steps has no restart left, or has no use for one."""
        return len(self.failed(step)) > self.limit or self._repeats(step)

    def _repeats(self, step: int) -> bool:
        """Whether the last two starts failed in the same way, and nothing outside can be why."""
        exceptions = [ADDRESS.sub("", start.exception) for start in self.failed(step)[-2:]]
        return len(exceptions) == 2 and exceptions[0] == exceptions[1] != ""

    def pause_s(self, step: int) -> float:
        """Returns the pause before the next start: longer each time, and none after a new step."""
        num_failed = len(self.failed(step))
        doubled = min(num_failed - 1, 30)  # a float has no place for so many
        return min(FIRST_PAUSE_S * 2**doubled, LONGEST_PAUSE_S) if num_failed else 0.0

    def begin(self, step: int) -> None:
        """Notes a start after `step` steps."""
        self._starts = [*self._starts, StartEntry(step=step)][-max(KEPT, self.limit + 2) :]
        self._write()

    def end(
        self,
        status: int,
        *,
        stopped: bool = False,
        node: str = "",
        cause: str = "",
        exception: str = "",
    ) -> None:
        """Notes how the newest start ended.

        Args:
          status, stopped, node, cause, exception: as in `StartEntry`.
        """
        self._replace(status=status, stopped=stopped, node=node, cause=cause, exception=exception)

    def give_up(self, step: int) -> FatalError:
        """Ends the count; returns the error of a job that may not start again."""
        failed, repeats = self.failed(step), self._repeats(step)
        self._replace(status=FatalError.exit_status, stopped=False)
        if repeats:
            return FatalError(
                str(self._path.parent),
                "its last two starts have failed in the same way before their first step",
                found=_first_line(failed[-1]),
                fix="correct what it says: neither another process nor a network can be the cause; "
                f"the traceback is in {self._path.parent / LOGS}",
            )
        last = {start.node: start for start in failed}
        count = {node: sum(start.node == node for start in failed) for node in last}
        found = "; ".join(
            f"{node or 'no node'} ({count[node]} of {len(failed)}): {_first_line(last[node])}"
            for node in sorted(last, key=lambda node: -count[node])
        )
        return FatalError(
            str(self._path.parent),
            f"no new step since step {step}, in the last {len(failed)} of its starts",
            found=found,
            fix="repair these nodes or leave them out and start it again, or raise --max-restarts",
        )

    def _replace(self, **changes: object) -> None:
        self._starts[-1] = dataclasses.replace(self._starts[-1], **changes)  # type: ignore[arg-type]
        self._write()

    def _read(self) -> list[StartEntry]:
        try:
            starts = [StartEntry(**entry) for entry in json_text.read(self._path)["starts"]]
            if all(map(_is_entry, starts)):
                return starts
            raise ValueError("an entry has other values")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._warn(f"warning: {self._path} cannot be read, restarts count from zero: {error}")
            return []

    def _write(self) -> None:
        """Writes all entries; where that fails, they are in memory, and the next call tries again.

        The count of this launcher goes on. Whoever starts the next one counts from what was
        written.
        """
        starts = [dataclasses.asdict(start) for start in self._starts]
        content = json.dumps({"starts": starts}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, content)
        except OSError as error:  # a full disk ends no job
            self._warn(
                f"warning: {self._path} cannot be written, so restarts are counted in memory: "
                f"{error.strerror}"
            )
        if self._mirror:
            self._newest = content
            put = threading.Thread(target=self._publish, args=(self._mirror,), daemon=True)
            put.start()
            put.join(PUBLISHED_S)

    def _publish(self, mirror: Mirror) -> None:
        try:
            with self._publishing:
                mirror.put(RECORD, self._newest.encode())
        except Exception as error:  # whatever a client raises: it ends no job
            self._warn(
                f"warning: {mirror.url}/{RECORD} cannot be written, so another machine counts "
                f"fewer restarts: {error}"
            )


def _is_entry(start: StartEntry) -> bool:
    texts = (start.node, start.cause, start.exception)
    return (
        isinstance(start.step, int)
        and isinstance(start.status, int | None)
        and all(isinstance(text, str) for text in texts)
    )


def _first_line(start: StartEntry) -> str:
    if start.status is None:
        return "the launcher was killed, or its machine was lost"
    return start.cause.partition("\n")[0]
