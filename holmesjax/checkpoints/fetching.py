"""Brings parts of a checkpoint into a run folder that lacks them, a piece at a time. No JAX.

A part may be in an object store, whose URL the manifest has, and in the stores that the launcher
reaches. A copy goes on where it stopped, and counts when all of its files are as in the manifest.
"""

import contextlib
import fcntl
import functools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from holmesjax import units
from holmesjax.checkpoints import manifest, stores
from holmesjax.checkpoints.copy_progress import CopyProgress
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.stores import PIECE_BYTES, Copy
from holmesjax.errors import HolmesError, PeerError
from holmesjax.files import places

RETRY_S = 60.0  # that a fetch tries again for, when its source is lost
LOOK_S = 0.2  # between two looks at a part that another process fetches
# Without a byte of a part that another process fetches: longer than that one waits itself.
OTHER_S = 780.0

Read = Callable[[str, int, int], bytes]  # bytes of a file of the run folder, from a place on
Source = Callable[[], AbstractContextManager[Read]]  # opens it, for the pieces of a part


class UnreadError(Exception):
    """A source lives, and cannot give a piece."""


class UntakenError(PeerError):
    """The disk here does not take what has come."""


def fetch(
    folder: Path,
    checkpoint: Checkpoint,
    parts: Collection[str],
    source: Source | None,
    advance: Callable[[], object],
    say: Callable[[str], object],
    *,
    first: Collection[str] = (),
    second: Source | None = None,
    again: bool = False,
    bytes_per_s: float | None = None,
) -> None:
    """Brings the parts of a checkpoint here that are not here yet.

    Args:
      folder: the run folder; the checkpoint's manifest is in it.
      checkpoint: whose parts are wanted.
      parts: their names.
      source: reads through the launcher, where a part is in no object store, or that is away. It
        raises OSError, ValueError and UnreadError; None: there is none.
      advance: called with each piece.
      say: takes lines that tell how far it is.
      first: parts that are asked of `source` before a URL.
      second: as `source`, for what came of such a part with other bytes than were written.
      again: brings those that are here, too; each stays until what has come is whole.
      bytes_per_s: of the link over which parts come; None: not known.

    Raises PeerError if a part cannot be fetched now, UntakenError where that is for the disk here,
    and DamagedError if a file of a part at a URL has not come as it was written, twice.
    """
    files = checkpoint.manifest["files"]
    here = lambda: set() if again else set(stores.held(folder, checkpoint.step, files))
    copies = [
        Copy(folder=folder, step=checkpoint.step, part=part, files=files)
        for part in sorted(set(parts) - here())
    ]
    if not copies:
        return
    names = ", ".join(copy.part for copy in copies)
    total, begun = sum(copy.num_bytes for copy in copies), sum(copy.begun() for copy in copies)
    progress = CopyProgress(f"fetching {names}", total, begun, say, bytes_per_s)
    for copy in copies:
        with _only_one(copy, advance):
            if copy.part not in here():
                upload = uploads_of(checkpoint).get(copy.part)
                at_url: list[Source] = []
                if upload:
                    at_url = [functools.partial(_of_upload, upload, copy.step)]
                other = [source] if source else []
                sources = [*at_url, *other]
                if copy.part in first:
                    sources = [*other, *at_url, *([second] if second else [])]
                try:
                    _fetch_part(copy, sources, progress, advance)
                except stores.ChangedError as error:
                    if upload is None:
                        raise _unfetched(copy, "cannot be fetched", error) from None
                    what = f"another SHA-256 of what {upload.url} has, twice"
                    raise manifest.damaged(checkpoint, error.file, "is damaged", what) from None
    progress.end(f"fetched {names}")


def bring_uploads(checkpoint: Checkpoint, say: Callable[[str], object]) -> None:
    """Brings the parts here that only an object store has; raises as `fetch`.

    Raises CheckpointError if others are elsewhere.
    """
    run_dir = checkpoint.path.parent.parent
    parts = uploads_of(checkpoint).keys() & manifest.elsewhere(checkpoint).keys()
    fetch(run_dir, checkpoint, parts, None, lambda: None, say)
    manifest.refuse_elsewhere(checkpoint)


def bring_of_url(checkpoint: Checkpoint, say: Callable[[str], object]) -> None:
    """Does that for a run at a URL; the folder of another is only read, and its parts are here.

    Raises as `bring_uploads`.
    """
    if places.url_of(checkpoint.path.parent.parent):
        bring_uploads(checkpoint, say)
    else:
        manifest.refuse_elsewhere(checkpoint)


@dataclass(frozen=True)
class Upload:
    """A part of a checkpoint in an object store.

    Args:
      url: of the run folder.
      start: which wrote it (`stores.start_name`).
    """

    url: str
    start: str

    def read_piece(self, mirror: Mirror, step: int, name: str, first: int, count: int) -> bytes:
        """Bytes of a file of a checkpoint, as `stores.read_piece`.

        Args:
          mirror: the copy at the URL.
          step: of the checkpoint.
          name: of the file in the run folder.
          first, count: which bytes.
        """
        file = name.removeprefix(stores.name_in(step, ""))
        return mirror.read_piece(stores.name_at_url(step, file, self.start), first, count)


def fetch_again(
    checkpoint: Checkpoint,
    part: str,
    advance: Callable[[], object],
    say: Callable[[str], object],
) -> None:
    """Brings a part that is at a URL here once more, since what is here may be damaged.

    The part here is set aside when the other is whole, so it is not lost where the URL is away.

    Raises as `fetch`.
    """
    fetch(checkpoint.path.parent.parent, checkpoint, [part], None, advance, say, again=True)


def uploads_of(checkpoint: Checkpoint) -> dict[str, Upload]:
    """The parts of a checkpoint that are in object stores."""
    return {
        part: Upload(url, where.get("start", ""))
        for part, where in checkpoint.manifest.get("stores", {}).items()
        if (url := places.whole_url(where["folder"]))
    }


def held_at_urls(checkpoint: Checkpoint) -> tuple[set[str], dict[str, OSError]]:
    """The parts that an object store has, each file in its size; of a store that is away none.

    The second result has the parts that may be in stores that do not say so, and what came instead.
    """
    found: set[str] = set()
    unknown: dict[str, OSError] = {}
    uploads, files = uploads_of(checkpoint), checkpoint.manifest["files"]
    for url in dict.fromkeys(upload.url for upload in uploads.values()):
        starts = {part: upload.start for part, upload in uploads.items() if upload.url == url}
        with contextlib.suppress(ValueError, HolmesError):
            try:
                found |= set(Mirror(url).held(checkpoint.step, files, starts))
            except OSError as error:
                unknown |= dict.fromkeys(starts, error)
    return found, unknown


@contextlib.contextmanager
def _of_upload(upload: Upload, step: int) -> Iterator[Read]:
    yield functools.partial(upload.read_piece, Mirror(upload.url), step)


def _fetch_part(
    copy: Copy,
    sources: list[Source],
    progress: CopyProgress,
    advance: Callable[[], object],
) -> None:
    """Raises PeerError, and ChangedError for a file at a URL that was changed twice."""
    deadline_s, seen = time.monotonic() + RETRY_S, progress.done
    changed: set[str] = set()
    while True:
        problem: Exception = LookupError("no store is known that has it")
        for source in sources:
            try:
                with source() as read:
                    for file in copy.own_files:
                        _fetch_file(copy, file, read, progress, advance)
                copy.finish()
                return
            except stores.ChangedError as error:
                if error.file in changed:
                    raise
                changed.add(error.file)
                problem = error
            except (OSError, ValueError, UnreadError) as error:
                problem = error
        if progress.done > seen and not progress.is_too_much:
            deadline_s, seen = time.monotonic() + RETRY_S, progress.done
        is_of_disk = isinstance(problem, _DiskError)
        if is_of_disk or not sources or time.monotonic() > deadline_s:
            of = UntakenError if is_of_disk else PeerError
            raise _unfetched(copy, "cannot be fetched", problem, of) from None
        time.sleep(1.0)  # another store may come, or this one again


class _DiskError(OSError):
    """The disk here does not take what has come."""


def _fetch_file(
    copy: Copy,
    file: str,
    read: Read,
    progress: CopyProgress,
    advance: Callable[[], object],
) -> None:
    name, size = stores.name_in(copy.step, file), int(copy.files[file]["bytes"])
    with _growing(copy, file) as write:
        while (first := copy.missing(file)) is not None:
            content = read(name, first, PIECE_BYTES) if size else b""
            if not content and size:
                raise ValueError(f"{file} has ended early, at byte {first}")
            write(content)
            progress.add(len(content))
            advance()


@contextlib.contextmanager
def _growing(copy: Copy, file: str) -> Iterator[Callable[[bytes], None]]:
    try:
        growing = copy.growing(file).open("ab")
    except OSError as error:
        raise _DiskError(error.errno, error.strerror, error.filename) from None

    def write(content: bytes) -> None:
        try:
            growing.write(content)
            growing.flush()
        except OSError as error:
            raise _DiskError(error.errno, error.strerror, growing.name) from None

    with growing:
        yield write


@contextlib.contextmanager
def _only_one(copy: Copy, advance: Callable[[], object]) -> Iterator[None]:
    """Lets one process of this store fetch a part at a time; a killed one is not waited for.

    Raises PeerError if no byte comes to another's copy from one `OTHER_S` to the next.
    """
    copy.path.parent.mkdir(parents=True, exist_ok=True)
    with copy.path.with_name(f"{copy.part}.lock").open("wb") as file:
        deadline_s, seen = time.monotonic() + OTHER_S, copy.begun()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            advance()
            time.sleep(LOOK_S)
            if time.monotonic() < deadline_s:
                continue
            if (now := copy.begun()) == seen:
                found = f"no byte of it in {units.duration(OTHER_S)}"
                raise _unfetched(copy, "is fetched by another process, which stands still", found)
            deadline_s, seen = time.monotonic() + OTHER_S, now
        yield


def _unfetched(
    copy: Copy, problem: str, found: object, of: type[PeerError] = PeerError
) -> PeerError:
    where = f"{copy.part} of the checkpoint after step {copy.step}"
    fix = "start again with the same command: it goes on with what is fetched"
    return of(where, problem, found=found, fix=fix)
