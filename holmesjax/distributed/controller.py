"""How the processes of a job hear of each other: one controller, which all of them know.

    member -> controller    hello      number, plan, versions: compared before anything else
                            ready      the addresses where it listens
                            compiled   compiled and connected; the digests of the data it has read
                            files      the digests of some of its files
                            up         about to train
                            vote       it has dispatched most of a step (leaders only)
                            part       what it measured in a step
                            saved      the files of a checkpoint's part (leaders only)
                            unsaved    why its part of a checkpoint could not be written
                            failed     why it gives up, and the exit status that goes with it
                            stop       asks that all stop, because of a signal
                            done       it has trained to the end
                            addresses  asks where some processes listen
                            clock      asks what time it is
                            beat       it lives; with this, as with all others, comes what it is
                                       at, and what it is waiting for
    controller -> member    start      all are there; where its stage's coordinator listens
                            addresses  where those that it has named listen
                            clock      what time it is
                            files      asks for these (`data_agreement`)
                            go         everybody has compiled and read the same data
                            refused    a mistake that ends the job, for all processes
                            verdict    whether to save or stop after a step
                            tell       asks for a beat at once, and for the stacks of all threads
                                       in the log where the job is given up for want of progress
                            end        everybody is done
                            beat       it lives, and has heard of so much progress

The controller runs in the launcher. It needs no JAX, and carries scalars and words only: arrays go
from process to process (`tcp`). Either end that hears nothing for the heartbeat timeout, or whose
connection closes, knows that the other is gone.
"""

import contextlib
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from holmesjax import lifeline
from holmesjax.errors import HolmesError, PeerError
from holmesjax.plan.processes import Process
from holmesjax.runtime.progress import Progress, Work
from holmesjax.transport import connections
from holmesjax.transport.admission import Admission
from holmesjax.transport.connection_loop import ConnectionLoop, LoopConnection
from holmesjax.transport.connections import Connection, Message

BEATS = 4  # in the time that an end may be silent
CLOCKS = 16  # questions for the time that count
FIRST_CLOCKS = 8  # of them in the beginning
CLOCK_PAUSE_S = 4.0  # at most between these, so that members do not ask all at once
ADVANCE_S = 1.0  # between two words about a start
NOBODY = -1  # no process of the job


def differences(about: Message, theirs: Message) -> str | None:
    """What two ends that must agree disagree on, with both values.

    >>> differences({"plan": "ab", "jax": "0.10.2"}, {"plan": "cd", "jax": "0.10.2"})
    'its plan is cd, not ab'
    """
    differ = [name for name in about if theirs.get(name) != about[name]]
    return ", ".join(f"its {n} is {theirs.get(n)}, not {about[n]}" for n in differ) or None


class ProcessEvent(NamedTuple):
    """What the launcher hears."""

    process: int  # NOBODY for what the controller itself has to say, a "warning"
    kind: str  # of a member's message; or its connection was "lost", or "silent", or "refused"
    message: Message


@dataclass
class _Seat:
    """What the controller knows of one member."""

    process: Process
    connection: LoopConnection | None = None
    status: str = "had not come"
    work: Work = "step"
    step: int = 0  # that it is at, or has validated or saved after
    num_begun: int = 0  # steps, batches of validation and checkpoints
    num_done: int = 0  # programs and layers, before the first step
    addresses: Any = None


class Controller:
    """The launcher's end; a context manager.

    Args:
      processes: who is expected.
      address, port: where to listen; one named address.
      about: what every member's hello must say of plan and versions.
      start: what all members are told when all are there, besides their coordinators.
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
        about: Message,
        start: Message,
        key: bytes,
        heartbeat_timeout_s: float,
        is_saving: Callable[[int], bool],
        progress: Progress,
    ):
        self.events: queue.Queue[ProcessEvent] = queue.Queue()
        self._seats = [_Seat(process) for process in processes]
        self._num_stages = 1 + max(process.stage for process in processes)
        self._about, self._start, self._timeout_s = about, start, heartbeat_timeout_s
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
            hello={"controller": True},
            check=self._check,
            enter=self._enter,
            expected=len(processes),
            warn=lambda text: self.events.put(ProcessEvent(NOBODY, "warning", {"text": text})),
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
        """All members end after the same step, the next on which they vote."""
        self._stopping = True

    def broadcast(self, message: Message) -> None:
        data = connections.encode(message)
        for seat in self._seats:
            if seat.connection:
                seat.connection.send(data)

    def send(self, process: int, message: Message) -> None:
        if connection := self._seats[process].connection:
            connection.send(connections.encode(message))

    def refuse(self, error: HolmesError) -> None:
        """Tells all members of a mistake; each ends with it."""
        self.broadcast({"kind": "refused", **error.parts()})

    def status(self, process: int) -> str:
        """What a member said last of what it is waiting for."""
        return self._seats[process].status

    def position(self, process: int) -> tuple[int, int]:
        """How far a member has come: its step, and which work of it. To be compared."""
        seat = self._seats[process]
        return seat.step, get_args(Work).index(seat.work)

    def overdue(self) -> dict[int, float]:
        """Connected members that have missed two heartbeats: for each the seconds of its silence.

        One that merely answers late is none of them.
        """
        now_s = time.monotonic()
        return {
            seat.process.number: now_s - seat.connection.heard_s
            for seat in self._seats
            if seat.connection
            and not seat.connection.is_over
            and now_s - seat.connection.heard_s > 2 * self._timeout_s / BEATS
        }

    def _check(self, hello: Message) -> str | None:
        number = hello.get("process")
        if not isinstance(number, int) or not 0 <= number < len(self._seats):
            return f"the job has {len(self._seats)} processes, and it is number {number}"
        seat = self._seats[number]
        reason = differences(self._about, hello)
        if reason is None and seat.connection is not None:
            reason = f"number {number}, {seat.process.name}, is here already"
        if reason is not None:
            self.events.put(ProcessEvent(number, "refused", {"reason": reason}))
        return reason

    def _enter(self, connection: Connection) -> None:
        seat = self._seats[connection.hello["process"]]
        if seat.connection is not None:  # two have come at once
            connection.close()
            return
        seat.status = "was starting"
        self._progress.note()
        seat.connection = LoopConnection(connection)
        self._seat_of[seat.connection] = seat
        self._loop.add(seat.connection)

    def _lose(self, connection: LoopConnection, error: Exception) -> None:
        if isinstance(error, TimeoutError):
            self._tell(self._seat_of[connection], "silent", {"silent_s": self._timeout_s})
        else:
            self._tell(self._seat_of[connection], "lost", {})

    def _tell(self, seat: _Seat, kind: str, message: Message) -> None:
        self.events.put(ProcessEvent(seat.process.number, kind, message))

    def _hear_connection(self, connection: LoopConnection, message: Message) -> None:
        self._hear(self._seat_of[connection], message)

    def _hear(self, seat: _Seat, message: Message) -> None:
        kind = message["kind"]
        seat.status = message.get("status", seat.status)
        if message.get("num_begun", 0) > seat.num_begun:
            seat.work, seat.step = message["work"], message["at_step"]
            seat.num_begun = message["num_begun"]
            self._progress.begin(seat.work, seat.step, seat.process.number)
        if kind in ("ready", "compiled", "up", "done"):
            self._progress.note()
        if message.get("num_done", 0) > seat.num_done:
            seat.num_done = message["num_done"]
            self._progress.note()
        if kind == "ready":
            self._num_ready += seat.addresses is None
            seat.addresses = message["addresses"]
            if self._num_ready == len(self._seats):
                self._start_all()
        elif kind == "addresses":
            found = {number: self._seats[number].addresses["data"] for number in message["of"]}
            self.send(seat.process.number, {"kind": kind, "found": list(found.items())})
        elif kind == "clock":
            now_s = time.perf_counter()
            self.send(
                seat.process.number, {"kind": kind, "asked_s": message["asked_s"], "now_s": now_s}
            )
        elif kind == "vote":
            step = message["step"]
            votes = self._votes.setdefault(step, set())
            votes.add(seat.process.stage)
            if len(votes) == self._num_stages:
                del self._votes[step]
                verdict = {"stop": self._stopping, "save": self._is_saving(step)}
                self.broadcast({"kind": "verdict", "step": step, **verdict})
        elif kind == "stop":
            self.stop()
            self._tell(seat, kind, message)
        elif kind != "beat":
            self._tell(seat, kind, message)

    def _start_all(self) -> None:
        """Tells each stage where its coordinator listens: the same words for all of a stage."""
        coordinators = {
            seat.process.stage: seat.addresses["coordinator"]
            for seat in self._seats
            if seat.process.leads
        }
        words = {
            stage: connections.encode({"kind": "start", "coordinator": coordinator, **self._start})
            for stage, coordinator in coordinators.items()
        }
        for seat in self._seats:
            if seat.connection:
                seat.connection.send(words[seat.process.stage])

    def _keep(self) -> None:
        while not self._closed.wait(self._timeout_s / BEATS):
            signs = {"num_noted": self._progress.num_noted, "limit_s": self._progress.limit_s}
            self.broadcast({"kind": "beat", **signs})


class ClockOffset:
    """How far the controller's clock is ahead of this process's, from questions and answers.

    The answer that came back soonest counts: it is off by half of what its way there took longer
    than its way back. Old answers do not count, since clocks drift apart.
    """

    def __init__(self) -> None:
        self._found: deque[tuple[float, float]] = deque(maxlen=CLOCKS)  # round trip, offset

    def hear(self, asked_s: float, now_s: float, heard_s: float) -> None:
        """Takes an answer: when it was asked and heard on this clock, and what the other said.

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


class Verdict(NamedTuple):
    """The decisions that all processes follow after a step."""

    stop: bool  # whether to end after this step
    save: bool  # whether to write a checkpoint after it


@dataclass
class Member:
    """A process's end; connects when it is made.

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
    about: Message
    timeout_s: float
    start_timeout_s: float
    on_loss: Callable[[HolmesError], None]
    _inbox: "queue.Queue[Message]" = field(default_factory=queue.Queue)
    _status: str = "was starting"
    _at: Message = field(default_factory=dict)  # what it is at
    _num_done: int = 0  # of what a start consists of
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
            hello={"process": self.process.number, **self.about},
            check=lambda hello: None if hello.get("controller") else "it is no controller",
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
        """Notes what this process waits for: told with each beat, and when somebody is lost."""
        self._status = text

    def tell(self, kind: str, **content: Any) -> None:
        signs = {**self._at, "num_done": self._num_done}
        self._connection.send({"kind": kind, "status": self._status, **signs, **content})

    def begin(self, work: Work, step: int) -> None:
        """Tells what this process begins: at once, or it would be news when it is long ago."""
        num_begun = self._at.get("num_begun", 0) + 1
        self._at = {"work": work, "at_step": step, "num_begun": num_begun}
        self.tell("beat")

    def advance(self) -> None:
        """Something that a start consists of is done: a program is compiled, a layer is drawn.

        Told with what comes next, and at once where that is a second ago. From any thread.
        """
        with self._advancing:
            self._num_done += 1
            if time.monotonic() - self._advanced_s < ADVANCE_S:
                return
            self._advanced_s = time.monotonic()
        with contextlib.suppress(OSError):  # the listening thread says why
            self.tell("beat")

    def addresses(self, numbers: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """The addresses of some processes, by their numbers; once all have come."""
        self.tell("addresses", of=list(numbers))
        return dict(self.wait_for("addresses", timeout_s)["found"])

    def tell_compiled(
        self, digests: Mapping[str, str], source: str, files: Mapping[str, str]
    ) -> None:
        """Says that this process could go, and what data it has read; `files` if it is asked."""
        self._files = list(files.items())
        self.tell("compiled", digests=digests, source=source)

    def wait_for(self, kind: str, timeout_s: float | None = None) -> Message:
        """The next message of the controller, which must be of that kind.

        Without a `timeout_s` it waits while the job makes progress, and then for twice as long as
        the next sign of it may take: the controller should have ended the job by then.
        """
        try:
            message = self._next() if timeout_s is None else self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            if timeout_s is None:
                raise PeerError(
                    self.process.name,
                    f"has waited too long for the {kind} of the launcher",
                    found=f"no progress for {time.monotonic() - self._noted_s:.0f} s",
                    fix="see what the launcher says, and start again from the last checkpoint",
                ) from None
            raise PeerError(
                self.process.name,
                f"the job has not started within {timeout_s:g} s",
                found="not all processes came",
                fix="start them all, or raise distributed.start_timeout_s",
            ) from None
        assert message["kind"] == kind, f"waited for {kind}, heard {message['kind']}"
        return message

    def _next(self) -> Message:
        """Raises queue.Empty where none comes and there is no progress."""
        self._noted_s = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=self.timeout_s / BEATS)
            if time.monotonic() - self._noted_s > self._patience_s:
                raise queue.Empty

    def vote(self, step: int) -> None:
        """Says, for its stage, that the end of this step is near."""
        if self.process.leads:
            self.tell("vote", step=step)

    def verdict(self, step: int) -> Verdict:
        """What came of all votes; waits for them."""
        message = self.wait_for("verdict")
        assert message["step"] == step, f"the verdict of step {message['step']} in step {step}"
        return Verdict(message["stop"], message["save"])

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.receive()
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
            if message.get("num_noted", self._num_noted) != self._num_noted:
                self._num_noted, self._noted_s = message["num_noted"], time.monotonic()
            if "limit_s" in message:
                self._patience_s = 2 * message["limit_s"] + self.timeout_s
            if message["kind"] == "refused":
                parts = {name: message[name] for name in ("where", "problem", "found", "fix")}
                self.on_loss(HolmesError(**parts))
                return
            if message["kind"] == "clock":
                self.clock.hear(message["asked_s"], message["now_s"], time.perf_counter())
            elif message["kind"] == "files":
                end = message["first"] + message["count"]
                with contextlib.suppress(OSError):
                    self.tell("files", files=self._files[message["first"] : end])
            elif message["kind"] == "tell":
                if message.get("stacks"):
                    lifeline.write_stacks()
                with contextlib.suppress(OSError):
                    self.tell("beat")
            elif message["kind"] != "beat":
                self._inbox.put(message)

    def _beat(self) -> None:
        """Beats, and asks for the time with each; a few times at once in the beginning."""
        pauses_s = [random.uniform(0.0, CLOCK_PAUSE_S) for _ in range(FIRST_CLOCKS - 1)] + [0.0]
        beat_s = self.timeout_s / BEATS
        while not self._closed.wait(min(pauses_s.pop(), beat_s) if pauses_s else beat_s):
            with contextlib.suppress(OSError):  # the listening thread says why
                self.tell("clock", asked_s=time.perf_counter())
