"""Packed rows hold each target of each document once, with next to no padding."""

import dataclasses
import errno
import functools
import os
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from holmesjax.config import DataConfig
from holmesjax.data import corpus_progress, packing, text, tokens
from holmesjax.data.batches import Batches, model_inputs
from holmesjax.data.packing import DocumentRange, Spans, best_fit_decreasing
from holmesjax.data.sources import Splits
from holmesjax.errors import DataError, HolmesError, UnreadDataError
from tests.data.written_token_files import write_own

LENGTH = 16


def plain_best_fit(lengths, capacity):
    """The definition, by a search through all rows."""
    rows, spaces = [], []
    for piece in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        fits = [(space, row) for row, space in enumerate(spaces) if space >= lengths[piece]]
        if not fits:
            fits = [(capacity, len(rows))]
            rows.append([])
            spaces.append(capacity)
        _, row = min(fits)
        rows[row].append(piece)
        spaces[row] -= lengths[piece]
    return rows


@given(st.lists(st.integers(1, 30), max_size=60))
def test_the_rows_are_those_of_the_definition(lengths):
    assert best_fit_decreasing(lengths, 30) == plain_best_fit(lengths, 30)


def make_documents(count, largest, seed=0, mark=0):
    """Documents of which each begins with a mark, and no two tokens are the same."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, largest, size=count)
    found, number = [], 1
    for size in sizes.tolist():
        found.append(np.array([mark, *range(number, number + size - 1)]))
        number += size
    return found


def targets_of(rows):
    """Each pair of an input and its target, which must stand in one segment."""
    found = Counter()
    for index in range(len(rows)):
        batch = Batches(
            data=Splits(train=rows, validation=rows, place="", digests={}, files={}),
            seed=0,
            global_batch=1,
            length=rows.row_length,
            num_validation=1,
        )
        inputs = model_inputs(batch._rows([(rows, index)], None))
        token_L, target_L, segment_L = (x[0].tolist() for x in inputs.values())
        counted = 0
        for place, (token, target) in enumerate(zip(token_L, target_L, strict=True)):
            if target < 0:
                continue
            counted += 1
            found[token, target] += 1
            if place + 1 < len(token_L) and segment_L[place + 1] == segment_L[place]:
                assert token_L[place + 1] == target
        assert counted == rows.num_targets(index)
    return found


@pytest.mark.parametrize("marks_end", [False, True])
def test_each_target_of_each_document_comes_once_however_documents_are_cut(marks_end, tmp_path):
    """Also where the same tokens are there by a tokenizer whose documents end otherwise."""
    documents = make_documents(3000, 50)  # most are longer than a row of 16
    token_T = np.concatenate(documents)
    start_D = np.cumsum([0, *map(len, documents)])[:-1]
    whole = len(token_T)
    parts = [(0, 40_000, 3), (40_000, whole, 0)]  # as two files, the first from inside a document
    ranges = [
        DocumentRange(
            token_T=token_T,
            start_D=start_D[(start_D >= first + skip) & (start_D < last)],
            first=first + skip,
            last=last,
            marks_end=marks_end,
        )
        for first, last, skip in parts
    ]
    others = [dataclasses.replace(each, marks_end=not marks_end) for each in ranges]
    packing.packed(Spans(others), LENGTH, "", tmp_path)
    rows = packing.packed(Spans(ranges), LENGTH, "", tmp_path)
    wanted = Counter()
    for span in ranges:
        edges = [span.first, *span.start_D.tolist(), span.last]
        for first, last in pairwise(edges):
            inside = token_T[first:last].tolist()
            wanted.update(pairwise(inside))
            if marks_end and inside and last < span.last:
                wanted[inside[-1], 0] += 1
    assert targets_of(rows) == wanted


def test_less_than_half_a_percent_is_padding(monkeypatch, capsys):
    """Lengths as those of documentation: half of them above 1,000 tokens, and a long tail.

    Packing is progress of a start, and says how far it is.
    """
    monkeypatch.setattr(corpus_progress, "SAY_S", -1.0)
    before = corpus_progress.done.count
    sizes = np.random.default_rng(0).lognormal(np.log(1000), 1.2, 4000).astype(int) + 2
    start_D = np.cumsum([0, *sizes.tolist()])
    own = DocumentRange(
        token_T=np.zeros(start_D[-1], np.uint8),
        start_D=start_D[:-1],
        first=0,
        last=int(start_D[-1]),
        marks_end=False,
    )
    rows = packing.packed(Spans([own]), 2048, "", None)
    assert corpus_progress.done.count == before + 4000
    said = capsys.readouterr().out.splitlines()
    assert said == [f"packing 4,000 documents into rows: {x}%" for x in (26, 51, 77, 100)]
    assert sum(map(rows.num_targets, range(len(rows)))) == sizes.sum() - len(sizes)
    assert 0 < rows.padding < 0.005


def test_documents_of_a_row_have_segments_of_their_own_and_padding_another():
    token_T = np.array([0, 1, 2, 0, 3, 0, 4, 5, 6])
    own = DocumentRange(
        token_T=token_T, start_D=np.array([0, 3, 5]), first=0, last=9, marks_end=False
    )
    rows = packing.packed(Spans([own]), 8, "", None)
    [item] = [rows[index] for index in range(len(rows))]
    inputs = model_inputs(Batches._rows(Batches.__new__(Batches), [(rows, 0)], None))
    assert item.tokens.tolist() == [0, 4, 5, 0, 1, 0, 0, 0, 0]
    assert inputs["target_BL"].tolist() == [[4, 5, 6, 1, 2, 3, -1, -1]]
    assert inputs["segment_BL"].tolist() == [[1, 1, 1, 2, 2, 3, 4, 4]]


def read(folder, length=LENGTH, **settings):
    config = DataConfig(
        **{"corpus": str(folder), "source": "tokens", "documents": "mask"},
        **{"packing": "best_fit", "validation_fraction": 0.2, **settings},
    )
    return tokens.read(config, length)


def test_a_table_stands_beside_its_tokens_and_is_made_once(tmp_path, monkeypatch):
    write_own(tmp_path / "a.bin", make_documents(300, 40))
    first = read(tmp_path)
    monkeypatch.setattr(packing, "pack", None)  # would fail
    again = read(tmp_path)
    for name in ("train", "validation"):
        one, other = (getattr(splits, name) for splits in (first, again))
        assert len(one) == len(other) > 0
        for index in range(len(one)):
            np.testing.assert_array_equal(one[index].targets, other[index].targets)
    with pytest.raises(TypeError):  # rows of another length are others
        read(tmp_path, LENGTH + 1)
    monkeypatch.undo()
    write_own(tmp_path / "a.bin", make_documents(300, 40, seed=1))
    assert len(read(tmp_path).train) != len(first.train)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda table: os.truncate(table / "place", 7), "place has 7 bytes, sizes says "),
        (lambda table: (table / "targets").unlink(), ".*No such file.*targets"),
        (lambda table: os.truncate(table / "sizes", 0), "first has .* bytes, sizes says None"),
        (lambda table: (table / "sizes").unlink(), ".*No such file.*sizes"),
        (lambda table: (table / "sizes").write_bytes(b"\xff\xfe"), "'utf-8' codec"),
    ],
)
def test_a_table_that_is_not_whole_is_made_again(tmp_path, spoil, says, capsys):
    """Nobody has to remove it, as after a crash of the machine that wrote it."""
    write_own(tmp_path / "a.bin", make_documents(300, 40))

    def targets():
        rows = read(tmp_path).train
        return [rows[index].targets.tolist() for index in range(len(rows))]

    expected = targets()
    for table in tmp_path.glob(".holmesjax/*/place"):
        spoil(table.parent)
    assert targets() == expected
    assert re.search(f"is not whole: {says}.*; it is made again", capsys.readouterr().err)
    assert targets() == expected
    assert capsys.readouterr().err == ""  # what is there now is whole
    assert not list(tmp_path.glob(".holmesjax/*.tmp"))


@pytest.mark.parametrize("name", packing.DTYPES)
def test_a_table_that_is_cut_while_a_run_reads_it_is_named_and_made_again(tmp_path, name):
    """The system would end the process with SIGBUS."""
    write_own(tmp_path / "a.bin", make_documents(300, 40))
    rows = read(tmp_path).train
    last = len(rows) - 1
    before = rows[last], rows.num_targets(last)
    file = getattr(rows.table, name).filename
    os.truncate(file, 0)
    with pytest.raises(UnreadDataError, match=f"{file}: was cut\n  found: 0 bytes, not "):
        _ = rows[last], rows.num_targets(last)
    again = read(tmp_path).train
    np.testing.assert_equal((again[last], again.num_targets(last)), before)


def test_a_table_that_cannot_be_read_is_not_made_again(tmp_path, monkeypatch):
    """A server that is away has spoilt nothing."""
    write_own(tmp_path / "a.bin", make_documents(300, 40))
    read(tmp_path)
    monkeypatch.setattr(np, "memmap", raising(errno.ESTALE))
    with pytest.raises(DataError, match="cannot be read\n  found: Stale file handle"):
        read(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(packing, "pack", None)  # would fail
    read(tmp_path)


def raising(number):
    """A call that fails with an error of the operating system."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_folder_that_cannot_be_written_has_its_table_elsewhere(tmp_path, monkeypatch):
    write_own(tmp_path / "a.bin", make_documents(300, 40))
    (tmp_path / packing.FOLDER).write_text("in the way of the folder")
    rows = read(tmp_path).train
    assert sum(map(rows.num_targets, range(len(rows)))) > 1000


def test_processes_of_one_number_on_two_hosts_make_folders_of_their_own(tmp_path, monkeypatch):
    """In containers all have one. A folder half made is removed when nobody writes to it."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    old, new = (tmp_path / packing.FOLDER / f"{name}.1.tmp" for name in ("old", "new"))
    for left in (old, new):
        left.mkdir(parents=True)
        (left / "place").write_bytes(b"1")
    for path in (old, old / "place"):
        os.utime(path, (0, 0))

    others = []

    def make(folder, other=False):
        (folder / "x").write_bytes(bytes(4))
        if not other:  # the process of another host comes in between
            make_other = functools.partial(make, other=True)
            others.append(packing.kept_arrays("k", {"x": "<i8"}, make_other, tmp_path))
        with (folder / "x").open("ab") as file:
            file.write(bytes([0, 0, 0, 1]))

    mine = packing.kept_arrays("k", {"x": "<i8"}, make, tmp_path)
    assert [int(each["x"][0]) for each in (mine, *others)] == [2**56, 2**56]
    assert (old.exists(), new.exists()) == (False, True)


def test_text_is_packed_as_its_files_are(tmp_path):
    words = ["a", "bb" * 20, "", "c d e"]
    for number, word in enumerate(words):
        (tmp_path / f"{number}.txt").write_text(word)
    settings = {"documents": "mask", "packing": "best_fit", "validation_fraction": 0.0}
    rows = text.read(DataConfig(corpus=str(tmp_path), **settings), 8).train
    whole = b"".join(b"\0" + word.encode() for word in words)
    assert targets_of(rows) == Counter(pairwise(whole))


def test_packing_needs_masks():
    with pytest.raises(HolmesError, match=r"data.documents: must be mask"):
        DataConfig(corpus="x", packing="best_fit")
