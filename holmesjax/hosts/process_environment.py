"""The environment of a process: its number, its controller, its key, its addresses. No JAX."""

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holmesjax.errors import REQUEUE, HolmesError
from holmesjax.hosts import nics as discovery
from holmesjax.hosts.nics import Host
from holmesjax.transport import connections

# Variables with the number of a process, of our launchers, Slurm, Open MPI, PMI and Kubernetes.
NUMBER = (
    "HOLMES_PROCESS",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
)
# For a file system to show the newest key: NFS may show what a folder had up to a minute ago.
KEY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """The facts that its environment tells a process of a job."""

    number: int
    controller: tuple[str, int]
    key: bytes
    addresses: dict[str, list[str]]  # fabric -> addresses of this node's NICs on it
    restart: int  # how often the job has been started again

    @classmethod
    def read(cls, env: Mapping[str, str], find_host: Callable[[], Host]) -> "ProcessEnvironment":
        """Reads the environment. Raises HolmesError if a variable is missing or makes no sense.

        `find_host` is called if nobody has set HOLMES_ADDRESSES.
        """
        number = next((env[name] for name in NUMBER if name in env), None)
        if number is None:
            raise _missing(" or ".join(NUMBER), "the number of this process in the job")
        address, _, port = _take(env, "HOLMES_CONTROLLER", "the launcher's host:port").rpartition(
            ":"
        )
        try:
            if (processes := env.get("HOLMES_PROCESSES")) and "HOLMES_PROCESS" not in env:
                number = processes.split(",")[int(number)]  # it is a place among these
            return cls(
                number=int(number),
                controller=(address, int(port)),
                key=_key(env),
                addresses=_addresses(env, find_host),
                restart=int(env.get("HOLMES_RESTART", "0")),
            )
        except (ValueError, AttributeError, IndexError) as error:
            where = "the environment"
            fix = "use a launcher, or set the variables HOLMES_* as docs/launching.md says"
            raise HolmesError(where, "makes no sense", found=error, fix=fix) from None


def _key(env: Mapping[str, str]) -> bytes:
    """Reads the job's key. A file system may show the key of an earlier start for a moment."""
    path = _take(env, "HOLMES_KEY_FILE", "the job's key file")
    wanted = env.get("HOLMES_KEY_DIGEST")
    deadline_s = time.monotonic() + KEY_S
    while True:
        key = connections.read_key_file(path)
        if wanted in (None, found := connections.key_digest(key)):
            return key
        if time.monotonic() > deadline_s:
            problem = f"is not the key that the launcher has, whose digest is {wanted}"
            fix = "put run.dir on a file system that all nodes share"
            raise HolmesError(path, problem, found=found, fix=fix)
        time.sleep(connections.PAUSE_S)


def _addresses(env: Mapping[str, str], find_host: Callable[[], Host]) -> dict[str, list[str]]:
    if text := env.get("HOLMES_ADDRESSES"):
        return {fabric: list(found) for fabric, found in json.loads(text).items()}
    host = find_host()
    found = discovery.addresses(host)
    if set(found) == {"local"}:
        nics = "; ".join(str(nic) for nic in host.nics) or "none"
        found_text = f"not set, and no NIC of {host.name} has an IPv4 address: {nics}"
        what = '{"ethernet": ["10.0.0.1"]}, say'
        raise _missing("HOLMES_ADDRESSES", what, found=found_text)
    return found


def _take(env: Mapping[str, str], name: str, what: str) -> str:
    if name not in env:
        raise _missing(name, what)
    return env[name]


def _missing(name: str, what: str, found: str = "not set") -> HolmesError:
    fix = f"start it with a launcher, or set it: {what}"
    return HolmesError(name, "a process of a job needs it", found=found, fix=fix)


def die_with(parent: str | None) -> None:
    """Makes Linux end this process when the launcher that started it on this machine ends.

    It leads a group of processes from now on, so that its own children can be ended with it.
    """
    if parent is None:
        return
    with contextlib.suppress(PermissionError):  # it leads a session, and so a group, already
        os.setpgid(0, 0)
    set_death_signal = 1  # PR_SET_PDEATHSIG
    # Elsewhere than on Linux the controller is missed instead.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(REQUEUE)
