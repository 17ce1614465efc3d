"""The modules of the pages about models of your own train, with the losses of their layers."""

import importlib
import io
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from holmesjax import config as configs
from holmesjax.config import TABLE
from holmesjax.data.batches import model_inputs
from holmesjax.errors import ConfigError, DataError
from holmesjax.layer_specs.model_layers import EMBED, HEAD, forget, layers
from holmesjax.models.layer import keys_of
from holmesjax.models.own_model import Random, layers_of
from holmesjax.trainer import Trainer
from holmesjax.training_setup import read_batches
from tests.jobs import ROOT, write_run
from tests.own_model_steps import initial

PAGE = "".join(path.read_text() for path in sorted(ROOT.glob("docs/your_own_*.md")))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMED = [re.match(r"# (\w+)\.py\n+(.*)", block, re.DOTALL) for block in BLOCKS]
MODULES = dict(named.groups() for named in NAMED if named)
SMALL = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.width=8",
    "train.steps=2",
    "parallel.microbatches=1",
    "run.rehearse=true",
)
ONE = "parallel.clusters=[a]"
of_arrays = lambda name, length: (
    "data.source=arrays",
    f"data.corpus='{name}'",
    f"model.context_length={length}",
)
RUNS = {
    "my_functions:my_model": (
        "optimizer.name=optax",
        "optimizer.function='my_optimizer:sign_of_momentum'",
    ),
    "my_dropout:my_model": ("model.tied_embeddings=true",),
    "my_flax:my_model": ("train.compute_dtype=bfloat16", ONE),
    "my_images:my_model": (
        *of_arrays("my_images:images", 16),
        "optimizer.name=optax",
        "optimizer.function='my_schedule:with_restarts'",
    ),
    "my_losses:masked": (*of_arrays("my_losses:answers", 8), ONE),
    "my_losses:distilled": (*of_arrays("my_losses:teacher", 8), ONE),
    "my_losses:preferred": (*of_arrays("my_losses:pairs", 16), ONE),
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The modules of the page can be imported. The devices of the session are up before a run."""
    jax.devices()
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget()
    for name in MODULES:
        sys.modules.pop(name, None)


def plain_loss(config):
    """The loss of the first batch, by the layers one after the other."""
    batches, kinds = read_batches(config), layers(config.model)
    rows = batches.train(0)
    names = [array.name for kind in kinds.values() for array in kind.reads]
    batch = {name: jnp.asarray(x) for name, x in model_inputs(rows, names).items()}
    params, own = initial(config.model, config.train.seed), layers_of(config.model)
    reads = lambda layer: [batch[array.name] for array in kinds[layer].reads]
    x = own[EMBED].apply(params[EMBED], *reads(EMBED))
    numbers = jnp.arange(config.train.global_batch)
    for layer in list(kinds)[1:-1]:
        key_Bk = keys_of(config.train.seed, layer, numbers)
        random = [Random(key_Bk, jnp.array(True))] if own[layer].draws else []
        x = own[layer].apply(params[layer], x, *random)
    borrowed = {TABLE: params[EMBED]["token_VD"]} if config.model.tied_embeddings else {}
    losses = own[HEAD].loss(own[HEAD].apply(params[HEAD] | borrowed, x), *reads(HEAD))
    return float(jnp.sum(losses) / rows.num_targets)


@pytest.mark.parametrize(
    "name, settings",
    [
        # Flax is a package of its own; the others are further models of functions.
        pytest.param(
            *(name, settings),
            id=name,
            marks=[]
            if name in ("my_functions:my_model", "my_flax:my_model")
            else [pytest.mark.one_version],
        )
        for name, settings in RUNS.items()
    ],
)
def test_a_model_of_the_page_trains(page, name, settings):
    module, function = name.split(":")
    run_file = write_run(page, {"a": (1,), "b": (1,)})
    model = getattr(importlib.import_module(module), function)
    trainer = Trainer(run_file, [*SMALL, *settings], io.StringIO(), model=model)
    assert len(trainer.job.plan.stages) == (1 if ONE in settings else 2)
    losses = [record["loss"] for record in trainer.train()]
    config = trainer.job.config
    rtol = 1e-5 if config.train.compute_dtype == "float32" else 2e-2
    assert losses[0] == pytest.approx(plain_loss(config), rel=rtol)
    assert losses[1] != losses[0]


def test_data_without_an_array_that_a_layer_reads_is_refused(page):
    run_file = write_run(page, {"a": (1,)})
    module = "model.module='my_losses:masked'"
    config = configs.load(run_file, [*SMALL, module, *of_arrays("my_losses:teacher", 8)])
    with pytest.raises(DataError, match=r"has no mask \[8\] of float32.*\n  found: tokens \[8\]"):
        read_batches(config)
    config = configs.load(run_file, [*SMALL, module, "model.context_length=8"])
    with pytest.raises(DataError, match=r"has no tokens \[8\] .*\n  found: token_BL \[8\]"):
        read_batches(config)


@pytest.mark.parametrize(
    "function, message",
    [
        ("nothing:x", r"give a transformation of optax\n  found: nothing:x: ModuleNotFoundError"),
        ("builtins:len", r"give a transformation of optax\n  found: builtins:len: TypeError"),
        (
            "tests.own_models:rows",
            r"is not elementwise: .*\n  found: tests.own_models:rows: \(3,\)",
        ),
        ("tests.own_models:sophia", "found: tests.own_models:sophia: .*obj_fn"),
        ("tests.own_models:two_rates", "found: tests.own_models:two_rates: .*one number"),
        ("tests.own_models:schedule_inside", "has a schedule inside of its transformation"),
        ("tests.own_models:schedule_injected", "has a schedule inside of its transformation"),
    ],
)
def test_a_function_that_is_no_optimizer_is_refused(tmp_path, function, message):
    settings = ["optimizer.name=optax", f"optimizer.function='{function}'", "run.rehearse=true"]
    with pytest.raises(ConfigError, match=message):
        Trainer(write_run(tmp_path, {"a": (1,)}), settings)
