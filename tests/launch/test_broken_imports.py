"""A package that cannot be imported is named: a file hides it, it is broken, or it is missing."""

import os

import pytest

from launch.broken_imports import explain
from tests.jobs import run_launch

HIDES = {
    "a file of a package's name": ("numpy.py", "", "module 'numpy' has no attribute "),
    "a folder that is broken": ("yaml/__init__.py", "import absent", "No module named 'absent'"),
    "one of Python's own": ("json.py", "x = 1 +", "invalid syntax"),
}


@pytest.mark.parametrize("file, content, found", HIDES.values(), ids=HIDES)
def test_what_hides_a_package_is_named(tmp_path, file, content, found):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths}
    ended = run_launch("plan", "configs/runs/quickstart.yaml", f"run.dir={tmp_path}/run", env=env)
    assert ended.returncode == 2, ended
    where, what, fix = ended.stderr.splitlines()
    name = file.partition("/")[0].removesuffix(".py")
    hides = f"error: the package {name}: cannot be imported from {tmp_path / file}, which hides "
    assert where.startswith(hides)
    assert found in what
    assert f"rename {tmp_path / file}" in fix


def raised_by(text: str, **names: object) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(text, {"__name__": "launch.attempt", **names})
    return caught.value


def test_what_is_missing_is_no_traceback_and_a_bug_is_one():
    said = explain(raised_by("import absent_package.part"))
    assert said
    assert said.startswith("the package absent_package: is not installed\n")
    assert explain(raised_by("import launch.absent")) is None
    assert explain(raised_by("import launch; launch.absent")) is None
    assert explain(raised_by("{}['key']")) is None
