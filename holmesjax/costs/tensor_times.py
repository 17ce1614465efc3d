"""Seconds of collectives over `tensor`, with sequences whole or cut between products."""

import itertools

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.costs import collective_times, work
from holmesjax.costs.collective_times import Group, Groups
from holmesjax.costs.stage_shape import DTYPE_BYTES, StageShape, stage_tokens
from holmesjax.layer_specs.distinct_kinds import blocks_in_order, kinds
from holmesjax.layer_specs.model_layers import cached
from holmesjax.topology.machines import Numbers


def tensor_s(
    model: ModelConfig, stage: StageShape, tensor: Group | Groups | None
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds of a microbatch for collectives over `tensor`: forward, backward, and what can hide.

    Without sequence parallelism they are all-reduces. With it an all-reduce of the residual stream
    is two: a reduce-scatter behind one product, an all-gather before the next. The backward of a
    block then also gathers the inputs of its first products again, as only parts of them are kept.
    That gather and the reduce-scatter of a gradient can hide: each has a product beside it of which
    neither reads the other's result.
    """
    num_tokens = stage_tokens(model, stage)
    counts: dict[int, list[int]] = {}  # of numbers per token: all-reduces in each direction
    for count, kind, policy in stage.policies(model):
        for numbers, forward, backward in work.all_reduces(kind, policy):
            both = counts.setdefault(numbers, [0, 0])
            both[0] += count * forward
            both[1] += count * backward
    # By the numbers per token: an all-reduce, an all-gather, a reduce-scatter.
    of_numbers_s: dict[int, tuple[Numbers, Numbers, Numbers]] = {}
    forward_s: Numbers = 0.0
    backward_s: Numbers = 0.0
    for numbers, (forward, backward) in counts.items():
        num_bytes = 1.0 * num_tokens * numbers * DTYPE_BYTES[stage.dtype]
        all_reduce_s = collective_times.all_reduce_s(num_bytes, tensor)
        gather_s = collective_times.all_gather_s(num_bytes, tensor)
        scatter_s = collective_times.reduce_scatter_s(num_bytes, tensor)
        of_numbers_s[numbers] = all_reduce_s, gather_s, scatter_s
        forward_s += forward * all_reduce_s
        backward_s += backward * all_reduce_s
    if not np.any(stage.sequence_parallel):
        return forward_s, backward_s, 0.0
    more_s = _cut_s(model, stage, tensor, of_numbers_s)
    return forward_s + more_s[0], backward_s + more_s[1], more_s[2]


def _cut_s(
    model: ModelConfig,
    stage: StageShape,
    tensor: Group | Groups | None,
    of_numbers_s: dict[int, tuple[Numbers, Numbers, Numbers]],
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds that stages which cut sequences take longer: forward, backward; and what can hide.

    Args:
      model, stage, tensor: as for `tensor_s`.
      of_numbers_s: an all-reduce, an all-gather and a reduce-scatter, by the numbers per token.
    """
    forward_s: Numbers = 0.0
    backward_s: Numbers = 0.0
    beside_s: Numbers = 0.0
    cuts: Numbers = 1.0
    for count, kind, policy in stage.policies(model):
        own_cuts = work.stream_cuts(kind, model.context_length, stage)
        cuts = np.maximum(cuts, own_cuts)
        for numbers, forward, backward in work.all_reduces(kind, policy):
            all_reduce_s, gather_s, scatter_s = of_numbers_s[numbers]
            is_stream = (own_cuts > 1) & (numbers == model.width)
            again = work.gathered_again(kind, numbers, model.width, is_stream)
            there_s, back_s = forward * (gather_s + scatter_s), backward * (gather_s + scatter_s)
            # The ends have half of their pair in each direction.
            if kind.place == "first":
                there_s, back_s = scatter_s, gather_s
            elif kind.place == "last":
                there_s, back_s = gather_s, scatter_s
            more_s = there_s - forward * all_reduce_s, back_s - backward * all_reduce_s
            forward_s += count * np.where(is_stream, more_s[0], 0.0)
            backward_s += count * (np.where(is_stream, more_s[1], 0.0) + again * gather_s)
            beside_s += count * again * (gather_s + scatter_s)
    # A boundary is whole on each device, and so is what layers read that cut no sequences.
    boundary = work.boundary_bytes(model, stage_tokens(model, stage), stage.dtype)
    moved_s = np.where(cuts > 1, collective_times.all_gather_s(boundary, tensor), 0.0)
    runs = _cut_runs(model, stage)
    forward_s += (runs - stage.is_last) * moved_s
    backward_s += (runs - stage.is_first) * moved_s
    return forward_s, backward_s, beside_s


def _cut_runs(model: ModelConfig, stage: StageShape) -> float:
    """The runs of neighbouring layers that cut sequences: each ends in a gather of what it gives.

    That is in the forward; in the backward a run gathers the gradient of what it reads. The ends of
    the model, which are in a run, have these gathers in their own collectives. A stage has its
    share of the runs of the model by its layers that cut.
    """
    runs, num_cut, (is_first_cut, is_last_cut) = _model_runs(model)
    own = zip(stage.blocks, kinds(model).blocks, strict=True)
    own_cut = sum(count for count, kind in own if kind.cuts_sequences)
    own_runs = 0.0
    if own_cut:  # rounded: a part of a run is one, too
        own_runs = max(1.0, round(own_cut * runs / num_cut))
    own_runs += stage.is_first and not (is_first_cut and own_cut)
    own_runs += stage.is_last and not (is_last_cut and own_cut)
    return own_runs


@cached(256)  # a search asks over and over
def _model_runs(model: ModelConfig) -> tuple[int, int, tuple[bool, bool]]:
    """The runs among the Transformer layers, the layers in them, and whether both ends are."""
    blocks = kinds(model).blocks
    cuts = [blocks[number].cuts_sequences for number in blocks_in_order(model)]
    runs = sum(1 for is_cut, _ in itertools.groupby(cuts) if is_cut)
    return runs, sum(cuts), (cuts[0], cuts[-1])
