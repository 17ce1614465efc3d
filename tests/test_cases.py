"""A table of cases fails where any case does, names it, and lets none touch the next."""

import os

import pytest

from tests.cases import cases


def test_a_case_that_fails_is_named_and_none_is_left_out():
    seen = []

    @cases("a, b", [(1, 2), (3, 4), (5, 6)])
    @cases("c", "xy")
    def check(a, b, c):
        seen.append((a, b, c))
        assert (a, c) != (3, "y")

    with pytest.raises(AssertionError) as failure:
        check()
    assert failure.value.__notes__ == ["case: {'c': 'y'}", "case: {'a': 3, 'b': 4}"]
    assert seen == [(1, 2, "x"), (1, 2, "y"), (3, 4, "x"), (3, 4, "y")]


@cases("number", range(3))
def test_each_case_has_its_folder_and_its_patches(number, tmp_path, monkeypatch):
    assert not list(tmp_path.iterdir())
    assert "HOLMESJAX_CASE" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLMESJAX_CASE", str(number))
