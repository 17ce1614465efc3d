"""A file is read whole once, whoever asks and however often, until it changes."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from holmesjax.data import corpus_progress, whole_digests as module
from holmesjax.data.number_files import NumberFile
from holmesjax.data.object_stores import RangeFile
from holmesjax.data.token_files import TokenFile
from holmesjax.data.whole_digests import whole_digests
from holmesjax.errors import DataError


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    generator = np.random.default_rng(7)
    paths = [tmp_path / f"part_{number}.bin" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_bytes(generator.bytes(5000 + number))
    return paths


def by_hand(paths):
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def num_read(act):
    before = corpus_progress.done.count
    act()
    return corpus_progress.done.count - before


def test_processes_that_share_a_folder_read_each_file_once(files):
    """Threads stand for processes: each opens the lock of a file by itself."""
    found = []
    with ThreadPoolExecutor(5) as pool:
        asked = [files, files[::-1], files[3:] + files[:3], files, [*files, files[0]]]
        count = num_read(lambda: found.extend(pool.map(whole_digests, asked)))
    assert found == [by_hand(paths) for paths in asked]
    assert count == sum(path.stat().st_size for path in files)
    assert num_read(lambda: whole_digests(files)) == 0


def test_a_file_that_changed_is_read_again_whatever_its_size_and_time_say(files):
    whole_digests(files)
    changed, before = files[2], files[2].stat()
    content = bytearray(changed.read_bytes())
    content[4321] ^= 1
    changed.write_bytes(content)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    assert num_read(lambda: whole_digests(files)) == before.st_size
    assert whole_digests(files) == by_hand(files)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"sha256": 1}', "\0\0"])
def test_a_kept_digest_that_is_damaged_is_made_again(files, damage):
    whole_digests(files[:1])
    place = files[0].parent / module.FOLDER / "part_0.bin.sha256"
    place.write_text(damage)
    assert whole_digests(files[:1]) == by_hand(files[:1])
    assert num_read(lambda: whole_digests(files[:1])) == 0


def test_a_folder_that_is_only_for_reading_keeps_nothing(files):
    (files[0].parent / module.FOLDER).write_text("no folder can be made here")
    for _ in range(2):
        assert num_read(lambda: whole_digests(files)) == sum(p.stat().st_size for p in files)
    assert whole_digests(files) == by_hand(files)


def test_the_digest_of_a_token_file_is_of_every_token(tmp_path):
    """The token that differs is in none of the blocks that are looked at when a file is opened."""
    path = tmp_path / "a.bin"
    tokens = np.arange(500_000, dtype="<u2")
    tokens.tofile(path)

    def opened(hashes=None):
        numbers = NumberFile(RangeFile(path), tokens.dtype, len(tokens))
        about = tmp_path / "a.json"
        about.write_text("{}")
        return TokenFile(path=path, about=about, token_T=numbers, documents=None,
                         tokenizer=None, limit=None, hashes=hashes or {})  # fmt: skip

    [written], first = by_hand([path]), opened().digest()
    is_seen = np.zeros(len(tokens), bool)
    for place, block in opened().blocks():
        is_seen[place : place + len(block)] = True
    [unseen, *_] = np.flatnonzero(~is_seen)
    tokens[unseen] += 1
    tokens.tofile(path)
    assert opened().digest() != first
    with pytest.raises(DataError, match=rf"a\.json says SHA-256 {written[:12]}"):
        opened({path: written}).digest()
