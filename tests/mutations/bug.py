"""A planted bug as data: which line, what becomes of it, and the quick tests that find it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One wrong edit of one module."""

    name: str
    module: str  # dotted
    old: str  # occurs exactly once in the module
    new: str
    wrong: str  # what is wrong with it
    tests: tuple[str, ...]  # node ids; at least one of these tests fails

    def path(self, root: Path) -> Path:
        return root.joinpath(*self.module.split(".")).with_suffix(".py")

    def planted(self, text: str) -> str:
        """The text of the module with the bug."""
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} must occur once"
        return text.replace(self.old, self.new)
