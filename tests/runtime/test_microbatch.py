"""A chunk's forward and backward with the kernels of a GPU, lowered and not compiled.

`tests/kernels/attention/test_pallas.py` compares the values of the kernels, where JAX can simulate
them. Here they are counted.
"""

import functools

import jax
import pytest

from holmesjax.config import KernelsConfig
from holmesjax.models import ops
from holmesjax.models.layer import function_of
from holmesjax.runtime import microbatch
from holmesjax.runtime.program_shapes import batch_shapes, gradient_shapes, replica_shapes
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.kernels.attention.gpus import H200, lowered_for_cuda


@pytest.mark.parametrize(
    "cut, checkpointing, in_forward, in_backward",
    [
        ({"data": 2, "tensor": 2}, "dots", 1, 1),  # the result of the forward is kept
        ({"data": 2, "tensor": 1, "fsdp": 2}, "full", 1, 2),  # or computed again, by each replica
        ({"data": 1, "tensor": 1, "context": 2}, "none", 2, 2),  # for own keys, and for others'
    ],
)
def test_a_stage_runs_mosaic_once_for_each_block(
    cut, checkpointing, in_forward, in_backward, monkeypatch
):
    monkeypatch.setattr(ops.Kernels, "device", H200)
    model = make_model(num_layers=2, num_heads=2, head_dim=64)
    plan = hand_made_plan((1, 1), **cut, checkpointing=checkpointing)
    kernels = KernelsConfig(attention="pallas", cross_entropy="reference")
    chunk, _ = make_chunks(model, plan, dtype="bfloat16", kernels=kernels, mask=True)
    replicas, batch = replica_shapes(chunk), batch_shapes(chunk)
    fixed = chunk.state_shapes.fixed
    forward = functools.partial(microbatch.forward, chunk, fixed)
    backward = functools.partial(microbatch.backward, chunk, fixed, weight=None)
    dy, _, saved = jax.eval_shape(forward, replicas, None, batch)
    kernels_in = lambda *program: lowered_for_cuda(*program).count("mosaic_gpu_v2")
    assert kernels_in(forward, replicas, None, batch) == in_forward
    assert kernels_in(backward, replicas, saved, gradient_shapes(chunk), dy) == in_backward


@pytest.mark.parametrize(
    "cut", [{}, {"checkpointing": "full"}, {"fsdp": 2}, {"schedule": "zero_bubble"}]
)
def test_equal_layers_are_traced_together(cut, monkeypatch):
    """Ten blocks of two kinds in turns, whatever is around a layer's function."""
    traced = []

    def counted(kind):
        def run(params, x, context):
            traced.append(context.kind)
            return function_of(kind)(params, x, context)

        return run

    monkeypatch.setattr(microbatch, "function_of", counted)
    model = make_model(num_layers=12, pattern=("block", "window_block"), window=4)
    chunk, _ = make_chunks(model, hand_made_plan((10, 2), 1, 1, **cut))
    run = functools.partial(microbatch.forward, chunk, chunk.state_shapes.fixed)
    jax.eval_shape(run, replica_shapes(chunk), None, batch_shapes(chunk))
    assert set(traced) == set(chunk.kinds.values())
    # Where the function has a rule for its gradients, JAX traces it by itself and in the rule.
    assert max(map(traced.count, traced)) <= 2
