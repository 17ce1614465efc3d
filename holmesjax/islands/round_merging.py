"""Merges a round of a mailbox, a layer at a time, and writes it there once. No JAX."""

import contextlib
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holmesjax.config import OuterConfig
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.mailbox_places import MailboxPlace
from holmesjax.islands.mailbox_records import MERGED, DamagedObjectError, Index, Merged, Sent
from holmesjax.islands.merge import merge

Arrays = dict[str, np.ndarray]  # by layer and name


class DamagedSentError(DamagedObjectError):
    """Weights that an island has sent are not what their record says."""

    def __init__(self, island: str, text: str):
        super().__init__(text)
        self.island = island


class ScratchError(OSError):
    """A file of this process, beside the mailbox, cannot be written."""


@contextlib.contextmanager
def writing_here(scratch: Path) -> Iterator[None]:
    """Raises ScratchError for an error of the disk here, which is none of the mailbox."""
    try:
        yield
    except OSError as error:
        raise ScratchError(error.errno, error.strerror, str(scratch)) from None


def write_round(
    place: MailboxPlace,
    scratch: Path,
    outer: OuterConfig,
    *,
    number: int,
    by: str,
    session: str,
    before: Merged | None,
    sent: Mapping[str, Sequence[Sent]],
) -> bool:
    """Merges what islands have sent, and writes the record of the round unless it is there.

    Returns whether it was not there, so that this one counts.

    Args:
      place: of the mailbox.
      scratch: a folder of this process.
      outer: the rule.
      number: of the round; round 0 has the weights of the one that has sent.
      by, session: the island that merges, and its job.
      before: the round before.
      sent: what the islands have sent that take part, in the order of their numbers.

    Raises DamagedSentError, DamagedObjectError for what is of the round before, and OSError.
    """
    folder = records.round_folder(number)
    tokens = {name: parts[0].progress.tokens for name, parts in sent.items()}
    file = f"{folder}/global.{by}.{session}.bin"
    momentum_file = f"{folder}/momentum.{by}.{session}.bin" if before else ""
    with _result(place, scratch, outer, before, sent) as result:
        result.put(place, file, momentum_file)
    progress = {name: parts[0].progress._replace(round=number) for name, parts in sent.items()}
    record = Merged(
        round=number,
        tokens=before.tokens + sum(tokens.values()) if before else 0,
        islands=tokens if before else {},
        known={**before.known, **progress} if before else {},
        sessions={name: parts[0].session for name, parts in sent.items()},
        by=by,
        file=file,
        momentum_file=momentum_file,
        weights=result.weights,
        momentum=result.momentum,
    )
    try:
        place.put(f"{folder}/{MERGED}", record.to_bytes(), replaces=False)
    except FileExistsError:  # another was faster, and its round counts
        place.remove([name for name in (file, momentum_file) if name])
        return False
    return True


def write_again(
    place: MailboxPlace,
    scratch: Path,
    outer: OuterConfig,
    *,
    record: Merged,
    before: Merged | None,
    sent: Mapping[str, Sequence[Sent]],
) -> None:
    """Writes the weights and the momentum of a round again, to the bit: others have them.

    Args:
      place, scratch, outer: as for `write_round`.
      record: of the round.
      before: the round before it.
      sent: what was merged then.

    Raises as it, and DamagedObjectError where that gives other arrays.
    """
    with _result(place, scratch, outer, before, sent) as result:
        if (result.weights, result.momentum) != (record.weights, record.momentum):
            raise DamagedObjectError("what the islands have sent gives other weights by now")
        result.put(place, record.file, record.momentum_file)


class _Result(NamedTuple):
    path: Path  # of the global weights
    momentum_path: Path
    weights: Index
    momentum: Index

    def put(self, place: MailboxPlace, file: str, momentum_file: str) -> None:
        if momentum_file:
            place.put_file(self.momentum_path, momentum_file)
        place.put_file(self.path, file)


@contextlib.contextmanager
def _result(
    place: MailboxPlace,
    scratch: Path,
    outer: OuterConfig,
    before: Merged | None,
    sent: Mapping[str, Sequence[Sent]],
) -> Iterator[_Result]:
    """The result of a round in files of this process."""
    with temporary(scratch) as path, temporary(scratch) as momentum_path:
        if before is None:
            [parts] = sent.values()
            in_order = sorted(parts, key=lambda part: part.part)
            names = [name for part in in_order for name in part.index]
            weights, momentum = Index(), Index()
            for name in names:
                x = weights_of(place, parts, [name])[name]
                with writing_here(scratch), path.open("ab") as file:
                    records.append_array(file, weights, name, x)
        else:
            weights, momentum = Index(), Index()
            for name, new, v in _merged(place, outer, before, sent):
                with writing_here(scratch), path.open("ab") as file:
                    records.append_array(file, weights, name, new)
                with writing_here(scratch), momentum_path.open("ab") as file:
                    records.append_array(file, momentum, name, v)
        yield _Result(path, momentum_path, weights, momentum)


def _merged(
    place: MailboxPlace, outer: OuterConfig, before: Merged, sent: Mapping[str, Sequence[Sent]]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields each parameter with its global weights and its momentum, of a layer at a time."""
    tokens = [parts[0].progress.tokens for parts in sent.values()]
    for names in _by_layer(before.weights):
        old = records.read_arrays(place, before.file, before.weights, names)
        momentum = (
            records.read_arrays(place, before.momentum_file, before.momentum, names)
            if before.momentum
            else {name: np.zeros_like(x) for name, x in old.items()}
        )
        islands = [weights_of(place, parts, names) for parts in sent.values()]
        for name in names:
            arrays = [island[name] for island in islands]
            yield name, *merge(outer, arrays, tokens, old[name], momentum[name])


def weights_of(place: MailboxPlace, parts: Sequence[Sent], names: Collection[str]) -> Arrays:
    """Some weights that an island has sent. Raises DamagedSentError, and OSError."""
    found: Arrays = {}
    for part in parts:
        own = [name for name in names if name in part.index]
        try:
            found |= records.read_arrays(place, part.file, part.index, own)
        except (DamagedObjectError, FileNotFoundError) as error:
            raise DamagedSentError(part.island, str(error)) from None
    if missing := set(names) - found.keys():
        raise DamagedSentError(parts[0].island, f"{parts[0].file} has no {min(missing)}")
    return found


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(".")[0], []).append(name)
    return list(found.values())


@contextlib.contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """The path of a file in a folder, which is removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{secrets.token_hex(8)}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
