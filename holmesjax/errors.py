"""Errors that HolmesJAX raises on purpose.

A mistake that the user can repair is a `HolmesError`: the command line prints it as one paragraph,
without a traceback, and exits with its status. A broken invariant is an `assert`: it is our
bug, and its traceback is wanted.
"""

import errno
from collections.abc import Sequence
from typing import ClassVar

SHOWN = 10  # mistakes of a file, in full
REQUEUE = 75  # EX_TEMPFAIL: what batch schedulers take for "start me again"
# Errors of the operating system that stay until somebody changes a name or a permission.
FINAL = (
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ESPIPE),
)


class HolmesError(Exception):
    """An error a user can cause and repair: where, what is wrong, what was found, what to do."""

    exit_status: ClassVar[int] = 2

    def __init__(self, where: str, problem: str, *, found: object, fix: str):
        self.where, self.problem, self.found, self.fix = where, problem, found, fix
        super().__init__(f"{where}: {problem}\n  found: {found}\n  fix: {fix}")

    def parts(self) -> dict[str, str]:
        """Its four parts by name, for a message to another process."""
        return {name: str(getattr(self, name)) for name in ("where", "problem", "found", "fix")}


class ConfigError(HolmesError, ValueError):
    """A setting of a run file that cannot work; `where` is its dotted path."""


class TopologyError(HolmesError, ValueError):
    """A description of machines that cannot be."""


class PlanError(HolmesError, ValueError):
    """No plan satisfies the settings on the given machines."""


class DataError(HolmesError):
    """A corpus that is missing, empty or too small."""


class AbsentDataError(DataError):
    """Data that is not on this machine; where only a plan is wanted, it need not be."""


class UnreadDataError(DataError):
    """Bytes of a file that was opened, which cannot be read or are not there any more."""


class CheckpointError(HolmesError):
    """A checkpoint that is missing, damaged, or of another model."""


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written; an older one may be."""


class GoneError(DamagedError):
    """Checkpoints of which no store has some parts any more; an older one is whole."""

    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: CheckpointError, steps: Sequence[int]) -> "GoneError":
        """The error about the checkpoints after some steps, of which the newest is named."""
        fix = "start again with the same command: it goes on from an older checkpoint"
        gone = cls(error.where, error.problem, found=error.found, fix=fix)
        gone.steps = tuple(steps)
        return gone


class LeaseError(HolmesError):
    """A run folder that another process owns."""


class FatalError(HolmesError):
    """Training cannot go on, and would fail again in the same way if it were started again."""

    exit_status = 1


class LostLeaseError(FatalError):
    """Another process has taken the run folder: this one must not write into it any more."""


class UnseenLeaseError(LostLeaseError):
    """The lease was not to be renewed for so long that another process may have taken it."""

    exit_status = REQUEUE


class PeerError(HolmesError):
    """A process or a link of a running job is gone; starting again from a checkpoint can help.

    Args:
      where, problem, found, fix: the four parts of a `HolmesError`.
      peer: the number of the process that is gone, or that the link leads to, if one is known.
    """

    exit_status = REQUEUE

    def __init__(
        self, where: str, problem: str, *, found: object, fix: str, peer: int | None = None
    ):
        super().__init__(where, problem, found=found, fix=fix)
        self.peer = peer


class LostDataError(PeerError, DataError):
    """Data that a run has trained on, and that are not as they were: they may come back."""

    @classmethod
    def of(cls, error: HolmesError) -> "LostDataError":
        """Returns one in the words of a mistake, which another start may not find."""
        return cls(error.where, error.problem, found=error.found, fix=error.fix)


class CrashError(PeerError):
    """A process of a job ended by an exception that HolmesJAX did not raise.

    Args:
      where, problem, found, fix: the four parts of a `HolmesError`.
      exception: the exception, if nothing outside of the process can have caused it; else "".
    """

    def __init__(self, where: str, problem: str, *, found: object, fix: str, exception: str):
        super().__init__(where, problem, found=found, fix=fix)
        self.exception = exception


class SpikeError(HolmesError):
    """A step whose loss or norm stands out, in a run that then goes back to a checkpoint.

    Args:
      where, problem, found, fix: the four parts of a `HolmesError`.
      step: the number of the step.
    """

    exit_status = REQUEUE

    def __init__(self, where: str, problem: str, *, found: object, fix: str, step: int):
        super().__init__(where, problem, found=found, fix=fix)
        self.step = step


class RefusedError(HolmesError):
    """Another process of the job does not want to talk to this one."""


class Mistakes(HolmesError):
    """Several mistakes of one file, reported together; `mistakes` holds each of them.

    The four parts are those of the first one, which also counts the others.
    """

    def __init__(self, mistakes: Sequence[HolmesError]):
        assert mistakes, "no mistakes to report"
        self.mistakes = tuple(mistakes)
        first, num_others = self.mistakes[0], len(self.mistakes) - 1
        others = f"; the first of {num_others + 1} mistakes" if num_others else ""
        super().__init__(first.where, f"{first.problem}{others}", found=first.found, fix=first.fix)
        texts = [str(mistake) for mistake in mistakes[:SHOWN]]
        if len(mistakes) > SHOWN:
            texts.append(f"and {len(mistakes) - SHOWN} more mistakes")
        Exception.__init__(self, "\nerror: ".join(texts))


def may_pass(error: HolmesError) -> HolmesError:
    """Returns a mistake of a start, after others that worked, as what the next may not meet."""
    if error.exit_status != HolmesError.exit_status or isinstance(error, DamagedError):
        return error
    fix = f"if it is so again: {error.fix}"
    return PeerError(error.where, error.problem, found=error.found, fix=fix)


def raise_if_passing(error: BaseException, path: object = None) -> None:
    """Raises the `PeerError` of a failed call of the system that may work when it is done again.

    Whoever reads a record calls this first: what a file server cannot give now is no damage, and
    nobody is to be told to remove it. A file that is not there stays a case of its own.

    Args:
      error: of the call, or of what the call has read.
      path: the file or folder, where the error of the system may not have it.
    """
    stays = (*FINAL, errno.ENOENT, None)  # Python's own errors of broken content have no number
    if isinstance(error, OSError) and error.errno not in stays:
        raise of_system(error, path) from None


def of_system(error: OSError, path: object = None) -> HolmesError:
    """Returns the error of a call of the operating system that has failed, with its path.

    The path is that of the error, or else the one that is given.

    A disk has room again and a file server comes back, so it is a `PeerError`, unless its number is
    of `FINAL`.

    >>> str(of_system(OSError(errno.ENOSPC, "No space left on device", "runs/a/config.yaml")))
    ... # doctest: +ELLIPSIS
    'runs/a/config.yaml: cannot be read or written\\n  found: No space left on device\\n  fix: ...'
    """
    names = [error.filename2, error.filename, path]
    where = next((str(name) for name in names if name is not None), "a file or a connection")
    found = error.strerror or str(error) or type(error).__name__
    problem, is_url = "cannot be read or written", "://" in where
    if error.errno in FINAL:
        fix = "move what is in its way, or permit this user to read and write it"
        if is_url:
            fix = "set credentials that may read and write there (docs/token_files.md)"
        return HolmesError(where, problem, found=found, fix=fix)
    fix = "make room on its disk, or see that its file system is there; then start it again"
    if is_url:
        fix = "see that the object store can be reached, with credentials that have not expired"
        fix += " and a clock that is right; then start it again"
    return PeerError(where, problem, found=found, fix=fix)
