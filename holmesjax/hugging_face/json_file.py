"""Reads JSON files that others have written, and that may be hostile. No JAX."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from holmesjax import hub_names
from holmesjax.errors import CheckpointError

MAX_BYTES = 1 << 20  # of a config.json
SHOWN = 80  # characters of a value in a message


def read(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError for anything else."""
    size = size_of(path)
    if size > max_bytes:
        problem, found = f"must be at most {max_bytes:,} bytes", f"{size:,} bytes"
        raise CheckpointError(
            str(path), problem, found=found, fix="check the path: the file is too large to be right"
        )
    return parse(path.read_bytes(), str(path))


def size_of(path: Path) -> int:
    """The bytes of a regular file. Raises CheckpointError if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "check the path, or download the folder again"
        fix = hub_names.fix(str(path.parent), fix)
        raise CheckpointError(str(path), "cannot be read", found=reason, fix=fix) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        fix = "download the folder again"
        raise CheckpointError(str(path), "must be a file", found=kind, fix=fix)
    return found.st_size


def parse(text: bytes, where: str) -> dict[str, Any]:
    """The object in a text. Raises CheckpointError, also where a key stands twice."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_twins, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        fix = "download the folder again"
        raise CheckpointError(where, "is no JSON", found=reason, fix=fix) from None
    if not isinstance(value, dict):
        fix = "download the folder again"
        raise CheckpointError(where, "must be an object of JSON", found=shown(value), fix=fix)
    return value


def shown(value: object) -> str:
    """A value of JSON in a message.

    >>> shown({"a": [True, None]}), len(shown("x" * 1000))
    ('{"a": [true, null]}', 83)
    """
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`json` would keep the last of two values of a key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for i, key in enumerate(keys) if key in set(keys[:i]))
        raise ValueError(f"the key {shown(twin)} stands twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
