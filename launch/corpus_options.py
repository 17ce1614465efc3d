"""Names the options of a command in the errors of what it reads, in place of a run's settings."""

import contextlib
import re
from collections.abc import Iterator

from holmesjax.errors import HolmesError

OPTIONS = {
    r"data\.(pattern|tokenizer)=": r"--\1 ",
    r"data\.(pattern|tokenizer)": r"--\1",
    r"data\.corpus": "corpus",
}


@contextlib.contextmanager
def as_options() -> Iterator[None]:
    """Raises an error about `data.corpus`, `data.pattern` or `data.tokenizer` as the user wrote it.

    The verbs `tokenize` and `tokenizer` have no run file, so its settings mean nothing there.
    """
    try:
        yield
    except HolmesError as error:
        where, problem, fix = map(_as_option, (error.where, error.problem, error.fix))
        raise type(error)(where, problem, found=error.found, fix=fix) from None


def _as_option(text: str) -> str:
    for setting, option in OPTIONS.items():
        text = re.sub(setting, option, text)
    return text
