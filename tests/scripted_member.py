"""Processes of a job that only talk, each with a script such as [["sleep", 1]].

A process joins the controller as a worker does, needs no JAX, and then does what its script says:

    tell KIND {...}     says this to the controller
    status TEXT         tells it with whatever comes next
    begin WORK STEP     begins a step, a batch of validation or a checkpoint
    advance N           has compiled N programs, one each half of a second
    late SECONDS        from now on says nothing for so long when it is asked how it is
    save STEP           writes its stage's part of a checkpoint
    await STEP          until that checkpoint is whole
    steps FIRST LAST    reports these steps, a hundredth of a second each
    vote STEP           votes on a step for its stage, once all are there
    verdict STEP        waits for what all are to do after it
    train               steps, each with its vote, until all are to stop; then it saves and ends
    hang up             closes its connection, as the kernel does for one that dies
    print LINE
    sleep SECONDS
    done STEP [STATUS]  has trained so far, and ends when all have
    exit STATUS         or signals itself, with -STATUS

A process that has imported this module once forks them all: imports would take nearly all of their
time.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest
from holmesjax.distributed.member import Member
from holmesjax.distributed.messages import (
    FROM_MEMBER,
    AllDone,
    Done,
    Exit,
    Measurements,
    Output,
    ProcessEvent,
    Saved,
)
from holmesjax.errors import REQUEUE
from holmesjax.hosts.process_environment import ProcessEnvironment, die_with
from holmesjax.plan.processes import make_processes
from launch.launchers.launcher import variables_here
from tests.jobs import HANG_S

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
STEP = {
    **{"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": False, "link_bytes": {}},
    **{"step_time_s": 0.01, "input_wait_s": 0.0, "intervals": [(0, "F", 0, 0.0, 0.01)]},
}


@functools.cache
def begin_to_fork():
    """Has the process that forks import everything: that takes seconds, which are of no job."""
    child = FORKS.Process(target=os.getpid)
    child.start()
    child.join()


class ScriptedLauncher:
    """A launcher of such processes. `scripts`: for each start of the job, process -> script."""

    address = "127.0.0.1"
    port = 0
    sees_exits = True
    is_here = True
    files_each = 1

    def __init__(self, *scripts):
        begin_to_fork()
        self._scripts = scripts
        self.starts = 0
        self._children = []

    def start(self, start, events):
        number = start.process.number
        self.starts += number == 0
        script = self._scripts[min(self.starts, len(self._scripts)) - 1].get(number, [])
        env = {**start.env, **variables_here({"ethernet": ["127.0.0.1"]})}
        here, there = socket.socketpair()
        with there:
            child = FORKS.Process(target=main, args=(start.command[1], script, env, there))
            child.start()
        reader = threading.Thread(target=_read, args=(child, here, number, events), daemon=True)
        reader.start()
        self._children.append((child, reader))

    def end(self):
        for child, reader in self._children:
            if reader.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        for _, reader in self._children:
            reader.join(60)


def _read(child, sock, number, events):
    with sock, sock.makefile(errors="replace") as output:
        for line in output:
            events.put(ProcessEvent(number, Output(line=line.rstrip("\n"))))
    child.join()
    events.put(ProcessEvent(number, Exit(status=child.exitcode)))


def _join(run_dir, environment):
    """The member that this process is, and all processes."""
    job = jobs.load_saved(run_dir)
    config = job.config.distributed
    processes = make_processes(job.plan, job.topology, config.processes)
    member = Member(
        process=processes[environment.number],
        address=environment.controller[0],
        port=environment.controller[1],
        key=environment.key,
        about=job.about(environment.restart),
        computing={},
        timeout_s=config.silence_s,
        start_timeout_s=config.start_timeout_s,
        on_loss=lambda error: os._exit(75),
    )
    return member, processes


def _train(member):
    """Steps until all are to stop; returns the last."""
    for step in itertools.count(1):
        member.begin("step", step)
        member.vote(step)
        if member.verdict(step).stop:
            return step
        time.sleep(0.01)


def main(run_dir, script, env, output):
    """Runs in a process of its own, whose output goes to a socket."""
    die_with(str(os.getppid()))
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    output.close()
    environment = ProcessEnvironment.read(env, lambda: None)
    member, processes = _join(run_dir, environment)
    send = member.send
    here = f"here-{environment.restart}"
    (Path(run_dir) / f"{here}-{environment.number}").touch()

    def wait_for_all():
        """A verdict goes to those who are connected."""
        while len(list(Path(run_dir).glob(f"{here}-*"))) < len(processes):
            time.sleep(0.01)

    def act(what, *arguments):
        if what == "tell":
            send(FROM_MEMBER[arguments[0]](**dict(*arguments[1:])))
        elif what == "print":
            print(*arguments, flush=True)
        elif what in ("status", "begin"):
            getattr(member, what)(*arguments)
        elif what == "advance":
            for _ in range(arguments[0]):
                member.advance()
                time.sleep(0.5)
        elif what == "late":
            member.send = lambda record: (time.sleep(arguments[0]), send(record))
        elif what == "save":
            path = manifest.begin(run_dir, arguments[0]) / manifest.part_name(member.process.stage)
            path.mkdir()
            send(Saved(step=arguments[0], arrays={}, files={}))
        elif what == "await":
            while not (manifest.folder_of(run_dir, arguments[0]) / manifest.MANIFEST).exists():
                time.sleep(0.01)
        elif what == "steps":
            for step in range(arguments[0], arguments[1] + 1):
                send(Measurements(measured={"step": step, **STEP}))
                time.sleep(0.01)
        elif what == "vote":
            wait_for_all()
            member.vote(*arguments)
        elif what == "verdict":
            member.verdict(*arguments)
        elif what == "train":
            wait_for_all()
            step = _train(member)
            if member.process.leads:
                act("save", step)
            act("done", step, REQUEUE)
        elif what == "hang up":
            member._closed.set()
            member._link.close()
        elif what == "sleep":
            time.sleep(arguments[0])
        elif what == "done":
            send(Done(step=arguments[0]))
            member.wait_for(AllDone, HANG_S)
            os._exit(*arguments[1:] or (0,))
        elif arguments[0] < 0:
            os.kill(os.getpid(), -arguments[0])
        else:
            os._exit(arguments[0])

    for line in script:
        act(*line)
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(HANG_S)
