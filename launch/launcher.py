"""What every launcher offers the supervisor, and the child processes that most of them have."""

import contextlib
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from holmesjax.control import Event
from holmesjax.processes import Process


class Launcher(Protocol):
    """Starts processes on the nodes of a topology."""

    @property
    def address(self) -> str:
        """Of this machine, where all processes can reach it."""

    @property
    def port(self) -> int:
        """On which the controller listens; 0: any."""

    @property
    def sees_exits(self) -> bool:
        """Whether the end of a process is an event."""

    def start(
        self,
        process: Process,
        command: Sequence[str],
        env: Mapping[str, str],
        events: "queue.Queue[Event]",
    ) -> None:
        """Starts `python -m launch <command>` on a node, with variables besides those it has.

        From now on its `output` and its `exit` are events.
        """

    def end(self) -> None:
        """Ends every process that still runs, at once, and waits for it."""


class Children:
    """Child processes whose output and end are events."""

    def __init__(self) -> None:
        self._children: list[tuple[subprocess.Popen[str], threading.Thread]] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started, in that order."""
        return [child.pid for child, _ in self._children]

    def start(
        self,
        number: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        events: "queue.Queue[Event]",
        *,
        stdin: str = "",
    ) -> None:
        """Starts process `number` of the job; `env` is all of its environment."""
        child = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the supervisor, which asks all to stop
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit says more
            child.stdin.write(stdin)
            child.stdin.close()
        reader = threading.Thread(target=_read, args=(child, number, events), daemon=True)
        reader.start()
        self._children.append((child, reader))

    def end(self) -> None:
        children, self._children = self._children, []
        for child, _ in children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()  # JAX may keep SIGTERM from ending it, and a stopped one ignores it
        for child, reader in children:
            child.wait()
            reader.join()


def _read(child: subprocess.Popen[str], number: int, events: "queue.Queue[Event]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        events.put(Event(number, "output", {"line": line.rstrip("\n")}))
    events.put(Event(number, "exit", {"status": child.wait()}))
