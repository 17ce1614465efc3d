"""The actor that the launcher `ray` has on a node, which starts the processes there.

Ray brings the class there as it stands here, so it imports nothing of HolmesJAX.
"""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

MOST_EVENTS = 1000  # in an answer
REST_S = 2.0  # for the output of a process that has ended, which others may hold open


class RayNode:
    """Starts processes, and says what they print and how they end. Two threads may call it."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._said: queue.SimpleQueue[tuple[int, str | int | tuple[str, str]]] = queue.SimpleQueue()

    def visible_devices(self) -> str | None:
        """The GPUs that Ray has given, as CUDA names them; None: all that are there."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def start(self, key: int, folder: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts a process of the job, or says what is in the way.

        Args:
          key: stands before what is said of it.
          folder: the checkout.
          argv: the program, as a path in that folder or a name in PATH, and its arguments.
          env: variables besides those that Ray's processes have.
        """
        if not os.path.isfile(os.path.join(folder, "launch/__main__.py")):
            self._said.put((key, ("the folder is no checkout of HolmesJAX", folder)))
            return
        python = os.path.join(folder, argv[0]) if os.sep in argv[0] else argv[0]
        if shutil.which(python) is None:
            self._said.put((key, ("there is no such python", argv[0])))
            return
        # It ends with this one, which Ray ends with the launcher.
        own = {**os.environ, **env, "HOLMES_PARENT": str(os.getpid())}
        try:
            child = subprocess.Popen(
                [python, *argv[1:]],
                cwd=folder,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._children.append(child)
            reader = threading.Thread(target=self._read, args=(key, child), daemon=True)
            reader.start()
            threading.Thread(target=self._wait, args=(key, child, reader), daemon=True).start()
        # Such as memory, processes, a NUL in a variable, or a thread that cannot be started.
        except (OSError, ValueError, RuntimeError) as error:
            self._said.put((key, ("the process cannot be started", str(error))))

    def take(self, wait_s: float) -> list[tuple[int, str | int | tuple[str, str]]]:
        """The words since the last call, each with its key, in their order.

        A line is a text, an exit status a number, and what is in the way of a start two texts.
        `wait_s` is how long to wait for the first.
        """
        taken: list[tuple[int, str | int | tuple[str, str]]] = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._said.get(timeout=wait_s))
            while len(taken) < MOST_EVENTS:
                taken.append(self._said.get_nowait())
        return taken

    def end(self) -> None:
        """Kills all processes, and waits for them."""
        for child in self._children:
            if child.poll() is None:  # otherwise its number may be another's
                _kill_group(child)
        for child in self._children:
            child.wait()

    def _read(self, key: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout
        with child.stdout:
            for line in child.stdout:
                self._said.put((key, line.decode(errors="replace").rstrip("\n")))

    def _wait(self, key: int, child: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        status = child.wait()
        _kill_group(child)
        reader.join(REST_S)
        self._said.put((key, status))


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
