"""Tests of the line of loss against parameters."""

import json
import math

import pytest

from benchmarks import scaling_line
from benchmarks.scaling_line import SIZES
from holmesjax import config


def by_hand(size):
    """Parameters of a Llama's blocks and last norm: no biases, as many key heads as query heads."""
    attention, mlp = 4 * size.width**2, 3 * size.width * size.mlp_width
    return size.num_layers * (attention + mlp + 2 * size.width) + size.width


def test_a_power_law_is_found_and_written_after_each_size(tmp_path, monkeypatch, capsys):
    (tmp_path / "tokens").mkdir()
    pages = []

    def measured(size, settings):
        assert f"data.corpus={tmp_path / 'tokens'}" in settings
        assert settings[-1] == "train.seed=3"
        if (page := tmp_path / "out/scaling_line.md").exists():
            pages.append(page.read_text())
        number = by_hand(size)
        return {
            "layers": size.num_layers,
            "width": size.width,
            "parameters": number,
            "learning_rate": 0.01,
            "tokens": 1024,
            "validation": 2.5 * (number / 1e6) ** -0.125,
            "cpu_min": 1.0,
        }

    monkeypatch.setattr(scaling_line, "measure", measured)
    command = ["--text", str(tmp_path), "--out", str(tmp_path / "out"), "train.seed=3"]
    assert scaling_line.main(command) == 0
    written = json.loads((tmp_path / "out/scaling_line.json").read_text())
    slope, at_0 = scaling_line.slope(written["sizes"])
    assert slope == pytest.approx(-0.125)
    assert math.exp(at_0) == pytest.approx(2.5 * 1e6**0.125)
    assert "loss ~ N^-0.125 (-0.125 to -0.125 with one size left out)" in capsys.readouterr().out
    assert [page.count("Not measured") for page in pages] == [3, 2, 1]
    assert (tmp_path / "out/scaling_line.png").stat().st_size > 10_000


def test_parameters_are_those_without_the_embedding():
    for size in SIZES:
        settings = [*size.settings(), *scaling_line.SETTINGS, "data.corpus=python-stdlib"]
        model = config.load(scaling_line.RUN_FILE, settings).model
        assert scaling_line.without_embedding(model) == by_hand(size)


def test_text_that_is_not_there_is_named(tmp_path, capsys):
    assert scaling_line.main(["--text", str(tmp_path)]) != 0
    assert "run python -m benchmarks.technical_text" in capsys.readouterr().err
