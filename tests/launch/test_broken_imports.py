"""A package that cannot be imported is named: a file hides it, it is broken, or it is missing."""

import errno
import os
import sys

import pytest

from launch.broken_imports import explain
from tests.jobs import run_launch, write_run

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


def raised_by(text: str, module: str = "launch.attempt") -> BaseException:
    """The exception of a module while it is imported."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(text, {"__name__": module})
    return caught.value


def test_what_is_missing_is_no_traceback_and_a_bug_is_one():
    said = explain(raised_by("import absent_package.part"))
    assert said
    assert said.startswith("the package absent_package: is not installed\n")
    assert explain(raised_by("import launch.absent")) is None
    assert explain(raised_by("import launch; launch.absent")) is None
    assert explain(raised_by("{}['key']")) is None


STALE = f"OSError({errno.ESTALE}, 'x')"
OTHERS = (
    STALE,
    *("SystemExit(75)", "KeyboardInterrupt", "MemoryError", "RuntimeError('CUDA device busy')"),
    *("ValueError('x')", "NameError('x')", "TypeError('x')"),
    f"ImportError('libcuda.so: cannot open: {os.strerror(errno.EIO)}')",
    f"ImportError('numpy is broken') from {STALE}",
)


@pytest.mark.parametrize("text", OTHERS)
def test_what_passes_through_an_import_says_itself_what_it_is(text):
    assert explain(raised_by(f"raise {text}", "some_package")) is None


def test_errors_of_an_import_are_of_its_package(tmp_path, monkeypatch):
    for text in ("import some_package.absent", "import sys; sys.absent", "raise ImportError('x')"):
        said = explain(raised_by(text, "some_package"))
        assert said
        assert said.startswith("the package some_package: ")
    assert explain(raised_by("raise TypeError('x')", "numpy")) is None
    (tmp_path / "numpy.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    said = explain(raised_by("raise TypeError('x')", "numpy"))
    assert said
    assert f"cannot be imported from {tmp_path / 'numpy.py'}, which hides " in said


STOPPED = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhile True: pass"


@pytest.mark.parametrize(
    "text, status, words",
    [(STOPPED, 75, ""), ("raise RuntimeError('CUDA device busy')", 1, "\nRuntimeError: CUDA dev")],
)
def test_a_model_of_the_user_ends_a_start_as_it_says(tmp_path, text, status, words):
    (tmp_path / "some_model.py").write_text(text)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    run_file = write_run(tmp_path, {"a": (1,)})
    env = {**os.environ, "PYTHONPATH": paths}
    ended = run_launch("train", run_file, "model.module=some_model:make", env=env)
    assert ended.returncode == status, ended
    assert words in ended.stderr
    assert "cannot be imported" not in ended.stderr
