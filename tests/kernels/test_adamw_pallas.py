"""The kernel of AdamW's step: simulated, and lowered for an NVIDIA GPU."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, PartitionSpec as P

from kernels import adamw_check, adamw_shards
from kernels.adamw import Leaf, Turn, adamw_step
from kernels.adamw_pallas import FORMATS, PartPlace, adamw_pallas, unsupported
from kernels.adamw_shards import adamw_on_shards
from kernels.attention import warpgroups
from tests.adamw_steps import HERE, assert_near_steps, leaf_kept, third_step
from tests.arrays import normal
from tests.kernels.attention.gpus import INTERPRET, first_devices, lowered_for_cuda

simulated = pytest.mark.skipif(
    INTERPRET and not warpgroups.CAN_SIMULATE,
    reason="JAX before 0.12 cannot simulate a Mosaic kernel",
)

# XLA:CPU fuses a product and a sum where the processor can. Without, each operation rounds by
# itself, in the simulation as on a GPU.
NO_FUSING = "--xla_cpu_max_isa=AVX"
CHECKS = """
import json, jax
from kernels import adamw_check
from kernels.adamw import adamw_step

def other(changes):
    def update(leaves, gradients, told, settings, turns):
        told = told.at[1].mul(changes.pop("rate", 1.0))
        rows = zip(leaves, gradients, settings)
        return [adamw_step(x, g, told, h._replace(**changes)) for x, g, h in rows]
    return update

case = adamw_check.UpdateCase("int8", ((2, 192), (2, 192)))
for changes in ({}, {"seed": 1}, {"beta2": 0.96}, {"weight_decay": 0.0}):
    print(json.dumps(adamw_check.check(case, other(changes), 1)))
if INTERPRET:
    for kept in adamw_check.FORMATS:
        for _, run in adamw_check.checks(kept, small=True, interpret=True):
            print(json.dumps(run()))
"""


def test_every_bit_is_the_references_in_each_format():
    """Simulated with a look-out for races, with many arrays, turned gradients, and left out.

    The check itself notices another seed, another beta and another decay.
    """
    can = warpgroups.CAN_SIMULATE
    flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_FUSING}"
    done = subprocess.run(
        [sys.executable, "-c", f"INTERPRET = {can}\n{CHECKS}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sound, *others = map(json.loads, done.stdout.splitlines())
    planted, found = others[:3], others[3:]
    assert sound["problem"] is None
    assert [list(filter(row["errors"].get, row["errors"])) for row in planted] == [
        ["first moment", "second moment"],
        ["parameter", "second moment"],
        ["parameter"],
    ]
    assert [row["problem"] for row in found] == [None] * (10 if can else 0)


@pytest.mark.skipif(INTERPRET, reason="needs a GPU")
@pytest.mark.parametrize("kept", FORMATS)
def test_every_bit_is_the_references_on_a_gpu(kept):
    for _, run in adamw_check.checks(kept):
        assert run()["problem"] is None


@simulated
def test_scales_behind_the_last_sixteen_bytes_need_no_copy(monkeypatch):
    """A GPU copies 16 bytes at a time, and leaves those of three of seven scales."""
    copy = plgpu.copy_smem_to_gmem

    def copy_matrices(source, target):
        if len(source.shape) > 1:
            copy(source, target)

    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", copy_matrices)
    leaf, gradient = leaf_kept("int8", 0, 7, 64), normal(9, 7, 64)
    run = lambda *args: adamw_pallas([args[0]], [args[1]], args[2], [HERE], interpret=INTERPRET)
    [found] = jax.jit(run)(leaf, gradient, third_step())
    want = jax.jit(adamw_step, static_argnums=3)(leaf, gradient, third_step(), HERE)
    assert_near_steps(found, want)
    assert not np.array_equal(found.mu.scales, leaf.mu.scales)


@simulated
@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_parts_have_the_noise_of_their_place_in_the_whole(kept):
    """Cut in two dims, one of which leaves two runs of 64 together; devices do it one by one."""
    leaf, gradient = leaf_kept(kept, 0, 4, 6, 128), normal(9, 4, 6, 128)
    want = jax.jit(adamw_step, static_argnums=3)(leaf, gradient, third_step(), HERE)
    for starts in ((0, 0, 0), (2, 3, 0), (0, 3, 0)):
        part = lambda x, starts=starts: x[starts[0] :, starts[1] :][:2, :3]
        run = lambda leaf, gradient, told, starts=starts: adamw_pallas(
            [leaf],
            [gradient],
            told,
            [HERE],
            places=[PartPlace((4, 6, 128), starts)],
            interpret=INTERPRET,
        )
        args = *jax.tree.map(part, (leaf, gradient)), third_step()
        assert_near_steps(jax.jit(run)(*args)[0], jax.tree.map(part, want))


@pytest.mark.parametrize(
    "kept, turn, count",
    [("float32", None, 5), ("bfloat16", Turn(2), 2), ("int8", None, 2), ("int8", Turn(1, 1), 2)],
)
def test_arrays_are_updated_in_place_many_in_a_launch(kept, turn, count):
    """A launch takes 4; its results are in the memory of what they replace."""
    shape = (2, 64, 128)
    leaves, gradients = [leaf_kept(kept, 0, *shape)] * count, [normal(9, *shape)] * count
    run = lambda leaves, gradients, told: adamw_pallas(
        leaves, gradients, told, [HERE] * count, turns=[turn] * count
    )
    given = [turn.of(x) for x in gradients] if turn else gradients
    text = lowered_for_cuda(run, leaves, given, third_step())
    assert text.count("mosaic_gpu_v2") == -(-count // 4)
    assert text.count("output_operand_alias<") == count * len(jax.tree.leaves(leaves[0]))
    assert "stablehlo.transpose" not in text


def test_each_device_updates_its_own_parts():
    """Without a word to others, and whole arrays that the kernel refuses are left to XLA."""
    mesh = Mesh(first_devices(8).reshape(4, 2), ("fsdp", "tensor"))
    shapes = {(32, 8, 128): P("fsdp", "tensor"), (256,): P(), (6, 10): P("tensor")}
    leaves = [leaf_kept("int8", 0, *shape) for shape in shapes]
    specs = [
        jax.tree.map(lambda _, spec=spec: spec, x)
        for x, spec in zip(leaves, shapes.values(), strict=True)
    ]
    run = lambda leaves, gradients, told: adamw_on_shards(
        leaves, gradients, told, [HERE] * 3, mesh, specs
    )
    gradients = [normal(9, *shape) for shape in shapes]
    text = lowered_for_cuda(run, leaves, gradients, third_step())
    assert text.count("mosaic_gpu_v2") == 2  # int8, and float32 of a vector
    assert "tensor<64x64xi8>" in text  # runs of 64 in 8 of 32 rows, and 4 of 8 heads
    assert "all_gather" not in text
    assert "10xf32" in text


def test_a_device_knows_the_place_of_its_part(monkeypatch):
    """The positions of numbers come in place of a kernel, which several devices cannot simulate."""

    def positions(leaves, *_, places, **__):
        found = []
        for leaf, place in zip(leaves, places, strict=True):
            local = leaf.parameter.shape
            place = place or PartPlace(local, (0,) * len(local))
            index = jnp.indices(local) + jnp.reshape(jnp.stack(place.starts), (-1, 1, 1, 1))
            position = jnp.ravel_multi_index(tuple(index), place.shape, mode="clip")
            found.append(leaf._replace(parameter=position.astype(jnp.float32)))
        return found

    monkeypatch.setattr(adamw_shards, "adamw_pallas", positions)
    mesh = Mesh(first_devices(8).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    leaf, gradient = leaf_kept("int8", 0, 8, 4, 128), normal(9, 8, 4, 128)
    for spec in (P(("fsdp", "data"), "tensor"), P(None, "tensor", "data"), P("data"), P()):
        specs = [jax.tree.map(lambda _, spec=spec: spec, leaf)]
        run = jax.jit(lambda *args, specs=specs: adamw_on_shards(*args, [HERE], mesh, specs))
        [found] = run([leaf], [gradient], third_step())
        np.testing.assert_array_equal(found.parameter.ravel(), np.arange(8 * 4 * 128))


def test_arrays_that_the_kernel_refuses():
    leaf, gradient = leaf_kept("bfloat16", 0, 6, 128), normal(9, 6, 128)
    assert unsupported(leaf, gradient) is None
    assert "of 60 numbers" in unsupported(leaf_kept("float32", 0, 6, 10), normal(9, 6, 10))
    assert "parameters in float16" in unsupported(
        leaf._replace(parameter=leaf.parameter.astype(jnp.float16)), gradient
    )
    assert "gradients in float16" in unsupported(leaf, gradient.astype(jnp.float16))
    assert "bfloat16 and float32" in unsupported(
        leaf._replace(nu=leaf.nu.astype(jnp.float32)), gradient
    )
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((6, 32), x.dtype), leaf)
    assert "rows of 32" in unsupported(part, gradient, PartPlace((6, 128), (0, 32)))
    whole = leaf_kept("int8", 0, 6, 128)
    halves = whole.mu._replace(codes=whole.mu.codes[:, :64])
    cut = Leaf(whole.parameter[:, :64], halves, halves)
    assert "blocks that several devices share" in unsupported(cut, gradient, None)
    with pytest.raises(ValueError, match="cannot turn the gradient of"):
        adamw_pallas([leaf], [gradient.T], third_step(), [HERE], turns=[Turn(1)])
