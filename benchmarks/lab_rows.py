"""The rows that `benchmarks.holmes_lab` compares: each row's network, and its system's inputs.

network   what the lab is built as: four nodes on one fast fabric, on Ethernet, or hybrid, that
          is two clusters of two nodes on unlike fast fabrics with Ethernet between them
point     the rate of Ethernet, as the divisor of the fast rate
round trip  of the link between the clusters; the lab rebuilds those from 1 ms on
pairs     the nodes that a HolmesJAX job takes for clusters, where those are not the network's:
          the planner itself would never let data parallelism cross Ethernet
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.loops import LARGE, OPTIMIZER
from holmesjax.config import (
    Config,
    DataConfig,
    LogConfig,
    ParallelConfig,
    RunConfig,
    Schedule,
    TrainConfig,
)
from holmesjax.job import Job
from holmesjax.lab import scaled_topology
from holmesjax.lab.scaled_topology import Lab
from holmesjax.planner.planner import make_plan
from holmesjax.process_variables import ALLOCATOR
from holmesjax.topology import loading
from holmesjax.topology.machines import Topology

System = Literal["HolmesJAX", "JAX", "PyTorch"]
Network = Literal["fast", "ethernet", "hybrid"]
Pairs = tuple[tuple[str, str], tuple[str, str]]

FAST_BIT_PER_S = 1600e6
POINTS = (8, 32, 64)
BARS = {8: 0.98, 32: 0.95, 64: 0.85}  # of the best homogeneous figure of the same system
QUOTA = 0.45  # cores of a node
SLOWER = 2 / 3  # of that, for the nodes of the slower cluster where nodes are unequal
PEAK_GFLOP_PER_S = 90  # of a node, for the planner: HolmesJAX reaches about half of it
NUM_NODES = 4
ROUND_TRIPS_MS = (10, 20, 50)  # of clusters that are far from each other
NEAR_MS = 0.1
GLOBAL_BATCH = 32
MICROBATCHES = {1: 8, 2: 16}  # by the number of stages: a sequence of each node in a microbatch
WARM_UP_STEPS = 2  # of each run; they fill memory and caches


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to train, in one network."""

    label: str
    system: System
    network: Network = "hybrid"
    unequal: bool = False  # whether the nodes of the second cluster are slower
    round_trip_ms: float = NEAR_MS  # between the clusters of a hybrid network
    stages: int = 2
    layers: tuple[int, ...] | None = None  # None: by speed
    pairs: Pairs | None = None  # None: the clusters of the network
    boundary: Network = "ethernet"  # what the pairs are told of the way between them
    module: str = "launch"  # that a node's process runs
    mode: str = ""  # of a module that is not HolmesJAX
    slower_than: str | None = None  # the row that must be faster


# (b) and (c): of the three ways to pair four nodes the plan takes one. In the second, boundaries
# stay inside clusters; the third is what a random order of devices gives, two times in three one
# of the last two.
DATA_ACROSS: Pairs = (("ib-0", "roce-0"), ("ib-1", "roce-1"))
SHUFFLED: Pairs = (("roce-1", "ib-0"), ("ib-1", "roce-0"))

ROWS: dict[str, Row] = {
    "fast-1-stage": Row(label="HolmesJAX, one stage", system="HolmesJAX", network="fast", stages=1),
    "fast-2-stages": Row(label="HolmesJAX, two stages", system="HolmesJAX", network="fast"),
    "fast-jax-dp": Row(
        label="JAX data parallel",
        system="JAX",
        network="fast",
        module="benchmarks.lab_jax",
        mode="dp",
    ),
    "fast-jax-fsdp": Row(
        label="JAX FSDP", system="JAX", network="fast", module="benchmarks.lab_jax", mode="fsdp"
    ),
    "fast-ddp": Row(
        label="PyTorch DDP",
        system="PyTorch",
        network="fast",
        module="benchmarks.lab_pytorch",
        mode="ddp",
    ),
    "fast-1f1b": Row(
        label="PyTorch 1F1B",
        system="PyTorch",
        network="fast",
        module="benchmarks.lab_pytorch",
        mode="1f1b",
    ),
    "plan": Row(label="(a) HolmesJAX's plan", system="HolmesJAX"),
    "no-overlap": Row(
        label="(e) no overlap of the optimizer",
        system="HolmesJAX",
        module="benchmarks.no_overlap",
        slower_than="plan",
    ),
    "data-across": Row(
        label="(b) data parallel across Ethernet",
        system="HolmesJAX",
        pairs=DATA_ACROSS,
        boundary="fast",
        slower_than="plan",
    ),
    "random-order": Row(
        label="(c) random device order",
        system="HolmesJAX",
        pairs=SHUFFLED,
        slower_than="plan",
    ),
    "plan-unequal": Row(label="(a) with unequal nodes", system="HolmesJAX", unequal=True),
    "even-split": Row(
        label="(d) even split, unequal nodes",
        system="HolmesJAX",
        unequal=True,
        layers=(4, 4),
        slower_than="plan-unequal",
    ),
    **{
        f"plan-{ms}ms": Row(
            label=f"(a) with a round trip of {ms} ms",
            system="HolmesJAX",
            round_trip_ms=ms,
            slower_than="plan",
        )
        for ms in ROUND_TRIPS_MS
    },
    "ethernet-1-stage": Row(
        label="HolmesJAX, one stage", system="HolmesJAX", network="ethernet", stages=1
    ),
    "ethernet-2-stages": Row(label="HolmesJAX, two stages", system="HolmesJAX", network="ethernet"),
    "jax-dp": Row(label="JAX data parallel", system="JAX", module="benchmarks.lab_jax", mode="dp"),
    "jax-fsdp": Row(label="JAX FSDP", system="JAX", module="benchmarks.lab_jax", mode="fsdp"),
    "ddp": Row(label="PyTorch DDP", system="PyTorch", module="benchmarks.lab_pytorch", mode="ddp"),
    "1f1b": Row(
        label="PyTorch 1F1B", system="PyTorch", module="benchmarks.lab_pytorch", mode="1f1b"
    ),
    "1f1b-data-across": Row(
        label="PyTorch 1F1B, data across Ethernet",
        system="PyTorch",
        module="benchmarks.lab_pytorch",
        mode="1f1b-data-across",
    ),
}


def cells(names: Sequence[str], points: Sequence[int]) -> list[tuple[str, int | None]]:
    """Every row at every point, in the order of running; those of the fast network once.

    What is compared runs soon after each other: a system's rows together, each at all its points.
    """
    order: list[tuple[str, int | None]] = []
    for system in dict.fromkeys(row.system for row in ROWS.values()):
        for name in (name for name in ROWS if name in names and ROWS[name].system == system):
            is_fast = ROWS[name].network == "fast"
            order += [(name, point) for point in ([None] if is_fast else points)]
    return order


def in_turn(found: Iterable[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """Rows at their points in the order of tables."""
    return sorted(found, key=lambda cell: (cell[1] or 0, list(ROWS).index(cell[0])))


# ---- topologies ----------------------------------------------------------------------------------


def network_text(row: Row, point: int | None) -> str:
    """The topology file of the network that the lab is built as."""
    slow = FAST_BIT_PER_S if point is None else FAST_BIT_PER_S / point
    if row.network != "hybrid":
        fabric = "infiniband" if row.network == "fast" else "ethernet"
        names = [f"node-{i}" for i in range(NUM_NODES)]
        return f"name: {row.network}\nclusters:\n" + _cluster("all", fabric, names, slow)
    peak = PEAK_GFLOP_PER_S * (SLOWER if row.unequal else 1)
    return (
        "name: hybrid\nclusters:\n"
        + _cluster("ib", "infiniband", ["ib-0", "ib-1"], slow)
        + _cluster("roce", "roce", ["roce-0", "roce-1"], slow, peak)
        + _link("ib", "roce", slow, row.round_trip_ms)
    )


def told_text(row: Row, point: int | None) -> str:
    """The topology file of the job: the network's, or one in which pairs are clusters."""
    if row.pairs is None:
        return network_text(row, point)
    assert point is not None, "pairs are for hybrid networks"
    slow = FAST_BIT_PER_S / point
    between = FAST_BIT_PER_S if row.boundary == "fast" else slow
    first, second = (list(pair) for pair in row.pairs)
    return (
        "name: pairs\nclusters:\n"
        + _cluster("first", "ethernet", first, slow)
        + _cluster("second", "ethernet", second, slow)
        + _link("first", "second", between, row.round_trip_ms)
    )


def _cluster(
    name: str,
    fabric: str,
    nodes: Sequence[str],
    slow_bit_per_s: float,
    peak_gflop_per_s: float = PEAK_GFLOP_PER_S,
) -> str:
    peak = f"{{float32: {peak_gflop_per_s:g} GFLOP/s}}"
    nics = [f"{{kind: ethernet_25, rate: {slow_bit_per_s / 1e6:g} Mb/s}}"]
    if fabric != "ethernet":
        nics.insert(0, f"{{kind: {fabric}_200, rate: {FAST_BIT_PER_S / 1e6:g} Mb/s}}")
    entries = ", ".join(f"{{name: {node}}}" for node in nodes)
    return (
        f"  - name: {name}\n"
        f"    fabric: {fabric}\n"
        f"    nodes: [{entries}]\n"
        f"    devices: {{kind: cpu, count: 1, peak_flop_per_s: {peak}}}\n"
        f"    nics: [{', '.join(nics)}]\n"
    )


def _link(a: str, b: str, rate_bit_per_s: float, round_trip_ms: float) -> str:
    speed = f"bandwidth: {rate_bit_per_s / 1e6:g} Mb/s, latency: {500 * round_trip_ms:g} us"
    entry = f"{{between: [{a}, {b}], fabric: ethernet, {speed}}}"
    return f"links:\n  - {entry}\n"


def load_topology(text: str, path: Path) -> Topology:
    """By way of a file, as users give it."""
    path.write_text(text, encoding="utf-8")
    return loading.load(path)


# ---- the lab and the job -------------------------------------------------------------------------


def make_lab(row: Row, network: Topology, cores: Sequence[int]) -> Lab:
    """Rates as in the file. Raises ConfigError where the cores are too few for the quota.

    A job that takes pairs for clusters calls all its networks Ethernet; it gets the addresses that
    lead over a cluster's own fabric wherever there is one, as the other systems do.
    """
    shares = scaled_topology.make_shares(network, "float32", cores, QUOTA)
    lab = scaled_topology.make_lab(network, shares, 1.0)
    if row.pairs is None:
        return lab
    nodes = []
    for node in lab.nodes:
        assert node.fast_address, "pairs are for hybrid networks"
        addresses = {**node.addresses, "ethernet": [node.fast_address]}
        nodes.append(dataclasses.replace(node, addresses=addresses))
    return dataclasses.replace(lab, nodes=tuple(nodes))


def make_config(row: Row, folder: Path, steps: int, schedule: Schedule) -> Config:
    """The settings of a run of so many steps; all systems take model, batches and AdamW from it."""
    return Config(
        topology=str(folder / "told.yaml"),
        run=RunConfig(dir=str(folder / "run")),
        train=TrainConfig(steps=steps, global_batch=GLOBAL_BATCH, log_every_s=0.0),
        model=LARGE,
        data=DataConfig(corpus="python-stdlib"),
        optimizer=OPTIMIZER,
        parallel=ParallelConfig(
            clusters=_clusters_of_stages(row),
            layers=row.layers,
            data=NUM_NODES // row.stages,
            fsdp=1,
            tensor=1,
            activation_checkpointing="none",
            microbatches=MICROBATCHES[row.stages],
            schedule="1f1b" if row.stages == 1 else schedule,
        ),
        log=LogConfig(tensorboard=False),
    )


def _clusters_of_stages(row: Row) -> tuple[str, ...]:
    """The clusters of the stages, by the names that the job is told."""
    if row.network != "hybrid":
        return ("all",) * row.stages
    return ("ib", "roce") if row.pairs is None else ("first", "second")


def make_job(config: Config, told: Topology) -> Job:
    return Job(config=config, topology=told, plan=make_plan(config, told))


def settings(schedule: Schedule) -> Mapping[str, object]:
    """The settings that all rows share, for the result file."""
    return {
        "model": dataclasses.asdict(LARGE),
        "optimizer": dataclasses.asdict(OPTIMIZER),
        "global_batch": GLOBAL_BATCH,
        "microbatches": f"{MICROBATCHES[2]} in two stages, {MICROBATCHES[1]} in one: a sequence of "
        "each node in each",
        "schedule": schedule,
        "dtype": "float32, boundaries too",
        "nodes": f"4, {QUOTA:.0%} of a core each; unequal: {QUOTA * SLOWER:.0%} in the second "
        "cluster",
        "fast_bit_per_s": FAST_BIT_PER_S,
        "allocator": f"JAX and HolmesJAX {ALLOCATOR}, PyTorch as it comes",
        "addresses": "JAX's gloo and the jobs' own take those of fast0 where there is one, "
        "PyTorch's has GLOO_SOCKET_IFNAME=fast0; the lab routes them inside a cluster over fast0, "
        "and to other clusters over eth0",
    }
