"""Records of a mailbox are whole, of their island, and read as they were written."""

import dataclasses
import itertools

import numpy as np
import pytest

from holmesjax.config import PlaceConfig
from holmesjax.islands import mailbox_records as records, rejoining
from holmesjax.islands.mailbox_places import Counted, Folder
from holmesjax.islands.mailbox_records import IslandProgress, Merged, Sent
from tests.islands.stepless_islands import SHAPES, arrays, begun


def test_parts_of_unlike_steps_are_no_letter():
    part = Sent(
        round=1,
        island="a",
        session="0" * 16,
        part=0,
        parts=2,
        progress=IslandProgress(1, 2, 3, 4),
        file="x",
        index={},
    )
    other = dataclasses.replace(part, part=1)
    assert records.are_whole([part, other])
    late = dataclasses.replace(other, progress=IslandProgress(1, 3, 3, 4))
    for parts in ([], [part], [part, part], [part, late]):
        assert not records.are_whole(parts)


def test_a_record_names_nothing_that_is_not_its_own(make_island, tmp_path):
    """Neither another object, nor bytes outside of it, nor more than memory has."""
    one, two = begun(make_island)
    two.send(1, seed=2)
    two.turn()
    [path] = (tmp_path / "box").glob("rounds/00000001/b.*.json")
    name = path.relative_to(tmp_path / "box").as_posix()
    sent = Sent.from_bytes(path.read_bytes(), name)
    first = sent.index["head.scale_D"]
    for other in (
        dataclasses.replace(sent, file="../ib/config.bin"),
        dataclasses.replace(sent, index={"x": first._replace(shape=(2**40, 2**40))}),
        dataclasses.replace(sent, index={"x": first._replace(first=-4)}),
    ):
        path.write_bytes(other.to_bytes())
        one.turn()
        assert path.exists()
        one.turn()
        assert one.box.sent.of_round(1) == {}
        assert not path.exists()
    merged = dataclasses.replace(one.box._newest, file="rounds/00000000/../../x")
    with pytest.raises(records.DamagedObjectError):
        Merged.from_bytes(merged.to_bytes(), "rounds/00000000/merged.json")


def test_what_an_island_has_sent_is_its_own_and_whole(make_island, tmp_path):
    one, two = begun(make_island)
    place = lambda name: PlaceConfig(names=(name, "b"), number=0, steps=9)
    two.send(1, seed=2, step=7)
    two.turn()
    box = one.box.place
    assert rejoining.own_sent(box, place("b"))[1].step == 7
    [path] = (tmp_path / "box").glob("rounds/00000001/b.*.json")
    path.rename(path.with_name(f"b.{path.name}"))  # of the island b.b
    assert rejoining.own_sent(box, place("b")) is None
    path.write_text("{")
    assert rejoining.own_sent(box, place("b")) is None


def test_a_record_that_was_changed_is_none():
    sent = Sent(
        round=1,
        island="a",
        session="0" * 16,
        part=0,
        parts=1,
        progress=IslandProgress(1, 2, 3, 4),
        file=f"rounds/00000001/a.{'0' * 16}.0.bin",
        index={},
    )
    content, x = sent.to_bytes(), sent.file.replace("bin", "json")
    assert Sent.from_bytes(content, x) == sent
    for other in (content.replace(b'"part": 0', b'"part": 1'), content[:-9], b"", b"[1]", b"{}"):
        with pytest.raises(records.DamagedObjectError, match=rf"^{x} "):
            Sent.from_bytes(other, x)
    with pytest.raises(records.DamagedObjectError, match="other fields"):
        Sent.from_bytes(records.sealed({"round": 1}), "x")


def test_a_record_that_is_read_badly_once_is_read_again(make_island, tmp_path):
    one, _ = begun(make_island)
    path = tmp_path / "box/rounds/00000000/merged.json"
    content = path.read_bytes()
    path.write_bytes(b"{")
    assert rejoining.newest(one.box.place, lambda s: path.write_bytes(content)).round == 0
    path.write_bytes(b"{")
    with pytest.raises(records.DamagedObjectError):
        rejoining.newest(one.box.place, lambda s: None)


def test_neighbours_are_read_at_once_and_the_rest_is_not(tmp_path):
    place = Counted(Folder(tmp_path))
    index = records.write_arrays(tmp_path / "x", arrays(0).items())
    names = list(SHAPES)
    for some in itertools.combinations(names, 2):
        place.requests = place.received = 0
        found = records.read_arrays(place, "x", index, some)
        for name in some:
            np.testing.assert_array_equal(found[name], arrays(0)[name])
        assert place.received == sum(found[name].nbytes for name in some)
        assert place.requests == (2 if some == (names[0], names[2]) else 1)
