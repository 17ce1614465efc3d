"""Muon against its formulas in float64, on one device and on meshes that cut its matrices.

`test_elementwise` has its steps in the pipeline, and its resumption on another plan.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.memory_compiled import bytes_on_a_device
from holmesjax.config import OptimizerConfig
from holmesjax.config.update_rules import RULES
from holmesjax.costs import memory, products
from holmesjax.costs.optimizer_state import Matrix, hidden_matrices
from holmesjax.layer_specs.kind import Constant, Parameter
from holmesjax.optimizers.muon import newton_schulz, orthogonalized
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.parallel import sharding
from tests.arrays import normal
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.one_device import assert_near
from tests.optimizers.muon_steps import numpy_steps
from tests.shapes import shape_of

ZERO = Constant(0.0)
CONFIG = OptimizerConfig(name="muon", learning_rate=0.02, schedule="constant")
MODEL = make_model(num_layers=3, width=64, num_heads=4, mlp_width=96, num_kv_heads=2)


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_singular_values_end_near_one(shape):
    x = normal(0, *shape)
    found = newton_schulz(x)
    np.testing.assert_allclose(found, numpy_steps(x), atol=1e-4)
    large = np.linalg.svd(np.asarray(x), compute_uv=False) > 0.01 * np.linalg.norm(x)
    values = np.linalg.svd(np.asarray(found), compute_uv=False)[large]
    assert 0.65 < values.min() <= values.max() < 1.25


def test_zeros_stay_and_one_direction_becomes_a_unit():
    assert not np.any(newton_schulz(jnp.zeros((3, 5))))
    u, v = normal(0, 6), normal(1, 9)
    values = np.linalg.svd(np.asarray(newton_schulz(jnp.outer(u, v))), compute_uv=False)
    assert 0.65 < values[0] < 1.25
    assert values[1] < 1e-3


# Three updates of a matrix that multiplies from the right: two by three numbers, as in the golden
# numbers of Jordan's scale and of Moonlight's (arXiv:2502.16982).
START = [[0.5, -0.25, 1.0], [-1.0, 0.75, 0.125]]
GRADIENTS = (
    [[0.1, -0.2, 0.3], [0.4, -0.5, 0.6]],
    [[-0.3, 0.1, 0.2], [0.1, 0.2, -0.1]],
)
GOLDEN = {
    None: [0.5280180, -0.2480774, 0.9581271, -1.0268467, 0.7587855, 0.1081334],
    0.2: [0.5064918, -0.2487398, 0.9852908, -1.0047277, 0.7503356, 0.1198712],
}


@pytest.mark.parametrize("rms", GOLDEN)
def test_two_updates_worked_in_float64(rms):
    config = OptimizerConfig(
        name="muon", learning_rate=0.02, schedule="constant", muon_consistent_rms=rms
    )
    stated = Parameter(name="up_DF", shape=(2, 3), initial=ZERO, decays=True, matrix=1)
    optimizer = make_optimizer(config, 10, {"block_000": {"up_DF": stated}})
    params = {"block_000": {"up_DF": jnp.array(START)}}
    state = optimizer.init(params)
    for rows in GRADIENTS:
        gradient = {"block_000": {"up_DF": jnp.array(rows)}}
        params, state = optimizer.apply(gradient, state, params)
    np.testing.assert_allclose(params["block_000"]["up_DF"].ravel(), GOLDEN[rms], atol=1e-6)


def test_what_is_no_matrix_has_the_step_of_adamw_where_its_schedule_jumps():
    """The step of AdamW, which `test_adamw` holds to its formulas."""
    stated = {"head": {"scale_D": Parameter(name="scale_D", shape=(5,), initial=ZERO)}}
    found = []
    for name in ("muon", "adamw"):
        config = OptimizerConfig(name=name, learning_rate=0.1, beta2=0.999, schedule="linear")
        optimizer = make_optimizer(config, 90, stated).with_jumps()
        params = {"head": {"scale_D": jnp.ones(5)}}
        state = optimizer.init(params)
        state = state._replace(updates=state.updates + 40, missed=state.missed + 40)
        for seed in range(3):
            params, state = optimizer.apply({"head": {"scale_D": normal(seed, 5)}}, state, params)
        found.append(params["head"]["scale_D"])
    np.testing.assert_array_equal(*found)


def test_directions_are_those_of_optax_where_both_take_a_matrix():
    """A first update without momentum before it; heads are one matrix, as told."""
    gradient = normal(0, 16, 4, 12)
    dimensions = optax.contrib.MuonDimensionNumbers((0,), (1, 2))
    theirs = optax.contrib.scale_by_muon(beta=0.95, weight_dimension_numbers=dimensions)
    updates, _ = theirs.update(gradient, theirs.init(gradient))
    stated = Parameter(name="query_DHK", shape=(16, 4, 12), initial=ZERO, matrix=1)
    [ours] = orthogonalized([gradient], stated, None)
    cosine = np.sum(updates * ours) / (np.linalg.norm(updates) * np.linalg.norm(ours))
    assert cosine > 1 - 1e-6


@pytest.mark.parametrize("data, tensor, fsdp, context", [(2, 2, 2, 1), (4, 1, 1, 2), (1, 2, 2, 2)])
def test_cut_matrices_are_orthogonalised_whole(data, tensor, fsdp, context):
    """Five matrices on eight devices, or of each kind that a block has; parts apart are another."""
    plan = hand_made_plan((3,), data, tensor, fsdp=fsdp, context=context)
    [chunk] = make_chunks(MODEL, plan, config=CONFIG)
    for name, stated in chunk.statements["block_000"].items():
        if not getattr(stated, "matrix", 0):
            continue
        where = sharding.master_sharding(stated, chunk.mesh)
        arrays = [normal(i, *stated.shape) for i in range(5)]
        placed = [jax.device_put(x, where) for x in arrays]
        run = jax.jit(lambda xs, stated=stated: orthogonalized(xs, stated, chunk.mesh))
        rows = int(np.prod(stated.shape[: stated.matrix]))
        for x, got in zip(arrays, run(placed), strict=True):
            assert got.sharding.is_equivalent_to(where, got.ndim), name
            assert_near(got, numpy_steps(x.reshape(rows, -1)).reshape(x.shape), rtol=1e-4)
    apart = np.concatenate([numpy_steps(half) for half in np.split(x.reshape(rows, -1), 2)])
    whole = numpy_steps(x.reshape(rows, -1))
    assert np.sum(apart * whole) / (np.linalg.norm(apart) * np.linalg.norm(whole)) < 0.98


@pytest.mark.parametrize("data, tensor, fsdp", [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_each_device_holds_what_the_memory_says(data, tensor, fsdp):
    plan = hand_made_plan((3,), data, tensor, fsdp=fsdp)
    [chunk] = make_chunks(MODEL, plan, config=CONFIG)
    cuts = {"data": data, "tensor": tensor, "fsdp": fsdp}
    shape = shape_of(num_blocks=3, kept=RULES["muon"].kept(CONFIG), **cuts)
    found = bytes_on_a_device(chunk.state_shapes.opt_state) - 4  # of a count
    assert found == memory.stage_memory_bytes(MODEL, shape)["optimizer"]


def test_matrices_and_their_products_are_counted():
    shape = shape_of(num_blocks=3, kept=("float32", "others"))
    found = hidden_matrices(MODEL, shape)
    # Queries and outputs are square with 4 heads of 16; keys and values have 2 heads.
    assert found == {(64, 64): 6, (32, 64): 6, (64, 96): 6}
    assert not hidden_matrices(MODEL, shape_of(num_blocks=3))
    own = products.orthogonalizing_products(Matrix(64, 96))
    assert products.flop(own) == 5 * (4 * 64**2 * 96 + 2 * 64**3)
