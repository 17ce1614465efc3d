"""Parameters from the rows of tensors, and back, a few megabytes at a time. No JAX."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from holmesjax.errors import CheckpointError
from holmesjax.hugging_face.block_scales import Scaled
from holmesjax.hugging_face.safetensors_file import READ, Tensor
from holmesjax.hugging_face.tensors import Place
from holmesjax.layer_specs.array_boxes import Box, shape_of, within

ALIGNMENT = 64  # bytes
MAX_BYTES = 4 << 20  # that are read or written at a time


def read(places: Sequence[Place], tensors: Mapping[str, Tensor | Scaled], box: Box) -> np.ndarray:
    """The elements in a box of a parameter, float32.

    Only the rows and columns that hold them are read. If a row merges dims, the box is widened to
    whole indices of the outermost of them.

    Args:
      places: of the parameter, one for each expert where each has a tensor.
      tensors: by their names in the places.
      box: of the parameter.

    Raises CheckpointError for elements that are NaN or infinite: no output of a model with them
    would be a number.
    """
    out = _aligned(shape_of(box))
    if places[0].expert is None:
        [place] = places
        _fill(out, place, tensors[place.tensor], box)
    else:
        (first, last), *inside = box
        for place, of_expert in zip(places[first:last], out, strict=True):
            _fill(of_expert, place, tensors[place.tensor], tuple(inside))
    return out


def _fill(out: np.ndarray, place: Place, tensor: Tensor | Scaled, box: Box) -> None:
    """Reads the elements in a box of what has this place."""
    dims = place.parameter.dims
    wanted = dict(zip(dims, box, strict=True))
    wide = {dim: (0, size) for dim, size in place.sizes.items()}
    columns, width = slice(0, 1), 1
    if len(place.groups) == 2:
        outer, unit = _outermost(place, 1)
        wide[outer] = first, last = wanted[outer]
        columns = slice(place.start[1] + first * unit, place.start[1] + last * unit)
        width = columns.stop - columns.start
    outer, unit = _outermost(place, 0)
    first, last = wanted[outer]
    step = _num_indices(unit * width * READ[tensor.dtype].itemsize)
    num_odd = 0
    for start in range(first, last, step):
        here = start, min(start + step, last)
        top, bottom = (place.start[0] + index * unit for index in here)
        rows = tensor.rows(top, bottom, columns)
        around = tuple({**wide, outer: here}[dim] for dim in dims)
        inside = tuple({**wanted, outer: here}[dim] for dim in dims)
        part = place.from_box(rows, shape_of(around))
        target = out[within(inside, box)]
        target[...] = part[within(inside, around)]
        num_odd += target.size - int(np.count_nonzero(np.isfinite(target)))
    if num_odd:
        raise CheckpointError(
            str(tensor.file),
            f"has numbers in {place.tensor} that are NaN or infinite",
            found=f"{num_odd:,} among {out.size:,}",
            fix="download the folder again; if they are in the original, put finite ones there",
        )


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An array in memory that XLA:CPU takes as it is, where it would copy any other."""
    num_bytes = 4 * math.prod(shape)
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(np.float32).reshape(shape)


def rows_of(boxes: Iterable[Place], values: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """The rows of a tensor from the parameters that are its boxes, in order.

    Args:
      boxes: the places in the tensor, in order.
      values: of each parameter, by name.
    """
    together = list(boxes)
    is_side_by_side = any(sum(place.start[1:]) for place in together)
    for group in [together] if is_side_by_side else [[place] for place in together]:
        outer, unit = _outermost(group[0], 0)
        size = group[0].sizes[outer]
        step = _num_indices(4 * unit * math.prod(group[0].shape[1:]))
        for start in range(0, size, step):
            here = slice(start, start + step)
            parts = [_rows(place, place.values(values), here) for place in group]
            yield np.concatenate(parts, axis=-1)  # a copy, so that whoever has it holds no layer


def _rows(place: Place, value: np.ndarray, here: slice) -> np.ndarray:
    """The rows of one box at some indices of the outermost dim in them."""
    dims, outer = place.parameter.dims, place.groups[0][0]
    part = value[tuple(here if dim == outer else slice(None) for dim in dims)]
    split = part.transpose([dims.index(dim) for dim in "".join(place.groups)])
    return split.reshape(-1, *place.box_shape[1:])


def _outermost(place: Place, dim: int) -> tuple[str, int]:
    """The outermost of our dims in a dim of the tensor, and how long each index of it is there."""
    group = place.groups[dim]
    return group[0], math.prod(place.sizes[name] for name in group[1:])


def _num_indices(num_bytes: int) -> int:
    """How many indices of so many bytes each are in one piece."""
    return max(1, MAX_BYTES // max(num_bytes, 1))
