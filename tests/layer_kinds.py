"""Kinds of Transformer layers for `model.pattern`: one costs more, one sees near keys alone."""

import dataclasses

from holmesjax.layer_specs import transformer

DEAR = "tests.layer_kinds:dear"


def dear(model):
    """A block with a wider feed-forward, so that its products take five times as long."""
    whole = transformer.block_spec(model).products
    flop = sum(product.depth * product.columns for product in whole)
    up, down = whole[2:]
    wider = 1 + 4 * flop // (up.depth * up.columns + down.depth * down.columns)
    width = wider * model.feed_forward_width
    return dataclasses.replace(
        transformer.block_spec(dataclasses.replace(model, mlp_width=width)), name="dear"
    )


def near(model):
    """A block with a window of its own, in place of `model.window`."""
    block = transformer.block_spec(model)
    attention = dataclasses.replace(block.attention, window=8)
    return dataclasses.replace(block, name="near", attention=attention)
