"""The parameters that a model of your own starts with, and its loss on one device."""

import zlib

import jax
import jax.numpy as jnp

from holmesjax.layer_specs.model_layers import EMBED, HEAD, layers
from holmesjax.models.own_model import layers_of
from tests import own_models as own_model


def initial(model, seed):
    """Every layer's values, drawn whole on one device."""
    found, before = {}, jnp.zeros((1, *layers(model)[EMBED].boundary))
    for name, layer in layers_of(model).items():
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        reads = layers(model)[name].reads if name == EMBED else ()
        arrays = [jnp.zeros((1, *array.shape), array.dtype) for array in reads]
        found[name] = jax.jit(layer.init)(key, *(arrays or [before]))
    return found


def plain_loss(params, inputs):
    x_BLD = own_model.embed(params[EMBED], inputs["token_BL"])
    for layer in sorted(name for name in params if name not in (EMBED, HEAD)):
        x_BLD = own_model.block(params[layer], x_BLD)
    logits_BLV = x_BLD @ params[HEAD]["out"]
    log_p_BLV = jax.nn.log_softmax(logits_BLV)
    one_hot_BLV = jax.nn.one_hot(inputs["target_BL"], log_p_BLV.shape[-1])  # zeros for -1
    return -jnp.sum(log_p_BLV * one_hot_BLV) / jnp.sum(inputs["target_BL"] >= 0)
