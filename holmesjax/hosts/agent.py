"""Answers the questions of `launch doctor` and `launch probe` about one node. No JAX.

An agent runs on every node while the launcher's end asks (`launch.launchers.agents`). `questions`
has the questions and the answers. Whoever connects must hold the key of the agents.
"""

import contextlib
import importlib
import itertools
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
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.errors import HolmesError
from holmesjax.hosts import kernel_check, nccl, shared_memory
from holmesjax.hosts.agent_messages import (
    BETWEEN_AGENTS,
    QUESTIONS,
    AgentHello,
    Arrays,
    AskerHello,
    Bind,
    CheckKernels,
    Collect,
    CollectiveTimes,
    Echo,
    FolderFacts,
    FreePort,
    Inspect,
    Join,
    Joined,
    KernelFacts,
    Listening,
    NicFacts,
    NicPath,
    NoAnswer,
    NodeFacts,
    Open,
    Reach,
    ReachTimes,
    Send,
    SendTimes,
)
from holmesjax.hosts.computing import PACKAGES, installed, source_digest
from holmesjax.hosts.nics import Host
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.transport import addresses as places, connections as wire, socket_buffers
from holmesjax.transport.admission import Admission
from holmesjax.transport.connections import Connection
from holmesjax.transport.frame_timing import Receiver, Sender
from holmesjax.transport.ports import Ports
from holmesjax.transport.records import Message, Record, decode, decode_as, encode

START_S = 30.0  # for the launcher's end to be there
STALL_S = 30.0  # in which a connection must take a part, or answer


def serve(
    environment: ProcessEnvironment, find_host: Callable[[], Host], env: MutableMapping[str, str]
) -> int:
    """Answers until the launcher's end has gone. Raises PeerError if it never was there.

    NCCL's variables are added to `env`, the environment of this process, before JAX is imported.
    """
    wire.raise_open_files()
    address, port = environment.controller
    connection = wire.connect(
        address,
        port,
        key=environment.key,
        hello=AgentHello(process=environment.number),
        expected=AskerHello,
        check=lambda hello: None,
        where=f"agent {environment.number}",
        timeout_s=START_S,
    )
    with _Agent(environment, find_host, env) as agent, contextlib.suppress(OSError):
        while True:
            connection.send(encode(agent.answer(connection.receive())))
    return 0


class _Agent:
    """The answers of one node, and the sockets that it listens on; a context manager."""

    def __init__(
        self,
        environment: ProcessEnvironment,
        find_host: Callable[[], Host],
        env: MutableMapping[str, str],
    ):
        self._environment, self._find_host, self._env = environment, find_host, env
        self._hello = AgentHello(process=environment.number)
        self._collectives: Any = None  # once this node has joined
        self._receivers: dict[str, Receiver] = {}  # by what the sender calls them
        self._receiving = threading.Lock()
        self._admissions = contextlib.ExitStack()

    def __enter__(self) -> "_Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self._admissions.close()

    def answer(self, message: Message) -> Record:
        """Returns the answer to a question, or the reason why there is none."""
        try:
            question = decode(message, QUESTIONS)
        except ValueError as error:
            return NoAnswer(problem="was asked by another version of HolmesJAX", found=str(error))
        try:
            return self._answer(question)
        except HolmesError as error:
            return NoAnswer(problem=f"{error.where}: {error.problem}", found=str(error.found))
        except (OSError, RuntimeError) as error:  # a connection broke; JAX
            found = str(error) or type(error).__name__
            return NoAnswer(problem=f"could not {question.kind}", found=found)

    def _answer(self, question: Record) -> Record:
        match question:
            case Inspect():
                return self._inspect(question)
            case CheckKernels():
                return self._check_kernels(question)
            case Bind():
                with wire.listen(question.address, question.port) as sock:
                    return FreePort(port=wire.address_of(sock)[1])
            case Open():
                return self._open()
            case Reach():
                return self._reach(question)
            case Send():
                return self._send(question)
            case Join():
                return self._join(question)
            case Collect():
                return self._collect(question)
        raise AssertionError(f"what is {question}?")

    # ---- what the node is ----------------------------------------------------------------------

    def _inspect(self, question: Inspect) -> NodeFacts:
        host = self._find_host()
        name = socket.gethostname()
        mtu_bytes = {
            fabric: {i.mtu_bytes for i in host.interfaces if {*i.ipv4, *i.ipv6} & {*addresses}}
            for fabric, addresses in self._environment.addresses.items()
        }
        return NodeFacts(
            now_s=time.time(),
            host=name,
            resolves_to=_resolve(name),
            python=".".join(map(str, sys.version_info[:2])),
            packages={package: installed(package) for package in PACKAGES},
            source=source_digest(),
            folder=_look_at(Path(question.folder), question.marker),
            max_open_files=_limit(resource.RLIMIT_NOFILE),
            max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
            max_window_bytes=_max_window_bytes(),
            gpus=[gpu.name for gpu in host.gpus],
            drivers=sorted({gpu.driver for gpu in host.gpus}),
            nics=[
                NicFacts(
                    name=nic.name,
                    fabric=nic.fabric,
                    reason=nic.reason,
                    rate_bytes_per_s=nic.rate_bytes_per_s,
                )
                for nic in host.nics
            ],
            mtu_bytes={
                fabric: sorted(size for size in sizes if size is not None)
                for fabric, sizes in mtu_bytes.items()
            },
            addresses={
                fabric: [*addresses] for fabric, addresses in self._environment.addresses.items()
            },
            twins=places.mixed_up(itertools.chain(*self._environment.addresses.values())),
            loses_memory=shared_memory.goes_here(),
        )

    def _check_kernels(self, question: CheckKernels) -> KernelFacts:
        gpus = self._find_host().gpus
        found = [
            kernel_check.verdict(asked, gpus, self._env, say=lambda text: None)
            for asked in kernel_check.checks(question.asked, gpus)
        ]
        if not found:
            return KernelFacts(problem=None, text="none to check: the run does not use them here")
        worst = next((one for one in found if one.problem), found[0])
        return KernelFacts(problem=worst.problem, text=str(worst), has_ended=worst.has_ended)

    # ---- whether it is reached -----------------------------------------------------------------

    def _open(self) -> Listening:
        ports = Ports.open(self._environment.addresses)
        for sock in itertools.chain(*ports.sockets.values()):
            admission = Admission(
                sock,
                key=self._environment.key,
                hello=self._hello,
                expected=AgentHello,
                check=lambda hello: None,
                enter=self._take_in_beside,
                may_be_plain=lambda hello: True,  # the network is measured, and no secret sent
            )
            self._admissions.enter_context(admission)
        return Listening(book=ports.book)

    def _reach(self, question: Reach) -> ReachTimes:
        with ThreadPoolExecutor(max(len(question.paths), 1)) as pool:
            tries = pool.map(lambda path: self._try(path, question.timeout_s), question.paths)
            return ReachTimes(seconds=list(tries))

    def _try(self, path: NicPath, timeout_s: float) -> float | str:
        start_s = time.monotonic()
        try:
            self._connect(path, timeout_s).close()
        except HolmesError as error:
            return str(error.found)
        return time.monotonic() - start_s

    def _connect(self, path: NicPath, timeout_s: float) -> Connection[AgentHello]:
        return wire.connect(
            path.address,
            path.port,
            key=self._environment.key,
            hello=self._hello,
            expected=AgentHello,
            check=lambda hello: None,
            where=f"{path.source} -> {path.address}",
            timeout_s=timeout_s,
            source=path.source,
            encrypt=False,
        )

    # ---- how fast ------------------------------------------------------------------------------

    def _send(self, question: Send) -> SendTimes:
        found: list[list[float]] = []
        rounds = question.rounds
        with contextlib.ExitStack() as opened:
            connections = [
                opened.enter_context(contextlib.closing(self._connect(path, question.timeout_s)))
                for path in question.paths
            ]
            for connection in connections:
                connection.sock.settimeout(STALL_S)
            with ThreadPoolExecutor(len(connections)) as pool:
                found.append([_there_and_back(pool, connections) for _ in range(rounds)])
            sizes = [size for size in question.sizes_bytes for _ in range(rounds)]
            arrays = Arrays(
                name=secrets.token_hex(8), sizes_bytes=sizes, window_bytes=question.window_bytes
            )
            for connection in connections:
                socket_buffers.widen(connection.sock, question.window_bytes)
                connection.send(encode(arrays))
                connection.sock.settimeout(None)  # frames have a timeout of their own
            sender = Sender([connection.sock for connection in connections], STALL_S)
            opened.callback(sender.close)
            for i, size in enumerate(question.sizes_bytes):
                block, numbers = np.ones(size, np.uint8), range(i * rounds, (i + 1) * rounds)
                found.append([sender.seconds(number, block) for number in numbers])
                if min(found[-1]) - min(found[0]) > question.limit_s:
                    break
        return SendTimes(seconds=found)

    def _take_in_beside(self, connection: Connection[AgentHello]) -> None:
        threading.Thread(target=self._take_in, args=(connection,), daemon=True).start()

    def _take_in(self, connection: Connection[AgentHello]) -> None:
        """Answers echoes. Then receives the arrays that are announced, and drops them."""
        with contextlib.suppress(OSError, ValueError), contextlib.closing(connection):
            while isinstance(record := decode(connection.receive(), BETWEEN_AGENTS), Echo):
                connection.send(encode(Echo()))
            assert isinstance(record, Arrays), record
            socket_buffers.widen(connection.sock, record.window_bytes)
            with self._receiving:
                made = self._receivers.get(record.name)
                receiver = made or Receiver(record.sizes_bytes, STALL_S)
                self._receivers[record.name] = receiver
            receiver.receive(connection.sock)
            with self._receiving:
                self._receivers.pop(record.name, None)

    def _join(self, question: Join) -> Joined:
        if not question.on_cpu:
            own = nccl.user_settings(self._env)
            here = self._environment.addresses.get(question.fabric, [])
            found = nccl.environment(self._find_host(), question.fabric, here, own)
            self._env.update(found.added)
        self._collectives = importlib.import_module(
            "holmesjax.hosts.collective_timing"
        ).Collectives(
            question.coordinator,
            question.num_nodes,
            question.rank,
            on_cpu=question.on_cpu,
            timeout_s=question.timeout_s,
        )
        return Joined()

    def _collect(self, question: Collect) -> CollectiveTimes:
        seconds = self._collectives.time(
            question.collective, question.group_nodes, question.num_bytes, question.rounds
        )
        return CollectiveTimes(seconds=seconds)


def _there_and_back(
    pool: ThreadPoolExecutor, connections: Sequence[Connection[AgentHello]]
) -> float:
    def ask(connection: Connection[AgentHello]) -> None:
        connection.send(encode(Echo()))
        decode_as(connection.receive(), Echo)

    start_s = time.perf_counter()
    list(pool.map(ask, connections))
    return time.perf_counter() - start_s


# ---- facts ---------------------------------------------------------------------------------------


def _resolve(name: str) -> str | None:
    try:
        return places.of(next(places.resolve(name, 0))[1])[0]
    except OSError:
        return None


def _max_window_bytes() -> int | None:
    """Returns what the largest buffers for sending and for receiving let be on its way."""
    found = socket_buffers.limits()
    return None if found is None else min(limit.window_bytes for limit in found)


def _limit(which: int) -> int | None:
    """Returns the soft limit of this process, or None if there is no limit."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _look_at(folder: Path, marker: str) -> FolderFacts:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return FolderFacts(problem=error.strerror)
    return FolderFacts(is_shared=(folder / marker).exists(), free_bytes=free_bytes)
