"""First calls of programs, on a device whose work is done only once it is waited for."""

import _thread
import io
import itertools
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax._src import compiler, pjit
from jax._src.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holmesjax import Trainer
from holmesjax.generation.sampler import Sampler
from holmesjax.generation.sampling import Sampling
from holmesjax.parallel import first_calls
from holmesjax.parallel.first_calls import Turns
from holmesjax.runtime.pipeline import Pipeline
from holmesjax.transport import tcp
from holmesjax.transport.crossings import Key
from tests.jobs import HANG_S, ROOT, write_run
from tests.two_stages import make_crossing, make_plan, start_pair, together


class Device:
    """Calls programs, and notes the order of calls and of waits.

    Attributes:
      events: "first NAME" and "later NAME" of each call, "wait" where `first_calls` waits for
        something, and what a test adds.
      mistakes: what happens beside a first call, and moves of other threads out of turn.
      num_moves: of other threads.
    """

    def __init__(self, call, compile_program):
        self._call, self._compile = call, compile_program
        self._kept = {}  # programs and arrays by number, so that no other has the same
        self._pending = {}  # number of an array -> its call
        self._first = None  # the last call, if it was a first one
        self.events, self.mistakes, self.num_moves = [], [], 0

    def call(self, program, *args):
        is_first = id(program) not in self._kept
        self.note(f"{'first' if is_first else 'later'} {program.name}", alone=is_first)
        results = self._call(program, *args)
        call = f"call {len(self.events)} of {program.name}"
        self._first = call if is_first else None
        self._pending |= dict.fromkeys(map(id, results), call)
        self._kept |= {id(x): x for x in (program, *results)}
        return results

    def compile(self, *args, **options):
        self.note("compile", alone=True)
        return self._compile(*args, **options)

    def note(self, event, *, alone=False):
        pending = sorted(set(self._pending.values()))
        if pending and (alone or self._first in pending):
            self.mistakes.append(f"{event} beside {', '.join(pending)}")
        self.events.append(event)

    def noting(self, name, run):
        """A function whose calls are numbered events, with a beginning and an end."""
        numbers = itertools.count()

        def noted(*args, **options):
            number = next(numbers)
            self.note(f"{name} {number}")
            found = run(*args, **options)
            self.note(f"end of {name} {number}")
            return found

        return noted

    def moving(self, move):
        """A function that moves arrays, which says whether another thread calls it in its turn."""

        def noted(*args, **options):
            thread = threading.current_thread()
            if thread is not threading.main_thread():
                self.num_moves += 1
                if getattr(first_calls._turns._own, "use", None) != "move":
                    self.mistakes.append(f"{thread.name} moves an array out of turn")
            return move(*args, **options)

        return noted

    def live_arrays(self):
        return [SimpleNamespace(number=number) for number in self._pending]

    def block_until_ready(self, arrays):
        if arrays:
            self.events.append("wait")
        for x in arrays:
            self._pending.pop(getattr(x, "number", id(x)), None)
        return arrays

    def names(self, kind):
        return {event.split()[1] for event in self.events if event.startswith(kind)}


@pytest.fixture
def device(monkeypatch):
    """The device on which all programs of the test run."""
    device = Device(first_calls._call, first_calls._compile)
    monkeypatch.setattr(first_calls, "_call", device.call)
    monkeypatch.setattr(first_calls, "_compile", device.compile)
    monkeypatch.setattr(first_calls, "jax", device)
    # What the run itself has to change, and the ways by which JAX calls a program without Python.
    call = lambda program, *args: device.call(program, *args)
    monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", call)
    monkeypatch.setattr(compiler, "compile_or_get_cached", device.compile)
    monkeypatch.setattr(pjit, "_get_fastpath_data", lambda *args: None)
    monkeypatch.setattr(pxla.MeshExecutable, "create_cpp_call", lambda *args: None)
    for name in ("device_put", "make_array_from_callback"):
        monkeypatch.setattr(jax, name, device.moving(getattr(jax, name)))
    jax.clear_caches()  # of programs that were called before
    yield device
    jax.clear_caches()


def between(events, first, last):
    return events[events.index(first) + 1 : events.index(last)]


def test_no_program_is_called_first_beside_another(device, tmp_path, monkeypatch):
    """Two stages in one process, with two validations and a checkpoint; then generated text."""
    for name in ("train_step", "evaluate"):
        monkeypatch.setattr(Pipeline, name, device.noting(name, getattr(Pipeline, name)))
    path = write_run(tmp_path, {"left": (1,), "right": (1,)})
    changes = {"train.steps": 4, "train.eval_every": 2, "train.eval_batches": 1}
    trainer = Trainer(path, changes, stream=io.StringIO())
    trainer.train()
    of_training = {"forward", "backward", "chunk_totals", "reduce_and_update", "total_loss"}
    assert {f"jit({name})" for name in of_training} <= device.names("first")
    for kind, number in (("train_step", 1), ("train_step", 2), ("evaluate", 1)):
        calls = between(device.events, f"{kind} {number}", f"end of {kind} {number}")
        assert {call.split()[0] for call in calls} == {"later"}, calls  # and nothing waits

    device.events.clear()
    sampler = Sampler.load(trainer.run_dir, as_planned=True)
    sampler.complete(["a", "b" * 20], 12, Sampling())
    assert {"jit(_run_part)", "jit(_choose)"} <= device.names("first")
    tokens = device.events[device.events.index("later jit(_choose)") :]
    assert {call.split()[0] for call in tokens} == {"later"}
    assert device.mistakes == []
    assert device.num_moves > 0


def test_arrays_between_processes_move_in_their_turn(device, monkeypatch):
    monkeypatch.setattr(tcp, "_piece", device.moving(tcp._piece))
    plan = make_plan((1, 1), (1, 1))
    source, target = start_pair(plan, [make_crossing("F0", (4,))])
    array = jax.device_put(np.ones(4, np.float32), jax.devices()[0])
    target.expect([Key("F0", 1, 0)])
    source.offer(Key("F0", 1, 0), array)
    target.fetch(Key("F0", 1, 0))
    together(source.close, target.close)
    assert device.mistakes == []
    assert device.num_moves == 2  # to the host, and from there


class Threads:
    """Threads that each use the devices, one for each name, until they are told to end."""

    def __init__(self, turns):
        self._turns, self.inside, self._threads = turns, set(), []
        self._changed, self._ends = threading.Condition(), set()

    def start(self, name, use, *then):
        run = threading.Thread(target=self._run, args=(name, use, *then), daemon=True)
        self._threads.append(run)
        run.start()

    def _run(self, name, use, *then):
        with self._turns.turn(use):
            self._note(self.inside.add, name)
            with self._changed:
                self._changed.wait_for(lambda: name in self._ends)
            for inner in then:
                with self._turns.turn(inner):
                    pass
            self._note(self.inside.discard, name)

    def _note(self, change, name):
        with self._changed:
            change(name)
            self._changed.notify_all()

    def end(self, *names):
        self._note(self._ends.update, names)

    def become(self, *names, within_s=60.0):
        with self._changed:
            return self._changed.wait_for(lambda: self.inside == set(names), within_s)


def test_uses_of_the_devices_take_turns():
    threads = Threads(Turns(lambda: None))
    threads.start("a", "move")
    threads.start("b", "move")
    assert threads.become("a", "b")  # at once
    threads.start("c", "first call")
    assert not threads.become("a", "b", "c", within_s=0.1)
    threads.end("a", "b")
    assert threads.become("c")
    threads.start("d", "first call")
    assert not threads.become("c", "d", within_s=0.1)
    threads.start("e", "compile")
    assert not threads.become("c", "e", within_s=0.1)
    threads.end("c", "d", "e")
    assert threads.become()


def test_a_program_inside_of_another_use_waits_for_no_turn_of_its_own_thread():
    threads = Threads(turns := Turns(lambda: None))
    threads.start("a", "move", "first call")
    assert threads.become("a")
    threads.end("a")
    assert threads.become()
    with turns.turn("first call"), turns.turn("compile"), turns.turn("first call"):
        done = threading.Event()

        def callback():
            with turns.turn("first call"):
                done.set()

        _thread.start_new_thread(callback, ())  # as XLA starts one, without Python's `threading`
        assert done.wait(60)


def test_an_array_that_another_thread_donates_meanwhile_is_not_waited_for(monkeypatch):
    array = jax.device_put(np.ones(4, np.float32))
    monkeypatch.setattr(jax, "live_arrays", Mock(return_value=[array]))
    with monkeypatch.context() as patched:
        failed = Mock(side_effect=RuntimeError("out of memory"))
        patched.setattr(jax, "block_until_ready", failed)
        with pytest.raises(RuntimeError, match="out of memory"):
            first_calls._settle()
    array.delete()
    parts = [jax.device_put(np.ones((1, 4), np.float32), device) for device in jax.devices()[:2]]
    rows = NamedSharding(Mesh(np.array(jax.devices()[:2]), ["x"]), PartitionSpec("x"))
    both = jax.make_array_from_single_device_arrays((2, 4), rows, parts)
    parts[1].delete()
    assert not both.is_deleted()  # though a part of it is
    jax.live_arrays.side_effect = [[array, both], [array]]
    first_calls._settle()


CALLS_BACK = """
import jax, numpy as np
from concurrent.futures import ThreadPoolExecutor
from holmesjax.parallel import first_calls

def inner(x):
    with ThreadPoolExecutor(2) as pool:
        return np.stack(list(pool.map(lambda k: jax.jit(lambda y: y * k)(x), (2, 3))))

first_calls.take_turns()
shape = jax.ShapeDtypeStruct((2,), "float32")
call = jax.jit(lambda x: jax.pure_callback(inner, shape, x))
print([call(np.float32(x)).tolist() for x in (1, 2)])
"""


def test_a_program_that_calls_python_back_lets_its_threads_compile():
    """The simulator of kernels does so; the call and its threads would wait for each other."""
    command = [sys.executable, "-c", CALLS_BACK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "[[2.0, 3.0], [4.0, 6.0]]\n", done.stderr
