"""Parameters cut over `fsdp` and `context`: the same step, what it sends, and what it keeps.

A case is a plan and its kind of model. Its programs are compiled once, and both run against one
plain `jax.grad` step on one device and read as text.
"""

import functools
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
import pytest

from benchmarks.memory_compiled import bytes_on_a_device
from holmesjax.checkpoints import checkpoint, manifest
from holmesjax.costs import memory, work
from holmesjax.plan.plan import Axis
from holmesjax.runtime import microbatch
from holmesjax.runtime.pipeline import OneStage, in_one_process
from holmesjax.runtime.programs import (
    ProgramKey,
    batch_shapes,
    boundary_shape,
    compile_stages,
    compile_whole_step,
    gradient_shapes,
    replica_shapes,
)
from tests.checkpoints.test_checkpoint import random_states, write_states
from tests.collectives import sent, texts
from tests.runtime.test_pipeline import (
    VARIANTS,
    check_against_plain,
    hand_made_plan,
    make_model,
    make_stages,
)

# One worker runs them all: they share what is made once.
pytestmark = pytest.mark.xdist_group("fsdp")


class Case(NamedTuple):
    split: tuple[int, ...]
    data: tuple[int, ...]
    fsdp: tuple[int, ...]
    tensor: int = 1
    context: tuple[int, ...] = (1, 1)
    microbatches: int = 1
    remat: str = "none"
    variant: str = "llama"  # of the model
    tied: bool = False
    mask: bool = False

    @property
    def model(self):
        variant = VARIANTS[self.variant]
        return make_model(**variant, num_layers=sum(self.split), tied_embeddings=self.tied)

    @property
    def plan(self):
        return hand_made_plan(
            self.split,
            self.data,
            self.tensor,
            fsdp=self.fsdp,
            context=self.context[: len(self.split)],
            microbatches=self.microbatches,
            remat=self.remat,
        )


PIPELINES = {
    "both axes": Case((1, 1), (2, 2), (2, 2), microbatches=2, variant="gpt2", mask=True),
    "with tensor": Case((2, 1), (1, 1), (2, 2), tensor=2, microbatches=2, tied=True),
    "unequal sides": Case((1, 1), (1, 2), (4, 2), microbatches=2, remat="dots", variant="gpt2"),
    "next to data only": Case((1, 1), (4, 1), (1, 4), microbatches=2, remat="full", tied=True),
}
CONTEXTS = {
    "beside fsdp and data": Case(
        (1, 1), (1, 2), (2, 1), context=(2, 2), microbatches=2, variant="gpt2", mask=True
    ),
    "with tensor": Case((1, 1), (1, 1), (1, 1), tensor=2, context=(2, 2), tied=True, remat="dots"),
    "unequal": Case((1, 1), (1, 2), (1, 1), context=(4, 1), microbatches=2, remat="full"),
}
WHOLE = {
    "one": Case((2,), (1,), (4,), tied=True),
    "all axes": Case((2,), (2,), (2,), tensor=2, microbatches=2, remat="dots", variant="gpt2"),
    "context": Case((2,), (2,), (1,), context=(4,), microbatches=2, mask=True),
}


# With `tensor` beside `fsdp`, the XLA of JAX 0.12 does two things worse than that of 0.10. In one
# program it merges the gathers of forward and backward, barrier or not, and keeps what it gathered
# (85,248 bytes, the forward's alone, for 151,936). The embedding's gradient goes from a cut along
# sequences to one along the width by an all-gather of the whole, of which it warns
# ("Involuntary full rematerialization"), not by an all-to-all (8,192 bytes more). With `context` it
# does both, too: the second beside `tensor`, the first in a loop over microbatches.
NEWER_XLA = pytest.mark.xfail(
    jax.__version_info__ >= (0, 11), reason="XLA gathers otherwise", strict=True
)


def stages_of(case):
    return make_stages(case.model, case.plan, mask=case.mask)


@functools.cache
def compiled(case):
    return compile_stages(stages_of(case))


EVERY = {**PIPELINES, **{f"context, {name}": case for name, case in CONTEXTS.items()}}


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_every_cut_equals_one_device(case):
    runner = in_one_process(case.plan, compiled(case))
    check_against_plain(runner, case.model, case.plan, mask=case.mask)


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_one_stage_in_one_program_gathers_again_in_the_backward(case, request):
    if case in (WHOLE["all axes"], WHOLE["context"]):
        request.applymarker(NEWER_XLA)
    [stage] = stages_of(case)
    programs = compile_whole_step(stage)
    check_against_plain(OneStage(programs), case.model, case.plan, mask=case.mask)
    gathered = sum(work.gathered_parameters(case.model, shape_of(case, 0)))
    total = sent(programs["step"].as_text(), stage.mesh)
    assert total["all-gather", parameter_axes(stage.mesh)] == 4 * gathered


def parameter_axes(mesh):
    return tuple(axis for axis in (Axis.FSDP, Axis.CONTEXT) if axis in mesh.shape)


# ---- what is sent --------------------------------------------------------------------------------


def shape_of(case, index) -> work.StageShape:
    data, fsdp, last = case.data[index], case.fsdp[index], len(case.split) - 1
    return work.StageShape(
        num_blocks=case.split[index],
        is_first=index == 0,
        is_last=index == last,
        data=data,
        tensor=case.tensor,
        fsdp=fsdp,
        context=case.context[index],
        sequences=case.plan.global_batch // (case.microbatches * data * fsdp),
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype="float32",
        checkpointing=case.remat,
    )


@pytest.mark.parametrize(
    "case, index", [(case, i) for case in EVERY.values() for i in range(len(case.split))]
)
def test_a_microbatch_sends_what_the_costs_say_and_nothing_over_data(case, index, request):
    """XLA:CPU sums gradients with all-reduces of the whole arrays and keeps a part of each."""
    if case in (PIPELINES["with tensor"], CONTEXTS["with tensor"]) and index == 0:
        request.applymarker(NEWER_XLA)
    programs, shape = compiled(case)[index], shape_of(case, index)
    mesh = programs.stage.mesh
    parts = parameter_axes(mesh)
    passes = [
        sent(p.as_text(), mesh)
        for p in (programs.table[ProgramKey(name, False)] for name in ("forward", "backward"))
    ]
    gathers = work.gathered_parameters(case.model, shape) if parts else (0, 0)
    for total, gathered in zip(passes, gathers, strict=True):
        assert total["all-gather", parts] == 4 * gathered
        assert not [axes for kind, axes in total if kind == "all-gather" and Axis.DATA in axes]
    forward, backward = passes
    scalars = {k: n for k, n in forward.items() if Axis.DATA in k[1]}
    assert sum(scalars.values()) <= 4 * shape.is_last  # the mean loss
    assert not [axes for _, axes in backward if Axis.DATA in axes]
    # Keys and values go to all other parts of their sequences; in the backward, gradients too.
    passed = work.key_value_numbers(case.model, shape.tensor) * shape.num_blocks
    passed *= work.stage_tokens(case.model, shape) * (shape.context - 1)
    moved = (shape.context > 1) * work.stage_tokens(case.model, shape) * case.model.width
    # Each has one boundary. Runs that stay where they are send to themselves.
    for total, numbers in ((forward, passed + moved), (backward, 2 * passed + moved)):
        permuted = [total.pop(("collective-permute", axes), 0) for axes in ((Axis.CONTEXT,), ())]
        assert sum(permuted) == 4 * numbers
    reductions = ("all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    reduced = work.reduced_numbers(case.model, shape) if parts else 0
    assert sum(backward[kind, parts] for kind in reductions) == 4 * reduced


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_a_step_gathers_and_reduces_over_data_alone(case):
    """Besides what the same pass of a microbatch sends."""
    for i, programs in enumerate(compiled(case)):
        mesh, shape = programs.stage.mesh, shape_of(case, i)
        num_bytes = 4 * work.stage_parameters(case.model, shape) // shape.parameter_parts
        for function, alone, kind in (
            ("forward", "gather", "all-gather"),
            ("backward", "reduce", "reduce-scatter"),
        ):
            step, own = (programs.table.get(ProgramKey(name, True)) for name in (function, alone))
            if kind == "reduce-scatter" and shape.data == 1 and not programs.stage.shares_table:
                assert step is own is None
                continue
            assert (step is None) == (own is not None)
            once = sum((sent(text, mesh) for text in texts(step or own)), Counter())
            always = (
                sent(programs.table[ProgramKey(function, False)].as_text(), mesh)
                if step
                else Counter()
            )
            assert not always - once
            assert once - always == ({(kind, (Axis.DATA,)): num_bytes} if shape.data > 1 else {})


# ---- what is kept --------------------------------------------------------------------------------


def kept_bytes(case, fsdp):
    """Of a microbatch, from its forward to its backward, over all devices."""
    [stage] = stages_of(case._replace(fsdp=(fsdp,)))
    batch = {n: jax.ShapeDtypeStruct((4, 16), np.int32) for n in stage.inputs}
    out = jax.eval_shape(
        lambda r, b: microbatch.forward(stage, r, None, b)[1], replica_shapes(stage), batch
    )
    return sum(x.size * x.dtype.itemsize for x in out.arrays)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("data", [1, 2])
def test_nothing_gathered_is_kept_for_the_backward(remat, data):
    """Or there would be more of it than without fsdp."""
    case = Case((4,), (data,), (1,), remat=remat, variant="gpt2")
    assert kept_bytes(case, 2) == kept_bytes(case, 1)


@pytest.mark.parametrize("case", [*EVERY.values(), *WHOLE.values()])
def test_each_device_holds_what_the_memory_says(case):
    for i, stage in enumerate(stages_of(case)):
        items = memory.stage_memory_bytes(case.model, shape_of(case, i))
        assert bytes_on_a_device(stage.state_shapes.params) == items["parameters"]
        count = 4
        assert bytes_on_a_device(stage.state_shapes.opt_state) == items["optimizer"] + count
        assert bytes_on_a_device(replica_shapes(stage)) == items["replicas"]
        assert bytes_on_a_device(gradient_shapes(stage)) == items["gradients"]
        if len(case.split) == 2:
            ways = 2 * memory.BUFFERS
            assert bytes_on_a_device(boundary_shape(stage)) * ways == items["boundaries"]


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_what_is_kept_is_cut_over_the_sequences(case):
    """XLA chooses how; 5% for tables of angles, which every device has."""
    for i, programs in enumerate(compiled(case)):
        stage = programs.stage
        x_BLD = None if stage.is_first else boundary_shape(stage)
        run = functools.partial(microbatch.forward, stage)
        _, saved = jax.eval_shape(run, replica_shapes(stage), x_BLD, batch_shapes(stage))
        _, where = programs.table[ProgramKey("forward", False)].output_shardings
        kept = jax.tree.map(lambda x, s: x.update(sharding=s), saved.arrays, where.arrays)
        whole = sum(x.size * x.dtype.itemsize for x in kept)
        cuts = case.data[i] * shape_of(case, i).parameter_parts
        assert bytes_on_a_device(kept) * cuts <= 1.05 * whole


def test_a_checkpoint_moves_between_data_and_fsdp(tmp_path):
    cut = PIPELINES["both axes"]
    model = cut.model
    plans = {"data": hand_made_plan((2,), 2, 2), "fsdp": cut.plan}
    for source, target in (("data", "fsdp"), ("fsdp", "data")):
        stages, others = (make_stages(model, plans[name]) for name in (source, target))
        folder = tmp_path / source
        write_states(folder, model, stages, steps=(1,))
        [found] = manifest.find(folder)
        wanted = random_states(others)
        for stage, state, want in zip(
            others, checkpoint.restore(found, others), wanted, strict=True
        ):
            shapes, values = checkpoint.flatten(stage.state_shapes), checkpoint.flatten(want)
            for key, got in checkpoint.flatten(state).items():
                assert got.sharding == shapes[key].sharding
                np.testing.assert_array_equal(np.asarray(got), np.asarray(values[key]), key)
