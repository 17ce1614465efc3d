"""Adapters in PEFT's format against its own formula, W + s B A, on Hugging Face's tensors."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holmesjax.config import LoraConfig, LoraPattern
from holmesjax.errors import CheckpointError, ConfigError
from holmesjax.hugging_face import export, folder, peft
from holmesjax.hugging_face.config_families import FAMILIES
from holmesjax.layer_specs import lora
from holmesjax.layer_specs.model_layers import layers
from tests.hugging_face.families import CONFIGS, model_of, tensors_of, write_config

MODULES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
FUSED = {
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "phi3": ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"],
}
CASES = {
    # No expert has adapters.
    **{
        family: (family, FUSED.get(family, MODULES), {})
        for family in CONFIGS
        if not FAMILIES[family].experts
    },
    "gpt2, one of two maps of a name": ("gpt2", ["attn.c_proj"], {"targets": ("out",)}),
    "unlike numbers": (
        "llama",
        ["k_proj", "q_proj", "v_proj"],
        {
            "patterns": (
                LoraPattern(maps="block_001/q_proj", rank=4),
                LoraPattern(maps="v_proj", rank=2, alpha=7.0),
            )
        },
    ),
    "rslora": ("llama", ["q_proj", "v_proj"], {"use_rslora": True, "targets": ("query", "value")}),
}


def model_with(family, modules, changes):
    settings = {"rank": 3, "alpha": 5.0, "targets": tuple(modules), **changes}
    return dataclasses.replace(model_of(family), lora=LoraConfig(**settings))


def random_layers(model, weights):
    """The weights of a folder, and adapters that are not zero."""
    random = np.random.default_rng(0)
    for layer, kind in layers(model).items():
        own = {name: weights.read(layer, name) for name in weights.places[layer]}
        for parameter in kind.parameters:
            if parameter.trains:
                values = random.standard_normal(parameter.shape) * 0.3
                own[parameter.name] = values.astype(np.float32)
        yield layer, own


def write_both(where, family, modules, changes=()):
    """A base and adapters; also the model and its layers."""
    base, out = where / "base", where / "adapters"
    write_config(base, family)
    model = model_with(family, modules, dict(changes))
    plain = dataclasses.replace(model, lora=None)
    save_file(tensors_of(family, plain), base / folder.WEIGHTS)
    whole = dict(random_layers(model, folder.open_weights(base, plain)))
    copies = ((layer, dict(values)) for layer, values in whole.items())  # which are emptied
    peft.write(out, model, family, copies, "name/of-base")
    return base, out, model, whole


def peft_scale(config, module):
    numbers = []
    for pattern, of_all in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        keys = [key for key in config[pattern] if re.fullmatch(rf"(.*\.)?({key})", module)]
        numbers.append(config[pattern][keys[0]] if keys else config[of_all])
    r, alpha = numbers
    return alpha / np.sqrt(r) if config["use_rslora"] else alpha / r


@pytest.mark.parametrize("family, modules, changes", CASES.values(), ids=CASES)
def test_adapters_are_those_of_peft_and_come_back(family, modules, changes, tmp_path):
    base, out, model, whole = write_both(tmp_path, family, modules, changes)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(modules)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 5, "LORA")
    assert config["fan_in_fan_out"] is (family == "gpt2")
    # PEFT's formula on the tensors of the base; everything else stays as it is.
    tensors, adapters = load_file(base / folder.WEIGHTS), load_file(out / peft.WEIGHTS)
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        b, a = adapters.pop(name.replace("lora_A", "lora_B")), adapters.pop(name)
        key = name.removeprefix("base_model.model.").replace("lora_A.", "")
        delta = peft_scale(config, key.removesuffix(".weight")) * b @ a
        tensors[key] = tensors[key] + (delta.T if config["fan_in_fan_out"] else delta)
    assert not adapters
    kinds = layers(model)
    merged = ((layer, lora.merged(kinds[layer], values)) for layer, values in whole.items())
    plain = dataclasses.replace(model, lora=None)
    settings = export.config_of(plain, base, None, None)
    export.write(tmp_path / "merged", settings, plain, merged, max_bytes=10**9)
    found = load_file(tmp_path / "merged" / folder.WEIGHTS)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=1e-6, err_msg=name)
    # And back: the settings, then every number.
    config = LoraConfig(**peft.settings_of(str(out)), peft=str(out))
    again = dataclasses.replace(model, lora=config, hf=str(base))
    adapters = peft.open_adapters(out, again)
    for layer, kind in layers(again).items():
        for parameter in (parameter for parameter in kind.parameters if parameter.trains):
            box = tuple((0, size) for size in parameter.shape)
            np.testing.assert_array_equal(
                adapters.read(layer, parameter.name, box), whole[layer][parameter.name]
            )


REFUSED = [
    ({"peft_type": "LOHA"}, "peft_type must be LORA"),
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias"),
    ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"init_lora_weights": ["pissa"]}, "init_lora_weights"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"a_key_of_next_year": 1}, "a_key_of_next_year"),
    ({"alpha_pattern": {".*": 2}}, "alpha_pattern must have ends of paths"),
    ({"alpha_pattern": 3}, "alpha_pattern must have ends of paths"),
    ({"r": "3"}, "must be numbers above 0"),
    ({"lora_alpha": 0}, "must be numbers above 0"),
]


def test_what_we_cannot_follow_is_refused_by_name(tmp_path):
    base, out, model, _ = write_both(tmp_path, "llama", ["q_proj", "v_proj"])
    config = json.loads((out / peft.CONFIG).read_text())
    for changes, problem in REFUSED:
        (out / peft.CONFIG).write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=problem):
            peft.settings_of(str(out))
    # Patterns that give all maps one number are followed; absent numbers are 8.
    patterns = {"alpha_pattern": {"q_proj": 9, "self_attn.v_proj": 9}}
    (out / peft.CONFIG).write_text(json.dumps(config | patterns))
    assert peft.settings_of(str(out))["alpha"] == 9.0
    (out / peft.CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
    assert peft.settings_of(str(out))["alpha"] == 8.0
    (out / peft.CONFIG).write_text(json.dumps(config))
    tensors = load_file(out / peft.WEIGHTS)
    gone = dict(list(tensors.items())[1:])
    for changed, problem in (
        (gone, r"(?s)lora_A.weight missing.*some layers have adapters"),
        (
            tensors | {"base_model.model.x.lora_A.weight": np.zeros((3, 4))},
            "x.lora_A.weight unknown",
        ),
        ({name: x[:2] for name, x in tensors.items()}, r"\[2, 40\], not \[3, 40\]"),
    ):
        save_file(changed, out / peft.WEIGHTS)
        with pytest.raises(CheckpointError, match=problem):
            peft.open_adapters(out, dataclasses.replace(model, hf=str(base)))
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 4))}
    for changed, problem in (
        (tensors | embedding, "no A or B of a linear map"),
        (
            {"base_model.model.lm_head.lora_A.weight": np.zeros((3, 4))},
            "not beside a map of a block",
        ),
    ):
        save_file(changed, out / peft.WEIGHTS)
        with pytest.raises(CheckpointError, match=problem):
            peft.settings_of(str(out))


@pytest.mark.parametrize(
    "family, targets", [("gpt2", ("query", "value")), ("phi3", ("gate", "up"))]
)
def test_maps_that_are_one_in_the_family_have_one_a(family, targets, tmp_path):
    with pytest.raises(ConfigError, match="is one map with one A"):
        write_both(tmp_path, family, targets)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family, modules, changes", CASES.values(), ids=CASES)
def test_peft_loads_them_and_merges_them_to_the_same_weights(
    family, modules, changes, tmp_path, recwarn
):
    """Needs torch, transformers and peft, and is skipped without them."""
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name)
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, out, model, whole = write_both(tmp_path, family, modules, changes)
    kinds, plain = layers(model), dataclasses.replace(model, lora=None)
    merged = ((layer, lora.merged(kinds[layer], values)) for layer, values in whole.items())
    settings = export.config_of(plain, base, None, None)
    export.write(tmp_path / "merged", settings, plain, merged, max_bytes=10**9)
    load = lambda where: AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    tokens = torch.arange(12)[None] * 7 % 96
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(base), out)
        assert (adapted(tokens).logits - load(base)(tokens).logits).abs().max() > 0.1
        theirs = adapted.merge_and_unload().state_dict()
    assert not [w for w in recwarn if "missing" in str(w.message).lower()]
    for name, tensor in load_file(tmp_path / "merged" / folder.WEIGHTS).items():
        found = theirs[name].numpy()
        np.testing.assert_allclose(tensor, found, rtol=0, atol=1e-6, err_msg=name)
