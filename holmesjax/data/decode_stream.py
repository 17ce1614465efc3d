"""The text of tokens as they come."""

from collections.abc import Callable, Sequence

ENOUGH = 16  # tokens on which the text of the next one may depend
HALF = "\ufffd"  # at the end of a text whose last character is not whole yet


class DecodeStream:
    """The text of tokens that follow others, in pieces that are whole characters.

    The text of a token may depend on the one before it, as the space before a word does. So a
    piece is what the last tokens together have more than without the new ones.

    >>> stream = DecodeStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    >>> [stream.push(token) for token in "a→".encode()], stream.rest()
    (['a', '', '', '→'], '')
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        after: Sequence[int] = (),
        *,
        is_open: bool = False,
    ):
        """Begins behind tokens whose text is known.

        Args:
          decode: the text of tokens; characters that are not whole are U+FFFD.
          after: the tokens before.
          is_open: whether later tokens change the text of earlier ones. It is whole at the end.
        """
        self._decode, self._held, self._is_open = decode, list(after[-ENOUGH:]), is_open
        self._start, self._shown = 0, len(self._held)

    def push(self, token: int) -> str:
        """Takes a token; returns the text that is whole now."""
        self._held.append(token)
        if self._is_open:
            return ""
        return "" if (new := self._new()).endswith(HALF) else self._out(new)

    def rest(self) -> str:
        """The text that never became whole."""
        return self._out(self._new())

    def _new(self) -> str:
        before = self._decode(self._held[self._start : self._shown])
        return self._decode(self._held[self._start :])[len(before) :]

    def _out(self, new: str) -> str:
        if new:
            self._start, self._shown = self._shown, len(self._held)
        return new
