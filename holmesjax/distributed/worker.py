"""One process of a job: its stage's domain, its transport, its steps.

It learns from the environment who it is and where the controller listens. Whatever goes wrong in
it, in any thread, is told to the controller and ends the process at once: a main thread that waits
in a collective could not end by itself.
"""

import contextlib
import functools
import signal
import threading
import traceback
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import jax

from holmesjax import job as jobs, lifeline
from holmesjax.checkpoints import checkpoint, manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.data.batches import look_for_data
from holmesjax.distributed.controller import Member
from holmesjax.distributed.messages import (
    AllDone,
    Done,
    Failed,
    Go,
    JobStart,
    Measurements,
    Ready,
    Record,
    Saved,
    Stop,
    Unsaved,
    Up,
)
from holmesjax.errors import DamagedError, HolmesError
from holmesjax.hosts import nics
from holmesjax.hosts.nics import Host
from holmesjax.hosts.process_environment import ProcessEnvironment, die_with
from holmesjax.job import Job
from holmesjax.parallel import compat
from holmesjax.parallel.mesh import build_mesh
from holmesjax.plan.processes import Process, domain_fabric, make_processes
from holmesjax.runtime import domain, program_cache
from holmesjax.runtime.pipeline import OneStage, Pipeline, crossings
from holmesjax.runtime.programs import compile_stages, compile_whole_step
from holmesjax.runtime.progress import Work
from holmesjax.runtime.stage import Stage
from holmesjax.runtime.timeline import Clock
from holmesjax.session import Session, make_stages, read_batches
from holmesjax.transport import connections
from holmesjax.transport.rendezvous import Book, Ports, nic
from holmesjax.transport.tcp import TcpTransport


def work(run_dir: str | Path, env: MutableMapping[str, str]) -> int:
    """Runs one process of the job in a run folder to its end; its exit status.

    Args:
      run_dir: the run folder.
      env: the environment of this process, which NCCL's variables are added to.

    Raises:
      HolmesError: for mistakes that are found before the controller is reached.
    """
    find_host = functools.cache(nics.discover)
    environment = ProcessEnvironment.read(env, find_host)
    die_with(env.get("HOLMES_PARENT"))
    connections.raise_open_files()
    job = jobs.load_saved(run_dir)
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    if not 0 <= environment.number < len(processes):
        where, problem = "the environment", f"the plan has {len(processes)} processes"
        fix = "start as many processes as the plan needs, numbered from 0"
        raise HolmesError(where, problem, found=f"number {environment.number}", fix=fix)
    return _Worker(job, environment, processes, env, find_host).run()


class _Worker:
    """A process and its ways to fail."""

    def __init__(
        self,
        job: Job,
        environment: ProcessEnvironment,
        processes: tuple[Process, ...],
        env: MutableMapping[str, str],
        find_host: Callable[[], Host],
    ):
        self._job, self._environment, self._processes = job, environment, processes
        self._env, self._find_host = env, find_host
        self._me = processes[environment.number]
        self._domain = tuple(p for p in processes if p.stage == self._me.stage)
        self._config = job.config.distributed
        self._failing = threading.Lock()
        self._about = job.about(environment.restart)
        self._member = Member(
            process=self._me,
            address=environment.controller[0],
            port=environment.controller[1],
            key=environment.key,
            about=self._about,
            timeout_s=self._config.silence_s,
            start_timeout_s=self._config.start_timeout_s,
            on_loss=self._give_up,
        )
        self._step, self._stopping = 0, False

    def run(self) -> int:
        # On another thread: the main one may compile, or be in the middle of telling something.
        lifeline.hear_signals(
            (signal.SIGINT, signal.SIGTERM), lambda number: self._send(Stop(signal=number))
        )
        try:
            self._run()
        except BaseException as error:
            self._give_up(error)
        return 0

    def _send(self, record: Record) -> None:
        with contextlib.suppress(OSError):  # the listening thread says why
            self._member.send(record)

    def _give_up(self, error: BaseException) -> NoReturn:
        """Ends this process with what went wrong, from any thread; the first call counts."""
        self._failing.acquire()  # never released
        failed = Failed(exit_status=1, where="", problem=f"{type(error).__name__}: {error}")
        last_words = [lambda: self._send(failed)]
        if isinstance(error, HolmesError):
            damaged = isinstance(error, DamagedError)
            failed = Failed(exit_status=error.exit_status, **error.parts(), damaged=damaged)
        else:
            last_words.insert(0, lambda: traceback.print_exception(error))
        lifeline.end_process(failed.exit_status, *last_words)

    # ---- the normal course ---------------------------------------------------------------------

    def _run(self) -> None:
        job, member = self._job, self._member
        look_for_data(job.config)  # before JAX starts: compiling may take minutes
        for warning in domain.choose_nics(
            job, self._domain, self._me, self._environment.addresses, self._env, self._find_host
        ):
            print(f"warning: {warning}", flush=True)
        ports = Ports.open(self._environment.addresses)
        addresses = {"data": ports.book, "coordinator": self._coordinator(ports.book)}
        member.send(Ready(addresses=addresses))
        member.status("waited for the other processes to start")
        start = member.wait_for(JobStart)
        member.status("was starting JAX")
        stages = self._join(start.coordinator)
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            reading = pool.submit(read_batches, job.config)
            member.status("was compiling")
            runner = self._make_runner(stages, ports)
            member.status("was reading the corpus")
            batches = reading.result()
            corpus = batches.corpus
            # XLA:CPU gives up on a collective whose other processes come half a minute later.
            member.send_compiled(batches.digests(), corpus.source, corpus.files)
            member.status("waited for the other processes to compile")
            member.wait_for(Go)
            member.status("was reading the checkpoint")
            saved = self._checkpoint(start.resume)
            states = (
                checkpoint.restore(saved, stages)
                if saved
                else runner.init(job.config.train.seed, member.advance)
            )
            session = Session(
                config=job.config,
                runner=runner,
                batches=batches,
                clock=stack.enter_context(Clock(len(job.plan.stages))),
                writer=stack.enter_context(
                    checkpoint.Writer(job.run_dir, stages, self._send_saved, self._send_unsaved)
                ),
                tell=_Reporter(member),
                is_stopping=lambda: self._stopping,
                is_saving=self._decide,
                begins=self._begins,
                vote=lambda: self._member.vote(self._step),
            )
            member.send(Up())
            done = session.run(states, start.resume, sequences=saved.sequences if saved else 0)
        member.status("waited for the other processes to end")
        member.send(Done(step=done))
        member.wait_for(AllDone)
        if isinstance(runner, Pipeline):
            runner.close()
        if len(self._domain) > 1:
            jax.distributed.shutdown()
        member.close()

    def _coordinator(self, book: Book) -> tuple[str, int] | None:
        """Where the domain's coordinator will listen, if that is here."""
        if not self._me.leads or len(self._domain) == 1:
            return None
        fabric = domain_fabric(self._job.topology, self._domain)
        address, _ = nic(book, self._me, fabric, 0)
        return address, domain.coordinator_port(address, self._config, self._me.stage)

    def _join(self, coordinator: tuple[str, int] | None) -> list[Stage]:
        """Its stage's chunks, on the devices of its domain."""
        job, me = self._job, self._me
        kinds = domain.device_kinds(job, self._domain)
        compat.use_devices(kinds, len(me.devices), rehearse=job.config.run.rehearse)
        devices = domain.join(me, self._domain, coordinator, self._config)
        # The first process of a domain alone writes, so it alone can tell that it does not.
        say = functools.partial(print, flush=True) if me.leads else lambda text: None
        program_cache.use(job.config.run.compilation_cache, self._env, say)
        return make_stages(job, {me.stage: build_mesh(job.plan.stages[me.stage], devices)})

    def _make_runner(self, stages: list[Stage], ports: Ports) -> Pipeline | OneStage:
        member = self._member
        if len(self._job.plan.stages) == 1:
            evaluates = self._job.config.train.eval_every > 0
            whole = compile_whole_step(stages[0], evaluates=evaluates, compiled=member.advance)
            return OneStage(whole)
        # First, while all are as far: some compile for longer than a neighbour would wait.
        member.status("was connecting to its neighbours")
        transport = TcpTransport(
            me=self._me,
            processes=self._processes,
            plan=self._job.plan,
            topology=self._job.topology,
            crossings=crossings(stages[0]),
            mesh=stages[0].mesh,
            ports=ports,
            look_up=lambda numbers: self._member.addresses(numbers, self._config.start_timeout_s),
            key=self._environment.key,
            about=self._about,
            streams=self._config.streams,
            heartbeat_timeout_s=self._config.silence_s,
            pull_timeout_s=self._config.pull_timeout_s,
            start_timeout_s=self._config.start_timeout_s,
            on_failure=self._give_up,
        )
        member.status("was compiling")
        programs = compile_stages(stages, member.advance)
        return Pipeline(self._job.plan, programs, transport, self._waits_for)

    def _begins(self, work: Work, step: int) -> None:
        if work == "step":
            self._step = step
            self._waits_for("")
        else:
            doing = "validating" if work == "validation" else "saving a checkpoint"
            self._member.status(f"was {doing} after step {step}")
        self._member.begin(work, step)

    def _decide(self, step: int) -> bool:
        """Whether to save after a step, and whether to stop, as the controller says it to all."""
        self._waits_for("the votes of all stages")
        verdict = self._member.verdict(step)
        self._waits_for("")
        self._stopping = verdict.stop
        return verdict.save

    def _waits_for(self, text: str) -> None:
        waiting = f"waited for {text} in" if text else "was busy in"
        self._member.status(f"{waiting} step {self._step}")

    def _checkpoint(self, step: int) -> Checkpoint | None:
        """The one after that step; None for step 0."""
        if not step:
            return None
        [found] = [found for found in manifest.find(self._job.run_dir) if found.step == step]
        return found

    def _send_saved(
        self, step: int, arrays: dict[str, dict[str, Any]], files: manifest.Files
    ) -> None:
        self._member.send(Saved(step=step, arrays=arrays, files=files))

    def _send_unsaved(self, step: int, reason: str) -> None:
        self._member.send(Unsaved(step=step, reason=reason))


class _Reporter:
    """Reports steps to the controller, on its clock; one process reports the tasks of a stage."""

    def __init__(self, member: Member):
        self._member = member

    def __call__(self, part: dict[str, Any]) -> None:
        leads, offset_s = self._member.process.leads, self._member.clock.offset_s
        intervals = [
            interval._replace(start_s=interval.start_s + offset_s, end_s=interval.end_s + offset_s)
            for interval in (part["intervals"] if leads else ())
        ]
        self._member.send(Measurements(part={**part, "intervals": intervals}))
