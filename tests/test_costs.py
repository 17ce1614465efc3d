"""Costs are checked against the model's own arrays, published numbers and a ring run by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from holmesjax import costs
from holmesjax.config import ModelConfig
from holmesjax.models import gpt
from holmesjax.plan import EMBED, HEAD, block_name
from holmesjax.sharding import TENSOR_DIMS, dims
from holmesjax.topology import DeviceKind, Link

SMALL = {"num_layers": 3, "width": 64, "num_heads": 4, "context_length": 24, "vocab_size": 96}
MODELS = {
    "gpt2": ModelConfig(**SMALL, positions="learned"),
    "llama": ModelConfig(
        **SMALL, num_kv_heads=2, mlp_width=160, activation="swiglu", norm="rms_norm"
    ),
    "odd heads": ModelConfig(**SMALL, num_kv_heads=2, head_dim=32, norm="rms_norm"),
    "tied": ModelConfig(**SMALL, tied_embeddings=True),
}
LINK = Link(fabric="infiniband", bandwidth_bytes_per_s=100.0, latency_s=3.0)
DEVICE = DeviceKind(
    name="toy",
    peak_flop_per_s={"float32": 2e6, "bfloat16": 4e6},
    memory_bytes=1e9,
    memory_bandwidth_bytes_per_s=1e5,
    link=dataclasses.replace(LINK, fabric="nvlink"),
)


def parameters_of(model, layer, tensor):
    """Counted from the shapes of the model's own arrays, cut as `sharding` cuts them."""
    shapes = gpt.param_shapes(layer, model)
    total = 0
    for path, array in jax.tree_util.tree_leaves_with_path(shapes):
        is_cut = any(dim in TENSOR_DIMS for dim in dims(path[-1].key))
        total += array.size // tensor if is_cut else array.size
    return total


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_model(model, tensor):
    assert costs.block_parameters(model, tensor) == parameters_of(model, block_name(0), tensor)
    assert costs.embed_parameters(model, tensor) == parameters_of(model, EMBED, tensor)
    table = costs.table_parameters(model, tensor) if model.tied_embeddings else 0
    assert costs.head_parameters(model, tensor) == parameters_of(model, HEAD, tensor) + table


def shape_of(**changes):
    stage = costs.StageShape(
        num_blocks=2,
        is_first=True,
        is_last=True,
        data=1,
        tensor=1,
        sequences=2,
        chunks=1,
        in_flight=1,
        head_in_flight=1,
        dtype="float32",
        checkpointing="none",
    )
    return dataclasses.replace(stage, **changes)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_tied_table_counts_once_per_stage_that_reads_it(model):
    count = lambda **changes: costs.stage_parameters(model, shape_of(**changes))
    layers = {layer: parameters_of(model, layer, 1) for layer in (EMBED, block_name(0), HEAD)}
    whole = layers[EMBED] + 2 * layers[block_name(0)] + layers[HEAD]
    assert count() == whole
    copy = costs.table_parameters(model) if model.tied_embeddings else 0
    assert count(is_last=False) + count(is_first=False, num_blocks=0) == whole + copy


def dot_flop(jaxpr) -> int:
    """Two for each multiplication in the matrix products of a jaxpr, at any depth."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * int(np.prod(out)) * int(np.prod([lhs[i] for i in contracted]))
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            total += dot_flop(inner) if hasattr(inner, "eqns") else 0
    return total


def forward_jaxpr(model, layer, *args):
    params = gpt.param_shapes(layer, model)
    apply = lambda params, *args: gpt.module(layer, model).apply({"params": params}, *args)
    return apply, params, args


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_flop_are_those_of_the_models_matrix_products(model):
    x_BLD = jnp.zeros((2, model.context_length, model.width))
    position_L = jnp.arange(model.context_length)
    num_tokens = 2 * model.context_length
    apply, params, args = forward_jaxpr(model, block_name(0), x_BLD, position_L, None)
    flop = costs.block_forward_flop(model, num_tokens)
    assert flop == dot_flop(jax.make_jaxpr(apply)(params, *args).jaxpr)

    table_VD = jnp.zeros((model.vocab_size, model.width))
    apply, params, args = forward_jaxpr(model, HEAD, x_BLD, table_VD)
    assert costs.head_forward_flop(model, num_tokens) == dot_flop(
        jax.make_jaxpr(apply)(params, *args).jaxpr
    )


@pytest.mark.parametrize("policy", ["none", "full"])
def test_backward_flop_are_those_of_the_gradient(policy):
    model = MODELS["llama"]
    x_BLD = jnp.zeros((2, model.context_length, model.width))
    position_L = jnp.arange(model.context_length)
    apply, params, args = forward_jaxpr(model, block_name(0), x_BLD, position_L, None)
    if policy == "full":
        apply = jax.checkpoint(apply, policy=jax.checkpoint_policies.nothing_saveable)

    def loss(params, x_BLD):
        return apply(params, x_BLD, *args[1:]).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x_BLD).jaxpr
    forward = costs.block_forward_flop(model, 2 * model.context_length)
    total = forward + costs.backward_flop(forward, policy)
    num_tokens = 2 * model.context_length
    # Not counted: attention's backward computes the scores again.
    total += 2 * num_tokens * model.context_length * model.num_heads * model.head_width
    # Counted, not done: the last product of the forward that is run again, which nothing needs.
    if policy == "full":
        total -= 2 * num_tokens * model.width * model.feed_forward_width
    assert dot_flop(jaxpr) == total


# Published: Narayanan et al., arXiv:2104.04473; Korthikanti et al., arXiv:2205.05198, table 5.
PUBLISHED = {
    # layers, width, heads, batch, devices, seconds per step, model FLOP utilisation in percent
    "22B": (48, 6144, 64, 4, 8, 1.10, 41.5),
    "530B": (105, 20480, 128, 280, 280, 37.83, 56.0),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_flop_give_the_published_utilisation(size):
    num_layers, width, num_heads, batch, num_devices, step_s, percent = PUBLISHED[size]
    s, vocab = 2048, 51200
    model = ModelConfig(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        context_length=s,
        vocab_size=vocab,
        positions="learned",
    )
    blocks = num_layers * costs.block_forward_flop(model, batch * s)
    head = costs.head_forward_flop(model, batch * s)
    total = blocks + head + costs.backward_flop(blocks + head, "none")
    formula = 72 * batch * s * num_layers * width**2
    formula *= 1 + s / (6 * width) + vocab / (12 * num_layers * width)
    assert total == pytest.approx(formula, rel=1e-12)
    recomputed = total + costs.backward_flop(blocks, "full") - costs.backward_flop(blocks, "none")
    formula = 96 * batch * s * num_layers * width**2
    formula *= 1 + s / (6 * width) + vocab / (16 * num_layers * width)
    assert recomputed == pytest.approx(formula, rel=1e-12)
    # The step times are published with two or three digits.
    assert 100 * total / (step_s * num_devices * 312e12) == pytest.approx(percent, rel=0.006)


def run_ring(arrays, num_rounds, first_offset, adds, link):
    """`num_rounds` of a ring by hand: all ranks send one chunk to the next, at the same time."""
    n, time_s = len(arrays), 0.0
    chunks = [np.array_split(array, n) for array in arrays]
    for step in range(num_rounds):
        sent = [chunks[r][(r + first_offset - step) % n].copy() for r in range(n)]
        time_s += link.time_s(max(chunk.nbytes for chunk in sent))
        for r in range(n):
            mine = chunks[(r + 1) % n][(r + first_offset - step) % n]
            mine[:] = mine + sent[r] if adds else sent[r]
    return chunks, time_s


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_collectives_take_the_time_of_a_ring_that_gives_the_right_result(n):
    arrays = [
        np.random.default_rng(r).integers(9, size=24 * 5).astype(np.float64) for r in range(n)
    ]
    num_bytes, total = arrays[0].nbytes, sum(arrays)
    chunks, scatter_s = run_ring([a.copy() for a in arrays], n - 1, 0, True, LINK)
    for r in range(n):
        mine = (r + 1) % n
        np.testing.assert_array_equal(chunks[r][mine], np.array_split(total, n)[mine])
    assert costs.ring_reduce_scatter_time_s(num_bytes, n, LINK) == pytest.approx(scatter_s)
    reduced = [np.concatenate(chunks[r]) for r in range(n)]
    chunks, gather_s = run_ring(reduced, n - 1, 1, False, LINK)
    for r in range(n):
        np.testing.assert_array_equal(np.concatenate(chunks[r]), total)
    assert costs.ring_all_gather_time_s(num_bytes, n, LINK) == pytest.approx(gather_s)
    all_reduce_s = costs.ring_all_reduce_time_s(num_bytes, n, LINK)
    assert all_reduce_s == pytest.approx(scatter_s + gather_s)


def test_one_rank_needs_no_link_and_two_do():
    assert costs.ring_all_reduce_time_s(1e9, 1, None) == 0.0
    with pytest.raises(AssertionError, match="a ring of 2 ranks needs a link"):
        costs.ring_all_reduce_time_s(1e9, 2, None)


def test_stage_times_worked_by_hand():
    """Width 2, 1 head, 2 tokens, vocabulary 8: small enough for a sheet of paper."""
    model = ModelConfig(
        num_layers=3, width=2, num_heads=1, context_length=2, vocab_size=8, norm="rms_norm"
    )
    stage = shape_of(num_blocks=3, data=2, tensor=2, sequences=5, checkpointing="full")
    times = costs.stage_times(model, stage, [DEVICE], LINK, LINK)
    # A token: 8 D^2 + 16 D^2 + 4 S D = 112 FLOP a layer, 2 D V = 32 in the head; 10 tokens.
    block, head = 112 * 10 / 2, 32 * 10 / 2
    # A rank's parameters: 12 D^2 / 2 + 2 D = 28 a layer, V D / 2 = 8 twice, and D = 2.
    parameters = 3 * 28 + 8 + 8 + 2
    rows = 2 * 10 * 2 * 4
    assert times.forward_s == pytest.approx((3 * block + head) / 1e6 + rows / 1e5)
    assert times.backward_s == pytest.approx(
        (3 * 3 * block + 2 * head) / 1e6 + (2 * rows + 12 * parameters) / 1e5
    )
    # Products with weights: less the 4 S D of attention, and the head.
    assert times.weight_s == pytest.approx(
        (3 * 96 * 10 / 2 + head) / 1e6 + (2 * rows + 12 * parameters) / 1e5
    )
    all_reduce_s = 2 * (3.0 + 10 * 2 * 4 / 2 / 100)
    assert times.forward_tensor_s == pytest.approx((2 * 3 + 1) * all_reduce_s)
    assert times.backward_tensor_s == pytest.approx((4 * 3 + 1) * all_reduce_s)
    assert times.reduce_s == pytest.approx(3.0 + 4 * parameters / 2 / 100)
    assert times.gather_s == pytest.approx(3.0 + 4 * parameters / 2 / 100)
    assert times.update_s == pytest.approx(28 * parameters / 2 / 1e5)
    assert times.once_s == times.reduce_s + times.gather_s + times.update_s
    assert times.microbatch_s == pytest.approx(
        times.forward_s + times.backward_s + times.forward_tensor_s + times.backward_tensor_s
    )


def test_fsdp_worked_by_hand():
    """The model above on 2 parts: a layer of 12 D^2 + 2 D = 52 numbers, a table of 16, a norm."""
    model = ModelConfig(
        num_layers=3, width=2, num_heads=1, context_length=2, vocab_size=8, norm="rms_norm"
    )
    whole, cut = (
        costs.stage_times(model, shape_of(num_blocks=3, fsdp=n), [DEVICE], None, None, LINK)
        for n in (1, 2)
    )
    layers, table, norm = 3 * 52, 16, 2
    ring_s = lambda numbers: 5 * 3.0 + 4 * numbers / 2 / 100  # of 5 layers
    assert cut.forward_fsdp_s == pytest.approx(ring_s(layers + 2 * table + norm))
    # The backward gathers all but the embedding, whose gradient is that of 4 rows of D numbers.
    gathered, reduced = layers + table + norm, layers + table + norm + 4 * 2
    assert cut.backward_fsdp_s == pytest.approx(ring_s(gathered) + ring_s(reduced))
    assert whole.forward_fsdp_s == whole.backward_fsdp_s == 0.0
    assert cut.update_s == whole.update_s / 2
    assert cut.forward_s == whole.forward_s  # of as many sequences
    assert cut.microbatch_s - whole.microbatch_s == pytest.approx(
        cut.forward_fsdp_s + cut.backward_fsdp_s + cut.backward_s - whole.backward_s
    )


def test_the_ends_of_the_model_cost_what_they_hold():
    """One all-reduce in the embedding's forward, one in the head's backward; its FLOP."""
    model, args = MODELS["gpt2"], ([DEVICE], None, LINK)
    times = {
        ends: costs.stage_times(model, shape_of(tensor=2, is_first=ends[0], is_last=ends[1]), *args)
        for ends in [(False, False), (True, False), (False, True)]
    }
    middle, first, last = times.values()
    all_reduce_s = middle.forward_tensor_s / 4
    assert middle.backward_tensor_s == middle.forward_tensor_s
    assert first.forward_tensor_s == pytest.approx(middle.forward_tensor_s + all_reduce_s)
    assert first.backward_tensor_s == middle.backward_tensor_s
    assert last.forward_tensor_s == middle.forward_tensor_s
    assert last.backward_tensor_s == pytest.approx(middle.backward_tensor_s + all_reduce_s)
    head_s = costs.head_forward_flop(model, 2 * model.context_length) / 2 / 1e6
    assert last.forward_s == pytest.approx(middle.forward_s + head_s)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_gradients_of_weights_take_the_products_that_jax_does_for_them(model):
    """Of the backward's products, those that go when only the input's gradient is asked for."""
    x_BLD = jnp.zeros((2, model.context_length, model.width))
    position_L = jnp.arange(model.context_length)
    apply, params, args = forward_jaxpr(model, block_name(0), x_BLD, position_L, None)
    loss = lambda params, x_BLD: apply(params, x_BLD, *args[1:]).sum()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(params, x_BLD).jaxpr
    only_loss_and_input = [True] + [False] * (len(jaxpr.outvars) - 2) + [True]
    without, _ = partial_eval.dce_jaxpr(jaxpr, only_loss_and_input)
    expected = costs.block_weight_flop(model, 2 * model.context_length)
    assert dot_flop(jaxpr) - dot_flop(without) == expected


@pytest.mark.parametrize("policy, factor", [("none", 2.0), ("dots", 2.0), ("full", 3.0)])
def test_only_full_checkpointing_runs_the_forward_again(policy, factor):
    assert costs.backward_flop(10.0, policy) == 10.0 * factor


def test_the_slowest_kind_of_device_sets_the_pace():
    slow = dataclasses.replace(DEVICE, peak_flop_per_s={"float32": 1e6})
    args = MODELS["llama"], shape_of()
    both = costs.stage_times(*args, [DEVICE, slow], None, None)
    assert both == costs.stage_times(*args, [slow], None, None)
    assert both.forward_s > costs.stage_times(*args, [DEVICE], None, None).forward_s


def test_bfloat16_halves_what_is_sent_and_gathered():
    model, stage = MODELS["gpt2"], shape_of(data=2)
    fast = Link(fabric="roce", bandwidth_bytes_per_s=1.0, latency_s=0.0)
    wide = costs.stage_times(model, stage, [DEVICE], fast, None)
    narrow = costs.stage_times(
        model, dataclasses.replace(stage, dtype="bfloat16"), [DEVICE], fast, None
    )
    assert narrow.gather_s == wide.gather_s / 2
    assert narrow.reduce_s == wide.reduce_s  # gradients stay float32
    assert costs.boundary_bytes(model, 7, "float32") == 2 * costs.boundary_bytes(
        model, 7, "bfloat16"
    )
