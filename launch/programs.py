"""Programs of the system that a verb asks: what they answer, or why they do not."""

import errno
import subprocess
from collections.abc import Sequence

from holmesjax.errors import HolmesError, PeerError, raise_if_passing

ANSWER_S = 60.0  # a scheduler that is loaded takes seconds; one that is away may never answer


def ask(argv: Sequence[str], *, fix: str) -> subprocess.CompletedProcess[str]:
    """Returns what a program answers, whatever its status; bytes that are no text are replaced.

    Raises HolmesError where it is not installed or cannot be started, with `fix`, and PeerError
    where it does not answer, or as `not_started`.
    """
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except OSError as error:
        raise not_started(argv[0], error, fix) from None
    except subprocess.TimeoutExpired:
        found = f"no answer in {ANSWER_S:g} s: {' '.join(argv)}"
        fix = f"start it again; if it is so again: {fix}"
        raise PeerError(argv[0], "does not answer", found=found, fix=fix) from None


def not_started(name: str, error: OSError, fix: str) -> HolmesError:
    """The refusal where a program is missing, or is none.

    Raises PeerError where the machine lacks memory or processes, say.
    """
    if error.errno != errno.ENOEXEC:
        raise_if_passing(error, name)
    found = "not installed, or not on PATH" if isinstance(error, FileNotFoundError) else error
    return HolmesError(name, "cannot be started", found=found, fix=fix)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The last words of a program that failed, for messages."""
    lines = (done.stderr or done.stdout or "").strip().splitlines()
    return lines[-1] if lines else f"not a word, and status {done.returncode}"
