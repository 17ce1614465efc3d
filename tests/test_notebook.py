"""The notebooks run from top to bottom, as a user would run them."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from safetensors.numpy import load_file

from holmesjax.report import metrics
from tests.labs import needs_lab

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(name, replacements):
    """The code cells of a notebook after they have run."""
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    for cell in notebook.cells:
        for old, new in replacements.items():
            cell.source = cell.source.replace(old, new)
    NotebookClient(
        notebook,
        timeout=240,
        startup_timeout=240,  # of the kernel, on a busy machine
        kernel_name="python3",
        resources={"metadata": {"path": ROOT / "notebooks"}},
    ).execute()
    return code_cells(notebook)


def printed(cells):
    return "".join(out.get("text", "") for cell in cells for out in cell.outputs)


def have_pictures(cells):
    data = [[out.get("data", {}) for out in cell.outputs] for cell in cells]
    has_one = lambda own: "image/png" in own or "data:image/png" in own.get("text/html", "")
    return [any(map(has_one, outputs)) for outputs in data]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_short_and_clean(name):
    cells = code_cells(nbformat.read(NOTEBOOKS[name], as_version=4))
    lines = [line for cell in cells for line in cell.source.splitlines() if line.strip()]
    assert len(lines) < 25
    assert not any(cell.outputs for cell in cells), "clear the outputs before committing"


# ipykernel's sockets and event loop are closed by the kernel's own exit.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_quickstart_runs(tmp_path):
    small = '"train.steps=4", "model.num_layers=2", "model.width=32", "model.context_length=64"'
    shorter = {'"train.steps=16"': small, "train.steps=24": "train.steps=6", "=8": "=4"}
    cells = execute("quickstart", {"../runs/notebook": str(tmp_path / "run"), **shorter})
    assert have_pictures(cells) == [True, False, True, True, True, True, False]
    assert "resuming after step 4" in printed(cells)
    assert printed(cells).count("val loss") == 2
    assert "chosen      islands here | there, every " in printed(cells)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_planning_runs():
    """With less to choose from: the searches of the shipped runs have their own tests."""
    settings = [f"parallel.{given}=1" for given in ("fsdp", "tensor")]
    settings += ["parallel.stages=3", "parallel.microbatches=16", "parallel.schedule=1f1b"]
    settings += ["parallel.activation_checkpointing=full"]
    fewer = {'_{name}.yaml")': f'_{{name}}.yaml", {settings})'}
    cells = execute("plan_two_clusters", {'("3b6", "7b5", "39b1")': '("7b5",)', **fewer})
    assert have_pictures(cells) == [False, True, True, False, False]
    text = printed(cells)
    assert "of topology holmes" in text
    slower, faster, larger = re.findall(r": ([\d.]+) s, now ([\d.]+) s", text)
    assert float(slower[0]) > float(slower[1]) >= float(faster[0])
    assert float(larger[0]) < float(larger[1])
    assert "paper 1.14 1.39 1.66" in text


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_ones_own_trains(tmp_path):
    small = '"model.num_layers": 2, "model.width": 32, "model.context_length": 32'
    shorter = {'"train.steps": 16': f'"train.steps": 4, "train.eval_every": 0, {small}'}
    cells = execute("your_own_model", {"../runs/own_model": str(tmp_path / "run"), **shorter})
    assert have_pictures(cells) == [False, True, True]
    assert "1 layer + head" in printed(cells)
    assert "step 4/4" in printed(cells)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_is_imported_trains_adapters_and_leaves(tmp_path, monkeypatch):
    """Its commands are those of this Python. The folders of the notebook are in a folder apart."""
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    cells = execute("import_and_fine_tune", {"../runs": str(tmp_path)})
    assert have_pictures(cells) == [False, False, False, False, False, True, False]
    text = printed(cells)
    assert "imported    1,041,664 parameters" in text
    assert "Capital of Japan? Tokyo" in text
    losses = [record["loss"] for record in metrics.read(tmp_path / "tuned")]
    assert losses[0] > 5.5 > 0.5 > losses[-1]  # nats
    adapters = load_file(tmp_path / "adapters/adapter_model.safetensors")
    assert any("lora_A" in name for name in adapters)
    assert not any("embed" in name for name in adapters)


@needs_lab
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_lab_runs(tmp_path):
    shorter = {"train.steps=12": "train.steps=3", "step=6": "step=1"}
    shorter |= {"num_layers=3": "num_layers=2", "width=64": "width=32"}
    cells = execute("lab", {"../runs/lab": str(tmp_path / "run"), **shorter})
    assert have_pictures(cells) == [False, False, False, False, True, True, False]
    text = printed(cells)
    assert text.count("fast0 800 Mb/s") == 8  # of four nodes, twice
    assert "ip netns add" in text
    assert "after step 1" in text
    assert "over: cut ib<->roce 3s" in text
    assert "ib -> roce: " in text
