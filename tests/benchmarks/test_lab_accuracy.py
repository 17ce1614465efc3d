"""Predictions of `benchmarks.lab_accuracy` for a row, and its words about errors."""

import dataclasses
import json
import sys

import pytest

from benchmarks import lab_accuracy
from benchmarks.lab_rows import ROWS, load_topology, network_text
from holmesjax.topology import saving
from holmesjax.topology.calibration import Calibration, ProductSpeed
from holmesjax.topology.machines import Link, Measured


def network(tmp_path, name="plan", point=8, *, share=0.5, pairs=None):
    """The network of a row, as if it had been profiled and probed."""
    found = load_topology(network_text(ROWS[name], point), tmp_path / "network.yaml")
    calibration = Calibration(products=ProductSpeed(share=share))
    devices = {n.name: dataclasses.replace(n.device, calibration=calibration) for n in found.nodes}
    found = lab_accuracy.with_devices(found, devices)
    return dataclasses.replace(found, measured=Measured(date="2026-11-22", pairs=pairs or {}))


def plan(topology, name="plan", point=8, layers=(4, 4)):
    return lab_accuracy.plan_of(ROWS[name], point, layers, topology)


def test_profile_and_probe_decide_what_is_predicted(tmp_path):
    usual = plan(network(tmp_path))
    assert [stage.num_blocks for stage in usual.stages] == [4, 4]
    fast = plan(network(tmp_path, share=1.0))
    slow = Link(fabric="infiniband", bandwidth_bytes_per_s=2e6, latency_s=1e-4)
    far = plan(network(tmp_path, pairs={("ib-0", "ib-1"): slow, ("ib-1", "ib-0"): slow}))
    compute = [forecast.stages[0].seconds["compute"] for forecast in (usual, fast, far)]
    assert 0.4 * compute[0] < compute[1] < 0.7 * compute[0]
    assert compute[2] == compute[0]
    data = [forecast.stages[0].seconds["data"] for forecast in (usual, far)]
    assert data[1] > 20 * data[0]


def test_a_row_of_pairs_has_the_ways_between_its_own_nodes(tmp_path):
    """(b): replicas are in different clusters, so their sums go over Ethernet."""
    found = plan(network(tmp_path), "data-across")
    assert [stage.nodes for stage in found.stages] == [("ib-0", "roce-0"), ("ib-1", "roce-1")]
    assert found.stages[0].seconds["data"] > 5 * plan(network(tmp_path)).stages[0].seconds["data"]


def run(name, point, *steps_s):
    return {
        "row": name,
        "point": point,
        "step_s": list(steps_s),
        "compute_s": 2.0,
        "disturbed_share": 0.03,
        "layers": [4, 4],
    }


def test_errors_are_shares_of_the_measured_step(tmp_path):
    predicted = dataclasses.replace(plan(network(tmp_path)), step_time_s=4.3)
    line = lab_accuracy.line_of(run("plan", 8, 3.0, 4.0, 5.0), predicted)
    assert line["step_s"] == pytest.approx(4.0)
    assert line["spread"] == pytest.approx(0.5)
    assert line["error"] == pytest.approx(0.075)
    assert line["predicted_compute_s"] == pytest.approx(
        sum(stage.seconds["compute"] for stage in predicted.stages) / 2
    )
    worse = {**line, "error": -0.11}
    text = lab_accuracy.table([line, worse])
    assert "| +7.5% |" in text
    assert "| -11.0% MISSED |" in text
    assert "| 3% |" in text
    assert "1 of 2 within 10%; mean error 9.2%, worst 11.0%" in text


def test_rows_that_have_the_same_network_share_its_probe():
    cells = [("plan", 8), ("no-overlap", 8), ("plan", 32), ("data-across", 8), ("plan-unequal", 8)]
    found = lab_accuracy.networks_of(cells)
    assert list(found.values()) == [cells[:2], [cells[2]], [cells[3]], [cells[4]]]


HOW = {"command": "x", "commit": "abc", "date": "2026-11-22", "device": {"cpu": "c", "cores": 2}}


def start(monkeypatch, tmp_path, *words):
    monkeypatch.setattr(sys, "argv", ["lab_accuracy", *map(str, words), "--out", str(tmp_path)])
    return lab_accuracy.main()


def test_what_was_measured_before_is_predicted_again(tmp_path, monkeypatch, capsys):
    measured = {
        "topology": saving.to_yaml(network(tmp_path)),
        "runs": [run("no-overlap", 8, 3.0), run("plan", 8, 2.0)],
    }
    (tmp_path / "before.json").write_text(
        json.dumps({"networks": {"hybrid, 1/8": measured}, "measured": HOW})
    )
    assert start(monkeypatch, tmp_path, "--measured", tmp_path / "before.json") == 0
    [written] = tmp_path.glob("lab_accuracy_*.json")
    result = json.loads(written.read_text())
    assert [line["row"] for line in result["lines"]] == ["plan", "no-overlap"]
    assert [line["step_s"] for line in result["lines"]] == [2.0, 3.0]
    assert result["lines"][0]["predicted_s"] == plan(network(tmp_path)).step_time_s
    assert result["measured"] == HOW
    out = capsys.readouterr().out
    assert "hybrid, 1/8" in out
    assert "measured: commit abc, 2026-11-22, 2 cores of c: `x`" in out
    # And so may the new result be.
    assert start(monkeypatch, tmp_path, "--measured", written) == 0
    assert json.loads(written.read_text())["measured"] == HOW


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"networks": {"x": {"runs": []}}}', '{"networks": {}}']
)
def test_a_file_that_is_no_such_result_is_refused(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "before.json"
    if text is not None:
        path.write_text(text)
    assert start(monkeypatch, tmp_path, "--measured", path) == 2
    assert "is no such result" in capsys.readouterr().err
