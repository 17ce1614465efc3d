"""No plan is faster than the one that is found: all are tried, one after the other."""

import dataclasses
import itertools
import math
import random

import pytest

from holmesjax.errors import PlanError
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.planner import planner, search as searches, shortlist
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.candidates import schedule_kinds
from holmesjax.planner.exhaustive import ExhaustiveSearch
from holmesjax.planner.offers import make_offers
from holmesjax.planner.planner import find, make_plan, timed_again
from holmesjax.planner.recomputation import refined
from holmesjax.planner.search import search
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_layouts import MeshShape, StepSettings
from holmesjax.planner.step_time import step_seconds
from holmesjax.planner.trials import Trials
from holmesjax.schedules.pipeline_schedules import TaskOrder
from holmesjax.topology import upgrades
from tests.clusters import compositions, make_cluster, make_config, make_topology, with_uplinks
from tests.layer_kinds import DEAR
from tests.planner.every_plan import least_step_s


def one_node_clusters(*speeds, devices=4, memory_gib=80.0, **link):
    fabrics = itertools.cycle(["infiniband", "roce"])
    clusters = [
        make_cluster(f"c{i}", next(fabrics), (devices,), speed=speed, memory_gib=memory_gib)
        for i, speed in enumerate(speeds)
    ]
    return make_topology(*clusters, **link)


def two_nodes_each(devices, **link):
    clusters = [
        make_cluster("ib", "infiniband", (devices,) * 2),
        make_cluster("roce", "roce", (devices,) * 2, speed=0.7),
    ]
    return make_topology(*clusters, **link)


FREE = {}
SMALL = {"num_layers": 4, "width": 1024, "num_heads": 4, "vocab_size": 32000}
CASES = {
    "two equal clusters": (one_node_clusters(1.0, 1.0, devices=2), SMALL, FREE, 4),
    # With a small head the bounds, which leave it out, are near the best plans.
    "a slow one": (one_node_clusters(1.0, 0.3, devices=2), SMALL | {"vocab_size": 256}, FREE, 4),
    "slow Ethernet": (
        one_node_clusters(1.0, 0.8, devices=2, ethernet_bytes_per_s=2e8), SMALL, FREE, 4
    ),
    "little memory": (
        one_node_clusters(1.0, 0.8, devices=2, memory_gib=0.7), SMALL, FREE, 4
    ),
    "one cluster": (one_node_clusters(1.0, devices=4), SMALL, FREE, 4),
    "1F1B on eight devices": (
        one_node_clusters(1.0, 0.6, devices=4),
        SMALL | {"num_layers": 6},
        {"schedule": "1f1b", "activation_checkpointing": "none"},
        8,
    ),
    "long sequences": (
        one_node_clusters(1.0, 0.6, devices=4, memory_gib=1.6),
        SMALL | {"context_length": 16384},
        {"schedule": "1f1b"},
        2,
    ),
    "three clusters": (
        one_node_clusters(1.0, 0.7, 0.5, devices=2),
        SMALL | {"num_layers": 5},
        {"schedule": "1f1b", "activation_checkpointing": "none", "fsdp": 1},
        4,
    ),
    "two nodes each": (two_nodes_each(2), SMALL, {"schedule": "1f1b"}, 4),
    # Whichever cluster is between the others sends to both over the uplink of its own.
    "uplinks": (
        with_uplinks(one_node_clusters(1.0, 0.7, 0.5, devices=1, ethernet_bytes_per_s=1e9), 1.2e9),
        SMALL | {"num_layers": 5},
        {"stages": 3},
        4,
    ),
}  # fmt: skip


@pytest.fixture
def all_or_none(monkeypatch):
    """Searches find plans in which all layers of a stage compute again, or none."""
    by_time = lambda _, found: sorted(found, key=lambda candidate: candidate.step_s)
    monkeypatch.setattr(searches, "refined", by_time)


@pytest.mark.usefixtures("all_or_none")
@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_faster(name):
    topology, model, parallel, batch = CASES[name]
    config = make_config(model=model, parallel=parallel, train={"global_batch": batch})
    problem, found = find(config, topology)
    least_of = {}
    best_s, num_tried = least_step_s(config, topology, least_of=least_of)
    assert num_tried > 1000
    best = found.best[0]
    assert best.step_s == pytest.approx(best_s, rel=1e-9)
    fewer = refined(problem, found.best)[0]
    assert (fewer.step_s < best.step_s) == (name == "little memory")
    assert fewer.step_s <= best.step_s
    queues = problem.queues(best.assignment, best.settings, best.order.chunks)
    assert bool(queues) == bool(topology.uplinks)
    assert found.bound_s <= best_s * (1 + 1e-9)
    for step in shortlist.step_settings(
        config
    ):  # none is left out because of a bound that is too high
        least_s = least_of.get((step.microbatches, step.checkpointing), math.inf)
        assert shortlist.rough_bound_s(problem, step) <= least_s * (1 + 1e-9)
        bound_s = shortlist.bound_s(problem, step, make_offers(problem, step))
        assert bound_s <= least_s * (1 + 1e-9)


# So that pipelines over several clusters pay.
FAST = {"ethernet_bytes_per_s": 2e10, "transport_bytes_per_s": 2e10}
LONG = {"width": 512, "context_length": 4096, "window": 512}
WINDOWS = LONG | {"num_layers": 7, "pattern": ("window_block", "block")}
OF_SEVERAL_KINDS = {
    "windows in turns": (
        one_node_clusters(1.0, 0.7, devices=2, **FAST),
        WINDOWS | {"num_layers": 5},
        {"schedule": "1f1b", "tensor": 1},
    ),
    "dear at the end, little memory": (
        one_node_clusters(1.0, 0.6, devices=2, memory_gib=1.2, **FAST),
        {"num_layers": 5, "pattern": (*["block"] * 4, DEAR)},
        {"schedule": "1f1b"},
    ),
    "split backwards": (
        one_node_clusters(1.0, 0.8, devices=2, **FAST),
        {"num_layers": 6, "pattern": (DEAR, *["block"] * 5)},
        {"schedule": "zero_bubble", "tensor": 1},
    ),
    "three kinds": (
        one_node_clusters(1.0, 0.7, 0.4, devices=1, **FAST),
        LONG | {"num_layers": 8, "pattern": ("window_block", "window_block", DEAR, "block")},
        {"schedule": "1f1b", "activation_checkpointing": "none"},
    ),
    "split as the config says": (
        one_node_clusters(1.0, 0.8, devices=2, **FAST),
        {"num_layers": 6, "pattern": (DEAR, *["block"] * 5)},
        {"layers": (4, 2), "activation_checkpointing": "none"},
    ),
    "chunks": (
        one_node_clusters(1.0, 0.8, devices=1, **FAST),
        {"num_layers": 9, "pattern": (DEAR, *["block"] * 7, DEAR)},
        {"schedule": "interleaved_1f1b"},
    ),
    "every schedule, windows": (one_node_clusters(1.0, 0.7, 0.5, devices=1, **FAST), WINDOWS, FREE),
    "every schedule, dear at the start": (
        one_node_clusters(1.0, 0.7, 0.5, devices=1, **FAST),
        {"num_layers": 6, "pattern": (DEAR, *["block"] * 5)},
        FREE,
    ),
    "every schedule and mesh, little memory": (
        one_node_clusters(1.0, 0.6, devices=2, memory_gib=1.5, ethernet_bytes_per_s=2e10),
        {"num_layers": 5, "pattern": (*["block"] * 4, DEAR)},
        FREE,
    ),
    "every schedule and mesh, slow Ethernet": (
        one_node_clusters(1.0, 0.5, devices=2, ethernet_bytes_per_s=2e9),
        WINDOWS | {"num_layers": 6},
        FREE,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if "every" in name else name
        for name in OF_SEVERAL_KINDS
    ],
)
def test_no_plan_of_layers_of_several_kinds_is_faster(name):
    """All contiguous partitions are tried, on all meshes, under the schedules that are allowed."""
    topology, model, parallel = OF_SEVERAL_KINDS[name]
    model = SMALL | {"vocab_size": 256} | model
    config = make_config(model=model, parallel=parallel, train={"global_batch": 4})
    problem, found = find(config, topology)
    least_of = {}
    best_s, num_tried = least_step_s(config, topology, least_of=least_of)
    assert num_tried > 50
    assert found.best[0].step_s == pytest.approx(best_s, rel=1e-9)
    assert found.bound_s <= best_s * (1 + 1e-9)
    for step in shortlist.step_settings(config):
        least_s = least_of.get((step.microbatches, step.checkpointing), math.inf)
        assert shortlist.rough_bound_s(problem, step) <= least_s * (1 + 1e-9)
        bound_s = shortlist.bound_s(problem, step, make_offers(problem, step))
        assert bound_s <= least_s * (1 + 1e-9)


SIX = ["block"] * 6
LITTLE = {  # and so much memory, GiB, that some splits have room and others have not
    "no dear layer": (SIX, 1.0),
    "at the start": ([DEAR, *SIX[1:]], 1.7),
    "at the end": ([*SIX[1:], DEAR], 1.7),
}


@pytest.mark.parametrize("where", LITTLE)
def test_every_split_for_which_there_is_memory_is_looked_at(where):
    """A stage that holds a dear layer has room for fewer others, wherever in the model it is."""
    pattern, memory_gib = LITTLE[where]
    topology = one_node_clusters(1.0, 0.6, 0.8, devices=1, memory_gib=memory_gib)
    model = SMALL | {"num_layers": 6, "vocab_size": 256, "pattern": tuple(pattern)}
    config = make_config(model=model, parallel={"schedule": "1f1b"}, train={"global_batch": 4})
    problem = make_problem(config, topology)
    settings, order = StepSettings(4, "none"), TaskOrder("1f1b", 3, 4)
    [kind] = schedule_kinds(problem, settings)
    segments = tuple(Segment(pool, MeshShape(1, 1, 1), 1) for pool in range(3))
    search_all = ExhaustiveSearch(Trials(problem, math.inf))
    found = {split.layers for split in search_all._splits(segments, settings, kind)}
    tried = [Assignment(segments, layers) for layers in compositions(6, 3)]
    seconds = step_seconds(problem, tried, settings, order)
    assert found == {
        assignment.layers for assignment, s in zip(tried, seconds, strict=True) if s < math.inf
    }
    assert 0 < len(found) < len(tried)


SIXTEEN = {
    "two unlike": one_node_clusters(1.0, 0.6, devices=8, **FAST),
    "little memory": one_node_clusters(1.0, 0.8, devices=8, memory_gib=1.0, **FAST),
    "two nodes each": two_nodes_each(4, **FAST),
    "four": one_node_clusters(1.0, 0.8, 0.6, 0.4, devices=4, **FAST),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "two nodes each" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in SIXTEEN  # "four" takes half an hour, the others seconds
    ],
)
def test_no_plan_for_sixteen_devices_is_faster(name):
    """All are tried, but for those that take longer by a bound.

    And but for eager 1F1B with several microbatches in flight on the last stage.
    """
    model = SMALL | {"num_layers": 12, "num_heads": 8}
    config = make_config(model=model, parallel=FREE, train={"global_batch": 32})
    found_s = find(config, SIXTEEN[name])[1].best[0].step_s
    best_s, num_tried = least_step_s(config, SIXTEEN[name], found_s * (1 + 1e-9), most_at_end=1)
    assert num_tried > 100
    assert best_s == pytest.approx(found_s, rel=1e-9)


# ---- an end ----------------------------------------------------------------------------------


def test_where_nothing_fits_the_effort_is_bounded_too(monkeypatch):
    """The parameters alone would fit, and no proof that nothing does is short."""
    config = make_config(
        model=SMALL | {"num_layers": 24}, parallel=FREE, train={"global_batch": 32}
    )
    problem = make_problem(config, one_node_clusters(1.0, 0.8, 0.6, devices=4, memory_gib=0.66))
    spent = []
    spend = Trials.spend
    monkeypatch.setattr(
        Trials, "spend", lambda self, effort: (spent.append(effort), spend(self, effort))
    )
    assert search(problem, effort=2e4) is None
    assert 0 < sum(spent) < 1e5


# ---- what must hold of the best ------------------------------------------------------------------


def best_s(topology, batch=4, **sizes):
    config = make_config(model=SMALL | sizes, parallel=FREE, train={"global_batch": batch})
    return find(config, topology)[1].best[0].step_s


BASE = {"devices": 2, "ethernet_bytes_per_s": 1e9}


def some_machines(rng):
    """One to three clusters, of one to three nodes each."""
    clusters = [
        make_cluster(
            f"c{i}",
            rng.choice(["infiniband", "roce", "ethernet"]),
            (rng.choice([1, 2, 4]),) * rng.choice([1, 1, 2, 3]),
            speed=round(rng.uniform(0.2, 1.0), 2),
            memory_gib=rng.choice([1.0, 1.5, 2.5, 6.0, 80.0]),
        )
        for i in range(rng.choice([1, 2, 2, 3]))
    ]
    ethernet, transport = 10 ** rng.uniform(8, 10.5), rng.choice([None, 3e9, 2e10])
    return make_topology(*clusters, ethernet_bytes_per_s=ethernet, transport_bytes_per_s=transport)


def better_machines(rng, topology):
    """Each with one thing faster, or more of it."""
    factor = rng.choice([1.02, 1.1, 1.5, 2.0, 3.0])
    for cluster in topology.clusters:
        name, kind = cluster.name, cluster.nodes[0].device.name
        yield f"devices of {name}", upgrades.faster_devices(topology, name, kind, factor)
        yield f"network of {name}", upgrades.faster_fabric(topology, name, factor)
        yield f"node in {name}", upgrades.with_more_nodes(topology, name)
        more = [
            dataclasses.replace(
                node,
                device=dataclasses.replace(
                    node.device, memory_bytes=factor * node.device.memory_bytes
                ),
            )
            for node in cluster.nodes
        ]
        changed = dataclasses.replace(cluster, nodes=tuple(more))
        others = [changed if c is cluster else c for c in topology.clusters]
        yield f"memory of {name}", dataclasses.replace(topology, clusters=tuple(others))
    for pair in itertools.combinations([cluster.name for cluster in topology.clusters], 2):
        yield f"link {pair}", upgrades.faster_link(topology, pair, factor)
    yield "transport", upgrades.faster_transport(topology, factor)


def test_better_machines_never_make_the_best_plan_slower():
    rng, num_tried = random.Random(0), 0
    while num_tried < 9:
        topology = some_machines(rng)
        model = SMALL | {"num_layers": rng.choice([2, 4]), "width": rng.choice([512, 1024])}
        parallel = rng.choice([FREE, {"schedule": "1f1b"}])
        train = {"global_batch": rng.choice([2, 4])}
        config = make_config(model=model, parallel=parallel, train=train)
        try:
            problem, found = find(config, topology)
        except PlanError:
            continue
        for what, better in rng.sample([*better_machines(rng, topology)], 3):
            num_tried += 1
            best = find(config, better)[1].best[0]
            assert best.step_s <= found.best[0].step_s * (1 + 1e-9), (what, topology)
            # What was found before is there again, and no slower either.
            again = timed_again(problem, found, better)[1]
            assert again.step_s <= found.best[0].step_s * (1 + 1e-9), (what, topology)


def test_what_if_starts_from_the_plan_that_it_compares_with(monkeypatch):
    """However little the search on the better machines finds."""
    topology = one_node_clusters(1.0, 0.7, **BASE)
    better = upgrades.faster_link(topology, ("c0", "c1"), 2.0)
    config = make_config(model=SMALL, parallel=FREE, train={"global_batch": 4})
    before_s = make_plan(config, topology).step_time_s

    def find_badly(config, machines, say, usable_memory):
        problem, found = find(config, machines, usable_memory=usable_memory)
        if machines is better:
            found = dataclasses.replace(found, best=found.best[-1:])
        return problem, found

    monkeypatch.setattr(planner, "find", find_badly)
    assert find_badly(config, better, None, USABLE_MEMORY)[1].best[0].step_s > before_s
    assert planner.make_changed_plan(config, topology, better).step_time_s <= before_s * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [(1.0, 0.4), (0.7, 0.6, 0.5)], ids=str)
def test_without_a_cluster_the_best_plan_is_no_faster(speeds):
    topology = one_node_clusters(*speeds, **BASE)
    now_s = best_s(topology)
    for cluster in topology.clusters:
        rest = [other for other in topology.clusters if other is not cluster]
        fewer = make_topology(*rest, ethernet_bytes_per_s=BASE["ethernet_bytes_per_s"])
        assert best_s(fewer) >= now_s * (1 - 1e-9)


def test_names_and_the_order_of_clusters_change_nothing():
    topology = one_node_clusters(1.0, 0.7, 0.5, **BASE)
    now_s = best_s(topology)
    for clusters in itertools.permutations(topology.clusters):
        renamed = [
            dataclasses.replace(
                cluster,
                name=f"x{i}",
                nodes=tuple(dataclasses.replace(n, name=f"y-{i}") for n in cluster.nodes),
            )
            for i, cluster in enumerate(clusters)
        ]
        again = make_topology(*renamed, ethernet_bytes_per_s=BASE["ethernet_bytes_per_s"])
        assert best_s(again) == pytest.approx(now_s, rel=1e-12)


def test_the_same_input_gives_the_same_plan():
    config = make_config(model=SMALL, parallel=FREE, train={"global_batch": 4})
    topology = one_node_clusters(1.0, 0.7, devices=2)
    assert make_plan(config, topology).to_json() == make_plan(config, topology).to_json()
