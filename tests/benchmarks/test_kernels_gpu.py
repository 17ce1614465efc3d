"""The benchmark of GPU kernels, as far as it runs without one."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels_gpu
from benchmarks.kernels_gpu import ATTENTION, PARTS, Attention
from kernels.attention.tiles import Rule
from tests.kernels.attention.oracle import seen


@pytest.mark.parametrize("part", PARTS)
def test_every_line_can_be_measured(part, monkeypatch):
    """The format of moments with scales stands for all: the others take the same calls."""
    monkeypatch.setattr(kernels_gpu, "KEPT_BYTES", {"int8": kernels_gpu.KEPT_BYTES["int8"]})
    most = {"flop_per_s": 1e12, "bytes_per_s": 1e9}
    lines = list(PARTS[part](True, most))
    assert {line["by"] for line in lines} & {"ours", "plain JAX", "XLA"}
    for line in lines:
        assert all(math.isfinite(line[name]) for name in ("ms", "spread", "limit"))
    rows = kernels_gpu.table(lines).splitlines()
    assert len(rows) == 2 + len(lines)


@pytest.mark.parametrize("rule", [Rule(), Rule(window=5), Rule(causal=False)], ids=str)
@pytest.mark.parametrize("documents", [1, 3])
def test_only_scores_that_count_are_counted(rule, documents):
    case = Attention(12, 4, 2, 64, rule, documents)
    ids = [[i // (12 // documents) for i in range(12)]]
    segments = (np.array(ids), np.array(ids))
    assert case.pairs == seen(12, 12, rule, segments).sum()


def test_the_goals_are_among_the_lines():
    """Those of the published cuDNN rates: 64 query and 8 key-value heads 128 wide, causal."""
    assert {Attention(length, 64, 8, 128) for length in (4096, 8192)} <= set(ATTENTION)


def test_the_rate_of_memory_counts_what_the_compiled_program_moves(monkeypatch):
    """Two arrays in bfloat16 are read, and one is written."""
    x = jnp.ones(4096, "bfloat16")
    moved = kernels_gpu.added.lower(x, x).compile().cost_analysis()["bytes accessed"]
    seconds = {"product": {"s": 1.0}, "sum": {"s": 1.0}}
    monkeypatch.setattr(kernels_gpu, "measure", lambda calls, rehearse: seconds)
    rate = kernels_gpu.limits(rehearse=True)["bytes_per_s"]
    assert rate == moved / 2  # it adds half as many numbers
    monkeypatch.undo()
    assert kernels_gpu.limits(rehearse=True).keys() == {"flop_per_s", "bytes_per_s"}


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["kernels_gpu", "--no-tests", "--out", str(tmp_path)])
    assert kernels_gpu.main() == 2
    assert "no GPU here (cpu); not measured" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
