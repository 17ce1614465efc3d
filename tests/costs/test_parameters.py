"""Parameters are those of the model's own arrays."""

import jax
import pytest

from holmesjax.costs.parameters import num_parameters, stage_parameters, table_parameters
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import TENSOR_DIMS, dims
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, layer_names
from holmesjax.models.layer import param_shapes
from tests.counted_models import MODELS
from tests.shapes import shape_of


def parameters_of(model, layer, tensor):
    """Counted from the shapes of the model's own arrays, cut as `sharding` cuts them."""
    shapes = param_shapes(layer, model)
    total = 0
    for path, array in jax.tree_util.tree_leaves_with_path(shapes):
        is_cut = any(dim in TENSOR_DIMS for dim in dims(path[-1].key))
        total += array.size // tensor if is_cut else array.size
    return total


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_model(model, tensor):
    embed, [block], head = kinds(model)
    assert block.size(tensor) == parameters_of(model, block_name(0), tensor)
    assert embed.size(tensor) == parameters_of(model, EMBED, tensor)
    assert head.size(tensor) == parameters_of(model, HEAD, tensor)
    table = table_parameters(model) if model.tied_embeddings else 0
    layers = {layer: parameters_of(model, layer, 1) for layer in layer_names(model.num_layers)}
    assert num_parameters(model) == sum(layers.values()) + table


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_tied_table_counts_once_per_stage_that_reads_it(model):
    count = lambda **changes: stage_parameters(model, shape_of(**changes))
    layers = {layer: parameters_of(model, layer, 1) for layer in (EMBED, block_name(0), HEAD)}
    whole = layers[EMBED] + 2 * layers[block_name(0)] + layers[HEAD]
    assert count() == whole
    copy = table_parameters(model) if model.tied_embeddings else 0
    assert count(is_last=False) + count(is_first=False, num_blocks=0) == whole + copy
