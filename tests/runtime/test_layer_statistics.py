"""Norms by kind of layer equal those of one device, on any plan."""

import dataclasses
import io

import jax
import numpy as np
import pytest

from holmesjax import job as jobs
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import init_params
from holmesjax.runtime.layer_statistics import names, of_small_batch
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.timeline import Clock
from holmesjax.trainer import Trainer
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.jobs import write_run
from tests.one_device import SEED, activations, loss_and_gradient, step_inputs
from tests.versions import rows

MODEL = make_model(num_layers=2, tied_embeddings=True)


def wanted(inputs):
    params = init_params(MODEL, SEED)
    _, gradients = loss_and_gradient(params, MODEL, inputs, False)
    squares = {"grad_norm": {}, "param_norm": {}, "activation_rms": {}}
    arrays = {"token_BL": inputs["token_BL"], "position_L": np.arange(16, dtype=np.int32)}
    given = iter(activations(params, MODEL, arrays))
    for layer, kind in layers(MODEL).items():
        for name, tree in (("grad_norm", gradients), ("param_norm", params)):
            own = sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(tree[layer]))
            squares[name].setdefault(kind.name, []).append(own)
        if kind.place != "last":
            own = np.mean(np.square(np.asarray(next(given))))
            squares["activation_rms"].setdefault(kind.name, []).append(own)
    join = {"grad_norm": np.sum, "param_norm": np.sum, "activation_rms": np.mean}
    return {
        f"{name}/{kind}": np.sqrt(join[name](sums))
        for name, kinds in squares.items()
        for kind, sums in kinds.items()
    }


@pytest.mark.parametrize(
    "plan",
    rows(
        {
            "one program": hand_made_plan((2,), 2, 2, fsdp=2, microbatches=2, checkpointing="full"),
            "two stages": hand_made_plan((1, 1), 2, 1, microbatches=4),
        }
    ),
)
def test_norms_by_kind_are_those_of_one_device(plan):
    """Those of a small batch of several stages are of its microbatches alone."""
    chunks = [dataclasses.replace(s, has_statistics=True) for s in make_chunks(MODEL, plan)]
    ramps = len(plan.stages) > 1
    runner = make_runner(plan, chunks, ramps=ramps)
    inputs = step_inputs(plan.global_batch, 1)  # in which few targets count
    _, metrics = train_step(runner, runner.init(SEED), inputs)
    want = wanted(inputs)
    assert set(names(MODEL)) == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    norms = [float(metrics[name]) for name in want if name.startswith("grad_norm/")]
    np.testing.assert_allclose(np.linalg.norm(norms), metrics["grad_norm"], rtol=1e-5)
    if ramps:
        inputs = step_inputs(plan.global_batch // 4, 0)
        host = {name: inputs[name] for name in runner.placer.names}
        placed = runner.placer.place(host, inputs["target_BL"].size, num_microbatches=1)
        with Clock(len(plan.stages)) as clock:
            _, metrics = runner.train_step(runner.init(SEED), placed, clock.timeline())
        want = wanted(inputs)
        found = of_small_batch({name: float(metrics[name]) for name in want}, 1 / 4)
        for name, value in want.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.one_version
def test_a_run_whose_batch_grows_records_the_norms_of_each_batch(tmp_path):
    """Its first step is that of a run with the small batch."""
    records = []
    for name, settings in {
        "grows": ["train.rampup=[{steps: 1, global_batch: 4}]", "parallel.microbatches=2"],
        "small": ["train.global_batch=4", "parallel.microbatches=1"],
    }.items():
        run_file = write_run(tmp_path, {"a": (1,)}, name=name)
        small = ["train.steps=2", "model.num_layers=2", "model.width=16", "log.statistics=true"]
        records.append(Trainer(run_file, [*small, *settings], io.StringIO()).train())
    grows, small = ({k: v for k, v in lines[0].items() if "/" in k} for lines in records)
    assert (
        grows.keys() == small.keys() == set(names(jobs.load_saved(tmp_path / "small").config.model))
    )
    for name, value in small.items():
        np.testing.assert_allclose(grows[name], value, rtol=1e-5, err_msg=name)
    assert not np.isclose(
        records[0][1]["activation_rms/block"], records[1][1]["activation_rms/block"]
    )
