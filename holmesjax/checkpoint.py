"""Checkpoints that do not know the plan.

    checkpoints/step_00000100/part_0/     what stage 0 wrote, by Orbax
                              part_1/     what stage 1 wrote
                              manifest.json

A part is a flat dict of arrays; a key is the array's path in the state (`params.block_003.up_DF`),
so it names the layer and never the stage, the mesh or the cluster. The manifest says which part
holds which array and has a SHA-256 of every file. It is written last: a folder without one is no
checkpoint. Orbax restores a flipped payload bit without an error, so the hashes are checked first.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from holmesjax.config import ModelConfig
from holmesjax.errors import CheckpointError
from holmesjax.models import gpt
from holmesjax.plan import EMBED, layer_names
from holmesjax.stage import Stage, StageState

FOLDER, MANIFEST, FORMAT = "checkpoints", "manifest.json", 1

Arrays = dict[str, Any]  # key -> array, or its shape with a sharding


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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One finished checkpoint on disk."""

    path: Path
    step: int  # optimizer steps done
    manifest: dict[str, Any]


def find(run_dir: str | Path) -> list[Checkpoint]:
    """Finished checkpoints of a run, newest first."""
    found = []
    folder = Path(run_dir).absolute() / FOLDER  # Orbax takes absolute paths only
    for path in folder.glob("step_*/" + MANIFEST):
        try:
            manifest = json.loads(path.read_text())
            step = manifest["step"]
        except (ValueError, KeyError, TypeError):
            step, manifest = int(path.parent.name.removeprefix("step_")), {}
        found.append(Checkpoint(path=path.parent, step=step, manifest=manifest))
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def verify(checkpoint: Checkpoint) -> None:
    """Raises unless every file is there with the bytes that were written."""
    fix = f"delete {checkpoint.path} and resume: an older checkpoint is used"
    manifest = checkpoint.manifest
    if manifest.get("format") != FORMAT or manifest.get("sha256") != _manifest_sha256(manifest):
        raise CheckpointError(
            str(checkpoint.path / MANIFEST),
            f"is damaged, or not of format {FORMAT}",
            found=f"format {manifest.get('format')!r}, SHA-256 {manifest.get('sha256')!r}",
            fix=fix,
        )
    for name, sha256 in manifest["files"].items():
        path = checkpoint.path / name
        if not path.is_file():
            raise CheckpointError(str(path), "is missing", found="no such file", fix=fix)
        if (found := _sha256(path)) != sha256:
            raise CheckpointError(
                str(path), f"is damaged: its SHA-256 should be {sha256}", found=found, fix=fix
            )


def check_model(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Raises if the checkpoint is of another model, with the fields that differ."""
    saved, wanted = checkpoint.manifest["model"], dataclasses.asdict(model)
    if differ := [name for name in wanted if saved.get(name) != wanted[name]]:
        raise CheckpointError(
            str(checkpoint.path),
            "is of another model: " + ", ".join(f"model.{name}" for name in differ),
            found=", ".join(
                f"{name}={saved.get(name)} (config: {wanted[name]})" for name in differ
            ),
            fix="use the model's own settings, or another run.dir",
        )


def restore(checkpoint: Checkpoint, stages: Sequence[Stage]) -> list[StageState]:
    """The states of all stages, whatever the plan that wrote them. Verify first."""
    return [_restore_tree(checkpoint, stage.state_shapes) for stage in stages]


def restore_params(checkpoint: Checkpoint, model: ModelConfig) -> Any:
    """The parameters of all layers, on the first device. Verify first."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = {layer: gpt.param_shapes(layer, model) for layer in layer_names(model.num_layers)}
    shapes = {"params": jax.tree.map(lambda x: x.update(sharding=here), params)}
    return _restore_tree(checkpoint, shapes)["params"]


def _restore_tree(checkpoint: Checkpoint, shapes: Any) -> Any:
    """Reads every array of a tree of shapes from the part that has it, with its sharding."""
    wanted, part_of = flatten(shapes), checkpoint.manifest["arrays"]
    arrays: Arrays = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for part in sorted({part_of[key] for key in wanted}):
            here = {key: x for key, x in wanted.items() if part_of[key] == part}
            args = ocp.args.PyTreeRestore(
                item=here,
                restore_args=ocp.checkpoint_utils.construct_restore_args(here),
                partial_restore=True,
            )
            arrays |= checkpointer.restore(checkpoint.path / part, args=args)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[key] for key in wanted])


class Writer:
    """Writes checkpoints of one run in the background; a context manager.

    `save` returns when the arrays are on the host. At most one checkpoint is being written: a
    second `save` waits for the first, and raises what went wrong with it.
    """

    def __init__(
        self, run_dir: str | Path, *, model: ModelConfig, plan_hash: str, keep: int, num_parts: int
    ):
        self._folder = Path(run_dir).absolute() / FOLDER
        self._about = {
            "format": FORMAT,
            "model": dataclasses.asdict(model),
            "plan_hash": plan_hash,
        }
        self._keep = keep
        self._checkpointers = [
            ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) for _ in range(num_parts)
        ]
        self._committer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None
        self._remove_unfinished()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            for checkpointer in self._checkpointers:
                checkpointer.close()

    def save(self, step: int, stages: Sequence[Stage], states: Sequence[StageState]) -> None:
        """Starts to write the state after `step` optimizer steps."""
        self.wait()
        path = self._folder / f"step_{step:08d}"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        part_of: dict[str, str] = {}
        for i, (stage, state) in enumerate(zip(stages, states, strict=True)):
            arrays = owned(stage, state)
            part_of |= dict.fromkeys(arrays, f"part_{i}")
            self._checkpointers[i].save(path / f"part_{i}", args=ocp.args.PyTreeSave(arrays))
        manifest = {**self._about, "step": step, "arrays": part_of}
        self._pending = self._committer.submit(self._commit, path, manifest)

    def wait(self) -> None:
        """Returns when the last save is complete; raises if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, ValueError) as error:  # what Orbax raises for a full disk is a ValueError
            raise CheckpointError(
                str(self._folder),
                "a checkpoint could not be written",
                found=str(error).splitlines()[0],
                fix="free space or choose another run.dir, then resume from the last checkpoint",
            ) from error

    def _commit(self, path: Path, manifest: dict[str, Any]) -> None:
        for checkpointer in self._checkpointers:
            checkpointer.wait_until_finished()
        files = sorted(file for file in path.rglob("*") if file.is_file())
        manifest["files"] = {file.relative_to(path).as_posix(): _sha256(file) for file in files}
        manifest["sha256"] = _manifest_sha256(manifest)
        _write_durably(path / MANIFEST, json.dumps(manifest, indent=1))
        for old in find(self._folder.parent)[self._keep :]:
            (old.path / MANIFEST).unlink()  # first: a half-deleted folder is no checkpoint
            shutil.rmtree(old.path)

    def _remove_unfinished(self) -> None:
        """What a crash has left behind."""
        for path in self._folder.glob("step_*"):
            if not (path / MANIFEST).exists():
                shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_sha256(manifest: dict[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_durably(path: Path, text: str) -> None:
    """After a crash the file is either absent or whole."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
