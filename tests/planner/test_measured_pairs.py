"""Measured pairs between clusters: a plan by few look-ups is that by all of them."""

import dataclasses
import math
from collections import Counter

import pytest

from holmesjax.planner import mesh_order
from holmesjax.planner.mesh_order import Paths
from holmesjax.planner.node_paths import NodePaths
from holmesjax.planner.planner import make_plan
from holmesjax.topology.machines import Link, Measured, Topology
from tests.clusters import make_cluster, make_config, make_topology

NUM_NODES = 8


def probed(*, inside=()):
    """Two clusters as `launch probe` leaves them: two pairs between them were measured."""
    topology = make_topology(
        make_cluster("ib", "infiniband", (2,) * NUM_NODES),
        make_cluster("roce", "roce", (2,) * NUM_NODES, speed=0.5),
    )
    ways = [(f"ib-{i}", f"roce-{i}") for i in (1, 3)]
    pairs = {
        pair: Link(fabric=fabric, bandwidth_bytes_per_s=(1 + i) * 1e9, latency_s=1e-4 * (1 + i))
        for i, (pair, fabric) in enumerate(
            [(way, "ethernet") for a, b in ways for way in ((a, b), (b, a))]
            + [(pair, "infiniband") for pair in inside]
        )
    }
    return dataclasses.replace(topology, measured=Measured(date="2026-01-01", pairs=pairs))


def slowly(monkeypatch):
    """Every pair of nodes is looked up, and every stage is placed by itself."""
    monkeypatch.setattr(NodePaths, "_two_of_each", lambda self, names, named: list(names))
    between = Paths.between.__func__
    slow = lambda cls, *args: dataclasses.replace(between(cls, *args), is_uniform=False)
    monkeypatch.setattr(Paths, "between", classmethod(slow))


@pytest.fixture
def calls(monkeypatch):
    """How often links are looked up for boundaries, and the groups of an axis are walked."""
    counts = Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def counted(*args):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, counted)

    count(Topology, "boundary_link")
    count(mesh_order, "_slowest")
    return counts


@pytest.mark.parametrize("inside", [(), [("ib-0", "ib-5"), ("ib-2", "ib-7")]])
def test_paths_by_few_nodes_are_those_by_all(calls, monkeypatch, inside):
    nodes = {name: [f"{name}-{i}" for i in range(NUM_NODES)] for name in ("ib", "roce")}
    ends = [
        (nodes["ib"], nodes["roce"]),
        (nodes["roce"], nodes["ib"]),
        (nodes["ib"][:4], nodes["ib"][4:]),
        (nodes["roce"][:4], nodes["roce"][4:]),
        (nodes["ib"][4:], nodes["roce"][4:]),
    ]
    paths = NodePaths(probed(inside=inside))
    quick = [paths.path(*pair, 8) for pair in ends]
    few = calls["boundary_link"]
    assert few <= 5 * (2 + 2 + len(inside)) ** 2
    slowly(monkeypatch)
    assert quick == [paths.path(*pair, 8) for pair in ends]
    assert calls["boundary_link"] - few == 2 * NUM_NODES**2 + 3 * (NUM_NODES // 2) ** 2


def test_clusters_without_measured_pairs_of_their_own_are_uniform():
    topology = probed(inside=[("ib-0", "ib-5")])
    names = {cluster.name: [node.name for node in cluster.nodes] for cluster in topology.clusters}
    uniform = {name: Paths.between(topology, nodes).is_uniform for name, nodes in names.items()}
    assert uniform == {"ib": False, "roce": True}
    assert Paths.between(topology, names["ib"][1:]).is_uniform  # ib-0 is not among them


def test_a_plan_of_probed_clusters_is_the_same_by_few_looks(calls, monkeypatch):
    config = make_config(
        parallel={
            "stages": 4,
            "microbatches": 8,
            "schedule": "1f1b",
            "activation_checkpointing": "none",
            "tensor": 2,
        }
    )
    quick = make_plan(config, probed())
    few = Counter(calls)
    slowly(monkeypatch)
    slow = make_plan(config, probed())
    assert quick == slow
    for name in few:
        assert 2 * few[name] < calls[name] - few[name], (name, few, calls)


def test_pairs_that_were_not_measured_are_as_their_data_sheets():
    """The first pair of two kinds of node was measured, and says nothing of the others."""
    topology = probed(inside=[("ib-0", "ib-1")])
    names = [node.name for node in topology.nodes]
    speed = lambda a, b: topology.effective_link(a, b).bandwidth_bytes_per_s
    paths = Paths.between(topology, names)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            s_per_byte = max(1 / speed(*way) for way in ((a, b), (b, a), (a, a), (b, b)))
            assert math.isclose(paths.s_per_byte[i, j], s_per_byte, rel_tol=1e-12), (a, b)
