"""The notebook runs from top to bottom, as a user would run it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks/quickstart.ipynb"


def test_the_notebook_is_short_and_clean():
    cells = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    lines = [line for cell in cells for line in cell.source.splitlines() if line.strip()]
    assert len(lines) <= 25
    assert not any(cell.outputs for cell in cells), "clear the outputs before committing"


# ipykernel's sockets and event loop are closed by the kernel's own exit.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("../runs/notebook", str(tmp_path / "run"))
        cell.source = cell.source.replace("train.steps=16", "train.steps=4")
        cell.source = cell.source.replace("train.steps=24", "train.steps=6")
        cell.source = cell.source.replace("=8", "=4")
    NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": ROOT / "notebooks"}},
    ).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [any("image/png" in out.get("data", {}) for out in cell.outputs) for cell in code]
    assert pictures == [True, False, True, True, True, True]
    printed = "".join(out.get("text", "") for cell in code for out in cell.outputs)
    assert "resuming after step 4" in printed
    assert printed.count("val loss") == 2
