"""How the step of AdamW is chosen, applied and laid out on a mesh."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax.config import KernelsConfig
from holmesjax.errors import ConfigError
from holmesjax.models import ops
from holmesjax.optimizers import update_ops
from kernels.adamw import adamw_step
from tests.adamw_steps import HERE, assert_near_steps, leaf_kept
from tests.arrays import normal
from tests.kernels.attention.gpus import H200, first_devices, lowered_for_cuda

SPECS = [
    (P(("fsdp", "data"), "tensor", None), (8, 4, 64)),
    (P("tensor", ("fsdp", "data")), (4, 256)),
    (P("tensor", ("fsdp", "data")), (4, 128)),  # half a block on each device
    (P(("fsdp", "data")), (64,)),
]


def placed(kept, i, mesh):
    """A leaf and its gradient on a mesh, and where they lie."""
    spec, shape = SPECS[i]
    leaf, gradient = leaf_kept(kept, i, *shape), normal(10 + i, *shape)
    specs = update_ops.Leaf(spec, *(update_ops.moment_spec(x, spec, mesh.shape) for x in leaf[1:]))
    is_spec = lambda x: isinstance(x, P)
    where = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
    return jax.device_put(leaf, where), jax.device_put(gradient, where.parameter), where


def eight_devices():
    return Mesh(first_devices(8).reshape(2, 2, 2), ("data", "fsdp", "tensor"))


def third_step():
    return update_ops.factors(jnp.int32(3), 0.7, 0.01, HERE.beta1, HERE.beta2)


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_adamw_is_the_same_on_any_mesh(kept):
    mesh, hyperparameters = eight_devices(), [HERE._replace(seed=i) for i in range(len(SPECS))]
    every = [placed(kept, i, mesh) for i in range(len(SPECS))]
    leaves, gradients, where = map(list, zip(*every, strict=True))
    kernels = ops.Kernels(KernelsConfig(), mesh)
    run = lambda leaves, gradients: update_ops.adamw(
        leaves, gradients, third_step(), hyperparameters, kernels
    )
    found = jax.jit(run, out_shardings=where)(leaves, gradients)
    found, own = jax.tree.map(np.asarray, (found, (leaves, gradients)))
    step = jax.jit(adamw_step, static_argnums=3)
    for got, leaf, gradient, h in zip(found, *own, hyperparameters, strict=True):
        leaf, gradient = jax.tree.map(jnp.asarray, (leaf, gradient))
        assert_near_steps(got, step(leaf, gradient, third_step(), h))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_a_step_that_does_not_apply_changes_no_bit(kept, platform, monkeypatch):
    """Whatever the gradients are. A step that applies changes what is kept."""
    monkeypatch.setattr(
        ops.Kernels, "device", types.SimpleNamespace(platform=platform, device_kind=platform)
    )
    leaf, gradient = leaf_kept(kept, 0, 3, 128), normal(1, 3, 128)

    @jax.jit
    def run(leaf, gradient, applies):
        step = update_ops.factors(jnp.int32(3), 0.7, 0.01, HERE.beta1, HERE.beta2, applies)
        return update_ops.adamw([leaf], [gradient], step, [HERE], ops.DEFAULT)[0]

    same = run(leaf, gradient.at[0, 0].set(jnp.nan), False)
    jax.tree.map(np.testing.assert_array_equal, same, leaf)
    assert_near_steps(run(leaf, gradient, True), adamw_step(leaf, gradient, third_step(), HERE))


def test_the_kernel_of_adamw_is_refused_where_there_is_no_hopper():
    kernels = ops.Kernels(KernelsConfig(optimizer="pallas"))
    leaf, gradient = leaf_kept("float32", 0, 3, 128), normal(1, 3, 128)
    with pytest.raises(ConfigError, match=r"kernels\.optimizer: pallas cannot run here") as told:
        update_ops.adamw([leaf], [gradient], third_step(), [HERE], kernels)
    assert "found: cpu devices: supported are NVIDIA Hopper GPUs" in str(told.value)
    assert update_ops.choose_optimizer("int8", ops.DEFAULT).implementation == "xla"


def test_a_run_may_ask_for_the_kernel_of_adamw(monkeypatch):
    """It reads the gradient of a tall matrix as the product before it leaves it: as it is."""
    monkeypatch.setattr(ops.Kernels, "device", H200)
    shapes = {(64, 128): 1, (128, 64): 1, (192, 64): 0, (4, 32, 64): 2}
    leaves = [leaf_kept("bfloat16", 0, *shape) for shape in shapes]
    gradients = [normal(9, *shape) for shape in shapes]
    statements = [types.SimpleNamespace(shape=shape, matrix=n) for shape, n in shapes.items()]
    kernels = ops.Kernels(KernelsConfig(optimizer="pallas"), after_products=True)
    run = lambda *args: update_ops.adamw(*args, [HERE] * 4, kernels, "bfloat16", statements)
    text = lowered_for_cuda(run, leaves, gradients, third_step())
    assert text.count("mosaic_gpu_v2") == 1
    for turned in ("tensor<128x64xf32>) -> tensor<64x128xf32>", "-> tensor<64x4x32xf32>"):
        assert turned not in text


def test_scales_lie_with_their_numbers():
    """Then a device needs nothing of others."""
    mesh, kernels = eight_devices(), ops.Kernels(KernelsConfig(), eight_devices())
    for i, (scales, moves) in enumerate(
        [(SPECS[0][0], False), (SPECS[1][0], False), (P("tensor"), True)]
    ):
        leaf, gradient, where = placed("int8", i, mesh)
        assert leaf.mu.scales.sharding.spec == leaf.nu.scales.sharding.spec == scales
        update = lambda leaf, gradient: update_ops.adamw(
            [leaf], [gradient], third_step(), [HERE], kernels
        )
        compiled = jax.jit(update, out_shardings=[where]).lower(leaf, gradient).compile()
        names = ("all-gather", "all-reduce", "collective-permute", "all-to-all")
        assert any(name in compiled.as_text() for name in names) == moves
