"""The messages between the launcher and the stores of a run: typed records. No JAX.

A process that has a store of its own calls the controller twice more (`StoreCall`). Over the one
connection it answers questions, over the other it asks. A piece of a file follows its record, as
bytes that are no message.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from holmesjax.checkpoints.fetching import UnreadError
from holmesjax.checkpoints.stores import PIECE_BYTES
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Record, by_kind, decode, encode

ANSWER_S = 60.0  # for an answer: a disk may be slow, and a link


@dataclass(frozen=True, kw_only=True)
class StoreCall(Record):
    """The facts that a caller tells of its store, in its hello."""

    kind = "store"
    id: str
    node: str
    folder: str
    serves: bool  # whether it answers on this connection; else it asks
    in_memory: bool  # whether it has copies that a node keeps for another cluster


@dataclass(frozen=True, kw_only=True)
class AskRunFiles(Record):
    """Asks the launcher for the files that a process needs besides checkpoints."""

    kind = "ask run files"


@dataclass(frozen=True, kw_only=True)
class RunFiles(Record):
    """These files, with their bytes."""

    kind = "run files"
    files: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class AskPiece(Record):
    """Asks for bytes of a file of the run folder."""

    kind = "ask piece"
    name: str
    first: int
    count: int
    of_memory: bool = True  # whether a partner's memory may give them


@dataclass(frozen=True, kw_only=True)
class FilePiece(Record):
    """So many bytes of a file follow."""

    kind = "piece"
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class AskHeld(Record):
    """Asks which parts of a checkpoint a store has, and which manifests."""

    kind = "ask held"
    step: int
    files: dict[str, Any]  # of its manifest


@dataclass(frozen=True, kw_only=True)
class HeldParts(Record):
    """Names of parts, and steps."""

    kind = "held"
    parts: list[str]
    steps: list[int]


@dataclass(frozen=True, kw_only=True)
class Keep(Record):
    """Says which checkpoints the launcher has, as `stores.keep` takes it."""

    kind = "keep"
    steps: list[int]
    last: int
    dropped: list[int]
    start: str = ""  # of the run that says so (`stores.start_name`)


@dataclass(frozen=True, kw_only=True)
class KeptSteps(Record):
    """The steps of those whose manifest is not there, and of what was found damaged since."""

    kind = "kept"
    lacking: list[int]
    damaged: list[int]
    is_copying: bool  # whether a partner's memory still copies what it was last told to
    copied: list[int]  # steps of which a partner's memory has all that it is to have


@dataclass(frozen=True, kw_only=True)
class PutManifest(Record):
    """The manifest of a checkpoint."""

    kind = "put manifest"
    step: int
    text: str
    stays: int | None = None  # a step that all partners have, which stays in their memory
    start: str = ""  # as in `Keep`


@dataclass(frozen=True, kw_only=True)
class Put(Record):
    """It is on the disk."""

    kind = "put"


@dataclass(frozen=True, kw_only=True)
class Unanswered(Record):
    """A question that cannot be answered."""

    kind = "unanswered"
    problem: str


TO_STORE = by_kind(AskPiece, AskHeld, Keep, PutManifest)
TO_LAUNCHER = by_kind(AskRunFiles, AskPiece)
ANSWERS = by_kind(RunFiles, FilePiece, HeldParts, KeptSteps, Put, Unanswered)


class UnansweredError(UnreadError):
    """The other end lives, and cannot answer."""


def ask(connection: Connection[Any], question: Record) -> tuple[Record, bytes]:
    """Sends a question; the answer, and the bytes that follow a `FilePiece`.

    Raises:
      UnansweredError: the other end says why it cannot answer.
      OSError: the connection is lost.
      ValueError: it says what is no answer, or the bytes were changed on their way.
    """
    connection.send(encode(question))
    answer = decode(connection.receive(), ANSWERS)
    if isinstance(answer, Unanswered):
        raise UnansweredError(answer.problem)
    if not isinstance(answer, FilePiece):
        return answer, b""
    if not 0 <= answer.num_bytes <= PIECE_BYTES:
        raise ValueError(f"a piece of {answer.num_bytes} bytes")
    content = connection.receive_bytes(answer.num_bytes)
    if hashlib.sha256(content).hexdigest() != answer.sha256:
        raise ValueError("a piece whose bytes have changed on their way")
    return answer, content


def send_piece(connection: Connection[Any], content: bytes) -> None:
    """Answers with bytes of a file. Raises OSError. Only one thread may send."""
    sha256 = hashlib.sha256(content).hexdigest()
    connection.send(encode(FilePiece(num_bytes=len(content), sha256=sha256)))
    connection.sock.sendall(content)
