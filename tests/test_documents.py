"""What the documents say is what the code does."""

import re
from pathlib import Path

import pytest

from holmesjax import job, topology
from holmesjax.config import CHECKOUT
from holmesjax.errors import HolmesError

RUN_FILES = sorted(CHECKOUT.glob("configs/runs/*.yaml"))
README = (CHECKOUT / "README.md").read_text()


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_run_file_can_be_planned_and_its_header_is_a_claim(path):
    loaded = job.load(path)
    assert len(loaded.describe()) <= 30
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line.removeprefix("#").strip() for line in header)
    name = path.relative_to(CHECKOUT).as_posix()
    assert re.search(f"python -m launch (train|plan) {re.escape(name)}", text)
    assert "Expected:" in text
    assert re.search(r"commit [0-9a-f]{7}", text), "say where the numbers come from"


@pytest.mark.parametrize(
    "path", sorted(CHECKOUT.glob("configs/topologies/*.yaml")), ids=lambda path: path.stem
)
def test_every_topology_loads(path):
    assert topology.load(path).name == path.stem


def test_the_plan_in_the_readme_is_the_plan():
    [shown] = re.findall(r"```text\n(topology .*?)```", README, re.DOTALL)
    printed = job.load("configs/runs/quickstart.yaml").describe()
    assert shown.splitlines() == printed


def test_the_files_that_the_readme_names_exist():
    folders = "holmesjax|configs|launch|docs|notebooks|benchmarks"
    named = re.findall(rf"`((?:{folders})/[\w./]*)`", README)
    named += re.findall(r"\]\(((?!http)[^)]+)\)", README)
    missing = [name for name in named if not Path(CHECKOUT, name).exists()]
    assert named
    assert not missing


def test_the_mistake_in_the_readme_is_what_is_printed():
    with pytest.raises(HolmesError) as error:
        job.load("configs/runs/quickstart.yaml", ["train.stepz=10"])
    assert f"error: {error.value}" in README
