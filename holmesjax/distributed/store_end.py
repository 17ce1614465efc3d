"""A process's end of its own store: it answers the launcher, and fetches what it lacks. No JAX."""

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from holmesjax.checkpoints import fetching, manifest, setting_aside, stores
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.scrub import Scrub
from holmesjax.checkpoints.stores import PIECE_BYTES
from holmesjax.distributed import store_messages
from holmesjax.distributed.messages import PROTOCOL, ControllerHello, MemberHello
from holmesjax.distributed.store_messages import (
    ANSWER_S,
    TO_STORE,
    AskHeld,
    AskPiece,
    AskRunFiles,
    HeldParts,
    Keep,
    KeptSteps,
    Put,
    PutManifest,
    RunFiles,
    StoreCall,
    Unanswered,
)
from holmesjax.errors import DamagedError, HolmesError, PeerError
from holmesjax.files import places, regular_files
from holmesjax.files.whole_files import write_whole
from holmesjax.transport import connections
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Record, decode, encode

NOBODY = -1  # no process of the job
START_S = 600.0  # for the launcher to come
RETRY_S = 60.0  # that it calls again for, at least, when its connection is lost


class OwnStore:
    """The run folder of a process: what it fetches, and what others may have of it.

    Args:
      folder: the run folder.
      process: the number of the process; NOBODY: it only serves.
      node: where it is, in words.
      controller: address and port.
      key: of the job.
    """

    in_memory = False  # whether it is a partner's memory
    is_copying = False  # whether that makes a copy

    @property
    def copied(self) -> list[int]:
        """The steps that a partner's memory has copied."""
        return []

    def __init__(
        self,
        folder: Path,
        *,
        process: int,
        node: str,
        controller: tuple[str, int],
        key: bytes,
    ):
        self.folder, self._process, self._node = folder, process, node
        self._controller, self._key = controller, key
        self._id = ""  # until `join`
        self._scrub = Scrub(folder, None, print)  # until `scrub`
        self.launchers: str | None = None  # the identifier of the launcher's run folder
        self.mirror: Mirror | None = None  # where no launcher writes to it
        self.silence_s = 0.0  # that its job may be cut off from the launcher

    def _call(self, *, serves: bool, timeout_s: float) -> Connection[ControllerHello]:
        call = StoreCall(
            id=self._id,
            node=self._node,
            folder=places.shown(self.folder),
            serves=serves,
            in_memory=self.in_memory,
        )
        address, port = self._controller
        connection = connections.connect(
            address,
            port,
            key=self._key,
            hello=MemberHello(
                process=self._process,
                about={},
                computing={},
                protocol=PROTOCOL,
                session=secrets.token_hex(8),
                store=call,
            ),
            expected=ControllerHello,
            check=lambda hello: None,
            where=f"the store {self._node}:{self.folder} to the launcher",
            timeout_s=timeout_s,
        )
        connections.keep_alive(connection.sock)
        return connection

    # ---- what it answers -----------------------------------------------------------------------

    def home(self) -> str | None:
        """The identifier of the launcher's run folder, from the launcher itself."""
        connection = self._call(serves=False, timeout_s=START_S)
        connection.close()
        return connection.hello.store

    def join(self, home: str) -> None:
        """Makes the folder one of the launcher's run. Raises HolmesError for that of another."""
        self._id = stores.join(self.folder, home)

    def serve(self) -> threading.Thread:
        """Answers the launcher from now on; the thread ends when nobody is there any more.

        Raises PeerError and RefusedError as `connections.connect` does.
        """
        connection = self._call(serves=True, timeout_s=START_S)
        self.launchers = connection.hello.store
        thread = threading.Thread(target=self._serve, args=(connection,), name="store", daemon=True)
        thread.start()
        return thread

    def _serve(self, connection: Connection[ControllerHello]) -> None:
        """Answers the launcher; calls again when the connection is lost, until nobody is there."""
        with contextlib.suppress(HolmesError):
            while True:
                with contextlib.suppress(OSError, ValueError), contextlib.closing(connection):
                    while True:
                        self._answer(connection, decode(connection.receive(), TO_STORE))
                connection = self._call(serves=True, timeout_s=max(RETRY_S, self.silence_s))

    def _answer(self, connection: Connection[Any], question: Record) -> None:
        try:
            match question:
                case AskPiece(name=name, first=first, count=count):
                    content = stores.read_piece(self.folder, name, first, count)
                    store_messages.send_piece(connection, content)
                    return
                case AskHeld(step=step, files=files):
                    parts = stores.held(self.folder, step, files)
                    answer: Record = HeldParts(
                        parts=parts, steps=stores.committed_steps(self.folder)
                    )
                case Keep():
                    lacking = self._keep(question)
                    answer = KeptSteps(
                        lacking=lacking,
                        damaged=self._scrub.all_damaged(),
                        is_copying=self.is_copying,
                        copied=self.copied,
                    )
                case PutManifest():
                    self._put(question)
                    answer = Put()
                case _:
                    raise AssertionError(f"what is {question}?")
        except (OSError, ValueError, KeyError, TypeError, HolmesError) as error:
            answer = Unanswered(problem=f"{self._node}: {error}")
        connection.send(encode(answer))

    def _refuse_earlier(self, start: str) -> None:
        """Raises LostLeaseError where a later start has the folder: this process has slept."""
        stores.refuse_earlier(str(self.folder), start, stores.owner(self.folder))

    def _keep(self, keep: Keep) -> list[int]:
        check = functools.partial(self._refuse_earlier, keep.start)
        say = functools.partial(print, flush=True)
        lacking = stores.keep(self.folder, keep.steps, keep.last, keep.dropped, check, say)
        if self.mirror:
            self.mirror.follow(self.folder, keep.steps, keep.last, keep.dropped)
        return lacking

    def _put(self, put: PutManifest) -> None:
        self._refuse_earlier(put.start)
        folder = manifest.folder_of(self.folder, put.step)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / manifest.MANIFEST
        try:
            write_whole(path, put.text, replaces=False)
        except FileExistsError:  # it is never replaced
            if regular_files.read_text(path) != put.text:
                raise
        if self.mirror:
            self.mirror.take(put.step, put.text)
        self._scrub.committed(put.step)

    def scrub(self, mb_per_s: float | None) -> Scrub:
        """Reads checkpoints here again while it is entered, as `Scrub` does."""
        self._scrub = Scrub(self.folder, mb_per_s, functools.partial(print, flush=True))
        return self._scrub

    # ---- what it fetches -----------------------------------------------------------------------

    def fetch_run_files(self) -> None:
        """Brings settings, topology, plan and tokenizer here, as the launcher has them."""
        with self._reader() as read:
            connection = read.connection
            answer, _ = store_messages.ask(connection, AskRunFiles())
            assert isinstance(answer, RunFiles), answer
            for name, num_bytes in answer.files.items():
                path = stores.place_of(self.folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                pieces = range(0, num_bytes, PIECE_BYTES)
                content = b"".join(read(name, a, min(PIECE_BYTES, num_bytes - a)) for a in pieces)
                if not path.exists() or path.read_bytes() != content:
                    write_whole(path, content)

    def fetch(
        self,
        checkpoint: Checkpoint,
        parts: Collection[str],
        advance: Callable[[], object],
        say: Callable[[str], object],
        *,
        in_memory: Collection[str] = (),
        bytes_per_s: float | None = None,
    ) -> None:
        """Brings the parts of a checkpoint here that are not here yet.

        Args:
          checkpoint: its manifest is here.
          parts: their names.
          advance: called with each piece.
          say: takes lines that tell how far it is.
          in_memory: those that partners have, which need not come from a URL.
          bytes_per_s: of the link over which parts come; None: not known.

        Raises PeerError if a part cannot be fetched now.
        """
        fetching.fetch(
            self.folder,
            checkpoint,
            parts,
            self._reader,
            advance,
            say,
            first=in_memory,
            second=functools.partial(self._reader, of_memory=False),
            bytes_per_s=bytes_per_s,
        )

    @contextlib.contextmanager
    def _reader(self, *, of_memory: bool = True) -> Iterator["_Reader"]:
        connection = self._call(serves=False, timeout_s=START_S)
        connection.sock.settimeout(2 * ANSWER_S)  # the launcher may ask several stores
        with contextlib.closing(connection):
            yield _Reader(connection, of_memory)

    def set_aside(self, error: DamagedError, checkpoint: Checkpoint) -> HolmesError:
        """Renames the part here that is damaged, so that the next start fetches it; what to raise.

        The error itself, where it is of no part, or of one at a URL: the launcher then lets it be
        fetched there and read once more.
        """
        part = manifest.damaged_part(checkpoint, error)
        if part is None:
            return error
        setting_aside.set_part_aside(checkpoint, part)
        if part in fetching.uploads_of(checkpoint):
            return error
        fix = (
            "start again with the same command: it is fetched from a store that has it, if any has"
        )
        return PeerError(
            error.where, f"{error.problem}; it is set aside", found=error.found, fix=fix
        )


class _Reader:
    """Reads pieces of files through the launcher."""

    def __init__(self, connection: Connection[Any], of_memory: bool):
        self.connection, self._of_memory = connection, of_memory

    def __call__(self, name: str, first: int, count: int) -> bytes:
        question = AskPiece(name=name, first=first, count=count, of_memory=self._of_memory)
        return store_messages.ask(self.connection, question)[1]
