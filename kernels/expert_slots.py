"""The slots of choices that products and exchanges of experts have; without JAX, for planners."""

import functools
from math import ceil, comb
from typing import Any

import numpy as np

# What there is room for over what is even: a quarter may be on top of it without a new round.
SLOTS_PER_CHOICE = 1.25
MAX_ROWS = 256  # of a block
BLOCKS_EACH = 4  # blocks of an expert with the mean load: a quarter of its slots may be empty


def choices_of_each(
    num_tokens: Any, num_experts: int, k: int, num_devices: Any, num_chunks: int = 1
) -> Any:
    """The most choices that a chunk of an exchange takes to each device, itself among them.

    Integers, or arrays of them. A token's choices go together.

    >>> choices_of_each(32, 8, 2, 4), choices_of_each(1, 8, 2, 8), choices_of_each(32, 8, 2, 4, 8)
    (20, 1, 3)

    Args:
      num_tokens, num_experts, k, num_devices, num_chunks: those of `slots_of_each`.
    """
    even = -(-5 * k * num_tokens // (4 * num_devices * num_chunks))
    fewest = np.minimum(k, num_experts // num_devices)
    most = np.maximum(even, fewest)
    return most if np.ndim(most) else int(most)


def slots_of_each(
    num_tokens: Any,
    num_experts: int,
    k: int,
    num_devices: Any,
    num_chunks: int = 1,
    groups: tuple[int, int] = (1, 1),
) -> Any:
    """Slots of a chunk of an exchange for the rows that go to each device, itself among them.

    Integers, or arrays of them. A token goes once to each device that has some of its experts.

    >>> slots_of_each(32, 8, 2, 4), slots_of_each(1, 8, 2, 8), slots_of_each(32, 8, 2, 4, 8)
    (19, 1, 3)

    Args:
      num_tokens: of a device.
      num_experts, k: of a layer, and of a token.
      num_devices: that share experts.
      num_chunks: of a round.
      groups: of experts, and of how many of them a token has its choices.
    """
    rows = _rows_of_each(num_tokens, num_experts, k, num_devices, *groups)
    slots = -(-rows // num_chunks)
    return slots if np.ndim(slots) else int(slots)


@functools.cache
def share_of_tokens(
    num_experts: int, k: int, num_devices: int, groups: int = 1, active_groups: int = 1
) -> float:
    """The share of tokens that have a choice on a device, where all choices are as likely.

    Devices have whole groups, or equal parts of one; otherwise groups do not count, which makes
    the share larger.

    >>> [round(n * share_of_tokens(256, 8, n), 2) for n in (4, 8, 32)]
    [3.61, 5.29, 7.27]
    >>> [round(n * share_of_tokens(256, 8, n, 8, 4), 2) for n in (4, 8, 32)]
    [2.93, 3.63, 6.6]

    Args:
      num_experts, k: of a layer, and of a token.
      num_devices: that share experts.
      groups, active_groups: those of experts, and how many of them a token has its choices in.
    """
    here, size = num_experts // num_devices, num_experts // groups
    if here % size and size % here:
        here, size, groups, active_groups = here, num_experts, 1, 1
    can = active_groups * size  # experts among which a token has its choices
    none = lambda count: comb(can - count, k) / comb(can, k)  # a choice of so many of them
    if here < size:
        return active_groups / groups * (1 - none(here))
    whole = here // size
    ways = lambda j: comb(whole, j) * comb(groups - whole, active_groups - j)
    total = comb(groups, active_groups)
    return sum(
        ways(j) / total * (1 - none(j * size)) for j in range(1, min(whole, active_groups) + 1)
    )


def _one_rows_of_each(
    num_tokens: int, num_experts: int, k: int, num_devices: int, groups: int, active_groups: int
) -> int:
    share = share_of_tokens(num_experts, k, int(num_devices), groups, active_groups)
    return min(int(num_tokens), ceil(SLOTS_PER_CHOICE * share * int(num_tokens)))


_rows_of_each = np.vectorize(_one_rows_of_each, otypes=[int])


def block_rows(num_choices: int, num_experts: int) -> int:
    """Rows of a block of slots, for so many choices of all tokens together.

    >>> block_rows(8192 * 8, 128), block_rows(64, 8), block_rows(4, 8)
    (128, 8, 1)
    """
    wanted = num_choices // (BLOCKS_EACH * num_experts)
    if num_choices <= num_experts:
        return 1
    return min(MAX_ROWS, max(8, wanted // 8 * 8))


def num_blocks(num_choices: int, num_experts: int) -> int:
    """Blocks that hold every choice, however the choices fall.

    >>> num_blocks(64, 8), num_blocks(4, 8)
    (15, 4)
    """
    filled = min(num_experts, num_choices)  # experts that can have a choice
    return (num_choices - filled) // block_rows(num_choices, num_experts) + filled


def capacity_rows(length: int, k: int, num_experts: int, factor: float) -> int:
    """Slots that an expert has for each sequence: `factor` times its share, rounded up.

    >>> capacity_rows(16, 2, 4, 1.0), capacity_rows(16, 2, 4, 1.01), capacity_rows(4, 2, 4, 9.0)
    (8, 9, 4)
    """
    return min(length, int(-(-(length * k * factor) // num_experts)))
