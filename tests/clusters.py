"""Machines and configs for tests of the planner, made in memory."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from holmesjax import config as configs
from holmesjax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from holmesjax.errors import PlanError
from holmesjax.plan.plan import Plan
from holmesjax.planner.assembly import as_plan
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.layer_split import split
from holmesjax.planner.planner import make_plan
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_layouts import MeshShape, StepSettings
from holmesjax.planner.step_time import step_seconds
from holmesjax.planner.trials import Candidate
from holmesjax.schedules.pipeline_schedules import TaskOrder
from holmesjax.topology import loading
from holmesjax.topology.machines import (
    Cluster,
    DeviceKind,
    Link,
    Measured,
    Nic,
    Node,
    Topology,
    backwards,
)

ROOT = Path(__file__).parent.parent
GIB = 2.0**30
QUARTERS = ("ib", (1, 1, 1), 4)  # four stages of a device each
NIC = {"infiniband": (50e9, 8), "roce": (25e9, 4), "ethernet": (3e9, 1)}


def make_cluster(name, fabric, counts, *, speed=1.0, memory_gib=80.0):
    """`speed` 1 is about an H100."""
    device = DeviceKind(
        name=f"gpu-{speed:g}",
        peak_flop_per_s={"float32": 67e12 * speed, "bfloat16": 989e12 * speed},
        memory_bytes=memory_gib * GIB,
        memory_bandwidth_bytes_per_s=3.35e12 * speed,
        link=Link(fabric="nvlink", bandwidth_bytes_per_s=450e9, latency_s=2e-6),
    )
    rate, count = NIC[fabric]
    nic = Nic(name=fabric, fabric=fabric, rate_bytes_per_s=rate, latency_s=3e-6, count=count)
    nodes = tuple(
        Node(name=f"{name}-{i}", device=device, num_devices=num, nics=(nic,))
        for i, num in enumerate(counts)
    )
    return Cluster(name=name, fabric=fabric, nodes=nodes)


def make_topology(*clusters, ethernet_bytes_per_s=3e9, transport_bytes_per_s=None):
    """`transport_bytes_per_s` of a process in place of the planner's own number."""
    link = Link(fabric="ethernet", bandwidth_bytes_per_s=ethernet_bytes_per_s, latency_s=1e-4)
    names = [cluster.name for cluster in clusters]
    measured = None
    if transport_bytes_per_s:
        rates = dict.fromkeys(names, transport_bytes_per_s)
        measured = Measured(date="2026-01-01", pairs={}, transports=rates)
    return Topology(
        name="test",
        clusters=clusters,
        links={pair: link for pair in itertools.permutations(names, 2)},
        measured=measured,
    )


def with_uplinks(topology, capacity):
    """Each cluster with an uplink to all others, of so many bytes per second each way."""
    names = [cluster.name for cluster in topology.clusters]
    uplinks = {tuple(sorted((a, b) for b in names if b != a)): capacity for a in names}
    uplinks |= {backwards(ways): capacity for ways in uplinks}
    return replace(topology, uplinks=uplinks)


def two_clusters(*, slow=0.5, **link):
    return make_topology(
        make_cluster("ib", "infiniband", (8, 8)),
        make_cluster("roce", "roce", (8, 8), speed=slow),
        **link,
    )


# What a test does not leave to the planner on purpose.
PLAIN = {
    "tensor": 8,
    "fsdp": 1,
    "microbatches": 8,
    "schedule": "1f1b",
    "activation_checkpointing": "none",
}


def make_config(*, model=None, train=None, parallel=None, **changes):
    """`parallel` in place of `PLAIN`, or changes of it; a None leaves the choice to the planner."""
    sizes = {"num_layers": 12, "width": 1024, "num_heads": 16, "context_length": 1024}
    return Config(
        topology="test.yaml",
        run=RunConfig(dir="run"),
        train=TrainConfig(
            **{"steps": 1, "global_batch": 64, "compute_dtype": "bfloat16", **(train or {})}
        ),
        model=ModelConfig(**{**sizes, "vocab_size": 32000, **(model or {})}),
        data=DataConfig(corpus="x"),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        parallel=ParallelConfig(**{**(PLAIN if parallel is None else parallel), **changes}),
    )


def chosen_plan(config, topology, *parts, layers=None, chunks=1, in_flight=()):
    """The plan with stages where the test wants them: (cluster, (data, fsdp, tensor), stages)."""
    problem = make_problem(config, topology)
    names = [cluster.name for cluster in topology.clusters]
    chosen = [Segment(names.index(name), MeshShape(*mesh), count) for name, mesh, count in parts]
    parallel, num_stages = config.parallel, sum(segment.num_stages for segment in chosen)
    settings = StepSettings(parallel.microbatches, parallel.activation_checkpointing)
    order = TaskOrder(parallel.schedule, num_stages, parallel.microbatches, chunks, in_flight)
    assignment = (
        Assignment(tuple(chosen), layers) if layers else split(problem, chosen, settings, order)
    )
    [step_s] = map(float, step_seconds(problem, [assignment], settings, order))
    candidate = Candidate(assignment=assignment, settings=settings, order=order, step_s=step_s)
    return as_plan(problem, candidate, bound_s=step_s)


def one_each(config, topology, **choice):
    """A stage on all devices of every cluster, as `chosen_plan`."""
    tensor, fsdp = config.parallel.tensor, config.parallel.fsdp
    counts = [sum(node.num_devices for node in c.nodes) for c in topology.clusters]
    parts = [
        (cluster.name, (count // (fsdp * tensor), fsdp, tensor), 1)
        for cluster, count in zip(topology.clusters, counts, strict=True)
    ]
    return chosen_plan(config, topology, *parts, **choice)


def two_uneven():
    return make_topology(
        make_cluster("ib", "infiniband", (4, 2)), make_cluster("roce", "roce", (3,), speed=0.7)
    )


def three_clusters(**link):
    return make_topology(
        make_cluster("ib", "infiniband", (8, 8)),
        make_cluster("roce", "roce", (8, 8), speed=0.5),
        make_cluster("old", "ethernet", (4, 4), speed=0.2, memory_gib=32),
        **link,
    )


def two_kinds():
    """A cluster with two kinds of device, and one with one."""
    mixed = make_cluster("mixed", "infiniband", (2, 2))
    slow = make_cluster("mixed", "infiniband", (2, 2), speed=0.4, memory_gib=24).nodes
    nodes = (*mixed.nodes, *(replace(node, name=f"slow-{i}") for i, node in enumerate(slow)))
    return make_topology(replace(mixed, nodes=nodes), make_cluster("roce", "roce", (4,)))


def of_file(name):
    """The plan of a run of configs/runs/."""
    path = ROOT / f"configs/runs/{name}.yaml"
    config = configs.load(path)
    return make_plan(config, loading.load(configs.topology_path(config, path)))


WIDE = {"width": 4096, "num_heads": 32, "num_layers": 24}
PLANS = {
    "two_clusters": lambda: one_each(make_config(), two_clusters()),
    "uneven_nodes": lambda: one_each(
        make_config(tensor=1, microbatches=2, train={"global_batch": 48}), two_uneven()
    ),
    "one_stage": lambda: make_plan(
        make_config(stages=1, tensor=2, microbatches=1, schedule="gpipe"),
        make_topology(make_cluster("only", "ethernet", (4,))),
    ),
    "all_free": lambda: make_plan(make_config(parallel={}), two_clusters()),
    "three_clusters": lambda: make_plan(
        make_config(model=WIDE, parallel={}),
        three_clusters(ethernet_bytes_per_s=1e11, transport_bytes_per_s=1e11),
    ),
    "a_slow_link": lambda: make_plan(
        make_config(model=WIDE, parallel={}), three_clusters(ethernet_bytes_per_s=1e8)
    ),
    "two_kinds": lambda: make_plan(
        make_config(
            model={**WIDE, "num_layers": 12},
            parallel={"microbatches": 16, "schedule": "eager_1f1b"},
        ),
        two_kinds(),
    ),
    "gpt_3b6": lambda: of_file("gpt_3b6"),
    "gpt_7b5": lambda: of_file("gpt_7b5"),
    "gpt_39b1": lambda: of_file("gpt_39b1"),
}
PLANS = {name: cache(make) for name, make in PLANS.items()}


@cache
def golden_plan(name: str) -> Plan:
    """One of PLANS without the time to find it; a test of the planner holds the file true."""
    return Plan.from_json((ROOT / f"tests/golden/plan_{name}.json").read_text())


def compositions(total, parts):
    """All ways to write a number as an ordered sum of positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def split_of(plan):
    """How many Transformer layers each stage holds."""
    return tuple(stage.num_blocks for stage in plan.stages)


def refusal(config, topology):
    """The error that says why there is no plan."""
    with pytest.raises(PlanError) as raised:
        make_plan(config, topology)
    return raised.value
