"""Bytes that the programs of every row of whole steps send and keep, read from XLA's text.

The rows are in `tests/whole_steps.py`; `tests/runtime/test_whole_steps.py` runs the same programs.
"""

import dataclasses
import re
from collections import Counter
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from benchmarks.memory_compiled import bytes_on_a_device
from holmesjax.config import ExpertsConfig, Fp8Config, LatentAttentionConfig
from holmesjax.costs import memory, work
from holmesjax.costs.expert_exchange import exchanged_bytes
from holmesjax.costs.parameters import (
    gathered_bytes,
    gathered_parameters,
    held_parameters,
    reduced_numbers,
)
from holmesjax.costs.stage_shape import StageShape, stage_tokens
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.model_layers import EMBED, HEAD
from holmesjax.plan.plan import Axis
from holmesjax.runtime import microbatch
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.program_shapes import (
    boundary_shape,
    gradient_shapes,
    replica_shapes,
)
from holmesjax.runtime.programs import ProgramKey
from tests.collectives import over, sent, texts
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.whole_steps import PARAMETERS, compiled

COUNT = 4  # bytes of the number of updates
BACKWARD = ("backward", "input_gradient", "weight_gradient")


def gathers_otherwise(programs) -> bool:
    """Whether XLA gathers more than it needs to for the embedding, in a backward of one program.

    With `tensor` beside `fsdp` or `context`, the embedding's gradient goes from a cut along
    sequences to one along the width. The XLA of JAX 0.12 gathers the whole, of which it warns
    ("Involuntary full rematerialization"); that of 0.10 has an all-to-all.
    """
    chunk = programs.chunk
    is_cut = chunk.num_parts > 1 and chunk.mesh.shape[Axis.TENSOR] > 1
    return jax.__version_info__ >= (0, 11) and chunk.is_first and is_cut and not programs.is_split


def shape_of(chunk) -> StageShape:
    data, parts = chunk.num_replicas, chunk.num_parts
    size = lambda axis: chunk.mesh.shape.get(axis, 1)
    blocks = set(chunk.layers) - {EMBED, HEAD}
    return StageShape(
        blocks=(len(blocks),),
        recomputed=(sum(chunk.plan.policy_of(layer) != "none" for layer in blocks),),
        is_first=chunk.is_first,
        is_last=chunk.is_last,
        data=data,
        tensor=size(Axis.TENSOR),
        fsdp=size(Axis.FSDP),
        context=size(Axis.CONTEXT),
        expert=size(Axis.EXPERT),
        sequences=chunk.microbatch_size * size(Axis.CONTEXT) // (data * parts),
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype="float32",
        checkpointing=chunk.plan.activation_checkpointing,
        kept=(chunk.optimizer.config.moments,) * 2,
        sequence_parallel=chunk.sequence_parallel,
    )


def parameter_axes(mesh):
    return tuple(axis for axis in (Axis.FSDP, Axis.CONTEXT) if axis in mesh.shape)


def total_sent(programs, mesh) -> Counter:
    found = (sent(text, mesh) for program in programs for text in texts(program))
    return sum(found, Counter())


# ---- what is sent --------------------------------------------------------------------------------


def test_gradients_may_cross_replicas_in_bfloat16():
    """The program as JAX asks for it: XLA:CPU sends what it likes."""
    [chunk] = make_chunks(make_model(), hand_made_plan((4,), 2, 2), dtype="bfloat16")
    narrow = dataclasses.replace(chunk, reduction_dtype="bfloat16")
    shapes = gradient_shapes(chunk)
    crossing = lambda chunk: re.findall(
        r":(\w+)\[[\d,]*\] = (all_to_all|reduce_scatter)\[",
        str(jax.make_jaxpr(chunk.reduce)(shapes)),
    )
    assert set(crossing(narrow)) == {("bf16", "all_to_all")}
    assert set(crossing(chunk)) == {("f32", "reduce_scatter")}
    assert len(crossing(narrow)) == len(crossing(chunk)) == len(chunk.layers)


def is_chunked_head(chunk) -> bool:
    """Whether the forward of the head computes its gradients, too, and keeps them whole."""
    return chunk.is_last and chunk.kernels.cross_entropy == "chunked"


def parameters_sent(chunk) -> tuple[int, int, int]:
    """Gathered by a microbatch's forward, by its backward, and reduced there; on each device."""
    if not parameter_axes(chunk.mesh):
        return 0, 0, 0
    model, shape = chunk.model, shape_of(chunk)
    forward, backward = gathered_parameters(model, shape)
    head = is_chunked_head(chunk) * model.vocab_size * model.width // shape.tensor
    return forward, backward - head, reduced_numbers(model, shape) - head


def rows_sent(chunk) -> int:
    """Numbers of the embedding's rows, of the tokens of a microbatch on each device."""
    return chunk.sends_rows * stage_tokens(chunk.model, shape_of(chunk)) * chunk.model.width


def check_microbatch(programs):
    """A microbatch sends what the costs say.

    XLA:CPU sums gradients with all-reduces of whole arrays, and keeps a part of each.
    """
    chunk, model = programs.chunk, programs.chunk.model
    mesh, shape, parts = chunk.mesh, shape_of(chunk), parameter_axes(chunk.mesh)
    own = lambda name: [p for key, p in programs.table.items() if key.function == name]
    forward = [total_sent([program], mesh) for program in own("forward")]
    backward = [total_sent([program], mesh) for program in own("backward")]
    *gathers, reduced = parameters_sent(chunk)
    # Keys and values go to all other parts of their sequences; in the backward, gradients too.
    [block] = kinds(model).blocks
    passed = work.key_value_numbers(block, shape.tensor) * sum(shape.blocks)
    passed *= stage_tokens(model, shape) * (shape.context - 1)
    # Boundaries of cut sequences. Runs that stay where they are send to themselves.
    num_boundaries = 2 - shape.is_first - shape.is_last
    moved = (shape.context > 1) * stage_tokens(model, shape) * model.width * num_boundaries
    for totals, gathered, numbers in (
        (forward, gathers[0], passed + moved),
        (backward, gathers[1], 2 * passed + moved),
    ):
        for total in totals:
            rows = rows_sent(chunk) if totals is forward else 0
            assert total["all-gather", parts] == 4 * (gathered - rows)
            # The rows go to the devices that hold their tokens.
            assert total["all-to-all", parts] == 4 * rows or totals is backward
            permuted = [
                total.pop(("collective-permute", axes), 0) for axes in ((Axis.CONTEXT,), ())
            ]
            assert sum(permuted) == 4 * numbers
    reductions = ("all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    for total in backward:
        assert sum(total[kind, parts] for kind in reductions) == 4 * reduced


def check_step(programs):
    """Each layer crosses `data` once a step, as one array, and in no other program."""
    chunk, shape = programs.chunk, shape_of(programs.chunk)
    found = {key: over(Axis.DATA, program, chunk.mesh) for key, program in programs.table.items()}
    if chunk.is_last:  # the losses of the replicas
        assert found.pop(ProgramKey("total_loss", False)) == [("all-reduce", 4)] * (shape.data > 1)
    within = chunk.is_first and shape.data > 1
    gathers = found.pop(ProgramKey("forward" if within else "gather", True))
    last = "weight_gradient" if programs.is_split else "backward" if within else "reduce"
    reductions = found.pop(ProgramKey(last, True), None)
    assert (reductions is None) == (shape.data == 1 and not chunk.shares_table)
    layers = chunk.state_shapes.params
    num_bytes = 4 * held_parameters(chunk.model, shape)[0]
    for kind, crossed in (("all-gather", gathers), ("reduce-scatter", reductions or [])):
        assert [k for k, _ in crossed] == [kind] * (len(layers) if shape.data > 1 else 0)
        assert sum(n for _, n in crossed) == (num_bytes if shape.data > 1 else 0)
    assert not any(found[key] for key in found if key.function in ("forward", *BACKWARD))


def check_whole_step(programs):
    """One program gathers again in its backward."""
    chunk, parts = programs.chunk, parameter_axes(programs.chunk.mesh)
    total = sent(programs["step"].as_text(), chunk.mesh)
    gathered = sum(parameters_sent(chunk)[:2]) - rows_sent(chunk)
    assert total["all-gather", parts] == 4 * gathered


@pytest.mark.parametrize("row", PARAMETERS)
def test_what_is_sent(row):
    programs = compiled(row)
    if not isinstance(programs, list):
        check_whole_step(programs)
        return
    for chunk in programs:
        with pytest.raises(AssertionError) if gathers_otherwise(chunk) else nullcontext():
            check_microbatch(chunk)
        check_step(chunk)


def test_all_weights_of_latents_are_cut():
    latents = LatentAttentionConfig(rank=12, query_rank=16, rotary_width=4, value_width=6)
    changes = {"norm": "rms_norm", "activation": "swiglu", "mlp_width": 48, "head_dim": 12}
    model = make_model(num_layers=2, **changes, latent_attention=latents)
    chunk, _ = make_chunks(model, hand_made_plan((1, 1), 1, 1, fsdp=2, microbatches=2))
    whole = sum(x.size for x in jax.tree.leaves(replica_shapes(chunk)))
    assert bytes_on_a_device(replica_shapes(chunk)) == 4 * whole / 2
    check_microbatch(compile_chunks([chunk])[0])


@pytest.mark.parametrize("checkpointing", ["none", "dots", "full"])
def test_codes_of_fp8_are_gathered_as_they_are(checkpointing):
    """A byte a number, and in each program only the layouts that it reads."""
    fp8 = Fp8Config(history=3, exclude_down=True)
    model = make_model(num_layers=2, norm="rms_norm", activation="swiglu", fp8=fp8)
    plan = hand_made_plan((1, 1), 1, 1, fsdp=2, microbatches=2, checkpointing=checkpointing)
    chunk, _ = make_chunks(model, plan)
    [programs] = compile_chunks([chunk])
    predicted = gathered_bytes(model, shape_of(chunk))
    for name, num_bytes in zip(("forward", "backward"), predicted, strict=True):
        total = total_sent([programs[name]], chunk.mesh)
        rows = 4 * rows_sent(chunk) if name == "forward" else 0
        assert total["all-gather", (Axis.FSDP,)] == num_bytes - rows


@pytest.mark.parametrize(
    "checkpointing, norms, latent_width",
    [
        ("none", "before", None),
        ("full", "before", None),
        ("full", "after", None),
        ("full", "before", 8),
    ],
)
def test_experts_stay_where_they_are_and_tokens_go_to_them(checkpointing, norms, latent_width):
    """An exchange is in a loop, of which each round sends as much; of latents, a quarter."""
    experts = ExpertsConfig(count=4, active=2, width=24, latent_width=latent_width)
    changes = {"norm": "rms_norm", "activation": "swiglu", "pattern": ("expert_block",)}
    model = make_model(num_layers=2, **changes, norms=norms, experts=experts)
    cuts = {"fsdp": 2, "expert": 2, "microbatches": 2}
    plan = hand_made_plan((1, 1), 1, 1, **cuts, checkpointing=checkpointing)
    chunk, _ = make_chunks(model, plan)
    [programs] = compile_chunks([chunk])
    shape = shape_of(chunk)
    numbers = 4 * 3 * (latent_width or 32) * 24  # of all experts, of which a device has a half
    exchanged = exchanged_bytes(model, shape, 1)
    gathered = gathered_parameters(model, shape)
    both, reduced = (Axis.FSDP, Axis.EXPERT), reduced_numbers(model, shape)
    for i, name in enumerate(("forward", "backward")):
        total = total_sent([programs[name]], chunk.mesh)
        is_read = norms == "after" or latent_width is not None
        again = sum(exchanged[0]) if i == 1 and checkpointing == "full" and is_read else 0
        assert total["all-to-all", (Axis.EXPERT,)] == sum(exchanged[i]) + again
        rows = rows_sent(chunk) if name == "forward" else 0
        assert total["all-gather", both] == 4 * (gathered[i] - numbers - rows)
        assert total["all-gather", (Axis.FSDP,)] == 4 * numbers / 2
    assert total["all-reduce", (Axis.FSDP,)] == 4 * numbers / 2
    reductions = ("all-reduce", "all-to-all")
    assert sum(total[kind, both] for kind in reductions) == 4 * (reduced - numbers)


# ---- what is kept --------------------------------------------------------------------------------


def kept_bytes(fsdp, data, checkpointing):
    """Bytes of a microbatch, from its forward to its backward, over all devices."""
    model = make_model(num_layers=1, positions="learned")
    [chunk] = make_chunks(
        model, hand_made_plan((1,), data, 1, fsdp=fsdp, checkpointing=checkpointing)
    )
    batch = {n: jax.ShapeDtypeStruct((4, 16), np.int32) for n in chunk.inputs}
    run = lambda r, b: microbatch.forward(chunk, chunk.state_shapes.fixed, r, None, b)[-1]
    out = jax.eval_shape(run, replica_shapes(chunk), batch)
    return sum(x.size * x.dtype.itemsize for x in out.arrays)


@pytest.mark.parametrize("checkpointing", ["none", "dots", "full"])
@pytest.mark.parametrize("data", [1, 2])
def test_nothing_gathered_is_kept_for_the_backward(checkpointing, data):
    """Or there would be more of it than without fsdp."""
    assert kept_bytes(2, data, checkpointing) == kept_bytes(1, data, checkpointing)


@pytest.mark.parametrize("row", PARAMETERS)
def test_each_device_holds_what_the_memory_says(row):
    for chunk in row.made_chunks:
        items = memory.stage_memory_bytes(row.model, shape_of(chunk))
        assert bytes_on_a_device(chunk.state_shapes.params) == items["parameters"]
        # Devices that share a block of int8 each have its scale.
        rounded = 0.06 if row.moments == "int8" else 0
        found = bytes_on_a_device(chunk.state_shapes.opt_state) - COUNT
        assert found == pytest.approx(items["optimizer"], rel=rounded, abs=0)
        assert bytes_on_a_device(replica_shapes(chunk)) == items["replicas"]
        assert bytes_on_a_device(gradient_shapes(chunk)) == items["gradients"]
        sides = 2 - chunk.is_first - chunk.is_last
        ways = 2 * memory.BUFFERS * sides
        assert bytes_on_a_device(boundary_shape(chunk)) * ways == items["boundaries"]


@pytest.mark.parametrize("row", PARAMETERS)
def test_what_is_kept_is_cut_over_the_sequences(row):
    """XLA chooses how. Every device has the tables of angles, and 2% are left to it."""
    compiled_chunks = compiled(row)
    for programs in compiled_chunks if isinstance(compiled_chunks, list) else []:
        chunk, forward = programs.chunk, programs.table.get(ProgramKey("forward", False))
        if forward is None or is_chunked_head(chunk):
            continue
        *_, saved = forward.out_info
        kept = [x for x in saved.arrays if x.shape[-2:] != (1, chunk.model.head_width // 2)]
        whole = sum(x.size * x.dtype.itemsize for x in kept)
        cuts = chunk.num_replicas * chunk.num_parts
        assert bytes_on_a_device(kept) * cuts <= 1.02 * whole
        if chunk.sequence_parallel:
            # But for what the head reads, which is gathered once, and never again.
            length = chunk.model.context_length // chunk.mesh.shape.get(Axis.CONTEXT, 1)
            stream = [x for x in kept if x.shape[-2:] == (length, chunk.model.width)]
            local = [x.sharding.shard_shape(x.shape)[-2] for x in stream]
            assert stream
            assert local.count(length) <= chunk.is_last
            assert set(local) - {length} <= {length // chunk.mesh.shape[Axis.TENSOR]}
