"""The copy of a run folder in an object store: written before a checkpoint counts. No JAX.

    s3://bucket/name/store.json, store_owner.json       as in `stores`
                     config.yaml, allowed.json, ...     as the run folder has them
                     metrics.json, metrics/             the records of steps (`record_parts`)
                     checkpoints/step_00000100/START/part_0/    written by the process that saved it
                                               manifest.json    written last, and never replaced

START is the name of the start that wrote (`stores.start_name`). No other start writes there.

All methods raise OSError for what a store says, or does not say in time.
"""

import contextlib
import errno
import functools
import importlib
import itertools
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holmesjax.checkpoints import manifest, skipped_data, stores
from holmesjax.checkpoints.record_parts import RecordParts
from holmesjax.data import object_stores, optional_packages
from holmesjax.errors import ConfigError, HolmesError, LeaseError, LostLeaseError, of_system
from holmesjax.files import places, run_folder
from holmesjax.files.whole_files import write_whole
from holmesjax.liveness.lease import Lease

CLIENTS = {"s3": "s3fs", "gs": "gcsfs"}
# A store that is busy, or that makes a mistake, answers a moment later. One that is away fails a
# save within a minute or two. One that accepts calls and stays silent costs READ_S for each try.
CONNECT_S, READ_S = 10, 60
TRIES, TRIES_OF_CLIENT = 5, 2  # of botocore, for each of s3fs, which knows few passing errors
SLOW_S, ANSWER_S = 20.0, 150.0  # a request is said to be slow, and given up with all its tries
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "max_concurrency": 1,  # else a small object is asked for its size, whose errors say nothing
        "config_kwargs": {
            "connect_timeout": CONNECT_S,
            "read_timeout": READ_S,
            "retries": {"mode": "standard", "total_max_attempts": TRIES},
        },
    }
}
PASSING = ("ExpiredToken", "RequestTimeTooSkewed")  # refusals that a later start may not meet
NOT_READ = "CredentialRetrievalError"  # botocore's: whoever gives the credentials is away
# A machine that gives its processes credentials may be asked by all of them at once.
METADATA = {"AWS_METADATA_SERVICE_NUM_ATTEMPTS": "5", "AWS_METADATA_SERVICE_TIMEOUT": "5"}
THREADS = 4  # files that are written at once; each holds a block or two
BLOCK_BYTES = 16 << 20
MOST_BLOCKS = 9_000  # of an object; S3 takes 10,000
# Of a run folder, besides what a process of another store needs (`stores.run_files`).
RUN_FILES = (
    *(run_folder.ALLOWED, run_folder.ALLOWED_DIFFERENCES, run_folder.RESTARTS),
    skipped_data.RECORD,
)
DAMAGED = "manifest.damaged.json"  # of a checkpoint that counts no more


class Mirror:
    """The copy of a run folder at a URL.

    Args:
      url: `s3://BUCKET/NAME` or `gs://BUCKET/NAME`.
      say: takes a line about what is tried again after the next save.
    """

    def __init__(self, url: str, say: Callable[[str], object] = print):
        self.url, self._say = url, say
        self._root = url.partition("://")[2]
        self.start = ""  # until `begin`
        self._published: dict[str, tuple[int, int]] = {}  # size and time of each file that is there
        self._records = RecordParts(self)
        self._committed: set[int] = set()  # steps whose manifest is known to be there
        self._dropped: set[int] = set()  # damaged checkpoints, of which the URL is not rid yet
        self._followed: tuple[Path, Collection[int], int] | None = None  # which is not done yet
        self._warned: set[str] = set()  # what has been said since all went well
        self._is_failing = False
        self._follower = ThreadPoolExecutor(1, "mirror")

    @functools.cached_property
    def _store(self) -> Any:
        scheme = self.url.partition("://")[0]
        with optional_packages.package(CLIENTS[scheme], extra=scheme, where=self.url):
            importlib.import_module(CLIENTS[scheme])
            fsspec = importlib.import_module("fsspec")
        for variable, value in METADATA.items():
            os.environ.setdefault(variable, value)
        options = OPTIONS.get(scheme, {})
        store = fsspec.filesystem(scheme, use_listings_cache=False, **options)
        if scheme == "s3":
            store.retries = TRIES_OF_CLIENT
        return store

    def _renew(self) -> None:
        """Makes another client for the next request, which reads the credentials anew."""
        if store := self.__dict__.pop("_store", None):
            type(store).clear_instance_cache()

    def close(self) -> None:
        """Waits for what follows a commit."""
        self._follower.shutdown()

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _telling(self, name: str = "") -> Iterator[None]:
        """Raises what a store's client raises as an OSError, with the URL."""
        try:
            yield
        except object_stores.errors() as error:
            if not isinstance(error, FileNotFoundError | FileExistsError):
                self._renew()
            number = (isinstance(error, OSError) and error.errno) or _number(error)
            where = f"{self.url}/{name}" if name else self.url
            raise OSError(number, object_stores.said_by(error), where) from None

    def _ask(self, request: str, name: str, *arguments: Any, **settings: Any) -> Any:
        """The answer to a short request about an object. Says that it is slow."""

        def tell() -> None:
            limit = f"is waited for up to {ANSWER_S:g} s"
            self._say(f"{self.url}/{name} has not answered for {SLOW_S:g} s, and {limit}")

        slow = threading.Timer(SLOW_S, tell)
        slow.daemon = True
        with self._telling(name):
            send = getattr(self._store, request)
            slow.start()
            try:
                return send(self._at(name), *arguments, timeout=ANSWER_S, **settings)
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, "has not answered in time") from None
            finally:
                slow.cancel()

    # ---- single objects ------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """A small object; None if it is not there."""
        try:
            return bytes(self._ask("cat_file", name))
        except FileNotFoundError:
            return None

    def read_piece(self, name: str, first: int, count: int) -> bytes:
        """Bytes of an object from a place on, as `stores.read_piece`."""
        return bytes(self._ask("cat_file", name, start=first, end=first + count))

    def put(self, name: str, content: bytes, *, replaces: bool = True) -> None:
        """Writes a small object. Raises FileExistsError for another one that is not replaced."""
        try:
            self._ask("pipe_file", name, content, mode="overwrite" if replaces else "create")
        except FileExistsError:
            if self.read(name) != content:  # an answer may have been lost, and it was tried again
                raise

    def put_file(self, path: Path, name: str, advance: Callable[[], object] = lambda: None) -> None:
        """Copies a file, some blocks in memory at a time; the object appears when it is whole.

        No object appears, and one that is there stays, where reading fails or `advance` raises.
        """
        size = path.stat().st_size
        block = max(BLOCK_BYTES, -(-size // MOST_BLOCKS // 2**18) * 2**18)
        with self._telling(name), path.open("rb") as file:
            target = self._store.open(self._at(name), "wb", block_size=block)
            try:
                while content := file.read(BLOCK_BYTES):
                    target.write(content)
                    advance()
            except BaseException:
                target.closed = True  # else it would be finished as it is
                target.discard()
                raise
            target.close()

    def listed(self, name: str) -> dict[str, int]:
        """The objects below a name, as files of the run folder, with their bytes."""
        try:
            found = self._ask("find", name, detail=True)
        except FileNotFoundError:
            return {}
        first = len(self._root) + 1
        sizes = {path[first:]: int(facts["size"]) for path, facts in found.items()}
        # A client may list all objects that begin with a name that has none below it.
        return {own: size for own, size in sizes.items() if f"{own}/".startswith(f"{name}/")}

    def remove(self, names: Collection[str]) -> None:
        """Removes objects, one by one: of those in a list s3fs does not say which are refused."""

        def remove_one(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._ask("rm_file", name)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(remove_one, names))

    # ---- whose it is ---------------------------------------------------------------------------

    def begin(self, start: str, dropped: Collection[int] = (), *, writes: bool = True) -> None:
        """Makes it that of one start of the run, by its name, as `stores.begin`.

        One of the processes of a folder `writes`; the others know whose it is. The checkpoints
        after the steps `dropped` were found damaged. Raises as `stores.refuse_earlier`.
        """
        self.start = start
        if writes:
            stores.refuse_earlier(self.url, start, self._owner())
            self.put(stores.OWNER, stores.owner_text(start).encode())
            self._dropped.update(dropped)
            self._drop()

    def check(self) -> None:
        """Raises LostLeaseError if another start has begun since.

        A record that is gone is written again: a rule of a bucket may remove objects by their age.
        """
        if not (found := self._owner()):
            with contextlib.suppress(FileExistsError):
                self.put(stores.OWNER, stores.owner_text(self.start).encode(), replaces=False)
            found = self._owner()
        if found != self.start:
            raise stores.superseded(self.url, found)

    def _owner(self) -> str:
        return _text_in(self.read(stores.OWNER), "start")

    def join(self, folder: Path) -> None:
        """Makes it the copy of a run folder, and the folder one of its run.

        Raises HolmesError where they are of different runs.
        """
        there = _text_in(self.read(stores.RECORD), "id")
        here = stores.known_identifier(folder)
        if there and here and stores.run_of(there) != stores.run_of(here):
            fix = f"name another URL; or remove {folder}, where the run at this URL is to go on"
            found = f"the identifier {there}, not {stores.run_of(here)}..."
            raise HolmesError(self.url, "is the folder of another run", found=found, fix=fix)
        here = stores.identifier(folder, stores.run_of(there) if there else None)
        if not there:
            made = stores.run_of(here) + secrets.token_hex(8)
            self.put(stores.RECORD, json.dumps({"id": made}).encode())
        places.note_url(folder, self.url)

    # ---- checkpoints ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps whose manifest is there."""
        has_manifest = lambda step: self._has(stores.name_in(step, manifest.MANIFEST))
        with ThreadPoolExecutor(manifest.THREADS) as pool:
            steps = self._steps()
            return list(itertools.compress(steps, pool.map(has_manifest, steps)))

    def _steps(self) -> list[int]:
        try:
            found = self._ask("ls", manifest.FOLDER, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in found)
        return sorted(int(match[1]) for name in names if (match := manifest.STEP.fullmatch(name)))

    def _has(self, name: str) -> bool:
        return bool(self._ask("exists", name))

    def held(self, step: int, files: Mapping[str, Any], starts: Mapping[str, str]) -> list[str]:
        """The parts of a checkpoint that are there, as `stores.held`.

        `starts` has the start that wrote each part; parts that it does not have are not looked for.
        """
        sizes = self.listed(_folder_of(step))
        whole: dict[str, bool] = {}
        for file, facts in files.items():
            if (part := manifest.part_of(file)) not in starts:
                continue
            name = stores.name_at_url(step, file, starts[part])
            is_there = sizes.get(name) == int(facts["bytes"])
            whole[part] = whole.get(part, True) and is_there
        return [part for part, is_whole in whole.items() if is_whole]

    def upload(
        self,
        folder: Path,
        step: int,
        files: manifest.Files,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        """Brings parts of a checkpoint there, which are durable when this returns.

        `advance` is called with each block, from several threads.

        Raises FileExistsError where a checkpoint of this step is there, and as `check`.
        """
        self.check()
        if self._has(name := stores.name_in(step, manifest.MANIFEST)):
            raise FileExistsError(errno.EEXIST, "a checkpoint is there", f"{self.url}/{name}")
        starts = {manifest.part_of(file): self.start for file in files}
        for part in starts:  # what a save that was cut has left
            self.remove(self.listed(stores.name_at_url(step, part, self.start)))
        put = lambda file: self.put_file(
            folder / stores.name_in(step, file),
            stores.name_at_url(step, file, self.start),
            advance,
        )
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(put, files))
        if missing := starts.keys() - set(self.held(step, files, starts)):
            where = f"{self.url}/{stores.name_at_url(step, min(missing), self.start)}"
            raise OSError(errno.EIO, "is not there in its size after it was written", where)
        self.check()

    def commit(self, folder: Path, step: int, text: str) -> None:
        """Writes the files of the run, and then the manifest of a checkpoint. Raises as `check`."""
        self.check()
        self._publish(folder)
        self.put(stores.name_in(step, manifest.MANIFEST), text.encode(), replaces=False)
        try:
            self.check()
        except LostLeaseError:
            self.withdraw(step)
            raise
        self._committed.add(step)

    def withdraw(self, step: int) -> None:
        """Takes a commit back."""
        self._committed.discard(step)
        self.remove([stores.name_in(step, manifest.MANIFEST)])

    def _drop(self) -> None:
        """Takes back the commits of damaged checkpoints, whose steps can then be saved again.

        A store that lets nothing be removed is told, and holds no start up.
        """
        for step in sorted(self._dropped):
            try:
                if content := self.read(stores.name_in(step, manifest.MANIFEST)):
                    self.put(stores.name_in(step, DAMAGED), content)
                    self.withdraw(step)
            except PermissionError as error:
                self._warn(error)
            else:
                self._dropped.discard(step)

    def _publish(self, folder: Path) -> None:
        """Writes the files of the run that have changed."""
        for name in [*stores.run_files(folder), *RUN_FILES]:
            with contextlib.suppress(FileNotFoundError):
                facts = (folder / name).stat()
                version = (facts.st_size, facts.st_mtime_ns)
                if self._published.get(name) != version:
                    self.put_file(folder / name, name)
                    self._published[name] = version
        with contextlib.suppress(FileNotFoundError):
            self._records.publish(folder / run_folder.METRICS)

    def follow(
        self, folder: Path, steps: Collection[int], last: int, dropped: Collection[int] = ()
    ) -> None:
        """Removes what the launcher has not kept, of whose steps `steps` are; does not wait.

        `dropped` are those of damaged checkpoints. What is asked for last is done, once.
        """
        self._dropped.update(dropped)
        if steps or self._followed is None:
            self._followed = folder, steps, last
        self._follower.submit(self._tell, self._follow)

    def take(self, step: int, text: str) -> None:
        """Writes a manifest that the launcher has committed; does not wait."""
        name = stores.name_in(step, manifest.MANIFEST)
        self._follower.submit(self._tell, lambda: self.put(name, text.encode()))

    def _follow(self) -> None:
        followed, self._followed = self._followed, None
        if followed is None:  # by what was asked for before
            return
        self._follow_now(*followed)

    def _follow_now(self, folder: Path, steps: Collection[int], last: int) -> None:
        self._is_failing = False
        self._drop()
        self._publish(folder)
        for step in sorted(set(steps) - self._committed):  # that could not be written at the time
            path = manifest.folder_of(folder, step) / manifest.MANIFEST
            if not path.is_file():
                continue
            if not self._has(name := stores.name_in(step, manifest.MANIFEST)):
                self.put(name, path.read_bytes(), replaces=False)
            self._committed.add(step)
        if steps:
            self.keep(steps, last)  # last: a store may let nothing be removed
        self._records.tidy(self.check)
        if not self._is_failing:
            self._warned.clear()

    def _tell(self, do: Callable[[], object]) -> None:
        try:
            if self.start:
                self.check()
                do()
        except Exception as error:  # else nobody hears of it
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Says an error, once in a row of failures: a store may refuse the same each time."""
        self._is_failing = True
        why = " ".join(str(error).split())
        if why not in self._warned:
            self._warned.add(why)
            self._say(f"warning: {self.url} is not up to date, which is tried again: {why}")

    def keep(self, steps: Collection[int], last: int) -> None:
        """Takes away the checkpoints that are not among `steps`, by the rules of `stores.keep`."""
        superfluous: list[tuple[str, dict[str, int]]] = []
        for step in self._steps():
            if step in steps or step > last:
                continue
            name, there = stores.name_in(step, manifest.MANIFEST), self.listed(_folder_of(step))
            if step < max(steps) or name not in there:
                superfluous.append((name, there))
        self.check()  # behind the lists: a later start has written nothing that is in them
        for name, there in superfluous:
            self.remove([name] if name in there else [])  # what has none is no checkpoint
            self.remove(there.keys() - {name})

    # ---- another machine -----------------------------------------------------------------------

    def pull(self, folder: Path, lease: Lease, say: Callable[[str], object]) -> None:
        """Brings the files of the run and the manifests here; parts are fetched when needed.

        The files of the folder stay where it was the last that wrote to the URL.
        """
        own = stores.known_identifier(folder)
        if not stores.is_of(owner := self._owner(), own):
            names = [name for name in (*stores.RUN_FILES, *RUN_FILES) if self._has(name)]
            for name in stores.RUN_FOLDERS:
                names += self.listed(name)
            metrics = folder / run_folder.METRICS
            if not self._records.bring(metrics, say):  # of an earlier version
                names += self.listed(run_folder.METRICS)
            for name in names:
                self._pull_file(folder, name)
            if owner:
                say(f"run folder  {len(names)} files from {self.url}, which another start wrote")
        here = dict(manifest.finished(folder))
        damaged = {step for step, path in here.items() if not _is_sound(path)}
        for step in sorted(set(self.steps()) - (set(here) - damaged)):
            path = manifest.folder_of(folder, step)
            if path.exists() and step not in damaged:  # parts of another save than the manifest's
                lease.move(path, path.with_name(f"{path.name}.{secrets.token_hex(4)}.removed"))
            if content := self.read(stores.name_in(step, manifest.MANIFEST)):
                path.mkdir(parents=True, exist_ok=True)
                write_whole(path / manifest.MANIFEST, content)

    def _pull_file(self, folder: Path, name: str) -> None:
        try:
            is_own = name in (*RUN_FILES, run_folder.METRICS)
            path = folder / name if is_own else stores.place_of(folder, name)
        except ValueError:  # somebody else has put it there
            return
        content = self.read(name)
        if content is not None and (not path.is_file() or path.read_bytes() != content):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)


def _is_sound(path: Path) -> bool:
    """Whether the manifest of a checkpoint here is whole; the store has those that are not."""
    try:
        return manifest.is_sound(manifest.at(path).manifest)
    except HolmesError:  # it may not be read, or not now
        return False


def _folder_of(step: int) -> str:
    return stores.name_in(step, "").rstrip("/")


def _text_in(content: bytes | None, field: str) -> str:
    """A field of an object in JSON; "" where there is none, or none that can be read."""
    try:
        found = json.loads(content or b"{}")[field]
        return found if isinstance(found, str) else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _number(error: Exception) -> int:
    """The number of an error whose client gives none."""
    answer = getattr(error.__cause__, "response", None) or {}
    if answer.get("Error", {}).get("Code") in PASSING or type(error).__name__ == NOT_READ:
        return errno.EIO
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    if isinstance(error, FileExistsError):
        return errno.EEXIST
    denied = isinstance(error, PermissionError) or re.search("credential", str(error), re.I)
    return errno.EACCES if denied else errno.EIO


def of(folder: Path, say: Callable[[str], object] = print) -> Mirror | None:
    """The copy of a run folder, if it has one."""
    url = places.url_of(folder)
    return Mirror(url, say) if url else None


def bring(place: str, say: Callable[[str], object]) -> Path:
    """The folder of a run, with what its object store has besides the arrays.

    Nothing is brought where a run goes on here. Raises ConfigError if there is no run, and as
    `open_run`.
    """
    folder = places.folder_of(place)
    if url := places.whole_url(place):
        try:
            is_there = Mirror(url)._has("config.yaml")
        except OSError as error:
            raise of_system(error) from None
        if not is_there:
            found, fix = "no config.yaml in it", "name the URL of a run that has saved a checkpoint"
            raise ConfigError(place, "is no run folder", found=found, fix=fix)
        with contextlib.suppress(LeaseError), Lease(folder) as lease:
            open_run(place, lease, say)
    return folder


def open_run(place: str | Path, lease: Lease, say: Callable[[str], object]) -> None:
    """Brings what a run in an object store needs to its folder here, whose owner calls this.

    Does nothing for a run folder without a copy.

    Raises PeerError if the store cannot be reached, and HolmesError for what cannot be.
    """
    folder = places.folder_of(place)
    if (url := places.whole_url(place) or places.url_of(folder)) is None:
        return
    mirror = Mirror(url, say)
    try:
        mirror.join(folder)
        mirror.pull(folder, lease, say)
    except FileNotFoundError as error:
        if "://" not in str(error.filename):
            raise of_system(error) from None
        fix = "correct the name in run.dir, or make the bucket"
        raise ConfigError(url, "has no bucket", found=error.strerror, fix=fix) from None
    except OSError as error:
        raise of_system(error) from None
    finally:
        mirror.close()
