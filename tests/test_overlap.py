"""The collectives of a step lie inside its first forwards and last backwards, one for each layer.

What the compiled programs send over `data`, and what waits for it. On a CPU nothing overlaps: these
tests show that nothing keeps a scheduler from it, not that one does it.
"""

import functools
import re

import jax
import pytest

from holmesjax import costs
from holmesjax.plan import Axis
from holmesjax.programs import batch_shapes, boundary_shape, compile_stages
from tests.collectives import collectives, entry, num_products, texts, waits_for
from tests.test_pipeline import VARIANTS, hand_made_plan, make_model, make_stages

NUM_BLOCKS = 3  # of the stage that is looked at, which also has the head
# Matrix products of a llama block: of the weights (q, k, v, out, gate, up, down) and of attention.
WEIGHTS, ATTENTION_FORWARD, ATTENTION_BACKWARD = 7, 2, 5


@functools.cache
def second_stage(data, *, tensor=1, schedule="1f1b", dtype="float32", **sizes):
    model = make_model(**VARIANTS["llama"] | sizes, num_layers=1 + NUM_BLOCKS)
    plan = hand_made_plan((1, NUM_BLOCKS), data, tensor, microbatches=2, schedule=schedule)
    return make_stages(model, plan, dtype=dtype)[1]


@functools.cache
def compiled(data, **changes):
    [programs] = compile_stages([second_stage(data, **changes)])
    return programs


def parameters(stage) -> int:
    """On each device of `tensor`."""
    shape = costs.StageShape(
        num_blocks=NUM_BLOCKS,
        is_first=False,
        is_last=True,
        data=stage.num_replicas,
        tensor=stage.mesh.shape[Axis.TENSOR],
        sequences=stage.microbatch // stage.num_replicas,
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype=stage.compute_dtype,
        checkpointing="none",
    )
    return costs.stage_parameters(stage.model, shape)


def over_data(program, stage) -> list[tuple[str, int]]:
    """Kind and bytes of each collective that crosses `data`."""
    [text] = texts(program)
    found = collectives(text, stage.mesh)
    return [(kind, num_bytes) for kind, axes, num_bytes in found if Axis.DATA in axes]


LOSS = ("all-reduce", 4)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_microbatch_sends_nothing_over_data(schedule):
    programs = compiled(2, schedule=schedule)
    if schedule == "zero_bubble":
        backwards = [programs.split.input_gradient, programs.split.weight_gradient]
    else:
        backwards = [programs.backward]
    assert over_data(programs.forward, programs.stage) == [LOSS]
    for program in backwards:
        assert over_data(program, programs.stage) == []


@pytest.mark.parametrize("data, tensor", [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_one_collective_for_each_layer(schedule, data, tensor):
    if schedule == "zero_bubble" and (data, tensor) != (2, 1):
        pytest.skip("compiles long and shows nothing new")
    programs = compiled(data, tensor=tensor, schedule=schedule)
    stage = programs.stage
    gathers = over_data(programs.first_forward, stage)
    gathers.remove(LOSS)
    is_split = programs.split is not None
    last = programs.split.last_weight_gradient if is_split else programs.last_backward
    reductions = over_data(last, stage)
    for kind, found in (("all-gather", gathers), ("reduce-scatter", reductions)):
        assert [k for k, _ in found] == [kind] * (NUM_BLOCKS + 1)
        assert sum(num_bytes for _, num_bytes in found) == 4 * parameters(stage)


def test_what_cannot_be_cut_is_not_gathered_and_reduced_whole():
    """Of the norms' width 30, and of nothing else, 4 replicas make no equal parts."""
    programs = compiled(4, width=30, num_heads=4, num_kv_heads=4, head_dim=12)
    stage = programs.stage
    whole = (2 * NUM_BLOCKS + 1) * 30
    cut = [x for x in over_data(programs.first_forward, stage) if x != LOSS]
    print(cut, over_data(programs.last_backward, stage), parameters(stage), whole)
    assert 0


def graph(program):
    [text] = texts(program)
    return entry(text)


def of_kind(program, kind) -> list[str]:
    return [name for name, instruction in program.items() if instruction.kind == kind]


def test_no_reduction_waits_for_what_it_does_not_need():
    """The gradients of the layers after it up to the boundary, and its own."""
    program = graph(compiled(2).last_backward)
    waits = sorted(
        num_products(program, waits_for(program, name))
        for name in of_kind(program, "reduce-scatter")
    )
    head, passes_on = 1, WEIGHTS + ATTENTION_BACKWARD
    print(waits, num_products(program, set(program)))
    assert waits == [
        2 * head,
        *(head + i * passes_on + passes_on + WEIGHTS for i in range(NUM_BLOCKS)),
    ]


def test_no_forward_waits_for_later_gathers():
    program = graph(compiled(2).first_forward)
    gathers = of_kind(program, "all-gather")
    waiting = sorted(
        num_products(program, {n for n in program if gather in waits_for(program, n)})
        for gather in gathers
    )
    block = WEIGHTS + ATTENTION_FORWARD
    print(waiting)
    assert waiting == [1 + i * block for i in range(NUM_BLOCKS + 1)]


def test_order():
    for p,k in ((compiled(2).last_backward,"reduce-scatter"),(compiled(2).first_forward,"all-gather")):
        program=graph(p)
        s="".join("R" if i.kind==k else "." * i.num_products for i in program.values())
        print(s)
    assert 0
