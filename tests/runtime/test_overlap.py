"""Operations that wait for collectives over `data`, and the bytes that odd arrays send.

Nothing keeps a scheduler from overlapping them with computation; no test says that one does it.
`tests/runtime/test_sent.py` reads what each row of whole steps sends.
"""

import dataclasses
import functools
import re

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from holmesjax.config import KernelsConfig
from holmesjax.costs.parameters import stage_parameters
from holmesjax.costs.stage_shape import StageShape
from holmesjax.plan.plan import Axis
from holmesjax.runtime import microbatch
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.program_shapes import batch_shapes, gradient_shapes, replica_shapes
from holmesjax.runtime.programs import ProgramKey
from tests.collectives import (
    entry,
    groups_of,
    num_products,
    over,
    texts,
    traced_events,
    waits_for,
)
from tests.hand_made_plans import VARIANTS, hand_made_plan, make_chunks, make_model

# One worker runs them all: they share what is made once.
pytestmark = pytest.mark.xdist_group("overlap")

NUM_BLOCKS = 2  # of the stage that is looked at
NUM_LAYERS = NUM_BLOCKS + 1  # with the embedding, or with the head
# Matrix products of a llama block: of the weights (q, k, v, out, gate, up, down) and of attention.
WEIGHTS, ATTENTION_FORWARD, ATTENTION_BACKWARD = 7, 2, 5


@functools.cache
def make_chunk(data, *, is_first=True, dtype="float32", **sizes):
    """The first of two, or the last."""
    model = make_model(**VARIANTS["llama"] | sizes, num_layers=1 + NUM_BLOCKS)
    layers = (NUM_BLOCKS, 1) if is_first else (1, NUM_BLOCKS)
    plan = hand_made_plan(layers, data, 1, microbatches=2)
    return make_chunks(model, plan, dtype=dtype)[0 if is_first else 1]


@functools.cache
def compiled(data, **changes):
    return compile_chunks([make_chunk(data, **changes)])[0]


def parameters(chunk) -> int:
    shape = StageShape(
        blocks=(NUM_BLOCKS,),
        is_first=chunk.is_first,
        is_last=chunk.is_last,
        data=chunk.num_replicas,
        tensor=1,
        sequences=chunk.microbatch_size // chunk.num_replicas,
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype=chunk.compute_dtype,
        checkpointing="none",
    )
    return stage_parameters(chunk.model, shape)


# ---- what is sent over data ----------------------------------------------------------------------


def test_the_notations_of_groups():
    for text in (
        "{{0,2},{1,3}}",
        "[2,2]<=[2,2]T(1,0)",
        "mesh['data'=2,'tensor'=2] {'data'}",
        "mesh['axis_0'=2,'axis_1'=2] {'axis_0'}",
        "mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_1'}",
    ):
        assert groups_of(text).tolist() == [[0, 2], [1, 3]]


INSTRUCTION = re.compile(r"%?(\S+) = \w+\[([\d,]*)\]\{([\d,]*)\S* ([\w-]+)\(%?([\w.-]+)(.*)")


def num_reordered(program) -> int:
    """Copies and transposes that change the order of numbers in memory; inside of fusions, too.

    A transpose to another layout may leave all numbers where they are.
    """
    numbers = lambda text: [int(n) for n in text.split(",") if n]
    layouts, count = {}, 0
    for name, shape, layout, kind, operand, rest in INSTRUCTION.findall("".join(texts(program))):
        layouts[name] = order = numbers(layout)
        if kind in ("copy", "transpose"):
            sizes = numbers(shape)
            dims = re.search(r"dimensions=\{([\d,]*)\}", rest)
            source = numbers(dims[1]) if dims else range(len(sizes))
            before = [source.index(dim) for dim in layouts[operand]]
            count += [d for d in order if sizes[d] > 1] != [d for d in before if sizes[d] > 1]
    return count


@pytest.mark.parametrize("is_first", [True, False])
def test_a_replica_computes_as_one_alone(is_first):
    """XLA transposes no weight because there are others."""
    pair, alone = compiled(2, is_first=is_first), make_chunk(1, is_first=is_first)
    half = dataclasses.replace(alone.plan, global_batch=alone.plan.global_batch // 2)
    alone = compile_chunks([dataclasses.replace(alone, plan=half)])[0]
    of_pair, of_one = (num_reordered(p.table[ProgramKey("backward", False)]) for p in (pair, alone))
    assert 0 < of_pair <= of_one  # the XLA of JAX 0.12 reorders less in the pair


def test_what_does_not_divide_is_reduced_whole_and_never_gathered():
    """The model has 4 heads of width 12 and a width of 30, on 4 replicas."""
    programs = compiled(4, width=30, num_kv_heads=4, head_dim=12)
    mesh = programs.chunk.mesh
    cut = 4 * (4 * 30 * 4 * 12)  # bytes of q, k, v, out
    gathers = over(Axis.DATA, programs.table[ProgramKey("forward", True)], mesh)
    assert gathers == [("all-gather", cut)] * NUM_BLOCKS
    reductions = over(Axis.DATA, programs.table[ProgramKey("backward", True)], mesh)
    assert [x for x in reductions if x[0] != "all-reduce"] == [("reduce-scatter", cut)] * NUM_BLOCKS
    assert sum(num_bytes for _, num_bytes in reductions) == 4 * parameters(programs.chunk)


def first_forward(chunk):
    return lambda *args: microbatch.first_forward(chunk, chunk.state_shapes.fixed, *args)[:2]


def last_backward(chunk):
    return microbatch.reducing(
        chunk,
        lambda *args: microbatch.backward(chunk, chunk.state_shapes.fixed, *args, weight=None),
    )


def shapes_of_arguments(chunk) -> tuple[tuple, tuple]:
    """The shapes that `first_forward` and `last_backward` take."""
    replicas, inputs = replica_shapes(chunk), (None, batch_shapes(chunk))
    run = functools.partial(microbatch.forward, chunk, chunk.state_shapes.fixed)
    boundary, _, saved = jax.eval_shape(run, replicas, *inputs)
    forward = chunk.state_shapes.params, *inputs
    return forward, (replicas, saved, gradient_shapes(chunk), boundary)


def test_for_gpus_it_is_gathered_in_the_compute_dtype_and_reduced_in_float32():
    """Lowered, not compiled: XLA:CPU computes in float32 what is bfloat16 here."""
    chunk = make_chunk(2, dtype="bfloat16")
    forward, backward = shapes_of_arguments(chunk)
    for function, shapes, kind, dtype in (
        (first_forward(chunk), forward, "all_gather", "bf16"),
        (
            last_backward(chunk),
            backward,
            "reduce_scatter",
            "f32",
        ),
    ):
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
        pattern = r'"stablehlo\.(all_\w+|reduce_scatter)".*?: \(tensor<(.*?)>\) -> tensor<(.*?)>'
        found = re.findall(pattern, lowered.as_text(), re.DOTALL)
        assert [k for k, _, _ in found] == [kind] * NUM_LAYERS
        whole = [(ins if kind == "reduce_scatter" else out).split("x") for _, ins, out in found]
        assert {name for *_, name in whole} == {dtype}
        assert sum(int(rows) * int(n) for rows, n, _ in whole) == parameters(chunk)


# ---- what waits for it ---------------------------------------------------------------------------


def graph(program):
    [text] = texts(program)
    return entry(text)


def of_kind(program, kind) -> list[str]:
    return [name for name, instruction in program.items() if instruction.kind == kind]


def traced(function, shapes, kind) -> tuple[list[frozenset[int]], dict[int, frozenset[int]]]:
    """The numbers of products and collectives that each collective of the kind waits for."""
    events = traced_events(jax.make_jaxpr(function)(*shapes), {kind, "dot_general"})
    products = {i: before for i, (name, before) in enumerate(events) if name == "dot_general"}
    return [before for name, before in events if name == kind], products


def test_a_reduction_waits_for_no_gradient_that_it_does_not_send():
    """Only for the products of its own layer, and for those that bring it its gradient."""
    passes_on = WEIGHTS + ATTENTION_BACKWARD
    blocks = [(i + 1) * passes_on + WEIGHTS for i in range(NUM_BLOCKS)]
    embedding = NUM_BLOCKS * passes_on  # its own gradient is no product
    want, every = sorted([embedding, *blocks]), NUM_BLOCKS * (passes_on + WEIGHTS)
    program = graph(compiled(2).table[ProgramKey("backward", True)])
    before = [waits_for(program, name) for name in of_kind(program, "reduce-scatter")]
    assert sorted(num_products(program, names) for names in before) == want
    assert num_products(program, set(program)) == every

    chunk = make_chunk(2)
    _, shapes = shapes_of_arguments(chunk)
    before, products = traced(
        last_backward(chunk),
        shapes,
        "reduce_scatter",
    )
    assert sorted(len(names & products.keys()) for names in before) == want
    assert len(products) == every


@pytest.mark.parametrize("schedule, later", [("1f1b", 1), ("zero_bubble", 0)])
def test_a_backward_goes_on_once_the_layer_before_is_reduced(schedule, later):
    """XLA would hold whole gradients of many layers; but a split backward puts them off."""
    model = make_model(**VARIANTS["llama"], num_layers=4)
    chunk = make_chunks(model, hand_made_plan((3, 1), 1, 1, fsdp=2, schedule=schedule))[0]
    _, shapes = shapes_of_arguments(chunk)
    run = functools.partial(microbatch.backward, chunk, chunk.state_shapes.fixed, weight=None)
    events = traced_events(jax.make_jaxpr(run)(*shapes), {"dot_general"})
    # The last products are those of the first layer: they wait for the layer behind the next one.
    [*_, queries] = sorted(len(before) for _, before in events)
    own = WEIGHTS - 3 + ATTENTION_BACKWARD  # but for queries, keys and values
    assert queries == 2 * (WEIGHTS + ATTENTION_BACKWARD) + own + later * WEIGHTS


def test_no_backward_waits_for_the_gradient_of_a_chunked_head():
    """But that of the layer before the last, as it waits for any layer's."""
    model = make_model(num_layers=2, vocab_size=96)
    kernels = KernelsConfig(attention="reference", cross_entropy="chunked")
    plan = hand_made_plan((2,), 1, 1, fsdp=2, checkpointing="full")
    [chunk] = make_chunks(model, plan, dtype="bfloat16", kernels=kernels)
    run = functools.partial(microbatch.forward, chunk, chunk.state_shapes.fixed)
    replicas, batch = replica_shapes(chunk), batch_shapes(chunk)
    *_, saved = jax.eval_shape(run, replicas, None, batch)
    assert (head := (model.width, 96)) in {x.shape for x in saved.arrays}
    dloss = jax.ShapeDtypeStruct((), "float32")
    arguments = replicas, saved, gradient_shapes(chunk), dloss
    backward = functools.partial(microbatch.backward, chunk, chunk.state_shapes.fixed, weight=None)
    barriers = equations(jax.make_jaxpr(backward)(*arguments), "optimization_barrier")
    waiting = [{(x.aval.shape[-2:], str(x.aval.dtype)) for x in one.invars} for one in barriers]
    assert sum((head, "float32") in arrays for arrays in waiting) == 1


def equations(jaxpr, name):
    found = [one for one in jaxpr.eqns if one.primitive.name == name]
    inner = (part for one in jaxpr.eqns for part in jaxprs_in_params(one.params))
    return found + [one for part in inner for one in equations(part, name)]


def test_a_layer_waits_for_no_gather_but_its_own_and_those_before():
    blocks = [(i + 1) * (WEIGHTS + ATTENTION_FORWARD) for i in range(NUM_BLOCKS)]
    want = [*blocks, blocks[-1]]  # behind the embedding comes all that is behind the first block
    program = graph(compiled(2).table[ProgramKey("forward", True)])
    gathers = of_kind(program, "all-gather")
    before = {name: waits_for(program, name) for name in program}
    after = [{name for name in program if gather in before[name]} for gather in gathers]
    assert sorted(num_products(program, names) for names in after) == want
    assert not any(num_products(program, before[gather]) for gather in gathers)

    chunk = make_chunk(2)
    shapes, _ = shapes_of_arguments(chunk)
    before, products = traced(first_forward(chunk), shapes, "all_gather")
    gathers = frozenset().union(*products.values()) - products.keys()
    after = [sum(gather in names for names in products.values()) for gather in gathers]
    assert sorted(after) == want
    assert not any(before)


def test_the_schedule_sends_the_last_block_before_it_computes_the_first():
    """XLA:CPU's own order: most of the first block's work comes after the first reduction."""
    program = graph(compiled(2).table[ProgramKey("backward", True)])
    names = [*program]
    first = min(names.index(name) for name in of_kind(program, "reduce-scatter"))
    block = 2 * WEIGHTS + ATTENTION_BACKWARD
    assert num_products(program, {*names[first:]}) > 0.75 * (NUM_BLOCKS - 1) * block
