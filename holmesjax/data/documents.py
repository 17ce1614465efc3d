"""Documents in files: a part of a file, and what is wanted from it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from holmesjax.errors import DataError


class FilePart(NamedTuple):
    """A part of a file: a range of what its format counts, from 0."""

    path: str
    first: int  # bytes, row groups, rows or records
    last: int  # one after the range


class Wanted(NamedTuple):
    """The choice of a user among what files hold."""

    column: str = "text"  # the field of a line, or the column of a table
    dtype: str | None = None  # of the numbers in a record that is tokens; None: it is text
    is_picked: bool = True  # whether a pattern names the files: a binary one is a mistake


# The place of a document, for messages, and its text or its tokens.
Documents = Iterator[tuple[str, str | np.ndarray]]


def decoded(content: bytes, where: str) -> str:
    """Bytes as text. Raises DataError."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise no_text(where, error) from None


def no_text(where: str, error: UnicodeError, encoding: str = "UTF-8") -> DataError:
    """The refusal of bytes that are no text in an encoding."""
    fix = "save it as UTF-8, or leave it out by --pattern"
    return DataError(where, f"is no {encoding}", found=error, fix=fix)


def damaged(where: str, kind: str, error: Exception | str) -> DataError:
    """The refusal of a file that is not what its name says, or not whole."""
    words = " ".join(str(error).split()) or type(error).__name__
    return DataError(where, f"is no whole {kind}", found=words, fix="copy it again")


def null_among(where: str, column: str, place: int) -> DataError:
    """The refusal of a list of tokens that has a null."""
    problem, fix = f"has a null among the tokens of `{column}`", "write the document again"
    return DataError(where, problem, found=f"null at place {place:,}", fix=fix)


# Fields beside tokens that say which of them count, and their value where one does not.
MASKS = {"attention_mask": 0, "loss_mask": 0, "labels": -100}


def masked_beside(where: str, name: str, place: int) -> DataError:
    """The refusal of tokens that a field beside them leaves out: here all would count."""
    problem = f"has tokens that its `{name}` leaves out, and all would train"
    fix = "leave out the tokens of padding; write dialogues for data.source=chat"
    return DataError(where, problem, found=f"{MASKS[name]} at place {place:,}", fix=fix)
