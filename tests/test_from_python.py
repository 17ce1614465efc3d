"""The code of the page about Python trains: its loop and its callbacks, to the same bits."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax import Callback, Trainer
from holmesjax.callbacks import CallbackError, Callbacks
from holmesjax.checkpoints import digests, manifest, restoring
from holmesjax.config import CHECKOUT
from holmesjax.errors import ConfigError, PlanError
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
    return {name: facts["digest"] for name, facts in arrays.items()}


@pytest.mark.one_version
def test_the_code_of_the_page_trains_to_the_same_bits(tmp_path, capsys, monkeypatch):
    """The loop is left after step 3, and its code goes on to step 4 when it runs again.

    It has no callbacks, and the run with callbacks asks for no steps: neither changes a bit.
    """
    monkeypatch.chdir(CHECKOUT)
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
    whole, plain = saved(tmp_path / "loop", 4), metrics.read(tmp_path / "loop")

    assert f"after step 4 is in {manifest.folder_of(tmp_path / 'norms', 4)}" in run(CALLBACKS)
    assert saved(tmp_path / "norms", 4) == whole
    trainer, records = space["trainer"], metrics.read(tmp_path / "norms")
    assert [r["loss"] for r in records] == [r["loss"] for r in plain]
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
    for verb in (["compare"], ["top", "--once"]):
        assert main([*verb, str(tmp_path / "norms")]) == 0
        shown = capsys.readouterr().out
        for name in ("head_norm", "perplexity"):
            assert re.search(rf"{name}\b.* {records[3][name]:.4g}\b", shown)

    shown = run(PLAN)
    assert main(["plan", RUN, f"run.dir={tmp_path / 'norms'}"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(shown)
    assert told[len(shown) :].startswith("resume ")  # the command looks into the run folder, too
    assert "finds a step of" in shown  # without what the run sets
    lines = (CHECKOUT / RUN).read_text().splitlines()
    set_at = [str(lines.index(setting) + 1) for setting in ("  tensor: 2", "  schedule: 1f1b")]
    assert re.search(rf"to change: {RUN}, lines {set_at[0]}, \d+, {set_at[1]}\n", shown)

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


def gone():
    """An array whose memory a step has taken."""
    array = jnp.ones([])
    array.delete()
    return array


@pytest.mark.parametrize(
    "value, expected",
    [(2, 2.0), (True, 1.0), (jnp.bfloat16(0.5), 0.5), (np.ones([1, 1]), 1.0)]
    + [(value, None) for value in ("3", None, 1j, 10**400, np.ones(2), [1, [2]], gone())],
    ids=lambda value: type(value).__name__,
)
def test_a_number_of_ones_own_is_one_real_number(value, expected):
    class UsersNumber(Callback):
        def after_step(self, trainer, step, numbers):
            return {"mine": value}

    number = Callbacks(callbacks=[UsersNumber()]).after_step(1, {})["mine"]
    if expected is None:
        with pytest.raises(CallbackError, match=r"UsersNumber.after_step: 'mine' must be a number"):
            float(number)
    else:
        assert float(number) == expected


@pytest.mark.parametrize(
    "found, told",
    [({name: 1.0}, "short name") for name in ("", " a", "a\n", "\x1b[31m", "\ud800", "a" * 101)]
    + [([1.0], "numbers by name"), ({1: 1.0}, "numbers by name"), (1 / 3, "numbers by name")],
    ids=range(9),
)
def test_names_of_ones_own_are_short_and_readable(found, told):
    class UsersNumber(Callback):
        def after_step(self, trainer, step, numbers):
            return found

    with pytest.raises(CallbackError, match=told):
        Callbacks(callbacks=[UsersNumber()]).after_step(1, {})


def test_callbacks_change_no_number_of_a_step_and_share_no_name():
    class Clears(Callback):
        def after_step(self, trainer, step, numbers):
            numbers.clear()

    with pytest.raises(CallbackError, match="AttributeError"):
        Callbacks(callbacks=[Clears()]).after_step(1, {"loss": 1.0})
    twice = [type(name, (Callback,), {"after_step": lambda *_: {"norm": 1.0}})() for name in "ab"]
    with pytest.raises(CallbackError, match=r"b\.after_step: gives a number that another"):
        Callbacks(callbacks=twice).after_step(1, {})


@pytest.mark.parametrize(
    "arguments",
    [{"callbacks": argument} for argument in (Keeper(), Keeper, [Keeper], [print], "Keeper", 5)]
    + [{"overrides": 5}, {"overrides": [5]}, {"stream": "out.txt"}, {"source": None}],
    ids=range(10),  # the text of an object has its address, which differs between processes
)
def test_an_argument_of_another_type_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"\n  fix: "):
        Trainer(**{"source": RUN, "overrides": SMALL, **arguments})


NODES = """
name: two_nodes
clusters:
  - name: a
    fabric: infiniband
    nodes: 2
    devices: {kind: h100, count: 1}
    nics: [{kind: infiniband_400}]
"""


def test_a_plan_on_several_nodes_of_gpus_wants_a_launcher(tmp_path):
    """It is planned and shown in any process."""
    (tmp_path / "nodes.yaml").write_text(NODES)
    settings = {**SMALL, "run.dir": tmp_path / "run", "topology": tmp_path / "nodes.yaml"}
    settings |= {"run.rehearse": False, "parallel": {"data": 2, "tensor": 1, "schedule": None}}
    trainer = Trainer(CHECKOUT / RUN, settings)
    assert "a-0, a-1" in str(trainer.plan)
    with pytest.raises(
        PlanError, match=r"a plan on 2 nodes: a-0, a-1\n.*launch train .*--launcher"
    ):
        trainer.train()


def test_a_stage_with_several_chunks_has_the_layers_of_all():
    chunks = (("embed", "block_000"), ("block_002",)), (("block_001",), ("block_003", "head"))
    plan = SimpleNamespace(
        stages=[
            SimpleNamespace(cluster=str(i), layers=sum(layers, ()))
            for i, layers in enumerate(chunks)
        ],
        chunks=[(s, layers[c]) for c in (0, 1) for s, layers in enumerate(chunks)],
    )
    found = [
        SimpleNamespace(plan=plan, index=i, mesh=s, before=0)
        for i, (s, _) in enumerate(plan.chunks)
    ]
    trees = [{layer: {"w": layer} for layer in layers} for _, layers in plan.chunks]
    trees[3] |= {"embed": {"w": "a copy"}}  # of a tied table
    frozen = [{layer: {"v": f"frozen {layer}"} for layer in layers} for _, layers in plan.chunks]
    states = [
        ChunkState(*parts)
        for parts in zip(trees, [(7, tree) for tree in trees], frozen, strict=True)
    ]
    first, second = stage_arrays.of(found, states)
    assert [arrays.mesh for arrays in (first, second)] == [0, 1]
    whole = {
        layer: {"w": layer, "v": f"frozen {layer}"} for layer in (*first.layers, *second.layers)
    }
    assert first.params == {layer: whole[layer] for layer in first.layers}
    assert second.opt_state[1].keys() == {*second.layers, "embed"}
    assert stage_arrays.union([first.params, second.params]) == whole
