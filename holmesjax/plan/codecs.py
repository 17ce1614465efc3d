"""The codecs of islands: the form in which numbers cross between them. Does not import JAX.

A codec gives an array of the same shape, in a dtype of its own. The functions work for NumPy and
for JAX. What is encoded in a program must be decoded in another: XLA leaves out two conversions
that follow each other.
"""

from dataclasses import dataclass
from typing import Any

from holmesjax.config import OuterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """A form of float32 numbers.

    Args:
      dtype: of what crosses.
      num_bytes: of a number.
      is_exact: whether it gives back each number to the bit.
    """

    dtype: str
    num_bytes: int
    is_exact: bool

    def encode(self, x: Any) -> Any:
        """The array that crosses, of the same shape."""
        return x.astype(self.dtype)

    def decode(self, x: Any) -> Any:
        """The numbers of an array that has come, in float32."""
        return x.astype("float32")


CODECS = {
    "float32": Codec(dtype="float32", num_bytes=4, is_exact=True),
    "bfloat16": Codec(dtype="bfloat16", num_bytes=2, is_exact=False),
}


def codec_of(outer: OuterConfig) -> Codec:
    """The codec of a run's meetings."""
    return CODECS[outer.codec]
