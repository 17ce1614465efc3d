"""The messages between the processes of a job and their controller: typed records. No JAX.

A message on the wire is a JSON object: the fields of a record, and its `kind`. One from a member
also has the fields of `Standing`. `decode` refuses unknown kinds, missing or unknown fields, and
values of another type. A change of any record counts `PROTOCOL` up: both ends compare it first.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from holmesjax.runtime.progress import Work
from holmesjax.transport.connections import Message

PROTOCOL = 2
R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A message; each kind is a class of its own."""

    kind: ClassVar[str]


# ---- member -> controller ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Standing(Record):
    """The work that a member is at; each of its messages has one."""

    kind = "standing"
    status: str | None = None  # what it is doing or waiting for, in words
    work: Work = "step"
    at_step: int = 0
    num_begun: int = 0  # steps, batches of validation and checkpoints
    num_done: int = 0  # programs and layers, before the first step


@dataclass(frozen=True, kw_only=True)
class Ready(Record):
    """The addresses where a member listens: `data` by fabric, and `coordinator` of its stage."""

    kind = "ready"
    addresses: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compiled(Record):
    """A member has compiled and connected, and has read these data."""

    kind = "compiled"
    digests: dict[str, str]
    source: str


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
    """A stage has dispatched most of a step; from its leader only."""

    kind = "vote"
    step: int


@dataclass(frozen=True, kw_only=True)
class Measurements(Record):
    """The measurements of one member in one step."""

    kind = "part"
    part: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Saved(Record):
    """The arrays and files of a stage's part of a checkpoint, with digests."""

    kind = "saved"
    step: int
    arrays: dict[str, Any]
    files: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Unsaved(Record):
    """The reason why a part of a checkpoint could not be written."""

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
    fix: str | None = None  # None: the error has no advice, because it is a bug
    damaged: bool = False  # the checkpoint that it read


@dataclass(frozen=True, kw_only=True)
class Stop(Record):
    """A member asks that all stop, because it got a signal."""

    kind = "stop"
    signal: int


@dataclass(frozen=True, kw_only=True)
class Done(Record):
    """A member has trained to the end, which is after this step."""

    kind = "done"
    step: int


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


# ---- controller -> member ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobStart(Record):
    """All members are there; their stage's coordinator listens here, and this step is resumed."""

    kind = "start"
    coordinator: Any
    resume: int


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


@dataclass(frozen=True, kw_only=True)
class AskFiles(Record):
    """Asks for so many entries of a member's list of files, from `first` on."""

    kind = "files"
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Go(Record):
    """All members have compiled, and have read the same data."""

    kind = "go"


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


@dataclass(frozen=True, kw_only=True)
class AskBeat(Record):
    """Asks for a beat at once, and for the stacks of all threads in the member's log."""

    kind = "tell"
    stacks: bool = False


@dataclass(frozen=True, kw_only=True)
class AllDone(Record):
    """All members are done."""

    kind = "end"


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Record):
    """The controller lives, and has heard of so much progress."""

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
    """The connection of a member has closed."""

    kind = "lost"


@dataclass(frozen=True, kw_only=True)
class Silent(Record):
    """A member has said nothing for so long."""

    kind = "silent"
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class Refused(Record):
    """A caller was refused its place in the job."""

    kind = "refused"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Warned(Record):
    """The controller itself has a warning."""

    kind = "warning"
    text: str


class ProcessEvent(NamedTuple):
    """Something that the launcher hears of a process of the job."""

    process: int  # its number, or `controller.NOBODY`
    record: Record


# fmt: off
FROM_MEMBER: dict[str, type[Record]] = {
    record.kind: record
    for record in (Ready, Compiled, Files, Up, Vote, Measurements, Saved, Unsaved, Failed, Stop,
                   Done, AskAddresses, AskClock, Beat)
}
FROM_CONTROLLER: dict[str, type[Record]] = {
    record.kind: record
    for record in (JobStart, Addresses, ClockReading, AskFiles, Go, Mistake, Verdict,
                   AskBeat, AllDone, Heartbeat)
}
# fmt: on
STANDING = tuple(field.name for field in fields(Standing))


def encode(record: Record, standing: Standing | None = None) -> Message:
    """The message of a record, with what its sender is at."""
    message: Message = {"kind": record.kind}
    for one in (record, standing):
        if one is not None:
            message |= {field.name: getattr(one, field.name) for field in fields(one)}
    return message


def decode(message: Mapping[str, Any], kinds: Mapping[str, type[Record]]) -> Record:
    """The record of a message.

    Args:
      message: as it was received.
      kinds: the records that the other end may send, by kind.

    Raises ValueError for an unknown kind, or fields that are missing, unknown or of another type.
    """
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"a message of unknown kind {kind!r}")
    return _make(kinds[kind], {name: message[name] for name in message if name != "kind"})


def decode_from_member(message: Mapping[str, Any]) -> tuple[Record, Standing]:
    """The record and the standing of a member's message; raises ValueError as `decode` does."""
    own = {name: message[name] for name in message if name not in STANDING}
    standing = {name: message[name] for name in STANDING if name in message}
    return decode(own, FROM_MEMBER), _make(Standing, standing)


def _types(record: type[Record]) -> dict[str, TypeAdapter[Any]]:
    """The checks of a record's fields, by name."""
    hints, strict = get_type_hints(record), ConfigDict(strict=True)
    return {field.name: TypeAdapter(hints[field.name], config=strict) for field in fields(record)}


TYPES: dict[type[Record], dict[str, TypeAdapter[Any]]] = {
    record: _types(record)
    for record in (*FROM_MEMBER.values(), *FROM_CONTROLLER.values(), Standing)
}


def _make(record: type[R], values: Mapping[str, Any]) -> R:
    types = TYPES[record]
    if unknown := values.keys() - types.keys():
        raise ValueError(f"a message {record.kind} with an unknown field {min(unknown)!r}")
    for name, value in values.items():
        try:
            types[name].validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ValueError(f"a message {record.kind} whose {name} is wrong: {problem}") from None
    try:
        return record(**values)
    except TypeError:
        missing = [one.name for one in fields(record) if _is_missing(one, values)]
        raise ValueError(f"a message {record.kind} without {' and '.join(missing)}") from None


def _is_missing(field: Field[Any], values: Mapping[str, Any]) -> bool:
    return field.default is MISSING and field.name not in values
