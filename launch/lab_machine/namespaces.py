"""Builds a lab on this machine, starts processes in it, and takes it away again."""

import contextlib
import ctypes
import fcntl
import itertools
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from holmesjax.errors import FatalError, HolmesError
from holmesjax.lab.scaled_topology import SUPERVISOR, Lab, LabNode
from holmesjax.lab.shell import CGROUPS, STATE, Commands, Version, tear_down
from launch.lab_machine import delay_line
from launch.launchers.launcher import Children, EventSink, ProcessStart, variables_here

Found = TypeVar("Found")

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux", "unshare": "util-linux"}
CLONE_NEWNET = 0x40000000
LINE_S = 20.0  # for the process that delays to start, and to end
CONNECT_S = 20.0  # for a connection in a lab that nothing disturbs


def cgroup_version() -> Version | None:
    """Returns the version of control groups that this machine offers for quotas."""
    if Path(CGROUPS["v2"], "cgroup.controllers").exists():
        return "v2"
    return "v1" if Path(CGROUPS["v1"], "cpu.cfs_quota_us").exists() else None


def refuse_without_means(*, delays: bool = False) -> None:
    """Raises HolmesError unless a lab can be built here; one that delays packets needs more."""
    fix = "--dry-run prints every command that would be run, and needs nothing"
    if os.geteuid() != 0:
        problem = "building network namespaces and cgroups needs root"
        raise HolmesError("lab", problem, found=f"user {os.geteuid()}", fix=f"use sudo; {fix}")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PROGRAMS[name] for name in missing))
        problem = f"needs the programs {', '.join(PROGRAMS)}"
        fix = f"apt-get install {packages}; {fix}"
        raise HolmesError("lab", problem, found=f"no {', '.join(missing)}", fix=fix)
    if delays and not Path(delay_line.TUN).exists():
        problem, fix = "needs TAP devices, to delay packets", f"modprobe tun; {fix}"
        raise HolmesError("lab", problem, found=f"no {delay_line.TUN}", fix=fix)
    if cgroup_version() is None:
        problem = "needs cgroups with a CPU quota, version 1 or 2"
        fix = f"mount -t cgroup2 none {CGROUPS['v2']}; {fix}"
        raise HolmesError("lab", problem, found=f"none in {CGROUPS['v2']}", fix=fix)


def run_line(line: str) -> str:
    """Runs a line and returns its output. Raises FatalError with its errors if it fails."""
    # In a session of its own: Ctrl-C is for the lab, which then takes down what is there.
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # names of interfaces and paths may be no text
        start_new_session=True,
        check=False,
    )
    if done.returncode != 0:
        fix = "see docs/lab.md; `launch lab clean` takes away what a crashed lab has left"
        raise FatalError(line, f"ended with {done.returncode}", found=done.stderr.strip(), fix=fix)
    return done.stdout


def commands_for(lab: Lab) -> Commands:
    """Returns the commands of a lab with a new name, for the means of this machine."""
    ids = (secrets.token_hex(2) for _ in itertools.count())
    return Commands(
        lab=lab,
        id=next(id for id in ids if not Path(STATE, id).exists()),
        cgroup_version=cgroup_version() or "v2",
    )


@contextlib.contextmanager
def owned(id: str) -> Iterator[None]:
    """Holds the lock that says a lab is in use: it ends with this process, however it ends."""
    folder = Path(STATE, id)
    with _exclusively():
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _exclusively() -> Iterator[None]:
    """Holds the lock of all labs: none is cleaned between its beginning and its own lock."""
    Path(STATE).mkdir(parents=True, exist_ok=True)
    lock = os.open(STATE, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def built(commands: Commands) -> Iterator[None]:
    """Builds the lab, with this process in its switch namespace; takes it away at the end."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    with owned(commands.id):
        try:
            for line in commands.build():
                run_line(line)
            with open(f"/var/run/netns/{commands.switch}") as switch:
                _enter_network(switch.fileno())
            with delaying(commands):
                yield
        finally:
            with _undisturbed():
                _enter_network(home)
                os.close(home)
                _take_away(commands.id, commands.cgroup_version)


def delaying_words(commands: Commands) -> list[str]:
    """The words that start the process that delays packets."""
    return commands.delaying([sys.executable, "-m", delay_line.__name__])


@contextlib.contextmanager
def delaying(commands: Commands) -> Iterator[subprocess.Popen[str] | None]:
    """Runs the process that delays packets, if any way of a lab that is built has a latency.

    Raises FatalError if it does not start, or has ended before it should. It ends with this
    process, however that ends, since its standard input then has an end.
    """
    if not commands.lab.delays_s:
        yield None
        return
    line = subprocess.Popen(
        delaying_words(commands),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the lab
    )
    assert line.stdin is not None
    assert line.stdout is not None
    try:
        ready, _, _ = select.select([line.stdout], [], [], LINE_S)
        if not ready or line.stdout.readline().strip() != delay_line.READY:
            problem = f"did not start in {LINE_S:g} s" if not ready else "ended at its start"
            raise FatalError("delay line", problem, found=line.poll(), fix="see what it says above")
        yield line
        has_ended = line.poll() is not None
    finally:
        line.stdin.close()
        try:
            line.wait(LINE_S)
        except subprocess.TimeoutExpired:
            line.kill()
            line.wait()
        line.stdout.close()
    if has_ended:
        problem = "ended before the lab, so delayed links have carried nothing since"
        raise FatalError("delay line", problem, found=line.returncode, fix="see what it says above")


def round_trip_s(commands: Commands, a: LabNode, b: LabNode) -> float:
    """Measures how long TCP takes to open a connection over the slow network: the best of three.

    The kernels of both ends answer by themselves, so no process has to be awake. Raises FatalError
    where no connection is opened.
    """
    times_s = []
    with socket_on(commands, b) as listener:
        listener.bind((b.slow_address, 0))
        listener.listen()
        for _ in range(3):
            with socket_on(commands, a) as caller:
                caller.settimeout(CONNECT_S)
                start_s = time.monotonic()
                try:
                    caller.connect(listener.getsockname())
                except OSError as error:
                    where, problem = f"{a.name} -> {b.name}", "opens no TCP connection in the lab"
                    raise FatalError(where, problem, found=error, fix="see docs/lab.md") from None
                times_s.append(time.monotonic() - start_s)
    return min(times_s)


def socket_on(
    commands: Commands, node: LabNode, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """A socket in the network of a node: it stays there, whoever uses it."""
    return in_network(commands, node, lambda: socket.socket(socket.AF_INET, kind))


def in_network(commands: Commands, node: LabNode, call: Callable[[], Found]) -> Found:
    """Calls something in the network of a node, with its limits of TCP."""

    def enter() -> Found:
        with open(f"/var/run/netns/{commands.namespace(node)}") as namespace:
            _enter_network(namespace.fileno())
        return call()

    with ThreadPoolExecutor(1) as thread:  # a network is that of a thread
        return thread.submit(enter).result()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Blocks signals: a second Ctrl-C would leave half of the lab behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def clean() -> list[str]:
    """Takes away every lab whose process is gone; returns their names."""
    version = cgroup_version()
    assert version is not None, "a lab needs cgroups"
    cleaned = []
    for folder in sorted(Path(STATE).glob("*")):
        with contextlib.ExitStack() as stack:
            try:
                with _exclusively():
                    lock = os.open(folder, os.O_RDONLY)
                    stack.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, FileNotFoundError):  # it is in use, or has just ended
                continue
            _take_away(folder.name, version)
            cleaned.append(folder.name)
    return cleaned


def _take_away(id: str, version: Version) -> None:
    for line in tear_down(id, version):
        run_line(line)


def _enter_network(fd: int) -> None:
    """Moves this thread, and what it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def run_on(
    commands: Commands,
    name: str,
    words: Sequence[str],
    env: Mapping[str, str],
    log: IO[str] | None = None,
) -> int:
    """Runs a verb of `launch` on a node of a lab that is built; returns its exit status.

    Args:
      name: the name of the node.
      words: the verb and its arguments.
      env: variables besides those of this process.
      log: takes the output; None: the output of this process.
    """
    [node] = [node for node in commands.lab.nodes if node.name == name]
    argv = commands.enter(node, [sys.executable, "-m", "launch", *words])
    own = {**os.environ, **env}
    return subprocess.run(argv, env=own, stdout=log, check=False).returncode


class LabLauncher:
    """Starts each process on its node of a lab that is built."""

    address = SUPERVISOR
    port = 0
    sees_exits = True
    is_here = True
    files_each = 1
    module = "launch"  # that a process runs, with its verb

    def __init__(self, commands: Commands):
        self._commands = commands
        self._nodes = {node.name: node for node in commands.lab.nodes}
        self._children = Children()

    def start(self, start: ProcessStart, events: EventSink) -> None:
        node = self._nodes[start.process.node]
        own = {**os.environ, **start.env, **variables_here(node.addresses)}
        argv = self._commands.enter(node, [sys.executable, "-m", self.module, *start.command])
        self._children.start(start.process.number, argv, own, events)

    def end(self) -> None:
        self._children.end()
