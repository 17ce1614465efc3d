"""Strings before which a text ends."""

from collections.abc import Sequence


class StopStrings:
    """A text that is cut before the first of some strings, as it comes.

    >>> text = StopStrings(["\\n\\n", "END"])
    >>> [text.push(piece) for piece in ("a\\n", "b E", "N", "x E", "ND y")], text.is_found
    (['a', '\\nb ', '', 'ENx ', ''], True)
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(filter(None, strings))
        self._held = ""  # may begin one of them
        self.is_found = False

    def push(self, piece: str) -> str:
        """Takes more of the text; returns what is certainly before any of the strings."""
        self._held += piece
        places = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if places:
            self.is_found, out = True, self._held[: min(places)]
            self._held = ""
            return out
        size = self._num_held()
        out, self._held = self._held[: len(self._held) - size], self._held[len(self._held) - size :]
        return out

    def rest(self) -> str:
        """The end of the text, where none of the strings has come."""
        out, self._held = self._held, ""
        return out

    def _num_held(self) -> int:
        """The length of the longest end that begins one of the strings."""
        longest = max(map(len, self._strings), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        ends = (size for size in sizes if self._is_begin(self._held[-size:]))
        return next(ends, 0)

    def _is_begin(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)
