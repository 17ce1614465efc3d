"""What `benchmarks.lab_accuracy` predicts of a row, and what it says of its errors."""

import dataclasses
import json
import sys

import pytest

from benchmarks import lab_accuracy
from benchmarks.lab_rows import ROWS, load_topology, network_text
from holmesjax import topology as topologies
from holmesjax.calibration import Calibration, ProductSpeed
from holmesjax.errors import ConfigError
from holmesjax.topology import Link, Measured


def network(tmp_path, name="plan", point=8, *, share=0.5, pairs=None):
    """The network of a row, as if it had been profiled and probed."""
    found = load_topology(network_text(ROWS[name], point), tmp_path / "network.yaml")
    calibration = Calibration(products=ProductSpeed(share=share))
    devices = {n.name: dataclasses.replace(n.device, calibration=calibration) for n in found.nodes}
    found = lab_accuracy.with_devices(found, devices)
    return dataclasses.replace(found, measured=Measured(date="2026-11-22", pairs=pairs or {}))


def plan(topology, name="plan", point=8, layers=(4, 4)):
    return lab_accuracy.plan_of(ROWS[name], point, layers, "eager_1f1b", topology)


def test_profile_and_probe_decide_what_is_predicted(tmp_path):
    usual = plan(network(tmp_path))
    assert [stage.num_blocks for stage in usual.stages] == [4, 4]
    fast = plan(network(tmp_path, share=1.0))
    slow = Link(fabric="infiniband", bandwidth_bytes_per_s=2e6, latency_s=1e-4)
    far = plan(network(tmp_path, pairs={("ib-0", "ib-1"): slow, ("ib-1", "ib-0"): slow}))
    compute = [found.stages[0].seconds["compute"] for found in (usual, fast, far)]
    assert 0.4 * compute[0] < compute[1] < 0.7 * compute[0]
    assert compute[2] == compute[0]
    data = [found.stages[0].seconds["data"] for found in (usual, far)]
    assert data[1] > 20 * data[0]


def test_a_row_of_pairs_has_the_ways_between_its_own_nodes(tmp_path):
    """(b): replicas are in different clusters, so their sums go over Ethernet."""
    found = plan(network(tmp_path), "data-across")
    assert [stage.nodes for stage in found.stages] == [("ib-0", "roce-0"), ("ib-1", "roce-1")]
    assert found.stages[0].seconds["data"] > 5 * plan(network(tmp_path)).stages[0].seconds["data"]


def run(name, point, rate, repeat, compute_s=2.0):
    return {
        "row": name,
        "point": point,
        "repeat": repeat,
        "tokens_per_s": rate,
        "compute_s": compute_s,
        "layers": [4, 4],
    }


def test_errors_are_shares_of_the_measured_step(tmp_path):
    predicted = dataclasses.replace(plan(network(tmp_path)), step_time_s=4.3)
    runs = [run("plan", 8, lab_accuracy.TOKENS / step_s, 0) for step_s in (3.0, 4.0, 5.0)]
    line = lab_accuracy.line_of(("plan", 8), runs, predicted)
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
    assert "1 of 2 within 10%; mean error 9.2%, worst 11.0%" in text


def test_what_was_measured_before_is_predicted_again(tmp_path, monkeypatch, capsys):
    comparison = {
        "settings": {"schedule": "eager_1f1b"},
        "commit": "abc",
        "date": "2026-11-22",
        "device": {},
        "runs": [
            run("plan", 8, 2000.0, 0),
            run("ddp", 8, 2000.0, 0),
            {"row": "plan", "point": 8, "repeat": 1, "failed": "no figure"},
        ],
    }
    (tmp_path / "compared.json").write_text(json.dumps(comparison))
    texts = {"hybrid, 1/8": topologies.to_yaml(network(tmp_path))}
    (tmp_path / "before.json").write_text(json.dumps({"networks": texts}))
    words = [str(tmp_path / "compared.json"), "--measured", str(tmp_path / "before.json")]
    monkeypatch.setattr(sys, "argv", ["lab_accuracy", *words, "--out", str(tmp_path)])
    assert lab_accuracy.main() == 0
    [written] = tmp_path.glob("lab_accuracy_*.json")
    [line] = json.loads(written.read_text())["lines"]
    assert line["predicted_s"] == plan(network(tmp_path)).step_time_s
    assert "hybrid, 1/8" in capsys.readouterr().out


def test_measurements_that_lack_a_network_are_refused(tmp_path, monkeypatch, capsys):
    comparison = {"settings": {"schedule": "1f1b"}, "runs": [run("plan", 8, 2000.0, 0)]}
    (tmp_path / "compared.json").write_text(json.dumps(comparison))
    (tmp_path / "before.json").write_text('{"networks": {}}')
    for name in ("before.json", "absent.json"):
        words = [str(tmp_path / "compared.json"), "--measured", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["lab_accuracy", *words, "--out", str(tmp_path)])
        assert lab_accuracy.main() == 2
        assert "is no such result" in capsys.readouterr().err


def test_a_file_that_is_no_comparison_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no result"):
            lab_accuracy.read_runs(path)
