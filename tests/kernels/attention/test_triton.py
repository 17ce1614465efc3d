"""JAX's Triton kernels as we call them: interpreted, and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from kernels.attention.shards import Shards
from kernels.attention.tiles import Rule
from kernels.attention.triton import attention_triton
from tests.kernels.attention.gpus import (
    INTERPRET,
    first_devices,
    lowered_for_cuda,
    on_described_gpu,
)
from tests.kernels.attention.oracle import check, documents, inputs

kernels = functools.partial(attention_triton, interpret=INTERPRET)


@pytest.mark.parametrize(
    "length, heads, key_heads, width, rule, has_documents",
    [
        (150, 4, 2, 64, Rule(), True),  # the last tile is ragged
        (128, 2, 1, 24, Rule(scale=0.3), False),  # a head whose width is no power of two
    ],
)
def test_values_and_gradients(length, heads, key_heads, width, rule, has_documents):
    segments = (documents(length),) * 2 if has_documents else None
    arrays = inputs(length, length, heads, key_heads, width, dtype="bfloat16")
    check(kernels, arrays, segments, rule, "bfloat16")


def test_each_device_has_its_own_sequences_and_heads():
    mesh = Mesh(first_devices(4).reshape(2, 2), ("fsdp", "tensor"))
    axes_of = (("B", ("fsdp",)), ("H", ("tensor",)), ("G", ("tensor",)))
    cut = functools.partial(kernels, shards=Shards(mesh, axes_of))
    arrays = inputs(70, 70, 4, 2, 16, dtype="bfloat16")
    check(cut, arrays, (documents(70),) * 2, Rule(), "bfloat16")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("width", [64, 128])
def test_the_kernels_lower_for_an_older_gpu(width):
    """Replicas call them under `jax.vmap`: a kernel forward, and one for all gradients."""

    def gradients(q, k, v, ids):
        run = lambda q, k, v: attention_triton(q, k, v, (ids, ids))[0].astype(jnp.float32).sum()
        return jax.grad(run, (0, 1, 2))(q, k, v)

    shapes = [(2, 2, 300, heads, width) for heads in (4, 2, 2)]
    args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    args.append(jax.ShapeDtypeStruct((2, 2, 300), "int32"))
    with on_described_gpu("NVIDIA A100"):
        text = lowered_for_cuda(jax.vmap(gradients), *args)
    assert text.count("@__gpu$xla.gpu.triton") == 2
    assert f"tensor<2x2x384x4x{width}xbf16>" in text  # whole tiles; keys are never repeated
    assert f"tensor<2x2x384x2x{width}xbf16>" in text
