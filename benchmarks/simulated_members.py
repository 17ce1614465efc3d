"""Members of a job that are simulated, thousands in a process, for `control_plane`.

They say what `member.Member` says, over real sockets on loopback. What they send waits for half of
the round trip before it goes, and so does what they hear before they act on it; a connection is
made after a whole one. Each has a clock of its own.
"""

import heapq
import itertools
import json
import random
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe

from holmesjax.distributed.member import CLOCK_PAUSE_S, FIRST_CLOCKS, ClockOffset
from holmesjax.distributed.messages import (
    BEATS,
    PROTOCOL,
    AskAddresses,
    AskClock,
    Compiled,
    ControllerHello,
    Done,
    MemberHello,
    Ready,
    Standing,
    Up,
    Vote,
    encode_of_member,
)
from holmesjax.plan.processes import Process
from holmesjax.transport import connections, handshake, key_files, records, tls
from holmesjax.transport.records import Message, Record
from holmesjax.transport.tls import TlsSocket

STAGES = 16
NEIGHBOURS = 8  # whose addresses a member asks for
STEPS = 20
STEP_S = 0.5  # between a verdict and the next vote
SILENCE_S = 24.0
LIMIT_S = 120.0  # of one run
KEY = bytes(range(key_files.KEY_BYTES))
ABOUT = {"plan hash": "268d65b24ddc", "jax": "0.10.2", "restart": 0}
BOOK = {"infiniband": [[f"10.0.0.{i}", 40_000 + i] for i in range(8)]}


def make_processes(num_members: int) -> tuple[Process, ...]:
    per_stage = num_members // STAGES
    return tuple(
        Process(
            number=number,
            name=f"c{number // per_stage}/n{number}",
            cluster="c",
            node=f"n{number}",
            stage=number // per_stage,
            rank=number % per_stage,
            devices=(number,),
            local_devices=(0,),
        )
        for number in range(num_members)
    )


class Crowd:
    """Some members of a job, in one thread."""

    def __init__(self, address: tuple[str, int], round_trip_s: float):
        self.address, self.half_s = address, round_trip_s / 2
        self.selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._turn = itertools.count()
        self.num_open = 0

    def after(self, wait_s: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.perf_counter() + wait_s, next(self._turn), do))

    def run(self) -> None:
        """Until all members have left."""
        end_s = time.perf_counter() + LIMIT_S
        while self.num_open:
            now_s = time.perf_counter()
            assert now_s < end_s, f"{self.num_open} members are not done after {LIMIT_S:g} s"
            while self._due and self._due[0][0] <= time.perf_counter():
                heapq.heappop(self._due)[2]()
            wait_s = self._due[0][0] - time.perf_counter() if self._due else 1.0
            for key, _ in self.selector.select(max(wait_s, 0.0)):
                key.data()


class Member:
    """Says and hears the messages of `member.Member`, without waiting."""

    def __init__(self, crowd: Crowd, process: Process, num_members: int):
        self._crowd, self._process, self._num_members = crowd, process, num_members
        self._ahead_s = random.uniform(-1e6, 1e6)  # of its clock
        self._clock = ClockOffset()
        self._attempt = 0
        self._has_left = False
        self._received = 0  # messages since it has entered
        self._heard_s = 0.0  # when the newest message came
        self.entered_s = self.went_s = 0.0
        self.error_s: list[float] = []  # of the clock at the first step, and at the end
        self.votes_s: dict[int, float] = {}  # when they went
        self.verdicts_s: dict[int, float] = {}  # when they came
        crowd.num_open += 1
        self._call()

    def _call(self) -> None:
        self._sock = socket.socket()
        self._sock.setblocking(False)
        connections.prepare(self._sock)
        self._sock.connect_ex(self._crowd.address)
        self._heard = bytearray()
        hello = MemberHello(
            process=self._process.number,
            about=ABOUT,
            computing={},
            protocol=PROTOCOL,
            session=self._process.name,
        )
        accept = lambda hello: None
        self._talk = handshake.call(KEY, hello, ControllerHello, accept, self._process.name)
        next(self._talk)
        self._has_entered = False
        listen = lambda: self._crowd.selector.register(self._sock, selectors.EVENT_READ, self._read)
        self._crowd.after(2 * self._crowd.half_s, listen)

    def _read(self) -> None:
        now_s = time.perf_counter()
        sock = self._sock
        data = bytearray()
        try:
            while piece := sock.recv(65536):
                data += piece
        except BlockingIOError:
            if data:  # what it says is read later: a process hears many
                self._crowd.after(self._crowd.half_s, lambda: self._hear(sock, bytes(data), now_s))
            return
        except OSError:
            pass
        self._lose()

    def _lose(self) -> None:
        """Calls again after a pause."""
        self._crowd.selector.unregister(self._sock)
        self._sock.close()
        assert not self._has_entered, f"{self._process.name} has lost the controller"
        self._crowd.after(connections.pause_after(self._attempt), self._call)
        self._attempt += 1

    def _encrypt(self, challenge: Message) -> None:
        """Begins TLS once the controller has spoken; its round trip comes before the answer."""

        def shake_hands() -> None:
            try:
                sock.shake_hands()
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            self._crowd.selector.modify(sock, selectors.EVENT_READ, self._read)
            self._crowd.after(2 * self._crowd.half_s, answer)

        def answer() -> None:
            if self._sock is sock:  # not lost since
                self._say(self._talk.send(challenge))

        self._crowd.selector.unregister(self._sock)
        context = tls.context(KEY, server_side=False)
        self._sock = sock = TlsSocket(self._sock, context, server_side=False)
        self._crowd.selector.register(sock, selectors.EVENT_READ, shake_hands)
        shake_hands()

    def _hear(self, sock: socket.socket, data: bytes, heard_s: float) -> None:
        if sock is not self._sock or self._has_left:
            return
        self._heard += data
        size = connections.LENGTH.size
        while len(self._heard) >= size:
            (length,) = connections.LENGTH.unpack(self._heard[:size])
            if len(self._heard) < size + length:
                return
            message = json.loads(self._heard[size : size + length])
            del self._heard[: size + length]
            self._heard_s = heard_s
            self._received += self._has_entered
            self._take(message)

    def _say(
        self,
        message: Message | Callable[[], Message],
        told: Callable[[], object] = lambda: None,
    ) -> None:
        sock = self._sock

        def go() -> None:
            data = connections.pack(message() if callable(message) else message)
            try:
                sent = sock.send(data)
            except BlockingIOError:
                self._crowd.after(0.001, go)
                return
            except OSError:  # reading says why
                return
            assert sent == len(data), "messages of members are short"
            told()

        self._crowd.after(self._crowd.half_s, go)

    def _tell(self, record: Record) -> None:
        self._say(encode_of_member(record, Standing(status="was starting")))

    def _take(self, message: Message) -> None:
        if not isinstance(self._sock, TlsSocket):
            self._encrypt(message)
            return
        if not self._has_entered:
            try:
                self._say(self._talk.send(message))
            except StopIteration:
                self._has_entered = True
                self._say(records.encode(handshake.Entered()), self._note_entry)
                leads = self._process.leads
                coordinator = ["10.0.0.1", 40_000] if leads else None
                addresses = {"data": BOOK, "coordinator": coordinator}
                self._tell(Ready(addresses=addresses, unproven=None))
                self._ask_time(FIRST_CLOCKS - 1)
            return
        getattr(self, f"_on_{message['kind']}")(message)

    def _note_entry(self) -> None:
        self.entered_s = time.perf_counter()

    def _ask_time(self, left: int) -> None:
        if not self._has_left:
            # The lateness of a process with a thousand members is not that of a member.
            asked_s = lambda: time.perf_counter() - self._crowd.half_s + self._ahead_s
            standing = lambda: Standing(received=self._received)
            self._say(lambda: encode_of_member(AskClock(asked_s=asked_s()), standing()))
            pause_s = random.uniform(0.0, CLOCK_PAUSE_S) if left > 0 else SILENCE_S / BEATS
            self._crowd.after(pause_s, lambda: self._ask_time(left - 1))

    def _on_clock(self, message: Message) -> None:
        heard_s = self._heard_s + self._crowd.half_s + self._ahead_s
        self._clock.hear(message["asked_s"], message["now_s"], heard_s)

    def _on_beat(self, message: Message) -> None:
        pass

    def _on_start(self, message: Message) -> None:
        numbers = random.Random(self._process.number).sample(range(self._num_members), NEIGHBOURS)
        self._tell(AskAddresses(of=numbers))

    def _on_addresses(self, message: Message) -> None:
        assert len(message["found"]) == NEIGHBOURS
        self._tell(Compiled(digests={"train": "12ab"}, source="a corpus"))

    def _on_go(self, message: Message) -> None:
        self.went_s = time.perf_counter()
        self.error_s.append(abs(self._clock.offset_s + self._ahead_s))
        self._tell(Up())
        self._vote(1)

    def _vote(self, step: int) -> None:
        if self._process.leads:

            def told() -> None:
                self.votes_s[step] = time.perf_counter()

            standing = Standing(status=f"was busy in step {step}")
            self._say(encode_of_member(Vote(step=step), standing), told)

    def _on_verdict(self, message: Message) -> None:
        step = message["step"]
        self.verdicts_s[step] = self._heard_s
        if step < STEPS:
            self._crowd.after(STEP_S, lambda: self._vote(step + 1))
            return
        self.error_s.append(abs(self._clock.offset_s + self._ahead_s))
        self._tell(Done(step=STEPS))
        self._crowd.after(3 * self._crowd.half_s, self._leave)

    def _leave(self) -> None:
        self._has_left = True
        self._crowd.num_open -= 1
        self._crowd.selector.unregister(self._sock)

    def close(self) -> None:
        """Closes the connection, which the controller takes for the loss of a member."""
        self._sock.close()


def attend(
    numbers: Sequence[int],
    num_members: int,
    address: tuple[str, int],
    round_trip_s: float,
    pipe: Pipe,
) -> None:
    """Simulates some members from their first call on, and sends what each has seen.

    Args:
      numbers: of the members.
      num_members: members of the whole job.
      address: of the controller.
      round_trip_s: the delay of an answer, in seconds.
      pipe: brings the time of the first call, and takes the result.
    """
    connections.raise_open_files(len(numbers))
    processes = make_processes(num_members)
    crowd = Crowd(address, round_trip_s)
    pipe.send("up")
    start_s = pipe.recv()
    time.sleep(max(start_s - time.perf_counter(), 0.0))
    members = [Member(crowd, processes[number], num_members) for number in numbers]
    crowd.run()
    pipe.send(
        {
            "entered_s": max(member.entered_s for member in members),
            "went_s": max(member.went_s for member in members),
            "error_s": [max(errors) for errors in zip(*(m.error_s for m in members), strict=True)],
            "votes_s": last_of_each_step([member.votes_s for member in members]),
            "verdicts_s": last_of_each_step([member.verdicts_s for member in members]),
            "repeats": sum(member._attempt for member in members),
        }
    )
    pipe.recv()
    for member in members:
        member.close()
    crowd.selector.close()


def last_of_each_step(found: Sequence[dict[int, float]]) -> dict[int, float]:
    """The last time of each step."""
    steps = {step for times_s in found for step in times_s}
    return {step: max(times_s.get(step, 0.0) for times_s in found) for step in steps}
