"""TensorBoard and Weights & Biases: where the numbers of a step go besides the run's own file."""

import importlib
import importlib.util
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from holmesjax.config import LogConfig
from holmesjax.data.optional_packages import how_to_install
from holmesjax.errors import ConfigError
from holmesjax.files import regular_files
from holmesjax.files.whole_files import write_whole
from holmesjax.report.record_file import MOST_WAITING, RecordFile

EVENT_BYTES = 16  # of an event of TensorBoard beside its content
CLOSE_S = 10.0  # for sinks to write what waits, and to end
PACKAGES = {"tensorboard": ("tensorboardX", "tb"), "wandb": ("wandb", "wandb")}  # module, extra
WANDB_ID = re.compile(r"[\w.=@+~-]{1,128}")


def check_installed(log: LogConfig) -> None:
    """Raises if `log` asks for a package that is missing: call it before anything slow."""
    for field, (module, extra) in PACKAGES.items():
        if getattr(log, field) and not _is_installed(field):
            raise ConfigError(
                f"log.{field}",
                f"needs the package {module}, which is not installed",
                found="true",
                fix=f"{how_to_install(extra)}, or set log.{field}=false",
            )


def _is_installed(field: str) -> bool:
    return importlib.util.find_spec(PACKAGES[field][0]) is not None


def start_sinks(
    run_dir: Path, log: LogConfig, done_steps: int, warn: Callable[[str], object]
) -> "list[QueuedSink]":
    """Starts the sinks that `log` asks for.

    Args:
      run_dir: the run folder.
      log: the settings.
      done_steps: the steps before the first that is written.
      warn: takes messages about what fails.
    """
    sinks = []
    if log.wandb:
        sinks.append(QueuedSink(lambda: _Wandb(run_dir, warn), "Weights & Biases", warn))
    if log.tensorboard or (log.tensorboard is None and _is_installed("tensorboard")):
        make = lambda: _TensorBoard(run_dir, done_steps, warn)
        sinks.append(QueuedSink(make, "TensorBoard", warn))
    return sinks


def close_sinks(sinks: "Sequence[QueuedSink]") -> None:
    """Lets all sinks write what waits, and waits for them, at most CLOSE_S together."""
    for sink in sinks:
        sink.end()
    deadline_s = time.monotonic() + CLOSE_S
    for sink in sinks:
        sink.wait(deadline_s - time.monotonic())


class _Sink(Protocol):
    """A place for scalars besides the file."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class QueuedSink:
    """A sink with a thread and a bounded queue: whatever hangs or fails in it holds nothing up.

    The oldest records are dropped from a full queue. A sink that fails, or does not even start,
    gets no more records.

    Args:
      make: starts the sink, in its thread.
      name: of the sink, for messages.
      warn: takes them.
    """

    def __init__(self, make: Callable[[], _Sink], name: str, warn: Callable[[str], object]):
        self._make, self._name, self._warn = make, name, warn
        self._queue: deque[tuple[int, Mapping[str, float]]] = deque()
        self._num_dropped, self._is_closing = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._changed:
            if not self._thread.is_alive():
                return
            self._queue.append((step, scalars))
            if len(self._queue) > MOST_WAITING:
                self._queue.popleft()
                self._num_dropped += 1
            self._changed.notify()

    def end(self) -> None:
        """Takes no more records, and lets the thread end when all are written."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the thread, but not for longer than this."""
        self._thread.join(max(timeout_s, 0.0))
        if self._thread.is_alive():
            self._warn(f"{self._name} did not end within {CLOSE_S:g} s, and is left behind")
        if self._num_dropped:
            self._warn(f"{self._name} was too slow: it has not got {self._num_dropped:,} records")

    def _write_all(self) -> None:
        try:
            sink = self._make()
            while True:
                with self._changed:
                    while not self._queue and not self._is_closing:
                        self._changed.wait()
                    if not self._queue:
                        break
                    step, scalars = self._queue.popleft()
                sink.write(step, scalars)
            sink.close()
        except BaseException as error:  # a package's own, of any kind; some ask to leave
            self._warn(f"{self._name} has failed, and gets no more numbers: {error}")


def end_of_events(file: BinaryIO) -> int:
    """The end of the last whole event of a file. Each has its size in front, and two checksums."""
    end, size = 0, file.seek(0, os.SEEK_END)
    while end + EVENT_BYTES <= size:
        file.seek(end)
        (length,) = struct.unpack("<Q", file.read(8))
        if end + EVENT_BYTES + length > size:
            break
        end += EVENT_BYTES + length
    return end


class _TensorBoard:
    """Event files in `tensorboard/` of the run folder.

    The package's own writer has a thread of its own. A full disk ends that thread with a traceback,
    and nothing is written when there is room again.
    """

    def __init__(self, run_dir: Path, done_steps: int, say: Callable[[str], object]):
        self._package = importlib.import_module("tensorboardX.record_writer")
        self._proto = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summary = importlib.import_module("tensorboardX.summary")
        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file = RecordFile(folder / name, say, end_of_events)
        # TensorBoard hides what an earlier attempt wrote from this step on.
        log = self._proto.SessionLog(status=self._proto.SessionLog.START)
        begins = self._record(done_steps + 1, file_version="brain.Event:2")
        self._file.append(begins + self._record(done_steps + 1, session_log=log))

    def _record(self, step: int, **what: Any) -> bytes:
        event = self._proto.Event(step=step, wall_time=time.time(), **what).SerializeToString()
        size = struct.pack("<Q", len(event))
        sums = [struct.pack("<I", self._package.masked_crc32c(part)) for part in (size, event)]
        return b"".join((size, sums[0], event, sums[1]))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.scalar(name, value) for name, value in scalars.items()]
        whole = type(values[0])(value=[scalar for summary in values for scalar in summary.value])
        self._file.append(self._record(step, summary=whole))

    def close(self) -> None:
        self._file.close()


class _Wandb:
    """A run of the project `holmesjax`; a resumed run continues the same one.

    The file with the run's id may be damaged, or find no room: that costs the continuation alone.
    """

    def __init__(self, run_dir: Path, warn: Callable[[str], object]):
        package = importlib.import_module("wandb")
        id_file = run_dir / "wandb_id"
        run_id = _known_id(id_file, warn)
        place = {"project": "holmesjax", "name": run_dir.resolve().name, "dir": str(run_dir)}
        try:
            self._run = package.init(**place, id=run_id, resume="allow")
        except Exception as error:  # not logged in, no network, no such project
            fix = "wandb login, or WANDB_MODE=offline in the environment, or log.wandb=false"
            raise ConfigError("log.wandb", "wandb does not start", found=error, fix=fix) from None
        try:
            if run_id != self._run.id:
                write_whole(id_file, self._run.id)
        except OSError as error:
            warn(
                f"warning: {id_file} cannot be written, so a resume begins another run of "
                f"Weights & Biases: {error.strerror}"
            )
        # Our own x axis: wandb's counter refuses the steps that a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


def _known_id(id_file: Path, warn: Callable[[str], object]) -> str | None:
    """Returns the id in a file; None if there is none, and, with a warning, if it is no id."""
    try:
        run_id = regular_files.read_text(id_file).strip()
        if WANDB_ID.fullmatch(run_id):
            return run_id
        problem: object = repr(run_id[:80])
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = error
    warn(f"warning: {id_file} has no id, so a new run of Weights & Biases begins: {problem}")
    return None
