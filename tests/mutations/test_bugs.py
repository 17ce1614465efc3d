"""The list of planted bugs fits the code and the tests of today."""

import ast
import functools
from pathlib import Path

from docs.package_graph import parsed
from tests.mutations.bugs import BUGS

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def functions_of(path: Path) -> set[str]:
    """The names of the functions of a module that are not inside others."""
    return {node.name for node in parsed(path).body if isinstance(node, ast.FunctionDef)}


def test_every_bug_can_be_planted_and_names_tests_that_exist():
    wrong = []
    for bug in BUGS:
        path = bug.path(ROOT)
        if not path.is_file():
            wrong.append(f"{bug.name}: there is no module {bug.module}")
        elif (count := path.read_text().count(bug.old)) != 1:
            wrong.append(f"{bug.name}: {bug.old!r} occurs {count} times in {bug.module}")
        else:
            ast.parse(bug.planted(path.read_text()))  # or any test would fail
        for test in bug.tests:
            file, _, name = test.partition("::")
            if not (ROOT / file).is_file():
                wrong.append(f"{bug.name}: there is no {file}")
            elif name and name.partition("[")[0] not in functions_of(ROOT / file):
                wrong.append(f"{bug.name}: {file} has no {name}")
    assert not wrong, "the bugs of tests/mutations must follow the code:\n" + "\n".join(wrong)
    assert len({bug.name for bug in BUGS}) == len(BUGS)
