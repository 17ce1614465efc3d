"""Runs one process of a job: its stage's domain, its transport, its steps.

The environment has its number and the address of the controller. An error in any thread is reported
to the controller, and ends the process at once: a main thread that waits in a collective could not
end by itself.
"""

import contextlib
import functools
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest, reading as arrays_reading, writing
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.data import cluster_paths, corpus_progress
from holmesjax.data.batches import Batches
from holmesjax.data.corpus_progress import WorkDone
from holmesjax.data.patience import patiently
from holmesjax.distributed import foreign_errors
from holmesjax.distributed.member import ADVANCE_S, Member
from holmesjax.distributed.messages import (
    AllDone,
    Done,
    Failed,
    Go,
    JobStart,
    Measurements,
    Met,
    Ready,
    Saved,
    Stop,
    Unsaved,
    Up,
)
from holmesjax.distributed.partner_memory import PartnerMemory
from holmesjax.distributed.process_store import ProcessStore, join_store
from holmesjax.distributed.store_end import OwnStore
from holmesjax.errors import (
    REQUEUE,
    DamagedError,
    HolmesError,
    PeerError,
    SpikeError,
    may_pass,
)
from holmesjax.files import places
from holmesjax.hosts import computing, nics
from holmesjax.hosts.nics import Host
from holmesjax.hosts.process_environment import ProcessEnvironment, die_with, own_devices
from holmesjax.islands.agreement import Digests
from holmesjax.islands.apart import IslandApart
from holmesjax.islands.crossings import crossings_of
from holmesjax.islands.mailbox import News
from holmesjax.job import Job
from holmesjax.liveness import hung_main_thread
from holmesjax.parallel import platforms
from holmesjax.parallel.mesh import build_mesh
from holmesjax.plan.processes import Process, domain_fabric, make_processes
from holmesjax.report.process_step import ProcessStep
from holmesjax.runtime import domain, program_cache
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.kernel_choice import attention_lines, find_unproven, optimizer_lines
from holmesjax.runtime.stage_crossings import crossings
from holmesjax.runtime.step_timeout import Activity
from holmesjax.runtime.whole_step import WholeStep
from holmesjax.training_loop import Runner, TrainingLoop
from holmesjax.training_setup import TrainingSetup, make_chunks
from holmesjax.transport import addresses, connections
from holmesjax.transport.crossings import Crossing
from holmesjax.transport.ports import Book, Ports, nic
from holmesjax.transport.records import Record
from holmesjax.transport.relayed import RelayPlace
from holmesjax.transport.rendezvous import Rendezvous
from holmesjax.transport.tcp import LinkLoss, TcpTransport, Timeouts


def work(
    run_dir: str | Path, env: MutableMapping[str, str], kind: "type[Worker] | None" = None
) -> int:
    """Runs one process of the job in a run folder to its end, and returns its exit status.

    Args:
      run_dir: the run folder.
      env: the environment of this process, which NCCL's variables are added to.
      kind: what the process does; None: it trains.

    Raises:
      HolmesError: for mistakes that are found before the controller is reached. In a run that has
        trained it is a PeerError: the next start may not meet them.
    """
    find_host = functools.cache(nics.discover)
    environment = ProcessEnvironment.read(env, find_host)
    die_with(env.get("HOLMES_PARENT"))
    connections.raise_open_files()
    kind = kind or Worker
    try:
        worker = _made(kind, run_dir, env, environment, find_host)
    except HolmesError as error:
        has_trained = environment.restart > 0 or jobs.has_trained(places.folder_of(run_dir))
        raise may_pass(error) if kind.trains and has_trained else error from None
    return worker.run()


def _made(
    kind: "type[Worker]",
    run_dir: str | Path,
    env: MutableMapping[str, str],
    environment: ProcessEnvironment,
    find_host: Callable[[], Host],
) -> "Worker":
    """The process, which has met the controller."""
    folder = places.folder_of(run_dir)
    store = join_store(folder, env, environment, places.whole_url(run_dir))
    saved = jobs.load_saved(folder)
    job = saved if kind.trains else saved.generating
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    if not 0 <= environment.number < len(processes):
        where, problem = "the environment", f"the plan has {len(processes)} processes"
        fix = "start as many processes as the plan needs, numbered from 0"
        raise HolmesError(where, problem, found=f"number {environment.number}", fix=fix)
    env.update(own_devices(processes[environment.number], env))
    return kind(job, environment, processes, env, find_host, store)


class Worker:
    """A process of a job, which trains.

    Args:
      job: the job of the run folder.
      environment: the place of this process in the job.
      processes: all processes of the plan, in the order of their numbers.
      env: the environment variables, to which those of NCCL are added.
      find_host: finds the NICs and GPUs of this host.
      store: the run folder, where it is not the launcher's.
    """

    trains = True

    def __init__(
        self,
        job: Job,
        environment: ProcessEnvironment,
        processes: tuple[Process, ...],
        env: MutableMapping[str, str],
        find_host: Callable[[], Host],
        store: OwnStore | None = None,
    ):
        self._store = store
        self._job, self._environment, self._processes = job, environment, processes
        self._env, self._find_host = env, find_host
        self._me = processes[environment.number]
        self._domain = tuple(p for p in processes if p.stage == self._me.stage)
        self._config = job.config.distributed
        self._failing = threading.Lock()
        self._about = job.about(environment.restart)
        self._step, self._stopping = 0, False
        self._has_trained = environment.restart > 0 or jobs.has_trained(job.run_dir)
        self._tcp: TcpTransport | None = None  # where there are several stages
        self._held_port: socket.socket | None = None  # of the coordinator, until it listens
        is_made = threading.Event()  # what may be told at once needs the member

        def give_up(error: HolmesError) -> None:
            is_made.wait()
            self._give_up(error)

        self._member = Member(
            process=self._me,
            address=environment.controller[0],
            port=environment.controller[1],
            key=environment.key,
            about=self._about,
            computing=computing.facts(env, find_host().gpus, job.own_sources),
            timeout_s=self._config.silence_s,
            start_timeout_s=self._config.start_timeout_s,
            on_loss=give_up,
        )
        is_made.set()
        self._files = ProcessStore(job, environment, processes, self._member, store)

    def run(self) -> int:
        """Returns 0 once all is done, and REQUEUE if the run was asked to stop before."""
        # On another thread: the main one may compile, or be in the middle of telling something.
        hung_main_thread.hear_signals(
            hung_main_thread.stop_signals(), lambda number: self._send(Stop(signal=number))
        )
        try:
            return self._run()
        except BaseException as error:
            self._give_up(error)

    def _send(self, record: Record) -> None:
        with contextlib.suppress(OSError):  # the listening thread says why
            self._member.send(record)

    def _give_up(self, error: BaseException) -> NoReturn:
        """Ends this process with what went wrong, from any thread; the first call counts.

        It waits for the end of the job: others would fail with it, and JAX would abort them.

        A mistake in a run that has made steps may go away, unless the controller calls it one: a
        scheduler that sees this process end with 2 would start no job again.
        """
        self._failing.acquire()  # never released
        failed = _described(error)
        say = lambda: None if isinstance(error, HolmesError) else traceback.print_exception(error)
        flush = lambda: sys.stdout.flush()

        def wait() -> None:
            self._member.is_over.wait()
            if self._member.is_refused:
                hung_main_thread.end_process(failed.exit_status)

        is_mistake = failed.exit_status == HolmesError.exit_status
        may_pass = is_mistake and self.trains and self._has_trained
        status = REQUEUE if may_pass else failed.exit_status
        hung_main_thread.end_process(status, lambda: self._send(failed), say, flush, wait)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Gives up at once where another process may be gone: the writer would wait for it.

        All processes come to the end of a run that diverges, and finish its checkpoint before.
        """
        try:
            yield
        except PeerError as error:
            self._give_up(error)
        except HolmesError:
            raise
        except BaseException as error:
            self._give_up(error)

    # ---- the normal course ---------------------------------------------------------------------

    def _run(self) -> int:
        job, member = self._job, self._member
        # Before JAX starts: compiling may take minutes.
        look = functools.partial(cluster_paths.look, job.config, [self._me.cluster])
        patiently(look, has_trained=self._has_trained)
        job.check_pool(self._env, [self._me.stage])
        memory = self._files.open_memory()
        ports = self._listen()
        member.status("was checking the attention kernels")
        unproven = find_unproven(
            job,
            [self._me.stage],
            self._find_host,
            self._env,
            functools.partial(print, flush=True),
            member.advance,
        )
        start = self._meet_controller(ports, unproven)
        member.status("was starting JAX")
        chunks = self._make_chunks(self._join(start), start)
        setup = TrainingSetup(
            job,
            chunks,
            self._me.cluster,
            has_trained=self._has_trained,
            skipped=[Skipped(*part) for part in start.skipped],
            session=member.session,
            noted_s=lambda: member.noted_s,
        )
        mb_per_s = job.config.checkpoint.scrub
        scrub = self._store.scrub(mb_per_s) if self._store else contextlib.nullcontext()
        with setup, self._giving_up(), scrub:
            member.status("was compiling")
            connect = functools.partial(self._connect_for_steps, chunks[0], ports)
            runner = setup.compile(connect, member.advance, self._waits_for, self._send_met)
            member.status("was reading the corpus")
            batches = self._result(setup.reading)
            splits = batches.data
            # XLA:CPU gives up on a collective whose other processes come half a minute later.
            member.send_compiled(batches.digests(), splits.place, splits.files, splits.left_out)
            member.status("waited for the other processes to compile")
            epoch = member.wait_for(Go).epoch
            saved = self._files.checkpoint(start, chunks)
            member.status("was reading the checkpoint")
            self._step = start.resume
            try:
                with self._advancing_with(arrays_reading.read_arrays):
                    setup.restore(runner, saved, member.advance)
            except DamagedError as error:
                if self._store is None or saved is None:
                    raise
                raise self._store.set_aside(error, saved) from None
            member.status("was about to train")
            loop = setup.loop(
                functools.partial(
                    TrainingLoop,
                    tell=_Reporter(member, self._take_losses, chunks[0].island),
                    is_stopping=lambda: self._stopping,
                    is_saving=functools.partial(self._decide, runner),
                    begins=self._begins,
                    profiles=job.run_dir / jobs.PROFILES / f"process_{self._me.number}",
                    vote=functools.partial(self._vote, runner),
                ),
                runner,
                self._writer(chunks, epoch),
            )
            member.send(Up())
            done = loop.run(start.resume, saved.sequences if saved else 0)
        is_whole = loop.is_over or done >= job.config.train.steps
        close = lambda: None if isinstance(runner, WholeStep) else runner.close()
        self._leave(done, close, is_over=loop.is_over)
        self._files.close()  # before Python ends: then no thread starts another one
        self._end_memory(memory, is_whole)
        return 0 if is_whole else REQUEUE

    def _writer(self, chunks: Sequence[Chunk], epoch: int) -> writing.Writer:
        return writing.Writer(
            self._job.run_dir,
            chunks,
            self._send_saved,
            self._send_unsaved,
            self._files.fence(epoch),
            self._files.begin_mirror(epoch),
            self._member.advance,
            reads_all=self._job.config.checkpoint.partner,
        )

    def _end_memory(self, memory: PartnerMemory | None, is_whole: bool) -> None:
        """Gives the memory back, unless the run was stopped before its end."""
        if memory and is_whole:
            memory.end()

    @contextlib.contextmanager
    def _advancing_with(self, done: WorkDone) -> Iterator[None]:
        """Reports progress as long as more is done, meanwhile."""
        is_over = threading.Event()

        def look() -> None:
            counted = done.count
            while not is_over.wait(ADVANCE_S):
                if done.count > counted:
                    counted = done.count
                    self._member.advance()

        thread = threading.Thread(target=look, name="advance", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _result(self, reading: "Future[Batches]") -> Batches:
        """Returns what is read, and reports progress as long as more of it is done."""
        with self._advancing_with(corpus_progress.done):
            return reading.result()

    def _listen(self) -> Ports:
        """Chooses NICs, and opens the ports at which others reach this process."""
        for warning in domain.choose_nics(
            self._job,
            self._domain,
            self._me,
            self._environment.addresses,
            self._env,
            self._find_host,
        ):
            print(f"warning: {warning}", flush=True)
        return Ports.open(
            self._environment.addresses,
            ports=(ports[0], ports[-1]) if (ports := self._config.ports) else None,
            advertised=self._environment.advertised,
        )

    def _meet_controller(self, ports: Ports, unproven: str | None) -> JobStart:
        """Says that this process is ready, and waits until all are."""
        member = self._member
        listens = {"data": ports.book, "coordinator": self._coordinator(ports.local)}
        member.send(Ready(addresses=listens, unproven=unproven))
        member.status("waited for the other processes to start")
        return member.wait_for(JobStart)

    def _leave(self, done: int, close: Callable[[], None], *, is_over: bool = False) -> None:
        """Ends this process with all others, after so many steps; `close` ends its transport."""
        member = self._member
        member.status("waited for the other processes to end")
        if self._tcp:  # a run that stops may leave a fragment on its way between islands
            self._tcp.finish()
        member.send(Done(step=done, is_over=is_over))
        member.wait_for(AllDone)
        close()
        if len(self._domain) > 1:
            jax.distributed.shutdown()
        member.close()

    def _coordinator(self, book: Book) -> tuple[str, int] | None:
        """Returns the address of the domain's coordinator, if it will run in this process."""
        if not self._me.leads or len(self._domain) == 1:
            return None
        fabric = domain_fabric(self._job.topology, self._domain)
        address, _ = nic(book, self._me, fabric, 0)
        self._held_port = domain.hold_coordinator_port(address, self._config, self._me.stage)
        return connections.address_of(self._held_port)

    def _join(self, start: JobStart) -> Mesh:
        """Joins the domain, and returns the mesh of its stage."""
        job, me = self._job, self._me
        kinds = domain.device_kinds(job, self._domain)
        platforms.use_devices(kinds, len(me.devices), rehearse=job.config.run.rehearse)
        key = self._environment.key
        coordinator = start.coordinator
        if coordinator is not None:
            fabric = domain_fabric(job.topology, self._domain)
            own = next(iter(self._environment.addresses.get(fabric, ())), None)
            coordinator = (addresses.as_seen_from(coordinator[0], own), coordinator[1])
        devices = domain.join(me, self._domain, coordinator, self._config, key)
        if self._held_port is not None:
            self._held_port.close()
        # The first process of a domain alone writes, so it alone can tell that it does not.
        program_cache.use(job.config.run.compilation_cache, self._env, self._say)
        return build_mesh(job.plan.stages[me.stage], devices)

    def _say(self, text: str) -> None:
        if self._me.leads:
            print(text, flush=True)

    def _make_chunks(self, mesh: Mesh, start: JobStart) -> list[Chunk]:
        """The chunks of the stage on its mesh."""
        chunks = make_chunks(self._job, {self._me.stage: mesh}, start.unproven)
        for line in (*attention_lines(chunks), *optimizer_lines(chunks)):
            self._say(line)
        return chunks

    def _connect_for_steps(self, chunk: Chunk, ports: Ports) -> TcpTransport:
        """Connects with the stages that steps, and meetings, send to and receive from."""
        job, is_whole = self._job, chunk.island is None
        found = crossings(chunk) if is_whole else crossings_of(job.plan, chunk, self._processes)
        self._tcp = self._connect(found, chunk.mesh, ports)
        self._member.status("was compiling")
        return self._tcp

    def _connect(self, all_crossings: Sequence[Crossing], mesh: Mesh, ports: Ports) -> TcpTransport:
        """Connects with all that this process shares arrays with."""
        self._member.status("was connecting to its neighbours")
        rendezvous = Rendezvous(
            me=self._me,
            processes=self._processes,
            topology=self._job.topology,
            ports=ports,
            look_up=lambda numbers: self._member.addresses(numbers, self._config.start_timeout_s),
            key=self._environment.key,
            about=self._about,
            min_streams=self._config.streams,
            timeout_s=self._config.start_timeout_s,
            encrypt=self._config.encrypt,
            calls_out=self._config.calls_out,
            relay=RelayPlace.of_setting(self._config.relay),
        )
        return TcpTransport(
            self._job.plan,
            all_crossings,
            mesh,
            rendezvous=rendezvous,
            timeouts=Timeouts(self._config.silence_s, self._config.pull_timeout_s),
            on_failure=self._give_up,
            advance=self._member.advance,
        )

    def _take_losses(self) -> dict[str, LinkLoss]:
        return self._tcp.take_losses() if self._tcp else {}

    def _begins(self, work: Activity, step: int) -> None:
        if work == "step":
            self._step = step
            self._waits_for("")
        else:
            doing = "validating" if work == "validation" else "saving a checkpoint"
            self._member.status(f"was {doing} after step {step}")
        self._member.begin(work, step)

    def _vote(self, runner: Runner) -> None:
        news = runner.news() if isinstance(runner, IslandApart) else News()
        self._member.vote(self._step, *news)

    def _decide(self, runner: Runner, step: int) -> bool:
        """Waits for the controller's verdict on a step; returns whether to save after it."""
        self._waits_for("the votes of all stages")
        verdict = self._member.verdict(step)
        self._waits_for("")
        self._stopping = verdict.stop
        if isinstance(runner, IslandApart):
            runner.agree(News(verdict.arrived, verdict.opened))
        return verdict.save

    def _waits_for(self, text: str) -> None:
        waiting = f"waited for {text} in" if text else "was busy in"
        self._member.status(f"{waiting} step {self._step}")

    def _send_met(self, step: int, digests: Digests) -> None:
        if self._me.leads:
            met = Met(step=step, weights=dict(digests.weights), owned=dict(digests.owned))
            self._member.send(met)

    def _send_saved(
        self, step: int, arrays: dict[str, dict[str, Any]], files: manifest.Files
    ) -> None:
        self._member.send(Saved(step=step, arrays=arrays, files=files))

    def _send_unsaved(self, step: int, reason: str) -> None:
        self._member.send(Unsaved(step=step, reason=reason))


def _described(error: BaseException) -> Failed:
    """Returns the report of an error that ends this process.

    Whether a foreign exception ends the job is not for this process to say: another one may be the
    cause. So its status asks for another start.
    """
    if not isinstance(error, HolmesError):
        problem = f"{type(error).__name__}: {error}"
        return Failed(
            exit_status=REQUEUE, where="", problem=problem, is_own=foreign_errors.is_own(error)
        )
    parts: dict[str, Any] = error.parts()
    return Failed(
        exit_status=error.exit_status,
        **parts,
        peer=error.peer if isinstance(error, PeerError) else None,
        damaged=isinstance(error, DamagedError),
        spike=error.step if isinstance(error, SpikeError) else None,
    )


class _Reporter:
    """Reports steps to the controller, on its clock; one process reports the tasks of a stage."""

    def __init__(
        self,
        member: Member,
        take_losses: Callable[[], dict[str, LinkLoss]] = lambda: {},
        island: int | None = None,
    ):
        self._member, self._take_losses, self._island = member, take_losses, island

    def __call__(self, report: ProcessStep) -> None:
        leads, offset_s = self._member.process.leads, self._member.clock.offset_s
        intervals = [
            interval._replace(start_s=interval.start_s + offset_s, end_s=interval.end_s + offset_s)
            for interval in (report["intervals"] if leads else ())
        ]
        measured = {**report, "intervals": intervals}
        if not leads:
            measured.pop("square_spread", None)
        if self._island is not None:
            measured["island"] = self._island
        if losses := self._take_losses():
            measured["link_losses"] = {link: loss.connections for link, loss in losses.items()}
            measured["link_lost_s"] = {link: loss.lost_s for link, loss in losses.items()}
        self._member.send(Measurements(measured=measured))
