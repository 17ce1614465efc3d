"""Stages that generate text together, each with its own layers, caches and texts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from holmesjax.data.byte_tokenizer import ByteTokenizer
from holmesjax.generation.decoder import ModelPart, built_params, on_devices
from holmesjax.generation.sampler import Sampler, cache_length
from holmesjax.generation.sampling import Sampling
from holmesjax.generation.stage_decoder import StageDecoder, crossings, lengths
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import init_params
from holmesjax.parallel import sharding
from tests.generation.odd_models import WINDOWS, loud
from tests.hand_made_plans import make_model
from tests.two_stages import make_plan, mesh_of

PROMPTS = ([65, 66], list(range(40, 63)))


class Exchange:
    """The transport of a stage: arrays in a dict that all stages share."""

    def __init__(self, found, changed, known, meshes):
        self.found, self.changed, self.known, self.meshes = found, changed, known, meshes

    def offer(self, key, array):
        crossing = self.known[key.crossing]
        assert (array.shape, str(array.dtype)) == (crossing.shape, crossing.dtype)
        assert array.sharding.is_fully_replicated
        with self.changed:
            assert key not in self.found
            self.found[key] = np.asarray(array)
            self.changed.notify_all()

    def expect(self, keys):
        assert all(key.crossing in self.known for key in keys)

    def fetch(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.found, 60.0)
            array = self.found.pop(key)
        return sharding.put(
            array, sharding.replicated(self.meshes[self.known[key.crossing].target])
        )


def test_stages_draw_the_tokens_of_one_device_and_hold_their_layers_alone():
    """Two stages of two chunks each, over tensor 2 and data 2; a text outgrows the context."""
    model = make_model(num_layers=4, num_kv_heads=2, tied_embeddings=True, **WINDOWS)
    params = loud(init_params(model, 1))
    sampling, tokenizer = Sampling(temperature=0.7, top_p=0.9), ByteTokenizer()
    whole = Sampler.of(model, params, tokenizer)
    want = list(whole.tokens(PROMPTS, 20, sampling))
    assert len({token for tokens in want for token in tokens}) > 10
    plan, names = make_plan((1, 2), (2, 2)), list(layers(model))
    object.__setattr__(plan.stages[0], "chunks", (tuple(names[:2]), tuple(names[3:4])))
    object.__setattr__(plan.stages[1], "chunks", (tuple(names[2:3]), tuple(names[4:])))
    assert [home for home, _ in plan.chunks] == [0, 1, 0, 1]
    meshes = [mesh_of(stage) for stage in plan.stages]
    length = cache_length(PROMPTS, 20, model.context_length)
    settings = {"lengths": lengths(length, length), "width": model.width, "dtype": "float32"}
    known = {c.name: c for c in crossings(plan, num_rows=2, **settings)}
    found, changed = {}, threading.Condition()

    def value(parameter, layer, box):
        array = params[layer]
        for part in parameter.name.split("/"):
            array = array[part]
        return np.asarray(array)[tuple(slice(*ends) for ends in box)]

    def run(stage):
        parts = [
            ModelPart(layers=its_layers, mesh=meshes[stage])
            for home, its_layers in plan.chunks
            if home == stage
        ]
        decoder = StageDecoder(
            model=model,
            parts=parts,
            params=built_params(model, parts, value),
            plan=plan,
            stage=stage,
            transport=Exchange(found, changed, known, meshes),
        )
        tokens = list(Sampler(decoder=decoder, tokenizer=tokenizer).tokens(PROMPTS, 20, sampling))
        return tokens, set(decoder.params)

    with ThreadPoolExecutor(2) as pool:
        (first, held), (last, borrowed) = pool.map(run, (0, 1))
    assert first == last == want
    assert not found
    assert held == {"embed", "block_000", "block_002"}
    assert borrowed == {"block_001", "block_003", "head", "embed"}  # of the last, the table
    assert on_devices(model)[0].layers == tuple(names)
    assert len(jax.devices()) >= 8
