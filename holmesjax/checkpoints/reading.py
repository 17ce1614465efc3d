"""Reads arrays of a checkpoint's parts, and compares each with its digest.

An array comes onto devices, or into NumPy chunk by chunk.
"""

import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from holmesjax.checkpoints import digests, manifest
from holmesjax.checkpoints.array_keys import Arrays, flatten
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.orbax_errors import number_of, silence_orbax, unread
from holmesjax.data.corpus_progress import WorkDone

GROUP_BYTES = 2**31  # of arrays that are read together, at most


read_arrays = WorkDone()


def read_tree(
    checkpoint: Checkpoint, shapes: Any, name_of: Callable[[str], str] = lambda key: key
) -> Any:
    """Reads every array of a tree of shapes from the part that has it, with its sharding."""
    wanted = {name_of(key): x for key, x in flatten(shapes).items()}
    if not wanted:
        return shapes
    known = checkpoint.manifest["arrays"]
    part_of = {key: known[key]["part"] for key in wanted}
    arrays: Arrays = {}
    for part in sorted(set(part_of.values())):
        own = {key: x for key, x in wanted.items() if part_of[key] == part}
        for group in _groups(own):
            arrays |= _read(checkpoint, part, group)
            read_arrays.count += len(group)
    # Orbax gives back the shape where the file system has no array, or its metadata say so.
    kinds = jax.Array, np.ndarray
    if missing := [key for key in wanted if not isinstance(arrays[key], kinds)]:
        problem = f"is damaged: {missing[0]} is not in it"
        raise manifest.damaged(checkpoint, part_of[missing[0]], problem, "no such array")
    found = digests.of({key: arrays[key] for key in wanted})
    for key, digest in found.items():
        if digest != known[key]["digest"]:
            problem = f"is damaged: the digest of {key} should be {known[key]['digest']}"
            raise manifest.damaged(checkpoint, part_of[key], problem, digest)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[key] for key in wanted])


def _groups(shapes: Arrays) -> Iterator[Arrays]:
    """Arrays in their order, of up to `GROUP_BYTES` together; the same in all processes."""
    group: Arrays = {}
    num_bytes = 0
    for key, x in shapes.items():
        own = math.prod(x.shape) * np.dtype(x.dtype).itemsize
        if group and num_bytes + own > GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
        group[key] = x
        num_bytes += own
    yield group


def verify_arrays(
    checkpoint: Checkpoint, part: str, told: Callable[[int, int], object] = lambda done, of: None
) -> None:
    """Reads the arrays of a part, one after the other, into this process's memory.

    Args:
      checkpoint: which has them.
      part: the name of the part.
      told: called after each array, with the number of those that are read and of all.

    Raises DamagedError if one cannot be read, or is not what was written.
    """
    own = {k: x for k, x in checkpoint.manifest["arrays"].items() if x["part"] == part}
    for done, (key, known) in enumerate(own.items(), start=1):
        read_tree(checkpoint, {key: jax.ShapeDtypeStruct(known["shape"], known["dtype"])})
        told(done, len(own))


def _read(checkpoint: Checkpoint, part: str, shapes: Arrays) -> Arrays:
    """Reads arrays of a part onto devices, or into NumPy if they have no sharding."""
    silence_orbax()
    is_numpys = all(x.sharding is None for x in shapes.values())
    try:
        return (_read_numpys if is_numpys else _read_onto_devices)(checkpoint.path / part, shapes)
    except Exception as error:
        reason, number = unread(error), number_of(error)
        if reason is None:
            raise
    # Reads that Orbax has abandoned would print a traceback each when Python ends.
    gc.collect()
    if number in manifest.WITHHELD:
        raise manifest.error_of(OSError(number, os.strerror(number)), checkpoint.path / part)
    raise manifest.damaged(checkpoint, part, "is damaged: its arrays cannot be read", reason)


def _read_onto_devices(folder: Path, shapes: Arrays) -> Arrays:
    args = ocp.args.PyTreeRestore(
        item=shapes,
        restore_args=ocp.checkpoint_utils.construct_restore_args(shapes),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        found: Arrays = checkpointer.restore(folder, args=args)
    return found


def _read_numpys(folder: Path, shapes: Arrays) -> Arrays:
    """Reads arrays chunk by chunk. Orbax would hold many chunks beside the arrays."""
    is_ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(folder)
    files = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}
    found: Arrays = {}
    for key in shapes:
        one = {"driver": "file", "path": f"{folder.absolute()}/{key}/"}
        store = {**files, "path": f"{key}/"} if is_ocdbt else one
        array = ts.open({"driver": "zarr", "kvstore": store}, open=True).result()
        found[key] = out = np.empty(array.shape, array.dtype.numpy_dtype)
        for chunk in _chunks(array.shape, array.spec().to_json()["metadata"]["chunks"]):
            out[chunk] = array[chunk].read().result()
    return found


def _chunks(shape: Sequence[int], size: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The chunks of an array, of a size each, in the order of its elements.

    >>> list(_chunks((3,), (2,)))
    [(slice(0, 2, None),), (slice(2, 3, None),)]
    """
    dims = zip(shape, size, strict=True)
    cut = lambda n, step: [slice(a, min(a + step, n)) for a in range(0, n, step)]
    return itertools.product(*(cut(n, step) for n, step in dims))
