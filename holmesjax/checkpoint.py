"""Writes and restores the arrays of a checkpoint, with Orbax.

A part is what one stage wrote: a flat dict of arrays. A key is the array's path in the state
(`params.block_003.up_DF`), so it names the layer and never the stage, the mesh or the cluster, and
any plan restores what another has written. `manifest` says which checkpoints are whole.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from holmesjax import manifest
from holmesjax.config import ModelConfig
from holmesjax.errors import CheckpointError
from holmesjax.manifest import Checkpoint
from holmesjax.models import gpt
from holmesjax.optimizer import AdamW
from holmesjax.plan import EMBED, layer_names
from holmesjax.stage import Stage, StageState

Arrays = dict[str, Any]  # key -> array, or its shape with a sharding
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

    Moments that were kept in another way are read as they were, and kept in the stage's. Raises
    CheckpointError, before anything is read, if it holds other arrays than the model has.
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
    return {layer: gpt.param_shapes(layer, model) for layer in layer_names(model.num_layers)}


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
    part_of = {key: checkpoint.manifest["arrays"][key]["part"] for key in wanted}
    arrays: Arrays = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for part in sorted(set(part_of.values())):
            here = {key: x for key, x in wanted.items() if part_of[key] == part}
            args = ocp.args.PyTreeRestore(
                item=here,
                restore_args=ocp.checkpoint_utils.construct_restore_args(here),
                partial_restore=True,
            )
            arrays |= checkpointer.restore(checkpoint.path / part, args=args)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[key] for key in wanted])


# What a writer tells when its parts are on disk: the step, each array's dtype, shape and part, and
# the SHA-256 of each file. Whoever hears it from all stages commits the checkpoint.
Saved = Callable[[int, dict[str, dict[str, Any]], dict[str, str]], None]


class Writer:
    """Writes parts of a run's checkpoints in the background; a context manager.

    `save` returns when the arrays are on the host. At most one checkpoint is being written: a
    second `save` waits for the first, and raises what went wrong with it. In a domain of several
    processes all of them save, and the leading one tells.
    """

    def __init__(self, run_dir: str | Path, stages: Sequence[Stage], saved: Saved):
        self._run_dir, self._stages, self._saved = Path(run_dir), stages, saved
        self._checkpointers = [ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) for _ in stages]
        self._committer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            for checkpointer in self._checkpointers:
                checkpointer.close()

    def save(self, step: int, states: Sequence[StageState]) -> None:
        """Starts to write the states of the writer's stages after `step` optimizer steps."""
        self.wait()
        path = manifest.begin(self._run_dir, step)
        arrays: dict[str, dict[str, Any]] = {}
        for stage, state, checkpointer in zip(
            self._stages, states, self._checkpointers, strict=True
        ):
            part, mine = manifest.part_name(stage.index), owned(stage, state)
            arrays |= {
                key: {"part": part, "dtype": str(x.dtype), "shape": list(x.shape)}
                for key, x in mine.items()
            }
            checkpointer.save(path / part, args=ocp.args.PyTreeSave(mine), force=True)
        self._pending = self._committer.submit(self._finish, path, step, arrays)

    def wait(self) -> None:
        """Returns when the last save is complete; raises if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, ValueError) as error:  # what Orbax raises for a full disk is a ValueError
            raise CheckpointError(
                str(self._run_dir / manifest.FOLDER),
                "a checkpoint could not be written",
                found=str(error).splitlines()[0],
                fix="free space or choose another run.dir, then resume from the last checkpoint",
            ) from error

    def _finish(self, path: Path, step: int, arrays: dict[str, dict[str, Any]]) -> None:
        for checkpointer in self._checkpointers:
            checkpointer.wait_until_finished()
        if jax.process_index() == 0:
            files: dict[str, str] = {}
            for stage in self._stages:
                files |= manifest.hash_part(path, stage.index)
            self._saved(step, arrays, files)
