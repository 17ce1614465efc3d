"""The pure parts of `benchmarks.local_updates`: what is compared, the table, the peak of bytes."""

import pytest

from benchmarks import local_updates, local_updates_lab
from benchmarks.lab_rows import load_topology
from benchmarks.local_updates import ROWS, SYNCHRONOUS, settings_of, table, topology_text
from benchmarks.local_updates_lab import Peak, config_of, islands
from holmesjax import config as configs
from holmesjax.plan.outer_rule import meeting_bytes, trained_sizes
from holmesjax.planner.planner import make_plan


def test_the_rows_differ_in_their_islands_alone(tmp_path):
    (tmp_path / "four.yaml").write_text(topology_text())
    load = lambda more: configs.load(
        "configs/runs/quickstart.yaml",
        [
            f"{k}={'null' if v is None else v}"
            for k, v in settings_of(tmp_path, "x", 0, more).items()
        ],
    )
    one = load(SYNCHRONOUS)
    for rows in ROWS.values():
        for more, _ in rows.values():
            own = load(more)
            assert (own.train, own.model, own.optimizer) == (one.train, one.model, one.optimizer)
            assert own.parallel.has_islands == (more is not SYNCHRONOUS)
            assert own.train.steps % own.parallel.meets_every == 0


def test_losses_are_compared_seed_by_seed():
    loss = {("synchronous", 0): 2.0, ("synchronous", 1): 4.0, ("H 20", 0): 2.2, ("H 20", 1): 4.0}
    runs = [{"group": "l1", "row": row, "seed": seed, "loss": x} for (row, seed), x in loss.items()]
    runs.append({"group": "l2", "row": "H 5", "seed": 1, "loss": 4.4})
    text = table({"runs": runs})
    assert text[2:] == [
        "| L1 | synchronous | 2 | 3.0000 | 2.0000 |  |  |",
        "| L1 | H 20 | 2 | 3.1000 | 1.8000 | +5.00% | 1.5% |",
        "| L2 | H 5 | 1 | 4.4000 | 0.0000 | +10.00% |  |",
    ]


def test_the_peak_is_of_the_node_that_sends_most_in_a_tenth_of_a_second():
    peak = Peak()
    sent = {0.0: (0, 0), 0.05: (10, 0), 0.11: (30, 5), 0.14: (40, 40), 0.3: (40, 60)}
    peak._samples = [(at_s, {"n0": a, "n1": b}) for at_s, (a, b) in sent.items()]
    assert peak.most_bytes(0.0, 1.0) == 40
    assert peak.most_bytes(0.2, 1.0) == 20  # of the gap before: they may have been sent since


def test_a_result_goes_on_with_the_text_that_it_has_read_alone():
    result = {"commit": "abc dirty", "text": "1"}
    local_updates.refuse_others(result, "abc", "1")
    for commit, text in (("abd", "1"), ("abc", "2")):
        with pytest.raises(SystemExit, match="--go-on"):
            local_updates.refuse_others(result, commit, text)


def test_a_link_of_the_lab_takes_a_meeting_as_long_as_it_says(tmp_path):
    topology = load_topology(local_updates_lab.topology_text(8e6), tmp_path / "network.yaml")
    plan = make_plan(config_of(tmp_path, 41, 4, islands(20)), topology)
    sizes = trained_sizes(local_updates_lab.MODEL)
    assert list(plan.meeting.bytes) == meeting_bytes(sizes, 2)
    assert plan.meeting.seconds == pytest.approx(meeting_bytes(sizes, 2)[0] / 1e6, rel=0.1)
    assert topology_text().count("- name: c") == local_updates.NUM_ISLANDS
