"""Steps whose optimizer has the kernel of AdamW's step: simulated, and lowered for a GPU."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from holmesjax.config import Fp8Config, KernelsConfig, OptimizerConfig
from holmesjax.models import ops
from holmesjax.runtime import end_of_step
from holmesjax.runtime.compilation import (
    compile_whole_step,
    scalar_shape,
    task_shapes,
)
from holmesjax.runtime.whole_step import WholeStep
from kernels import adamw_shards
from kernels.attention import warpgroups
from tests.hand_made_plans import first_step, hand_made_plan, make_chunks, make_model
from tests.kernels.attention.gpus import H200

XLA = KernelsConfig(attention="reference", cross_entropy="reference", optimizer="xla")
PALLAS = dataclasses.replace(XLA, optimizer="pallas")
CONFIG = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, moments="int8")


def chunk_of(plan, kernels, width=64):
    [chunk] = make_chunks(
        make_model(num_layers=1, width=width), plan, config=CONFIG, kernels=kernels
    )
    return chunk


@pytest.mark.skipif(not warpgroups.CAN_SIMULATE, reason="JAX before 0.12 cannot simulate a kernel")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates a GPU")
def test_a_whole_step_with_the_kernel_is_that_of_xla(monkeypatch):
    plan = hand_made_plan((1,), 1, 1, microbatches=2)
    run = lambda kernels: first_step(WholeStep(compile_whole_step(chunk_of(plan, kernels))), plan)
    loss, [want] = run(XLA)
    simulated = functools.partial(adamw_shards.adamw_on_shards, interpret=True)
    monkeypatch.setattr(adamw_shards, "adamw_on_shards", simulated)
    monkeypatch.setattr(ops.Kernels, "device", H200)
    own_loss, [got] = run(PALLAS)
    assert own_loss == loss
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if one.dtype == np.int8:
            assert np.mean(np.asarray(one) != np.asarray(other)) < 1e-3
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_devices_that_cut_parameters_and_moments_update_their_own(monkeypatch):
    """Over `data`, as ZeRO cuts them, `fsdp` and `tensor`: nothing is sent for the kernel.

    Parameters in bfloat16 are given to it as they are, and rounded by it.
    """
    monkeypatch.setattr(ops.Kernels, "device", H200)
    plan = hand_made_plan((1,), 2, 2, fsdp=2)

    def lowered(kernels):
        chunk = chunk_of(plan, kernels, width=512)  # each device has whole blocks of int8
        chunk = dataclasses.replace(chunk, param_dtype="bfloat16")
        state = chunk.state_shapes
        gradients = state.params
        totals = jax.ShapeDtypeStruct((1 + len(chunk.shared_names),), np.float32)
        update = functools.partial(end_of_step.update, chunk)
        program = jax.jit(update, donate_argnums=0).trace(state, gradients, totals, {})
        return program.lower(lowering_platforms=("cuda",)).as_text()

    text = lowered(PALLAS)
    assert "mosaic_gpu_v2" not in lowered(XLA)
    assert text.count("mosaic_gpu_v2") >= 2  # of moments in float32 and in int8
    taken = "".join(line for line in text.splitlines() if "mosaic_gpu_v2" in line)
    assert all(f"x{dtype}>" in taken for dtype in ("i8", "bf16"))
    sends = "all_gather", "all_reduce", "all_to_all", "collective_permute"
    assert not any(name in text for name in sends)


@pytest.mark.parametrize(
    "sizes, changes, turned",
    [
        ({}, {}, set()),
        # Devices keep parts of D, so it is in front.
        ({"fsdp": 2}, {}, {"out_HKD", "down_FD"}),
        ({"context": 2}, {}, {"out_HKD", "down_FD"}),
        ({"data": 2}, {}, set()),
        ({}, {"fp8": Fp8Config()}, set()),
    ],
)
def test_gradients_are_read_as_the_products_of_a_step_leave_them(
    sizes, changes, turned, monkeypatch
):
    seen = []

    def adamw_on_shards(leaves, gradients, factors, hyperparameters, mesh, specs, turns):
        seen.extend(turns or [None] * len(leaves))
        return list(leaves)

    monkeypatch.setattr(adamw_shards, "adamw_on_shards", adamw_on_shards)
    monkeypatch.setattr(ops.Kernels, "device", H200)
    plan = hand_made_plan((1,), **{"data": 1, "tensor": 1, **sizes})
    model = make_model(num_layers=1, width=64, num_kv_heads=2, **changes)
    [chunk] = make_chunks(model, plan, config=CONFIG, kernels=PALLAS)
    args = chunk.state_shapes, task_shapes(chunk, 1), scalar_shape(chunk)
    jax.eval_shape(functools.partial(end_of_step.step, chunk), *args)
    paths, _ = zip(*jax.tree_util.tree_flatten_with_path(chunk.state_shapes.params)[0], strict=True)
    assert {path[-1].key for path, turn in zip(paths, seen, strict=True) if turn} == turned
