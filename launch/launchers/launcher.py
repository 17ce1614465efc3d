"""The protocol of launchers, and the child processes that most launchers start.

A launcher is a class with the methods of `Launcher`, and a row of `table`.
"""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from holmesjax.distributed.messages import Exit, Output, ProcessEvent
from holmesjax.errors import REQUEUE, ConfigError, PeerError
from holmesjax.plan.processes import Process
from holmesjax.transport import addresses, connections, key_files
from launch.programs import not_started

KILLED_S = 5.0  # for what was killed to be gone; what hangs in the kernel is left to it
LOOK_S = 0.5  # between two looks whether a child that says nothing has ended
REST_BYTES = 1024 * 1024  # of output that a child has left behind; more than a socket holds


class EventSink(Protocol):
    """Takes events: the supervisor's queue, or a translator in front of it."""

    def put(self, event: ProcessEvent) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ProcessStart:
    """A process to start: `python -m launch <command>` on the node of a process of the job."""

    process: Process
    command: Sequence[str]
    env: Mapping[str, str]  # variables besides those that the node has
    run_dir: str = ""  # in the command

    def command_in(self, run_dir: str | None) -> list[str]:
        """Returns the command for a node whose run folder is another one; None: the same."""
        own = run_dir or self.run_dir
        return [own if self.run_dir and word == self.run_dir else word for word in self.command]


class Launcher(Protocol):
    """Starts processes on the nodes of a topology."""

    @property
    def address(self) -> str:
        """The address of this machine at which all processes can reach it."""

    @property
    def port(self) -> int:
        """The port on which the controller listens; 0: any."""

    @property
    def sees_exits(self) -> bool:
        """Whether the end of a process is an event."""

    @property
    def is_here(self) -> bool:
        """Whether all nodes are this machine, so that several may have the same device."""

    @property
    def files_each(self) -> int:
        """Descriptors that each process costs this one, besides its connection."""

    def start(self, start: ProcessStart, events: EventSink) -> None:
        """Starts a process. From now on its `Output` and its `Exit` are events."""

    def end(self) -> None:
        """Ends every process that still runs, at once, and waits for it."""


def parse_listen(listen: str) -> tuple[str, int]:
    """Returns the address and the port of `--listen HOST[:PORT]`; without a port, 0.

    >>> parse_listen("10.0.0.1:7000"), parse_listen("[fd00::1]:7000"), parse_listen("fd00::1")
    (('10.0.0.1', 7000), ('fd00::1', 7000), ('fd00::1', 0))
    """
    with contextlib.suppress(ValueError):
        address, port = addresses.parse(listen)
        if not addresses.is_ip(address) or addresses.is_of_one_host(address):
            return address, port
    problem = "must be one address of this machine that all nodes reach, and may have a port"
    fix = "write --listen 10.0.0.1:7000, or --listen [fd00::1]:7000, say"
    raise ConfigError("--listen", problem, found=listen, fix=fix)


def own_address(hosts: Mapping[str, str]) -> str:
    """Finds the address of this machine on its routes to other hosts.

    `hosts` has the name or address of each node. Raises ConfigError if a host is not known, or if
    the routes start at different addresses, and PeerError where the DNS does not answer now.
    """
    sources: dict[str, str] = {}  # address of this machine -> a host that it leads to
    for node, host in hosts.items():
        try:
            # A name may have both kinds of addresses, and others IPv4 alone.
            reached = addresses.resolve(host, 9)
            family, place = min(reached, key=lambda one: one[0] != socket.AF_INET)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # sends nothing: only finds the route
                sources.setdefault(connections.address_of(probe)[0], host)
        except (OSError, UnicodeError, TypeError) as error:  # also of what is no name of a host
            fix = "correct its name, or the DNS; --listen HOST spares the question"
            problem = f"no way to the host {host} is known here"
            is_silent = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            kind = PeerError if is_silent else ConfigError
            raise kind(f"node {node}", problem, found=error, fix=fix) from None
    # Others do not reach this machine where it reaches itself.
    outside = [source for source in sources if not addresses.is_loopback(source)]
    if len(outside) > 1:
        found = "; ".join(f"{source} to {sources[source]}" for source in outside)
        problem = "this machine reaches the hosts from several addresses"
        fix = "choose one that all nodes reach"
        raise ConfigError("--listen", problem, found=found, fix=fix)
    return next(iter(outside or sources))


def leaving(number: int) -> int:
    """Returns the exit status of a run that a signal ends at once.

    A scheduler starts the run again, unless the signal was a person's Ctrl-C.
    """
    return 128 + number if number == signal.SIGINT else REQUEUE


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP raise SystemExit, for what must be taken away at the end.

    The first counts: another one would end what is being taken away. `nohup` stays what it is. Only
    the main thread may enter.
    """

    def leave(number: int, _: object) -> None:
        for other in heard:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def variables_here(addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the variables of a process on this machine, which ends with this one."""
    return {
        "HOLMES_ADDRESSES": json.dumps(addresses),
        "HOLMES_PARENT": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def with_key(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with the key itself: another host may not have the file."""
    found = dict(env)
    if path := found.pop("HOLMES_KEY_FILE", None):
        found.pop("HOLMES_KEY_DIGEST", None)
        found["HOLMES_KEY"] = key_files.read_key_file(path).hex()
    return found


class Children:
    """Child processes whose output and end are events."""

    def __init__(self) -> None:
        self._children: list[_Child] = []

    @property
    def pids(self) -> list[int]:
        """The process ids of the children, in the order of their starts."""
        return [child.process.pid for child in self._children]

    def start(
        self,
        number: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        events: EventSink,
        *,
        stdin: str = "",
    ) -> None:
        """Starts one process of the job.

        The process can read `stdin`, then nothing more until `end` or until this process is gone.

        Args:
          number: number of the process in the job.
          argv: the program and its arguments.
          env: all of its environment.
          events: receives its output and its exit.
          stdin: text that it can read at once.

        Raises:
          HolmesError: the program cannot be started.
        """
        # One descriptor here for both directions: a job has thousands of processes.
        here, there = socket.socketpair()
        with contextlib.ExitStack() as failed, there:
            failed.enter_context(here)
            try:
                process = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=there.fileno(),
                    stdout=there.fileno(),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the supervisor, which asks all to stop
                )
            except OSError as error:
                fix = "install it, or bring it onto PATH"
                raise not_started(argv[0], error, fix) from None
            failed.pop_all()
        with contextlib.suppress(OSError):  # its exit says more
            here.sendall(os.fsencode(stdin))
        reader = threading.Thread(target=_read, args=(process, here, number, events), daemon=True)
        reader.start()
        self._children.append(_Child(process, here, reader))

    def end(self, *, ask: int = 0, patience_s: float = 0.0) -> None:
        """Kills the children that do not end by themselves in time, and their own children.

        Args:
          ask: a signal to send first; 0: none. Their stdin ends in any case.
          patience_s: how long they may take to end.
        """
        children, self._children = self._children, []
        deadline_s = time.monotonic() + patience_s
        for child in children:
            with contextlib.suppress(OSError):  # it has ended
                child.sock.shutdown(socket.SHUT_WR)
            child.process.send_signal(ask)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(deadline_s - time.monotonic(), 0.0))
            # Otherwise it has done that, and the number may be another's.
            if child.reader.is_alive():
                _kill_group(child.process)
        deadline_s = time.monotonic() + KILLED_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(deadline_s - time.monotonic(), 0.0))
            child.reader.join(max(deadline_s - time.monotonic(), 0.0))


class _Child(NamedTuple):
    """A child process."""

    process: subprocess.Popen[bytes]
    sock: socket.socket  # its stdin and its output
    reader: threading.Thread


class _Output(io.RawIOBase):
    """The bytes that a child writes before it ends. A child may leave its stdin unread.

    The end of the child is the end of its output, even if its own children hold that open.
    """

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]):
        self._sock, self._process = sock, process
        self._left_bytes: int | None = None  # that may still be read, once the child has ended
        self._sock.settimeout(LOOK_S)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._left_bytes is None and self._process.poll() is not None:
                self._left_bytes = REST_BYTES
                self._sock.settimeout(0.0)
            if self._left_bytes == 0:
                return 0
            try:
                limit = min(len(buffer), self._left_bytes or len(buffer))
                count = self._sock.recv_into(buffer, limit)
            except TimeoutError:
                continue
            except (BlockingIOError, ConnectionResetError):
                return 0
            if self._left_bytes is not None:
                self._left_bytes -= count
            return count


def _read(
    process: subprocess.Popen[bytes], sock: socket.socket, number: int, events: EventSink
) -> None:
    with (
        sock,
        _text(_Output(sock, process)) as output,
    ):
        for line in output:
            events.put(ProcessEvent(number, Output(line=line.rstrip("\n"))))
    status = process.wait()
    _kill_group(process)
    events.put(ProcessEvent(number, Exit(status=status)))


def _text(output: io.RawIOBase) -> io.TextIOWrapper:
    """The lines of a child, whatever the locale is: processes on other machines write UTF-8."""
    return io.TextIOWrapper(io.BufferedReader(output), encoding="utf-8", errors="replace")


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kills a child and its own children, except those with a session of their own.

    SIGTERM would not do: JAX may keep it from ending a process, and a stopped process ignores it.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a group of zombies
        os.killpg(child.pid, signal.SIGKILL)
