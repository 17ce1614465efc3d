"""The environment of a process: its number, its controller, its key, its addresses. No JAX."""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import TypeAdapter

from holmesjax.errors import REQUEUE, HolmesError, PeerError
from holmesjax.hosts import nics as discovery
from holmesjax.hosts.nics import Host
from holmesjax.plan.processes import Process
from holmesjax.transport import addresses, connections, key_files

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
_FABRICS = TypeAdapter(dict[str, list[str]])  # addresses by fabric


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """The facts that its environment tells a process of a job."""

    number: int
    controller: tuple[str, int]
    key: bytes
    addresses: dict[str, list[str]]  # fabric -> addresses of this node's NICs on it
    advertised: dict[str, list[str]]  # where others reach these NICs, if not at their addresses
    restart: int  # how often the job has been started again

    @classmethod
    def read(cls, env: Mapping[str, str], find_host: Callable[[], Host]) -> "ProcessEnvironment":
        """Reads the environment. Raises HolmesError if a variable is missing or makes no sense.

        `find_host` is called if nobody has set HOLMES_ADDRESSES.
        """
        name = next((name for name in NUMBER if name in env), None)
        if name is None:
            raise _missing(" or ".join(NUMBER), "the number of this process in the job")
        number = _whole(env, name, env[name])
        if (processes := env.get("HOLMES_PROCESSES")) and "HOLMES_PROCESS" not in env:
            places = processes.split(",")
            if number >= len(places):
                raise _senseless(env, "HOLMES_PROCESSES", f"{number + 1} numbers, as 3,4,5")
            number = _whole(env, "HOLMES_PROCESSES", places[number])
        own = addresses_by_fabric(env, find_host)
        return cls(
            number=number,
            controller=controller_of(env, own),
            key=key_of(env),
            addresses=own,
            advertised=_advertised(env),
            restart=_whole(env, "HOLMES_RESTART", env.get("HOLMES_RESTART", "0")),
        )


def visible_devices(process: Process, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows a process its own GPUs alone.

    JAX would take memory on the others, too. NCCL reaches them all the same, if the launcher gives
    this process the whole node.

    >>> own = Process(number=1, name="a/n", cluster="a", node="n", stage=1, rank=0, devices=(2, 3),
    ...               local_devices=(2, 3))
    >>> visible_devices(own, {}), visible_devices(own, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    ({'CUDA_VISIBLE_DEVICES': '2,3'}, {'CUDA_VISIBLE_DEVICES': '6,7'})
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    of = lambda i: names[i] if i < len(names) else str(i)
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(of, process.local_devices))}


def own_devices(process: Process, env: Mapping[str, str]) -> dict[str, str]:
    """Returns `visible_devices` where the process was given GPUs of others, too; else nothing.

    >>> own = Process(number=1, name="a/n", cluster="a", node="n", stage=1, rank=0, devices=(2, 3),
    ...               local_devices=(2, 3))
    >>> own_devices(own, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    >>> own_devices(own, {"CUDA_VISIBLE_DEVICES": "2,3"}), own_devices(own, {})
    ({}, {})
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    are_more = visible and len(visible.split(",")) > max(process.local_devices)
    return visible_devices(process, env) if are_more else {}


def controller_of(
    env: Mapping[str, str], own: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> tuple[str, int]:
    """The address and port of the controller, from where this process is. Raises HolmesError.

    Args:
      env: the environment.
      own: addresses of this process by fabric. Control goes over Ethernet where it has one.
    """
    what = "the launcher's host:port"
    try:
        address, port = addresses.parse(_take(env, "HOLMES_CONTROLLER", what).strip())
    except ValueError:
        raise _senseless(env, "HOLMES_CONTROLLER", what) from None
    if not port:
        raise _senseless(env, "HOLMES_CONTROLLER", what)
    sources = (source for fabric in ("ethernet", *own) for source in own.get(fabric, ()))
    scoped = next((source for source in sources if "%" in source), None)
    return addresses.as_seen_from(address, scoped), port


def key_of(env: Mapping[str, str]) -> bytes:
    """Reads the job's key, from a variable or a file. Raises HolmesError.

    A file system may show the key of an earlier start for a moment, or none. A start that ends
    takes its key with it: a process that comes later finds the folder alone, and waits for a next.
    """
    if (text := env.get("HOLMES_KEY")) is not None:
        if re.fullmatch(f"[0-9a-f]{{{2 * key_files.KEY_BYTES}}}", text):
            return bytes.fromhex(text)
        fix = "let the launcher set it, or set HOLMES_KEY_FILE instead"
        raise HolmesError("HOLMES_KEY", "is no key of a job", found="another text", fix=fix)
    path = _take(env, "HOLMES_KEY_FILE", "the job's key file")
    wanted = env.get("HOLMES_KEY_DIGEST")
    deadline_s = time.monotonic() + KEY_S
    while True:
        is_over = time.monotonic() > deadline_s
        if not os.path.lexists(path) and os.path.isdir(os.path.dirname(path)):
            if is_over:
                problem = "is not there: the launcher has ended, or has not begun"
                fix = "start the launcher, and this process after it"
                raise PeerError(path, problem, found="no such file", fix=fix)
            time.sleep(connections.PAUSE_S)
            continue
        key = key_files.read_key_file(path)
        if wanted in (None, found := key_files.key_digest(key)):
            return key
        if is_over:
            problem = f"is not the key that the launcher has, whose digest is {wanted}"
            fix = "copy the key file of the launcher to this machine, with mode 0600"
            raise HolmesError(path, problem, found=found, fix=fix)
        time.sleep(connections.PAUSE_S)


def addresses_by_fabric(
    env: Mapping[str, str], find_host: Callable[[], Host]
) -> dict[str, list[str]]:
    """The addresses of this process. `find_host` is called if HOLMES_ADDRESSES is not set.

    Raises HolmesError for a variable that makes no sense, or if no NIC has an address.
    """
    what = '{"ethernet": ["10.0.0.1"]}, say'
    if text := env.get("HOLMES_ADDRESSES"):
        try:
            given = _FABRICS.validate_json(text)
        except ValueError:
            raise _senseless(env, "HOLMES_ADDRESSES", what) from None
        return {fabric: [*map(addresses.canonical, hosts)] for fabric, hosts in given.items()}
    host = find_host()
    found = discovery.addresses(host)
    if set(found) == {"local"}:
        nics = "; ".join(str(nic) for nic in host.nics) or "none"
        found_text = f"not set, and no NIC of {host.name} has an address: {nics}"
        raise _missing("HOLMES_ADDRESSES", what, found=found_text)
    return found


def _advertised(env: Mapping[str, str]) -> dict[str, list[str]]:
    try:
        return _FABRICS.validate_json(env.get("HOLMES_ADVERTISED") or "{}")
    except ValueError:
        raise _senseless(env, "HOLMES_ADVERTISED", '{"ethernet": ["203.0.113.5"]}, say') from None


def _take(env: Mapping[str, str], name: str, what: str) -> str:
    if name not in env:
        raise _missing(name, what)
    return env[name]


def _whole(env: Mapping[str, str], name: str, text: str) -> int:
    """The number that a variable, or a part of it, is."""
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text, re.ASCII):
        raise _senseless(env, name, "whole numbers, as docs/launching.md says")
    return int(text)


def _senseless(env: Mapping[str, str], name: str, what: str) -> HolmesError:
    fix = f"start it with a launcher, or set it: {what}"
    return HolmesError(name, "makes no sense", found=repr(env[name]), fix=fix)


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
