"""Exceptions that HolmesJAX did not raise, and who can have caused them.

A collective that loses a process raises what a broken device raises, and what a bug of XLA does. So
the kind of an exception says little of its cause. It says this much: what Python code raises by
itself comes from this process alone.
"""

import re

import jax

from holmesjax.data import object_stores

# Of the operating system, and of the runtime of the devices, with its collectives. Those of stores'
# clients are known once these are loaded.
FROM_OUTSIDE = (OSError, MemoryError, jax.errors.JaxRuntimeError)
# XLA and TensorStore, which read and write files, also raise ValueError with a status of Abseil.
STATUS = re.compile(
    r"(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|"
    r"ABORTED|OUT_OF_RANGE|INTERNAL|UNAVAILABLE|DATA_LOSS): "
)


def is_own(error: BaseException) -> bool:
    """Whether nothing outside of this process can have caused an exception.

    Nor can what it was raised from, or was raised in the handling of.

    >>> is_own(TypeError("a layer takes 2 arguments")), is_own(ConnectionResetError(104, "reset"))
    (True, False)
    >>> is_own(ValueError("UNAVAILABLE: Error reading a file"))
    False
    """
    outside = (*FROM_OUTSIDE, *object_stores.errors())
    seen: set[int] = set()
    reason: BaseException | None = error
    while reason is not None and id(reason) not in seen:
        if isinstance(reason, outside) or STATUS.match(str(reason)):
            return False
        seen.add(id(reason))
        reason = reason.__cause__ or reason.__context__
    return True
