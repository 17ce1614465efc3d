"""A mailbox may be a folder or an object store, and belongs to one run."""

import functools

import numpy as np
import pytest

from holmesjax.errors import HolmesError
from holmesjax.islands.mailbox_claim import claim
from holmesjax.islands.mailbox_places import Counted, Folder, open_place
from tests.data.object_store import object_store
from tests.islands.stepless_islands import SHAPES, Island, begun


def test_a_store_that_writes_over_what_is_there_is_refused(tmp_path):
    place = Folder(tmp_path / "box")
    real_put = place.put
    names = []

    def put(name, content, *, replaces=True):
        names.append(name)
        real_put(name, content)

    place.put = put
    with pytest.raises(HolmesError, match="without conditional writes"):
        claim(Counted(place), {"seed": 1}, "box")
    assert not (tmp_path / "box").exists()
    assert "run.json" not in names, "nobody may find a mailbox that is about to be refused"


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    place = Folder(tmp_path)
    assert place.listed("rounds") == {}
    (tmp_path / "rounds").write_text("no folder")
    with pytest.raises(NotADirectoryError):
        place.listed("rounds")


def test_a_mailbox_is_that_of_one_run(tmp_path):
    place = Counted(Folder(tmp_path))
    claim(place, {"model": "x", "seed": 1}, "box")
    claim(place, {"model": "x", "seed": 1}, "box")
    with pytest.raises(HolmesError, match="mailbox of another run\n  found: seed: 1, not 2"):
        claim(place, {"model": "x", "seed": 2}, "box")
    claim(place, {"model": "x", "seed": 1, "data.corpus": "unknown to an earlier version"}, "box")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(HolmesError, match="box: is no mailbox"):
        claim(place, {"model": "x", "seed": 1}, "box")


def test_an_object_store_is_a_mailbox(tmp_path):
    """Its records are written once, and its arrays are read in pieces."""
    with object_store("runs"):
        place = open_place("s3://runs/box")
        make_island = functools.partial(Island, place, scratch=tmp_path / "scratch")
        one, two = begun(make_island)
        for number in range(1, 3):
            for island in (two, one):
                island.send(number, seed=number)
                island.turn()
            two.turn()
            taken = [island.take(number) for island in (one, two)]
        for name in SHAPES:
            np.testing.assert_array_equal(taken[0].weights[name], taken[1].weights[name])
        place.put("once", b"x", replaces=False)
        place.put("once", b"x", replaces=False)  # an answer that was lost
        with pytest.raises(FileExistsError):
            place.put("once", b"y", replaces=False)
        claim(Counted(place), {"seed": 1}, "box")
        with pytest.raises(HolmesError, match="of another run"):
            claim(Counted(place), {"seed": 2}, "box")
        place.close()
