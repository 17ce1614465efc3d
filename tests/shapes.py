"""A stage to change one thing of."""

import dataclasses

from holmesjax.costs import work


def shape_of(**changes):
    stage = work.StageShape(
        num_blocks=2,
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
