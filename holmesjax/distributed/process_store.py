"""The run folder of one process: where it is another one than the launcher's, and what is in it.

A process resumes from a checkpoint, looks whether the folder is still its job's, copies into an
object store, and may keep copies of other clusters in memory.
"""

import functools
import socket
from collections.abc import Callable, Collection, MutableMapping, Sequence
from pathlib import Path

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest, mirror, restoring, stores
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.distributed import partner_memory
from holmesjax.distributed.member import Member
from holmesjax.distributed.messages import JobStart
from holmesjax.distributed.partner_memory import PartnerMemory
from holmesjax.distributed.store_end import OwnStore
from holmesjax.errors import of_system
from holmesjax.files import places
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.job import Job
from holmesjax.liveness import lease
from holmesjax.plan import partners
from holmesjax.plan.processes import Process
from holmesjax.runtime.chunk import Chunk


def join_store(
    folder: Path,
    env: MutableMapping[str, str],
    environment: ProcessEnvironment,
    url: str | None = None,
) -> OwnStore | None:
    """Fetches the files of the run, where a run folder is not the launcher's; None where it is.

    `url` is that of the folder's copy in an object store.
    """
    home = env.get("HOLMES_STORE")
    if home is None and lease.owner(folder):  # whoever starts it has not said, and this says enough
        return None
    store = make_store(folder, environment)
    if home is None:
        home = store.home()
    if home is None or not stores.is_own(folder, home):
        return None
    store.join(home)
    if url:
        try:
            mirror.Mirror(url).join(folder)
        except OSError as error:
            raise of_system(error) from None
    store.serve()
    store.fetch_run_files()
    if url and places.whole_url(jobs.load_config(folder).run.dir) != url:
        store.mirror = mirror.of(folder)  # else the launcher writes there
    return store


def make_store(folder: Path, environment: ProcessEnvironment) -> OwnStore:
    """The run folder of this process, which can fetch what others have."""
    return OwnStore(
        folder,
        process=environment.number,
        node=socket.gethostname(),
        controller=environment.controller,
        key=environment.key,
    )


class ProcessStore:
    """The run folder of a job, as one process of it has it.

    Args:
      job: the job of the run folder.
      environment: the place of this process in the job.
      processes: all processes of the plan, in the order of their numbers.
      member: of this process; it hears how reading goes on.
      store: the run folder, where it is not the launcher's.
    """

    def __init__(
        self,
        job: Job,
        environment: ProcessEnvironment,
        processes: Sequence[Process],
        member: Member,
        store: OwnStore | None,
    ):
        self._job, self._environment, self._processes = job, environment, processes
        self._me, self._member, self._store = processes[environment.number], member, store
        self._mirror: Mirror | None = None  # of which this process may remove something
        if store:
            store.silence_s = job.config.distributed.silence_s

    def open_memory(self) -> PartnerMemory | None:
        """The copies that this process keeps for other clusters; None: it keeps none."""
        run_dir, store = self._job.run_dir, self._store
        home = store.launchers if store else stores.known_identifier(run_dir)
        is_first = all(x.node != self._me.node for x in self._processes[: self._me.number])
        if not (self._job.config.checkpoint.partner and home and is_first):
            return None
        found = partners.partners(self._job.plan, self._processes)
        holds = any(partner.holder == self._me for partner in found)
        if not holds and not partner_memory.has_folder(home, self._me.node):
            return None
        memory = partner_memory.opened(
            home,
            me=self._me,
            found=found,
            topology=self._job.topology,
            controller=self._environment.controller,
            key=self._environment.key,
        )
        if memory:
            memory.silence_s = self._job.config.distributed.silence_s
        return memory

    def fence(self, epoch: int) -> Callable[[], None]:
        """A check that the run folder is still that of this process's job."""
        if self._store is None:
            return lease.fence(self._job.run_dir, epoch)
        start = self._start_name(str(self._store.launchers), epoch)
        return stores.begin(self._store.folder, start, functools.partial(print, flush=True))

    def _start_name(self, home: str, epoch: int) -> str:
        return stores.start_name(home, epoch, self._environment.restart)

    def begin_mirror(self, epoch: int) -> Mirror | None:
        """The copy of the run folder in an object store, where this process writes there."""
        run_dir, store = self._job.run_dir, self._store
        found = store.mirror if store and store.mirror else mirror.of(run_dir)
        if found is None:
            return None
        home = store.launchers if store else stores.known_identifier(run_dir)
        try:
            found.begin(self._start_name(str(home), epoch), writes=self._me.leads)
        except OSError as error:
            raise of_system(error) from None
        self._mirror = found
        return found if self._me.leads else None

    def close(self) -> None:
        """Waits until the object store is rid of what the launcher has not kept."""
        if self._mirror:
            self._mirror.close()

    def checkpoint(self, start: JobStart, chunks: Sequence[Chunk]) -> Checkpoint | None:
        """Returns the checkpoint to resume; None for step 0, unless weights were imported.

        Parts that are not in this process's store are fetched.
        """
        found = self.saved(start.resume)
        if found and (self._store or manifest.elsewhere(found)):
            self._member.status("was fetching the checkpoint")
            store = self._store or make_store(self._job.run_dir, self._environment)
            say = functools.partial(print, flush=True)
            parts = restoring.parts_of(found, chunks)
            store.fetch(
                found,
                parts,
                self._member.advance,
                say,
                in_memory=start.in_memory,
                bytes_per_s=self._fetched_bytes_per_s(found, parts, start.in_memory),
            )
        return found

    def _fetched_bytes_per_s(
        self, checkpoint: Checkpoint, parts: Collection[str], in_memory: Collection[str]
    ) -> float | None:
        """The rate of the slowest link to whoever wrote some parts, or has them in memory.

        None where they come from elsewhere.
        """
        topology, me = self._job.topology, self._me
        written = checkpoint.manifest.get("stores", {})
        nodes = {written[part]["node"] for part in parts if part in written} - {me.node}
        if not {*in_memory}.isdisjoint(parts):
            nodes |= {other.node for other in self._processes if other.cluster != me.cluster}
        if not nodes or not nodes <= {node.name for node in topology.nodes}:
            return None
        link = lambda node: topology.boundary_link(node, me.node)
        return min(link(node).bandwidth_bytes_per_s for node in nodes)

    def saved(self, step: int) -> Checkpoint | None:
        """The checkpoint after that step, as far as it is here."""
        run_dir = self._job.run_dir
        if step or manifest.has_manifest(manifest.folder_of(run_dir, 0)):
            return manifest.wait_for(run_dir, step)
        return None
