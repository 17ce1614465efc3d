"""Packages that are not installed with HolmesJAX itself: the extras of pyproject.toml."""

import contextlib
from collections.abc import Iterator

from holmesjax.errors import DataError


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
        fix = f"pip install 'holmesjax[{extra}]'"
        found = "no such package"
        raise DataError(where, f"needs the package {name}", found=found, fix=fix) from None
