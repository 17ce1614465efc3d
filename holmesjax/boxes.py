"""Boxes of arrays: the start and stop of every dim. No JAX."""

from types import EllipsisType

Box = tuple[tuple[int, int], ...]


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
