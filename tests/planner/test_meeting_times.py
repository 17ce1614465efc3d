"""Seconds and dollars of meetings, worked by hand from the rates of nodes and of capacities."""

import dataclasses

import pytest

from holmesjax.config import OuterConfig, PlanConfig
from holmesjax.errors import Mistakes, PlanError
from holmesjax.plan.outer_rule import owners, trained_sizes
from holmesjax.planner import across
from holmesjax.planner.planner import make_plan
from holmesjax.topology.fabrics import FABRICS
from tests.clusters import make_cluster, make_config, make_topology

RATE = 1e7  # bytes per second of each node to another cluster, before the share that TCP gets
REACHED = RATE * FABRICS["ethernet"].reached
LATENCY_S = 1e-4
SMALL = {"num_layers": 2, "width": 64, "num_heads": 4, "vocab_size": 1024, "context_length": 64}
PINNED = {"tensor": 1, "fsdp": 1, "microbatches": 1, "schedule": "1f1b"}


def island_run(topology, batch=32, **parallel):
    config = make_config(
        model=SMALL,
        train={"global_batch": batch, "steps": 20, "compute_dtype": "float32"},
        parallel={**PINNED, "across": "local_updates", "every": 10, **parallel},
    )
    return config, make_plan(config, topology)


def clusters(names, nodes):
    return [make_cluster(name, "infiniband", (2,) * nodes) for name in names]


def bytes_of(config, count):
    """The bytes that islands send to the owners: of each island, all but what it owns."""
    sizes = trained_sizes(config.model)
    owner = owners(sizes, count)
    owned = [sum(n for name, n in sizes.items() if owner[name] == k) for k in range(count)]
    return 4 * sum(sizes.values()), [4 * n for n in owned]


def test_each_node_of_an_island_sends_its_part():
    """Two islands of one stage: each of four nodes has a quarter of all that crosses."""
    for nodes in (1, 4):
        topology = make_topology(*clusters("ab", nodes), ethernet_bytes_per_s=RATE)
        config, plan = island_run(topology, stages=1, data=2 * nodes)
        assert {len(stage.nodes) for stage in plan.stages} == {nodes}
        _, owned = bytes_of(config, 2)
        way_s = max(owned) / nodes / REACHED + LATENCY_S  # there, and as long back
        assert plan.meeting.seconds == pytest.approx(2 * way_s)


def test_stages_of_an_island_send_their_own_layers_at_once():
    """Two nodes, a stage each: a way takes as long as the stage with more to send."""
    topology = make_topology(*clusters("ab", 2), ethernet_bytes_per_s=RATE)
    config, plan = island_run(topology, stages=2, layers=(1, 1), data=2)
    sizes, owner = trained_sizes(config.model), owners(trained_sizes(config.model), 2)
    first = ("embed", "block_000")
    part = lambda k, is_first: sum(
        4 * n
        for name, n in sizes.items()
        if owner[name] == k and (name.partition(".")[0] in first) == is_first
    )
    most = max(part(k, is_first) for k in range(2) for is_first in (True, False))
    assert plan.meeting.seconds == pytest.approx(2 * (most / REACHED + LATENCY_S))


@pytest.mark.parametrize("rule", ["nesterov", "noloco"])
def test_islands_share_an_uplink_between_continents(rule):
    """Two islands on each side. To the owners: what each side has sent of the other's numbers."""
    uplink = {(a, b) for a in "ab" for b in "cd"}
    topology = make_topology(*clusters("abcd", 1), ethernet_bytes_per_s=RATE)
    ways = tuple(sorted(uplink)), tuple(sorted((b, a) for a, b in uplink))
    topology = dataclasses.replace(topology, uplinks=dict.fromkeys(ways, RATE / 10))
    outer = OuterConfig(rule=rule, momentum=0.5 if rule == "noloco" else None)
    config, plan = island_run(topology, stages=1, outer=outer)
    whole, owned = bytes_of(config, 4)
    if rule == "noloco":  # two pairs at once over it, with differences and slow weights
        way_s = 2 * 2 * whole / (REACHED / 10) + LATENCY_S
        assert plan.meeting.seconds == pytest.approx(way_s)
        return
    sides = [owned[0] + owned[1], owned[2] + owned[3]]
    there_s = 2 * max(sides) / (REACHED / 10) + LATENCY_S
    assert plan.meeting.seconds == pytest.approx(2 * there_s)


def test_the_price_of_a_step_is_that_of_all_islands_and_their_meetings():
    """The second cluster is slower: the first waits for it, and is rented meanwhile."""
    made = [make_cluster("a", "infiniband", (2,)), make_cluster("b", "infiniband", (2,), speed=0.5)]

    def rented(cluster, dollars):
        device = cluster.nodes[0].device
        device = dataclasses.replace(device, price_dollars_per_h=dollars)
        nodes = tuple(dataclasses.replace(node, device=device) for node in cluster.nodes)
        return dataclasses.replace(cluster, nodes=nodes)

    priced = [rented(cluster, dollars) for cluster, dollars in zip(made, (3.0, 1.0), strict=True)]
    topology = make_topology(*priced, ethernet_bytes_per_s=RATE)
    links = {
        way: dataclasses.replace(link, egress_dollars_per_gb=0.1 if way[0] == "a" else 0.0)
        for way, link in topology.links.items()
    }
    topology = dataclasses.replace(topology, links=links)
    config, plan = island_run(topology, stages=1)
    assert plan.step_dollars["nodes"] == pytest.approx(2 * (3.0 + 1.0) * plan.step_time_s / 3600)
    whole, _ = bytes_of(config, 2)  # there and back, the first sends as much as all numbers have
    assert plan.step_dollars["egress"] == pytest.approx(0.1 * whole / 1e9 / 10)
    with pytest.raises(Mistakes, match=r"parallel\.across.*beside an objective"):
        dataclasses.replace(config, plan=PlanConfig(budget_dollars=1000.0))


def test_a_schedule_that_computes_nothing_again_may_have_islands():
    topology = make_topology(*clusters("ab", 2), ethernet_bytes_per_s=RATE)
    _, plan = island_run(topology, stages=2, data=2, microbatches=2, schedule="zero_bubble")
    assert {island.schedule for island in plan.islands} == {"zero_bubble"}


def test_memory_of_meetings_lies_over_devices_as_parameters_do():
    """Three replicas do not divide a width of 64: each has all that its island owns."""
    topology = make_topology(
        make_cluster("a", "infiniband", (3,)), make_cluster("b", "infiniband", (3,))
    )
    config, plan = island_run(topology, batch=6, stages=1, data=3)
    whole, owned = bytes_of(config, 2)
    for k, island in enumerate(plan.islands):
        [stage] = island.stages
        assert stage.memory_bytes["parameters"] == whole
        assert stage.memory_bytes["outer"] == pytest.approx(2 * owned[k])


def test_more_islands_than_sequences_are_refused():
    config, _ = island_run(make_topology(*clusters("ab", 1)), batch=2)
    topology = make_topology(*clusters("abcd", 1), ethernet_bytes_per_s=RATE)
    alone = lambda own, machines: make_plan(own, machines, remedies=False)
    parallel = dataclasses.replace(config.parallel, islands=None, shares=(1, 1, 1, 1))
    many = dataclasses.replace(config, parallel=parallel)
    with pytest.raises(PlanError, match="a sequence for each island"):
        make_plan(many, topology)
    assert across._least_alone_s(config, topology, (("a", "b"), ("c",), ("d",)), alone) == 0.0
