"""Parameters are those of the model's own arrays."""

import dataclasses

import jax
import pytest

from holmesjax.costs.parameters import num_parameters, stage_parameters, table_parameters
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import TENSOR_DIMS, dims
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, layer_names, layers
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
    sizes = {layer: parameters_of(model, layer, 1) for layer in layer_names(model.num_layers)}
    assert num_parameters(model) == sum(sizes.values()) + table


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_tied_table_counts_once_per_stage_that_reads_it(model):
    count = lambda **changes: stage_parameters(model, shape_of(**changes))
    sizes = {layer: parameters_of(model, layer, 1) for layer in (EMBED, block_name(0), HEAD)}
    whole = sizes[EMBED] + 2 * sizes[block_name(0)] + sizes[HEAD]
    assert count() == whole
    copy = table_parameters(model) if model.tied_embeddings else 0
    assert count(is_last=False) + count(is_first=False, num_blocks=0) == whole + copy


def test_a_tied_table_counts_once_after_many_other_models():
    """The caches of a model's layers and of its kinds may lose it at different times."""
    model = dataclasses.replace(MODELS["tied"], width=1000)
    [block] = kinds(model).blocks
    for width in range(2, 200, 2):
        layers(dataclasses.replace(model, width=width, num_heads=1))
    assert kinds(model).blocks[0] is block
    both_ends = stage_parameters(model, shape_of(num_blocks=model.num_layers))
    assert both_ends == num_parameters(model) - table_parameters(model)
