"""The memory of a node, with copies of what another cluster writes. No JAX.

A restart kills the processes of a job, and their memory goes with them. So the copies are files of
a file system that is memory, where they stay until the run or the node ends. For the launcher this
folder is one more store: it says which parts it has, and others fetch from it.
"""

import contextlib
import errno
import functools
import os
import queue
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from holmesjax import units
from holmesjax.checkpoints import fetching, manifest, stores
from holmesjax.checkpoints.fetching import Read
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.distributed.store_end import NOBODY, OwnStore
from holmesjax.distributed.store_messages import Keep, PutManifest
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.plan import partners
from holmesjax.plan.partners import Partner
from holmesjax.plan.processes import Process
from holmesjax.topology.machines import Topology

MEMORY = Path("/dev/shm")
END_S = 10.0  # for a copy that is being made when the run ends
FREE, FREE_BYTES = 0.1, 1 << 30  # of the memory, that copies leave to others: the lesser of the two


class _EndedError(Exception):
    """The run has ended, and nothing is copied any more."""


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

    Raises ConfigError where the folder is not this user's alone, OSError and HolmesError where it
    cannot be made.
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
        self._told: queue.SimpleQueue[tuple[int, str, int | None] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy_all, name="partner", daemon=True)
        self.join(home)
        self.serve()
        self._thread.start()

    def end(self) -> None:
        """Gives the memory back: the run has ended, and its checkpoints are in stores."""
        self._over.set()
        self._told.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():  # it would make anew what is removed
            print(f"warning: a copy is still made; remove it: rm -r {self.folder}", flush=True)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other nodes of this machine have copies
            self.folder.parent.rmdir()

    # ---- what the launcher tells ---------------------------------------------------------------

    def _keep(self, keep: Keep) -> list[int]:
        for step in keep.dropped:
            shutil.rmtree(manifest.folder_of(self.folder, step), ignore_errors=True)
        return []

    def _put(self, put: PutManifest) -> None:
        self.is_copying = True
        self._told.put((put.step, put.text, put.stays))

    @property
    def copied(self) -> list[int]:
        """The steps whose parts are here, as far as this node is to have them."""
        checkpoints = map(manifest.at, dict(manifest.finished(self.folder)).values())
        return [x.step for x in checkpoints if manifest.is_sound(x.manifest) and self._has(x)]

    def _has(self, checkpoint: Checkpoint) -> bool:
        held = stores.held(self.folder, checkpoint.step, checkpoint.manifest["files"])
        return set(held).issuperset(self._parts_of(checkpoint))

    def _parts_of(self, checkpoint: Checkpoint) -> list[str]:
        known = set(map(manifest.part_of, checkpoint.manifest["files"]))
        return [part for part in self._parts if part in known]

    # ---- copies --------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        while told := self._told.get():
            try:
                self._copy(*told)
            except _EndedError:
                return
            except Exception as error:  # the next may succeed, and no run ends without copies
                why = f"{type(error).__name__}: {' '.join(str(error).split())}"
                print(f"warning: no copy in memory after step {told[0]}: {why}", flush=True)
            finally:
                self.is_copying = False

    def _copy(self, step: int, text: str, stays: int | None) -> None:
        """Copies the parts of a step; besides it stays what all have, or else the newest here."""
        if stays is None:
            stays = max(self.copied, default=step)
        for other, path in manifest.folders(self.folder):
            if other not in (step, stays):
                shutil.rmtree(path)
        path = manifest.folder_of(self.folder, step)
        if not manifest.has_manifest(path):
            path.mkdir(parents=True, exist_ok=True)
            manifest.commit(self.folder, step, text)
        checkpoint = manifest.at(path)
        if not manifest.is_sound(checkpoint.manifest):
            raise ValueError(f"{path / manifest.MANIFEST} is damaged")
        parts, silent = self._parts_of(checkpoint), lambda *_: None
        self._refuse_full(checkpoint, parts)
        try:
            fetching.fetch(self.folder, checkpoint, parts, self._slow_reader, silent, silent)
        except (OSError, fetching.UntakenError):  # others need this room, too
            for left in path.glob(f"*{stores.FETCHING}"):
                shutil.rmtree(left, ignore_errors=True)
            raise

    def _refuse_full(self, checkpoint: Checkpoint, parts: Collection[str]) -> None:
        """Raises OSError where what is not here yet would leave too little of the memory free."""
        files = checkpoint.manifest["files"]
        missing = set(parts).difference(stores.held(self.folder, checkpoint.step, files))
        copy_of = functools.partial(
            stores.Copy, folder=self.folder, step=checkpoint.step, files=files
        )
        copies = [copy_of(part=part) for part in missing]
        wanted_bytes = sum(copy.num_bytes - copy.begun() for copy in copies)
        memory = os.statvfs(self.folder)
        left_bytes = min(FREE * memory.f_blocks * memory.f_frsize, FREE_BYTES)
        if copies and wanted_bytes + left_bytes > memory.f_bavail * memory.f_frsize:
            size = units.show(wanted_bytes, "B")
            raise OSError(errno.ENOSPC, f"no room for {size} more", str(self.folder))

    @contextlib.contextmanager
    def _slow_reader(self) -> Iterator[Read]:
        with self._reader() as read:
            yield functools.partial(self._read_slowly, read)

    def _read_slowly(self, read: Read, name: str, first: int, count: int) -> bytes:
        begin_s = time.monotonic()
        if self._over.is_set():
            raise _EndedError
        content = read(name, first, count)
        due_s = begin_s + len(content) / self._bytes_per_s
        self._over.wait(max(0.0, due_s - time.monotonic()))
        return content


def opened(
    home: str,
    *,
    me: Process,
    found: Sequence[Partner],
    topology: Topology,
    controller: tuple[str, int],
    key: bytes,
) -> PartnerMemory | None:
    """The `PartnerMemory`; None, and a warning, where it cannot be: no run ends without copies.

    Args:
      home, me, found, topology, controller, key: as for `PartnerMemory`.

    Raises ConfigError where the folder is not this user's alone.
    """
    try:
        return PartnerMemory(
            home, me=me, found=found, topology=topology, controller=controller, key=key
        )
    except ConfigError:
        raise
    except (HolmesError, OSError) as error:
        why = " ".join(str(error).split())
        print(f"warning: {me.node} keeps no copies in memory: {why}", flush=True)
        return None


def _make(folder: Path) -> Path:
    """Makes a folder that only this user can read, or looks that it is so."""
    with contextlib.suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700)
    found = folder.parent.lstat()
    if not (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    ):
        problem = "another user's folder, or one that others can open"
        fix = "remove it, or set checkpoint.partner=false"
        raise ConfigError(str(folder.parent), "cannot have copies", found=problem, fix=fix)
    folder.mkdir(exist_ok=True)
    return folder
