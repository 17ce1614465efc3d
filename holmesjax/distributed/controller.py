"""The controller of a job: how its processes start, agree and hear of failures.

A `member` is the other end, and `messages` has the records that both send. A message of a member
also says what the member does, and what it waits for.

The controller runs in the launcher. It needs no JAX, and carries scalars and words only: arrays go
from process to process (`tcp`). An end that hears nothing for the heartbeat timeout knows that the
other is gone. A connection that is lost while both live is made anew (`member_link`).
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.distributed.member_records import Seat
from holmesjax.distributed.messages import (
    BEATS,
    PROTOCOL,
    TAKEN,
    Addresses,
    AskAddresses,
    AskBeat,
    AskClock,
    Beat,
    Bye,
    ClockReading,
    Compiled,
    ControllerHello,
    Done,
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
)
from holmesjax.distributed.store_hub import StoreHub
from holmesjax.errors import HolmesError
from holmesjax.hosts import computing
from holmesjax.plan.processes import Process
from holmesjax.runtime.step_timeout import Activity, Progress
from holmesjax.transport import connections
from holmesjax.transport.admission import Admission
from holmesjax.transport.connection_loop import ConnectionLoop, LoopConnection, SilentError
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Message, Record, encode
from holmesjax.transport.relayed import RelayedPort, RelayPlace

LOOK_S = 0.5  # between two looks for members that do not come back
NOBODY = -1  # no process of the job
NAME_AT_RELAY = "launcher"


def differences(about: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describes what two ends disagree on, with both values; None if they agree.

    >>> differences({"plan": "ab", "jax": "0.10.2"}, {"plan": "cd", "jax": "0.10.2"})
    'its plan is cd, not ab'
    """
    differ = [name for name in about if theirs.get(name) != about[name]]
    return ", ".join(f"its {n} is {theirs.get(n)}, not {about[n]}" for n in differ) or None


class Controller:
    """The launcher's end; a context manager.

    Args:
      processes: who is expected.
      address, port: where to listen; one named address.
      about: what every member's hello must say of plan and versions.
      resume: the step that all members resume; 0: none.
      key: of the job.
      silence_s: how long a member may be silent.
      is_saving: asked once about each step, when all have voted on it.
      progress: told of all progress.
      allow: names of `computing.facts` in which members may differ.
      hub: takes stores, and looks for what is resumed before the members start.
      checkpoint: what is resumed, for the hub.
      skipped: data that the run leaves out.
      relay: where members that cannot call this machine find it.
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
        silence_s: float,
        is_saving: Callable[[int], bool],
        progress: Progress,
        allow: Collection[str] = (),
        hub: StoreHub | None = None,
        checkpoint: Checkpoint | None = None,
        skipped: Sequence[Skipped] = (),
        relay: RelayPlace | None = None,
    ):
        self._hub, self._checkpoint, self._skipped = hub, checkpoint, skipped
        self.events: queue.Queue[ProcessEvent] = queue.Queue()
        self._session = secrets.token_hex(8)
        self._seats = [Seat(process) for process in processes]
        self._num_stages = 1 + max(process.stage for process in processes)
        self._about = {**about, "protocol": PROTOCOL}
        self._resume, self._timeout_s = resume, silence_s
        self._is_saving, self._progress = is_saving, progress
        self._votes: dict[int, dict[int, Vote]] = {}  # step -> stage -> its vote
        self._num_ready = self._num_asked = 0
        self._allow = allow
        self._comparing = threading.Lock()
        self._waiting: set[tuple[int, str]] = set()  # for a place, and the session of the caller
        self._first: dict[int | None, MemberHello] = {}  # of the job (None), and of each stage
        self._stopping = False
        self._closed = threading.Event()
        sock = connections.listen(address, port)
        self.address = connections.address_of(sock)
        self._seat_of: dict[LoopConnection, Seat] = {}
        self._loop = ConnectionLoop(self._hear_connection, self._lose, silence_s)
        self._admission = Admission(
            sock,
            key=key,
            hello=ControllerHello(session=self._session, store=hub.id if hub else None),
            expected=MemberHello,
            check=self._check,
            enter=self._enter,
            num_callers=len(processes),
            warn=self._warn,
        )
        self._relayed: RelayedPort | None = None
        if relay is not None:
            self._relayed = RelayedPort(
                relay, NAME_AT_RELAY, key=key, take=self._admission.bring, warn=self._warn
            )
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._relayed is not None:
            self._relayed.close()
        self._admission.close()
        self._loop.close()
        self._keeper.join()

    def _warn(self, text: str) -> None:
        self.events.put(ProcessEvent(NOBODY, Warned(text=text)))

    def stop(self) -> None:
        """Lets all members end after the same step, the next on which they vote."""
        self._stopping = True

    def broadcast(self, record: Record) -> None:
        data = connections.pack(encode(record))
        for seat in self._seats:
            seat.send(data)

    def send(self, process: int, record: Record) -> None:
        self._seats[process].send(connections.pack(encode(record)))

    def ask(self, *, stacks: bool = False) -> int:
        """Asks all members for a sign of life; returns the number of the question."""
        self._num_asked += 1
        self.broadcast(AskBeat(number=self._num_asked, stacks=stacks))
        return self._num_asked

    def unanswered(self, question: int) -> set[int]:
        """Returns the members that have not answered a question yet, and may still do so.

        Those that have missed two heartbeats are not among them, but among `overdue`. One whose
        connection has ended since its answer has to come back first.
        """
        overdue = self.overdue()
        return {
            seat.process.number
            for seat in self._seats
            if seat.is_here
            and (seat.is_away or not self.has_answered(seat.process.number, question))
            and seat.process.number not in overdue
        }

    def refuse(self, error: HolmesError) -> None:
        """Tells all members of a mistake; each ends with it."""
        self.broadcast(Mistake(**error.parts()))

    def status(self, process: int) -> str:
        """Returns the last status of a member: what it does, or waits for."""
        return self._seats[process].status

    def has_come(self, process: int) -> bool:
        """Whether a member has connected."""
        return self._seats[process].connection is not None

    def has_answered(self, process: int, question: int) -> bool:
        """Whether a member has answered a question of `ask`."""
        return self._seats[process].answered >= question

    def waits_in(self, process: int) -> str:
        """Returns where the main thread of a member waited when it answered, as `Beat` says."""
        return self._seats[process].waits_in

    def position(self, process: int) -> tuple[int, int]:
        """Returns how far a member has come, for comparison: its step, and the work in it."""
        seat = self._seats[process]
        return seat.step, get_args(Activity).index(seat.work)

    def overdue(self) -> dict[int, float]:
        """Returns the seconds of silence of each connected member that has missed two heartbeats.

        A member that merely answers late is not among them.
        """
        now_s = time.monotonic()
        return {
            seat.process.number: now_s - connection.heard_s
            for seat in self._seats
            if seat.is_open
            and (connection := seat.connection) is not None
            and now_s - connection.heard_s > 2 * self._timeout_s / BEATS
        }

    def _check(self, hello: MemberHello) -> str | None:
        if hello.store is not None:
            ours = {"protocol": PROTOCOL}
            is_unknown = self._hub is None and hello.store.serves  # or it asks whose it is
            unknown = "the launcher takes no stores" if is_unknown else None
            return unknown or differences(ours, {"protocol": hello.protocol})
        number = hello.process
        if not 0 <= number < len(self._seats):
            return f"the job has {len(self._seats)} processes, and it is number {number}"
        seat = self._seats[number]
        reason = differences(self._about, {**hello.about, "protocol": hello.protocol})
        is_new = hello.again is None
        if reason is None and not is_new:
            reason = seat.refuses(hello, self._session)
        elif reason is None and seat.connection is not None:
            reason = f"number {number}, {seat.process.name}, {TAKEN}"
        unlike: list[str] = []
        if reason is None and is_new:
            reason, unlike = self._unlike(hello)
        if reason is not None:
            refused = Refused(reason=reason, unlike=tuple(unlike))
            caller = (number, hello.session)  # who waits for a place calls again
            if not reason.endswith(TAKEN) or caller not in self._waiting:
                self.events.put(ProcessEvent(number, refused))
            if reason.endswith(TAKEN):
                self._waiting.add(caller)
        return reason

    def _unlike(self, hello: MemberHello) -> tuple[str | None, list[str]]:
        """Describes in what a member computes otherwise than the first, and names these facts."""
        stage = self._seats[hello.process].process.stage
        with self._comparing:
            firsts = [self._first.setdefault(key, hello) for key in (None, stage)]
        for first, same_stage in zip(firsts, (False, True), strict=True):
            ours, theirs = first.computing, hello.computing
            if names := computing.unlike(ours, theirs, same_stage=same_stage, allow=self._allow):
                differ = ", ".join(
                    f"its {name} is {theirs.get(name, 'not set')}, not {ours.get(name, 'unset')}"
                    for name in names
                )
                other = self._seats[first.process].process.name
                return f"{differ} as on {other}", names
        return None, []

    def _enter(self, connection: Connection[MemberHello]) -> None:
        if connection.hello.store is not None:
            if self._hub is None:
                connection.close()  # the hello has said that there is none
            else:
                self._hub.enter(connection)
            return
        seat = self._seats[connection.hello.process]
        if connection.hello.again is not None:
            self._go_on(seat, connection)
            return
        with seat.lock:
            if seat.connection is not None:  # two have come at once
                connection.close()
                return
            seat.status, seat.answered = "was starting", self._num_asked  # before it came
            seat.session = connection.hello.session
            seat.connection = LoopConnection(connection)
            self._seat_of[seat.connection] = seat
        self._progress.note()
        self._loop.add(seat.connection)

    def _go_on(self, seat: Seat, connection: Connection[MemberHello]) -> None:
        """Goes on with a member that has lost its connection."""
        with seat.lock:
            new = seat.go_on(connection)
            if new is None:
                connection.close()
                return
            self._seat_of[new] = seat
        self._loop.add(new)

    def _lose(self, connection: LoopConnection, error: Exception) -> None:
        seat = self._seat_of.pop(connection)
        if isinstance(error, SilentError):
            self._note(seat, Silent(silent_s=self._timeout_s))
        elif seat.lose(connection, error, self._timeout_s):
            self._note(seat, Lost())

    def _note(self, seat: Seat, record: Record) -> None:
        self.events.put(ProcessEvent(seat.process.number, record))

    def _hear_connection(self, connection: LoopConnection, message: Message) -> None:
        seat = self._seat_of[connection]
        record, standing = decode_of_member(message)
        with seat.lock:
            if connection is not seat.connection:
                return  # it sends this again over its new connection
            seat.received += 1
            seat.outbox.received(standing.received)
        self._hear(seat, record, standing)

    def _hear(self, seat: Seat, record: Record, standing: Standing) -> None:
        if standing.status is not None:
            seat.status = standing.status
        seat.arrived = standing.arrived
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
                    if self._hub:
                        self._hub.prepare(self._checkpoint, self._start_all)
                    else:
                        self._start_all()
            case AskAddresses():
                found = [[number, self._addresses(number)["data"]] for number in record.of]
                self.send(seat.process.number, Addresses(found=found))
            case AskClock():
                answer = ClockReading(
                    asked_s=record.asked_s, now_s=time.perf_counter(), received=seat.received
                )
                self.send(seat.process.number, answer)
            case Vote():
                self._count_vote(seat, record)
            case Stop():
                self.stop()
                self._note(seat, record)
            case Beat():
                if record.answers is not None:
                    seat.answered, seat.waits_in = record.answers, record.waits_in
            case Bye():
                seat.has_left = True
            case _:
                self._note(seat, record)

    def _addresses(self, process: int) -> dict[str, Any]:
        found = self._seats[process].addresses
        assert found is not None, f"process {process} has not said where it listens"
        return found

    def _count_vote(self, seat: Seat, vote: Vote) -> None:
        votes = self._votes.setdefault(vote.step, {})
        votes[seat.process.stage] = vote
        if len(votes) == self._num_stages:
            del self._votes[vote.step]
            verdict = Verdict(
                step=vote.step,
                stop=self._stopping,
                save=self._is_saving(vote.step),
                arrived=min(seat.arrived for seat in self._seats),
                opened=max(x.opened for x in votes.values()),
            )
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
                    JobStart(
                        coordinator=coordinator,
                        resume=self._resume,
                        unproven=unproven[stage],
                        in_memory=self._hub.in_memory() if self._hub else [],
                        skipped=[list(part) for part in self._skipped],
                    )
                )
            )
            for stage, coordinator in coordinators.items()
        }
        for seat in self._seats:
            seat.send(words[seat.process.stage])

    def _heartbeat(self) -> Heartbeat:
        progress = self._progress
        return Heartbeat(num_noted=progress.num_noted, limit_s=progress.limit_s)

    def _keep(self) -> None:
        beat_s = self._timeout_s / BEATS
        next_s = time.perf_counter() + beat_s
        while not self._closed.wait(min(LOOK_S, max(next_s - time.perf_counter(), 0.0))):
            for seat in self._seats:
                if seat.is_overdue():
                    self._note(seat, Lost())
                if seat.is_back:  # it may have heard nothing for long
                    seat.is_back = False
                    seat.send(connections.pack(encode(self._heartbeat())))
            if time.perf_counter() >= next_s:
                self.broadcast(self._heartbeat())
                next_s = time.perf_counter() + beat_s
