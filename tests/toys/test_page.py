"""The rows of the pages "Add ..." are added as they stand there, in the files that a page names."""

import math
import re
import shutil
import subprocess
import sys

import pytest

from holmesjax.config import CHECKOUT
from holmesjax.report import metrics
from tests.jobs import run_launch, write_run

PAGES = ("docs/extending.md", "docs/extending_training.md")
# Each section of the pages, the file that gets what it shows, and the line that this comes behind.
ROWS = {
    "Add a launcher": ("launch/launchers/table.py", r"^LAUNCHERS.*\{\n"),
    "Add a fabric": ("holmesjax/topology/fabrics.py", r"^FABRICS.*\{\n"),
    "Add a NIC": ("holmesjax/topology/catalogue.py", r"^NICS.*\{\n"),
    "Add a GPU": ("holmesjax/topology/catalogue.py", r"^DATA_SHEETS.*\{\n"),
    "Add a verb": ("launch/arguments.py", r"^VERBS.*\{\n"),
    "Add a learning-rate schedule": ("holmesjax/config/update_rules.py", r"^RATE_SCHEDULES.*\{\n"),
    "Add a metric": ("holmesjax/report/recorder.py", r"^        record = \{\n"),
    "Add a setting": ("holmesjax/config/sections.py", r"^class LogConfig:\n.*\n\n"),
}
TOPOLOGY = """
name: toys
clusters:
  - name: a
    fabric: slingshot
    nodes: 2
    devices: {kind: b300, count: 2}
    nics: [{kind: roce_800, fabric: slingshot}, {kind: ethernet_25}]
"""
RUN = """
topology: topology.yaml
run: {dir: run}
model: {num_layers: 2, width: 256, num_heads: 4, context_length: 128}
data: {corpus: python-stdlib}
train: {steps: 1, global_batch: 16, compute_dtype: bfloat16}
optimizer: {learning_rate: 1.0e-3}
parallel: {data: 4, fsdp: 1, tensor: 1}
log: {flush_every_s: 5}
"""
COMMANDS = """
from holmesjax import config
from holmesjax.optimizers.learning_rates import learning_rate
from launch.__main__ import main

assert main(["nodes", "run.yaml"]) == 0
assert main(["plan", "run.yaml", "--explain"]) == 0
assert main(["plan", "run.yaml", "log.flush_every_s=0"]) == 2
print(config.to_yaml(config.load("run.yaml")).partition("log:")[2])
own = ["train.steps=6", "optimizer.schedule=sqrt", "optimizer.decay_steps=4"]
settings = config.load("run.yaml", own)
print("rates", *(float(learning_rate(settings.optimizer, 6, n)) for n in range(6)))
"""


# The module that the page adds to the packages, besides the row.
MODULES = {"Add a launcher": "launch/launchers/script.py", "Add a verb": "launch/verbs/nodes.py"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages, with what the page adds."""
    tmp_path = tmp_path_factory.mktemp("copy")
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("holmesjax", "launch", "kernels", "configs"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=skipped)
    page = "\n".join((CHECKOUT / name).read_text() for name in PAGES)
    for title, (name, anchor) in ROWS.items():
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        assert f"`{name}`" in section
        [added] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        if title in MODULES:
            blocks = dict(re.findall(r"# (launch/\S+)\n(.*?)(?=\n# launch/|\Z)", added, re.DOTALL))
            added = blocks.pop(name) + "\n"
            [(module, text)] = blocks.items()
            assert module == MODULES[title]
            (tmp_path / module).write_text(text)
        added = added.split("class LogConfig:\n")[-1]
        path = tmp_path / name
        behind = lambda found, own=added: found[0] + own
        text, count = re.subn(anchor, behind, path.read_text(), flags=re.MULTILINE)
        assert count == 1
        path.write_text(text)
    (tmp_path / "topology.yaml").write_text(TOPOLOGY)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def test_the_pages_add_a_row_of_each_kind(copy):
    """Nothing else of the packages is changed, and commands know them all."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=copy, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a-0 a-1\n")
    assert "2 nodes x 2 b300 (2.5 PFLOP/s bfloat16, 270 GiB), slingshot: roce_800" in done.stdout
    assert "data 4 (slingshot)" in done.stdout
    assert "flush_every_s: 5" in done.stdout
    assert "log.flush_every_s=0: must be more than 0" in done.stderr
    rates = [float(word) for word in done.stdout.partition("\nrates ")[2].split()]
    left = [1 - 0.9 * math.sqrt(share) for share in (0, 0, 0.25, 0.5, 0.75, 1)]
    assert rates == pytest.approx([1e-3 * part for part in left])


@pytest.mark.one_version
def test_the_page_adds_a_launcher(copy):
    """Its job of two processes is resumed by one, and its row says which options it reads.

    The job follows the learning rate, and records the metric, that the other page adds.
    """
    run_file = write_run(copy, {"a": (1,), "b": (1,)}, "job")
    words = ["train", run_file, "--launcher", "script"]
    short = ["model.num_layers=2", "log.report=true"]
    rate = {"learning_rate": 1e-2, "schedule": "sqrt", "decay_steps": 1, "warmup_steps": 0}
    short += [f"optimizer.{name}={value}" for name, value in rate.items()]
    for changes in (["train.steps=1"], ["train.steps=2", "parallel.clusters=[b]"]):
        done = run_launch(*words, "--max-restarts", "0", *short, *changes, cwd=copy)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 1" in done.stdout
    records = metrics.read(copy / "job")
    assert [record["step"] for record in records] == [1, 2]
    assert records[1]["tokens"] == 2 * records[0]["tokens"] > 0
    assert records[1]["learning_rate"] == pytest.approx(1e-3)
    assert (copy / "job/report.html").exists()
    assert sorted(path.name for path in copy.glob("start-*.sh")) == ["start-0.sh", "start-1.sh"]
    done = run_launch(*words, "--listen", "10.0.0.1", cwd=copy)
    assert done.returncode == 2
    assert "--listen: is only for --launcher external or ssh or slurm" in done.stderr
