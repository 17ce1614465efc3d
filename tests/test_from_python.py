"""The code of the page about Python trains, bit for bit as a plain run does."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from holmesjax import Callback, Trainer
from holmesjax.checkpoints import digests, manifest, restoring
from holmesjax.config import CHECKOUT
from holmesjax.report import metrics
from holmesjax.runtime import stage_arrays
from holmesjax.runtime.chunk import ChunkState
from launch.__main__ import main

PAGE = (CHECKOUT / "docs/from_python.md").read_text()
LOOP, CALLBACKS, PLAN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RUN = "configs/runs/quickstart.yaml"
SMALL = {
    "train.steps": 4,
    "train.eval_every": 4,
    "train.eval_batches": 1,
    "model.num_layers": 2,
    "model.width": 16,
    "model.context_length": 32,
    "log.report": False,
    "log.tensorboard": True,
}


class Keeper(Callback):
    """Keeps the parameters before step 2, and what they were."""

    def before_step(self, trainer, step):
        if step == 2:
            self.kept = trainer.params
            self.copy = jax.device_get(self.kept)
            self.shardings = trainer.stages[1].shardings

    def after_step(self, trainer, step, numbers):
        return {"own/loss": numbers["loss"], "own/rate": numbers["learning_rate"]}


def saved(run_dir, step):
    """The digests of all arrays of a checkpoint."""
    arrays = manifest.at(manifest.folder_of(run_dir, step)).manifest["arrays"]
    return {name: own["digest"] for name, own in arrays.items()}


def test_the_code_of_the_page_trains_as_a_plain_run(tmp_path, capsys, monkeypatch):
    """The loop is left after step 3, and its code goes on to step 4 when it runs again."""
    monkeypatch.chdir(CHECKOUT)
    plain = Trainer(RUN, {**SMALL, "run.dir": tmp_path / "plain"}).train()
    whole = saved(tmp_path / "plain", 4)
    keeper = Keeper()
    space = {"SMALL": SMALL, "keeper": keeper}

    def run(code):
        for old, new in {
            '"train.steps": 40': "**SMALL",
            '"runs/': f'"{tmp_path}/',
            "% 10 == 5": "== 2",
            'record["loss"] < 2.0': 'record["step"] == 3',
            "[Norms()]": "[Norms(), keeper]",
        }.items():
            code = code.replace(old, new)
        capsys.readouterr()
        exec(code, space)
        return capsys.readouterr().out

    assert "resuming" not in run(LOOP)
    assert [step for step, _ in manifest.finished(tmp_path / "loop")] == [2, 3]
    assert "resuming after step 3" in run(LOOP)
    assert saved(tmp_path / "loop", 4) == whole

    assert f"after step 4 is in {manifest.folder_of(tmp_path / 'norms', 4)}" in run(CALLBACKS)
    assert saved(tmp_path / "norms", 4) == whole
    trainer, records = space["trainer"], metrics.read(tmp_path / "norms")
    for own in (metrics.read(tmp_path / "loop"), records):
        assert [r["loss"] for r in own] == [r["loss"] for r in plain]
    state = {"params": trainer.params, "opt_state": trainer.opt_state}
    assert digests.of(restoring.flatten(jax.device_get(state))) == whole
    assert np.isclose(records[3]["head_norm"], np.linalg.norm(state["params"]["head"]["output_DV"]))
    for record in records:
        assert record["own/loss"] == record["loss"]
        assert record["own/rate"] == record["learning_rate"]
    assert len({record["head_norm"] for record in records}) == 4
    assert records[3]["perplexity"] == pytest.approx(np.exp(plain[3]["val_loss"]))
    [events] = (tmp_path / "norms/tensorboard").glob("*")
    assert b"head_norm" in events.read_bytes()

    shown = run(PLAN)
    assert main(["plan", RUN, f"run.dir={tmp_path / 'norms'}"]) == 0
    assert shown == capsys.readouterr().out
    assert "finds a step of" in shown  # without what the run sets

    initial = keeper.kept["head"]["output_DV"]
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(initial)
    stages = trainer.stages
    assert trainer.mesh == (stages[0].mesh, stages[1].mesh)
    assert keeper.shardings == stages[1].shardings
    for stage, planned in zip(stages, trainer.job.plan.stages, strict=True):
        assert {where.mesh for where in jax.tree.leaves(stage.shardings)} == {stage.mesh}
        assert {*stage.params} == {*stage.layers} == {*planned.layers}
        numbers = [[device.id for device in stage.mesh.devices.flat], [*planned.devices]]
        assert numbers[0] == numbers[1]


def test_a_stage_with_several_chunks_has_the_layers_of_all():
    chunks = (("embed", "block_000"), ("block_002",)), (("block_001",), ("block_003", "head"))
    plan = SimpleNamespace(
        stages=[
            SimpleNamespace(cluster=str(i), layers=sum(own, ())) for i, own in enumerate(chunks)
        ],
        chunks=[(s, own[c]) for c in (0, 1) for s, own in enumerate(chunks)],
    )
    found = [SimpleNamespace(plan=plan, index=i, mesh=s) for i, (s, _) in enumerate(plan.chunks)]
    trees = [{layer: {"w": layer} for layer in own} for _, own in plan.chunks]
    trees[3] |= {"embed": {"w": "a copy"}}  # of a tied table
    frozen = [{layer: {"v": f"frozen {layer}"} for layer in own} for _, own in plan.chunks]
    states = [
        ChunkState(*own) for own in zip(trees, [(7, own) for own in trees], frozen, strict=True)
    ]
    first, second = stage_arrays.of(found, states)
    assert [own.mesh for own in (first, second)] == [0, 1]
    whole = {
        layer: {"w": layer, "v": f"frozen {layer}"} for layer in (*first.layers, *second.layers)
    }
    assert first.params == {layer: whole[layer] for layer in first.layers}
    assert second.opt_state[1].keys() == {*second.layers, "embed"}
    assert stage_arrays.union([first.params, second.params]) == whole
