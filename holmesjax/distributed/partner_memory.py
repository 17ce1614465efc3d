"""The memory of a node, with copies of what another cluster writes. No JAX.

A restart kills the processes of a job, and their memory goes with them. So the copies are files of
a file system that is memory, where they stay until the run or the node ends. For the launcher this
folder is one more store: it says which parts it has, and others fetch from it.
"""

import contextlib
import functools
import os
import queue
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from holmesjax.checkpoints import fetching, manifest, stores
from holmesjax.checkpoints.fetching import Read
from holmesjax.distributed.store_end import NOBODY, OwnStore
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.plan import partners
from holmesjax.plan.partners import Partner
from holmesjax.plan.processes import Process
from holmesjax.topology.machines import Topology

MEMORY = Path("/dev/shm")
END_S = 10.0  # for a copy that is being made when the run ends


def folder_of(home: str, node: str, memory: Path = MEMORY) -> Path:
    """The folder of a node's copies, where several nodes may be one machine.

    Args:
      home: the identifier of the launcher's run folder.
      node: its name.
      memory: where a file system is memory.
    """
    return memory / f"holmesjax-{os.getuid()}-{stores.run_of(home)}" / node


def has_folder(home: str, node: str) -> bool:
    """Whether an earlier start of the run has left copies on a node."""
    return folder_of(home, node).is_dir()


class PartnerMemory(OwnStore):
    """The copies that a process keeps for other clusters, and makes after each save.

    Args:
      home: the identifier of the launcher's run folder.
      me: this process, the first of its node.
      found: the partners of all parts.
      topology: the machines.
      controller: address and port.
      key: of the job.

    Raises ConfigError where the folder cannot be this user's.
    """

    in_memory = True

    def __init__(
        self,
        home: str,
        *,
        me: Process,
        found: Sequence[Partner],
        topology: Topology,
        controller: tuple[str, int],
        key: bytes,
    ):
        folder = _make(folder_of(home, me.node))
        super().__init__(folder, process=NOBODY, node=me.node, controller=controller, key=key)
        self._parts = [manifest.part_name(x.part) for x in found if x.holder.number == me.number]
        holders = len({x.holder.number for x in found})
        self._bytes_per_s = partners.copy_bytes_per_s(topology, found) / holders if found else 0.0
        self._told: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._last: int | None = None  # step whose parts are whole here
        self._is_over = False
        self._thread = threading.Thread(target=self._copy_all, name="partner", daemon=True)
        self.join(home)
        self.serve()
        self._thread.start()

    def end(self) -> None:
        """Gives the memory back: the run has ended, and its checkpoints are in stores."""
        self._is_over = True
        self._told.put(None)
        self._thread.join(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other nodes of this machine have copies
            self.folder.parent.rmdir()

    # ---- what the launcher tells ---------------------------------------------------------------

    def _keep(self, steps: Collection[int], last: int, dropped: Collection[int]) -> list[int]:
        for step in dropped:
            shutil.rmtree(manifest.folder_of(self.folder, step), ignore_errors=True)
        return []

    def _put(self, step: int, text: str) -> None:
        self.is_copying = True
        self._told.put((step, text))

    # ---- copies --------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        while told := self._told.get():
            step, text = told
            try:
                self._copy(step, text)
            except (HolmesError, OSError, ValueError) as error:
                if not self._is_over:
                    why = " ".join(str(error).split())
                    print(f"warning: no copy in memory after step {step}: {why}", flush=True)
            self.is_copying = False

    def _copy(self, step: int, text: str) -> None:
        """Copies the parts of a step; of others only the last stays, which is whole everywhere."""
        stays = {step, self._last or max(dict(manifest.finished(self.folder)), default=step)}
        for other, path in manifest.folders(self.folder):
            if other not in stays and self._parts:
                shutil.rmtree(path)
        path = manifest.folder_of(self.folder, step)
        if not manifest.has_manifest(path):
            path.mkdir(parents=True, exist_ok=True)
            manifest.commit(self.folder, step, text)
        checkpoint = manifest.at(path)
        known = set(map(manifest.part_of, checkpoint.manifest["files"]))
        parts = [part for part in self._parts if part in known]
        fetching.fetch(
            self.folder, checkpoint, parts, self._slow_reader, lambda: None, lambda line: None
        )
        self._last = step

    @contextlib.contextmanager
    def _slow_reader(self) -> Iterator[Read]:
        with self._reader() as read:
            yield functools.partial(self._read_slowly, read)

    def _read_slowly(self, read: Read, name: str, first: int, count: int) -> bytes:
        begin_s = time.monotonic()
        if self._is_over:
            raise fetching.UnreadError("the run has ended")
        content = read(name, first, count)
        time.sleep(max(0.0, begin_s + len(content) / self._bytes_per_s - time.monotonic()))
        return content


def _make(folder: Path) -> Path:
    """Makes a folder that only this user can read, or looks that it is so."""
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        found = folder.parent.lstat()
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & 0o077
        ):
            folder.mkdir(exist_ok=True)
            return folder
        problem: object = "another user's folder, or one that others can open"
    except OSError as error:
        problem = error
    fix = "remove it, or set checkpoint.partner=false"
    raise ConfigError(str(folder.parent), "cannot have copies", found=problem, fix=fix)
