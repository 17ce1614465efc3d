"""Names of the environment variables that a user may give to the processes of a job."""

import re
from collections.abc import Iterable, Iterator

from holmesjax.errors import HolmesError
from holmesjax.files.yaml_files import Document, Keys

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def wrong_names(
    document: Document, keys: Keys, names: Iterable[str], *, is_value: bool = False
) -> Iterator[HolmesError]:
    """Yields a mistake for each name that cannot be, or that the launcher itself sets.

    Args:
      document: the file.
      keys: of the place where the names are.
      names: to look at.
      is_value: whether a name is the value of that place; otherwise it is a key in it.
    """
    for name in names:
        if not VARIABLE.fullmatch(name) or name.startswith("HOLMES_"):
            fix = "use letters, digits and _; what begins with HOLMES_ is set by the launcher"
            problem = "cannot be the name of a variable"
            place = keys if is_value else (*keys, name)
            yield document.mistake(place, problem, found=name, fix=fix)
