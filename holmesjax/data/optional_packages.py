"""Packages that are not installed with HolmesJAX itself: the extras of pyproject.toml."""

import contextlib
from collections.abc import Iterator

from holmesjax.errors import DataError


def how_to_install(extra: str) -> str:
    """The command that installs an extra, as the pages have it.

    >>> how_to_install("zstd")
    "pip install -c constraints.txt -e '.[zstd]'"
    """
    return f"pip install -c constraints.txt -e '.[{extra}]'"


@contextlib.contextmanager
def package(name: str, *, extra: str, where: str) -> Iterator[None]:
    """Says how to install a package whose import inside fails.

    Args:
      name: of the package, for the message.
      extra: that has it.
      where: what needs it.
    """
    try:
        yield
    except ImportError:
        fix, found = how_to_install(extra), "no such package"
        raise DataError(where, f"needs the package {name}", found=found, fix=fix) from None
