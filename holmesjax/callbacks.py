"""Functions of one's own that a `Trainer` calls while it trains. No JAX."""

import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmesjax.errors import HolmesError

NumbersByName = Mapping[str, Any]  # by name: numbers, or arrays with one number


class CallbackError(HolmesError):
    """A callback of the user's that has failed; what it raised is the cause of the error."""


class Callback:
    """A base class of callbacks: a run calls those of its methods that a subclass has.

    All methods run in the thread that trains. `trainer.params` and the other arrays of the trainer
    are then those of this moment. Nothing waits for the devices unless a method does, with
    `float(numbers["loss"])` for example: the time that this takes is part of the step. What a
    method raises ends the run with a `CallbackError`, which names the method.

    The numbers that `after_step` and `on_validation` return join the record of the step, and so go
    to `metrics.jsonl`, TensorBoard, Weights & Biases, and to the console while its line has room.
    Each is a Python number, or an array with one element that may still be being computed.
    """

    def before_step(self, trainer: Any, step: int) -> None:
        """Called before step number `step` is dispatched; the first is 1."""

    def after_step(self, trainer: Any, step: int, numbers: NumbersByName) -> NumbersByName | None:
        """Called when the step is dispatched.

        Args:
          trainer: the `Trainer`; its arrays are those after the step.
          step: its number.
          numbers: of the step, arrays of shape [] that are still being computed: `loss` in nats per
            token, `grad_norm`, `learning_rate`, `skipped`, and the metrics of layers.

        Returns:
          Metrics of one's own, by name.
        """

    def on_validation(self, trainer: Any, step: int, losses: NumbersByName) -> NumbersByName | None:
        """Called after a validation, with the arrays of its step.

        Args:
          trainer: the `Trainer`.
          step: after which the run validates.
          losses: `val_loss` in nats per token, and `val_losses` of named sets.

        Returns:
          Metrics of one's own, by name.
        """

    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        """Called once the checkpoint after step number `step` is whole, in its folder `path`.

        It is written while training goes on, so this comes before a later step, or at the end.
        """


class Callbacks:
    """The callbacks of a run, called in their order.

    Args:
      trainer: which they get.
      own: the callbacks.
    """

    def __init__(self, trainer: object = None, own: Sequence[Callback] = ()):
        self._trainer, self._own = trainer, own
        self._saved: deque[tuple[int, Path]] = deque()  # checkpoints that no callback knows of

    def before_step(self, step: int) -> None:
        self._call("before_step", step)

    def after_step(self, step: int, numbers: NumbersByName) -> dict[str, Any]:
        return self._call("after_step", step, numbers)

    def on_validation(self, step: int, losses: NumbersByName) -> dict[str, Any]:
        return self._call("on_validation", step, losses)

    def saved(self, step: int, path: Path) -> None:
        """Notes a checkpoint that is whole; may be called from any thread."""
        self._saved.append((step, path))

    def on_saves(self) -> None:
        """Calls `on_save` of each checkpoint that was noted."""
        while self._saved:
            self._call("on_save", *self._saved.popleft())

    def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in self._own:
            name = f"{type(callback).__name__}.{method}"
            try:
                numbers = getattr(callback, method)(self._trainer, *arguments)
            except Exception as error:
                *_, last = traceback.extract_tb(error.__traceback__)
                raise CallbackError(
                    name,
                    "this callback has failed, which ends the run",
                    found=f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})",
                    fix="mend it, and resume the run from its folder",
                ) from error
            if numbers is None:
                continue
            if not isinstance(numbers, Mapping) or not all(isinstance(n, str) for n in numbers):
                problem, fix = "must return None, or numbers by name", 'such as {"norm": 1.0}'
                raise CallbackError(name, problem, found=repr(numbers), fix=f"return {fix}")
            found |= {key: _Own(name, key, value) for key, value in numbers.items()}
        return found


class _Own:
    """A number of a callback's; `float` waits for it."""

    def __init__(self, callback: str, name: str, value: Any):
        self._callback, self._name, self._value = callback, name, value

    def __float__(self) -> float:
        try:
            return float(self._value)
        except (TypeError, ValueError) as error:
            problem = f"{self._name!r} must be a number, or an array with one element"
            found = f"{type(self._value).__name__}: {error}"
            fix = "return a number for each name"
            raise CallbackError(self._callback, problem, found=found, fix=fix) from None
