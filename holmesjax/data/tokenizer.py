"""Text to tokens and back: one token per byte of UTF-8."""

import numpy as np

# Marks the begin of a document. No text file holds this byte.
BEGIN = 0
NUM_TOKENS = 256  # a model may have more ids, so that its vocabulary divides: they mean nothing


def encode(text: str) -> np.ndarray:
    """Bytes of the text, behind the mark that begins a document; uint8.

    >>> encode("def").tolist()
    [0, 100, 101, 102]
    """
    return np.frombuffer(bytes([BEGIN]) + text.encode(), np.uint8)


def decode(tokens: np.ndarray | bytes) -> str:
    """The text; bytes that are no UTF-8 become U+FFFD, marks of documents disappear.

    >>> decode(encode("naïve"))
    'naïve'
    """
    return bytes(tokens).replace(bytes([BEGIN]), b"").decode(errors="replace")
