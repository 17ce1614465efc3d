"""Rows of tables: those that each version of JAX is tested with, and those that one is enough for.

The first rows show that a feature works with a version; the rows after them show that the feature
holds on further plans. `.ci/run` leaves tests marked `one_version` out of its second run.
"""

from collections.abc import Mapping
from typing import Any

import pytest


def rows(table: Mapping[str, Any], of_each: int = 1) -> list[Any]:
    """The parameters of a test, whose first `of_each` rows are tested with each version."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[] if number < of_each else [pytest.mark.one_version],
        )
        for number, (name, case) in enumerate(table.items())
    ]
