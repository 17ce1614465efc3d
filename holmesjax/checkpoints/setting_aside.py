"""Checkpoints that two processes have found damaged are set aside: they get another name. No JAX.

    checkpoints/step_00000200.damaged/             a checkpoint that counts no more
                step_00000300/part_0.5f1c.damaged  a part that is fetched from where it is whole

Nothing is removed: whoever knows better can give it its name back.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.errors import CheckpointError, raise_if_passing

Move = Callable[[Path, Path], None]  # renames what the owner of a run takes away (`Lease.move`)


def set_aside(path: Path, move: Move) -> Path:
    """Renames the folder of a checkpoint so that nothing takes it for one."""
    number, target = 1, path.with_name(f"{path.name}.damaged")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.damaged")
    with _renaming(path):
        move(path, target)
    return target


def set_part_aside(checkpoint: Checkpoint, part: str, move: Move = os.rename) -> None:
    """Renames a part that is damaged here, so that it is fetched from where it is whole."""
    path = checkpoint.path / part
    target = path.with_name(f"{part}.{secrets.token_hex(4)}.damaged")
    # Another process may have done it, or the part is not here.
    with contextlib.suppress(FileNotFoundError), _renaming(path):
        move(path, target)


@contextlib.contextmanager
def _renaming(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise_if_passing(error)
        problem = "is damaged, and cannot be renamed to set it aside"
        fix = "make the run folder writable"
        raise CheckpointError(str(path), problem, found=error.strerror, fix=fix) from None
