"""The work of a process while its devices compute a step."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(kw_only=True)
class OverlappedWork:
    """The work of a process in a step while it has nothing to dispatch.

    Args:
      nearly: called when the last forward is dispatched. The answers of other processes can come
        while backwards run.
      idle: called once, when nothing can be dispatched until something arrives.
    """

    nearly: Callable[[], None] = lambda: None
    idle: Callable[[], None] = lambda: None


BUSY = OverlappedWork()  # nothing
