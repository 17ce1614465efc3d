"""A process of a job that only talks: python -m tests.scripted_member RUN_DIR '[["sleep", 1]]'

It joins the controller as a worker does, needs no JAX, and then does what its script says:

    tell KIND {...}     says this to the controller
    status TEXT         tells it with whatever comes next
    begin WORK STEP     begins a step, a batch of validation or a checkpoint
    advance N           has compiled N programs, one each half of a second
    late SECONDS        from now on says nothing for so long when it is asked how it is
    save STEP           writes its stage's part of a checkpoint
    await STEP          until that checkpoint is whole
    train               steps, each with its vote, until all are to stop; then it saves and ends
    sleep SECONDS
    done STEP           has trained so far, and ends when all have
    exit STATUS         or signals itself, with -STATUS
"""

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest
from holmesjax.distributed.member import Member
from holmesjax.distributed.messages import FROM_MEMBER, AllDone, Done, Saved
from holmesjax.hosts.process_environment import ProcessEnvironment, die_with
from holmesjax.plan.processes import make_processes
from launch.launchers.launcher import Children, variables_here


class ScriptedLauncher:
    """A launcher of such processes. `scripts`: for each start of the job, process -> script."""

    address = "127.0.0.1"
    port = 0
    sees_exits = True
    files_each = 1

    def __init__(self, *scripts):
        self._scripts = scripts
        self.starts = 0
        self._children = Children()

    def start(self, start, events):
        process = start.process
        self.starts += process.number == 0
        script = self._scripts[min(self.starts, len(self._scripts)) - 1].get(process.number, [])
        argv = [sys.executable, "-m", "tests.scripted_member", start.command[1], json.dumps(script)]
        own = {**os.environ, **start.env, **variables_here({"ethernet": ["127.0.0.1"]})}
        self._children.start(process.number, argv, own, events)

    def end(self):
        self._children.end()


def main(run_dir, script):
    die_with(os.environ.get("HOLMES_PARENT"))
    environment = ProcessEnvironment.read(os.environ, lambda: None)
    job = jobs.load_saved(run_dir)
    config = job.config.distributed
    processes = make_processes(job.plan, job.topology, config.processes)
    member = Member(
        process=processes[environment.number],
        address=environment.controller[0],
        port=environment.controller[1],
        key=environment.key,
        about=job.about(environment.restart),
        timeout_s=config.silence_s,
        start_timeout_s=config.start_timeout_s,
        on_loss=lambda error: os._exit(75),
    )
    send = member.send
    here = f"here-{environment.restart}"
    (Path(run_dir) / f"{here}-{environment.number}").touch()

    def act(what, *arguments):
        if what == "tell":
            send(FROM_MEMBER[arguments[0]](**dict(*arguments[1:])))
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
        elif what == "train":
            # A verdict goes to those who are connected.
            while len(list(Path(run_dir).glob(f"{here}-*"))) < len(processes):
                time.sleep(0.01)
            for step in itertools.count(1):
                member.begin("step", step)
                member.vote(step)
                if member.verdict(step).stop:
                    break
                time.sleep(0.01)
            if member.process.leads:
                act("save", step)
            act("done", step)
        elif what == "sleep":
            time.sleep(arguments[0])
        elif what == "done":
            send(Done(step=arguments[0]))
            member.wait_for(AllDone, 60.0)
            os._exit(0)
        elif arguments[0] < 0:
            os.kill(os.getpid(), -arguments[0])
        else:
            os._exit(arguments[0])

    for line in script:
        act(*line)
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
