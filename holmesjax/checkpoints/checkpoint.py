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
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.options import AsyncOptions

from holmesjax.checkpoints import digests, manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import ModelConfig
from holmesjax.errors import CheckpointError
from holmesjax.layers.kind import Parameter
from holmesjax.layers.model_layers import EMBED, layers
from holmesjax.models.layer import merged, split_trained, stated, statements
from holmesjax.runtime import spikes
from holmesjax.runtime.domain import Gate
from holmesjax.runtime.stage import Average, Dtypes, Stage, StageState

Arrays = dict[str, Any]  # key -> array, or its shape with a sharding
CHUNK_BYTES = 4 << 20  # of an array, that are written or read at a time
TIMEOUT_S = 1200  # of a save
MAX_SHOWN = 3  # arrays that differ, in a message


def key_of(path: tuple) -> str:
    """The name of an array of the state, from its path in the tree."""
    return ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def flatten(state: Any) -> Arrays:
    return {key_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def owned(stage: Stage, state: StageState) -> Arrays:
    """The arrays that a stage saves: all but a borrowed token table."""
    arrays = flatten(state)
    if stage.borrows_table:
        arrays = {key: x for key, x in arrays.items() if f".{EMBED}." not in key}
    return arrays


def restore(checkpoint: Checkpoint, stages: Sequence[Stage]) -> list[StageState]:
    """The states of all stages, whatever the plan that wrote them. Verify first.

    A state that was kept in another way, or in other dtypes, is read as it was, and kept in the
    stage's. Where the optimizer has none, as of imported weights, it begins anew.

    Raises:
      CheckpointError: it holds other arrays than the model has; nothing is read.
      DamagedError: an array cannot be read, or is not what was written.
    """
    model, settings = stages[0].model, checkpoint.settings["optimizer"]
    optimizer = stages[0].optimizer.as_written(settings)
    params, fixed = _param_shapes(model, _written(checkpoint))
    wide = jax.tree.map(lambda x: x.update(dtype="float32"), params)
    opt_state = jax.eval_shape(optimizer.init, wide) if _has_optimizer(checkpoint) else {}
    is_averaged = stages[0].ema_decay is not None and has_average(checkpoint)
    average = _average_shapes(wide) if is_averaged else None
    remembered = stages[0].spike_rule if _remembers(checkpoint, stages[0]) else None
    recent = remembered and jax.eval_shape(lambda: spikes.none_yet(remembered.window))
    _check_arrays(checkpoint, StageState(params, opt_state, fixed, average, recent))
    return [_restore_state(checkpoint, stage) for stage in stages]


def _has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether it has the state of an optimizer; that of imported weights has none."""
    return any(key.startswith("opt_state.") for key in checkpoint.manifest["arrays"])


def has_average(checkpoint: Checkpoint) -> bool:
    """Whether it has an average of the weights."""
    return any(key.startswith("average.") for key in checkpoint.manifest["arrays"])


def _remembers(checkpoint: Checkpoint, stage: Stage) -> bool:
    """Whether it has the steps that a stage's rule for spikes remembers, as many as they are."""
    saved = checkpoint.manifest["arrays"].get("recent.losses")
    rule = stage.spike_rule
    return saved is not None and rule is not None and saved["shape"] == [rule.window]


def _average_shapes(params: Any) -> Average:
    return Average(jax.ShapeDtypeStruct((), "int32"), params)


def _restore_state(checkpoint: Checkpoint, stage: Stage) -> StageState:
    written = stage.optimizer.as_written(checkpoint.settings["optimizer"])
    dtypes = _written(checkpoint)
    writer = dataclasses.replace(
        stage,
        optimizer=written,
        param_dtype=dtypes.trained,
        compute_dtype=dtypes.untrained,
        ema_decay=stage.ema_decay if has_average(checkpoint) else None,
        spike_rule=stage.spike_rule if _remembers(checkpoint, stage) else None,
    )
    shapes, own = writer.state_shapes, stage.state_shapes
    if not _has_optimizer(checkpoint):
        found = _restore_tree(checkpoint, {"params": shapes.params, "fixed": shapes.fixed})
        params, fixed = _cast(found["params"], own.params), _cast(found["fixed"], own.fixed)
        begun = stage.init_optimizer(params), fixed, stage.init_average(params)
        return StageState(params, *begun, stage.init_recent())
    state: StageState = _restore_tree(checkpoint, shapes)
    params, fixed = _cast(state.params, own.params), _cast(state.fixed, own.fixed)
    opt_state, average = state.opt_state, state.average or stage.init_average(params)
    if written != stage.optimizer:
        shardings = jax.tree.map(lambda x: x.sharding, own.opt_state)
        opt_state = jax.jit(stage.optimizer.adopt, out_shardings=shardings)(opt_state)
    recent = state.recent or stage.init_recent()
    return StageState(params, opt_state, fixed, average, recent)


def _cast(arrays: Any, shapes: Any) -> Any:
    """Arrays in the dtypes of others of the same layout; rounded to the nearest number."""

    def cast(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == like.dtype:
            return x
        found: jax.Array = jax.jit(lambda x: x.astype(like.dtype), out_shardings=like.sharding)(x)
        return found

    return jax.tree.map(cast, arrays, shapes)


Where = Callable[[str, Parameter], jax.sharding.Sharding | None]  # of a layer's parameter


def restore_params(
    checkpoint: Checkpoint, model: ModelConfig, where: Where | None = None, *, ema: bool = False
) -> Any:
    """The parameters of all layers; on the first device, or as `restore_layers` takes it."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = where or (lambda layer, parameter: here)
    return dict(restore_layers(checkpoint, model, where, ema=ema))


def restore_layers(
    checkpoint: Checkpoint,
    model: ModelConfig,
    where: Where | None = None,
    *,
    ema: bool = False,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """The parameters of one layer after the other. Verify first; raises as `restore`.

    Args:
      checkpoint: which has them.
      model: the model's settings.
      where: the sharding of a layer's parameter. None: it is NumPy's, which is in memory once.
      ema: whether what trains is read of the average of the weights.
      only: the layers that are read; None: all.
    """
    if ema and not has_average(checkpoint):
        raise CheckpointError(
            str(checkpoint.path),
            "has no average of the weights",
            found="a run without optimizer.ema_decay",
            fix="leave --ema out, or train with optimizer.ema_decay",
        )
    sharding_of = where or (lambda layer, parameter: None)
    written = _written(checkpoint)
    both = _param_shapes(model, written._replace(trained="float32") if ema else written)
    parameter_at = functools.partial(stated, statements(model))
    put = lambda path, x: x.update(sharding=sharding_of(path[0].key, parameter_at(path)))
    trained, fixed = (jax.tree_util.tree_map_with_path(put, tree) for tree in both)
    of_trained = {"average": _average_shapes(trained)} if ema else {"params": trained}
    _check_arrays(checkpoint, {**of_trained, "fixed": fixed})
    for layer in layers(model):
        if only is not None and layer not in only:
            continue
        own = {"fixed": {layer: fixed[layer]}} if layer in fixed else {"fixed": {}}
        here = {layer: trained[layer]}
        wanted = {"average": {"weights": here}} if ema else {"params": here}
        yield layer, _restore_layer(checkpoint, layer, {**wanted, **own})  # and is not kept here


def _restore_layer(checkpoint: Checkpoint, layer: str, wanted: dict[str, Any]) -> Any:
    found = _restore_tree(checkpoint, wanted)
    params = found["average"]["weights"] if "average" in found else found["params"]
    return merged(params[layer], found["fixed"].get(layer, {}))


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
      What `manifest.commit` takes: the arrays and the files.
    """
    path = manifest.begin(run_dir, 0)
    arrays: dict[str, dict[str, Any]] = {}
    files: manifest.Files = {}
    _silence_orbax()
    # An OCDBT would hold all bytes of a part until it is closed.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        for number, (layer, own) in enumerate(parameters):
            part = manifest.part_name(number)
            mine: Arrays = {}
            for parameter in layers(model)[layer].parameters:
                group = "params" if parameter.trains else "fixed"
                value = own.pop(parameter.name)
                key = ".".join((group, layer, *parameter.path))
                mine[key] = jax.device_put(value.astype(dtypes.of(parameter), copy=False))
                del value  # it is on the device
            arrays |= _described(mine, part)
            checkpointer.save(path / part, args=_in_chunks(mine), force=True)
            files |= manifest.files_of(path, number)
            mine.clear()  # before the next layer is made
            gc.collect()  # cycles of Orbax's hold the arrays, too
    return arrays, files


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


def _written(checkpoint: Checkpoint) -> Dtypes:
    """The dtypes in which a checkpoint has its parameters."""
    train = checkpoint.settings["train"]
    return Dtypes(train.get("param_dtype", "float32"), train["compute_dtype"])


def _param_shapes(model: ModelConfig, dtypes: Dtypes) -> tuple[dict, dict]:
    """The shapes of the parameters that train, and of those that do not."""
    shape = lambda own: jax.ShapeDtypeStruct(own.shape, dtypes.of(own))
    trained, fixed = split_trained(statements(model))
    return jax.tree.map(shape, trained), jax.tree.map(shape, fixed)


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
    for part in sorted(set(part_of.values())):
        arrays |= _read(checkpoint, part, {k: x for k, x in wanted.items() if part_of[k] == part})
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


def _read(checkpoint: Checkpoint, part: str, shapes: Arrays) -> Arrays:
    """Reads arrays of a part: onto devices, or where they have no sharding into NumPy's."""
    _silence_orbax()
    is_numpys = all(x.sharding is None for x in shapes.values())
    try:
        return (_read_numpys if is_numpys else _read_onto_devices)(checkpoint.path / part, shapes)
    except Exception as error:
        reason = _unread(error)
        if reason is None:
            raise
    # Reads that Orbax has abandoned would print a traceback each when Python ends.
    gc.collect()
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
            arrays |= _described(mine, part)
            with self._failing(step):
                checkpointer.save(path / part, args=_in_chunks(mine), force=True)
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


def _unread(error: Exception) -> str | None:
    """The reason why arrays cannot be read, or None for another error.

    Orbax tells what TensorStore could not read as the cause of a bare `Exception`.
    """
    cause = error.__cause__ if type(error) is Exception else error
    return _reason(cause) if isinstance(cause, OSError | ValueError) else None


def _reason(error: Exception) -> str:
    """In one line, without the chain of calls that TensorStore tells."""
    if number := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(number[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error).splitlines()[0]


@functools.cache
def _silence_orbax() -> None:
    """Keeps what is told in one line from being printed in hundreds, from now on.

    Orbax logs each error that it also raises. It abandons all other reads or writes with the first
    that fails: asyncio logs theirs, those that come back later find their loop closed or raise
    when they are collected, and some never began. It also warns of each save without OCDBT.
    """
    orbax, hook = str(Path(ocp.__file__).parent), sys.unraisablehook
    is_orbaxs = lambda r: r.levelno >= logging.ERROR and r.pathname.startswith(orbax)
    is_of_no_use = lambda r: "Skipping merge of OCDBT checkpoints" in r.getMessage()
    is_abandoned = lambda r: "exception was never retrieved" in r.getMessage()
    logging.getLogger("absl").addFilter(lambda r: not (is_orbaxs(r) or is_of_no_use(r)))
    logging.getLogger("asyncio").addFilter(lambda record: not is_abandoned(record))

    def tell(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        is_ours = code is None or not code.co_filename.startswith(orbax)
        if is_ours and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = tell
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
