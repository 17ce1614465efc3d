"""Runs side by side, and a run that goes on: numbers made by hand, and folders of real runs."""

import io
import json
import math
import os

import pytest
from rich.console import Console

from holmesjax import config as configs
from holmesjax.errors import DataError
from holmesjax.liveness import lease
from holmesjax.report import comparison, live, metrics
from holmesjax.report.figures import loss_curves
from holmesjax.units import show
from tests.clusters import golden_plan
from tests.jobs import run_launch_here, write_run

LINKS = {"stage 0 -> stage 1": 3 * 2**20, "stage 1 -> stage 0": 2**20}


def record(step, loss, **values):
    return {
        "step": step,
        "loss": loss,
        "tokens_per_s": 1000.0 * step,
        "step_time_s": 0.5,
        "bubble_share": 0.25,
        "busy_share": {"stage 0": 0.5, "stage 1": 0.9},
        "skipped": False,
        "link_bytes": LINKS,
    } | values


def write(folder, name, records, *overrides):
    """A run folder with these records."""
    run_file = write_run(folder, {"a": (1,), "b": (1,)}, name=name)
    config, run_dir = configs.load(run_file, overrides), folder / name
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(configs.to_yaml(config))
    (run_dir / metrics.FILE).write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(run_dir)


def test_losses_are_means_over_the_same_steps_and_settings_that_differ_are_named(tmp_path, capsys):
    long = [record(step, 10.0 - step) for step in range(1, 41)]
    short = [record(step, 5.0, mfu=0.4) for step in range(1, 21)]
    for row in short[1::2]:
        row["link_bytes"] = {}
    short[3] |= {"memory_bytes": {"device 0": 2**30, "device 1": 3 * 2**30}}
    short[5] |= {"memory_bytes": {"device 0": 2**31}}
    short[9] |= {"val_loss": 4.5}
    short[19] |= {"wall_s": {"step": 6.0, "lost": 90.0, "stopped": 4.0}}
    short[19] |= {"val_loss": 4.75, "skipped": True, "loss": math.nan}
    folders = [
        write(tmp_path, "long", long),
        write(tmp_path, "short", short, "optimizer.beta2=0.99", "optimizer.clip_norm=null"),
    ]
    table = dict(comparison.numbers(comparison.load(folders)))
    assert table["loss, steps 19 to 20"] == ["-9.5000", "5.0000"]  # (10 - 19 + 10 - 20) / 2
    assert table["best validation loss"] == ["-", "4.5000 at 10"]
    assert table["steps skipped"] == ["0", "1"]
    assert table["tokens/s"] == ["20,500", "10,500"]
    assert table["time of all steps"] == ["20.0 s", "10.0 s"]
    assert table["MFU"] == ["-", "40.0%"]
    assert table["bytes between stages, a step"] == ["4 MiB", "2 MiB"]
    assert table["lost time"] == ["-", "1 min 30 s"]
    assert table["goodput"] == ["-", "6.0%"]
    assert table["memory of the fullest device"] == ["-", "3 GiB"]
    picture = tmp_path / "losses.png"
    told = run_launch_here(capsys, "compare", *folders, "--out", picture)
    lines = [line.split() for line in told.stdout.splitlines()]
    assert ["optimizer.beta2", "0.95", "0.99"] in lines
    assert ["optimizer.clip_norm", "1.0", "null"] in lines
    assert not any("run.dir" in line for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_settings_that_name_files_differ_where_their_contents_do(tmp_path):
    """A run that goes on names its own copies, and a file may have changed under its name."""
    folders = [
        write(tmp_path, name, [record(1, 5.0)], f"topology={name}.yaml", f"data.tokenizer={name}")
        for name in ("run0", "run1")
    ]
    for folder in folders:
        (tmp_path / folder / "topology.yaml").write_text("clusters: one")
        (tmp_path / folder / "tokenizer").mkdir()
        (tmp_path / folder / "tokenizer/tokenizer.json").write_text("{}")
    assert not comparison.settings(comparison.load(folders))
    (tmp_path / "run1/topology.yaml").write_text("clusters: two")
    (tmp_path / "run1/tokenizer/chat_template.jinja").write_text("{{ messages }}")
    rows = dict(comparison.settings(comparison.load(folders)))
    assert [*rows] == ["topology", "data.tokenizer"]
    assert rows["topology"][0].startswith('"run0.yaml" (')


def test_curves_are_those_of_the_records():
    runs = {name: [record(step, loss) for step in (1, 2, 4)] for name, loss in (("a", 2), ("b", 3))}
    runs["b"][1] |= {"val_loss": 2.5}
    [axes] = loss_curves(runs).axes
    drawn = [
        (line.get_xdata().tolist(), line.get_ydata().tolist())
        for line in axes.lines
        if len(line.get_xdata())
    ]
    assert drawn == [([1, 2, 4], [2, 2, 2]), ([1, 2, 4], [3, 3, 3]), ([2], [2.5])]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    empty = write(tmp_path, "empty", [])
    with pytest.raises(DataError, match="no finished step"):
        comparison.load([empty])
    for arguments, says in (
        ((str(tmp_path),), "is no run folder"),
        ((empty, "--out", "losses.txt"), "must be a picture"),
        ((empty, "--out", "/nowhere/losses.png"), "no folder /nowhere"),
    ):
        told = run_launch_here(capsys, "compare", *arguments)
        assert told.returncode == 2
        assert says in told.stderr


# ---- a run that goes on --------------------------------------------------------------------------


def shown(*parts):
    console = Console(width=200, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def test_a_run_that_goes_on_is_shown_with_its_busiest_stage(tmp_path):
    config = configs.load(write_run(tmp_path, {"a": (1,), "b": (1,)}), ["train.steps=100"])
    records = [record(step, 8.0 - step, time_left_s=90.0) for step in range(1, 5)]
    records[1] |= {"link_bytes": {}}
    records[-1] |= {"link_bytes": {}}
    plan = golden_plan("two_clusters")
    text = shown(*live.describe(tmp_path, config, plan, records, "process 7 on a-0"))
    assert "trained by process 7 on a-0" in text
    assert "step 4 of 100, left 1 min 30 s" in text
    assert "2,500 tokens/s  500 ms a step" in text
    assert "loss 4.0000" in text
    assert "█▆▃▁" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[-2:] for row in rows if row and row[-1] == "slowest"] == [["90%", "slowest"]]
    assert "embed + 7 layers" in text
    assert "stage 0 -> stage 1  1.5 MiB" in text  # the mean: islands send in few steps
    assert "25.2 Mb/s" in text  # 8 * 1.5 * 2**20 / 0.5
    assert "ALARM" not in text
    records[-1] |= {"steps_without_checkpoint": 1200}
    text = shown(*live.describe(tmp_path, config, plan, records, "process 7 on a-0"))
    assert "ALARM: no checkpoint since 1,200 steps" in text
    assert "memory" not in text
    records[0] |= {"memory_bytes": {"device 0": 2**30, "device 1": 3 * 2**30}}
    records[1] |= {"memory_bytes": {"device 1": 2**32}}
    records[3] |= {"wall_s": {"step": 60.0, "start": 10.0, "lost": 30.0, "stopped": 0.0}}
    text = shown(*live.describe(tmp_path, config, plan, records, None))
    assert "goodput 60.0%  lost 30.0 s  start 10.0 s\n" in text
    first, second = (show(sum(stage.memory_bytes.values()), "B") for stage in plan.stages)
    rows = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows if row[0] in ("0", "1")]
    assert [row[4:6] for row in cells] == [["4 GiB", first], ["-", second]]
    text = shown(*live.describe(tmp_path, config, None, [], None))
    assert "nobody trains it\nno step is finished yet" in text


def test_a_look_reads_the_end_of_a_long_record_and_the_owner(tmp_path):
    run_dir = write(tmp_path, "run", [record(step, 1.0) for step in range(1, 3000)])
    with open(f"{run_dir}/{metrics.FILE}", "a") as file:
        file.write('{"step": 3000, "lo')  # is being written
    tail = metrics.read_tail(run_dir, 10_000)
    assert tail == metrics.read(run_dir)[-len(tail) :]
    assert 20 < len(tail) < 100
    with lease.Lease(run_dir):
        assert f"trained by process {os.getpid()} on " in shown(live.View(run_dir).look())
    assert "nobody trains it" in shown(live.View(run_dir).look())
