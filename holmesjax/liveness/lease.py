"""One owner of a run folder at a time, also where hosts share it over NFS. Does not import JAX.

The owner's lease is the file `owner.json`. It is written under another name and then linked. A link
succeeds for one process alone; no other way of making a file does so over NFS. The owner counts up
in it every few seconds, by the descriptor of the file it made: it cannot write into a lease that
somebody else has put in its place.

Nobody compares clocks of two hosts. On the host of the owner, its lease is stale when its process
is gone. On another host, it is stale when the counter has not moved for a whole term on the
reader's own clock. A stale lease is renamed before it is deleted, and put back if by then it is
another one. On a local disk a lease that somebody deletes is put back by its owner, if nobody has
owned the folder since.

    epoch.json    stays in the run folder: how many owners it has had

Each owner has an epoch, which is greater than that of every owner before it. An owner that stood
still for so long that another took over may wake up at any moment, with files open and calls under
way. So it looks at the lease before each write (`check`), once more behind a rename or a commit
(`move`, `act`), and between the two halves of a file that is replaced (`whole_files`). Who takes
over writes into files of its own (`is_taken_over`).
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from holmesjax.errors import (
    ConfigError,
    HolmesError,
    LeaseError,
    LostLeaseError,
    UnseenLeaseError,
    raise_if_passing,
)
from holmesjax.files import regular_files
from holmesjax.files.whole_files import TEMPORARY, owned, write_whole
from holmesjax.liveness import hung_main_thread, lease_record
from holmesjax.liveness.lease_record import FILE, Record

EPOCH = "epoch.json"
RENEW_S = 5.0
MOST_BYTES = 1 << 16  # of a lease
TERM_S = 60.0  # twelve renewals: a busy file system may hold up several in a row
LOOK_S = 1.0  # between two looks at the lease of another host
SETTLE_S = 0.5  # for somebody who has renamed a lease to see that it is not stale, and put it back
TRIES = 100
P = ParamSpec("P")
T = TypeVar("T")


class Lease:
    """The ownership of a run folder by this process; a context manager that gives it up at its end.

    Args:
      run_dir: the run folder; made if it is missing.
      on_loss: called once, in any thread, when the lease is lost; without it `check` says so.
      say: takes what there is to say before the lease is there, and where it comes back.

    Raises:
      LeaseError: another process owns the folder.
      ConfigError: the folder cannot be written, or has no links.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        on_loss: Callable[[LostLeaseError], None] | None = None,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ):
        self._path, self._on_loss = Path(run_dir).absolute() / FILE, on_loss
        self._say, self._record = say, lease_record.new_record()
        self._lost: LostLeaseError | None = None
        self._renewing, self._ended = threading.RLock(), threading.Event()
        self._end_looks: Callable[[], None] = lambda: None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._folder = self._path.parent.stat()
            self._is_taken_over, self._earlier_epoch = False, 0
            self._take(say)
        except OSError as error:
            raise _unusable(self._path.parent, error) from None
        self._renewed_s = _now_s()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def epoch(self) -> int:
        """The number of this owner, which is greater than that of every one before it."""
        return int(self._record["epoch"])

    @property
    def is_taken_over(self) -> bool:
        """Whether an owner that may wake up can have files of the run open: see `settle`."""
        return self._is_taken_over

    def settle(self) -> None:
        """Call when no file that is written to is one that an owner before this can have open.

        Raises LostLeaseError and OSError.
        """
        if self._is_taken_over:
            self.check()
            self._is_taken_over = False
            self._write_epoch()

    def check(self, *, at_once: bool = False) -> None:
        """Call before writing what another owner would miss; looks again if it is long ago.

        Args:
          at_once: whether to look again in any case.

        Raises LostLeaseError.
        """
        if at_once or _now_s() > self._renewed_s + TERM_S / 2:  # it slept, or the file system did
            self._renew()
        if self._lost:
            raise self._lost

    def _look(self) -> None:
        """Reads the lease. Raises LostLeaseError, and OSError where it cannot be read."""
        found = lease_record.read(self._path)
        if found is None or not lease_record.is_of(found, self._record):
            self._renew()
            self.check()

    def guard(self, write: Callable[P, T]) -> Callable[P, T]:
        """Returns the function `write`, which calls `check` first."""

        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            self.check()
            return write(*args, **kwargs)

        return checked

    def move(self, path: Path, target: Path) -> None:
        """Renames a file or folder of the run, which is how anything of a run is taken away.

        Raises LostLeaseError, and OSError where nothing was renamed.
        """
        self.act(lambda: path.rename(target), lambda: target.rename(path), path)

    def act(
        self, do: Callable[[], object], undo: Callable[[], object], path: Path | None = None
    ) -> None:
        """Does what another owner would miss, and undoes it if the lease is another's behind it.

        This process may have stood still since it looked, so the lease is read once more.

        Args:
          do: one call of the file system, or a few.
          undo: takes it back.
          path: what it is about.

        Raises LostLeaseError, and OSError where nothing was done.
        """
        self.check()
        with self._renewing:  # no other thread learns of a loss, and ends this process, in between
            do()
            try:
                found = lease_record.read(self._path)
            except OSError:
                undo()
                raise
            if found is not None and lease_record.is_of(found, self._record):
                return
            undo()
        self._renew()
        self.check()
        where = str(path or self._path)
        raise OSError(errno.EAGAIN, "the lease of the run folder was not to be seen", where)

    def release(self) -> None:
        """Gives the lease up. If it is lost nothing is touched."""
        self._ended.set()
        self._end_looks()
        # On another thread: a file system that hangs holds no end up, and the lease is then stale.
        end = threading.Thread(target=self._give_up, name="lease's end", daemon=True)
        end.start()
        end.join(2 * RENEW_S)

    def _give_up(self) -> None:
        self._thread.join(RENEW_S)
        if not self._lost:
            with contextlib.suppress(OSError):  # then it is stale
                lease_record.remove(self._path, self._record)
        if not self._thread.is_alive():
            os.close(self._file)

    # ---- taking it -----------------------------------------------------------------------------

    def _take(self, say: Callable[[str], None]) -> None:
        """Returns when the lease is ours; `_file` is its descriptor."""
        own = lease_record.beside(self._path, self._record["token"])
        file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(file, lease_record.text(self._record))
            os.fsync(file)
            self._link(own, file, say)
            self._file, self._end_looks = file, owned(self._path.parent, self._look)
            self._begin_epoch(file)
        except BaseException:
            os.close(file)
            self._end_looks()
            with contextlib.suppress(OSError):
                lease_record.remove(self._path, self._record)
            raise
        finally:
            with contextlib.suppress(OSError):  # it is a second name, which a later owner removes
                own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the lease is ours, whatever else is left
            hidden = lease_record.beside(self._path, "*").name
            for left in self._path.parent.glob(hidden):  # by a kill -9
                if (record := lease_record.read(left)) and lease_record.is_gone(record):
                    left.unlink(missing_ok=True)

    def _begin_epoch(self, file: int) -> None:
        """Takes the number behind all others; the lease is ours, so nobody else does."""
        known = lease_record.read(self._path.with_name(EPOCH)) or {"epoch": 0}
        last = known.get("epoch")
        if not isinstance(last, int):  # the record is damaged: no count of owners comes so far
            last = time.time_ns()
        self._is_taken_over |= bool(known.get("is_taken_over", "epoch" not in known))
        if self._is_taken_over:
            for left in self._path.parent.glob(TEMPORARY):
                with contextlib.suppress(IsADirectoryError):
                    left.unlink(missing_ok=True)  # else its owner could wake up, and rename it
        self._record["epoch"] = f"{max(last, self._earlier_epoch) + 1:020}"
        os.pwrite(file, lease_record.text(self._record), 0)
        os.fsync(file)
        self._write_epoch()

    def _write_epoch(self) -> None:
        content = {"epoch": self.epoch, "is_taken_over": self._is_taken_over}
        write_whole(self._path.with_name(EPOCH), json.dumps(content) + "\n")

    def _link(self, own: Path, file: int, say: Callable[[str], None]) -> None:
        """Returns when the lease is ours."""
        has_taken_over = False
        for _ in range(TRIES):
            with contextlib.suppress(FileExistsError):
                os.link(own, self._path)
            other = lease_record.read(self._path)
            if other and other.get("token") == self._record["token"]:
                if not has_taken_over:
                    return
                time.sleep(SETTLE_S)
                other = lease_record.read(self._path)
                if other and other.get("token") == self._record["token"]:
                    return
            if other is None:  # given up just now
                time.sleep(0.01)
                continue
            if not lease_record.is_gone(other):
                wait_until_stale(self._path, other, say)
            if lease_record.remove(self._path, other):
                has_taken_over = self._is_taken_over = True
                with contextlib.suppress(ValueError):
                    self._earlier_epoch = max(self._earlier_epoch, int(other.get("epoch", 0)))
                say(f"taking the run folder over from {lease_record.who(other)}, which is gone")
        raise OSError(errno.EBUSY, f"{FILE} comes and goes")

    # ---- keeping it ----------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S) and not self._lost:
            self._renew()
            self._keep_epoch()

    def _renew(self) -> None:
        with self._renewing:
            if self._lost or self._ended.is_set():
                return
            self._record["counter"] = f"{int(self._record['counter']) + 1:012}"
            try:
                self._write()
                found = lease_record.read(self._path)
                if found is None:  # perhaps renamed by mistake
                    time.sleep(SETTLE_S)
                    found = lease_record.read(self._path)
                is_back = found is None and self._put_back()
            except OSError as error:
                if _now_s() > self._renewed_s + TERM_S:
                    problem = f"could not renew its lease for {TERM_S:g} s"
                    fix = "see that its file system is there; then start it again"
                    self._lose(problem, error, kind=UnseenLeaseError, fix=fix)
                return
            if is_back:
                self._renewed_s = _now_s()
            elif found is None:
                self._lose("has lost its lease", f"no {FILE}")
            elif not lease_record.is_of(found, self._record):
                self._lose("has lost its lease to another process", self._who_has(found))
            else:
                self._renewed_s = _now_s()

    def _put_back(self) -> bool:
        """Makes the lease anew where it was deleted; returns false if the folder may be another's.

        A link succeeds for one process alone, so it is this one's or that of whoever was faster.
        Over NFS the lease counts as lost: a file that another host deletes is stale, and one that
        this host deletes keeps a name as long as it is open.

        Raises OSError where that cannot be seen, or be written, now.
        """
        own = lease_record.beside(self._path, self._record["token"])
        try:
            is_here = os.path.samestat(self._path.parent.stat(), self._folder)
            # A lease that was moved has a name; one that was deleted has none.
            if not is_here or os.fstat(self._file).st_nlink or self._has_successor():
                return False
            if self._ended.is_set() or _now_s() > self._renewed_s + TERM_S / 2:
                return False  # it slept so long that others may have found the lease stale
            file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.write(file, lease_record.text(self._record))
                os.fsync(file)
                os.link(own, self._path)
                if self._has_successor():  # which came and went in between
                    lease_record.remove(self._path, self._record)
                    return False
                self._file, file = file, self._file
            finally:
                os.close(file)
                own.unlink(missing_ok=True)
        except (FileExistsError, FileNotFoundError):  # another's lease; the folder is gone
            return False
        self._tell_of_return(self._path)
        return True

    def _tell_of_return(self, path: Path) -> None:
        with contextlib.suppress(OSError, ValueError):  # a lost console takes no lease away
            self._say(f"warning: {path} was removed, and is there again")

    def _has_successor(self) -> bool:
        known = lease_record.read(self._path.with_name(EPOCH))
        return known is not None and known.get("epoch") != self.epoch

    def _keep_epoch(self) -> None:
        """Makes the number of owners anew where it was deleted: the next owner counts on."""
        with self._renewing, contextlib.suppress(OSError, LostLeaseError):
            if not (self._lost or self._ended.is_set() or self._path.with_name(EPOCH).exists()):
                self._write_epoch()
                self._tell_of_return(self._path.with_name(EPOCH))

    def _write(self) -> None:
        """Writes the record; a file server that was away may have forgotten the open file."""
        try:
            os.pwrite(self._file, lease_record.text(self._record), 0)
            os.fsync(self._file)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            with contextlib.suppress(FileNotFoundError):  # who reads the lease next finds that, too
                self._open_again()

    def _open_again(self) -> None:
        """Opens the lease by its name, if it is ours: another's is never written to."""
        file = regular_files.opener(self._path, os.O_RDWR)
        if lease_record.is_of(lease_record.record_in(os.pread(file, MOST_BYTES, 0)), self._record):
            self._file, file = file, self._file
        with contextlib.suppress(OSError):
            os.close(file)

    def _who_has(self, found: Record) -> str:
        epoch = str(found.get("epoch", "")).lstrip("0")
        who = lease_record.who(found)
        return f"{who}, with epoch {epoch or 'unknown'}; this process has {self.epoch}"

    def _lose(
        self,
        problem: str,
        found: object,
        *,
        kind: type[LostLeaseError] = LostLeaseError,
        fix: str = "let the other go on; or, if the folder was moved or deleted, resume in it",
    ) -> None:
        if self._ended.is_set():
            return
        self._lost = kind(
            str(self._path.parent),
            f"this process {problem}, and has stopped: two would destroy each other's files",
            found=found,
            fix=fix,
        )
        if self._on_loss:
            self._on_loss(self._lost)


def end_process(error: LostLeaseError) -> None:
    """Ends this process and its children at once, from any thread; meant for `on_loss`."""
    say = lambda: print(f"error: {error}", file=sys.stderr)
    hung_main_thread.end_process(error.exit_status, say)


def fence(run_dir: str | Path, epoch: int) -> Callable[[], None]:
    """Returns a check that a run folder still has the owner of this process's job.

    It raises LostLeaseError, or OSError where the lease cannot be read.

    Args:
      run_dir: the run folder.
      epoch: of the owner.
    """
    path = Path(run_dir).absolute() / FILE

    def check() -> None:
        deadline_s = time.monotonic() + 2 * RENEW_S + SETTLE_S
        while (found := lease_record.read(path)) is None and time.monotonic() < deadline_s:
            time.sleep(SETTLE_S)  # perhaps renamed by mistake, or deleted: its owner puts it back
        if found is None or found.get("epoch") != f"{epoch:020}":
            raise LostLeaseError(
                str(path.parent),
                "the job of this process has lost its lease to another process, and has stopped",
                found=lease_record.who(found) if found else f"no {FILE}",
                fix="let the other job go on",
            )

    return check


def owner(run_dir: str | Path) -> str | None:
    """Who owns a run folder, in words; None if nobody does, or its owner here has ended."""
    record = lease_record.read(Path(run_dir) / FILE)
    if record is None or lease_record.is_gone(record):
        return None
    return "process {pid} on {host}".format_map({"pid": "?", "host": "?"} | record)


def refuse_owned(run_dir: str | Path) -> None:
    """Raises LeaseError if a process of this machine owns a run folder; `Lease` asks others, too.

    For a caller that has long work to do before it takes the lease.
    """
    path = Path(run_dir) / FILE
    try:
        record = lease_record.read(path)
    except OSError:
        return  # `Lease` says why
    if record is not None and lease_record.is_here(record) and not lease_record.is_gone(record):
        raise _owned(path, record)


def wait_until_stale(
    path: Path,
    seen: Record,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until the lease that was `seen` has not moved for a term, or is there no more.

    A look that the file system holds up counts no more than any other: the owner may be held up
    too.

    Args:
      path: the file of the lease.
      seen: the lease as it was read before; this file is compared with it.
      say: takes one line, which tells why the wait begins.
      clock: seconds of a clock that never goes back.
      sleep: waits for a number of seconds.

    Raises:
      LeaseError: the owner lives.
    """
    if lease_record.is_here(seen):
        raise _owned(path, seen)  # its process was just seen
    who = lease_record.who(seen)
    say(f"{path.parent} is owned by {who}; waiting for {TERM_S:g} s for a sign of its life")
    still_s, last_s = 0.0, clock()
    while still_s < TERM_S:
        sleep(LOOK_S)
        found = lease_record.read(path)
        if found is None or found.get("token") != seen.get("token"):
            return
        if found != seen:
            raise _owned(path, found)
        now_s = clock()
        still_s, last_s = still_s + min(now_s - last_s, 2 * LOOK_S), now_s


def _now_s() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _owned(path: Path, record: Record) -> LeaseError:
    stop = (
        "end it" if lease_record.is_here(record) else f"end it on {record.get('host', 'its host')}"
    )
    fix = f"wait for it, {stop}, or use another run.dir; if the folder is a copy, delete its {FILE}"
    problem = "is in use by another process"
    return LeaseError(str(path.parent), problem, found=lease_record.who(record), fix=fix)


def _unusable(folder: Path, error: OSError) -> HolmesError:
    """A mistake of the user, or a `PeerError` where the folder may be written once more."""
    problem, fix = "the run folder cannot be written", "make it writable, or use another run.dir"
    if error.errno != errno.EACCES:
        fix = "use another run.dir"
    if folder.is_dir() and error.errno in (
        errno.EPERM,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EMLINK,
    ):
        problem = "the file system of the run folder has no hard links"
        fix = "use a run.dir on another one: a local disk, NFS or Lustre, say"
    elif error.errno != errno.EROFS or (folder / EPOCH).exists():
        # A file system that is read-only at the first start is a mistake; later it has failed.
        raise_if_passing(error, folder)
    path = error.filename2 or error.filename or folder
    return ConfigError("run.dir", problem, found=f"{path}: {error.strerror}", fix=fix)
