"""The cause of several failures, and who holds up a job: decisions without processes."""

import itertools
import queue
import signal
from types import SimpleNamespace

import jax
import pytest

from holmesjax.distributed.controller import NOBODY
from holmesjax.distributed.foreign_errors import is_own
from holmesjax.distributed.messages import Exit, Failed, Lost, Output, ProcessEvent, Silent
from holmesjax.errors import PeerError
from holmesjax.plan.processes import Process
from launch.failure_causes import cause_of
from launch.failure_messages import error_of
from launch.holdups import Standstill, behind, missed_by
from launch.launchers import slurm, ssh


def process(number, stage, rank):
    name = f"{'ab'[stage]}-{rank}"
    own = {"name": f"{'ab'[stage]}/{name}", "cluster": "ab"[stage], "node": name}
    return Process(number=number, stage=stage, rank=rank, devices=(), local_devices=(), **own)


# Processes 0, 1 and 2 are stage 0, and 0 coordinates them; 3 is stage 1 by itself.
PROCESSES = (process(0, 0, 0), process(1, 0, 1), process(2, 0, 2), process(3, 1, 0))
WORDS = {"where": "stage 0", "problem": "has 7 devices", "found": "7", "fix": "add one"}


def loss(peer=None):
    return Failed(**WORDS, exit_status=75, peer=peer)


def foreign(*, is_own):
    return Failed(exit_status=75, where="", problem="JaxRuntimeError: Gloo", is_own=is_own)


COLLECTIVE = foreign(is_own=False)
FAILURES = {
    "mistake": Failed(**WORDS, exit_status=2),
    "fatal": Failed(**WORDS, exit_status=1),
    "spike": Failed(**WORDS, exit_status=75, spike=3),
    "exit 2": Exit(status=2),
    "killed": Exit(status=-signal.SIGKILL),
    "own bug": foreign(is_own=True),
    "silent": Silent(silent_s=40.0),
    "exit 3": Exit(status=3),
    "lost": Lost(),
    "launcher's loss": loss(),  # ssh has lost its connection
    "aborted": Exit(status=-signal.SIGABRT),
    "collective": COLLECTIVE,
    "loss": loss(peer=3),
    "exit 75": Exit(status=75),
}


@pytest.mark.parametrize(
    "cause, others",
    [
        ("mistake", ["exit 2", "aborted", "lost", "loss", "collective", "silent", "killed"]),
        ("fatal", ["killed", "silent", "loss"]),  # a scheduler kills what is left
        ("spike", ["killed", "loss", "collective", "aborted", "lost"]),
        ("exit 2", ["loss", "lost", "silent"]),
        ("killed", ["loss", "own bug", "collective", "silent", "aborted", "lost"]),
        ("own bug", ["loss", "collective", "lost", "aborted", "exit 75"]),
        ("silent", ["loss", "collective", "aborted", "lost"]),
        ("lost", ["aborted", "loss", "collective", "exit 75"]),
        ("exit 3", ["aborted", "loss", "collective"]),
        ("launcher's loss", ["loss", "collective", "exit 75"]),
        ("aborted", ["loss", "collective"]),
        ("collective", ["exit 75"]),
        ("loss", ["exit 75"]),
    ],
)
def test_the_cause_is_found_in_whatever_order_failures_come(cause, others):
    for other in others:
        for names in ([cause, other], [other, cause]):
            events = [ProcessEvent(number, FAILURES[name]) for number, name in enumerate(names)]
            assert cause_of(events, PROCESSES).process == names.index(cause), names


def test_no_process_is_blamed_where_all_have_lost_the_launcher_alone():
    ends = [FAILURES["exit 75"], FAILURES["lost"], FAILURES["exit 75"], FAILURES["lost"]]
    events = [ProcessEvent(number, end) for number, end in enumerate(ends)]
    assert cause_of(events, PROCESSES).process == NOBODY
    for known in ("killed", "loss", "collective", "silent", "mistake"):
        others = [*events[:3], ProcessEvent(3, FAILURES[known])]
        assert cause_of(others, PROCESSES).process != NOBODY, known
    assert cause_of(events[:3], PROCESSES).process != NOBODY  # one still goes on
    alone = [ProcessEvent(0, FAILURES["lost"])]
    assert cause_of(alone, PROCESSES[:1]).process == 0  # the only one


LAUNCHERS = ("local", "ssh", "slurm", "external")
SIGNALS = sorted(
    {"HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "SEGV", "PIPE", "TERM"}
)


def death(launcher: str, victim: int, number: int) -> list[ProcessEvent]:
    """The events of the death of a process by a signal."""
    heard: queue.Queue[ProcessEvent] = queue.Queue()
    if launcher == "local":
        heard.put(ProcessEvent(victim, Exit(status=-number)))
    elif launcher == "ssh":
        ears = ssh._Ears(SimpleNamespace(destination="host"), heard)
        ears.put(ProcessEvent(victim, Exit(status=128 + number)))
    elif launcher == "slurm":
        own = [known for known in PROCESSES if known.stage == PROCESSES[victim].stage]
        tasks = slurm._Tasks(SimpleNamespace(processes=own), heard)
        task = own.index(PROCESSES[victim])
        told = f"srun: error: n1: task {task}: {signal.strsignal(number)}"
        tasks.put(ProcessEvent(own[0].number, Output(line=told)))
    lost = [ProcessEvent(victim, Lost())]
    return lost + [event for event in heard.queue if isinstance(event.record, Exit)]


@pytest.mark.parametrize(
    "lines, problem, status",
    [
        (["kex_exchange_identification: Connection closed by remote host"], "ended the", 75),
        (
            ["me@gateway: Permission denied (publickey).", "kex_exchange_identification: read: x"],
            "does not let this user in",
            2,
        ),
        (["Read from remote host a: Connection reset by peer"], "connection broke", 75),
    ],
)
def test_a_gateway_that_takes_no_more_connections_is_named(lines, problem, status):
    """Its sshd drops some that begin together; what ssh said before that counts more."""
    heard: queue.Queue[ProcessEvent] = queue.Queue()
    ears = ssh._Ears(SimpleNamespace(destination="host"), heard)
    for line in [*lines, "Connection closed by UNKNOWN port 65535"]:
        ears.put(ProcessEvent(0, Output(line=line)))
    ears.put(ProcessEvent(0, Exit(status=255)))
    failed = heard.queue[-1].record
    assert problem in failed.problem
    assert failed.exit_status == status
    assert ("MaxStartups" in failed.fix) == (problem == "ended the")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_death_is_the_cause_of_what_the_others_report(launcher):
    """By every signal, of every process, whoever is heard first; and the job may start again."""
    for name, victim in itertools.product(SIGNALS, range(4)):
        number = signal.Signals[f"SIG{name}"]
        died = death(launcher, victim, number)
        others = [known for known in PROCESSES if known.number != victim]
        echoes = [
            ProcessEvent(
                known.number,
                COLLECTIVE if known.stage == PROCESSES[victim].stage else loss(peer=victim),
            )
            for known in others
        ]
        if victim == 0:  # JAX aborts the others of the stage
            aborted = [ProcessEvent(1, Lost())]
            aborted += [] if launcher == "external" else [ProcessEvent(1, Exit(status=-6))]
            echoes[0:1] = aborted
        for events in (died + echoes, echoes + died):
            cause = cause_of(events, PROCESSES)
            assert cause.process == victim, (name, events)
            words = {"last": "was busy", "others": "waited", "fix": "again", "fix_alone": "see"}
            error = error_of(cause.record, PROCESSES[victim].full_name, **words)
            assert isinstance(error, PeerError)
            told = "has closed its connection without a word" if launcher == "external" else name
            assert told in error.problem


@pytest.mark.parametrize(
    "failures, cause",
    [
        # Two live processes lose each other: the others of one fail with it.
        ([(1, loss(3)), (3, loss(1)), (0, COLLECTIVE), (2, COLLECTIVE)], 1),
        ([(0, COLLECTIVE), (2, COLLECTIVE), (3, loss(1)), (1, loss(3))], 3),
        # One leaves with what its device raises: it is missed by its stage, and by the next.
        ([(3, loss(0)), (0, COLLECTIVE), (1, COLLECTIVE)], 0),
        ([(3, COLLECTIVE), (0, loss(3)), (1, COLLECTIVE), (2, COLLECTIVE)], 3),
        ([(0, loss(3)), (1, COLLECTIVE), (3, COLLECTIVE)], 3),
        # A connection inside of the stage is reset.
        ([(1, COLLECTIVE), (0, COLLECTIVE), (3, loss(0))], 1),
        # The link of one that is alive, and of one that reports nothing.
        ([(3, loss(0))], 3),
        ([(1, COLLECTIVE), (0, loss(3))], 0),
        # The report of a process counts, and not how it ends then.
        ([(1, COLLECTIVE), (1, Lost()), (1, Exit(status=75)), (0, COLLECTIVE)], 1),
        ([(0, COLLECTIVE), (1, Lost()), (1, COLLECTIVE)], 0),
        ([(1, Lost()), (1, Exit(status=75)), (0, COLLECTIVE)], 0),
        # A shell around the process tells its signal.
        ([(0, COLLECTIVE), (1, Exit(status=128 + signal.SIGKILL))], 1),
        ([(2, Exit(status=-6)), (0, Exit(status=-6))], 0),
        ([(2, loss(3)), (1, loss(3)), (0, loss(3))], 2),
    ],
)
def test_where_losses_began(failures, cause):
    events = [ProcessEvent(number, record) for number, record in failures]
    assert cause_of(events, PROCESSES).process == cause


def raised(error: Exception, behind: Exception) -> Exception:
    """An exception that was raised in the handling of another."""
    try:
        try:
            raise behind
        except Exception:
            raise error  # noqa: B904
    except Exception as found:
        return found


def test_what_python_raises_by_itself_is_a_processs_own():
    assert is_own(AssertionError("a shape"))
    assert is_own(raised(ValueError("b"), KeyError("a")))
    assert not is_own(jax.errors.JaxRuntimeError("INTERNAL: NCCL operation failed"))
    assert not is_own(jax.errors.JaxRuntimeError("a runtime that gives no status"))
    assert not is_own(raised(ValueError("no array"), OSError(5, "Input/output error")))


BUSY, WAITED = "was busy in step 5", "waited for F0 in step 5"


@pytest.mark.parametrize(
    "states, blamed",
    [
        # At the start: one has not come, or is stopped, or hangs before what the others wait for.
        ([{"status": WAITED}, {"status": "had not come", "has_come": False}], [1]),
        ([{"status": "was starting JAX"}, {"status": "was starting JAX", "answers": False}], [1]),
        ([{"status": BUSY, "waits_in": "jax._src.distributed.initialize"}, {"status": BUSY}], [1]),
        ([{"status": WAITED}, {"status": "was compiling"}, {"status": WAITED}], [1]),
        # In a step.
        ([{"status": WAITED}, {"status": BUSY, "waits_in": "jax._src.array._value"}], [1]),
        ([{"status": BUSY, "position": (6, 0)}, {"status": BUSY, "position": (5, 0)}], [1]),
        ([{"status": WAITED, "position": (5, 0)}, {"status": BUSY, "position": (6, 0)}], [1]),
        ([{"status": WAITED, "position": (5, 0)}, {"status": WAITED, "position": (6, 0)}], [0]),
        ([{"status": BUSY}] * 3, [0, 1, 2]),
    ],
)
def test_the_one_that_nothing_waits_for_holds_up_a_job(states, blamed):
    assert behind({i: Standstill(**state) for i, state in enumerate(states)}) == blamed


@pytest.mark.parametrize(
    "problem, is_missed",
    [
        ("JaxRuntimeError: INTERNAL: Gloo all-reduce failed: Timed out waiting 30000ms", True),
        ("JaxRuntimeError: INTERNAL: NCCL operation timed out", True),
        ("JaxRuntimeError: DEADLINE_EXCEEDED: no answer in 60 s", True),
        ("TimeoutError: [Errno 110] Connection timed out: '/data/a.bin'", False),
        ("OSError: [Errno 5] read timeout", False),
        ("ValueError: DEADLINE_EXCEEDED: Error reading a file", False),
        ("JaxRuntimeError: INTERNAL: Gloo all-reduce failed: Connection reset by peer", False),
    ],
)
def test_others_are_late_only_for_what_has_waited_for_them(problem, is_missed):
    """A process whose file system gives no answer has waited for no neighbour."""
    controller = SimpleNamespace(
        position=lambda number: (22 - number, 0),
        status=lambda number: "was busy",
        waits_in=lambda number: "",
    )
    record = Failed(exit_status=75, where="", problem=problem, is_own=False)
    late = missed_by(record, PROCESSES[0], PROCESSES, controller)
    assert late == ([PROCESSES[2]] if is_missed else [])
