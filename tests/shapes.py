"""A stage to change one thing of."""

import dataclasses

from holmesjax.costs.stage_shape import StageShape


def shape_of(num_blocks=2, **changes):
    """A stage of a model whose Transformer layers are of one kind."""
    stage = StageShape(
        blocks=(num_blocks,),
        is_first=True,
        is_last=True,
        data=1,
        tensor=1,
        sequences=2,
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype="float32",
        checkpointing="none",
    )
    return dataclasses.replace(stage, **changes)
