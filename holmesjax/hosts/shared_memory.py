"""Whether systemd takes away what a user has in shared memory. No JAX.

systemd-logind removes all that a user has in /dev/shm when the last session on the host ends, by
its default, `RemoveIPC=yes`. With the launcher `ssh` the sessions are the job's, so the copies in a
partner's memory would go just before the start that needs them. Root and the users of the system
keep theirs, and so does a user who lingers.
"""

import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path

LAST_SYSTEM_UID = 999
LINGER = Path("/var/lib/systemd/linger")
ASK = (
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "RemoveIPC"),
)
ASK_S = 10.0  # for the answer


def _ask() -> str:
    """The answer of logind about its setting; "" where there is none."""
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def goes_at_logout(uid: int, *, linger: Path = LINGER, ask: Callable[[], str] = _ask) -> bool:
    """Whether what a user has in /dev/shm goes with the last session.

    Args:
      uid: the user's number.
      linger: the folder with a file for each user who lingers.
      ask: returns logind's answer, as `busctl` prints it.
    """
    if uid <= LAST_SYSTEM_UID:
        return False
    try:
        lingers = (linger / pwd.getpwuid(uid).pw_name).exists()
    except (KeyError, OSError):  # a user without a name, as in a container
        lingers = False
    return not lingers and ask() == "b true"


def goes_here() -> bool:
    """Whether it is so for the user of this process."""
    return goes_at_logout(os.getuid())
