"""Checkpoints of given states, and damages to them."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from holmesjax.checkpoints import manifest, restoring, writing
from holmesjax.checkpoints.committing import Saves
from holmesjax.checkpoints.retention import Retention
from holmesjax.config import CheckpointConfig, DataConfig
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model

PLANS = {
    "two": hand_made_plan((3, 1), 2, 2),
    "one": hand_made_plan((4,), 2, 1, fsdp=2, context=2),
    "four": hand_made_plan((1, 1, 1, 1), 1, 2),
    "three": hand_made_plan((1, 2, 1), (2, 1, 1), 1, fsdp=(1, 4, 2)),
    "experts in four": hand_made_plan((4,), 1, 2, expert=4),
    "experts in two": hand_made_plan((1, 3), (2, 1), 1, fsdp=(1, 2), expert=2),
}


# Tests of files and folders need few arrays, and a save of few arrays is quick.
SMALL = make_model(num_layers=1)


def random_states(chunks):
    """States with no two equal numbers where they may differ: every leaf by its key."""

    def fill(chunk):
        def leaf(key, shape):
            seed = [ord(c) for c in key]
            value = np.random.default_rng(seed).normal(size=shape.shape).astype(shape.dtype)
            return jax.device_put(value, shape.sharding)

        flat = restoring.flatten(chunk.state_shapes)
        leaves = [leaf(key, shape) for key, shape in flat.items()]
        return jax.tree.unflatten(jax.tree.structure(chunk.state_shapes), leaves)

    return [fill(chunk) for chunk in chunks]


def retention(run_dir, keep=2, hours=None, warn=print, move=Path.rename):
    return Retention(run_dir, CheckpointConfig(keep=keep, keep_every_hours=hours), move, warn)


def write(run_dir, model=SMALL, name=None, steps=(10,), keep=2):
    plan = PLANS[name] if name else hand_made_plan((model.num_layers,), 1, 1)
    return write_states(run_dir, model, make_chunks(model, plan), steps, keep)


def write_states(run_dir, model, chunks, steps, keep=2, states=()):
    """Checkpoints with the same states after each of these steps; random ones if none are given.

    Returns the lines that are said of them. Raises PeerError if the last cannot be written.
    """
    said = []

    def commit(step, arrays, files):
        data, config = DataConfig(corpus="x"), chunks[0].optimizer.config
        sections = {"model": model, "data": data, "optimizer": config}
        dtypes = {name: getattr(chunks[0], name) for name in ("param_dtype", "compute_dtype")}
        text = manifest.describe(
            step,
            sequences=8 * step,
            settings={name: dataclasses.asdict(section) for name, section in sections.items()}
            | {"train": dtypes},
            data={},
            plan_hash="x",
            arrays=arrays,
            files=files,
        )
        manifest.commit(run_dir, step, text)

    states = states or random_states(chunks)
    retention(run_dir).after_start()
    saves = Saves(run_dir, 1, commit, retention(run_dir, keep), said.append)
    with writing.Writer(run_dir, chunks, saves.saved, saves.failed) as writer:
        for step in steps:
            writer.save(step, states)
    saves.check(at_end=True)
    return said


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage(run_dir, step):
    """Flips a byte of the largest file of a checkpoint."""
    files = [p for p in manifest.folder_of(run_dir, step).rglob("*") if p.is_file()]
    flip_a_byte(max(files, key=lambda path: path.stat().st_size))


def folders(run_dir):
    return sorted(path.name for path in (run_dir / manifest.FOLDER).iterdir())
