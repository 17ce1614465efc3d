"""The family of docs/extending_models.md is added as it stands there, and computes what it says."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax import job
from holmesjax.config import CHECKOUT, files
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import apply, init_params
from tests.models.family_oracle import attend, gelu_tanh, layer_norm, plain_frequencies, rotate

MODULE, PRESET = "parallel_family", "parallel_small"
RUN = """\
topology: configs/topologies/ib_roce.yaml
run: {dir: runs/family}
model: {preset: parallel_small}
data: {corpus: python-stdlib}
train: {steps: 2, global_batch: 8}
optimizer: {learning_rate: 1e-3}
parallel: {microbatches: 2, schedule: 1f1b, stages: 2}
"""


def blocks_of_the_page():
    """The module and the preset."""
    page = (CHECKOUT / "docs/extending_models.md").read_text()
    section = page.split("## Add a family")[1].split("\n## ")[0]
    [module] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [preset] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    return module, preset


def logits(params, model, tokens):
    """The forward pass in float64."""
    x = params["embed"]["token_VD"][tokens]
    frequencies = plain_frequencies(1e4, model.head_width // 2)
    for p in (params[f"block_{i:03d}"] for i in range(model.num_layers)):
        h = layer_norm(x, p["attention_norm"]["scale_D"], p["attention_norm"]["bias_D"], 1e-5)
        weights = (("query_DHK", "query_HK"), ("key_DGK", "key_GK"), ("value_DGK", "value_GK"))
        q, k, v = (np.einsum("ld,dhk->lhk", h, p[w]) + p[b] for w, b in weights)
        q, k = (rotate(x, frequencies) for x in (q, k))
        out = attend(q, k, v, model.head_width**-0.5) @ p["out_HKD"].reshape(-1, model.width)
        hidden = gelu_tanh(h @ p["up_DF"] + p["up_F"])
        x = x + out + p["out_D"] + hidden @ p["down_FD"] + p["down_D"]
    last = params["head"]["norm"]
    return layer_norm(x, last["scale_D"], last["bias_D"], 1e-5) @ params["head"]["output_DV"]


def test_the_page_adds_a_family(tmp_path, monkeypatch):
    module, preset = blocks_of_the_page()
    assert len((module + preset).splitlines()) < 60
    (tmp_path / f"{MODULE}.py").write_text(module)
    folder = tmp_path / "configs/models"
    folder.mkdir(parents=True)
    (folder / f"{PRESET}.yaml").write_text(preset)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)
    found = job.load(tmp_path / "run.yaml")
    assert len(found.plan.stages) == 2
    model = found.config.model
    count = sum(kind.size() for kind in layers(model).values())
    assert f"{PRESET}.yaml: {count:,} parameters" in preset
    rng = np.random.default_rng(0)
    random = lambda x: np.float32(x + 0.1 * rng.standard_normal(x.shape))  # biases too
    params = jax.tree.map(random, init_params(model, 0))
    tokens = rng.integers(256, size=24)
    x = None
    for layer in layers(model):
        arrays = {"token_BL": jnp.asarray(tokens)[None], "position_L": jnp.arange(24)}
        x, _ = apply(layer, model, params[layer], x, **arrays)
    wide = jax.tree.map(np.float64, params)
    np.testing.assert_allclose(x[0], logits(wide, model, tokens), atol=2e-5)
