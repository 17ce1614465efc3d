"""A link whose nodes share its capacity: times against closed forms and a simulation of events."""

import dataclasses
import math

import pytest

from holmesjax.plan.plan import Plan
from holmesjax.plan.plan_description import describe
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.explain import explain
from holmesjax.planner.mesh_order import place
from holmesjax.planner.planner import make_plan
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_layouts import MeshShape, StepSettings, joined_pool
from holmesjax.topology import upgrades
from holmesjax.topology.fabrics import FABRICS
from tests.clusters import chosen_plan, make_cluster, make_config, make_topology, two_clusters

MESSAGES_GET = FABRICS["ethernet"].reached
LATENCY_S, RATE = 1e-4, 3e9  # of the link between two nodes, as `make_topology` has it


def with_pipes(topology, capacity):
    """Every link between clusters with a capacity, in bytes per second each way."""
    links = {
        way: dataclasses.replace(link, capacity_bytes_per_s=capacity)
        for way, link in topology.links.items()
    }
    return dataclasses.replace(topology, links=links)


def two_stages(capacity, nodes=2, **config):
    clusters = [
        make_cluster(name, fabric, (8,) * nodes)
        for name, fabric in (("ib", "infiniband"), ("roce", "roce"))
    ]
    topology = with_pipes(make_topology(*clusters), capacity)
    parts = [(name, (nodes, 1, 8), 1) for name in ("ib", "roce")]
    return chosen_plan(make_config(**config), topology, *parts)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("capacity", [0.5e9, 3e9, 5e9, 9e9, math.inf])
def test_one_boundary_alone_has_what_its_nodes_send_or_the_capacity(nodes, capacity):
    plan = two_stages(capacity, nodes, train={"global_batch": 48})
    rate = MESSAGES_GET * min(nodes * RATE, capacity)
    there_s, back_s = plan.stages[0].task_seconds.transfer_s
    assert there_s == back_s == pytest.approx(LATENCY_S + plan.boundary_bytes / rate)


def test_the_tied_table_has_the_capacity_to_itself():
    free, small = (two_stages(c, model={"tied_embeddings": True}) for c in (math.inf, 1e9))
    plain = two_stages(1e9)
    num_bytes = 4 * 32000 * 1024
    rest_s = [
        a.seconds["boundary"] - b.seconds["boundary"]
        for a, b in zip(small.stages, plain.stages, strict=True)
    ]
    assert rest_s == pytest.approx([LATENCY_S + num_bytes / (MESSAGES_GET * 1e9)] * 2)
    assert small.step_time_s > free.step_time_s


def test_rings_over_two_clusters_share_the_capacity():
    """Eight rings of one device a node leave 4 nodes, and all of them cross the pipe."""
    topology = two_clusters()
    link = lambda topology: (
        place(
            joined_pool(topology).paths,
            joined_pool(topology).devices,
            {"data": 4, "tensor": 8},
            {"data": 1.0, "tensor": 100.0},
        )
        .groups["data"]
        .between
    )
    assert link(topology).bandwidth_bytes_per_s == pytest.approx(MESSAGES_GET * RATE / 8)
    for capacity, part in ((1e9, 1e9), (3e9, 3e9), (9e9, RATE)):
        found = link(with_pipes(topology, capacity)).bandwidth_bytes_per_s
        assert found == pytest.approx(MESSAGES_GET * part / 8)


# ---- several boundaries over one pipe ------------------------------------------------------------


def several(capacity, stages=(2, 2), chunks=2, microbatches=4, speed=1.0, ethernet=RATE):
    """Interleaved: from `a` to `b` go a boundary, and the gradients of the one that goes round."""
    a, b = (
        make_cluster(name, fabric, (8,) * count, speed=speed)
        for name, fabric, count in zip("ab", ("infiniband", "roce"), stages, strict=True)
    )
    topology = with_pipes(make_topology(a, b, ethernet_bytes_per_s=ethernet), capacity)
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    config = make_config(schedule=name, microbatches=microbatches)
    parts = [(name, (1, 1, 8), count) for name, count in zip("ab", stages, strict=True)]
    return chosen_plan(config, topology, *parts, chunks=chunks), topology


def event_step_s(plan, topology) -> float:
    """The tasks of a step, with transfers that share their pipes only while they meet on them.

    Every pair of nodes on a pipe has the same rate, unless its link is slower.
    """
    p, chunks = len(plan.stages), plan.num_chunks
    seconds = [stage.task_seconds for stage in plan.stages]
    names = [stage.cluster for stage in plan.stages]
    waiting = [list(tasks) for tasks in plan.tasks()]
    idle_from = [task_seconds.gather_s for task_seconds in seconds]
    busy: list = [None] * p  # (end, task)
    here = [set() for _ in range(p)]  # inputs: (kind, microbatch, virtual stage that reads it)
    queues: dict = {}  # (source, target) -> inputs on their way
    left: dict = {}  # of the first of each queue: [bytes of a pair, seconds of latency]
    now = 0.0
    num_pairs = lambda way: min(len(plan.stages[end].nodes) for end in way)
    cap = lambda way: topology.boundary_link(
        *(plan.stages[end].nodes[0] for end in way), processes=1.0
    )

    def rates():
        active = [way for way, (num_bytes, _) in left.items() if num_bytes > 0]
        found: dict = {}
        cluster_ways = {way: tuple(names[end] for end in way) for way in active}
        users = {p: [w for w in active if cluster_ways[w] in p.ways] for p in topology.pipes}
        pairs = lambda ways: sum(map(num_pairs, ways))
        while rest := [way for way in active if way not in found]:  # the slowest first
            parts = {way: cap(way).bandwidth_bytes_per_s for way in rest}
            for pipe, pipe_ways in users.items():
                taken = math.fsum(num_pairs(way) * found[way] for way in pipe_ways if way in found)
                for way in pipe_ways:
                    if way in parts:
                        part = (pipe.reached_bytes_per_s - taken) / pairs(set(pipe_ways) & {*rest})
                        parts[way] = min(parts[way], part)
            slowest = min(rest, key=parts.get)
            found[slowest] = parts[slowest]
        return found

    while any(waiting) or any(busy) or left:
        for s in range(p):
            if busy[s] is None and waiting[s] and idle_from[s] <= now:
                task = waiting[s][0]
                virtual = task.chunk * p + s
                at_end = {"F": virtual == 0, "B": virtual == p * chunks - 1, "W": True}[task.kind]
                if at_end or (task.kind, task.microbatch, virtual) in here[s]:
                    waiting[s].pop(0)
                    own = {"F": "forward_s", "B": "backward_s", "W": "weight_s"}[task.kind]
                    busy[s] = now + getattr(seconds[s], own)[task.chunk], task
        for way, queue in queues.items():
            if queue and way not in left:
                left[way] = [plan.boundary_bytes / num_pairs(way), cap(way).latency_s]
        speed = rates()
        ends = [entry[0] for entry in busy if entry]
        ends += [t for s, t in enumerate(idle_from) if t > now and busy[s] is None]
        ends += [
            now + (num_bytes / speed[way] if num_bytes > 0 else latency_s)
            for way, (num_bytes, latency_s) in left.items()
        ]
        then = min(ends)
        for way, entry in list(left.items()):
            if entry[0] > 0:
                entry[0] -= speed[way] * (then - now)
                if entry[0] < 1e-3:
                    entry[0] = 0.0
            else:
                entry[1] -= then - now
                if entry[1] < 1e-12:
                    here[way[1]].add(queues[way].pop(0))
                    del left[way]
        now = then
        for s in range(p):
            if busy[s] and busy[s][0] <= now:
                task, busy[s] = busy[s][1], None
                step = {"F": 1, "B": -1, "W": 0}[task.kind]
                to = task.chunk * p + s + step
                if step and 0 <= to < p * chunks:
                    queues.setdefault((s, to % p), []).append((task.kind, task.microbatch, to))
    return now


CASES = [
    {"stages": stages, "chunks": chunks, "speed": speed}
    for stages in ((2, 2), (1, 3), (1, 1))
    for chunks in (1, 2, 3)
    for speed in (1.0, 0.01)  # links or devices are what the step waits for
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flows_over_a_pipe_end_when_a_simulation_of_events_says(case):
    """Exact where one flow each way has the pipe; else a queue comes near an even share."""
    is_alone = case["chunks"] == 1 or case["stages"] == (1, 1)
    free_s = several(math.inf, **case)[0].simulate().step_time_s
    slower = []
    for capacity in (7e9, 6e9, 5e9, 3e9, 1e9, 1e8):
        plan, topology = several(capacity, **case)
        predicted_s, event_s = plan.simulate().step_time_s, event_step_s(plan, topology)
        slower.append(predicted_s)
        assert predicted_s == pytest.approx(event_s, rel=1e-6 if is_alone else 0.05)
        assert predicted_s >= plan.pipes["a -> b"] / MESSAGES_GET * plan.step_time_s
        if capacity >= 2 * RATE:
            assert (predicted_s, plan.queues) == (pytest.approx(free_s, rel=1e-9), ())
    assert slower == sorted(slower)


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_only_stages_with_chunks_have_boundaries_that_go_round_and_queue(numbers):
    """Whichever is asked for first: a search asks for both of the same stages."""
    topology = several(5e9)[1]
    problem = make_problem(make_config(), topology)
    assignment = Assignment(
        tuple(Segment(pool, MeshShape(1, 1, 8), 2) for pool in (0, 1)), (3, 3, 3, 3)
    )
    found = {
        chunks: [
            (queue.source, queue.target)
            for queue in problem.queues(assignment, StepSettings(8, "none"), chunks)
        ]
        for chunks in numbers
    }
    assert found == {1: [], 2: [(0, 3), (1, 2), (2, 1), (3, 0)]}


UPLINKS = {
    # Into and out of the cluster in the middle.
    "one": {(("a", "b"), ("c", "b")): 1.0, (("b", "a"), ("b", "c")): 1.0},
    # One that the pairs share, and a narrower one of a single way.
    "two on a way": {
        (("a", "b"), ("c", "b")): 1.0,
        (("b", "a"), ("b", "c")): 1.0,
        (("a", "b"),): 0.8,
        (("b", "a"),): 0.8,
    },
}


@pytest.mark.parametrize("speed", [1.0, 0.01])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", UPLINKS)
def test_pairs_of_clusters_divide_the_uplink_that_they_share(name, chunks, speed):
    """A simulation of events, with equal shares of all that meets at an uplink, says the same.

    In 1F1B two arrays meet again and again. A queue lets one of them through early, where even
    shares make both late, so there it is up to a fifth too fast.
    """
    clusters = [
        make_cluster(n, fabric, (8,) * 2, speed=speed)
        for n, fabric in zip("abc", ("infiniband", "roce", "roce"), strict=True)
    ]
    config = make_config(
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        microbatches=9,
        train={"global_batch": 72},
    )
    slower = []
    for capacity in (13e9, 10e9, 6e9, 3e9, 1e9, 1e8):
        uplinks = {ways: share * capacity for ways, share in UPLINKS[name].items()}
        topology = dataclasses.replace(make_topology(*clusters), uplinks=uplinks)
        plan = chosen_plan(config, topology, *((n, (2, 1, 8), 1) for n in "abc"), chunks=chunks)
        predicted_s, event_s = plan.simulate().step_time_s, event_step_s(plan, topology)
        assert predicted_s == pytest.approx(event_s, rel=0.2 if chunks == 1 else 0.09)
        sent_s = plan.pipes["a+c -> b"] / MESSAGES_GET * plan.step_time_s
        assert predicted_s >= sent_s
        assert bool(plan.queues) == (MESSAGES_GET * capacity < 2 * 2 * MESSAGES_GET * RATE)
        slower.append(predicted_s)
    assert slower == sorted(slower)
    assert slower[-1] > 2 * slower[0]


# ---- plans and files -----------------------------------------------------------------------------


def same_but_for_pipes(plan: Plan) -> Plan:
    return dataclasses.replace(plan, pipes={}, topology_hash="")


def test_a_capacity_for_all_nodes_is_none_and_a_smaller_one_is_never_faster():
    config = make_config(parallel={"tensor": 8}, model={"width": 2048})
    topology = two_clusters()
    free = make_plan(config, topology)
    assert free.pipes == {}
    assert not any("pipes" in line for line in describe(free))
    whole = make_plan(config, with_pipes(topology, 3 * RATE))
    assert same_but_for_pipes(whole) == same_but_for_pipes(free)
    steps_s = [free.step_time_s]
    for capacity in (2.9e9, 1e9, 3e8, 1e8):
        plan = make_plan(config, with_pipes(topology, capacity))
        steps_s.append(plan.step_time_s)
        wider = upgrades.wider_pipe(with_pipes(topology, capacity), (("roce", "ib"),), 2.0)
        assert wider == with_pipes(topology, 2 * capacity)
    assert steps_s == sorted(steps_s)
    assert steps_s[-1] > steps_s[0]


def test_the_uplink_that_a_plan_waits_for_binds_and_a_wider_one_is_worth_something():
    names = ("ib", "roce")
    topology = dataclasses.replace(
        two_clusters(),
        uplinks={(names, names[::-1]): 1e8},  # both directions share it
    )
    found = explain(make_config(clusters=names), topology)
    assert found.best[0].binds["uplink ib<->roce + roce<->ib"] > 0.5
    by_name = {a.what: a for a in found.upgrades}
    wider = by_name["uplink ib<->roce + roce<->ib 2 times as large"]
    assert wider.step_s < 0.7 * found.step_s


def test_a_pipe_binds_a_plan_and_a_wider_one_is_worth_something():
    config = make_config(clusters=("ib", "roce"))
    found = explain(config, with_pipes(two_clusters(), 1e8))
    assert found.best[0].binds["capacity ib<->roce"] > 0.5
    by_name = {a.what: a for a in found.upgrades}
    assert by_name["capacity ib<->roce 2 times as large"].step_s < 0.7 * found.step_s
    assert by_name["ethernet ib<->roce 2 times as fast"].step_s == found.step_s


def test_a_plan_says_what_it_uses_of_a_pipe_and_reads_it_back(tmp_path):
    plan = two_stages(1e9)
    share = plan.microbatches * plan.boundary_bytes / 1e9 / plan.step_time_s
    assert plan.pipes == pytest.approx({"ib -> roce": share, "roce -> ib": share})
    told = f"  pipes     share of the capacity in use: ib <-> roce {share:.0%} each way"
    assert told in describe(plan)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
