"""A member of a job: a process's end of its connection with the `controller`."""

import contextlib
import dataclasses
import math
import queue
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holmesjax.distributed.member_link import MemberLink
from holmesjax.distributed.messages import (
    BEATS,
    FROM_CONTROLLER,
    PROTOCOL,
    Addresses,
    AskAddresses,
    AskBeat,
    AskClock,
    AskFiles,
    Beat,
    Bye,
    ClockReading,
    Compiled,
    Files,
    Heartbeat,
    MemberHello,
    Mistake,
    Standing,
    Verdict,
    Vote,
    encode_of_member,
)
from holmesjax.errors import HolmesError, PeerError
from holmesjax.liveness import hung_main_thread
from holmesjax.plan.processes import Process
from holmesjax.runtime.step_timeout import Activity
from holmesjax.transport.records import R, Record, decode

CLOCKS = 16  # questions for the time that count
FIRST_CLOCKS = 8  # of them in the beginning
CLOCK_PAUSE_S = 4.0  # at most between these, so that members do not ask all at once
ADVANCE_S = 1.0  # between two words about a start


class ClockOffset:
    """The lead of the controller's clock over this process's, from questions and answers.

    The answer with the shortest round trip counts. Its error is half of the difference between the
    two ways. Old answers do not count, since clocks drift apart.
    """

    def __init__(self) -> None:
        self._found: deque[tuple[float, float]] = deque(maxlen=CLOCKS)  # round trip, offset

    def hear(self, asked_s: float, now_s: float, heard_s: float) -> None:
        """Takes an answer: the times of question and answer on this clock, and the other's time.

        >>> clock = ClockOffset()
        >>> clock.hear(1.0, 15.2, 1.4), clock.hear(2.0, 16.9, 3.0)
        (None, None)
        >>> clock.offset_s
        14.0
        """
        self._found.append((heard_s - asked_s, now_s - (asked_s + heard_s) / 2))

    @property
    def offset_s(self) -> float:
        return min(self._found)[1] if self._found else 0.0


@dataclass
class Member:
    """A process's end of its connection with the controller; connects when it is made.

    Args:
      process: who this is.
      address, port: of the controller.
      about: this process's plan and versions.
      computing: `computing.facts` of this process.
      on_loss: called, from another thread, when the controller is gone or ends the job.
    """

    process: Process
    address: str
    port: int
    key: bytes
    about: Mapping[str, Any]
    computing: Mapping[str, str]
    timeout_s: float
    start_timeout_s: float
    on_loss: Callable[[HolmesError], None]
    _inbox: "queue.Queue[Record]" = field(default_factory=queue.Queue)
    _status: str = "was starting"
    _standing: Standing = field(default_factory=Standing)  # but for its status
    _advanced_s: float = 0.0  # when that was told
    _advancing: threading.Lock = field(default_factory=threading.Lock)
    _num_noted: int = -1  # signs of progress, as the controller has told last
    _noted_s: float = 0.0  # when that was news
    _patience_s: float = math.inf  # until the next
    _files: list[tuple[str, str]] = field(default_factory=list)
    clock: "ClockOffset" = field(default_factory=lambda: ClockOffset())

    def __post_init__(self) -> None:
        self._link = MemberLink(
            self.address,
            self.port,
            key=self.key,
            hello=MemberHello(
                process=self.process.number,
                about=dict(self.about),
                computing=dict(self.computing),
                protocol=PROTOCOL,
                session=secrets.token_hex(8),
            ),
            where=f"{self.process.name} to the controller",
            timeout_s=self.timeout_s,
            start_timeout_s=self.start_timeout_s,
        )
        self._closed = threading.Event()
        self.is_over = threading.Event()  # nothing more is heard of the controller
        self.is_refused = False  # for good: it was told of a mistake
        for run in (self._listen, self._beat):
            threading.Thread(target=run, name="member", daemon=True).start()

    @property
    def session(self) -> str:
        """The name of this start of the job, the same in all processes and in no other start."""
        return self._link.session

    @property
    def noted_s(self) -> float:
        """When this process has heard that the job makes progress, by `time.monotonic`."""
        return self._noted_s

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):  # it has closed first
                self.send(Bye())
            self._link.close()

    def status(self, text: str) -> None:
        """Notes what this process waits for; each message carries it."""
        self._status = text

    def send(self, record: Record) -> None:
        """Sends a record with this process's standing. Raises OSError if the controller is gone."""
        standing = dataclasses.replace(self._standing, status=self._status)
        self._link.send(encode_of_member(record, standing))

    def begin(self, work: Activity, step: int) -> None:
        """Reports at once what this process begins."""
        with self._advancing:
            num_begun = self._standing.num_begun + 1
            self._standing = dataclasses.replace(
                self._standing, work=work, at_step=step, num_begun=num_begun
            )
        self.send(Beat())

    def advance(self) -> None:
        """Counts a part of what takes long: a program that is compiled, bytes that have come.

        From any thread. The count goes with the next message; at once if the last report is a
        second old.
        """
        with self._advancing:
            num_done = self._standing.num_done + 1
            self._standing = dataclasses.replace(self._standing, num_done=num_done)
            if time.monotonic() - self._advanced_s < ADVANCE_S:
                return
            self._advanced_s = time.monotonic()
        with contextlib.suppress(OSError):  # the listening thread says why
            self.send(Beat())

    def addresses(self, numbers: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Returns the addresses of some processes, by number, once all have come."""
        self.send(AskAddresses(of=list(numbers)))
        return dict(self.wait_for(Addresses, timeout_s).found)

    def send_compiled(
        self,
        digests: Mapping[str, str],
        source: str,
        files: Mapping[str, str],
        left_out: str = "",
    ) -> None:
        """Reports that this process is ready to train, and its data; `files` only if asked."""
        self._files = list(files.items())
        self.send(Compiled(digests=dict(digests), source=source, left_out=left_out))

    def wait_for(self, kind: type[R], timeout_s: float | None = None) -> R:
        """Returns the next record for the main thread, which must be of that kind.

        Without a `timeout_s` it waits while the job makes progress. Without progress it waits twice
        as long as the next sign of progress may take: the controller ends the job before.
        """
        try:
            message = self._next() if timeout_s is None else self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            if timeout_s is None:
                raise PeerError(
                    self.process.name,
                    f"has waited too long for the {kind.kind} of the launcher",
                    found=f"no progress for {time.monotonic() - self._noted_s:.0f} s",
                    fix="see what the launcher says, and start again from the last checkpoint",
                ) from None
            raise PeerError(
                self.process.name,
                f"the job has not started within {timeout_s:g} s",
                found="not all processes came",
                fix="start them all, or raise distributed.start_timeout_s",
            ) from None
        assert isinstance(message, kind), f"waited for {kind.kind}, heard {message}"
        return message

    def _next(self) -> Record:
        """Returns the next record. Raises queue.Empty if none comes and there is no progress."""
        self._noted_s = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=self.timeout_s / BEATS)
            if time.monotonic() - self._noted_s > self._patience_s:
                raise queue.Empty

    def vote(self, step: int, arrived: int = -1, opened: int = -1) -> None:
        """Reports, for its stage, that the end of this step is near.

        Args:
          step: the step.
          arrived: as in `Standing`; each process reports it, at once.
          opened: as in `Vote`.
        """
        with self._advancing:
            is_news = arrived != self._standing.arrived
            self._standing = dataclasses.replace(self._standing, arrived=arrived)
        if self.process.leads:
            self.send(Vote(step=step, opened=opened))
        elif is_news:
            self.send(Beat())

    def verdict(self, step: int) -> Verdict:
        """Waits for all votes, and returns the verdict."""
        verdict = self.wait_for(Verdict)
        assert verdict.step == step, f"the verdict of step {verdict.step} in step {step}"
        return verdict

    def _listen(self) -> None:
        while True:
            try:
                record = decode(self._link.receive(), FROM_CONTROLLER)
            except (OSError, ValueError) as error:
                self.is_over.set()
                if not self._closed.is_set():
                    self.on_loss(
                        PeerError(
                            f"{self.process.name} to the controller",
                            "the process that started this job is gone",
                            found=str(error),
                            fix="start the job again: it resumes from the last checkpoint",
                        )
                    )
                return
            if not self._take(record):
                return

    def _take(self, record: Record) -> bool:
        """Takes a record; returns whether to go on listening."""
        match record:
            case Heartbeat():
                if record.num_noted != self._num_noted:
                    self._num_noted, self._noted_s = record.num_noted, time.monotonic()
                self._patience_s = 2 * record.limit_s + self.timeout_s
            case Mistake():
                self.is_refused = True
                self.is_over.set()
                self.on_loss(
                    HolmesError(record.where, record.problem, found=record.found, fix=record.fix)
                )
                return False
            case ClockReading():
                self._link.delivered(record.received)
                self.clock.hear(record.asked_s, record.now_s, time.perf_counter())
            case AskFiles():
                files = self._files[record.first : record.first + record.count]
                with contextlib.suppress(OSError):
                    self.send(Files(files=files))
            case AskBeat():
                waits_in = hung_main_thread.waits_in()
                with contextlib.suppress(OSError):
                    self.send(Beat(answers=record.number, waits_in=waits_in))
                if record.stacks:  # then: standard error may take nothing
                    hung_main_thread.write_stacks()
            case _:
                self._inbox.put(record)
        return True

    def _beat(self) -> None:
        """Asks for the time regularly, which is a heartbeat too; more often in the beginning."""
        pauses_s = [random.uniform(0.0, CLOCK_PAUSE_S) for _ in range(FIRST_CLOCKS - 1)] + [0.0]
        beat_s = self.timeout_s / BEATS
        while not self._closed.wait(min(pauses_s.pop(), beat_s) if pauses_s else beat_s):
            with contextlib.suppress(OSError):  # the listening thread says why
                self.send(AskClock(asked_s=time.perf_counter()))
