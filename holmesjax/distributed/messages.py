"""The messages between the processes of a job and their controller: typed records. No JAX.

`transport.records` turns a record into a message and back. A message from a member has the fields
of `Standing` besides its own. A change of any record counts `PROTOCOL` up, which both ends compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from holmesjax.distributed.store_messages import StoreCall
from holmesjax.runtime.step_timeout import Activity
from holmesjax.transport.outbox import Again
from holmesjax.transport.records import Message, Record, by_kind, decode, encode, make

BEATS = 4  # heartbeats in the time that an end may be silent
PROTOCOL = 18
TAKEN = "is here already"  # the end of the reason why another process of a number is refused


# ---- hellos --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MemberHello(Record):
    """The hello of a member, which calls the controller."""

    kind = "member"
    process: int
    about: dict[str, Any]  # its plan, settings and versions, by name
    computing: dict[str, str]  # `computing.facts`
    protocol: int
    session: str  # of this process, until its end
    again: Again | None = None  # where a lost connection is made anew
    store: StoreCall | None = None  # what calls is no member, but its store


@dataclass(frozen=True, kw_only=True)
class ControllerHello(Record):
    """The hello of the controller.

    To a member that has lost its connection it says first what it has received: a `Position`.
    """

    kind = "controller"
    session: str  # of this start of the job
    store: str | None = None  # the identifier of the launcher's run folder


# ---- member -> controller ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Standing(Record):
    """The progress and the status of a member; each of its messages has one."""

    kind = "standing"
    status: str | None = None  # what it is doing or waiting for, in words
    work: Activity = "step"
    at_step: int = 0
    num_begun: int = 0  # steps, batches of validation and checkpoints
    num_done: int = 0  # programs and layers, before the first step
    received: int = 0  # messages from the controller
    arrived: int = -1  # the newest round of islands by mailbox whose global weights are there


@dataclass(frozen=True, kw_only=True)
class Ready(Record):
    """A member has started, and listens at addresses: `data` by fabric, `coordinator` of its stage.

    `unproven` says what the attention kernels lack on its host to be used; None: nothing.
    """

    kind = "ready"
    addresses: dict[str, Any]
    unproven: str | None


@dataclass(frozen=True, kw_only=True)
class Compiled(Record):
    """A member has compiled and connected, and has read these data."""

    kind = "compiled"
    digests: dict[str, str]
    source: str
    left_out: str = ""  # what its corpus has and is not read, in words; empty: nothing


@dataclass(frozen=True, kw_only=True)
class Files(Record):
    """Path and SHA-256 of some files of a member's corpus."""

    kind = "files"
    files: list[Any]


@dataclass(frozen=True, kw_only=True)
class Up(Record):
    """A member is about to train."""

    kind = "up"


@dataclass(frozen=True, kw_only=True)
class Vote(Record):
    """A stage has dispatched most of a step; from its leader only.

    It has a round where an island is a job of its own: the newest that another one has sent to.
    """

    kind = "vote"
    step: int
    opened: int = -1


@dataclass(frozen=True, kw_only=True)
class Measurements(Record):
    """The measurements of one member in one step."""

    kind = "measurements"
    measured: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Met(Record):
    """The digests of a stage after a meeting of islands, by parameter; from its leader only.

    `weights` are those of its island, and `owned` the global weights that the island owns.
    """

    kind = "met"
    step: int
    weights: dict[str, Any]
    owned: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Saved(Record):
    """The arrays and files of a stage's part of a checkpoint, with digests."""

    kind = "saved"
    step: int
    arrays: dict[str, Any]
    files: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Unsaved(Record):
    """The reason why a part of a checkpoint could not be written.

    It is empty where another process of the stage has failed before, and tells it.
    """

    kind = "unsaved"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failed(Record):
    """A member gives up, with this exit status."""

    kind = "failed"
    exit_status: int
    where: str
    problem: str
    found: str | None = None
    fix: str | None = None  # None: an exception that HolmesJAX has not raised, without advice
    is_own: bool = False  # such an exception, which only this member itself can have caused
    peer: int | None = None  # the process that it has lost
    damaged: bool = False  # the checkpoint that it read
    spike: int | None = None  # the step, where the run goes back from one


@dataclass(frozen=True, kw_only=True)
class Stop(Record):
    """A member asks all to stop, because it got a signal."""

    kind = "stop"
    signal: int


@dataclass(frozen=True, kw_only=True)
class Done(Record):
    """A member has trained to the end, which is after this step.

    `is_over` says that no step follows, though the run may have more: other islands made them.
    """

    kind = "done"
    step: int
    is_over: bool = False


@dataclass(frozen=True, kw_only=True)
class TextPiece(Record):
    """More of a text that is generated."""

    kind = "piece"
    row: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Continued(Record):
    """All texts that were generated, and what is said of the time that it took."""

    kind = "continued"
    rows: list[Any]  # the fields of a `Continuation` each
    rate: str


@dataclass(frozen=True, kw_only=True)
class AskAddresses(Record):
    """A member asks where these processes listen."""

    kind = "addresses"
    of: list[int]


@dataclass(frozen=True, kw_only=True)
class AskClock(Record):
    """A member asks for the time, at this time of its own clock."""

    kind = "clock"
    asked_s: float


@dataclass(frozen=True, kw_only=True)
class Beat(Record):
    """A member lives."""

    kind = "beat"
    answers: int | None = None  # the number of the question that it answers
    waits_in: str = ""  # the function of JAX in which its main thread waits for others, if it does


@dataclass(frozen=True, kw_only=True)
class Bye(Record):
    """A member closes its connection."""

    kind = "bye"


# ---- controller -> member ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobStart(Record):
    """All members have come; the coordinator of the member's stage, and the step to resume.

    `unproven` is what all members of the stage go by: that of one which has something to say.
    `in_memory` has the parts of the checkpoint that partners have, and `skipped` the fields of each
    `Skipped`. A process does not read these itself: what it read could be older.
    """

    kind = "start"
    coordinator: Any
    resume: int
    unproven: str | None
    in_memory: list[str]
    skipped: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Texts(Record):
    """The texts that all members continue, and how."""

    kind = "texts"
    prompts: list[Any]  # the tokens of each
    max_tokens: int
    sampling: dict[str, Any]  # the fields of `Sampling`
    stop: list[str]
    ends: list[int] | None  # the tokens that end a text; None: those of the tokenizer
    ema: bool


@dataclass(frozen=True, kw_only=True)
class Addresses(Record):
    """The addresses of processes that a member asked for, by their numbers."""

    kind = "addresses"
    found: list[Any]


@dataclass(frozen=True, kw_only=True)
class ClockReading(Record):
    """The controller's time, and the time of the member's clock when it asked."""

    kind = "clock"
    asked_s: float
    now_s: float
    received: int  # messages from this member


@dataclass(frozen=True, kw_only=True)
class AskFiles(Record):
    """Asks for so many entries of a member's list of files, from `first` on."""

    kind = "files"
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Go(Record):
    """All members have compiled, and have read the same data.

    `epoch` is the number of the owner of the run folder (`lease`).
    """

    kind = "go"
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Mistake(Record):
    """A mistake that ends the job, for all members."""

    kind = "refused"
    where: str
    problem: str
    found: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """The decision after a step, for all members."""

    kind = "verdict"
    step: int
    stop: bool  # whether to end after this step
    save: bool  # whether to write a checkpoint after it
    arrived: int = -1  # the newest round that all processes have
    opened: int = -1  # the newest round that a stage knows to be open


@dataclass(frozen=True, kw_only=True)
class AskBeat(Record):
    """Asks for a beat at once, and for the stacks of all threads in the member's log."""

    kind = "tell"
    number: int  # of the question
    stacks: bool = False


@dataclass(frozen=True, kw_only=True)
class AllDone(Record):
    """All members are done."""

    kind = "end"


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Record):
    """The controller lives, and reports the progress of the job."""

    kind = "beat"
    num_noted: int
    limit_s: float  # that the next sign of progress may take


# ---- events without a message --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Output(Record):
    """A line that a process has printed."""

    kind = "output"
    line: str


@dataclass(frozen=True, kw_only=True)
class Exit(Record):
    """The exit status of a process; negative: the signal that killed it."""

    kind = "exit"
    status: int


@dataclass(frozen=True, kw_only=True)
class Lost(Record):
    """A member has closed its connection, or has lost it and does not come back."""

    kind = "lost"


@dataclass(frozen=True, kw_only=True)
class Silent(Record):
    """A member has been silent for too long."""

    kind = "silent"
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class Refused(Record):
    """A caller was refused its place in the job."""

    kind = "refused"
    reason: str
    unlike: tuple[str, ...] = ()  # facts in which it computes otherwise than the others


@dataclass(frozen=True, kw_only=True)
class Warned(Record):
    """The controller itself has a warning."""

    kind = "warning"
    text: str


class ProcessEvent(NamedTuple):
    """An event of a process of the job, for the launcher."""

    process: int  # its number, or `controller.NOBODY`
    record: Record


# fmt: off
FROM_MEMBER = by_kind(
    Ready, Compiled, Files, Up, Vote, Measurements, Met, Saved, Unsaved, Failed, Stop, Done,
    AskAddresses, AskClock, Beat, Bye, TextPiece, Continued,
)
FROM_CONTROLLER = by_kind(
    JobStart, Addresses, ClockReading, AskFiles, Go, Mistake, Verdict, AskBeat, AllDone, Heartbeat,
    Texts,
)
# fmt: on
STANDING = tuple(field.name for field in fields(Standing))


def encode_of_member(record: Record, standing: Standing) -> Message:
    """Returns the message of a member's record, with the member's standing."""
    return {**encode(standing), **encode(record)}


def decode_of_member(message: Mapping[str, Any]) -> tuple[Record, Standing]:
    """Returns the record and the standing of a member's message; raises ValueError as `decode`."""
    own = {name: message[name] for name in message if name not in STANDING}
    standing = {name: message[name] for name in STANDING if name in message}
    return decode(own, FROM_MEMBER), make(Standing, standing)
