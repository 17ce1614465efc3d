"""Weights in 8-bit floating point with a scale for each block of rows and columns. No JAX.

model.layers.3.mlp.up_proj.weight            [O, I] F8_E4M3
model.layers.3.mlp.up_proj.weight_scale_inv  [O / 128, I / 128], rounded up: what a block is times
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holmesjax.errors import CheckpointError
from holmesjax.hugging_face.safetensors_file import Tensor

CODES = "F8_E4M3"
SCALES = ("F32", "BF16")
SUFFIX = "_scale_inv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A tensor of codes with its scales, which is read as `Tensor` is."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]  # rows and columns that have one scale

    @property
    def file(self) -> Path:
        return self.codes.file

    @property
    def dtype(self) -> str:
        return self.codes.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def size(self) -> int:
        """Bytes of its codes."""
        return self.codes.size

    def rows(self, start: int, stop: int, columns: slice) -> np.ndarray:
        """Columns of consecutive rows, float32: codes times the scales of their blocks."""
        left, right, _ = columns.indices(self.shape[1])
        rows, width = self.block
        inside = slice(left // width, -(-right // width))
        scales = self.scales.rows(start // rows, -(-stop // rows), inside).astype(np.float32)
        of_row = np.arange(start, stop) // rows - start // rows
        of_column = np.arange(left, right) // width - left // width
        codes = self.codes.rows(start, stop, columns).astype(np.float32)
        whole: np.ndarray = codes * scales[of_row[:, None], of_column[None]]
        return whole


def joined(
    found: Mapping[str, Tensor], block: tuple[int, int], folder: Path
) -> dict[str, Tensor | Scaled]:
    """The tensors by name, those of codes together with their scales.

    Raises CheckpointError for codes without scales, and for scales of another shape or dtype.
    """
    joined: dict[str, Tensor | Scaled] = {}
    names = [name for name, tensor in found.items() if tensor.dtype == CODES]
    for name in names:
        codes, scales = found[name], found.get(name + SUFFIX)
        wanted = [-(-size // width) for size, width in zip(codes.shape, block, strict=False)]
        shown = "none" if scales is None else f"{list(scales.shape)} {scales.dtype}"
        if scales is None or len(codes.shape) != 2 or list(scales.shape) != wanted:
            problem = f"must have a tensor {name}{SUFFIX} {wanted}, a scale for each block"
            raise CheckpointError(str(folder), problem, found=shown, fix="download it again")
        if scales.dtype not in SCALES:
            problem = f"has scales {name}{SUFFIX} that are none of {', '.join(SCALES)}"
            raise CheckpointError(str(folder), problem, found=shown, fix="use another release")
        joined[name] = Scaled(codes=codes, scales=scales, block=block)
    others = {name: x for name, x in found.items() if name.removesuffix(SUFFIX) not in joined}
    return others | joined
