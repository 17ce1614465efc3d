"""Boxes of arrays: the start and stop of every dim. No JAX."""

import math
from collections.abc import Sequence
from types import EllipsisType

Box = tuple[tuple[int, int], ...]


def from_index(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """Returns the box of an index into an array of this shape, as JAX's shardings give it.

    JAX's types allow None for an index; no device of this process has it.

    >>> from_index((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    assert index is not None
    bounds = (x.indices(size)[:2] for x, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop in bounds)


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of the elements in a box.

    >>> shape_of(((2, 4), (0, 3)))
    (2, 3)
    """
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    return math.prod(shape_of(box))


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the elements that are in both boxes, or None where there are none.

    >>> intersection(((0, 4), (2, 6)), ((2, 8), (0, 4)))
    ((2, 4), (2, 4))
    """
    box = tuple((max(x, z), min(y, w)) for (x, y), (z, w) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in box) else box


def within(box: Box, outer: Box) -> tuple[slice | EllipsisType, ...]:
    """Returns the index of a box in an array that holds `outer`; it gives a view, also of a scalar.

    >>> within(((2, 4),), ((2, 8),))
    (slice(0, 2, None), Ellipsis)
    """
    slices = (
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )
    return (*slices, ...)
