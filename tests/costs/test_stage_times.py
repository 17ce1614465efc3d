"""Seconds of a stage, worked by hand for models that fit on a sheet of paper."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from holmesjax.config import ExpertsConfig, ModelConfig
from holmesjax.costs import collective_times, memory
from holmesjax.costs.collective_times import Group
from holmesjax.costs.implementation import HOLMESJAX
from holmesjax.costs.products import head_forward_flop
from holmesjax.costs.stage_times import exposed_s, stage_times
from holmesjax.topology.calibration import Calibration, ProductSpeed
from holmesjax.topology.machines import DeviceKind, Link
from tests import shapes

LINK = Link(fabric="nvlink", bandwidth_bytes_per_s=100.0, latency_s=3.0)
PAIR = Group(size=2, nodes=1, inside=LINK, between=None)
DEVICE = DeviceKind(
    name="toy",
    peak_flop_per_s={"float32": 2e6, "bfloat16": 4e6},
    memory_bytes=1e9,
    memory_bandwidth_bytes_per_s=1e5,
    link=LINK,
)
# 1 head of 2, feed-forward of 8. A layer has 8 D^2 + 16 D^2 = 96 FLOP a token in products with
# weights, 4 S D = 16 in attention, and moves 12 D = 24 numbers whole, 4 (H + G) K + 2 F = 32 cut.
MODEL = ModelConfig(
    num_layers=3, width=2, num_heads=1, context_length=2, vocab_size=8, norm="rms_norm"
)
GPT2 = ModelConfig(
    num_layers=3, width=64, num_heads=4, context_length=24, vocab_size=96, positions="learned"
)


shape_of = functools.partial(shapes.shape_of, num_blocks=3)


def test_a_stage_worked_by_hand():
    """10 tokens, on two devices of `tensor` each of two replicas."""
    stage = shape_of(data=2, tensor=2, sequences=5, checkpointing="full")
    times = stage_times(MODEL, stage, [DEVICE], PAIR, PAIR)
    products_s, attention_s = 10 * 96 / 2 / 1e6, 0.5625 * 10 * 16 / 2 / 1e6
    numbers_s = 10 * (24 + 32 / 2) * 4 / 1e5
    head_s = 10 * 2 * 2 * 8 / 2 / 1e6
    # A device's parameters: 12 D^2 / 2 + 2 D = 28 a layer, V D / 2 = 8 twice, and D = 2.
    parameters = 3 * 28 + 8 + 8 + 2
    rows_s = 2 * 10 * 2 * 4 / 1e5
    added_s = 12 * parameters / 1e5
    forward_s = products_s + attention_s + numbers_s
    backward_s = 2 * products_s + 2.5 * attention_s + 1.3 * numbers_s + forward_s
    assert times.forward_s == pytest.approx(3 * forward_s + head_s + rows_s)
    assert times.backward_s == pytest.approx(3 * backward_s + 2 * head_s + 2 * rows_s + added_s)
    assert times.weight_s == pytest.approx(3 * products_s + head_s + 2 * rows_s + added_s)
    all_reduce_s = collective_times.all_reduce_s(10 * 2 * 4, PAIR)
    assert times.forward_tensor_s == pytest.approx((2 * 3 + 1) * all_reduce_s)
    assert times.backward_tensor_s == pytest.approx((4 * 3 + 1) * all_reduce_s)
    collective_s = collective_times.reduce_scatter_s(4 * parameters, PAIR)
    assert times.reduce_s == times.gather_s == pytest.approx(collective_s)
    exposed_reduce_s = exposed_s(collective_s, times.backward_s, 5)
    exposed_gather_s = exposed_s(collective_s, times.forward_s, 5)
    assert times.exposed_reduce_s == pytest.approx(exposed_reduce_s)
    assert times.exposed_gather_s == pytest.approx(exposed_gather_s)
    assert times.update_s == pytest.approx(28 * parameters / 2 / 1e5)
    assert times.once_s == times.exposed_reduce_s + times.exposed_gather_s + times.update_s
    assert times.microbatch_s == pytest.approx(
        times.forward_s + times.backward_s + times.forward_tensor_s + times.backward_tensor_s
    )


def test_fsdp_worked_by_hand():
    """On 2 parts: a layer of 12 D^2 + 2 D = 52 numbers, a table of 16, a norm of 2."""
    whole, cut = (
        stage_times(MODEL, shape_of(fsdp=n), [DEVICE], None, None, PAIR if n == 2 else None)
        for n in (1, 2)
    )
    layers, table, norm = 3 * 52, 16, 2
    ring_s = lambda numbers: (
        5 * (collective_times.START_S + 3.0 + 4 * numbers / 5 / 2 / 100)
    )  # of 5 layers
    # Of the embedding 4 rows of D numbers are sent; the backward sends their gradients alone.
    assert cut.forward_fsdp_s == pytest.approx(ring_s(layers + table + norm + 4 * 2))
    gathered, reduced = layers + table + norm, layers + table + norm + 4 * 2
    assert cut.backward_fsdp_s == pytest.approx(ring_s(gathered) + ring_s(reduced))
    assert whole.forward_fsdp_s == whole.backward_fsdp_s == 0.0
    assert cut.update_s == whole.update_s / 2
    assert cut.forward_s == whole.forward_s  # of as many sequences
    assert cut.microbatch_s - whole.microbatch_s == pytest.approx(
        cut.forward_fsdp_s + cut.backward_fsdp_s + cut.backward_s - whole.backward_s
    )


def test_context_worked_by_hand():
    """A token a device: keys and values of D = 2 each of both, and the parameters by parts."""
    whole, cut = (
        stage_times(
            MODEL,
            shape_of(context=n, sequences=4),
            [DEVICE],
            data=None,
            tensor=None,
            context=PAIR if n == 2 else None,
        )
        for n in (1, 2)
    )
    ring_s = lambda num_bytes: collective_times.START_S + 3.0 + num_bytes / 2 / 100
    keys_s = ring_s(4 * 2 * (2 + 2) * 4)  # as large as their gradients in float32
    assert cut.forward_context_s == pytest.approx(3 * keys_s)
    assert cut.backward_context_s == pytest.approx(3 * 2 * keys_s)
    assert whole.forward_context_s == whole.backward_context_s == 0.0
    fsdp = stage_times(MODEL, shape_of(fsdp=2, sequences=2), [DEVICE], None, None, PAIR)
    assert cut.forward_fsdp_s == fsdp.forward_fsdp_s
    # Each of the two computes 0.5625 of its own pairs, and half of those with the other.
    attention_s = 4 * 16 / 1e6 * (2 * 0.5625 - 0.5625 - 1 / 2)
    assert whole.forward_s - 2 * cut.forward_s == pytest.approx(3 * attention_s)
    assert cut.update_s == whole.update_s / 2
    middle = stage_times(
        MODEL,
        shape_of(context=2, sequences=4, is_first=False, is_last=False),
        [DEVICE],
        data=None,
        tensor=None,
        context=PAIR,
    )
    boundary_s = collective_times.START_S + 3.0 + 4 * 2 * 4 / 100  # of the 4 tokens on a device
    more_s = middle.forward_context_s - cut.forward_context_s
    assert more_s == pytest.approx(2 * boundary_s)
    whole_s = cut.forward_s + cut.forward_fsdp_s + cut.forward_context_s
    assert cut.whole_forward_s == pytest.approx(whole_s)


def test_the_ends_of_the_model_cost_what_they_hold():
    """One all-reduce in the embedding's forward, one in the head's backward; its products."""
    middle, first, last = (
        stage_times(GPT2, shape_of(tensor=2, is_first=a, is_last=b), [DEVICE], None, PAIR)
        for a, b in [(False, False), (True, False), (False, True)]
    )
    all_reduce_s = middle.forward_tensor_s / 6
    assert middle.backward_tensor_s == middle.forward_tensor_s
    assert first.forward_tensor_s == pytest.approx(middle.forward_tensor_s + all_reduce_s)
    assert first.backward_tensor_s == middle.backward_tensor_s
    assert last.forward_tensor_s == middle.forward_tensor_s
    assert last.backward_tensor_s == pytest.approx(middle.backward_tensor_s + all_reduce_s)
    head_s = head_forward_flop(GPT2, 2 * 24) / 2 / 1e6
    assert last.forward_s == pytest.approx(middle.forward_s + head_s)


def test_the_slowest_kind_of_device_sets_the_pace():
    slow = dataclasses.replace(DEVICE, peak_flop_per_s={"float32": 1e6})
    both = stage_times(GPT2, shape_of(), [DEVICE, slow], None, None)
    assert both == stage_times(GPT2, shape_of(), [slow], None, None)
    assert both.forward_s > stage_times(GPT2, shape_of(), [DEVICE], None, None).forward_s


def test_bfloat16_halves_what_is_gathered():
    alone = dataclasses.replace(HOLMESJAX, overlaps=False)
    wide, narrow = (
        stage_times(GPT2, shape_of(data=2, dtype=dtype), [DEVICE], PAIR, None, implementation=alone)
        for dtype in ("float32", "bfloat16")
    )
    fixed_s = collective_times.START_S + 3.0
    assert narrow.gather_s - fixed_s == pytest.approx((wide.gather_s - fixed_s) / 2)
    assert narrow.reduce_s == wide.reduce_s  # gradients stay float32


def test_gradients_that_are_rounded_go_to_whoever_sums_them():
    """Half of the bytes where replicas have nodes of their own; else the path is shared."""
    model = dataclasses.replace(MODEL, width=4)
    link = Link(fabric="nvlink", bandwidth_bytes_per_s=100.0, latency_s=0.0)
    apart = Group(size=4, nodes=4, inside=link, between=link)
    narrow, wide = (
        stage_times(model, shape_of(data=4, reduction_dtype=dtype), [DEVICE], apart, None)
        for dtype in ("bfloat16", "float32")
    )
    # Parameters: 12 D^2 + 2 D = 200 a layer, V D = 32 twice, and D = 4. Three of four parts leave.
    parameters = 3 * 200 + 32 + 32 + 4
    start_s, step_s = collective_times.START_S, apart.step_s
    assert narrow.reduce_s == pytest.approx(start_s + step_s + 2 * parameters * 3 / 4 / 100)
    assert wide.reduce_s == pytest.approx(start_s + 3 * step_s + 4 * parameters * 3 / 4 / 100)
    assert narrow.gather_s == wide.gather_s
    pairs = Group(size=4, nodes=2, inside=link, between=link)
    shared = stage_times(model, shape_of(data=4, reduction_dtype="bfloat16"), [DEVICE], pairs, None)
    # Both devices of a node send what two others sum: as much as a ring sends in float32, and more.
    assert shared.reduce_s == pytest.approx(
        start_s + pairs.step_s + 2 * parameters * 2 * 2 / 4 / 100
    )


def test_gradients_that_are_sent_in_float32_are_priced_so():
    """Those whose width `data` does not divide, and all of CPUs."""
    link = Link(fabric="nvlink", bandwidth_bytes_per_s=100.0, latency_s=0.0)
    apart = Group(size=3, nodes=3, inside=link, between=link)
    uncut = [
        stage_times(MODEL, shape_of(data=3, reduction_dtype=dtype), [DEVICE], apart, None)
        for dtype in ("bfloat16", "float32")
    ]
    assert uncut[0].reduce_s == uncut[1].reduce_s
    cpu = dataclasses.replace(DEVICE, name="cpu")
    pair = dataclasses.replace(apart, size=2, nodes=2)
    narrow = shape_of(data=2, reduction_dtype="bfloat16")
    on_cpu, on_gpu = (stage_times(MODEL, narrow, [d], pair, None) for d in (cpu, DEVICE))
    fixed_s = collective_times.START_S + pair.step_s
    assert on_cpu.reduce_s - fixed_s == pytest.approx(2 * (on_gpu.reduce_s - fixed_s))


@given(collective_s=st.floats(0, 100), compute_s=st.floats(0, 100), num_parts=st.integers(1, 100))
def test_overlap_helps_and_is_not_free(collective_s, compute_s, num_parts):
    found_s = exposed_s(collective_s, compute_s, num_parts)
    assert found_s <= collective_s * (1 + 1e-9)
    assert found_s >= collective_s / num_parts * (1 - 1e-9)  # the first part waits for nothing
    assert found_s >= collective_s - compute_s - 1e-9
    if num_parts == 1 or compute_s == 0:
        assert found_s == pytest.approx(collective_s)


def test_another_system_overlaps_tensor_and_moves_its_logits():
    stage = shape_of(data=2, tensor=2, sequences=5)
    times = lambda **own: stage_times(
        MODEL, stage, [DEVICE], PAIR, PAIR, implementation=dataclasses.replace(HOLMESJAX, **own)
    )
    base, other = times(), times(tensor_overlaps=True, loss_bytes=50.0)
    assert other.backward_s - base.backward_s == pytest.approx(50 * 10 * 8 / 2 / 1e5)
    assert other.forward_s == base.forward_s
    for direction in ("forward", "backward"):
        alone_s, exposed = (
            getattr(times_of_one, f"{direction}_tensor_s") for times_of_one in (base, other)
        )
        assert exposed == exposed_s(alone_s, getattr(other, f"{direction}_s"), 2) < alone_s


def test_a_calibration_slows_what_it_is_of():
    """Attention twice, memory three times as slow; products four times."""
    times = lambda calibration: stage_times(
        GPT2, shape_of(), [dataclasses.replace(DEVICE, calibration=calibration)], None, None
    )
    peak = Calibration(products=ProductSpeed(share=1.0))
    base = times(peak)
    attention = times(dataclasses.replace(peak, attention=2.0))
    flop = 3 * 0.5625 * 4 * 48 * 24 * 64
    assert attention.forward_s - base.forward_s == pytest.approx(flop / 2e6)
    assert attention.backward_s - base.backward_s == pytest.approx(2.5 * flop / 2e6)
    memory = times(dataclasses.replace(peak, memory=1 / 3))
    assert memory.update_s == pytest.approx(3 * base.update_s)
    slow = times(Calibration(products=ProductSpeed(share=0.25), attention=0.25, memory=1.0))
    bytes_s = 3 * 48 * (12 * 64 + 4 * (4 + 4) * 16 + 2 * 256) * 4 / 1e5 + 2 * 48 * 64 * 4 / 1e5
    assert slow.forward_s - base.forward_s == pytest.approx(
        3 * (base.forward_s - bytes_s - flop / 2e6)
    )


def test_an_eager_system_is_no_faster_than_its_host():
    times = lambda call_s: stage_times(
        GPT2,
        shape_of(is_first=False, is_last=False),
        [DEVICE],
        None,
        None,
        implementation=dataclasses.replace(HOLMESJAX, layer_call_s=call_s),
    )
    base = times(0.0)
    assert times(base.forward_s / 10) == base
    assert times(1e4).forward_s == 3e4
    assert times(1e4).backward_s == pytest.approx(6e4, rel=1e-3)  # and sums of gradients


def test_sequence_parallelism_cuts_what_lies_between_the_products():
    times = lambda parallel: stage_times(
        GPT2,
        shape_of(tensor=2, is_first=False, is_last=False),
        [DEVICE],
        None,
        PAIR,
        implementation=dataclasses.replace(HOLMESJAX, sequence_parallel=parallel),
    )
    saved_s = 3 * 48 * 12 * 64 / 2 * 4 / 1e5
    assert times(False).forward_s - times(True).forward_s == pytest.approx(saved_s)


def test_cut_sequences_worked_by_hand():
    """A stage in the middle; of 63 tokens two devices cannot have as many each."""
    changes = {"tensor": 2, "is_first": False, "is_last": False, "checkpointing": "full"}
    whole, cut = (shape_of(**changes, sequence_parallel=cuts) for cuts in (False, True))
    times = lambda model, stage: stage_times(model, stage, [DEVICE], None, PAIR)
    numbers = cut.sequences * GPT2.context_length * GPT2.width
    pair_s = collective_times.reduce_scatter_s(4 * numbers, PAIR)
    pair_s += (gather_s := collective_times.all_gather_s(4 * numbers, PAIR))
    found = times(GPT2, cut)
    assert found.forward_tensor_s == pytest.approx(3 * 2 * pair_s + gather_s)
    sent_s, beside_s = 3 * (4 * pair_s + 2 * gather_s) + gather_s, 3 * 2 * pair_s
    hidden_s = min(beside_s, found.weight_s)
    slower_s = exposed_s(1.0, 1e9, 1e9) * hidden_s  # what is hidden slows the products down
    assert found.backward_tensor_s == pytest.approx(sent_s - hidden_s + slower_s)
    saved_s = 1.3 * 3 * 12 * numbers / 2 * 4 / 1e5 + 3 * 12 * numbers / 2 * 4 / 1e5
    assert times(GPT2, whole).backward_s - found.backward_s == pytest.approx(saved_s)
    odd = dataclasses.replace(GPT2, context_length=63)
    assert times(odd, cut) == times(odd, whole)
    kept = lambda stage: memory.stage_memory_bytes(GPT2, stage)["activations"]
    assert kept(cut) == kept(whole) / 2


def test_each_passage_to_layers_that_cut_no_sequences_gathers():
    """All of the model: forward where a cut layer is before one, backward where it is behind."""
    letters = {"b": "block", "e": "expert_block"}
    experts, sizes = ExpertsConfig(count=4, active=2), {"num_layers": 4, "context_length": 24}
    stage = shapes.shape_of(tensor=2, sequence_parallel=True)
    stage = dataclasses.replace(stage, blocks=(2, 2))
    gather_s = collective_times.all_gather_s(4 * 2 * 24 * 64, PAIR)

    def tensor_s(layers):
        pattern = tuple(map(letters.get, layers))
        model = ModelConfig(**sizes, width=64, num_heads=4, pattern=pattern, experts=experts)
        found = stage_times(model, stage, [DEVICE], None, PAIR)
        return np.array([found.forward_tensor_s, found.backward_tensor_s]), layers

    base_s, _ = tensor_s("bbee")  # embed b b | e e | head: one of each
    for more_s, layers in map(tensor_s, ("eebb", "beeb", "bebe", "ebeb")):
        passages = [pair for pair in itertools.pairwise(f"b{layers}b") if pair == ("b", "e")]
        assert more_s - base_s == pytest.approx((len(passages) - 1) * gather_s)
