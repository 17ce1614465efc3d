"""Writes the arrays of a checkpoint with Orbax, in the background."""

import contextlib
import gc
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.options import AsyncOptions, FileOptions

from holmesjax.checkpoints import digests, manifest
from holmesjax.checkpoints.array_keys import Arrays, flatten
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.orbax_errors import reason, silence_orbax
from holmesjax.checkpoints.restoring import saved_name
from holmesjax.config import ModelConfig
from holmesjax.files import whole_files
from holmesjax.layer_specs.model_layers import EMBED, layers
from holmesjax.runtime import domain
from holmesjax.runtime.chunk import Chunk, ChunkState, Dtypes
from holmesjax.runtime.expert_placement import without_places

CHUNK_BYTES = 4 << 20  # bytes of an array that are written or read at a time
TIMEOUT_S = 1200  # of a save


def owned(chunk: Chunk, state: ChunkState) -> Arrays:
    """The arrays that a stage saves: all but a borrowed token table, and tables of slots.

    Experts are by number then (`ExpertPlacement.by_number`).
    """
    arrays = without_places(chunk, flatten(state))
    if chunk.borrows_table:
        arrays = {key: x for key, x in arrays.items() if f".{EMBED}." not in key}
    return {saved_name(chunk, key): x for key, x in arrays.items()}


def save_layers(
    run_dir: str | Path,
    model: ModelConfig,
    dtypes: Dtypes,
    parameters: Iterable[tuple[str, dict[str, np.ndarray]]],
) -> tuple[dict[str, dict[str, Any]], manifest.Files]:
    """Writes the parameters of a model that has made no step, a part for each layer.

    Such a checkpoint has no state of an optimizer, which begins with the run.

    Args:
      run_dir: of the run.
      model: the model's settings.
      dtypes: in which they are kept.
      parameters: those of each layer, by name, in a dict that is emptied.

    Returns:
      What `manifest.describe` takes: the arrays and the files.
    """
    path = manifest.begin(run_dir, 0)
    arrays: dict[str, dict[str, Any]] = {}
    files: manifest.Files = {}
    silence_orbax()
    # An OCDBT would hold all bytes of a part until it is closed.
    with ocp.Checkpointer(_handler(use_ocdbt=False)) as checkpointer:
        for number, (layer, values) in enumerate(parameters):
            part = manifest.part_name(number)
            mine: Arrays = {}
            for parameter in layers(model)[layer].parameters:
                group = "params" if parameter.trains else "fixed"
                value = values.pop(parameter.name)
                key = ".".join((group, layer, *parameter.path))
                mine[key] = jax.device_put(value.astype(dtypes.of(parameter), copy=False))
                del value  # it is on the device
            arrays |= _described(mine, part)
            checkpointer.save(path / part, args=_in_chunks(mine), force=True)
            files |= manifest.files_of(path, number)
            mine.clear()  # before the next layer is made
            gc.collect()  # cycles of Orbax's hold the arrays, too
    return arrays, files


def _handler(*, use_ocdbt: bool = True) -> ocp.PyTreeCheckpointHandler:
    """Orbax's writer of arrays, with two of its settings changed.

    No file of shardings is written: whoever restores gives the shardings of another plan. Devices
    that hold copies of an array share the writing of it only if each has a chunk to write.
    """
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=CHUNK_BYTES, enable_write_sharding_file=False
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, type_handler_registry=registry)


class _Folder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The folder of a part until the part is whole. That it cannot be made is raised at its end.

    Other processes wait for the word that it is there, which Orbax would never send.
    """

    _problem: OSError | None = None

    async def create(self) -> Any:
        try:
            return await super().create()
        except OSError as error:
            self._problem = error
            return self.get()

    async def finalize(self) -> None:
        if self._problem is not None:
            raise self._problem
        await super().finalize()


def _in_chunks(arrays: Arrays) -> ocp.args.PyTreeSave:
    """Arrays for Orbax, in chunks, so that a part of one can be read by itself."""
    cut = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
    return ocp.args.PyTreeSave(arrays, cut)


def _described(arrays: Arrays, part: str) -> dict[str, dict[str, Any]]:
    """The entries of a manifest for arrays in a part."""
    found = digests.of(arrays)
    return {
        key: {"part": part, "dtype": str(x.dtype), "shape": list(x.shape), "digest": found[key]}
        for key, x in arrays.items()
    }


# A writer tells when its parts are on disk: the step, each array's dtype, shape, digest and
# part, and what its files are; or when they cannot be written: the step, and why, in one line.
# Whoever hears it from all stages commits the checkpoint (`committing`).
OnSaved = Callable[[int, dict[str, dict[str, Any]], manifest.Files], None]

OnFailed = Callable[[int, str], None]


class Writer:
    """Writes parts of a run's checkpoints in the background; a context manager.

    `save` returns when the arrays are on the host. It does not raise where they cannot be written:
    `saved` or `failed` is called from another thread. At most one checkpoint is being written: a
    second `save` waits for the first. In a domain of several processes all of them save. The
    leading one tells that the part is saved, and each what has failed in it.

    Args:
      run_dir: the run folder.
      chunks: those of this process.
      saved: told of parts that are written.
      failed: told why they cannot be written.
      check: called before anything is written; raises where another job owns the run by now.
      mirror: also has parts before `saved` is told of them.
      advance: called again and again while parts are brought to the mirror.
      reads_all: whether each file gets a SHA-256, for whoever copies it.
    """

    def __init__(
        self,
        run_dir: str | Path,
        chunks: Sequence[Chunk],
        saved: OnSaved,
        failed: OnFailed,
        check: Callable[[], None] = lambda: None,
        mirror: Mirror | None = None,
        advance: Callable[[], object] = lambda: None,
        *,
        reads_all: bool = False,
    ):
        self._reads_all = reads_all
        self._check, self._mirror, self._advance = check, mirror, advance
        self._run_dir, self._chunks = Path(run_dir), chunks
        self._saved, self._failed = saved, failed
        self._gate = domain.gate("checkpoints")
        self._checkpointers = [
            ocp.AsyncCheckpointer(
                _handler(),
                async_options=AsyncOptions(timeout_secs=TIMEOUT_S, barrier_sync_fn=self._gate),
                # It would look for old parts in the leading process while others wait for it.
                file_options=FileOptions(skip_sync_file_validations=True),
                temporary_path_class=_Folder,
            )
            for _ in chunks
        ]
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None
        self._is_failing = False  # in the save that was begun last
        silence_orbax()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            for checkpointer in self._checkpointers:
                checkpointer.close()

    def save(self, step: int, states: Sequence[ChunkState]) -> None:
        """Starts to write the states of the writer's stages after `step` optimizer steps."""
        self.wait()
        path = manifest.folder_of(self._run_dir, step)
        arrays: dict[str, dict[str, Any]] = {}
        if self._gate:
            self._gate.begin()
        self._is_failing = False
        with self._failing(step):
            self._check()
            manifest.begin(self._run_dir, step)
            self._remove_parts(path)
        if self._gate and not self._is_failing:
            # Orbax waits in collectives for the others: all must come to it, or none.
            with self._failing(step):
                self._gate(key="begun", timeout_ms=1000 * TIMEOUT_S)
        if self._is_failing:
            return
        for chunk, state, checkpointer in zip(
            self._chunks, states, self._checkpointers, strict=True
        ):
            part, mine = manifest.part_name(chunk.number), owned(chunk, state)
            arrays |= _described(mine, part)
            with self._failing(step):
                checkpointer.save(path / part, args=_in_chunks(mine))
        self._pending = self._finisher.submit(self._finish, path, step, arrays)

    def _remove_parts(self, path: Path) -> None:
        """Removes what an earlier start has left of the parts. Raises OSError.

        Orbax would, too; but where that fails, the other processes wait for it in a collective.
        """
        if jax.process_index() > 0:
            return
        for chunk in self._chunks:
            if (part := path / manifest.part_name(chunk.number)).exists():
                shutil.rmtree(part)

    def wait(self) -> None:
        """Returns when the last save is complete, or has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, path: Path, step: int, arrays: dict[str, dict[str, Any]]) -> None:
        for checkpointer in self._checkpointers:
            self._end(checkpointer, step)
        if self._is_failing or jax.process_index() > 0:
            return
        files: manifest.Files = {}
        with self._failing(step):
            for chunk in self._chunks:
                files |= manifest.files_of(path, chunk.number, reads_all=self._reads_all)
                whole_files.sync_below(path / manifest.part_name(chunk.number))
            for folder in (path, path.parent):  # the names, too, before the manifest says so
                whole_files.sync(folder)
            if self._mirror:
                self._mirror.upload(self._run_dir, step, files, self._advance)
        if not self._is_failing:
            self._saved(step, arrays, files)

    def _end(self, checkpointer: ocp.AsyncCheckpointer, step: int) -> None:
        """Waits for a save, and takes all its errors: each call raises one of them.

        One that is left would be raised in the next save, while others wait in its collectives.
        """
        is_left = True
        while is_left:
            with self._failing(step):
                checkpointer.wait_until_finished()
                is_left = False

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Tells what a file system gives, the first time; it comes from Orbax as a ValueError."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self._is_failing:
                return
            self._is_failing = True
            is_told = self._gate is not None and self._gate.has_failed()  # by who failed first
            self._failed(step, "" if is_told else reason(error))
            if self._gate:
                self._gate.fail()
