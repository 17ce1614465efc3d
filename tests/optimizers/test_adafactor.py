"""The places of Adafactor's rows and columns; `test_elementwise` has its steps and resumption."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.memory_compiled import bytes_on_a_device
from holmesjax.config import OptimizerConfig
from holmesjax.costs import memory
from holmesjax.optimizers.adafactor import Factored
from holmesjax.optimizers.optimizer import make_optimizer
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.shapes import shape_of
from tests.stated_parameters import stated

CONFIG = OptimizerConfig(name="adafactor", learning_rate=1.0)
# Square matrices of the feed-forward; heads wide enough that `out_HKD` is cut in three dims.
MODEL = make_model(num_layers=1, width=256, num_heads=4, head_dim=128, mlp_width=256)
FEW, PARTS = 2 * 4, ("fsdp", "data")  # bytes of two counts


def chunk_of(data, tensor, fsdp):
    plan = hand_made_plan((1,), data, tensor, fsdp=fsdp)
    return make_chunks(MODEL, plan, config=CONFIG)[0]


@pytest.mark.parametrize("data, tensor, fsdp", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)])
def test_each_device_holds_what_the_memory_says(data, tensor, fsdp):
    chunk, cuts = chunk_of(data, tensor, fsdp), {"data": data, "tensor": tensor, "fsdp": fsdp}
    shape = shape_of(num_blocks=1, kept=("factored",), **cuts)
    found = bytes_on_a_device(chunk.state_shapes.opt_state) - FEW
    assert found == memory.stage_memory_bytes(MODEL, shape)["optimizer"]


def test_a_mean_over_a_dim_is_cut_as_the_other_dims_are():
    state = chunk_of(2, 2, 2).state_shapes.opt_state
    [squares] = [values for name, values in state.direction.squares.items() if "block" in name]
    specs = lambda own: tuple(x.sharding.spec for x in own)
    assert specs(squares["up_DF"]) == (P(PARTS), P("tensor"))
    assert specs(squares["down_FD"]) == (P("tensor"), P(PARTS))
    assert specs(squares["query_DHK"]) == (P("tensor"), P(PARTS, "tensor"))
    assert specs(squares["out_HKD"]) == (P("tensor", "data"), P("tensor", "fsdp"))


def test_rows_of_a_square_matrix_are_means_over_its_last_dim():
    params = {"block_000": {"up_DF": np.zeros((128, 128), np.float32)}}
    gradient = jax.tree.map(lambda x: x + np.arange(128, dtype=np.float32)[:, None], params)
    optimizer = make_optimizer(CONFIG, 10, stated(params))
    _, state = optimizer.apply(gradient, optimizer.init(params), params)
    found = state.direction.squares["block_000"]["up_DF"]
    assert isinstance(found, Factored)
    squares = np.arange(128.0) ** 2
    np.testing.assert_allclose(found.rows, squares, rtol=1e-6, atol=1e-20)
    np.testing.assert_allclose(found.columns, np.full(128, squares.mean()), rtol=1e-6)
