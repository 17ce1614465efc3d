"""Products in fp8: what they change in the statements of a kind of layer.

The products of a block's weights are in fp8 then: query, key, value, out, gate, up and down, but
for those that the run excludes. With delayed scaling a block keeps the largest magnitudes of their
inputs in the last T steps:

    fp8/maxima_ST     of each of the S inputs, the oldest step first

A step changes them though they do not train. A layer returns them with the magnitudes of its own
tokens in the place of the newest step, and their maximum over the microbatches and replicas of the
step is what the next one reads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holmesjax.config import Fp8Config, ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import Constant, Kind, Parameter, PerToken
from holmesjax.topology.catalogue import FP8

BLOCK = "holmesjax.models.transformer:block"  # the function that knows fp8
MAXIMA = "fp8/maxima_ST"
# The inputs of a block's products, by the last of the weights that they meet.
INPUTS = {"value_DGK": "attention", "out_HKD": "out", "up_DF": "feed_forward", "down_FD": "down"}
# Numbers that a forward moves for the codes of one number of an input; a backward moves as many
# again as for the rest of a layer (`costs.layer_times.BACKWARD_NUMBERS`). Delayed: so that they
# take what they took on an H200, 151 ms of a step of 861 ms, most of it in the backward and at half
# the bandwidth, in a program that transposed codes in memory. A current scale reads an input once
# more, which was not measured.
MOVED_TIMES = {"delayed": 7, "current": 8}


def weights_by_input(kind: Kind) -> dict[str, tuple[str, ...]]:
    """The weights of each input of products in fp8, in the order of the rows of magnitudes."""
    own = (product.weights for product in kind.products if product.dtype == FP8)
    return {INPUTS[weights[-1]]: weights for weights in own}


def is_excluded(index: int, num_layers: int, fp8: Fp8Config) -> bool:
    """Whether all products of a block stay in the compute dtype.

    >>> [is_excluded(i, 4, Fp8Config(exclude_first=1, exclude_last=2)) for i in range(4)]
    [True, False, True, True]
    """
    return index < fp8.exclude_first or index >= num_layers - fp8.exclude_last


def in_fp8(kind: Kind, model: ModelConfig) -> Kind:
    """A kind of layer with its products in fp8; the embedding and the head stay as they are.

    Casts, maxima and codes in two layouts are counted as numbers that the forward moves for each
    input of a product. Weights are not counted: their cost does not grow with the tokens.

    Raises:
      ConfigError: a layer between the ends has another function than our block's.
    """
    assert model.fp8 is not None, "the model has products in fp8"
    if kind.place != "middle":
        return kind
    if kind.function != BLOCK:
        problem = "must have only blocks with model.fp8: other layers have no products in fp8"
        fix = "use block or window_block, or leave model.fp8 out"
        raise ConfigError("model.pattern", problem, found=kind.name, fix=fix)
    excluded = "down" if model.fp8.exclude_down else ""
    products = tuple(
        product if INPUTS[product.weights[-1]] == excluded else replace(product, dtype=FP8)
        for product in kind.products
    )
    kind = replace(kind, products=products)
    inputs = weights_by_input(kind)
    times = MOVED_TIMES[model.fp8.scaling]
    heads = model.num_heads * model.head_width
    inner = model.feed_forward_width if "down" in inputs else 0
    moved = PerToken(
        kind.moved.whole + times * 2 * model.width, kind.moved.cut + times * (heads + inner)
    )
    # The inputs of attention and of the feed-forward; others keep those of `out` and `down`.
    kept = replace(kind.kept, codes=PerToken(2 * model.width))
    kind = replace(kind, moved=moved, kept=kept)
    if model.fp8.scaling == "current":
        return kind
    maxima = Parameter(
        name=MAXIMA,
        shape=(len(inputs), model.fp8.history),
        initial=Constant(0.0),
        trains=False,
        changes=True,
        joined="max",
    )
    change = f"{__name__}:{replaced.__name__}"
    return replace(kind, parameters=(*kind.parameters, maxima), change=change)


def replaced(old: Mapping[str, Any], joined: Mapping[str, Any]) -> Mapping[str, Any]:
    """`Kind.change`: what the layers returned takes the place of what they read."""
    return joined
