"""Writes and restores the arrays of a checkpoint, with Orbax.

A part is what one stage wrote: a flat dict of arrays. A key is the array's path in the state
(`params.block_003.up_DF`), so it names the layer and never the stage, the mesh or the cluster, and
any plan restores what another has written. `manifest` says which checkpoints are whole, but for the
arrays: each has a digest, computed where it lies before it is written, and again where it is read.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.options import AsyncOptions

from holmesjax.checkpoints import digests, manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import ModelConfig
from holmesjax.errors import CheckpointError
from holmesjax.models import transformer
from holmesjax.optimizers.adamw import AdamW
from holmesjax.plan.plan import EMBED, layer_names
from holmesjax.runtime.domain import Gate
from holmesjax.runtime.stage import Stage, StageState

Arrays = dict[str, Any]  # key -> array, or its shape with a sharding
TIMEOUT_S = 1200  # of a save
MAX_SHOWN = 3  # arrays that differ, in a message


def key_of(path: tuple) -> str:
    """The name of an array of the state, from its path in the tree."""
    return ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def flatten(state: Any) -> Arrays:
    return {key_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def owned(stage: Stage, state: StageState) -> Arrays:
    """What a stage saves: all but a borrowed token table."""
    arrays = flatten(state)
    if stage.borrows_table:
        arrays = {key: x for key, x in arrays.items() if f".{EMBED}." not in key}
    return arrays


def restore(checkpoint: Checkpoint, stages: Sequence[Stage]) -> list[StageState]:
    """The states of all stages, whatever the plan that wrote them. Verify first.

    Moments that were kept in another way are read as they were, and kept in the stage's.

    Raises:
      CheckpointError: it holds other arrays than the model has; nothing is read.
      DamagedError: an array cannot be read, or is not what was written.
    """
    model, optimizer = stages[0].model, _writing_optimizer(checkpoint, stages[0])
    params = _param_shapes(model)
    _check_arrays(checkpoint, StageState(params, jax.eval_shape(optimizer.init, params)))
    return [_restore_state(checkpoint, stage) for stage in stages]


def _restore_state(checkpoint: Checkpoint, stage: Stage) -> StageState:
    written = _writing_optimizer(checkpoint, stage)
    if written == stage.optimizer:
        return _restore_tree(checkpoint, stage.state_shapes)
    writer = dataclasses.replace(stage, optimizer=written)
    state = _restore_tree(checkpoint, writer.state_shapes)
    shardings = jax.tree.map(lambda x: x.sharding, stage.state_shapes.opt_state)
    adopt = jax.jit(stage.optimizer.adopt, out_shardings=shardings)
    return StageState(state.params, adopt(state.opt_state))


def _writing_optimizer(checkpoint: Checkpoint, stage: Stage) -> AdamW:
    """The stage's optimizer with moments as the checkpoint keeps them."""
    config = dataclasses.replace(
        stage.optimizer.config, moments=checkpoint.settings["optimizer"]["moments"]
    )
    return dataclasses.replace(stage.optimizer, config=config)


def restore_params(checkpoint: Checkpoint, model: ModelConfig) -> Any:
    """The parameters of all layers, on the first device. Verify first; raises as `restore`."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"params": jax.tree.map(lambda x: x.update(sharding=here), _param_shapes(model))}
    _check_arrays(checkpoint, shapes)
    return _restore_tree(checkpoint, shapes)["params"]


def _param_shapes(model: ModelConfig) -> dict[str, dict]:
    return {
        layer: transformer.param_shapes(layer, model) for layer in layer_names(model.num_layers)
    }


def _check_arrays(checkpoint: Checkpoint, shapes: Any) -> None:
    """Raises unless it holds the arrays of a tree of the whole model, under the same roots."""
    wanted = {key: _show(str(x.dtype), x.shape) for key, x in flatten(shapes).items()}
    roots = {key.partition(".")[0] for key in wanted}
    saved = {
        key: _show(array["dtype"], array["shape"])
        for key, array in checkpoint.manifest["arrays"].items()
        if key.partition(".")[0] in roots
    }
    differ = [key for key in {**wanted, **saved} if saved.get(key) != wanted.get(key)]
    if not differ:
        return
    first = [
        f"{key} is {saved.get(key, 'missing')} (expected: {wanted.get(key, 'no such array')})"
        for key in differ[:MAX_SHOWN]
    ]
    if len(differ) > MAX_SHOWN:
        first.append(f"and {len(differ) - MAX_SHOWN} more")
    raise CheckpointError(
        str(checkpoint.path),
        f"does not hold the arrays of the model: {len(differ)} of {len({*wanted, *saved})} differ",
        found=", ".join(first),
        fix="use the version of HolmesJAX that wrote it, or another run.dir",
    )


def _show(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _restore_tree(checkpoint: Checkpoint, shapes: Any) -> Any:
    """Reads every array of a tree of shapes from the part that has it, with its sharding."""
    wanted = flatten(shapes)
    known = checkpoint.manifest["arrays"]
    part_of = {key: known[key]["part"] for key in wanted}
    arrays: Arrays = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for part in sorted(set(part_of.values())):
            here = {key: x for key, x in wanted.items() if part_of[key] == part}
            args = ocp.args.PyTreeRestore(
                item=here,
                restore_args=ocp.checkpoint_utils.construct_restore_args(here),
                partial_restore=True,
            )
            arrays |= _read(checkpointer, checkpoint, part, args)
    # Orbax gives back the shape where the file system has no array, or its metadata say so.
    if missing := [key for key in wanted if not isinstance(arrays[key], jax.Array)]:
        problem = f"is damaged: {missing[0]} is not in it"
        raise manifest.damaged(checkpoint, part_of[missing[0]], problem, "no such array")
    found = digests.of({key: arrays[key] for key in wanted})
    for key, digest in found.items():
        if digest != known[key]["digest"]:
            problem = f"is damaged: the digest of {key} should be {known[key]['digest']}"
            raise manifest.damaged(checkpoint, part_of[key], problem, digest)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[key] for key in wanted])


def _read(
    checkpointer: ocp.PyTreeCheckpointer,
    checkpoint: Checkpoint,
    part: str,
    args: ocp.args.PyTreeRestore,
) -> Arrays:
    try:
        found: Arrays = checkpointer.restore(checkpoint.path / part, args=args)
        return found
    except (OSError, ValueError) as error:
        reason = _reason(error)
    # Reads that Orbax has abandoned would print a traceback each when Python ends.
    gc.collect()
    raise manifest.damaged(checkpoint, part, "is damaged: its arrays cannot be read", reason)


# A writer tells when its parts are on disk: the step, each array's dtype, shape, digest and
# part, and what its files are; or when they cannot be written: the step, and why, in one line.
# Whoever hears it from all stages commits the checkpoint (`saves`).
Saved = Callable[[int, dict[str, dict[str, Any]], manifest.Files], None]
Failed = Callable[[int, str], None]


class Writer:
    """Writes parts of a run's checkpoints in the background; a context manager.

    `save` returns when the arrays are on the host. It does not raise where they cannot be written:
    `saved` or `failed` is called from another thread. At most one checkpoint is being written: a
    second `save` waits for the first. In a domain of several processes all of them save. The
    leading one tells that the part is saved, and each what has failed in it.
    """

    def __init__(self, run_dir: str | Path, stages: Sequence[Stage], saved: Saved, failed: Failed):
        self._run_dir, self._stages = Path(run_dir), stages
        self._saved, self._failed = saved, failed
        self._gate = Gate("checkpoints") if jax.process_count() > 1 else None
        options = AsyncOptions(timeout_secs=TIMEOUT_S, barrier_sync_fn=self._gate)
        self._checkpointers = [
            ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
            for _ in stages
        ]
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None
        self._is_failing = False  # in the save that was begun last
        _silence_orbax()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            for checkpointer in self._checkpointers:
                checkpointer.close()

    def save(self, step: int, states: Sequence[StageState]) -> None:
        """Starts to write the states of the writer's stages after `step` optimizer steps."""
        self.wait()
        path = manifest.folder_of(self._run_dir, step)
        arrays: dict[str, dict[str, Any]] = {}
        if self._gate:
            self._gate.begin()
        self._is_failing = False
        with self._failing(step):
            manifest.begin(self._run_dir, step)
        if self._gate and not self._is_failing:
            # Orbax waits in collectives for the others: all must come to it, or none.
            with self._failing(step):
                self._gate(key="begun", timeout_ms=1000 * TIMEOUT_S)
        if self._is_failing:
            return
        for stage, state, checkpointer in zip(
            self._stages, states, self._checkpointers, strict=True
        ):
            part, mine = manifest.part_name(stage.index), owned(stage, state)
            found = digests.of(mine)
            arrays |= {
                key: {
                    "part": part,
                    "dtype": str(x.dtype),
                    "shape": list(x.shape),
                    "digest": found[key],
                }
                for key, x in mine.items()
            }
            with self._failing(step):
                checkpointer.save(path / part, args=ocp.args.PyTreeSave(mine), force=True)
        self._pending = self._finisher.submit(self._finish, path, step, arrays)

    def wait(self) -> None:
        """Returns when the last save is complete, or has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, path: Path, step: int, arrays: dict[str, dict[str, Any]]) -> None:
        for checkpointer in self._checkpointers:  # all: each would raise its error in the next save
            with self._failing(step):
                checkpointer.wait_until_finished()
        if self._is_failing or jax.process_index() > 0:
            return
        files: manifest.Files = {}
        with self._failing(step):
            for stage in self._stages:
                files |= manifest.files_of(path, stage.index)
        if not self._is_failing:
            self._saved(step, arrays, files)

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Tells what a file system gives, the first time; it comes from Orbax as a ValueError."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self._is_failing:
                return
            self._is_failing = True
            self._failed(step, _reason(error))
            if self._gate:
                self._gate.fail()


def _reason(error: Exception) -> str:
    """In one line, without the chain of calls that TensorStore tells."""
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(number[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error).splitlines()[0]


@functools.cache
def _silence_orbax() -> None:
    """Keeps what `Writer` tells in one line from being printed in hundreds, from now on.

    Orbax logs each error that it also raises. It abandons all other writes of a save with the
    first that fails: asyncio logs theirs, those that come back later find their loop closed, and
    some never began.
    """
    orbax, hook = str(Path(ocp.__file__).parent), sys.unraisablehook
    is_orbaxs = lambda r: r.levelno >= logging.ERROR and r.pathname.startswith(orbax)
    is_abandoned = lambda r: "exception was never retrieved" in r.getMessage()
    logging.getLogger("absl").addFilter(lambda record: not is_orbaxs(record))
    logging.getLogger("asyncio").addFilter(lambda record: not is_abandoned(record))

    def tell(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = tell
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
