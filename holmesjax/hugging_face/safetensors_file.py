"""Reads and writes files of the format `safetensors`, a part of a tensor at a time. No JAX.

    N: 8 bytes, little-endian
    N bytes of JSON: name -> dtype, shape, data_offsets
    the data, row-major and little-endian

Bytes are read by `pread`. A file in a mapping would end the process where it shrinks, and would
count as memory that the process holds.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from holmesjax.errors import CheckpointError
from holmesjax.hugging_face import json_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ALIGNMENT = 8  # of the data in files that we write

# Bits of an item, of all dtypes of the format.
BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64},
    **{"I64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
}
# The dtypes that parameters may have.
DTYPES: Mapping[str, np.dtype] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
}
# The dtypes that are read: of parameters, and of codes (`block_scales`).
READ: Mapping[str, np.dtype] = {**DTYPES, "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One tensor of a file."""

    file: Path
    dtype: str  # of `BITS`
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    size: int  # bytes

    def rows(self, start: int, stop: int, columns: slice) -> np.ndarray:
        """Reads columns of consecutive rows of a tensor of one or two dims; of one: its items.

        Nothing else of the file is read. Raises CheckpointError if the file has become shorter.
        """
        dtype = READ[self.dtype]
        width = math.prod(self.shape[1:])
        left, right, _ = columns.indices(width)
        out = np.empty((stop - start, right - left), dtype)
        # Whole rows lie one after the other.
        num_runs = 1 if right - left == width else stop - start
        num_bytes = out.nbytes // max(num_runs, 1)
        with open(self.file, "rb", buffering=0) as file:
            for i in range(num_runs):
                run = out.reshape(-1).view(np.uint8).data[i * num_bytes : (i + 1) * num_bytes]
                at = self.offset + ((start + i) * width + left) * dtype.itemsize
                self._fill(file.fileno(), run, at)
        return out if len(self.shape) > 1 else out[:, 0]

    def _fill(self, descriptor: int, buffer: memoryview, at: int) -> None:
        while buffer:
            num_bytes = os.preadv(descriptor, [buffer], at)
            if not num_bytes:
                found, fix = f"its end at byte {at:,}", "download the file again"
                raise CheckpointError(str(self.file), "ends early", found=found, fix=fix)
            buffer, at = buffer[num_bytes:], at + num_bytes


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Reads no data.

    Raises CheckpointError unless the tensors lie one after the other from the first byte of the
    data to the last of the file, each as long as its shape and dtype say.
    """

    def refusal(problem: str, found: object) -> CheckpointError:
        fix = "download the file again, or save it again with the library safetensors"
        return CheckpointError(str(path), problem, found=found, fix=fix)

    size = json_file.size_of(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                problem = "is no whole safetensors file: its header would not fit in it"
                raise refusal(problem, f"{size:,} bytes, and a header of {length:,}")
            text = file.read(1)
            if text != b"{":
                raise refusal("is no safetensors file: its header must begin with {", text)
            text += file.read(length - 1)
    except OSError as error:
        raise refusal("cannot be read", error.strerror) from None
    entries = json_file.parse(text, str(path))
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise refusal("has metadata that are no texts", json_file.shown(metadata))
    found = {}
    for name, entry in entries.items():
        if problem := _wrong_entry(entry):
            raise refusal(f"has a tensor {json_file.shown(name)} {problem}", json_file.shown(entry))
        start, stop = entry["data_offsets"]
        found[name] = Tensor(
            file=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + start,
            size=stop - start,
        )
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != end:
            kind = "a gap before" if tensor.offset > end else "another tensor under"
            problem = f"has {kind} tensor {json_file.shown(name)}"
            raise refusal(problem, f"it begins at byte {tensor.offset:,}, not at {end:,}")
        end += tensor.size
    if end != size:
        problem = "is cut off" if end > size else "has more bytes than its tensors"
        raise refusal(problem, f"{size:,} bytes; its tensors end at {end:,}")
    return found


def _wrong_entry(entry: Any) -> str:
    """The mistake in what a header says of one tensor; empty if there is none."""
    is_natural = lambda x: type(x) is int and 0 <= x < 2**63
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        return "without dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return "of a dtype that is not known"
    if not isinstance(shape, list) or not all(map(is_natural, shape)):
        return "of a shape that cannot be"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_natural, offsets)):
        return "whose data_offsets cannot be"
    if 8 * (offsets[1] - offsets[0]) != BITS[dtype] * math.prod(shape):
        return "whose bytes are not those of its shape and dtype"
    return ""


def write(
    path: Path,
    dtypes: Callable[[str], str],
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Iterable[np.ndarray],
) -> None:
    """Writes a file of tensors; readable by all, and on the disk at the end.

    Args:
      path: the file, which must not be there.
      dtypes: that of a tensor, of `DTYPES`, by its name.
      shapes: of each tensor, in order.
      pieces: the data of all tensors in this order, in pieces of any shape, each of one tensor;
        cast to its dtype.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + DTYPES[dtypes(name)].itemsize * math.prod(shape)
        entries[name] = {"dtype": dtypes(name), "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    num_bytes, of_pieces = 0, (piece for piece in pieces if piece.size)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            dtype, left = DTYPES[dtypes(name)], math.prod(shape)
            while left:
                piece = next(of_pieces)
                row_major = np.ascontiguousarray(piece.astype(dtype, copy=False)).reshape(-1)
                num_bytes += file.write(row_major.view(np.uint8).data)
                left -= piece.size
        assert next(of_pieces, None) is None, f"{path}: more pieces than tensors"
        os.fchmod(file.fileno(), 0o644)
        file.flush()
        os.fsync(file.fileno())
    assert num_bytes == end, f"{path}: {num_bytes} bytes of {end}"
