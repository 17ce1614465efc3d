"""The launcher's end of all stores of a run: who has what, and what goes from one to another.

A store that is not the launcher's run folder calls the controller (`store_messages`). When all
processes have come, the hub compares what the stores have with the manifest of the checkpoint to
resume. From then on it passes pieces of files on, one at a time for each that asks. No JAX.
"""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmesjax.checkpoints import fetching, manifest, retention, stores
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.distributed import store_messages
from holmesjax.distributed.messages import MemberHello
from holmesjax.distributed.store_messages import (
    ANSWER_S,
    TO_LAUNCHER,
    AskHeld,
    AskPiece,
    AskRunFiles,
    HeldParts,
    Keep,
    KeptSteps,
    PutManifest,
    RunFiles,
    StoreCall,
    Unanswered,
    UnansweredError,
)
from holmesjax.errors import CheckpointError, ConfigError, GoneError, HolmesError, of_system
from holmesjax.files import places, regular_files
from holmesjax.plan.processes import Process
from holmesjax.transport import connections
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Record, decode, encode

ALL = 10**18  # a step that no run reaches
SETTLE_S = 90.0  # for stores at the end: one that does not answer costs ANSWER_S
LOOK_S = 0.2  # between two looks for a store that is waited for
NAMED = 5  # parts, in a message


@dataclass(eq=False)
class _Store:
    """A connection on which a store answers."""

    call: StoreCall
    process: int
    node: str
    connection: Connection[Any]
    parts: set[str] = field(default_factory=set)  # of the checkpoint that is resumed
    steps: list[int] = field(default_factory=list)  # whose manifest it had when it came
    is_lost: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, question: Record) -> tuple[Record, bytes]:
        """Raises as `store_messages.ask`; then it is lost, unless it has said why."""
        with self.lock:
            if self.is_lost:
                raise ConnectionError("it has left")
            try:
                return store_messages.ask(self.connection, question)
            except (OSError, ValueError):
                self.is_lost = True
                self.connection.close()
                raise

    @property
    def place(self) -> str:
        return f"{self.node}:{self.call.folder}"


class StoreHub:
    """All stores of one attempt; `close` ends it.

    Args:
      folder: the launcher's run folder.
      processes: all of the job.
      say: takes lines for the console.
      wait_s: how long to wait for a store that has what nobody else has.
    """

    def __init__(
        self,
        folder: Path,
        processes: Sequence[Process],
        say: Callable[[str], object],
        wait_s: float = 0.0,
    ):
        self._folder, self._processes, self._say, self._wait_s = folder, processes, say, wait_s
        self.id = stores.identifier(folder)
        self._stores: list[_Store] = []
        self._changed = threading.Lock()
        self._home: set[str] = set()  # parts of the checkpoint that is resumed
        self._damaged: set[tuple[str, int]] = set()  # stores, with the steps that they have told
        self._in_stores: set[str] = set()  # its parts that object stores have
        self._mirrors: dict[str, Mirror] = {}  # those that were read, by URL
        self._checkpoint: Checkpoint | None = None
        self._problem: Exception | None = None
        self._teller = ThreadPoolExecutor(1, "stores")
        self._told: Future[None] | None = None  # of the last checkpoint
        self._settles_by_s = math.inf  # once the job has ended
        self._is_closed = False
        self.start = ""  # of the run, by its name, as soon as it has one
        # Takes the steps of checkpoints that a store has found damaged.
        self.on_damage: Callable[[int], object] = lambda step: None

    def close(self) -> None:
        self._is_closed = True
        self._teller.shutdown(wait=True, cancel_futures=True)
        for store in self._stores:
            store.connection.close()

    # ---- who calls -----------------------------------------------------------------------------

    def enter(self, connection: Connection[MemberHello]) -> None:
        """Takes a connection of a store, and does not wait."""
        call = connection.hello.store
        assert call is not None, "a member has another end"
        connections.keep_alive(connection.sock)
        connection.sock.settimeout(ANSWER_S)
        if call.serves:
            with self._changed:
                number = connection.hello.process
                is_known = 0 <= number < len(self._processes)
                node = self._processes[number].node if is_known else call.node
                store = _Store(call, number, node, connection)
                # It calls again when its connection is lost, maybe for weeks.
                before = [x for x in self._stores if (x.process, x.call) == (number, call)]
                self._stores = [*(x for x in self._stores if x not in before), store]
            for lost in before:
                lost.is_lost = True
                lost.connection.close()
            if (found := self._checkpoint) and not self._is_closed:  # it has come back, or late
                self._teller.submit(self._take_stock, store, found.step, found.manifest["files"])
            return
        connection.sock.settimeout(None)  # it asks when it needs something
        threading.Thread(target=self._answer_all, args=(connection,), daemon=True).start()

    def stores_of_parts(self, parts_of: Mapping[str, int], start: str) -> dict[str, dict[str, str]]:
        """The entry of a manifest for parts that processes have written; empty: all are here.

        Args:
          parts_of: the number of the process, by part.
          start: that they are of (`stores.start_name`).
        """
        calls = {store.process: store for store in self._stores}
        place = places.shown(self._folder)
        is_here = not places.is_url(place) and calls.keys().isdisjoint(parts_of.values())
        if is_here and not self._has_memory:  # else a part may be lost here, and in no manifest
            return {}
        here = {"id": self.id, "folder": place}
        told = lambda store: {
            "id": store.call.id,
            "node": store.node,
            "folder": store.call.folder,
        }
        entry = {
            part: told(calls[number])
            if number in calls
            else {**here, "node": self._processes[number].node}
            for part, number in parts_of.items()
        }
        uploaded = lambda where: {"start": start} if places.is_url(where["folder"]) else {}
        return {part: where | uploaded(where) for part, where in entry.items()}

    @property
    def _has_memory(self) -> bool:
        """Whether a node keeps copies for another cluster."""
        return any(store.call.in_memory for store in self._stores)

    def in_memory(self) -> list[str]:
        """The parts of the checkpoint to resume that partners have."""
        return sorted({part for x in self._stores if x.call.in_memory for part in x.parts})

    # ---- before a start ------------------------------------------------------------------------

    def prepare(self, checkpoint: Checkpoint | None, start: Callable[[], object]) -> None:
        """Looks, in another thread, whether all that is resumed is somewhere; calls `start` then.

        Otherwise `raise_problem` raises.
        """
        if not self._stores and not (checkpoint and checkpoint.manifest.get("stores")):
            start()
            return

        def run() -> None:
            try:
                self._check(checkpoint)
                start()
            except OSError as error:
                self._problem = of_system(error)
            except Exception as error:  # else the start waits for a thread that is no more
                self._problem = error

        threading.Thread(target=run, name="stores", daemon=True).start()

    def raise_problem(self) -> None:
        """Raises what the look before the start has found."""
        if self._problem:
            raise self._problem

    def gathered(self, checkpoint: Checkpoint) -> None:
        """Waits until all parts of a checkpoint are somewhere.

        Raises CheckpointError, and as `of_system` where an object store does not answer.
        """
        self._check(checkpoint, keeps=False)

    def _check(self, checkpoint: Checkpoint | None, *, keeps: bool = True) -> None:
        self._refuse_split_stages()
        self._checkpoint = checkpoint
        files = checkpoint.manifest["files"] if checkpoint else {}
        step = checkpoint.step if checkpoint else 0
        wanted = set(map(manifest.part_of, files))
        self._home = set(stores.held(self._folder, step, files))
        unknown: dict[str, OSError] = {}
        if checkpoint:
            self._in_stores, unknown = fetching.held_at_urls(checkpoint)
        deadline_s, has_told = time.monotonic() + self._wait_s, False
        asked: set[_Store] = set()
        while True:
            for store in [store for store in self._stores if store not in asked]:
                asked.add(store)
                self._take_stock(store, step, files)
            missing = sorted(wanted - self._held())
            if not missing:
                break
            if self._is_closed or time.monotonic() > deadline_s:
                assert checkpoint is not None
                for part in missing:
                    if part in unknown:  # its store may be back for the next start
                        raise of_system(unknown[part])
                problem = _nowhere(checkpoint, missing)
                if gone := self._gone(checkpoint, missing):
                    raise GoneError.of(problem, gone)
                raise problem
            if not has_told:
                has_told = True
                self._say(f"stores      waiting for {', '.join(_places(checkpoint, missing))}")
            time.sleep(LOOK_S)
        if keeps:
            self._refuse_newer(step)
            self._keep(ALL)

    def _gone(self, checkpoint: Checkpoint, missing: Collection[str]) -> list[int]:
        """The steps from this one down to one that is somewhere whole; none if none is.

        None either where parts were written to another store, and no node keeps copies: whoever has
        them may only be late.
        """
        gone, is_final = [checkpoint.step], self._is_final(checkpoint, missing)
        older_ones = [x for x in manifest.find(self._folder) if x.step < checkpoint.step]
        for older in [x for x in older_ones if manifest.is_sound(x.manifest)]:
            files = older.manifest["files"]
            held = {*stores.held(self._folder, older.step, files), *fetching.held_at_urls(older)[0]}
            for store in self._stores:
                with contextlib.suppress(OSError, ValueError, UnansweredError):
                    answer, _ = store.ask(AskHeld(step=older.step, files=files))
                    assert isinstance(answer, HeldParts), answer
                    held |= set(answer.parts)
            lacked = set(map(manifest.part_of, files)) - held
            if not lacked:
                return gone if is_final else []
            is_final = is_final and self._is_final(older, lacked)
            gone.append(older.step)
        return []

    def _is_final(self, checkpoint: Checkpoint, missing: Collection[str]) -> bool:
        """Whether parts that nobody has are gone for good."""
        was_here = {part for part, x in _written(checkpoint).items() if x["id"] == self.id}
        return self._has_memory or was_here.issuperset(missing)

    def _held(self) -> set[str]:
        """All parts that are somewhere."""
        return self._home.union(self._in_stores, *(s.parts for s in self._stores if not s.is_lost))

    def _take_stock(self, store: _Store, step: int, files: manifest.Files) -> None:
        with contextlib.suppress(OSError, ValueError, UnansweredError):
            answer, _ = store.ask(AskHeld(step=step, files=files))
            assert isinstance(answer, HeldParts), answer
            store.parts, store.steps = set(answer.parts), answer.steps

    def _refuse_newer(self, step: int) -> None:
        """Raises CheckpointError where a store knows a checkpoint that the launcher has lost."""
        known = {*dict(manifest.finished(self._folder)), *retention.set_aside(self._folder)}
        for store in self._stores:
            newer = [later for later in store.steps if later > step and later not in known]
            if newer:
                raise CheckpointError(
                    store.place,
                    f"has a checkpoint after step {max(newer)}, which the launcher does not know",
                    found=f"{self._folder}, whose newest is after step {step}",
                    fix=f"copy checkpoints/step_{max(newer):08d}/manifest.json and committed.json "
                    "from there into the launcher's run folder; or name another run.dir everywhere",
                )

    def _refuse_split_stages(self) -> None:
        """Raises ConfigError where the processes of a stage have different stores."""
        of = {store.process: store for store in self._stores}
        first: dict[int, Process] = {}
        place = lambda p: (
            of[p.number].place if p.number in of else f"{self._folder} of the launcher"
        )
        key = lambda p: of[p.number].call.id if p.number in of else self.id
        for process in self._processes:
            leader = first.setdefault(process.stage, process)
            if key(leader) != key(process):
                raise ConfigError(
                    f"the run folder of {process.name}",
                    f"is another store than that of {leader.name}, and both write stage "
                    f"{process.stage} together",
                    found=f"{place(process)} and {place(leader)}",
                    fix="give the nodes of a stage a folder that they share, or let each node be a "
                    "stage of its own",
                )

    # ---- after a commit ------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        """Lets all stores have the manifest, and remove what is superseded; does not wait."""
        if self._stores and not self._is_closed:
            self._told = self._teller.submit(self._keep, step)

    def settles(self) -> bool:
        """Whether stores, which are to leave, are still told of the last checkpoint.

        They may take long to remove what is superseded. Does not wait.
        """
        if self._told is None or self._told.done():
            return False
        now_s = time.monotonic()
        self._settles_by_s = min(self._settles_by_s, now_s + SETTLE_S)
        if now_s < self._settles_by_s:
            return True
        self._say("warning: stores are slow, and hear of the last checkpoint at the next start")
        return False

    def _keep(self, last: int) -> None:
        """Tells each store which checkpoints there are, and gives it the manifests it lacks."""
        steps = [step for step, _ in manifest.finished(self._folder)]
        dropped = retention.set_aside(self._folder)
        resumed = [self._checkpoint.step] if self._checkpoint and last == ALL else []
        all_stores = {store.call.id: store for store in self._stores if not store.is_lost}.values()
        is_copying = False
        copied: list[set[int]] = []  # by each partner's memory
        for store in all_stores:
            with self._warning(store):
                keep = Keep(steps=steps, last=last, dropped=dropped, start=self.start)
                answer, _ = store.ask(keep)
                assert isinstance(answer, KeptSteps), answer
                is_copying |= answer.is_copying
                for step in answer.damaged:
                    if (store.call.id, step) not in self._damaged:  # it may be told again
                        self._damaged.add((store.call.id, step))
                        self.on_damage(step)
                if store.call.in_memory:
                    copied.append(set(answer.copied))
                else:
                    for step in sorted({*answer.lacking, *resumed}):
                        self._put(store, step)
        if is_copying or not steps:  # all partners copy the same step, and none goes on alone
            return
        whole = set(steps).intersection(*copied)
        for store in all_stores:
            if store.call.in_memory:
                with self._warning(store):
                    self._put(store, max(steps), max(whole, default=None))

    def _put(self, store: _Store, step: int, stays: int | None = None) -> None:
        path = manifest.folder_of(self._folder, step) / manifest.MANIFEST
        text = regular_files.read_text(path)
        store.ask(PutManifest(step=step, text=text, stays=stays, start=self.start))

    @contextlib.contextmanager
    def _warning(self, store: _Store) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, UnansweredError) as error:
            self._say(f"warning: {store.place} was not told of checkpoints: {error}")

    # ---- pieces --------------------------------------------------------------------------------

    def _answer_all(self, connection: Connection[Any]) -> None:
        """Answers what a process asks, until it has gone."""
        with contextlib.suppress(OSError, ValueError), contextlib.closing(connection):
            while not self._is_closed:
                question = decode(connection.receive(), TO_LAUNCHER)
                try:
                    if isinstance(question, AskRunFiles):
                        connection.send(encode(RunFiles(files=stores.run_files(self._folder))))
                        continue
                    assert isinstance(question, AskPiece), question
                    content = self.read(question)
                except (OSError, ValueError, LookupError, HolmesError) as error:
                    connection.send(encode(Unanswered(problem=str(error))))
                else:
                    store_messages.send_piece(connection, content)

    def read(self, question: AskPiece) -> bytes:
        """A piece of a file, from the first store that has it and answers.

        Raises LookupError if none does, OSError, and ValueError for a name that is none.
        """
        why: object = "no store has it"
        for read in self._readers(question):
            try:
                return read()
            except (OSError, ValueError, UnansweredError) as error:
                why = error
        raise LookupError(f"{question.name}: {why}")

    def _readers(self, question: AskPiece) -> Iterator[Callable[[], bytes]]:
        """Yields the ways to read a piece."""
        path = stores.place_of(self._folder, question.name)
        name, first, count = question.name, question.first, question.count
        if path.exists():
            yield functools.partial(stores.read_piece, self._folder, name, first, count)
        step, part = stores.step_and_part(name)
        checkpoint = (
            self._checkpoint if self._checkpoint and self._checkpoint.step == step else None
        )
        if checkpoint is None:  # one that was committed since, which a partner copies
            yield from self._readers_of_new(question, step, part)
            return
        has_part = [store for store in list(self._stores) if part in store.parts]
        ask = lambda store: lambda: store.ask(question)[1]
        if question.of_memory:
            yield from (ask(store) for store in has_part if store.call.in_memory)
        if upload := fetching.uploads_of(checkpoint).get(part):
            yield self._reader_of(upload, question)
        yield from (ask(store) for store in has_part if not store.call.in_memory)

    def _readers_of_new(
        self, question: AskPiece, step: int, part: str
    ) -> Iterator[Callable[[], bytes]]:
        """Yields the ways to read a piece where it was written: in a store, or at a URL."""
        path = manifest.folder_of(self._folder, step)
        checkpoint = manifest.at(path) if manifest.has_manifest(path) else None
        where = checkpoint.manifest.get("stores", {}).get(part, {}) if checkpoint else {}
        for store in list(self._stores):
            if store.call.id == where.get("id"):
                yield lambda store=store: store.ask(question)[1]  # type: ignore[misc]
        if checkpoint and (upload := fetching.uploads_of(checkpoint).get(part)):
            yield self._reader_of(upload, question)

    def _reader_of(self, upload: fetching.Upload, question: AskPiece) -> Callable[[], bytes]:
        name, first, count = question.name, question.first, question.count
        copy = self._mirrors.setdefault(upload.url, Mirror(upload.url))
        step, _ = stores.step_and_part(name)
        return functools.partial(upload.read_piece, copy, step, name, first, count)


def _written(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """The places of the parts; none where all were written to the launcher's folder."""
    found: dict[str, dict[str, str]] = checkpoint.manifest.get("stores", {})
    return found


def _places(checkpoint: Checkpoint | None, parts: Sequence[str]) -> list[str]:
    """The parts with the places where they were written."""
    known = _written(checkpoint) if checkpoint else {}
    named = [
        f"{part} (written to {manifest.place_of(known[part])})" if part in known else part
        for part in parts[:NAMED]
    ]
    return named + ([f"and {len(parts) - NAMED} more"] if len(parts) > NAMED else [])


def _nowhere(checkpoint: Checkpoint, missing: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        str(checkpoint.path),
        f"lacks {len(missing)} of its parts: no store that has come has them",
        found=", ".join(_places(checkpoint, missing)),
        fix="start `python -m launch store FOLDER` where the folder of a part is, with the "
        "variables that the launcher gives its processes; or copy the part into this checkpoint",
    )
