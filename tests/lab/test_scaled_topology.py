"""The lab as decisions and as shell lines; no lab is built."""

import dataclasses
import re
import signal
import subprocess

import pytest

from holmesjax import config as configs
from holmesjax.costs import work
from holmesjax.costs.products import blocks_forward_flop, head_forward_flop
from holmesjax.errors import ConfigError, HolmesError, Mistakes, TopologyError
from holmesjax.lab import scaled_topology, shell
from holmesjax.lab.injected_faults import parse, parse_all
from holmesjax.lab.scaled_topology import Share
from holmesjax.lab.shell import Commands, _between, port_name, tear_down
from holmesjax.topology import loading, machines as topologies

TWO_BY_TWO = """
name: two
clusters:
  - name: ib
    fabric: infiniband
    nodes: 2
    devices: {kind: cpu, count: 2, peak_flop_per_s: {float32: 45 GFLOP/s, bfloat16: 15 GFLOP/s}}
    nics: [{kind: infiniband_200, count: 2}, {kind: ethernet_25}]
  - name: roce
    fabric: roce
    nodes: 2
    devices: {kind: cpu, count: 2, peak_flop_per_s: {float32: 30 GFLOP/s, bfloat16: 10 GFLOP/s}}
    nics: [{kind: roce_200}, {kind: ethernet_25}]
links:
  - {between: [ib, roce], fabric: ethernet, bandwidth: 10 Gb/s, latency: 50 us}
  - {between: [roce, ib], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
"""
THREE = """
name: three
clusters:
  - {name: a, fabric: infiniband, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: infiniband_200}, {kind: ethernet_100}]}
  - {name: b, fabric: ethernet, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: ethernet_100}]}
  - {name: c, fabric: infiniband, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: infiniband_200}]}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 10 Gb/s, latency: 50 us}
  - {between: [a, c], fabric: infiniband, bandwidth: 40 Gb/s, latency: 50 us}
  - {between: [b, c], fabric: ethernet, bandwidth: 20 Gb/s, latency: 50 us}
"""


def topology(tmp_path, text=TWO_BY_TWO):
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    return loading.load(path)


def commands(tmp_path, text=TWO_BY_TWO, *, scale=0.01, version="v1", cores=(0, 1)):
    machines = topology(tmp_path, text)
    shares = scaled_topology.make_shares(machines, "float32", cores, None)
    lab = scaled_topology.make_lab(machines, shares, scale)
    return Commands(lab=lab, id="test", cgroup_version=version)


# ---- shell lines -----------------------------------------------------------------------------


@pytest.mark.parametrize("version, latency", [("v1", "2 us"), ("v2", "50 us")])
def test_the_lines_match_golden(tmp_path, assert_golden, version, latency):
    """To accept a change on purpose: pytest --update-golden, then read the diff."""
    made = commands(tmp_path, TWO_BY_TWO.replace("50 us", latency), version=version)
    lines = [*made.build(), *made.enter(made.lab.nodes[3], ["true"])]
    lines += made.delaying(["true"]) if made.lab.delays_s else []
    for text in ("cut ib<->roce", "slow roce->ib to 10 Mb/s 5 s", "cut ib-1", "freeze roce-0 1s"):
        doing, undoing = made.fault(parse(text, made.lab.topology))
        lines += [f"# {text}", *doing, "# and back", *undoing]
    text = "\n".join([*lines, "# take away", *tear_down("test", version)]) + "\n"
    assert_golden(f"lab_{version}.txt", text)


@pytest.mark.parametrize("capacity", ["", ", capacity: 30 Gb/s"])
def test_every_way_is_delayed_once_by_its_own_latency_and_after_its_pipes(tmp_path, capacity):
    """Follows a packet of each way from device to device."""
    text = THREE.replace("20 Gb/s, latency: 50 us", f"20 Gb/s{capacity}, latency: 70 us")
    text = text.replace("40 Gb/s, latency: 50 us", "40 Gb/s, latency: 4 us")  # 0.4 ms in the lab
    made = commands(tmp_path, text)
    lead = re.compile(r"filter add dev (\S+) parent ffff: .* pref \d+ u32 (.*) action .* dev (\S+)")
    leads = {(m[1], m[2]): m[3] for line in made.build() if (m := lead.search(line))}
    known = set()  # a device is made before something is led there
    for line in made.build():
        known |= set(re.findall(r"(?:tuntap add dev|link add name) (\S+)", line))
        known |= set(re.findall(r"peer name (out\d+)", line))
        assert set(re.findall(r"(?:redirect dev|filter add dev) (\w+\d+)$", line)) <= known, line
    delays = dict(word.split("=") for word in made.delaying([]) if word.startswith("late"))
    expected_s = {(0, 1): "0.005", (1, 0): "0.005", (1, 2): "0.007", (2, 1): "0.007"}
    for way in made.lab.links:
        for node in made.lab.members(way[0]):
            place, passed = port_name(node, "eth0"), []
            while place := leads.get((place.replace("in", "out"), _between(way))):
                passed.append(place)
            pipes = [f"in{number}" for number in made.lab.pipes_of(way)]
            assert passed[: len(pipes)] == pipes, way
            assert [delays[place] for place in passed[len(pipes) :]] == (
                [expected_s[way]] if way in expected_s else []
            ), way


def test_what_ends_by_itself_or_never_does_not_hold_up_the_end(tmp_path, monkeypatch):
    """A plain folder stands for a control group, whose files keep it from being removed."""
    monkeypatch.setitem(shell.CGROUPS, "v2", str(tmp_path))
    (tmp_path / "holmes-test/a").mkdir(parents=True)
    left = subprocess.Popen(["sleep", "600"])
    (tmp_path / "holmes-test/a/cgroup.procs").write_text(f"4194305\n{left.pid}\n")
    kill, _, remove, _ = tear_down("test", "v2")
    ended = [
        subprocess.run(["sh", "-c", line], timeout=60, check=False).returncode
        for line in (kill, remove.replace(f"timeout {shell.TAKEN_AWAY_S} ", "timeout 0.2 "))
    ]
    assert ended == [0, 124]
    assert left.wait(60) == -signal.SIGKILL


SHARED = THREE.replace("bandwidth: 20 Gb/s", "bandwidth: 20 Gb/s, capacity: 30 Gb/s")


@pytest.mark.parametrize("text", [TWO_BY_TWO, THREE, SHARED])
def test_every_line_is_a_shell_line_and_names_are_short_enough(tmp_path, text):
    made = commands(tmp_path, text)
    lines = [*made.build(), *tear_down("test", "v2")]
    subprocess.run(["sh", "-n", "-c", "\n".join(lines)], check=True)
    for name in re.findall(r"(?:name|dev) (\S+)", "\n".join(lines)):
        assert len(name) <= 15, name


def test_a_nic_is_never_promised_to_more_than_it_has(tmp_path):
    """The rates that classes below one may send without asking add up to at most its rate."""
    for line, by_class in _htb_classes(commands(tmp_path, THREE).build()).items():
        for minor, (_, rate, ceil) in by_class.items():
            assert rate <= ceil
            below = [r for parent, r, _ in by_class.values() if parent == f"1:{minor}"]
            assert sum(below) <= rate + len(below), (line, minor)


def _htb_classes(lines):
    found = {}
    pattern = r"tc -n (\S+) class add dev (\S+) parent (\S+) classid 1:(\w+) htb rate (\d+)bit ceil"
    for line in lines:
        if match := re.match(pattern + r" (\d+)bit", line):
            namespace, device, parent, minor, rate, ceil = match.groups()
            found.setdefault((namespace, device), {})[minor] = (parent, int(rate), int(ceil))
    return found


def test_every_pair_of_clusters_has_the_rate_of_its_link(tmp_path):
    made = commands(tmp_path, THREE, scale=0.001)
    classes = _htb_classes(made.build())
    ceil = {
        (node.name, int(minor, 16) - 0x10): values[2]
        for node in made.lab.nodes
        for minor, values in classes[made.namespace(node), "eth0"].items()
        if int(minor, 16) >= 0x10
    }
    mb = 1_000_000
    assert ceil == {
        ("a-0", 1): 10 * mb,
        ("a-0", 2): 40 * mb,
        ("b-0", 0): 10 * mb,
        ("b-0", 2): 20 * mb,
        ("b-1", 0): 10 * mb,
        ("b-1", 2): 20 * mb,
        ("c-0", 0): 40 * mb,
        ("c-0", 1): 20 * mb,
    }


def test_addresses_name_every_fabric_a_node_may_be_asked_for(tmp_path):
    nodes = {node.name: node for node in commands(tmp_path, THREE).lab.nodes}
    fast, slow = "198.19.0.1", "198.18.0.1"
    assert nodes["a-0"].addresses == {
        "local": ["127.0.0.1"],
        "ethernet": [slow],
        "infiniband": [fast],
    }
    assert nodes["b-1"].addresses == {"local": ["127.0.0.1"], "ethernet": ["198.18.1.2"]}
    assert nodes["b-1"].fast_address is None
    every = [a for node in nodes.values() for a in (node.slow_address, node.fast_address) if a]
    assert len(set(every)) == len(every)


# ---- shares ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cores", [1, 2, 3, 16, 64])
def test_shares_are_in_proportion_and_fill_no_core(tmp_path, num_cores):
    machines, cores = topology(tmp_path), range(num_cores)
    shares = scaled_topology.make_shares(machines, "float32", cores, None)
    quotas = [share.quota for share in shares]
    assert quotas[0] / quotas[2] == pytest.approx(1.5)
    for core in cores:
        held = [share.quota / len(share.cores) for share in shares if core in share.cores]
        assert sum(held) <= 0.9 + 1e-6
    for share in shares:
        assert len(share.cores) >= min(share.quota, num_cores)
    if num_cores == 2:
        assert quotas == pytest.approx([0.54, 0.54, 0.36, 0.36])


def test_a_share_that_nodes_would_have_to_steal_is_refused_with_one_that_works(tmp_path):
    machines = topology(tmp_path)
    with pytest.raises(ConfigError, match=r"use --cpu 54%"):
        scaled_topology.make_shares(machines, "float32", [0, 1], 0.8)
    assert scaled_topology.make_shares(machines, "float32", [0, 1], 0.54)[0].quota == 0.54


# ---- scale ---------------------------------------------------------------------------------


def test_the_scale_is_the_ratio_of_speeds_for_one_and_the_same_run(tmp_path):
    machines = topology(tmp_path)
    own = scaled_topology.workload(configs.load("configs/runs/quickstart.yaml"))
    factor, lines = scaled_topology.scale(machines, [Share(quota=0.5, cores=(0,))], 20e9, own, own)
    assert factor == pytest.approx(0.5 * 20 / (2 * 45))
    assert "10 GFLOP/s a node here / 90 GFLOP/s there" in lines[0]


def test_the_scale_keeps_sending_over_computing_for_another_run(tmp_path):
    """Against seconds, computed from the definitions."""
    machines = topology(tmp_path)
    path = "configs/runs/quickstart.yaml"
    small = configs.load(path, ["model.width=64", "model.num_layers=2"])
    large = configs.load(path, ["model.num_layers=12", "train.compute_dtype=bfloat16"])
    quota, core = 0.5, 20e9
    factor, _ = scaled_topology.scale(
        machines,
        [Share(quota=quota, cores=(0,))],
        core,
        scaled_topology.workload(small),
        scaled_topology.workload(large),
    )

    def ratio(config, flop_per_s, bytes_per_s):
        model, tokens = config.model, 1000
        layers = blocks_forward_flop(model, tokens)
        flop = 3 * (layers + head_forward_flop(model, tokens))
        num_bytes = work.boundary_bytes(model, tokens, config.train.compute_dtype)
        return (num_bytes / bytes_per_s) / (flop / flop_per_s)

    real = ratio(large, 2 * 15e9, 3e9)  # bfloat16 is slower on these devices
    assert ratio(small, quota * core, 3e9 * factor) == pytest.approx(real)


# ---- bad input -----------------------------------------------------------------------------


def test_a_lab_too_slow_for_calls_is_refused(tmp_path):
    """100 ms at a hundredth of the speed would be 10 s."""
    with pytest.raises(TopologyError, match=r"round trips of 2 s at most") as error:
        commands(tmp_path, TWO_BY_TWO.replace("50 us", "50 ms"))
    assert error.value.fix == "use --scale 0.05 or more"
    assert commands(tmp_path, TWO_BY_TWO.replace("50 us", "50 ms"), scale=0.051)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(tmp_path, scale):
    with pytest.raises(ConfigError, match="--scale"):
        commands(tmp_path, scale=scale)


def test_a_rate_that_cannot_be_shaped_is_refused_with_a_scale_that_can(tmp_path):
    with pytest.raises(TopologyError, match="too slow") as error:
        commands(tmp_path, scale=1e-9)
    least = float(re.search(r"--scale (\S+)", error.value.fix)[1])
    commands(tmp_path, scale=1.01 * least)


@pytest.mark.parametrize("name", ["a b", "a/b", "$(reboot)", "é", "-x", "x" * 64])
def test_a_node_that_cannot_be_a_host_is_refused(tmp_path, name):
    machines = topology(tmp_path)
    cluster = machines.clusters[0]
    node = dataclasses.replace(cluster.nodes[0], name=name)
    clusters = (dataclasses.replace(cluster, nodes=(node,)), machines.clusters[1])
    changed = topologies.Topology(name="t", clusters=clusters, links=machines.links)
    shares = scaled_topology.make_shares(changed, "float32", [0, 1], None)
    with pytest.raises(TopologyError, match="cannot be that of a host"):
        scaled_topology.make_lab(changed, shares, 1.0)


def test_two_nodes_with_one_name_are_refused(tmp_path):
    text = TWO_BY_TWO.replace("nodes: 2", "nodes: [{name: roce-1}]", 1)
    with pytest.raises(Mistakes, match="is the name of two nodes"):
        topology(tmp_path, text)


# ---- faults --------------------------------------------------------------------------------


def test_faults_are_read(tmp_path):
    machines = topology(tmp_path)
    cut = parse("step=20 cut ib<->roce 10s", machines)
    assert (cut.kind, cut.step, cut.duration_s) == ("cut", 20, 10.0)
    assert cut.ways == (("ib", "roce"), ("roce", "ib"))
    slow = parse("t=30s slow ib -> roce to 10 Mb/s 20 s", machines)
    assert (slow.time_s, slow.rate_bytes_per_s, slow.duration_s) == (30.0, 1.25e6, 20.0)
    assert slow.ways == (("ib", "roce"),)
    assert parse("step=5 kill ib-1", machines).node == "ib-1"
    assert parse("cut ib-0 500ms", machines).duration_s == 0.5
    assert parse("freeze roce-0", machines).duration_s is None


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "must say what is done to whom"),
        ("step=20", "must say what is done to whom"),
        ("step=x cut ib-0", "step must be a number"),
        ("step=0 cut ib-0", "step must be a number"),
        ("t=5 cut ib-0", "t has no unit"),
        ("when=5 cut ib-0", "no such moment"),
        ("cutt ib-0", "did you mean 'cut'"),
        ("cut ib-9", "no such node"),
        ("cut ib<->rose", "did you mean 'roce'"),
        ("cut ib<->ib", "a link joins two clusters"),
        ("cut ib->roce->ib", "a link joins two clusters"),
        ("kill ib<->roce", "only a node can be hit by kill"),
        ("kill ib-0 5s", "does not come back"),
        ("slow ib-0 to 1 Mb/s", "only a link can be slow"),
        ("slow ib<->roce 5s", "must say how slow"),
        ("slow ib<->roce to 0 Mb/s", "must not be zero"),
        ("slow ib<->roce to 5mb/s", "is not a unit"),
        ("cut ib-0 0s", "must not be zero"),
        ("cut ib-0 5", "has no unit"),
        ("cut ib-0 5s now", "words too many"),
    ],
)
def test_a_fault_that_makes_no_sense_is_explained(tmp_path, text, told):
    with pytest.raises(HolmesError) as error:
        parse(text, topology(tmp_path))
    assert told in str(error.value)
    assert f"--fault {text!r}" in error.value.where


def test_all_mistakes_come_at_once(tmp_path):
    with pytest.raises(Mistakes) as error:
        parse_all(["cut ib-7", "cut ib-0", "kill roce-7"], topology(tmp_path))
    assert len(error.value.mistakes) == 2
