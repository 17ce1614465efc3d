"""Topologies: against values worked out by hand, and every mistake a file can hold."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.errors import Mistakes, TopologyError
from holmesjax.topology import (
    catalogue,
    description,
    fabrics,
    file as topology_file,
    loading,
    saving,
    upgrades,
)
from holmesjax.topology.machines import Cluster, DeviceKind, Link, Nic, Node, Topology

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs/topologies").glob("*.yaml"))

TWO = """\
name: two
clusters:
  - name: ib
    fabric: infiniband
    nodes: 2
    devices: {kind: cpu, count: 2, peak_flop_per_s: {float32: 45 GFLOP/s}}
    nics: [{kind: infiniband_200, count: 2}, {kind: ethernet_25}]
  - name: roce
    fabric: roce
    nodes:
      - {name: a, nics: [{kind: roce_100, latency: 4 us}, {kind: ethernet_10}]}
      - {name: b, devices: {kind: h100, count: 4, memory: 94 GB}}
    devices: {kind: cpu, count: 1}
    nics: [{kind: roce_200}]
links:
  - {between: [ib, roce], fabric: ethernet, bandwidth: 20 Gb/s, latency: 50 us}
"""


@pytest.fixture
def load(tmp_path):
    """Loads a topology from the text of its file."""

    def load_text(text):
        path = tmp_path / "two.yaml"
        path.write_text(text)
        return loading.load(path)

    return load_text


def refused(load, text):
    """The mistakes of a file, as (line, key, problem, found, fix)."""
    with pytest.raises(Mistakes) as error:
        load(text)
    rows = []
    for mistake in error.value.mistakes:
        assert type(mistake) is TopologyError
        file_and_line, _, key = mistake.where.partition(": ")
        line = int(file_and_line.rpartition(":")[2])
        rows.append((line, key, mistake.problem, str(mistake.found), mistake.fix))
    return rows


def test_ten_lines_describe_a_topology(load):
    topology = load(TWO)
    ib, roce = topology.clusters
    assert [node.name for node in topology.nodes] == ["ib-0", "ib-1", "a", "b"]
    assert [node.num_devices for node in topology.nodes] == [2, 2, 1, 4]
    assert topology.num_devices == 9
    cpu, h100 = ib.nodes[0].device, roce.nodes[1].device
    assert cpu.peak_flop_per_s["float32"] == 45e9  # overridden
    assert cpu.peak_flop_per_s["bfloat16"] == 10e9  # of the catalogue
    assert roce.nodes[0].device.peak_flop_per_s["float32"] == 30e9
    assert (h100.memory_bytes, h100.peak_flop_per_s["bfloat16"]) == (94e9, 989e12)
    assert h100.link == Link(fabric="nvlink", bandwidth_bytes_per_s=450e9, latency_s=3.5e-6)
    assert ib.nodes[0].nics[0] == Nic(
        name="infiniband_200",
        fabric="infiniband",
        rate_bytes_per_s=25e9,
        latency_s=2e-6,
        count=2,
    )
    assert [nic.name for nic in roce.nodes[0].nics] == ["roce_100", "ethernet_10"]  # its own
    assert [nic.name for nic in roce.nodes[1].nics] == ["roce_200"]  # the cluster's


def test_devices_are_numbered_node_by_node(load):
    topology = load(TWO)
    assert topology.devices() == tuple(range(9))
    assert topology.devices(["b"]) == (5, 6, 7, 8)
    assert topology.devices(["a", "ib-1"]) == (2, 3, 4)  # in the order of the topology
    names = ["ib-0", "ib-0", "ib-1", "ib-1", "a", "b", "b", "b", "b"]
    assert [topology.node_of(device).name for device in range(9)] == names
    assert topology.cluster_of("b").name == "roce"
    with pytest.raises(AssertionError, match="no device 9 of 9"):
        topology.node_of(9)


# Between which nodes, then fabric, bytes per second, seconds.
LINKS = [
    ("b", "b", "nvlink", 450e9, 3.5e-6),
    ("ib-0", "ib-0", "local", 5e9, 5e-6),
    ("ib-0", "ib-1", "infiniband", 50e9, 2e-6),  # two NICs of 25 GB/s
    ("a", "b", "roce", 12.5e9, 4e-6),  # the slower end: 100 Gb/s, 4 us
    ("ib-0", "a", "ethernet", 1.25e9, 50e-6),  # the link has 20 Gb/s, the NIC of `a` 10
    ("a", "ib-1", "ethernet", 1.25e9, 50e-6),
    ("ib-0", "b", "ethernet", 2.5e9, 50e-6),  # `b` names no Ethernet NIC: the link itself
]


@pytest.mark.parametrize(("a", "b", "fabric", "bandwidth", "latency"), LINKS)
def test_the_slowest_part_of_a_path(load, a, b, fabric, bandwidth, latency):
    expected = Link(fabric=fabric, bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    assert load(TWO).link(a, b) == expected


def test_a_link_holds_both_ways_unless_the_other_is_given(load):
    way_back = "  - {between: [roce, ib], fabric: ethernet, bandwidth: 5 Gb/s, latency: 1 ms}\n"
    assert load(TWO).links["roce", "ib"] == load(TWO).links["ib", "roce"]
    topology = load(TWO + way_back)
    assert topology.links["ib", "roce"].bandwidth_bytes_per_s == 2.5e9
    assert topology.links["roce", "ib"].bandwidth_bytes_per_s == 0.625e9
    assert description.describe(topology)[-2:] == [
        "  ib -> roce: ethernet, 50 us, 20 Gb/s",
        "  roce -> ib: ethernet, 1 ms, 5 Gb/s",
    ]


UNKNOWN = """{kind: %s, count: 1, memory: 24 GiB, memory_bandwidth: 1 TB/s,
              peak_flop_per_s: {float32: 83 TFLOP/s, bfloat16: 165 TFLOP/s},
              link: {fabric: local, bandwidth: 32 GB/s, latency: 10 us}}"""


def test_a_device_outside_the_catalogue_is_described_in_full(load):
    text = TWO.replace("{kind: cpu, count: 1}", UNKNOWN % "rtx4090")
    [a, _] = load(text).clusters[1].nodes
    assert a.device.name == "rtx4090"
    assert a.device.peak_flop_per_s == {"float32": 83e12, "bfloat16": 165e12}


# A replacement in TWO, then what is printed, less the name of the file.
MISTAKES = """\
fabric: infiniband => fabric: infinband
4: clusters[0].fabric: must be one of local, infiniband, roce, ethernet
  found: the text 'infinband'
  fix: did you mean 'infiniband'?

nodes: 2 => nodes: 0
5: clusters[0].nodes: must be at least 1
  found: 0
  fix: use 1 or more

nodes: 2 => nodes: 1000000000
5: clusters[0].nodes: must be at most 10000
  found: 1000000000
  fix: use 10000 or less

nodes: 2 => nodes: []
5: clusters[0].nodes: must not be empty
  found: []
  fix: give a number, or a list of nodes

count: 2, => count: -2,
6: clusters[0].devices.count: must be at least 1
  found: -2
  fix: use 1 or more

45 GFLOP/s => -45 GFLOP/s
6: clusters[0].devices.peak_flop_per_s.float32: must not be negative
  found: the text '-45 GFLOP/s'
  fix: write a number and a unit, such as 989 TFLOP/s

float32: => float23:
6: clusters[0].devices.peak_flop_per_s.float23: no such setting
  found: float23
  fix: did you mean 'float32'?

{kind: infiniband_200, count: 2} => {kind: infiniband_20}
7: clusters[0].nics[0].kind: is not in the catalogue
  found: infiniband_20
  fix: did you mean 'infiniband_200'? Or add fabric, rate, latency

{kind: infiniband_200, count: 2}, { => {
7: clusters[0].nics: none is on the fabric infiniband of the cluster
  found: ethernet_25
  fix: add one of infiniband_100, infiniband_200, infiniband_400, or correct the fabric

{kind: roce_100, latency: 4 us}, { => {
11: clusters[1].nodes[0].nics: none is on the fabric roce of the cluster
  found: ethernet_10
  fix: add one of roce_100, roce_200, roce_400, or correct the fabric

fabric: roce => fabric: local
9: clusters[1].fabric: must be infiniband, roce or ethernet: local is the inside of one node
  found: local, with 2 nodes
  fix: name the network between the nodes, or set nodes to 1

name: b, => name: a,
12: clusters[1].nodes[1].name: is the name of two nodes
  found: a
  fix: call it roce-1, say

name: b, => name: ib-0,
12: clusters[1].nodes[1].name: is the name of two nodes
  found: ib-0
  fix: call it roce-1, say

94 GB => 94
12: clusters[1].nodes[1].devices.memory: has no unit
  found: 94
  fix: write a number and a unit, such as 80 GiB

94 GB => 94 Gb/s
12: clusters[1].nodes[1].devices.memory: 'Gb/s' is not a unit of size
  found: the text '94 Gb/s'
  fix: write a number and a unit, such as 80 GiB

20 Gb/s => 0 Gb/s
16: links[0].bandwidth: must be more than 0
  found: the text '0 Gb/s'
  fix: use a number above 0

20 Gb/s => 20 gb/s
16: links[0].bandwidth: 'gb/s' is not a unit of bandwidth
  found: the text '20 gb/s'
  fix: did you mean 20 GB/s or 20 Gb/s?

latency: 50 us => latency: 50
16: links[0].latency: has no unit
  found: 50
  fix: write a number and a unit, such as 5 us; one way, which is half of a round trip

, latency: 50 us} => }
16: links[0].latency: is missing
  found: nothing
  fix: add `latency:` to section 'links[0]'

[ib, roce] => [ib, rose]
16: links[0].between[1]: no such cluster
  found: rose
  fix: did you mean 'roce'?

[ib, roce] => [ib, ib]
16: links[0].between: must be two clusters
  found: [ib, ib]
  fix: write two of ib, roce, the first one as the sender

[ib, roce] => [ib]
16: links[0].between: must be two clusters
  found: [ib]
  fix: write two of ib, roce, the first one as the sender

- name: roce => - name: 3
8: clusters[1].name: must be a text
  found: 3
  fix: write a text, in quotes if it looks like something else

kind: cpu, count: 1 => kind: cp, count: 1, memory: 1 GB, memory_bandwidth: 1 GB/s
13: clusters[1].devices.kind: is not in the catalogue
  found: cp
  fix: did you mean 'cpu'? Or add link, peak_flop_per_s.float32, peak_flop_per_s.bfloat16

latency: 50 us} => latency: 50 us, capacity: 0 Gb/s}
16: links[0].capacity: must be more than 0
  found: the text '0 Gb/s'
  fix: use a number above 0

count: 1} => count: 1, wattage: 9}
13: clusters[1].devices.wattage: no such setting
  found: wattage
  fix: choose from: kind, count, peak_flop_per_s, memory, memory_bandwidth, link, calibration, price

    devices: {kind: cpu, count: 1} => #
11: clusters[1].nodes[0].devices: is missing
  found: nothing
  fix: add devices: {kind: h100, count: 8}, say
"""


@pytest.mark.parametrize("case", MISTAKES.strip().split("\n\n"))
def test_a_mistake_is_refused(load, tmp_path, case):
    edit, message = case.split("\n", maxsplit=1)
    old, new = edit.split(" => ")
    assert old in TWO
    with pytest.raises(Mistakes) as error:
        load(TWO.replace(old, new, 1))
    assert str(error.value).replace(f"{tmp_path}/two.yaml:", "") == message


def test_a_link_has_the_capacity_that_the_file_and_the_probe_say(load, tmp_path):
    """A measured value stands for the written one, each way; both are read back."""
    text = TWO.replace("latency: 50 us}", "latency: 50 us, capacity: 30 Gb/s}")
    topology = load(text)
    assert load(TWO).pipes == []
    reached = fabrics.FABRICS["ethernet"].reached
    assert pipes_of(topology) == {
        "ib -> roce": (30e9 / 8, reached * 30e9 / 8),
        "roce -> ib": (30e9 / 8, reached * 30e9 / 8),
    }
    assert (
        "ethernet, 50 us, 20 Gb/s a node, 30 Gb/s all together"
        in description.describe(topology)[-1]
    )
    slower = load(text.replace("30 Gb/s", "5 Gb/s"))  # less than what one node could send
    assert slower.link("ib-0", "b").bandwidth_bytes_per_s == 5e9 / 8
    measured = (
        "measured:\n  date: today\n  capacities:\n    - {between: [roce, ib], capacity: 8 Gb/s}\n"
    )
    found = load(text + measured)
    assert pipes_of(found) == pipes_of(topology) | {"roce -> ib": (1e9, 1e9)}
    assert saving.measured_section(found.measured) == measured
    saving.save(found, tmp_path / "saved.yaml")
    assert loading.load(tmp_path / "saved.yaml") == found
    row = "    - {between: [roce, x], capacity: 8 Gb/s}\n"
    for more, problem in ((row, "no such cluster"), (row.replace("x]", "ib]"), "is given twice")):
        [(*_, told, _, _)] = refused(load, text + measured + more)
        assert told == problem


def pipes_of(topology):
    rates = lambda pipe: (pipe.capacity_bytes_per_s, pipe.reached_bytes_per_s)
    return {str(pipe): rates(pipe) for pipe in topology.pipes}


FOUR = (
    "name: four\nclusters:\n"
    + "".join(
        f"  - {{name: {name}, fabric: local, nodes: 1, devices: {{kind: cpu, count: 1}}}}\n"
        for name in "abcd"
    )
    + "links:\n"
    + "".join(
        f"  - {{between: [{a}, {b}], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}}\n"
        for a, b in itertools.combinations("abcd", 2)
    )
)
UPLINKS = """uplinks:
  - {pairs: [[c, a], [c, b]], capacity: 32 Gb/s}
  - {pairs: [[d, b], [d, a]], capacity: 80 Gb/s}
  - {pairs: [[b, d], [a, d]], capacity: 16 Gb/s}
"""


def test_pairs_of_clusters_share_the_capacity_of_an_uplink(load, tmp_path):
    """Both ways, unless all pairs are there in the other order; measured values come first."""
    topology, reached = load(FOUR + UPLINKS), fabrics.FABRICS["ethernet"].reached
    rates = {"c -> a+b": 4e9, "a+b -> c": 4e9, "d -> a+b": 10e9, "a+b -> d": 2e9}
    assert pipes_of(topology) == {name: (rate, reached * rate) for name, rate in rates.items()}
    told = ["  a+b <-> c share 32 Gb/s each way", "  a+b -> d share 16 Gb/s"]
    assert set(told) < {*description.describe(topology)}
    # A node that sends alone has no more than the narrowest uplink on its way.
    ways = {("a-0", "c-0"): 4e9, ("d-0", "a-0"): 5e9, ("a-0", "d-0"): 2e9, ("a-0", "b-0"): 5e9}
    assert {way: topology.link(*way).bandwidth_bytes_per_s for way in ways} == ways
    measured = (
        "measured:\n  date: today\n  uplinks:\n    - {pairs: [[a, c], [b, c]], capacity: 8 Gb/s}\n"
    )
    found = load(FOUR + UPLINKS + measured)
    assert pipes_of(found) == pipes_of(topology) | {"a+b -> c": (1e9, 1e9)}
    assert saving.measured_section(found.measured) == measured
    saving.save(found, tmp_path / "saved.yaml")
    assert loading.load(tmp_path / "saved.yaml") == found
    left = upgrades.without_cluster(found, "a")
    assert {name: rate for name, (rate, _) in pipes_of(left).items()} == {
        "c -> b": 4e9, "b -> c": 1e9, "d -> b": 10e9, "b -> d": 2e9
    }  # fmt: skip
    assert pipes_of(upgrades.wider_pipe(found, (("a", "c"), ("b", "c")), 2.0)) == pipes_of(
        found
    ) | {"a+b -> c": (2e9, 2e9), "c -> a+b": (8e9, reached * 8e9)}
    assert saving.hash_of(topology) not in (saving.hash_of(load(FOUR)), saving.hash_of(found))


WRONG_UPLINKS = [
    ("[[c, a], [c, b]]", "[[c, a], [c, e]]", (15, "[0].pairs[1][1]", "no such cluster")),
    ("[[c, a], [c, b]]", "[[c, a], [c, c]]", (15, "[0].pairs[1]", "must be two clusters")),
    ("[[c, a], [c, b]]", "[[c, a], [c, a]]", (15, "[0].pairs[1]", "is given twice")),
    ("[[c, a], [c, b]]", "[]", (15, "[0].pairs", "must not be empty")),
    ("[[c, a], [c, b]]", "[[d, a], [d, b]]", (16, "[1].pairs", "are given twice")),
    ("32 Gb/s", "0 Gb/s", (15, "[0].capacity", "must be more than 0")),
    ("capacity: 32 Gb/s", "rate: 1", (15, "[0].rate", "no such setting")),
]


@pytest.mark.parametrize(("old", "new", "expected"), WRONG_UPLINKS)
def test_a_wrong_uplink_is_refused_as_written_or_measured(load, old, new, expected):
    line, key, problem = expected
    wrong = UPLINKS.replace(old, new)
    [row, *_] = refused(load, FOUR + wrong)
    assert row[:3] == (line, f"uplinks{key}", problem)
    indented = "".join(f"  {line_of_section}\n" for line_of_section in wrong.splitlines())
    [row, *_] = refused(load, FOUR + "measured:\n  date: today\n" + indented)
    assert row[:3] == (line + 2, f"measured.uplinks{key}", problem)


def test_two_clusters_need_a_link(load):
    [row] = refused(load, TWO[: TWO.index("links:")])
    add = "add {between: [ib, roce], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}"
    assert row == (1, "links", "no link joins the clusters 'ib' and 'roce'", "no link", add)


@pytest.mark.parametrize("fabric, owner", [("infiniband", "a"), ("roce", "ib")])
def test_a_link_over_rdma_needs_its_nics_at_both_ends(load, fabric, owner):
    [row] = refused(load, TWO.replace("fabric: ethernet,", f"fabric: {fabric},"))
    assert row[1:3] == ("links[0].fabric", f"{owner} has no NIC on it")


def test_clusters_with_one_name(load):
    text = TWO.replace("name: roce", "name: ib").replace("[ib, roce]", "[ib, ib]")
    rows = [(line, key, problem) for line, key, problem, *_ in refused(load, text)]
    assert rows == [
        (8, "clusters[1].name", "is the name of two clusters"),
        (16, "links[0].between", "must be two clusters"),
    ]


def test_the_same_link_twice(load):
    last = TWO.splitlines()[-1]
    [row] = refused(load, f"{TWO}{last}\n")
    assert row[:4] == (17, "links[1].between", "is given twice", "[ib, roce] again")


def test_all_mistakes_of_a_file_are_reported(load):
    text = TWO.replace("nodes: 2", "nodes: two").replace("kind: h100", "kind: h10")
    text = text.replace("[ib, roce]", "[ibb, roce]").replace("50 us", "50 Gb/s")
    text = text.replace("{kind: infiniband_200, count: 2}, ", "").replace("name: two", "nam: two")
    assert {(line, key) for line, key, *_ in refused(load, text)} == {
        (1, "nam"),  # which `name` is not missing besides
        (5, "clusters[0].nodes"),
        (12, "clusters[1].nodes[1].devices.kind"),
        (16, "links[0].between[0]"),
        (16, "links[0].latency"),
    }  # whether cluster 0 has the NICs it needs cannot be said without its nodes


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_topologies(path, tmp_path):
    topology = loading.load(path)
    assert topology.name == path.stem
    saving.save(topology, tmp_path / "saved.yaml")
    assert loading.load(tmp_path / "saved.yaml") == topology
    assert saving.hash_of(loading.load(tmp_path / "saved.yaml")) == saving.hash_of(topology)
    lines = description.describe(topology)
    count = len(topology.clusters)
    assert len(lines) <= max(8, 1 + count**2), "a line for each, and for each way between two"
    assert all(len(line) <= 110 for line in lines)
    for a in topology.nodes:
        for b in topology.nodes:
            assert topology.link(a.name, b.name).bandwidth_bytes_per_s > 0


def test_the_shipped_clusters_are_of_unlike_speed():
    ib, roce = loading.load(ROOT / "configs/topologies/ib_roce.yaml").clusters
    for dtype in ("float32", "bfloat16"):
        fast, slow = (c.nodes[0].device.peak_flop_per_s[dtype] for c in (ib, roce))
        assert fast / slow == pytest.approx(1.5)


def test_describe(load):
    assert description.describe(load(TWO)) == [
        "topology    two: 4 nodes, 9 devices",
        "  ib        2 nodes x 2 cpu (45 GFLOP/s float32, 2 GiB), "
        "infiniband: 2 x infiniband_200, ethernet_25",
        "  roce      1 node x 1 cpu (30 GFLOP/s float32, 2 GiB), roce: roce_100, ethernet_10",
        "  roce      1 node x 4 h100 (989 TFLOP/s bfloat16, 87.5 GiB), roce: roce_200",
        "  ib <-> roce: ethernet, 50 us, 20 Gb/s each way",
    ]


def test_describe_counts_what_it_does_not_show(load):
    more = "".join(
        f"      - {{name: n{i}, devices: {{kind: cpu, count: {i}}}}}\n" for i in range(1, 9)
    )
    listed = "    devices: {kind: cpu, count: 1}"
    lines = description.describe(load(TWO.replace(listed, more + listed, 1)))
    assert "  roce      8 more nodes, 36 devices" in lines
    assert len(lines) <= 8


def test_the_hash_changes_with_everything(load):
    changed = [TWO.replace(old, new) for old, new in HASHED]
    hashes = {saving.hash_of(load(text)) for text in (TWO, *changed)}
    assert len(hashes) == 1 + len(HASHED)
    assert saving.hash_of(load(TWO + "# a comment\n")) == saving.hash_of(load(TWO))


HASHED = [
    ("45 GFLOP/s", "45.000001 GFLOP/s"),
    ("count: 4", "count: 5"),
    ("name: b,", "name: c,"),
    ("50 us", "51 us"),
    ("roce_100", "roce_400"),
]


rates = st.floats(min_value=1e-3, max_value=1e18)
links = st.builds(Link, fabric=st.just("ethernet"), bandwidth_bytes_per_s=rates, latency_s=rates)
device_links = st.builds(
    Link, fabric=st.sampled_from(["local", "nvlink"]), bandwidth_bytes_per_s=rates, latency_s=rates
)
kinds = st.builds(
    DeviceKind,
    name=st.sampled_from([*catalogue.DEVICES, "other", "1e3"]),
    peak_flop_per_s=st.fixed_dictionaries(
        {"float32": rates, "bfloat16": rates},
        optional={"tf32": rates, "float16": rates, "float8": rates},
    ),
    memory_bytes=rates,
    memory_bandwidth_bytes_per_s=rates,
    link=device_links,
)
nics = st.builds(
    Nic,
    name=st.sampled_from([*catalogue.NICS, "other"]),
    fabric=st.just("roce"),
    rate_bytes_per_s=rates,
    latency_s=rates,
    count=st.integers(min_value=1, max_value=8),
)
nodes = st.builds(
    Node,
    name=st.just(""),
    device=kinds,
    num_devices=st.integers(min_value=1, max_value=8),
    nics=st.lists(nics, min_size=1, max_size=3).map(tuple),
)


@st.composite
def topologies_of_any_machines(draw):
    """Two to three clusters of unlike nodes, some of them equal, and unlike links each way."""
    names = ["x", "null", "3"][: draw(st.integers(2, 3))]
    clusters = []
    for name in names:
        drawn = draw(st.lists(nodes, min_size=1, max_size=3))
        drawn += drawn[:1] * draw(st.integers(0, 2))
        style = draw(st.sampled_from(["{}-{}", "{} node {}"]))
        named = [dataclasses.replace(n, name=style.format(name, i)) for i, n in enumerate(drawn)]
        clusters.append(Cluster(name=name, fabric="roce", nodes=tuple(named)))
    return Topology(
        name=draw(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1)),
        clusters=tuple(clusters),
        links={(a, b): draw(links) for a in names for b in names if a != b},
    )


@settings(deadline=None, max_examples=60)
@given(topologies_of_any_machines())
def test_any_topology_reads_back_equal(tmp_path_factory, topology):
    path = tmp_path_factory.mktemp("topology") / "topology.yaml"
    saving.save(topology, path)
    assert loading.load(path) == topology


@pytest.mark.parametrize("name", catalogue.DEVICES)
def test_every_device_of_the_catalogue_is_complete(load, name):
    """Peaks fall with precision, and no device beats today's by a factor that hints at a typo."""
    device = load(TWO.replace("kind: h100, count: 4, memory: 94 GB", f"kind: {name}, count: 1"))
    device = device.node("b").device
    peaks = device.peak_flop_per_s
    has_fp8 = name in ("h100", "h200", "b200")
    assert set(peaks) == set(catalogue.DTYPES) - ({catalogue.FP8} if not has_fp8 else set())
    if has_fp8:
        assert peaks["float8"] / peaks["bfloat16"] == pytest.approx(2, rel=0.01)
    if name != "cpu":
        assert peaks["bfloat16"] == peaks["float16"] > peaks["tf32"] > peaks["float32"] > 1e13
        assert peaks["bfloat16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
        seconds = device.memory_bytes / device.memory_bandwidth_bytes_per_s
        assert 0.015 < seconds < 0.05  # to read all memory once: alike for all generations
        assert device.link.bandwidth_bytes_per_s < device.memory_bandwidth_bytes_per_s / 4


@pytest.mark.parametrize("name", catalogue.NICS)
def test_every_nic_of_the_catalogue_is_as_fast_as_its_name_says(name):
    nic = topology_file.filled(topology_file.NicEntry(kind=name), catalogue.NICS)
    fabric, gigabits = name.split("_")
    assert nic.fabric == fabric
    assert math.isclose(nic.rate * 8, float(gigabits) * 1e9)


@pytest.mark.parametrize(
    "latency, gb_per_s, most_gb_per_s",
    [("30 ms", 100, 32 * 2 / 3 * 4 * 2**20 * 8e-9 / 0.06), ("30 ms", 10, 100), ("50 us", 100, 100)],
)
def test_a_process_sends_over_a_long_link_what_its_windows_carry(
    load, latency, gb_per_s, most_gb_per_s
):
    """32 connections with two thirds of 4 MiB each on their way, and no more."""
    far = load(TWO.replace("20 Gb/s, latency: 50 us", f"{gb_per_s} Gb/s, latency: {latency}"))
    effective = far.effective_link("ib-0", "b").bandwidth_bytes_per_s
    own = min(map(far.transport_bytes_per_s, ("ib", "roce")))
    carried = far.boundary_link("ib-0", "b").bandwidth_bytes_per_s
    assert carried == pytest.approx(min(effective, own, most_gb_per_s * 1e9 / 8))
    said = [line for line in description.describe(far) if "a process sends at most" in line]
    assert len(said) == (most_gb_per_s < gb_per_s)
