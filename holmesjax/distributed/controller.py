"""The controller of a job, and its members: how processes start, agree and hear of failures.

`messages` has the records that a member and the controller send each other. A message of a member
also says what the member does, and what it waits for.

The controller runs in the launcher. It needs no JAX, and carries scalars and words only: arrays go
from process to process (`tcp`). An end that hears nothing for the heartbeat timeout, or whose
connection closes, knows that the other is gone.
"""

import contextlib
import dataclasses
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from holmesjax import hung_main_thread
from holmesjax.distributed.messages import (
    FROM_CONTROLLER,
    PROTOCOL,
    Addresses,
    AskAddresses,
    AskBeat,
    AskClock,
    AskFiles,
    Beat,
    ClockReading,
    Compiled,
    ControllerHello,
    Done,
    Files,
    Heartbeat,
    JobStart,
    Lost,
    MemberHello,
    Mistake,
    ProcessEvent,
    Ready,
    Refused,
    Silent,
    Standing,
    Stop,
    Up,
    Verdict,
    Vote,
    Warned,
    decode_of_member,
    encode_of_member,
)
from holmesjax.errors import HolmesError, PeerError
from holmesjax.plan.processes import Process
from holmesjax.runtime.step_timeout import Progress, Work
from holmesjax.transport import connections
from holmesjax.transport.admission import Admission
from holmesjax.transport.connection_loop import ConnectionLoop, LoopConnection
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Message, R, Record, decode, encode

BEATS = 4  # in the time that an end may be silent
CLOCKS = 16  # questions for the time that count
FIRST_CLOCKS = 8  # of them in the beginning
CLOCK_PAUSE_S = 4.0  # at most between these, so that members do not ask all at once
ADVANCE_S = 1.0  # between two words about a start
NOBODY = -1  # no process of the job


def differences(about: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describes what two ends disagree on, with both values; None if they agree.

    >>> differences({"plan": "ab", "jax": "0.10.2"}, {"plan": "cd", "jax": "0.10.2"})
    'its plan is cd, not ab'
    """
    differ = [name for name in about if theirs.get(name) != about[name]]
    return ", ".join(f"its {n} is {theirs.get(n)}, not {about[n]}" for n in differ) or None


@dataclass
class _Seat:
    """The controller's record of one member."""

    process: Process
    connection: LoopConnection | None = None
    status: str = "had not come"
    work: Work = "step"
    step: int = 0  # that it is at, or has validated or saved after
    num_begun: int = 0  # steps, batches of validation and checkpoints
    num_done: int = 0  # programs and layers, before the first step
    addresses: dict[str, Any] | None = None
    unproven: str | None = None  # what the attention kernels lack on its host


class Controller:
    """The launcher's end; a context manager.

    Args:
      processes: who is expected.
      address, port: where to listen; one named address.
      about: what every member's hello must say of plan and versions.
      resume: the step that all members resume; 0: none.
      key: of the job.
      heartbeat_timeout_s: how long a member may be silent.
      is_saving: asked once about each step, when all have voted on it.
      progress: told of all progress.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        address: str,
        port: int,
        about: Mapping[str, Any],
        resume: int,
        key: bytes,
        heartbeat_timeout_s: float,
        is_saving: Callable[[int], bool],
        progress: Progress,
    ):
        self.events: queue.Queue[ProcessEvent] = queue.Queue()
        self._seats = [_Seat(process) for process in processes]
        self._num_stages = 1 + max(process.stage for process in processes)
        self._about = {**about, "protocol": PROTOCOL}
        self._resume, self._timeout_s = resume, heartbeat_timeout_s
        self._is_saving, self._progress = is_saving, progress
        self._votes: dict[int, set[int]] = {}  # step -> stages
        self._num_ready = 0
        self._stopping = False
        self._closed = threading.Event()
        sock = connections.listen(address, port)
        self.address = connections.address_of(sock)
        self._seat_of: dict[LoopConnection, _Seat] = {}
        self._loop = ConnectionLoop(self._hear_connection, self._lose, heartbeat_timeout_s)
        self._admission = Admission(
            sock,
            key=key,
            hello=ControllerHello(),
            expected=MemberHello,
            check=self._check,
            enter=self._enter,
            num_callers=len(processes),
            warn=lambda text: self.events.put(ProcessEvent(NOBODY, Warned(text=text))),
        )
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._admission.close()
        self._loop.close()
        self._keeper.join()

    def stop(self) -> None:
        """Lets all members end after the same step, the next on which they vote."""
        self._stopping = True

    def broadcast(self, record: Record) -> None:
        data = connections.pack(encode(record))
        for seat in self._seats:
            if seat.connection:
                seat.connection.send(data)

    def send(self, process: int, record: Record) -> None:
        if connection := self._seats[process].connection:
            connection.send(connections.pack(encode(record)))

    def refuse(self, error: HolmesError) -> None:
        """Tells all members of a mistake; each ends with it."""
        self.broadcast(Mistake(**error.parts()))

    def status(self, process: int) -> str:
        """Returns the last status of a member: what it does, or waits for."""
        return self._seats[process].status

    def position(self, process: int) -> tuple[int, int]:
        """Returns how far a member has come, for comparison: its step, and the work in it."""
        seat = self._seats[process]
        return seat.step, get_args(Work).index(seat.work)

    def overdue(self) -> dict[int, float]:
        """Returns the seconds of silence of each connected member that has missed two heartbeats.

        A member that merely answers late is not among them.
        """
        now_s = time.monotonic()
        return {
            seat.process.number: now_s - seat.connection.heard_s
            for seat in self._seats
            if seat.connection
            and not seat.connection.is_over
            and now_s - seat.connection.heard_s > 2 * self._timeout_s / BEATS
        }

    def _check(self, hello: MemberHello) -> str | None:
        number = hello.process
        if not 0 <= number < len(self._seats):
            return f"the job has {len(self._seats)} processes, and it is number {number}"
        seat = self._seats[number]
        reason = differences(self._about, {**hello.about, "protocol": hello.protocol})
        if reason is None and seat.connection is not None:
            reason = f"number {number}, {seat.process.name}, is here already"
        if reason is not None:
            self.events.put(ProcessEvent(number, Refused(reason=reason)))
        return reason

    def _enter(self, connection: Connection[MemberHello]) -> None:
        seat = self._seats[connection.hello.process]
        if seat.connection is not None:  # two have come at once
            connection.close()
            return
        seat.status = "was starting"
        self._progress.note()
        seat.connection = LoopConnection(connection)
        self._seat_of[seat.connection] = seat
        self._loop.add(seat.connection)

    def _lose(self, connection: LoopConnection, error: Exception) -> None:
        silence = Silent(silent_s=self._timeout_s)
        self._note(self._seat_of[connection], silence if _is_silence(error) else Lost())

    def _note(self, seat: _Seat, record: Record) -> None:
        self.events.put(ProcessEvent(seat.process.number, record))

    def _hear_connection(self, connection: LoopConnection, message: Message) -> None:
        self._hear(self._seat_of[connection], *decode_of_member(message))

    def _hear(self, seat: _Seat, record: Record, standing: Standing) -> None:
        if standing.status is not None:
            seat.status = standing.status
        if standing.num_begun > seat.num_begun:
            seat.work, seat.step = standing.work, standing.at_step
            seat.num_begun = standing.num_begun
            self._progress.begin(seat.work, seat.step, seat.process.number)
        if isinstance(record, Ready | Compiled | Up | Done):
            self._progress.note()
        if standing.num_done > seat.num_done:
            seat.num_done = standing.num_done
            self._progress.note()
        match record:
            case Ready():
                self._num_ready += seat.addresses is None
                seat.addresses, seat.unproven = record.addresses, record.unproven
                if self._num_ready == len(self._seats):
                    self._start_all()
            case AskAddresses():
                found = [[number, self._addresses(number)["data"]] for number in record.of]
                self.send(seat.process.number, Addresses(found=found))
            case AskClock():
                answer = ClockReading(asked_s=record.asked_s, now_s=time.perf_counter())
                self.send(seat.process.number, answer)
            case Vote():
                self._count_vote(seat, record.step)
            case Stop():
                self.stop()
                self._note(seat, record)
            case Beat():
                pass
            case _:
                self._note(seat, record)

    def _addresses(self, process: int) -> dict[str, Any]:
        found = self._seats[process].addresses
        assert found is not None, f"process {process} has not said where it listens"
        return found

    def _count_vote(self, seat: _Seat, step: int) -> None:
        votes = self._votes.setdefault(step, set())
        votes.add(seat.process.stage)
        if len(votes) == self._num_stages:
            del self._votes[step]
            verdict = Verdict(step=step, stop=self._stopping, save=self._is_saving(step))
            self.broadcast(verdict)

    def _start_all(self) -> None:
        """Tells each stage where its coordinator listens: the same words for all of a stage.

        One member that cannot use the attention kernels speaks for its stage: its members would
        compile different programs otherwise.
        """
        coordinators = {
            seat.process.stage: self._addresses(seat.process.number)["coordinator"]
            for seat in self._seats
            if seat.process.leads
        }
        unproven: dict[int, str | None] = {}
        for seat in self._seats:
            stage = seat.process.stage
            unproven[stage] = unproven.get(stage) or seat.unproven
        words = {
            stage: connections.pack(
                encode(
                    JobStart(coordinator=coordinator, resume=self._resume, unproven=unproven[stage])
                )
            )
            for stage, coordinator in coordinators.items()
        }
        for seat in self._seats:
            if seat.connection:
                seat.connection.send(words[seat.process.stage])

    def _keep(self) -> None:
        while not self._closed.wait(self._timeout_s / BEATS):
            progress = self._progress
            self.broadcast(Heartbeat(num_noted=progress.num_noted, limit_s=progress.limit_s))


def _is_silence(error: Exception) -> bool:
    return isinstance(error, TimeoutError)


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
      on_loss: called, from another thread, when the controller is gone or ends the job.
    """

    process: Process
    address: str
    port: int
    key: bytes
    about: Mapping[str, Any]
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
        self._connection = connections.connect(
            self.address,
            self.port,
            key=self.key,
            hello=MemberHello(
                process=self.process.number, about=dict(self.about), protocol=PROTOCOL
            ),
            expected=ControllerHello,
            check=lambda hello: None,
            where=f"{self.process.name} to the controller",
            timeout_s=self.start_timeout_s,
        )
        self._connection.sock.settimeout(self.timeout_s)
        self._closed = threading.Event()
        for run in (self._listen, self._beat):
            threading.Thread(target=run, name="member", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def status(self, text: str) -> None:
        """Notes what this process waits for; each message carries it."""
        self._status = text

    def send(self, record: Record) -> None:
        """Sends a record with this process's standing. Raises OSError if the controller is gone."""
        standing = dataclasses.replace(self._standing, status=self._status)
        self._connection.send(encode_of_member(record, standing))

    def begin(self, work: Work, step: int) -> None:
        """Reports at once what this process begins."""
        with self._advancing:
            num_begun = self._standing.num_begun + 1
            self._standing = dataclasses.replace(
                self._standing, work=work, at_step=step, num_begun=num_begun
            )
        self.send(Beat())

    def advance(self) -> None:
        """Counts a part of a start: a program is compiled, or a layer is drawn. From any thread.

        The count goes with the next message; at once if the last report is a second old.
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
        self, digests: Mapping[str, str], source: str, files: Mapping[str, str]
    ) -> None:
        """Reports that this process is ready to train, and its data; `files` only if asked."""
        self._files = list(files.items())
        self.send(Compiled(digests=dict(digests), source=source))

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

    def vote(self, step: int) -> None:
        """Reports, for its stage, that the end of this step is near."""
        if self.process.leads:
            self.send(Vote(step=step))

    def verdict(self, step: int) -> Verdict:
        """Waits for all votes, and returns the verdict."""
        verdict = self.wait_for(Verdict)
        assert verdict.step == step, f"the verdict of step {verdict.step} in step {step}"
        return verdict

    def _listen(self) -> None:
        while True:
            try:
                record = decode(self._connection.receive(), FROM_CONTROLLER)
            except (OSError, ValueError) as error:
                if not self._closed.is_set():
                    silent = isinstance(error, TimeoutError)
                    self.on_loss(
                        PeerError(
                            f"{self.process.name} to the controller",
                            "the process that started this job is gone",
                            found=f"silent for {self.timeout_s:g} s" if silent else str(error),
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
                self.on_loss(
                    HolmesError(record.where, record.problem, found=record.found, fix=record.fix)
                )
                return False
            case ClockReading():
                self.clock.hear(record.asked_s, record.now_s, time.perf_counter())
            case AskFiles():
                files = self._files[record.first : record.first + record.count]
                with contextlib.suppress(OSError):
                    self.send(Files(files=files))
            case AskBeat():
                if record.stacks:
                    hung_main_thread.write_stacks()
                with contextlib.suppress(OSError):
                    self.send(Beat())
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
