"""Measurements, their order and their results; in a lab, against rates that are known."""

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest

from holmesjax import job as jobs
from holmesjax.costs import collective_times
from holmesjax.errors import Mistakes
from holmesjax.files import yaml_files
from holmesjax.hosts import probe
from holmesjax.planner.mesh_order import Paths, place
from holmesjax.report import figures
from holmesjax.topology import description, loading, saving
from holmesjax.topology.probe_speed import ProbeSpeed
from launch.verbs import probe as probe_verb
from tests.jobs import HANG_S, ROOT, free_listen, run_launch, run_launch_here
from tests.labs import needs_lab

UNEQUAL = """\
name: unequal   # as the user wrote it
clusters:
  - {name: a, fabric: infiniband, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: infiniband_100}, {kind: ethernet_100}]}
  - {name: b, fabric: roce, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: roce_200}, {kind: ethernet_100}]}

links:          # unequal
  - {between: [a, b], fabric: ethernet, bandwidth: 30 Gb/s, latency: 10 us}
  - {between: [b, a], fabric: ethernet, bandwidth: 7.5 Gb/s, latency: 10 us}
"""
PAIR = "    - {between: [%s], fabric: %s, bandwidth: %s, latency: 1 ms}\n"
MEASURED = "measured:\n  date: '2026-11-21'\n  pairs:\n"
SLOW = MEASURED + PAIR % ("a-0, a-1", "infiniband", "1 Gb/s")


def load(folder, text):
    path = folder / "t.yaml"
    path.write_text(text)
    return loading.load(path)


def cluster_of(folder, count, device="cpu"):
    text = f"name: t\nclusters:\n  - {{name: c, fabric: roce, nodes: {count}, "
    text += f"devices: {{kind: {device}, count: 2}}, nics: [{{kind: roce_200}}]}}\n"
    return load(folder, text)


def speed_of(rate, fabric="roce"):
    return ProbeSpeed(fabric=fabric, latency_s=1e-4, bandwidth_bytes_per_s=rate, seconds={})


# ---- which ways, in which order -------------------------------------------------------------


@pytest.mark.parametrize("count", range(2, 17))
def test_inside_a_cluster_all_ways_are_measured_once_and_no_nic_twice_at_a_time(tmp_path, count):
    topology = cluster_of(tmp_path, count)
    names = [node.name for node in topology.nodes]
    [phase] = probe.schedule(topology, names)
    for step in phase.steps:
        ends = list(itertools.chain(*step))
        assert len(set(ends)) == len(ends)
    ways = list(itertools.chain(*phase.steps))
    assert sorted(ways) == sorted(itertools.permutations(names, 2))
    assert not phase.left_out


def test_what_is_left_out_of_a_large_cluster_is_said(tmp_path):
    topology = cluster_of(tmp_path, 32)
    [phase] = probe.schedule(topology, [node.name for node in topology.nodes])
    assert phase.left_out == "16 of 31 rounds of pairs"
    assert len(phase.steps) == 2 * probe.MAX_ROUNDS
    assert {len(step) for step in phase.steps} == {16}


def test_between_clusters_one_way_at_a_time_then_together(tmp_path):
    topology = loading.load(ROOT / "configs/topologies/ib_roce.yaml")
    *_, phase = probe.schedule(topology, [node.name for node in topology.nodes])
    assert (phase.title, phase.fabric) == ("ib <-> roce", "ethernet")
    assert [len(step) for step in phase.steps] == [1] * 4
    assert phase.together[0] == (("ib-0", "roce-0"), ("ib-1", "roce-1"))
    assert phase.left_out == "2 of 4 pairs"
    [only] = probe.schedule(topology, ["ib-1", "roce-0"])  # the others do not answer
    assert only.steps == ((("ib-1", "roce-0"),), (("roce-0", "ib-1"),))
    assert (only.together, only.left_out) == ((), "")


# ---- what the times say ---------------------------------------------------------------------


@pytest.mark.parametrize("latency_s, rate", [(1e-5, 1e10), (0.05, 1e6), (1e-3, 3e5)])
def test_a_line_of_known_speed_is_found_again(latency_s, rate):
    times = {n: [2 * latency_s + n / rate] * 3 for n in (0, 2**16, 2**20, 2**24)}
    half = {n: [2 * latency_s + 2 * n / rate] * 3 for n in times}
    found = probe.speed("roce", {1: half, 4: times})
    assert found.latency_s == pytest.approx(latency_s)
    assert found.bandwidth_bytes_per_s == pytest.approx(rate)


def test_a_disturbed_round_does_not_count():
    times = {0: [1e-4, 0.5, 1e-4], 1000: [1.0001, 9.0, 1.0001]}
    assert probe.speed("roce", {1: times}).bandwidth_bytes_per_s == pytest.approx(1000)


SLOW_WAYS = {
    "one way": ({("c-0", "c-1")}, "the way back is not slow"),
    "both ways": ({("c-0", "c-1"), ("c-1", "c-0")}, "both ways are slow"),
    "a node": ({w for w in itertools.permutations(["c-0", "c-1", "c-2"], 2) if "c-0" in w},
               "all ways of c-0 are slow"),
    "all": (set(itertools.permutations(["c-0", "c-1", "c-2"], 2)), "all ways are slow"),
}  # fmt: skip


@pytest.mark.parametrize("slow, reason", SLOW_WAYS.values(), ids=SLOW_WAYS)
def test_a_way_far_below_nominal_is_a_warning(tmp_path, slow, reason):
    topology = cluster_of(tmp_path, 3)
    ways = itertools.permutations(["c-0", "c-1", "c-2"], 2)
    speeds = {way: speed_of(12.4e9 if way in slow else 12.6e9) for way in ways}
    found = probe.slow_ways(topology, speeds)
    assert {finding.what for finding in found} == {f"{a} -> {b}" for a, b in slow}
    for finding in found:
        assert finding.text == "99.2 Gb/s over roce, nominal 200 Gb/s"
        assert reason in finding.fix
    assert probe.slow_ways(topology, speeds, scale=0.5) == []


def test_tcp_says_nothing_of_rdma_between_gpus(tmp_path):
    speeds = {("c-0", "c-1"): speed_of(1e6)}
    assert probe.slow_ways(cluster_of(tmp_path, 2, "h100"), speeds) == []
    assert len(probe.slow_ways(cluster_of(tmp_path, 2), speeds)) == 1


# ---- the section of the topology file -------------------------------------------------------


def test_a_link_that_pairs_share_has_a_capacity_and_one_that_they_do_not_has_none(tmp_path):
    topology = load(tmp_path, UNEQUAL.replace("roce, nodes: 1", "roce, nodes: 2"))
    ways = (("a-0", "b-0"), ("a-1", "b-1"))
    back = tuple(way[::-1] for way in ways)
    speeds = {way: speed_of(1e9) for way in (*ways, *back)}
    together = {ways: 1.2e9, back: 1.9e9}
    assert probe.capacities(topology, speeds, together) == {(("a", "b"),): 1.2e9}
    del speeds["a-0", "b-0"]  # one that was lost says nothing of the sum
    assert probe.capacities(topology, speeds, together) == {}


FOUR = """
name: four
clusters:
  - {name: a, fabric: local, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: ethernet_100}]}
  - {name: b, fabric: ethernet, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: ethernet_100}]}
  - {name: c, fabric: local, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: ethernet_10}]}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 10 Gb/s, latency: 1 ms}
  - {between: [a, c], fabric: ethernet, bandwidth: 10 Gb/s, latency: 1 ms}
  - {between: [b, c], fabric: ethernet, bandwidth: 10 Gb/s, latency: 1 ms}
"""


def test_pairs_of_clusters_share_an_uplink_if_they_are_slower_together(tmp_path):
    """But for what one node can take: `c` has a NIC that its ways fill without an uplink."""
    topology = load(tmp_path, FOUR)
    nodes = [node.name for node in topology.nodes]
    steps = [step for p in probe.schedule(topology, nodes) for step in p.together]
    into_a, out_of_b, into_b, into_c = (
        (("b-0", "a-0"), ("c-0", "a-0")),
        (("b-0", "a-0"), ("b-1", "c-0")),
        (("a-0", "b-0"), ("c-0", "b-1")),
        (("a-0", "c-0"), ("b-0", "c-0")),
    )
    assert steps[-4:] == [into_a, out_of_b, into_b, into_c]
    ways = {(a, b) for a in nodes for b in nodes if a[0] != b[0] and "b-1" not in (a, b)}
    speeds = {way: speed_of(1e9) for way in ways}
    together = {into_a: 1.7e9, out_of_b: 1.9e9, into_b: 1.2e9, into_c: 1.2e9}
    assert probe.capacities(topology, speeds, together) == {
        (("b", "a"), ("c", "a")): 1.7e9,
        (("a", "b"), ("c", "b")): 1.2e9,
    }
    # A link that its nodes share already explains what the two ways lack.
    one_link = (("b-0", "a-0"), ("b-1", "a-0"))
    speeds["b-1", "a-0"] = speed_of(1e9)
    found = probe.capacities(topology, speeds, {one_link: 0.7e9, into_a: 1.7e9})
    assert found == {(("b", "a"),): 0.7e9}


def test_boundaries_over_rdma_nics_are_measured_by_cluster(tmp_path):
    """The median of the ways inside a cluster of GPUs, which a file keeps; a plan reads it back."""
    text = UNEQUAL.replace("kind: cpu", "kind: h100")
    plain = load(tmp_path, text)
    speeds = {("a-0", "a-1"): speed_of(2e9), ("a-1", "a-0"): speed_of(4e9)}
    speeds |= {("a-0", "b-0"): speed_of(9e9)}  # the link between them, which is a pair of the file
    assert probe.transports(plain, speeds) == {"a": 3e9}
    assert probe.transports(load(tmp_path, UNEQUAL), speeds) == {}  # CPUs: all are pairs
    section = "measured:\n  date: '2026-11-21'\n  transports:\n"
    section += "    - {cluster: a, bandwidth: 24 Gb/s}\n"
    found = load(tmp_path, text + section)
    assert saving.measured_section(found.measured) == section
    assert found.link("a-0", "a-1") == plain.link("a-0", "a-1")  # of which NCCL has all
    assert found.boundary_link("a-0", "a-1").bandwidth_bytes_per_s == 3e9
    assert plain.boundary_link("a-0", "a-1").bandwidth_bytes_per_s == 3.3e9


def test_the_section_comes_and_goes_and_all_else_stays():
    tail = "\n# the end\n"
    once = yaml_files.with_section(UNEQUAL, "measured", SLOW)
    assert once == UNEQUAL + SLOW
    other = "measured:\n  date: later\n"
    assert yaml_files.with_section(once + tail, "measured", other) == UNEQUAL + other + tail
    windows = UNEQUAL.replace("\n", "\r\n")
    assert yaml_files.with_section(windows, "measured", other) == windows + other
    before = SLOW + "\n" + UNEQUAL
    assert yaml_files.with_section(before, "measured", other) == other + "\n" + UNEQUAL


def test_a_measured_pair_stands_for_its_link_and_nothing_else_changes(tmp_path):
    collective = (
        "  collectives:\n"
        "    - {cluster: a, nodes: 2, kind: all_gather, size: 1 MiB, bandwidth: 5 Gb/s}\n"
    )
    plain, slow = load(tmp_path, UNEQUAL), load(tmp_path, UNEQUAL + SLOW + collective)
    assert saving.measured_section(slow.measured) == SLOW + collective
    assert slow.link("a-0", "a-1").bandwidth_bytes_per_s == 125e6
    assert slow.link("a-0", "a-1").latency_s == 1e-3
    for way in (("a-1", "a-0"), ("a-0", "b-0"), ("a-0", "a-0")):
        assert slow.link(*way) == plain.link(*way)
    assert slow.nominal_link("a-0", "a-1") == plain.link("a-0", "a-1")
    assert saving.hash_of(slow) != saving.hash_of(plain)
    saving.save(slow, tmp_path / "saved.yaml")
    assert loading.load(tmp_path / "saved.yaml") == slow
    assert "a-0 -> a-1 infiniband, 1 ms, 1 Gb/s of 100 Gb/s" in description.describe(slow)[-1]


def test_the_mapper_goes_around_a_slow_pair(tmp_path):
    text = "name: t\nclusters:\n  - {name: c, fabric: roce, nodes: 4, "
    text += "devices: {kind: cpu, count: 1}, nics: [{kind: roce_200}]}\n" + MEASURED
    near = [("c-0", "c-2"), ("c-1", "c-3")]
    for pair in itertools.permutations([f"c-{i}" for i in range(4)], 2):
        rate = "20 Gb/s" if pair in near or pair[::-1] in near else "1 Gb/s"
        text += PAIR % (", ".join(pair), "roce", rate)
    topology = load(tmp_path, text)
    devices = {node.name: topology.devices((node.name,)) for node in topology.nodes}
    found = place(
        Paths.between(topology, list(devices)),
        devices,
        {"data": 2, "tensor": 2},
        {"data": 1.0, "tensor": 100.0},
    )
    assert found.devices == (0, 2, 1, 3)
    assert found.groups["tensor"].slowest.bandwidth_bytes_per_s == 20e9 / 8


def test_a_plan_reckons_with_a_slow_pair(tmp_path):
    text = (ROOT / "configs/topologies/ib_roce.yaml").read_text()
    (tmp_path / "t.yaml").write_text(
        text + MEASURED + PAIR % ("ib-0, roce-1", "ethernet", "1 Mb/s")
    )
    run_file = ROOT / "configs/runs/quickstart.yaml"
    plain = jobs.load(run_file).plan
    slow = jobs.load(run_file, [f"topology={tmp_path}/t.yaml"]).plan
    sent_s = 8 * plain.boundary_bytes / 1e6
    # Slower than without it, but the plan goes around the pair.
    assert plain.step_time_s < slow.step_time_s < plain.step_time_s + sent_s
    assert slow.topology_hash != plain.topology_hash


@pytest.mark.parametrize(
    "lines, told",
    [
        (PAIR % ("a-0, c-9", "infiniband", "1 Gb/s"), "between[1]: no such node"),
        (PAIR % ("a-0, a-0", "infiniband", "1 Gb/s"), "between: must be two nodes"),
        (PAIR % ("a-0", "infiniband", "1 Gb/s"), "between: must be two nodes"),
        (2 * PAIR % (("a-0, a-1", "infiniband", "1 Gb/s") * 2), "is given twice"),
        (PAIR % ("a-0, a-1", "roce", "1 Gb/s"), "reach each other over infiniband"),
        (PAIR % ("a-0, b-0", "roce", "1 Gb/s"), "reach each other over ethernet"),
        (PAIR % ("a-0, a-1", "infiniband", "0 Gb/s"), "bandwidth: must be more than 0"),
        (
            "    []\n  transports:\n    - {cluster: z, bandwidth: 1 Gb/s}\n",
            "cluster: no such cluster",
        ),
        (
            "    []\n  transports:\n" + 2 * "    - {cluster: a, bandwidth: 1 Gb/s}\n",
            "cluster: is given twice",
        ),
        (
            "    []\n  collectives:\n"
            "    - {cluster: z, nodes: 2, kind: all_gather, size: 1 MiB, bandwidth: 1 Gb/s}\n",
            "cluster: no such cluster",
        ),
        (
            "    []\n  collectives:\n"
            "    - {cluster: a, nodes: 3, kind: all_gather, size: 1 MiB, bandwidth: 1 Gb/s}\n",
            "nodes: must be 2 to 2, the nodes of a",
        ),
    ],
)
def test_a_wrong_section_is_refused(tmp_path, lines, told):
    with pytest.raises(Mistakes, match=re.escape(told)) as caught:
        load(tmp_path, UNEQUAL + MEASURED + lines)
    assert len(caught.value.mistakes) == 1


def test_the_picture_has_a_square_for_each_way(tmp_path):
    topology = load(tmp_path, UNEQUAL)
    speeds = {("a-0", "b-0"): speed_of(1e6), ("b-0", "a-0"): speed_of(5e6)}
    figure = figures.measured_ways(topology, speeds)
    figure.savefig(tmp_path / "x.svg")
    axes = figure.axes[0]
    assert len(axes.patches) == 9
    places = {
        text.get_text(): text.get_position() for text in axes.texts if "b/s" in text.get_text()
    }
    assert {name: (x, round(y)) for name, (x, y) in places.items()} == {
        "8 Mb/s": (2, 0),  # from row 0 to column 2
        "40 Mb/s": (0, 2),
    }


class Walked(list):
    """Nodes in which nobody looks for one after the other."""

    def index(self, *_):
        raise AssertionError("a walk over all nodes")


def test_only_rounds_that_are_measured_are_made(monkeypatch):
    made, tournament = [], probe.tournament

    def counted(nodes):
        for met in tournament(nodes):
            made.append(met)
            yield met

    monkeypatch.setattr(probe, "tournament", counted)
    phase = probe._inside("a", "ethernet", Walked(f"a-{i}" for i in range(65)))
    assert len(made) == probe.MAX_ROUNDS
    assert len(phase.steps) == 2 * probe.MAX_ROUNDS
    assert phase.left_out == f"{65 - probe.MAX_ROUNDS} of 65 rounds of pairs"


def test_all_times_are_written_before_the_picture(monkeypatch, tmp_path):
    topology = load(tmp_path, UNEQUAL + MEASURED + PAIR % ("a-0, a-1", "infiniband", "1 Gb/s"))
    session = SimpleNamespace(speeds={("a-0", "b-0"): speed_of(1e6)}, together={})

    def killed(*_):
        raise InterruptedError

    monkeypatch.setattr(figures, "measured_ways", killed)
    with pytest.raises(InterruptedError):
        probe_verb._write(tmp_path / "t.yaml", UNEQUAL, topology, session)
    [way] = json.loads((tmp_path / "t_probe.json").read_text())["pairs"]
    assert (way["from"], way["to"]) == ("a-0", "b-0")


# ---- the verb -------------------------------------------------------------------------------


@needs_lab
def test_the_rates_of_a_lab_are_found_again(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(UNEQUAL)
    done = run_launch("lab", path, "--scale", "0.001", "--", "probe")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert path.read_text() == UNEQUAL
    text = (tmp_path / "t_lab.yaml").read_text()
    assert text.startswith(UNEQUAL + "measured:\n")
    measured = loading.load(tmp_path / "t_lab.yaml").measured
    bit_per_s = {way: 8 * link.bandwidth_bytes_per_s for way, link in measured.pairs.items()}
    expected = {("a-0", "a-1"): 100e6, ("a-1", "a-0"): 100e6}
    expected |= {("a-0", "b-0"): 30e6, ("a-1", "b-0"): 30e6}
    expected |= {("b-0", "a-0"): 7.5e6, ("b-0", "a-1"): 7.5e6}
    assert bit_per_s.keys() == expected.keys()
    across = [link for (a, b), link in measured.pairs.items() if a[0] != b[0]]
    assert min(link.latency_s for link in across) > 0.0099  # 10 ms in the lab's time
    times = json.loads((tmp_path / "t_lab_probe.json").read_text())["pairs"]
    for timing in times:
        way = timing["from"], timing["to"]
        # If this machine is busy, times grow and never shrink: no way is faster than shaped. The
        # rate of a way leaves out the time of an empty message, which grows, too.
        of_largest = {
            x["streams"]: 8 * x["bytes"] / statistics.median(x["seconds"])
            for x in timing["seconds"]
        }
        whole = max(of_largest.values())
        assert whole < 1.1 * expected[way], way
        assert whole <= bit_per_s[way] * 1.01, way
    slow = [way for way in expected if bit_per_s[way] < probe.FAR_BELOW * expected[way]]
    assert f"no problems, {len(slow) or 'no'} slow way" in done.stdout
    largest = measured.collectives[-1]
    assert largest.cluster == "a"
    assert 8 * largest.bandwidth_bytes_per_s < 1.1 * 100e6  # inside the cluster
    assert {collective.kind for collective in measured.collectives} == set(collective_times.KINDS)
    assert len(times) == 6
    assert (tmp_path / "t_lab_probe.svg").stat().st_size > 1000
    assert not list(tmp_path.glob("*.key"))


def test_collectives_are_measured_in_groups_of_a_clusters_nodes(tmp_path, capsys, monkeypatch):
    """Real processes; every one checks the sums that it gets, and only those of its group add."""
    monkeypatch.setattr(probe, "SIZES_BYTES", probe.SIZES_BYTES[:3])
    monkeypatch.setattr(probe, "COLLECTIVE_BYTES", probe.COLLECTIVE_BYTES[:1])
    path = tmp_path / "t.yaml"
    cluster_of(tmp_path, 4)
    done = run_launch_here(capsys, "probe", path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    measured = loading.load(tmp_path / "t_local.yaml").measured
    found = {
        (collective.cluster, collective.num_nodes, collective.kind)
        for collective in measured.collectives
    }
    assert found == {("c", nodes, kind) for nodes in (2, 4) for kind in collective_times.KINDS}


def test_a_second_probe_replaces_the_section_and_a_lost_node_is_told_of(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(probe, "SIZES_BYTES", probe.SIZES_BYTES[:4])
    path = tmp_path / "t.yaml"
    path.write_text(UNEQUAL + SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where one agent finds no `psutil` that works
    broken = (
        "import os\nif os.environ.get('HOLMES_PROCESS') == '1':\n    raise SystemExit('broken')"
    )
    (tmp_path / "psutil.py").write_text(f"{broken}\n")
    words = ["probe", path, "--no-collectives", "--output", tmp_path / "out.yaml"]
    done = run_launch_here(capsys, *words)
    assert (done.returncode, done.stderr) == (1, "")
    assert "no process on a-1: ended with status 1; broken" in done.stdout
    assert "1 problem" in done.stdout
    measured = loading.load(tmp_path / "out.yaml").measured
    assert set(measured.pairs) == {("a-0", "b-0"), ("b-0", "a-0")}
    assert (tmp_path / "out.yaml").read_text().startswith(UNEQUAL)
    assert path.read_text() == UNEQUAL + SLOW


@pytest.mark.parametrize(
    "words, told",
    [
        (["probe"], "needs a topology file"),
        (["probe", "no.yaml"], "no such file"),
        (["probe", "{t}", "--launcher", "ssh"], "the launcher `ssh` needs it"),
        (["probe", "{one}"], "a section cannot be added"),
        (["lab", "{t}", "--", "probe"], "write --scale 0.01"),
        (["lab", "{t}", "--scale", "0.1", "--", "probe", "{t}"], "the lab has its own topology"),
        (["lab", "{t}", "--", "probe", "--launcher", "local"], "starts the processes itself"),
    ],
)
def test_a_mistake_is_told_in_a_paragraph(tmp_path, capsys, words, told):
    files = {"t": tmp_path / "t.yaml", "one": tmp_path / "one.yaml"}
    files["t"].write_text(UNEQUAL)
    values = yaml_files.read(files["t"], Mistakes).values
    files["one"].write_text(json.dumps(values))  # one line: { }
    done = run_launch_here(capsys, *(word.format(**files) for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr


def test_signals_take_away_the_key_file_of_a_probe(tmp_path):
    (tmp_path / "t.yaml").write_text(UNEQUAL)
    words = ["probe", tmp_path / "t.yaml", "--output", tmp_path / "out.yaml"]
    words += ["--launcher", "external", "--listen", free_listen()]
    command = [sys.executable, "-m", "launch", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as verb:
        try:
            while "python -m launch agent" not in verb.stdout.readline():
                assert verb.poll() is None
            assert (tmp_path / "agents.key").exists()
            verb.send_signal(signal.SIGHUP)
            verb.send_signal(signal.SIGTERM)
            assert verb.wait(HANG_S) in (128 + signal.SIGHUP, 128 + signal.SIGTERM)
        finally:
            verb.kill()
    assert not (tmp_path / "agents.key").exists()


def test_addresses_that_cannot_be_are_told_of(tmp_path):
    addresses = [
        {"infiniband": ["127.0.0.2"], "ethernet": ["127.0.0.3"]},
        {"ethernet": ["127.0.0.4"]},
        {"infiniband": ["127.0.0.5"], "ethernet": ["127.0.0.7"]},
        {"infiniband": ["127.0.0.6"], "ethernet": ["127.0.0.7"]},
        {"roce": ["127.0.0.8"]},
    ]
    (tmp_path / "t.yaml").write_text(UNEQUAL.replace("nodes: 2", "nodes: 4"))
    listen = free_listen()
    common = {"HOLMES_CONTROLLER": listen, "HOLMES_KEY_FILE": str(tmp_path / "agents.key")}
    command = [sys.executable, "-m", "launch"]
    words = [*command, "probe", tmp_path / "t.yaml", "--output", tmp_path / "out.yaml"]
    words += ["--launcher", "external", "--listen", listen]
    processes = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)]
    [verb] = processes
    try:
        while "python -m launch agent" not in verb.stdout.readline():
            assert verb.poll() is None
        for number, addresses_of_node in enumerate(addresses):
            said = json.dumps(addresses_of_node)
            mine = {"HOLMES_PROCESS": str(number), "HOLMES_ADDRESSES": said}
            env = {**os.environ, **common, **mine}
            processes.append(subprocess.Popen([*command, "agent"], cwd=ROOT, env=env))
        output, _ = verb.communicate(timeout=HANG_S)
        assert [process.wait(HANG_S) for process in processes] == [1, 0, 0, 0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "a-2 and a-3 both have 127.0.0.7" in output
    assert "a-1 has no address on infiniband, only on ethernet" in output
    assert "b-0 has no address on ethernet, only on roce" in output
    assert "nothing was measured" in output
    assert "collectives" not in output
    assert not (tmp_path / "out.yaml").exists()
