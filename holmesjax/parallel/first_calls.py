"""A program is compiled, and called for the first time, while nothing else uses the devices.

XLA loads a program when it is called first. A graph of cuDNN is then recorded on the stream on
which its device computes. Whatever another thread of the process puts beside that stream meanwhile,
such as an array that comes from another stage, gets into the recording, and the process ends with
"capturing stream has unjoined work". So the uses of the devices of a process take turns:

    move        arrays go to devices or come back, outside of programs; by any threads at once
    compile     programs are compiled, which may try kernels on a device; by any threads at once
    first call  one program is loaded and runs, and its results are waited for

Before a turn of the last two, everything that runs on the devices is waited for: nothing there
depends on another process that has not done its own part already. Later calls of a program take no
turn and wait for nothing: JAX does not come here again.

A program that calls Python back has a turn each time, and whatever Python does meanwhile takes
none: the simulator of kernels compiles by threads of its own, which a call waits for.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal
from weakref import WeakSet

import jax
from jax._src import compiler
from jax._src.interpreters import pxla

Use = Literal["move", "compile", "first call"]


class Turns:
    """The uses of the devices of this process, of which one has its turn.

    Args:
      settle: waits for everything that runs on the devices.
    """

    def __init__(self, settle: Callable[[], None]):
        self._settle = settle
        self._changed = threading.Condition()
        self._use: Use | None = None  # that has its turn
        self._num_threads = 0  # that use the devices so
        self._own = threading.local()  # `use`: what the calling thread does
        self._is_calling_back = False  # a program has its turn that runs Python, in any threads

    @contextlib.contextmanager
    def turn(self, use: Use) -> Iterator[None]:
        """Waits for the turn of a use, and keeps it.

        A thread that runs a callback of a program is inside of its call.
        """
        outer: Use | None = getattr(self._own, "use", None)
        if outer == "first call" or self._is_calling_back or _is_of_callback():
            yield
            return
        if outer:
            self._leave()
        self._enter(use)
        self._own.use = use
        try:
            if use != "move":
                self._settle()
            yield
        finally:
            self._own.use = outer
            self._leave()
            if outer:
                self._enter(outer)

    @contextlib.contextmanager
    def calling_back(self) -> Iterator[None]:
        """Waits for the turn of a program that calls Python back; others need none meanwhile."""
        if self._is_calling_back:
            yield
            return
        with self.turn("first call"):
            self._is_calling_back = True
            try:
                yield
            finally:
                self._is_calling_back = False

    def _enter(self, use: Use) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._use is None or (self._use == use and use != "first call")
            )
            self._use = use
            self._num_threads += 1

    def _leave(self) -> None:
        with self._changed:
            self._num_threads -= 1
            if not self._num_threads:
                self._use = None
                self._changed.notify_all()


def _is_of_callback() -> bool:
    """Whether XLA has started this thread, and not Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _settle() -> None:
    donated: dict[int, Any] = {}
    while True:
        arrays = [x for x in jax.live_arrays() if id(x) not in donated]
        try:
            # Not only those that are not ready: to ask a donated one ends the process in JAX 0.10.
            jax.block_until_ready(arrays)
            return
        except RuntimeError:
            # Another thread may have donated some meanwhile; its program has results to wait for.
            gone = {id(x): x for x in arrays if _is_donated(x)}
            if not gone:
                raise
            donated |= gone


def _is_donated(x: Any) -> bool:
    """Whether an array has no buffer any more. Raises what else is in the way of waiting for it."""
    try:
        jax.block_until_ready([x])
    except RuntimeError as error:
        # One that shares its buffer with the array that was donated does not say so itself.
        if not (x.is_deleted() or "deleted or donated" in str(error)):
            raise
        return True
    return False


_turns = Turns(_settle)


def moving() -> contextlib.AbstractContextManager[None]:
    """For a thread beside the main one, around calls that move arrays to devices or back."""
    return _turns.turn("move")


def take_turns() -> None:
    """Makes all programs of this process, ours and JAX's own, take turns from now on."""
    pxla.ExecuteReplicated.__call__ = _call_alone_first  # type: ignore[method-assign]
    compiler.compile_or_get_cached = _compile_in_turn


_call, _compile = pxla.ExecuteReplicated.__call__, compiler.compile_or_get_cached
_called: WeakSet[pxla.ExecuteReplicated] = WeakSet()


def _call_alone_first(program: pxla.ExecuteReplicated, *args: Any) -> Any:
    """Stands for JAX's own function, which calls a program until C++ can: after the first time."""
    if program in _called:
        return _call(program, *args)
    if program.has_host_callbacks:  # JAX comes here at each of its calls
        with _turns.calling_back():
            return jax.block_until_ready(_call(program, *args))
    with _turns.turn("first call"):
        results = jax.block_until_ready(_call(program, *args))
        _called.add(program)
    return results


def _compile_in_turn(*args: Any, **options: Any) -> Any:
    with _turns.turn("compile"):
        return _compile(*args, **options)
