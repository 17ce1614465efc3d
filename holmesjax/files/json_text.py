"""JSON that others wrote."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holmesjax.files import regular_files

_DECODER = json.JSONDecoder()  # `json.loads` takes half as long again
_SPACE = re.compile(r"[ \t\n\r]*")


def value_of(text: str | bytes) -> Any:
    """The value of a text in UTF-8. Raises ValueError, also where it is nested too deep.

    >>> value_of("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deep
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read(path: str | Path) -> Any:
    """The value in a regular file. Raises OSError, and ValueError as `value_of`."""
    return value_of(regular_files.read_bytes(path))


def values_of(text: str) -> Iterator[Any]:
    """The values of a text that follow each other. Raises ValueError, as `value_of`.

    >>> list(values_of('{"a": 1}\\n{\\n"b": 2} '))
    [{'a': 1}, {'b': 2}]
    """
    place = _SPACE.match(text).end()  # type: ignore[union-attr]  # it matches nothing, too
    while place < len(text):
        try:
            value, place = _DECODER.raw_decode(text, place)
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        yield value
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
