"""The bytes that devices which share experts send each other, and how unlike their loads are.

    k  choices of a token   E  experts   n  devices of `expert`   T  tokens of a device
    C  numbers of a token that go to experts   c  bytes of a number of the compute dtype

`kernels.expert_exchange` says what a round is.
"""

import functools
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from holmesjax.config import ExpertsConfig, ModelConfig
from holmesjax.costs import collective_times, expert_placement
from holmesjax.costs.collective_times import OVERLAP_SLOWDOWN, Group, Groups
from holmesjax.costs.stage_shape import DTYPE_BYTES, StageShape, stage_tokens
from holmesjax.layer_specs.experts import sent_width
from holmesjax.layer_specs.kind import Kind, PerRow
from holmesjax.topology.machines import Numbers, Sizes
from kernels.expert_slots import (
    SLOTS_PER_CHOICE,
    block_rows,
    capacity_rows,
    choices_of_each,
    num_blocks,
    share_of_tokens,
    slots_of_each,
)

# Standard deviation of an expert's load, over the mean load. An assumption: no router of ours was
# measured on data of its size.
LOAD_VARIATION = 0.3
CHUNKS = (1, 2, 4, 8)  # of an exchange, from which the planner chooses
DRAWS = 32  # of routers, where experts are placed


def has_experts(kind: Kind) -> bool:
    """Whether layers of a kind have experts, which `expert` cuts."""
    return any(parameter.is_of_experts for parameter in kind.parameters)


def expert_numbers(kind: Kind, tensor: Sizes = 1) -> Sizes:
    """Numbers of the weights of all experts of a layer, on each of `tensor` devices."""
    return sum(weight.size(1) for weight in kind.parameters if weight.is_of_experts) // tensor


def choices(model: ModelConfig, kind: Kind) -> int:
    """Experts that each token goes to in a layer of a kind; 0 where it has none."""
    return model.experts.active if model.experts is not None and has_experts(kind) else 0


def peak_load(experts: ExpertsConfig, num_devices: Sizes, *, is_placed: bool = False) -> Numbers:
    """The load of the device with most, over the mean load, in the mean; 1 for one device.

    A device has E / n experts, whose loads vary by `LOAD_VARIATION`. The largest of n normal
    numbers is taken to be at its (n - 3/8) / (n + 1/4) quantile (Blom, 1958). Where experts are
    placed by their loads, these are taken to stay as they were.

    >>> even = ExpertsConfig(count=128, active=8)
    >>> [round(float(peak_load(even, n)), 3) for n in (1, 8, 128)]
    [1.0, 1.108, 1.775]
    >>> [round(float(peak_load(even, n, is_placed=True)), 3) for n in (1, 8, 128)]
    [1.0, 1.005, 1.763]
    """
    return _peak_load(num_devices, experts.count, is_placed)


def _one_peak_load(num_devices: int, count: int, is_placed: bool) -> float:
    if num_devices == 1:
        return 1.0
    return 1.0 + _most_of(num_devices) * _variation(num_devices, count, is_placed)


def _variation(num_devices: int, count: int, is_placed: bool) -> float:
    """The standard deviation of the loads of devices over their mean."""
    if is_placed:
        return _placed_variation(int(num_devices), count, LOAD_VARIATION)
    return LOAD_VARIATION * float((num_devices / count) ** 0.5)


@functools.cache
def _placed_variation(num_devices: int, count: int, variation: float) -> float:
    """That with which the largest load is in the mean that of experts of drawn routers, placed."""
    rng, peaks = np.random.default_rng(0), []
    for _ in range(DRAWS):
        loads = np.maximum(rng.normal(1.0, variation, count), 0.0).tolist()
        order = expert_placement.greedy(loads, num_devices)
        peaks.append(expert_placement.peak(loads, order, num_devices))
    return (fmean(peaks) - 1.0) / _most_of(num_devices)


def _most_of(number: int) -> float:
    """The mean of the largest of so many normal numbers."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


_peak_load = np.vectorize(_one_peak_load, otypes=[float])


def router_groups(experts: ExpertsConfig, *, is_placed: bool = False) -> tuple[int, int]:
    """Groups of experts, and those of a token's choices, where they lie side by side on devices."""
    return (1, 1) if is_placed else (experts.groups, experts.active_groups)


def sent_rows(experts: ExpertsConfig, num_devices: Sizes, *, is_placed: bool = False) -> Numbers:
    """Slots of rows that a device has in a round, for each of its tokens; 0 for one device.

    >>> even = ExpertsConfig(count=128, active=8)
    >>> [round(float(sent_rows(even, n)), 2) for n in (1, 2, 4, 8, 32)]
    [0.0, 2.0, 4.0, 6.67, 9.2]
    """
    groups = router_groups(experts, is_placed=is_placed)
    return _sent_rows(num_devices, experts.count, experts.active, *groups)


def _one_sent_rows(num_devices: int, count: int, active: int, groups: int, both: int) -> float:
    if num_devices == 1:
        return 0.0
    share = share_of_tokens(count, active, int(num_devices), groups, both)
    return num_devices * min(1.0, SLOTS_PER_CHOICE * share)


_sent_rows = np.vectorize(_one_sent_rows, otypes=[float])


def exchanged_numbers(numbers: PerRow, experts: ExpertsConfig, stage: Any) -> Numbers:
    """Numbers per token of a layer, on each device.

    Args:
      numbers: of tokens and rows.
      experts: their settings.
      stage: a `StageShape`, or its fields `tensor`, `expert` and `places_experts`.
    """
    rows = sent_rows(experts, stage.expert, is_placed=stage.places_experts)
    return numbers.whole + numbers.cut / stage.tensor + numbers.row * rows


def rounds(
    experts: ExpertsConfig, num_tokens: Sizes, num_devices: Sizes, *, is_placed: bool = False
) -> Numbers:
    """The mean number of rounds of an exchange, over the loads that experts may have.

    A round is added for each time that the largest of n^2 loads, from each device to each, has the
    choices of a round once more. Rows have room for longer: their loads vary less. The loads of n
    devices vary as those of E / n experts do. Each has choices of n devices; as these are few, the
    largest of them is larger.

    >>> even = ExpertsConfig(count=128, active=8)
    >>> [round(float(rounds(even, 4096, n)), 2) for n in (1, 8, 32)]
    [1.0, 1.01, 1.97]
    """
    return _rounds(num_devices, num_tokens, experts.count, experts.active, is_placed)


def _one_rounds(
    num_devices: int, num_tokens: int, count: int, active: int, is_placed: bool
) -> float:
    if num_devices == 1:
        return 1.0
    few = _most_of(num_devices) * (num_devices / (num_tokens * active)) ** 0.5
    load = NormalDist(1.0 + few, _variation(num_devices, count, is_placed))
    within = (load.cdf(SLOTS_PER_CHOICE * i) ** num_devices for i in range(1, num_devices))
    return 1.0 + sum(1.0 - share for share in within)


_rounds = np.vectorize(_one_rounds, otypes=[float])


def multiplied_rows(
    experts: ExpertsConfig,
    length: int,
    num_tokens: int,
    num_devices: int,
    *,
    num_chunks: int = 1,
    is_placed: bool = False,
    by_kernel: bool = False,
) -> float:
    """The rows of the products of experts on a device, over its choices of an even load.

    Blocks of slots are multiplied whether they are full or empty, in each round of an exchange, and
    so are those of a capacity. A kernel multiplies the rows of the device whose experts have most.

    >>> even, capped = (ExpertsConfig(count=8, active=2, capacity_factor=f) for f in (None, 1.5))
    >>> [multiplied_rows(x, 4096, 4096, 1) for x in (even, capped)]
    [1.21875, 1.5]
    >>> [round(multiplied_rows(even, 4096, 4096, 4, by_kernel=x), 3) for x in (False, True)]
    [1.87, 1.223]

    Args:
      experts: their settings.
      length: tokens of a sequence.
      num_tokens: of a device.
      num_devices: that share experts.
      num_chunks: of an exchange between them.
      is_placed: whether experts are placed by their loads.
      by_kernel: whether products without a capacity are those of a kernel.
    """
    choices, count = experts.active * num_tokens, experts.count
    if num_devices == 1 and experts.capacity_factor is not None:
        slots = count * capacity_rows(length, experts.active, count, experts.capacity_factor)
        return slots / (experts.active * length)
    if by_kernel:
        return float(peak_load(experts, num_devices, is_placed=is_placed))
    if num_devices == 1:
        return num_blocks(choices, count) * block_rows(choices, count) / choices
    sizes = num_tokens, count, experts.active, num_devices, num_chunks
    of_chunk = num_devices * choices_of_each(*sizes)
    here = of_chunk, count // num_devices
    slots = num_chunks * num_blocks(*here) * block_rows(*here)
    number = rounds(experts, num_tokens, num_devices, is_placed=is_placed)
    return float(number) * slots / choices


def exchanged_bytes(
    model: ModelConfig, stage: StageShape, num_chunks: int
) -> tuple[tuple[Numbers, ...], tuple[Numbers, ...]]:
    """Bytes of each array that a device exchanges in a round of a layer: forward, backward.

    There are n slots_of_each(T, E, k, n) rows in each chunk, of which one n-th stays on the device.
    A forward sends the numbers and weights of k choices, tokens, and results. A backward sends the
    first two again, gradients of results and of tokens, and those of weights.
    """
    experts = model.experts
    assert experts is not None, "a model with experts has settings of them"
    num_tokens: Any = stage_tokens(model, stage)
    sizes = num_tokens, experts.count, experts.active, stage.expert, num_chunks
    groups = router_groups(experts, is_placed=stage.places_experts)
    rows = num_chunks * stage.expert * slots_of_each(*sizes, groups)
    each = 4.0 * experts.active * rows
    tokens = 1.0 * DTYPE_BYTES[stage.dtype] * sent_width(model) * rows
    return (2 * each, tokens, tokens), (2 * each, tokens, tokens, tokens, each)


def round_s(sent_s: Numbers, products_s: Numbers, back_s: Numbers, num_chunks: int) -> Numbers:
    """Seconds of a round, of whose chunks each is sent, multiplied, and sent back.

    The links carry one chunk at a time, and the products are of one at a time. All chunks are sent
    first, and come back as their products are ready: no order takes less.

    >>> [float(round_s(1.0, 2.0, 1.0, 1)), float(round_s(0.5, 1.0, 0.5, 2))]
    [4.0, 3.0]

    Args:
      sent_s, products_s, back_s: of one chunk.
      num_chunks: of a round.
    """
    ready_s: Numbers = 0.0
    end_s: Numbers = num_chunks * sent_s
    for i in range(1, num_chunks + 1):
        ready_s = np.maximum(ready_s, i * sent_s) + products_s
        end_s = np.maximum(end_s, ready_s) + back_s
    return end_s


class ExchangeTimes(NamedTuple):
    """Exchanges of tokens of all layers, in a microbatch."""

    forward_s: Numbers
    backward_s: Numbers
    chunks: Sizes  # of each


def exchange_s(
    model: ModelConfig,
    stage: StageShape,
    expert: Group | Groups | None,
    experts_s: Sequence[Numbers] = (0.0, 0.0),
    *,
    hides: bool = True,
) -> ExchangeTimes:
    """Seconds that exchanges of tokens over `expert` add to a microbatch.

    They may hide behind the products of experts, whose kernels they slow, where they have several
    chunks: as many as the stage says, or as take the least time. With `full` checkpointing the
    exchange of a forward runs again where something reads the results of experts.

    Args:
      model: the model's settings.
      stage: the shape of the stage.
      expert: the slowest group of devices that share experts.
      experts_s: of the products of experts in all layers, forward and backward.
      hides: whether devices compute while they send; the virtual ones of a CPU do not.
    """
    of_policies = [item for item in stage.policies(model) if has_experts(item[1])]
    if not of_policies or model.experts is None:
        return ExchangeTimes(0.0, 0.0, 1)
    count = sum(count for count, _, _ in of_policies)
    again = sum(
        count
        for count, kind, policy in of_policies
        if policy == "full" and kind.exchange is not None and kind.exchange.is_read
    )
    of_stage = stage_tokens(model, stage), stage.expert
    number = rounds(model.experts, *of_stage, is_placed=stage.places_experts)
    products_s = [np.divide(seconds, count * number) for seconds in experts_s]  # of a round
    options = CHUNKS if hides and np.any(np.greater(stage.expert, 1)) else CHUNKS[:1]
    best: ExchangeTimes | None = None
    for chunks in options if stage.expert_chunks is None else (stage.expert_chunks,):
        there, back = exchanged_bytes(model, stage, chunks)
        forward_s = count * number * _added_s(there, 2, expert, products_s[0], chunks, hides)
        backward_s = count * number * _added_s(back, 3, expert, products_s[1], chunks, hides)
        exchange = ExchangeTimes(forward_s, backward_s + again / count * forward_s, chunks)
        best = exchange if best is None else _faster(best, exchange)
    assert best is not None
    return best


def _faster(one: ExchangeTimes, other: ExchangeTimes) -> ExchangeTimes:
    """The faster one of two; of arrays of them, where each is."""
    is_other = other.forward_s + other.backward_s < one.forward_s + one.backward_s
    return ExchangeTimes(*(np.where(is_other, *pair) for pair in zip(other, one, strict=True)))


def _added_s(
    sizes: Sequence[Numbers],
    num_sent: int,
    expert: Group | Groups | None,
    products_s: Numbers,
    num_chunks: int,
    hides: bool,
) -> Numbers:
    """Seconds that the exchange of a round of a layer adds.

    Args:
      sizes: bytes of each array.
      num_sent: of the arrays that go to the experts; the others come back.
      expert, hides: those of `exchange_s`.
      products_s: of the experts, in a round.
      num_chunks: of the round.
    """
    each_s = [collective_times.all_to_all_s(size / num_chunks, expert) for size in sizes]
    sent_s, back_s = sum(each_s[:num_sent]), sum(each_s[num_sent:])
    all_s = num_chunks * (sent_s + back_s)
    if num_chunks == 1 or not hides:
        return all_s
    hidden_s = all_s + products_s - round_s(sent_s, products_s / num_chunks, back_s, num_chunks)
    return all_s - hidden_s + (OVERLAP_SLOWDOWN - 1) * hidden_s
