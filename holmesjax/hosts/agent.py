"""What a node answers before there is a job: for `launch doctor` and `launch probe`. No JAX.

An agent runs on every node, for as long as the launcher's end asks (`launch.launchers.agents`):

    inspect   what the node is: name, versions, clock, folder, limits, NICs, GPUs
    bind      whether a port can be listened on, or which one is free
    open      listens on every address of the node; the addresses and ports
    reach     connects with other nodes; seconds for each, or the reason why not
    send      sends bytes to another node, as boundaries are sent; the seconds
    join      joins the JAX job of its cluster: the only answer that imports JAX
    collect   takes part in collectives of that job; how long they took

Whoever connects must hold the key of the agents.
"""

import contextlib
import hashlib
import importlib
import itertools
import os
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.errors import HolmesError
from holmesjax.hosts import nccl
from holmesjax.hosts.nics import Host
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.topology.file import CollectiveKind
from holmesjax.transport import connections as wire
from holmesjax.transport.admission import Admission
from holmesjax.transport.connections import Connection, Message
from holmesjax.transport.frame_timing import Receiver, Sender
from holmesjax.transport.rendezvous import Ports

PACKAGES = ("holmesjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
START_S = 30.0  # for the launcher's end to be there
STALL_S = 30.0  # in which a connection must take a part, or answer
NicPath = tuple[str, str, int]  # the address of a NIC here; the address and port of one there


def serve(
    environment: ProcessEnvironment, find_host: Callable[[], Host], env: MutableMapping[str, str]
) -> int:
    """Answers until the launcher's end has gone. Raises PeerError if it never was there.

    `env` is of this process: NCCL's variables are added to it before JAX is imported.
    """
    wire.raise_open_files()
    address, port = environment.controller
    connection = wire.connect(
        address,
        port,
        key=environment.key,
        hello={"process": environment.number},
        check=lambda hello: None,
        where=f"agent {environment.number}",
        timeout_s=START_S,
    )
    with _Agent(environment, find_host, env) as agent, contextlib.suppress(OSError):
        while True:
            question = connection.receive()
            connection.send(agent.answer(question.pop("what"), question))
    return 0


class _Agent:
    """Answers, and the sockets that it listens on; a context manager."""

    def __init__(
        self,
        environment: ProcessEnvironment,
        find_host: Callable[[], Host],
        env: MutableMapping[str, str],
    ):
        self._environment, self._find_host, self._env = environment, find_host, env
        self._collectives: Any = None  # once this node has joined
        self._receivers: dict[str, Receiver] = {}  # by what the sender calls them
        self._receiving = threading.Lock()
        self._admissions = contextlib.ExitStack()
        self._answers: dict[str, Callable[..., Message]] = {
            "inspect": self._inspect,
            "bind": self._bind,
            "open": self._open,
            "reach": self._reach,
            "send": self._send,
            "join": self._join,
            "collect": self._collect,
        }

    def __enter__(self) -> "_Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self._admissions.close()

    def answer(self, what: str, arguments: Message) -> Message:
        try:
            return self._answers[what](**arguments)
        except HolmesError as error:
            return {"problem": f"{error.where}: {error.problem}", "found": str(error.found)}
        except (OSError, RuntimeError) as error:  # a connection broke; JAX
            return {"problem": f"could not {what}", "found": str(error) or type(error).__name__}

    # ---- what the node is ----------------------------------------------------------------------

    def _inspect(self, folder: str, marker: str) -> Message:
        limits = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
        host = self._find_host()
        return {
            "now_s": time.time(),
            "host": socket.gethostname(),
            "resolves_to": _resolve(socket.gethostname()),
            "python": ".".join(map(str, sys.version_info[:2])),
            "packages": {name: _version(name) for name in PACKAGES},
            "source": source_digest(),
            "folder": _look_at(Path(folder), marker),
            "limits": {
                name: None if (soft := resource.getrlimit(which)[0]) == -1 else soft
                for name, which in limits.items()
            },
            "cores": len(os.sched_getaffinity(0)),
            "gpus": [gpu.name for gpu in host.gpus],
            "drivers": sorted({gpu.driver for gpu in host.gpus}),
            "nics": [
                {
                    "name": nic.name,
                    "fabric": nic.fabric,
                    "reason": nic.reason,
                    "rate_bytes_per_s": nic.rate_bytes_per_s,
                }
                for nic in host.nics
            ],
            "mtu_bytes": {
                fabric: sorted(
                    {i.mtu_bytes for i in host.interfaces if set(i.ipv4) & set(found)} - {None}
                )
                for fabric, found in self._environment.addresses.items()
            },
            "addresses": self._environment.addresses,
        }

    # ---- whether it is reached -----------------------------------------------------------------

    def _bind(self, address: str, port: int) -> Message:
        with wire.listen(address, port) as sock:
            return {"port": wire.address_of(sock)[1]}

    def _open(self) -> Message:
        ports = Ports.open(self._environment.addresses)
        for sock in itertools.chain(*ports.sockets.values()):
            admission = Admission(
                sock,
                key=self._environment.key,
                hello={},
                check=lambda hello: None,
                enter=self._take_in_beside,
            )
            self._admissions.enter_context(admission)
        return {"book": ports.book}

    def _reach(self, paths: list[NicPath], timeout_s: float) -> Message:
        with ThreadPoolExecutor(max(len(paths), 1)) as pool:
            return {"seconds": list(pool.map(lambda path: self._try(path, timeout_s), paths))}

    def _try(self, path: NicPath, timeout_s: float) -> float | str:
        start_s = time.monotonic()
        try:
            self._connect(path, timeout_s).close()
        except HolmesError as error:
            return str(error.found)
        return time.monotonic() - start_s

    def _connect(self, path: NicPath, timeout_s: float) -> Connection:
        source, address, port = path
        return wire.connect(
            address,
            port,
            key=self._environment.key,
            hello={},
            check=lambda hello: None,
            where=f"{source} -> {address}",
            timeout_s=timeout_s,
            source=source,
        )

    # ---- how fast ------------------------------------------------------------------------------

    def _send(
        self,
        paths: list[NicPath],
        sizes: list[int],
        rounds: int,
        timeout_s: float,
        limit_s: float,
    ) -> Message:
        """Seconds of a message there and back, then of each size: of each round, over all paths.

        Sizes after one that took more than `limit_s` longer than the message are left out.
        """
        found: list[list[float]] = []
        with contextlib.ExitStack() as opened:
            connections = [
                opened.enter_context(contextlib.closing(self._connect(path, timeout_s)))
                for path in paths
            ]
            for connection in connections:
                connection.sock.settimeout(STALL_S)
            with ThreadPoolExecutor(len(connections)) as pool:
                found.append([_there_and_back(pool, connections) for _ in range(rounds)])
            arrays = [size for size in sizes for _ in range(rounds)]
            name = secrets.token_hex(8)
            for connection in connections:
                connection.send({"array_bytes": arrays, "name": name})
                connection.sock.settimeout(None)  # frames have a timeout of their own
            sender = Sender([connection.sock for connection in connections], STALL_S)
            opened.callback(sender.close)
            for i, size in enumerate(sizes):
                block, numbers = np.ones(size, np.uint8), range(i * rounds, (i + 1) * rounds)
                found.append([sender.seconds(number, block) for number in numbers])
                if min(found[-1]) - min(found[0]) > limit_s:
                    break
        return {"seconds": found}

    def _take_in_beside(self, connection: Connection) -> None:
        threading.Thread(target=self._take_in, args=(connection,), daemon=True).start()

    def _take_in(self, connection: Connection) -> None:
        """Answers messages; then receives arrays, if they are told of, and drops them."""
        with contextlib.suppress(OSError), contextlib.closing(connection):
            while "name" not in (message := connection.receive()):
                connection.send({})
            with self._receiving:
                made = self._receivers.get(message["name"])
                receiver = made or Receiver(message["array_bytes"], STALL_S)
                self._receivers[message["name"]] = receiver
            receiver.receive(connection.sock)
            with self._receiving:
                self._receivers.pop(message["name"], None)

    def _join(
        self,
        fabric: str,
        coordinator: str,
        num_nodes: int,
        rank: int,
        on_cpu: bool,
        timeout_s: float,
    ) -> Message:
        if not on_cpu:
            own = nccl.own_settings(self._env)
            here = self._environment.addresses.get(fabric, [])
            self._env.update(nccl.environment(self._find_host(), fabric, here, own).added)
        self._collectives = importlib.import_module(
            "holmesjax.hosts.collective_timing"
        ).Collectives(coordinator, num_nodes, rank, on_cpu=on_cpu, timeout_s=timeout_s)
        return {}

    def _collect(
        self, kind: CollectiveKind, group_nodes: int, num_bytes: int, rounds: int
    ) -> Message:
        return {"seconds": self._collectives.time(kind, group_nodes, num_bytes, rounds)}


def _there_and_back(pool: ThreadPoolExecutor, connections: Sequence[Connection]) -> float:
    def ask(connection: Connection) -> None:
        connection.send({})
        connection.receive()

    start_s = time.perf_counter()
    list(pool.map(ask, connections))
    return time.perf_counter() - start_s


# ---- facts ---------------------------------------------------------------------------------------


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_digest() -> str:
    """16 hex digits of all the Python files of this installation's package."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _look_at(folder: Path, marker: str) -> Message:
    """Whether it is the folder of the launcher's end, can be written to, and has space left."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return {"problem": error.strerror}
    return {"is_shared": (folder / marker).exists(), "free_bytes": free_bytes}
