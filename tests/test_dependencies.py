"""Every package that the code imports is declared in pyproject.toml, and the other way round."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs.package_graph import imports_of, parsed

ROOT = Path(__file__).parent.parent
OURS = {"holmesjax", "launch", "kernels", "tests", "benchmarks", "docs"}
# The name under which a package is imported, where that is not its own.
MODULE = {
    "array-record": "array_record",
    "huggingface-hub": "huggingface_hub",
    "ml-dtypes": "ml_dtypes",
    "nvidia-ml-py": "pynvml",
    "orbax-checkpoint": "orbax",
    "pydantic-core": "pydantic_core",
    "pyyaml": "yaml",
    "universal-pathlib": "upath",
}
# Packages that other tools run or read, and that nothing imports.
TOOLS = {
    "furo": "the looks of the documents' site",
    "holmesjax": "its own extras",
    "ipykernel": "the kernel of the notebooks",
    "jupyterlab": "shows the notebooks",
    "mypy": "make test",
    "myst-parser": "Markdown for sphinx",
    "protobuf": "sentencepiece reads the proto of its files with it",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "make test",
    "sphinx-copybutton": "a plugin of sphinx",
    "types-psutil": "types for mypy",
    "types-pyyaml": "types for mypy",
}


@pytest.mark.xdist_group("of one worker")
def test_tests_of_a_group_go_to_one_worker(request):
    """The scheduler of pytest-xdist reads the group at the end of a name."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests are not grouped here")
    assert request.node.nodeid.endswith("@of one worker")


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported(file: Path) -> set[str]:
    """The outermost modules that a file of Python imports, by name as well: `import_module`."""
    found = set(imports_of(parsed(file)))
    for node in ast.walk(parsed(file)) if "import_module" in file.read_text() else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name.split(".")[0] for name in found}


@pytest.fixture(scope="module")
def imports() -> dict[str, str]:
    """Every package that is imported, with a file that does it."""
    files = [file for place in OURS for file in sorted(ROOT.glob(f"{place}/**/*.py"))]
    found = {name: str(file) for file in files for name in imported(file)}
    return {k: v for k, v in found.items() if k not in OURS and k not in sys.stdlib_module_names}


@pytest.fixture(scope="module")
def project() -> dict[str, list[str]]:
    """The packages of pyproject.toml by extra; the base has the name ""."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": table["dependencies"], **table["optional-dependencies"]}
    return {extra: list(map(name_of, group)) for extra, group in groups.items()}


def test_every_import_is_declared(imports, project):
    declared = {MODULE.get(name, name).lower() for names in project.values() for name in names}
    missing = {name: file for name, file in imports.items() if name.lower() not in declared}
    assert not missing


def test_every_declared_package_is_imported(imports, project):
    known = {name.lower() for name in imports}
    unused = {
        name
        for names in project.values()
        for name in names
        if name not in TOOLS and MODULE.get(name, name).lower() not in known
    }
    assert not unused


def test_every_pinned_package_is_pinned_once_for_each_python_and_every_direct_one_is_pinned(
    project,
):
    pins = set(map(name_of, (ROOT / "constraints.txt").read_text().splitlines()))
    extras = ("", "tb", "zstd", "hf", "array_record", "s3", "docs", "dev")
    installed = {name for extra in extras for name in project[extra]}
    assert installed - {"holmesjax"} <= pins


def test_the_folder_of_a_checkout_does_not_shadow_the_package(tmp_path):
    """With `""` for its packages setuptools writes a line of sys.path, and no finder of modules.

    Finders are asked after sys.path, whose first entry has the folder `holmesjax` without code.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}
    (tmp_path / "holmesjax").symlink_to(ROOT)
    code = "import holmesjax, sys; sys.exit(holmesjax.__file__ is None)"
    for path, status in ((tmp_path / "holmesjax", 0), (tmp_path / "nothing", 1)):
        (tmp_path / "site.pth").write_text(f"{path}\n")
        load = f"import site; site.addsitedir({str(tmp_path)!r}); {code}"
        found = subprocess.run([sys.executable, "-S", "-c", load], cwd=tmp_path, timeout=240)
        assert found.returncode == status
