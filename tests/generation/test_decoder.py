"""Logits with caches equal those of the whole model run again, on one device and over stages."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from holmesjax.generation.decoder import Decoder, ModelPart, on_devices
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import init_params
from tests.generation.odd_models import WINDOWS, extended, loud
from tests.hand_made_plans import VARIANTS, make_model
from tests.one_device import logits_of


@pytest.mark.parametrize("changes", [*VARIANTS.values(), WINDOWS], ids=[*VARIANTS, "windows"])
def test_cache_equals_no_cache(changes):
    model = make_model(**changes | {"num_layers": 2})
    params = loud(init_params(model, 0))
    token_BL = np.random.default_rng(0).integers(256, size=(2, 16), dtype=np.int32)
    want = logits_of(params, model, token_BL)
    decoder = Decoder(model=model, parts=on_devices(model), params=params)
    for cuts in ((1,) * 16, (7, 1, 1, 7)):
        got, _ = extended(decoder, token_BL, cuts)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_stages_and_meshes_give_the_same_logits_and_hold_their_parts():
    """Three stages, one with two chunks, over fsdp and tensor; the head borrows the table."""
    changes = {"num_layers": 3, "num_kv_heads": 2, "tied_embeddings": True, **WINDOWS}
    model = make_model(**changes)
    params = loud(init_params(model, 0))
    devices, names = np.array(jax.devices()), list(layers(model))
    mesh = Mesh(devices[:4].reshape(1, 2, 2), ("data", "fsdp", "tensor"))
    other = Mesh(devices[4:6].reshape(2, 1), ("data", "tensor"))
    parts = [
        ModelPart(layers=tuple(names[:2]), mesh=mesh),
        ModelPart(layers=tuple(names[2:3]), mesh=other),
        ModelPart(layers=tuple(names[3:]), mesh=mesh),
    ]
    cut = {}
    for part in parts:
        for layer in part.layers:
            cut[layer] = put(part, layers(model)[layer], params[layer])
    table = cut["embed"]["token_VD"]
    assert {shard.data.shape for shard in table.addressable_shards} == {(128, 16)}  # of (256, 32)
    token_BL = np.random.default_rng(0).integers(256, size=(2, 16), dtype=np.int32)
    decoder = Decoder(model=model, parts=parts, params=cut)
    got, caches = extended(decoder, token_BL, (7, 1, 1, 7))
    want = logits_of(params, model, token_BL)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    key_BTGK = caches[0]["block_000"]["key_BTGK"]
    assert key_BTGK.sharding.shard_shape(key_BTGK.shape)[2] == 1
    key_BTGK = caches[1]["block_001"]["key_BTGK"]
    assert key_BTGK.shape[1] == 5  # its window alone


def put(part, kind, params):
    """A layer's parameters where its part says."""
    found = {}
    for parameter in kind.parameters:
        node, whole = found, params
        *folders, name = parameter.path
        for folder in folders:
            node, whole = node.setdefault(folder, {}), whole[folder]
        node[name] = jax.device_put(whole[name], part.sharding_of(parameter))
    return found
