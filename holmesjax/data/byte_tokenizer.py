"""Text to tokens and back: one token per byte of UTF-8."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from holmesjax.data.decode_stream import DecodeStream

# Marks the begin of a document. No text file holds this byte.
BEGIN = 0
MARK = "<|begin|>"  # how it is written, where it is shown


class ByteTokenizer:
    """A token for each byte; the mark of a document is one that no text holds."""

    num_tokens = 256
    ends = (BEGIN,)
    marks: Mapping[str, int] = MappingProxyType({MARK: BEGIN})

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the text, behind the mark that begins a document; int32.

        >>> ByteTokenizer().encode("def").tolist()
        [0, 100, 101, 102]
        """
        return np.frombuffer(bytes([BEGIN]) + text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, marks of documents disappear."""
        return bytes(token for token in tokens if token != BEGIN).decode(errors="replace")

    def decode_stream(self, after: Sequence[int] = ()) -> DecodeStream:
        """The text of tokens that follow others, as they come."""
        return DecodeStream(self.decode, after)
