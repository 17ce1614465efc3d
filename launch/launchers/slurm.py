"""Runs a job under Slurm: a heterogeneous job, with one component for each cluster.

Outside of an allocation the launcher writes the file for `sbatch`. The file starts this launcher
again, on the first node. There it starts the processes with `srun`, one step for each component.
SLURM_PROCID is the place of a process in its component.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from holmesjax import job_description
from holmesjax.distributed.messages import Exit, Output, ProcessEvent
from holmesjax.errors import REQUEUE, ConfigError, HolmesError
from holmesjax.files import places
from holmesjax.files.whole_files import write_whole
from holmesjax.job import Job
from holmesjax.transport.records import Record
from launch import programs
from launch.launchers import slurm_options
from launch.launchers.components import Component, make_components
from launch.launchers.launcher import (
    Children,
    EventSink,
    ProcessStart,
    own_address,
    parse_listen,
)
from launch.launchers.slurm_options import SlurmCluster, SlurmOptions
from launch.launchers.table import LauncherOptions
from launch.launchers.written_jobs import saved_for_later

SCRIPT, OPTIONS = "job.sbatch", "slurm.yaml"
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
END_S = 10.0  # for srun to see that its tasks are gone
# srun takes these as options. In the batch script they are those of the first component; each has
# its own with _HET_GROUP_ and its place behind the name.
OF_COMPONENT = {
    *("SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_NODE"),
    *("SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GRES", "SLURM_MEM_PER_CPU"),
    *("SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"),
}


# ---- the file for sbatch -------------------------------------------------------------------------


def write(
    job: Job,
    options_file: str | None,
    *,
    listen: str | None,
    max_restarts: int | None,
    submit: bool,
    allow: Sequence[str] = (),
) -> int:
    """Writes the batch file into the run folder, then submits it or prints how to.

    Returns the exit status of the verb: 0.

    Args:
      job: the run and its folder.
      options_file: YAML file with options of Slurm; None: no options.
      listen: `HOST[:PORT]` on which the controller listens; None: Slurm decides.
      max_restarts: restarts without a new step; None: the default.
      submit: whether `sbatch` is called.
      allow: changes since the checkpoint that are permitted, as in `resume.find`. They are kept in
        the run folder, since the file starts more than once.

    Raises:
      Mistakes: the options file is wrong.
      ConfigError: it does not say where the nodes find what is here.
      HolmesError: sbatch is missing or refuses the file, or an error of `resume.find`.
    """
    if places.is_url(job.config.run.dir):
        fix = "name a folder of the first node as run.dir, and this URL as run_dir of each cluster"
        problem = "is a URL, and the launcher in the allocation works in a folder"
        raise ConfigError("run.dir", problem, found=job.config.run.dir, fix=fix)
    options = slurm_options.read(options_file, job.topology)
    slurm_options.refuse_places_of_here(options, options_file)
    if listen:
        parse_listen(listen)
    print(*job_description.describe(job, job.pool(os.environ)), sep="\n", flush=True)
    path = job.run_dir.absolute() / SCRIPT
    with saved_for_later(job, allow):
        if options_file is not None:  # the job reads it, too
            write_whole(path.with_name(OPTIONS), Path(options_file).read_text("utf-8"))
        text = script(
            job,
            options,
            listen=listen,
            max_restarts=max_restarts,
            has_file=options_file is not None,
        )
        path.write_text(text, "utf-8")
    print(f"written     {path}", flush=True)
    if not submit:
        there = options.on_nodes(path)
        if there != str(path):
            folders = (f"{path.parent}/", f"HOST:{PurePosixPath(there).parent}/")
            print(f"copy it:    rsync -a {shlex.join(folders)}")
        print(f"submit it:  sbatch {shlex.quote(there)}")
        return 0
    fix = f"submit it where Slurm is: sbatch {shlex.quote(str(path))}"
    done = programs.ask(["sbatch", str(path)], fix=fix)
    if done.returncode:
        fix = "correct the options file, or submit it on a machine of the Slurm cluster"
        found = "; ".join(done.stderr.strip().splitlines()) or programs.said(done)
        raise HolmesError(str(path), "sbatch refuses it", found=found, fix=fix)
    print(done.stdout.strip())
    return 0


def script(
    job: Job,
    options: SlurmOptions,
    *,
    listen: str | None,
    max_restarts: int | None,
    has_file: bool = False,
) -> str:
    """Returns the text of the file for sbatch, with the places that the nodes know.

    Args:
      job: the run and its folder.
      options: of Slurm.
      listen: as in `write`.
      max_restarts: as in `write`.
      has_file: whether the run folder has the options file, for the job to read.
    """
    run_dir = options.on_nodes(job.run_dir.absolute())
    python = options.python or options.on_nodes(Path(sys.executable))
    command = [python, "-m", "launch", "train", run_dir, "--launcher", "slurm"]
    command += ["--options", f"{run_dir}/{OPTIONS}"] if has_file else []
    command += ["--max-restarts", str(max_restarts)] if max_restarts is not None else []
    command += ["--listen", listen] if listen else []
    components = make_components(job)
    output = f"{run_dir.replace('%', '%%')}/slurm-%j.out"
    lines = [
        "#!/bin/bash",
        f"# Starts or resumes {job.run_dir.absolute().name}; made for plan {job.plan.hash()}.",
        _directive(f"--output={output}"),
        _directive("--open-mode=append"),
        _directive(f"--chdir={options.on_nodes(Path.cwd())}"),
        _directive("--requeue"),
        _directive(f"--signal=B:TERM@{options.stop_before_s}"),
    ]
    for i, component in enumerate(components):
        lines += ["#SBATCH hetjob"] if i else []
        lines += [f"# {component.name}", *map(_directive, _request(job, component, options))]
    body = BODY.format(command=shlex.join(command), requeue=REQUEUE)
    return "\n".join([*lines, "", HEAD.format(requeue=REQUEUE), *options.setup, body])


# The batch shell takes the signals, from before its command begins: one that found no trap would
# end the shell and leave the command behind. It is asked again to wait when one came. Slurm ends
# the shell when it puts the job back into the queue.
# A command that a signal ended before it could catch it has status 143.
HEAD = """\
requeue() {{
    echo "status {requeue}: back into the queue"
    scontrol requeue "$SLURM_JOB_ID" || echo "not put back: submit the file again, and it goes on"
    exit {requeue}
}}
trap requeue TERM"""
BODY = """\
trap 'signalled=yes; [ "$!" ] || requeue; kill -TERM $!' TERM
{command} &
while
    signalled=
    wait $!
    status=$?
    [ -n "$signalled" ]
do :; done
[ $status = {requeue} ] || [ $status = 143 ] && requeue
exit $status
"""


def _request(job: Job, component: Component, options: SlurmOptions) -> Iterator[str]:
    """Yields the options of a component."""
    yield f"--job-name={job.run_dir.name}"
    yield f"--nodes={component.num_nodes}"
    yield f"--ntasks-per-node={component.per_node}"
    yield "--exclusive"  # all cores of a node; what the user adds comes later, and counts
    if component.num_gpus:
        yield f"--gpus-per-node={component.num_gpus * component.per_node}"
    if options.time:
        yield f"--time={options.time}"
    yield from options.sbatch
    for cluster in options.clusters:
        if cluster.name == component.cluster:
            yield from cluster.sbatch


def _directive(option: str) -> str:
    """Returns a line for sbatch, which reads quotes as a shell does."""
    return f"#SBATCH {shlex.quote(option)}"


# ---- inside of an allocation ---------------------------------------------------------------------


def is_inside(env: Mapping[str, str]) -> bool:
    """Whether this process runs in an allocation of Slurm."""
    return "SLURM_JOB_ID" in env


class SlurmLauncher:
    """The launcher `slurm` inside of an allocation.

    Raises ConfigError if the allocation is not what the plan needs.
    """

    sees_exits = True
    is_here = False
    files_each = 0

    def __init__(self, job: Job, env: Mapping[str, str], listen: str | None, options: SlurmOptions):
        self._env = env
        self._options = options
        self._components = make_components(job)
        self._waiting: dict[str, set[int]] = {}  # component -> processes that are to start
        self._children = Children()
        hosts = self._hosts()
        self.address, self.port = parse_listen(listen) if listen else (own_address(hosts), 0)

    def _hosts(self) -> dict[str, str]:
        """Returns the host of each node of the topology, in the order of the allocation."""
        found: dict[str, str] = {}
        for g, component in enumerate(self._components):
            group = f"_HET_GROUP_{g}" if len(self._components) > 1 else ""
            nodes = list(dict.fromkeys(process.node for process in component.processes))
            names = self._host_names(self._env.get(f"SLURM_JOB_NODELIST{group}", ""))
            if len(names) != len(nodes):
                raise ConfigError(
                    f"SLURM_JOB_NODELIST{group}",
                    f"the plan needs {len(nodes)} nodes for {component.name}",
                    found=f"{len(names)} in job {self._env['SLURM_JOB_ID']}",
                    fix="outside of an allocation --launcher slurm writes a file for the right one",
                )
            found |= zip(nodes, names, strict=True)
        return found

    def _host_names(self, hostlist: str) -> list[str]:
        if not hostlist:
            return []
        fix = "start it where the commands of Slurm work: scontrol show hostnames has to name hosts"
        done = programs.ask(["scontrol", "show", "hostnames", hostlist], fix=fix)
        if done.returncode:
            problem = f"does not name the hosts of {hostlist}"
            raise HolmesError("scontrol", problem, found=programs.said(done), fix=fix)
        names = done.stdout.split("\n")[:-1]
        if wrong := next((name for name in names if not HOST.fullmatch(name)), None):
            problem = f"names what is no host, for {hostlist}"
            raise HolmesError("scontrol", problem, found=repr(wrong), fix=fix)
        return names

    def start(self, start: ProcessStart, events: EventSink) -> None:
        """Starts the step of the process's component once all of its processes are to start."""
        process = start.process
        [component] = [c for c in self._components if process.number in c.process_numbers]
        waiting = self._waiting.setdefault(component.name, set())
        waiting.add(process.number)
        if len(waiting) < len(component.processes):
            return
        del self._waiting[component.name]
        more = {"HOLMES_PROCESSES": component.numbers, "PYTHONUNBUFFERED": "1"}
        own = {**self._variables(component), **start.env, **more}
        del own["HOLMES_PROCESS"]
        python = self._options.worker_python or sys.executable
        command = start.command_in(next((c.run_dir for c in self._own(component)), None))
        argv = [*self._srun(component), python, "-m", "launch", *command]
        self._children.start(process.number, argv, own, _Tasks(component, events))

    def _variables(self, component: Component) -> dict[str, str]:
        """Returns the variables of this process, without options of another component."""
        if len(self._components) == 1:
            return dict(self._env)
        group = f"_HET_GROUP_{self._components.index(component)}"
        own = {name: text for name, text in self._env.items() if name not in OF_COMPONENT}
        return own | {
            name: self._env[name + group] for name in OF_COMPONENT if name + group in self._env
        }

    def _srun(self, component: Component) -> list[str]:
        group = self._components.index(component)
        per_node = component.num_gpus * component.per_node
        return [
            "srun",
            *([f"--het-group={group}"] if len(self._components) > 1 else []),
            f"--nodes={component.num_nodes}",
            f"--ntasks={len(component.processes)}",
            f"--ntasks-per-node={component.per_node}",
            "--distribution=block",  # node by node, as HOLMES_PROCESSES is
            # Each of several tasks sees all, for NCCL to have NVLink, and its worker takes its own.
            *([f"--gpus-per-node={per_node}"] if per_node else []),
            "--export=ALL",
            "--mpi=none",
            "--input=none",
            "--label",
            "--kill-on-bad-exit=0",  # the supervisor ends them, when it has heard why
            *self._options.srun,
            *(option for c in self._own(component) for option in c.srun),
        ]

    def _own(self, component: Component) -> list[SlurmCluster]:
        """The options of a component's cluster."""
        return [c for c in self._options.clusters if c.name == component.cluster]

    def end(self) -> None:
        # On SIGQUIT srun kills its tasks at once.
        self._children.end(ask=signal.SIGQUIT, patience_s=END_S)
        self._waiting.clear()


def for_job(job: Job, options: LauncherOptions) -> SlurmLauncher | int:
    """Returns the launcher inside of an allocation; else it writes the file, and returns 0."""
    if is_inside(os.environ):
        own = slurm_options.read(options.options, job.topology)
        return SlurmLauncher(job, os.environ, options.listen, own)
    return write(
        job,
        options.options,
        listen=options.listen,
        max_restarts=options.max_restarts,
        submit=options.submit,
        allow=options.allow,
    )


LABELLED = re.compile(r" *(\d+): (.*)")
ENDED = re.compile(r"srun: error: [^ ]+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.*))")
SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


class _Tasks:
    """Translates the events of an srun into events of the component's processes."""

    def __init__(self, component: Component, events: EventSink):
        self._numbers = [process.number for process in component.processes]
        self._events = events
        self._failed: set[int] = set()  # places in the component

    def put(self, event: ProcessEvent) -> None:
        record = event.record
        if isinstance(record, Exit):
            # Unless it said of a task how that one failed, srun itself failed, or none did.
            status = 0 if self._failed else record.status
            for position in set(range(len(self._numbers))) - self._failed:
                self._put(position, Exit(status=status))
            return
        assert isinstance(record, Output), f"what is {event}?"
        line = record.line
        found = LABELLED.fullmatch(line)
        if found and int(found[1]) < len(self._numbers):
            self._put(int(found[1]), Output(line=found[2]))
            return
        self._put(0, Output(line=line))
        if found := ENDED.fullmatch(line):
            name = found[3] and found[3].removesuffix(" (core dumped)")
            status = -SIGNALS.get(name, signal.SIGKILL) if name else int(found[2])
            for position in _places(found[1]):
                self._failed.add(position)
                self._put(position, Exit(status=status))

    def _put(self, position: int, record: Record) -> None:
        self._events.put(ProcessEvent(self._numbers[position], record))


def _places(text: str) -> list[int]:
    """Returns the places of tasks in a list of srun.

    >>> _places("0,2-4")
    [0, 2, 3, 4]
    """
    ranges = [part.partition("-") for part in text.split(",")]
    return [i for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]
