"""Islands of one mailbox."""

import functools

import pytest

from holmesjax.islands.mailbox_places import Folder
from tests.islands.stepless_islands import Island


@pytest.fixture
def make_island(tmp_path):
    place = Folder(tmp_path / "box")
    return functools.partial(Island, place, scratch=tmp_path / "scratch")
