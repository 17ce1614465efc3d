"""The doctor finds what is wrong, says where, and finds nothing where nothing is."""

import functools
import itertools
import pwd
import re
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax import job as jobs
from holmesjax.hosts import doctor, shared_memory
from holmesjax.hosts.agent_messages import FolderFacts, KernelFacts, NicFacts, NoAnswer, NodeFacts
from holmesjax.plan.processes import domain_fabric, fabric_between
from holmesjax.topology import loading
from launch.verbs import doctor as verb
from tests.jobs import ROOT, run_launch_here

GIB = 2**30

TOPOLOGY = """
name: two
clusters:
  - name: a
    fabric: infiniband
    nodes: 2
    devices: {kind: h100, count: 2}
    nics: [{kind: infiniband_400, count: 2}, {kind: ethernet_25}]
  - name: b
    fabric: roce
    nodes: 1
    devices: {kind: a100_80gb, count: 2}
    nics: [{kind: roce_200}]
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}
"""


def nic(name, fabric, gb_per_s, reason="active"):
    rate = None if gb_per_s is None else gb_per_s * 1e9 / 8
    return NicFacts(name=name, fabric=fabric, reason=reason, rate_bytes_per_s=rate)


IB = [nic("mlx5_0 port 1", "infiniband", 400), nic("mlx5_1 port 1", "infiniband", 400)]


def node(address, gpu, nics):
    return NodeFacts(
        now_s=0.01,
        host="host",
        resolves_to=address,
        python="3.12",
        packages={"jax": "0.12.0", "numpy": "2.4.0"},
        source="0123456789abcdef",
        folder=FolderFacts(is_shared=True, free_bytes=100 * GIB),
        max_open_files=65536,
        max_locked_bytes=None,
        max_window_bytes=4 << 20,
        gpus=[gpu, gpu],
        drivers=["580.1"],
        nics=nics,
        mtu_bytes={"local": [65536], "ethernet": [1500]},
        addresses={"local": ["127.0.0.1"], "ethernet": [address]},
        twins=[],
        loses_memory=False,
    )


@pytest.fixture
def topology(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(TOPOLOGY)
    return loading.load(path)


@pytest.fixture
def facts():
    h100 = "NVIDIA H100 80GB HBM3"
    return {
        "a-0": node("10.0.0.1", h100, [*IB, nic("eth0", "ethernet", 25)]),
        "a-1": node("10.0.0.2", h100, [*IB, nic("eth0", "ethernet", 25)]),
        "b-0": node("10.0.0.3", "NVIDIA A100-SXM4-80GB", [nic("mlx5_0 port 1", "roce", 200)]),
    }


def judge(topology, facts, **more):
    return doctor.findings(
        topology, facts, **{"is_rehearsal": False, "needed_bytes": 10 * GIB, "streams": 4, **more}
    )


def test_nothing_is_wrong_with_good_nodes(topology, facts):
    found = judge(topology, facts)
    assert {finding.level for finding in found} == {"ok"}
    assert [finding.what for finding in found] == [
        "host names",
        "versions",
        "clocks",
        "open files",
        "long links",
        "MTU",
        "NICs of one subnet",
        "run folder",
        "locked memory",
        "GPUs",
        "NICs",
    ]


def test_a_run_folder_in_a_store_is_not_shared(topology, facts):
    apart = change("b-0", folder=FolderFacts(is_shared=False, free_bytes=100 * GIB))(facts)
    found = {finding.what: finding for finding in judge(topology, apart, url="s3://b/x")}
    assert found["run folder"].level == "ok"
    assert found["run folder"].text.startswith("on each node, for s3://b/x, writable")


def test_memory_that_goes_with_a_session_holds_no_copies(topology, facts, tmp_path):
    """Only where the run keeps copies there; the user of the system and one who lingers keep it."""
    losing = change("b-0", loses_memory=True)(facts)
    assert {finding.level for finding in judge(topology, losing)} == {"ok"}
    found = {finding.what: finding for finding in judge(topology, losing, has_partners=True)}
    assert (found["partner's memory"].level, "on b-0" in found["partner's memory"].text) == (
        "warning",
        True,
    )
    goes = functools.partial(shared_memory.goes_at_logout, linger=tmp_path, ask=lambda: "b true")
    user = max((user for user in pwd.getpwall()), key=lambda user: user.pw_uid)
    assert (goes(0), goes(999), goes(user.pw_uid)) == (False, False, True)
    assert not goes(user.pw_uid, ask=lambda: "b false")
    (tmp_path / user.pw_name).touch()
    assert not goes(user.pw_uid)


def change(node, **to):
    return lambda facts: {**facts, node: replace(facts[node], **to)}


# What is changed, the check that must notice, how bad it is, and words of what it says.
WRONG = {
    "loopback": (
        change("a-1", resolves_to="127.0.1.1"),
        ("host names", "warning", "host resolves to 127.0.1.1 on a-1"),
    ),
    "no name": (
        change("a-0", resolves_to=None),
        ("host names", "warning", "host resolves to nothing on a-0"),
    ),
    "python": (
        change("b-0", python="3.11"),
        ("versions", "problem", "Python: 3.12 on a-0, a-1; 3.11 on b-0"),
    ),
    "no package": (
        change("a-0", packages={"jax": "0.12.0", "numpy": None}),
        ("versions", "problem", "numpy: nothing on a-0; 2.4.0 on a-1, b-0"),
    ),
    "source": (
        change("a-0", source="fedcba9876543210"),
        ("versions", "problem", "fedcba9876543210 on a-0; 0123456789abcdef on a-1, b-0"),
    ),
    "driver": (
        change("a-0", drivers=["570.2"]),
        ("versions", "warning", "NVIDIA's driver: 570.2 on a-0; 580.1 on a-1, b-0"),
    ),
    "clock": (change("a-1", now_s=-3.25), ("clocks", "warning", "-3.2 s on a-1")),
    "files": (
        change("b-0", max_open_files=1024),
        ("open files", "warning", "at most 1024 on b-0"),
    ),
    "window": (
        change("b-0", max_window_bytes=65_536),
        ("long links", "warning", "4 connections carry 21 Gb/s of 25 Gb/s on b-0"),
    ),
    "memlock": (
        change("a-0", max_locked_bytes=8 * 2**20),
        ("locked memory", "problem", "at most 8 MiB on a-0"),
    ),
    "mtu": (
        change("b-0", mtu_bytes={"local": [65536], "ethernet": [9000]}),
        ("MTU", "warning", "ethernet: 1500 on a-0, a-1; 9000 on b-0"),
    ),
    "read-only": (
        change("a-0", folder=FolderFacts(problem="Read-only file system")),
        ("run folder", "problem", "cannot write there (Read-only file system) on a-0"),
    ),
    "not shared": (
        change("b-0", folder=FolderFacts(is_shared=False, free_bytes=100 * GIB)),
        ("run folder", "problem", "another folder than here on b-0"),
    ),
    "full": (
        change("b-0", folder=FolderFacts(is_shared=True, free_bytes=9 * GIB)),
        ("run folder", "problem", "9 GiB free, 10 GiB needed on b-0"),
    ),
    "a GPU less": (
        change("a-1", gpus=["NVIDIA H100 80GB HBM3"]),
        ("GPUs", "problem", "1 of 2 on a-1"),
    ),
    "another GPU": (
        change("b-0", gpus=["NVIDIA L4"] * 2),
        ("GPUs", "problem", "NVIDIA L4 for a100_80gb on b-0"),
    ),
    "a port down": (
        change("a-0", nics=[
            IB[0], nic("mlx5_1 port 1", None, None, "down"), nic("eth0", "ethernet", 25)
        ]),
        ("NICs", "problem", "1 of 2 infiniband NICs work (mlx5_1 port 1: down) on a-0"),
    ),
    "no NIC": (
        change("b-0", nics=[]),
        ("NICs", "problem", "0 of 1 roce NICs work (there are no others) on b-0"),
    ),
    "slow": (
        change("a-1", nics=[*IB, nic("eth0", "ethernet", 1)]),
        ("NICs", "problem", "eth0 1 Gb/s, where ethernet has 25 Gb/s on a-1"),
    ),
    "one of two slow": (
        change("a-1", nics=[
            IB[0], nic("mlx5_1 port 1", "infiniband", 100), nic("eth0", "ethernet", 25)
        ]),
        ("NICs", "problem", "mlx5_1 port 1 100 Gb/s, where infiniband has 400 Gb/s on a-1"),
    ),
    "other numbers": (
        change("a-1", nics=[
            nic("mlx5_2 port 1", "infiniband", 400),
            nic("mlx5_3 port 1", "infiniband", 400),
            nic("eth0", "ethernet", 25),
        ]),
        ("NIC names in a", "warning", "mlx5_2 port 1, mlx5_3 port 1 on a-1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "expected"), WRONG.values(), ids=WRONG)
def test_one_thing_wrong_is_one_finding(topology, facts, spoil, expected):
    what, level, text = expected
    [finding] = [one for one in judge(topology, spoil(facts)) if one.level != "ok"]
    assert (finding.what, finding.level) == (what, level)
    assert text in finding.text
    assert finding.fix
    assert f"fix: {finding.fix}" in str(finding)


def test_a_name_nobody_looks_for_may_lead_anywhere(topology, facts):
    facts["b-0"] = replace(facts["b-0"], resolves_to="127.0.1.1")  # alone in its cluster
    addresses = {"infiniband": ["127.16.0.1"]}
    facts["a-0"] = replace(facts["a-0"], resolves_to="127.0.1.1", addresses=addresses)
    assert {finding.level for finding in judge(topology, facts)} == {"ok"}


def test_gpus_that_nvidia_does_not_make_are_not_missed(tmp_path):
    """NVIDIA's driver, which is asked, knows none of them."""
    path = tmp_path / "amd.yaml"
    path.write_text(TOPOLOGY.replace("h100", "mi300x"))
    facts = {name: node("10.0.0.1", "", []) for name in ("a-0", "a-1")}
    facts = {name: replace(fact, gpus=[]) for name, fact in facts.items()}
    found = doctor._gpus(loading.load(path), facts)
    assert (found.level, "not looked at: mi300x" in found.text) == ("ok", True)


def test_a_rehearsal_has_no_gpus(topology, facts):
    facts = {node: replace(facts[node], gpus=[], nics=[], drivers=[]) for node in facts}
    assert {finding.level for finding in judge(topology, facts, is_rehearsal=True)} == {"ok"}
    assert any(finding.level == "problem" for finding in judge(topology, facts))


def test_kernels_that_fail_their_check_are_named_and_stop_nothing():
    passed = KernelFacts(problem=None, text="passed (driver 580.1)")
    failed = KernelFacts(problem="x", text="failed: x (driver 570.1)")
    found = doctor.kernels({"a": passed, "b": passed})
    assert (found.level, found.text) == ("ok", "passed (driver 580.1) on a, b")
    silent = NoAnswer(problem="could not check kernels", found="y")
    found = doctor.kernels({"a": passed, "b": failed, "c": silent})
    text = "failed: x (driver 570.1) on b; could not check kernels: y on c"
    assert (found.level, found.text) == ("warning", text)
    assert "install the versions" in found.fix
    late = KernelFacts(problem="y", text="not finished: y", has_ended=False)
    found = doctor.kernels({"a": passed, "b": late})
    assert (found.level, found.text) == ("warning", "not finished: y on b")
    assert "install" not in found.fix  # nothing is known to be wrong with the versions


def test_every_way_that_is_shut_is_named():
    found = doctor.reachability({("a", "b", "roce"): 0.01, ("b", "a", "roce"): "timed out"})
    assert [(f.level, f.text) for f in found] == [
        ("problem", "b does not reach a over roce: timed out")
    ]
    [good] = doctor.reachability({("a", "b", "roce"): 0.01, ("b", "a", "roce"): 0.025})
    assert good.text == "2 ways, all open; the slowest took 25 ms"


def test_ways_are_those_of_domains_and_of_neighbouring_stages():
    job = jobs.load(ROOT / "configs/runs/quickstart.yaml")
    across = {("ib-0", "roce-0", "ethernet"), ("ib-1", "roce-1", "ethernet")}
    inside = {("ib-0", "ib-1", "infiniband"), ("roce-0", "roce-1", "roce")}
    one_way = across | inside
    assert verb.ways(job) == one_way | {(b, a, fabric) for a, b, fabric in one_way}


@st.composite
def jobs_of_any_shape(draw):
    """Stages of some nodes each, of one cluster or two, with or without chunks and a tied table."""
    fabrics = draw(st.lists(st.sampled_from(["infiniband", "roce"]), min_size=1, max_size=3))
    clusters = [f"c{i}" for i in range(len(fabrics))]
    cluster = st.tuples(st.sampled_from(clusters), st.integers(1, 7))
    parts = draw(st.lists(st.lists(cluster, min_size=1, max_size=2), min_size=1, max_size=4))
    stages = [[f"{c}-{s}-{i}-{n}" for i, (c, count) in enumerate(part) for n in range(count)]
              for s, part in enumerate(parts)]  # fmt: skip
    homes = [*range(len(stages))] * draw(st.integers(1, 2))
    processes = [
        SimpleNamespace(node=node, cluster=node[:2], stage=s, rank=rank)
        for s, nodes in enumerate(stages)
        for node in nodes
        for rank in range(2)
    ]
    topology = SimpleNamespace(
        cluster_of=lambda node: SimpleNamespace(fabric=fabrics[int(node[1])]),
        links={
            (a, b): SimpleNamespace(fabric="ethernet", bandwidth_bytes_per_s=1.0)
            for a in clusters
            for b in clusters
        },
    )
    return processes, topology, homes, draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(jobs_of_any_shape())
def test_ways_cover_every_node_fabric_and_direction_and_grow_with_the_nodes(shape):
    """Against all pairs of processes that may talk."""
    processes, topology, homes, is_tied = shape
    pipeline = SimpleNamespace(chunks=[(home, ()) for home in homes], stages=[])
    job = SimpleNamespace(
        topology=topology,
        plan=SimpleNamespace(pipelines=[pipeline]),
        config=SimpleNamespace(
            distributed=SimpleNamespace(processes="node"),
            model=SimpleNamespace(tied_embeddings=is_tied),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "make_processes", lambda *_: processes)
        found = verb.ways(job)
    talk = {(a, b) for a, b in itertools.pairwise(homes)} | {(h, h) for h in homes}
    talk |= {(homes[0], homes[-1])} if is_tied else set()
    every = set()
    for a, b in itertools.product(processes, processes):
        if a.node != b.node and {(a.stage, b.stage), (b.stage, a.stage)} & talk:
            domain = [p for p in processes if p.stage == a.stage]
            inside = domain_fabric(topology, domain)
            fabric = inside if a.stage == b.stage else fabric_between(topology, a, b)
            every.add((a.node, b.node, fabric))
    assert found <= every
    for end in (0, 1):
        assert {(way[end], way[2]) for way in found} == {(way[end], way[2]) for way in every}
    num_nodes = len({p.node for p in processes})
    assert len(found) <= num_nodes * 2 * (1 + 2 * 4)  # a ring, and neighbours of two clusters


@given(st.integers(1, 9), st.integers(1, 9))
def test_pairs_cover_both_sides(a, b):
    pairs = verb.paired(range(a), range(b))
    assert [{pair[end] for pair in pairs} for end in (0, 1)] == [{*range(a)}, {*range(b)}]
    assert len(pairs) == max(a, b)


def test_a_stage_over_clusters_talks_over_what_joins_them():
    settings = ["parallel.clusters=null", "parallel.data=8", "parallel.tensor=1"]
    job = jobs.load(ROOT / "configs/runs/quickstart.yaml", [*settings, "parallel.microbatches=2"])
    ways = verb.ways(job)
    assert len(ways) == 8  # a ring of four, both ways
    assert {fabric for *_, fabric in ways} == {"ethernet"}


def run_doctor(capsys, *overrides):
    return run_launch_here(capsys, "doctor", "configs/runs/quickstart.yaml", *overrides)


def test_nodes_of_this_machine_are_well(tmp_path, capsys):
    cpus = (ROOT / "configs/topologies/ib_roce.yaml").read_text()
    (tmp_path / "gpus.yaml").write_text(cpus.replace("kind: cpu", "kind: h100"))
    done = run_doctor(capsys, f"run.dir={tmp_path}/run", f"topology={tmp_path}/gpus.yaml")
    assert done.returncode == 0, done.stderr
    assert "8 ways, all open" in done.stdout
    assert "attention kernels: none to check: the run does not use them here" in done.stdout
    assert "no problems" in done.stdout
    assert list((tmp_path / "run").iterdir()) == []


NO_PYTHON_ON_ROCE_1 = """
import os
if os.environ.get("HOLMES_PROCESS") == "3":
    print("broken", flush=True)
    os._exit(1)
"""


def test_a_taken_port_and_a_node_that_does_not_start_are_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(NO_PYTHON_ON_ROCE_1)
    with socket.create_server(("127.32.1.1", 0)) as taken:  # ib-0's address on InfiniBand
        port = taken.getsockname()[1]
        done = run_doctor(capsys, f"run.dir={tmp_path}/run", f"distributed.port={port}")
    assert (done.returncode, done.stderr) == (1, "")
    assert "no process on roce-1: ended with status 1; broken" in done.stdout
    assert f"distributed.port: 127.32.1.1:{port} on ib-0: Address already in use" in done.stdout
    assert "2 problems;" in done.stdout


def test_a_port_of_the_launcher_that_is_taken_leaves_no_key_behind(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--launcher", "external", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        for verb in ("doctor", "train"):
            run = [verb, "configs/runs/quickstart.yaml", f"run.dir={tmp_path}/run"]
            done = run_launch_here(capsys, *run, *words)
            assert done.returncode == 2, done
            assert "cannot listen here" in done.stderr
    assert list((tmp_path / "run").glob("*.key")) == []


@pytest.mark.parametrize(
    "gb_per_s, ms, window_mib, needed",
    [
        (10, 30, 2.66, None),  # 27 connections of two thirds of 4 MiB
        (10, 30, 2, "2.65 MiB needed: 27 connections carry 7.55 Gb/s of 10 Gb/s"),
        (1, 25, 0.5, "1.49 MiB needed: 4 connections carry 336 Mb/s of 1 Gb/s"),  # a run's own
        (100, 30, 4, "22.4 MiB needed: 32 connections"),  # no more
        (100, 30, 23, None),
    ],
)
def test_windows_are_compared_with_what_fills_the_longest_link(
    tmp_path, facts, gb_per_s, ms, window_mib, needed
):
    """750 MB fill 100 Gb/s with a round trip of 60 ms."""
    path = tmp_path / "far.yaml"
    path.write_text(
        TOPOLOGY.replace("25 Gb/s, latency: 50 us", f"{gb_per_s} Gb/s, latency: {ms} ms")
    )
    facts = {
        name: replace(fact, max_window_bytes=int(window_mib * 2**20))
        for name, fact in facts.items()
    }
    found = judge(loading.load(path), facts)
    [finding] = [finding for finding in found if finding.what == "long links"]
    assert (finding.level == "ok") == (needed is None)
    if needed:
        assert needed in finding.text
        largest = int(re.search(r"net.ipv4.tcp_rmem='4096 131072 (\d+)'", finding.fix)[1])
        facts = {n: replace(f, max_window_bytes=2 * largest // 3) for n, f in facts.items()}
        assert {f.level for f in judge(loading.load(path), facts)} == {"ok"}
