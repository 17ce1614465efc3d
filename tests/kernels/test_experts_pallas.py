"""The kernels for groups of rows: simulated, and lowered for an NVIDIA GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

from kernels import experts_check
from kernels.attention import warpgroups
from kernels.attention.warpgroups import MULTIPROCESSORS
from kernels.expert_exchange import experts_feed_forward
from kernels.experts_pallas import unsupported
from tests.kernels.attention.gpus import INTERPRET, lowered_for_cuda


class _JaxOnGpu:
    """JAX for a module that asks its first device for the number of multiprocessors."""

    def __getattr__(self, name):
        return getattr(jax, name)

    def devices(self):
        return [SimpleNamespace(core_count=MULTIPROCESSORS)]


@pytest.fixture
def _described_gpu(monkeypatch):
    if INTERPRET:
        monkeypatch.setattr(transposed_ragged_dot_mgpu, "jax", _JaxOnGpu())


@pytest.mark.usefixtures("_described_gpu")
def test_a_layer_is_lowered_to_a_kernel_for_each_product():
    """Three of a forward, and six gradients; nothing else multiplies."""
    E, D, F = 4, 64, 128
    shapes = (2, 50, D), (2, 50, 2), (2, 50, 2), (E, D, F), (E, D, F), (E, F, D)
    dtypes = "bfloat16", "int32", *["float32"] * 4
    args = [jnp.zeros(*pair) for pair in zip(shapes, dtypes, strict=True)]

    def run(x, choice, weight, gate, up, down):
        of = lambda x, gate, up, down: experts_feed_forward(
            *("swiglu", x, choice, weight, (gate, up), down), by_kernel=True
        )
        y, pullback = jax.vjp(of, x, gate, up, down)
        return y, pullback(y)

    text = lowered_for_cuda(run, *args)
    assert text.count("mosaic_gpu_v2") == 9
    assert "dot_general" not in text


def test_what_the_kernels_cannot_multiply_is_told():
    assert unsupported("bfloat16", 64, 192) is None
    assert unsupported("float32", 64, 64).startswith("products in float32: supported are bf")
    assert unsupported("bfloat16", 64, 96) == "a width of 96: supported are multiples of 64"


def plain_products(x_SD, w, size_E, *, is_turned=False):
    w = w.swapaxes(1, 2) if is_turned else w
    return jax.lax.ragged_dot(x_SD, w, size_E)


def plain_gradients(x_SD, dy_SF, size_E):
    end_E = jnp.cumsum(size_E)
    row = jnp.arange(len(x_SD))[:, None]
    is_own_SE = (row >= (end_E - size_E)[None]) & (row < end_E[None])
    parts = jnp.einsum("se,sd,sf->edf", is_own_SE.astype(x_SD.dtype), x_SD, dy_SF)
    return parts.astype(x_SD.dtype)


def test_the_check_finds_what_is_wrong_for_some_sizes_of_groups():
    """Planted: rows behind the last whole tile of a group are left out, or taken from the next."""
    case = experts_check.GroupsCase((100, 0, 60, 33), 64, 64)
    sound = experts_check.check(case, plain_products, plain_gradients, 2)
    assert sound["problem"] is None
    whole = lambda x, dy, size: plain_gradients(x, dy, size // 64 * 64)
    shifted = lambda x, dy, size: plain_gradients(jnp.roll(x, 1, 0), jnp.roll(dy, 1, 0), size)
    for gradients in (whole, shifted):
        found = experts_check.check(case, plain_products, gradients, 1)
        assert "gradient of weights" in found["problem"]
        assert "product" not in found["problem"].partition(";")[0]
    garbage = lambda x, w, size, *, is_turned=False: (
        plain_products(x, w, size, is_turned=is_turned) + 1e-2
    )
    behind = experts_check.GroupsCase((64, 0, 50), 64, 64, empty=14)
    assert experts_check.check(behind, plain_products, plain_gradients, 1)["problem"] is None
    assert experts_check.check(behind, garbage, plain_gradients, 1)["problem"] is not None


@pytest.mark.exhaustive
@pytest.mark.skipif(INTERPRET and not warpgroups.CAN_SIMULATE, reason="JAX before 0.12")
@pytest.mark.usefixtures("_described_gpu")
def test_groups_of_any_size_are_multiplied_as_by_themselves():
    """Half a minute a case: 132 blocks of threads, their copies and barriers; races are errors."""
    asked = {"width": 64, "inner": 128, "dtype": "bfloat16"}
    for _, run in experts_check.checks(asked, small=True):
        if INTERPRET:
            with plgpu.force_gpu_interpret_mode(warpgroups.simulated()):
                assert run()["problem"] is None
        else:
            assert run()["problem"] is None
