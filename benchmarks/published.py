"""Training runs that others have published, in our own terms, and what is predicted of them.

    run      a model, how it was cut over which devices, and how long its steps took
    held     what one of the devices of a run held
    machine  the devices and networks that runs had
    fitted   what is not known of a machine beforehand, as factors of what is shipped

`published_files` reads them. Ranks are placed as Megatron-LM does: `tensor` on neighbouring
devices, then `data`, then stages.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holmesjax.config import Checkpointing, ModelConfig, Schedule
from holmesjax.costs import memory, work
from holmesjax.costs.collective_times import Group
from holmesjax.costs.implementation import Implementation
from holmesjax.costs.stage_shape import StageShape
from holmesjax.costs.stage_times import StageTimes, stage_times
from holmesjax.planner.layer_ranges import split_chunks
from holmesjax.schedules import pipeline_schedules
from holmesjax.topology.calibration import Calibration
from holmesjax.topology.fabrics import Fabric
from holmesjax.topology.machines import DeviceKind, Link

Layout = tuple[int, int, int]  # width of the model, `tensor`, stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Nodes of one kind."""

    device: DeviceKind
    per_node: int
    nic_bytes_per_s: float  # that messages get of all NICs of a node
    fabric: Fabric = "infiniband"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Constants that are fitted to runs, as factors of those that are shipped."""

    rows: float = 1.0  # of the calibration's products: `ProductSpeed`
    columns: float = 1.0
    depth: float = 1.0
    share: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    layer_call: float = 1.0  # of `Implementation.layer_call_s`
    between: float = 1.0  # of the bandwidth of NICs
    kinds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of devices, by kind
    other_kinds: float = 1.0
    layouts: Mapping[Layout, float] = dataclasses.field(default_factory=dict)  # of their steps

    def calibration(self, shipped: Calibration) -> Calibration:
        """The speed of other systems: `between` and `layer_s` are of the programs of HolmesJAX."""
        products = dataclasses.replace(
            shipped.products,
            share=self.share * shipped.products.share,
            rows=self.rows * shipped.products.rows,
            columns=self.columns * shipped.products.columns,
            depth=self.depth * shipped.products.depth,
        )
        return Calibration(
            products=products,
            attention=self.attention * shipped.attention,
            memory=self.memory * shipped.memory,
        )


AS_SHIPPED = Fitted()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One published measurement."""

    name: str
    model: ModelConfig
    replicas: tuple[tuple[Machine, ...], ...]  # the unlike ones: machines of each stage
    layers: tuple[int, ...]  # of each stage
    tensor: int
    data: int
    chunks: int = 1
    sequences: int  # in a microbatch
    microbatches: int
    dtype: str = "bfloat16"
    checkpointing: Checkpointing = "none"
    implementation: Implementation
    sends_both_ways: bool = True  # over a boundary at once; else one after the other
    measured_s: float  # of a step
    doubtful: bool = False  # so the source of the row says: predicted, and not fitted to

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.data * self.stages

    @property
    def measured(self) -> float:
        return self.measured_s

    @property
    def layout(self) -> Layout:
        return self.model.width, self.tensor, self.stages

    @property
    def choice(self) -> tuple[object, ...]:
        """Runs with the same one do the same on as many devices: there one can choose."""
        return self.model, self.num_devices, self.sequences * self.microbatches * self.data


def groups(run: Run, machine: Machine, fitted: Fitted) -> tuple[Group | None, Group | None]:
    """The groups of `data` and of `tensor`, where all nodes are like this one."""
    per_node, inside = machine.per_node, machine.device.link

    def group(size: int, stride: int) -> Group | None:
        here = min(size, max(1, per_node // stride))  # its devices on a node
        leaving = max(1, min(per_node, run.data * run.tensor) // here)  # such groups of a node
        return Group(
            size=size,
            nodes=-(-size // here),
            inside=inside if here > 1 else None,
            between=None if here == size else nic(machine, fitted, leaving),
        )

    return group(run.data, run.tensor), group(run.tensor, 1)


def nic(machine: Machine, fitted: Fitted, sharers: int) -> Link:
    """The share that one of several has of a node's network."""
    bandwidth = fitted.between * machine.nic_bytes_per_s / sharers
    return Link(fabric=machine.fabric, bandwidth_bytes_per_s=bandwidth, latency_s=2e-6)


def transfer_s(run: Run, machine: Machine, fitted: Fitted) -> float:
    """Seconds of a boundary, there and back: all devices of a node send their parts at once."""
    num_tokens = run.sequences * run.model.context_length
    part = float(work.boundary_bytes(run.model, num_tokens, run.dtype)) / run.tensor
    if not run.sends_both_ways:
        part *= 2
    if run.num_devices <= machine.per_node:
        return part / machine.device.link.bandwidth_bytes_per_s
    return nic(machine, fitted, min(machine.per_node, run.data * run.tensor)).time_s(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one replica's parts: forward and backward of each virtual stage, once a step."""

    forward_s: list[float]
    backward_s: list[float]
    once_s: float


def times(run: Run, fitted: Fitted) -> list[Times]:
    """Predicted seconds of each unlike replica: their pipelines meet when gradients are summed."""
    return [_times(run, machines, fitted) for machines in run.replicas]


def _times(run: Run, machines: Sequence[Machine], fitted: Fitted) -> Times:
    """These systems wait for a boundary at both ends of it, so its time is part of the tasks.

    Half of it of the forward and half of the backward.
    """
    sent_s = [
        max(transfer_s(run, m, fitted) for m in ends) for ends in itertools.pairwise(machines)
    ]
    waits_s = [before + after for before, after in itertools.pairwise([0.0, *sent_s, 0.0])]
    known: dict[tuple[int, bool, bool, int], StageTimes] = {}

    def part(stage: int, blocks: int, is_first: bool, is_last: bool) -> StageTimes:
        machine = machines[stage]
        key = (blocks, is_first, is_last, id(machine))
        if key not in known:
            known[key] = _stage_times(run, machine, fitted, blocks, is_first, is_last)
        return known[key]

    num_virtual = run.stages * run.chunks
    shares = [split_chunks(blocks, run.chunks) for blocks in run.layers]
    virtual = [
        part(v % run.stages, shares[v % run.stages][v // run.stages], v == 0, v == num_virtual - 1)
        for v in range(num_virtual)
    ]
    ends = range(run.stages)
    whole = [part(s, run.layers[s], s == 0, s == run.stages - 1) for s in ends]
    half_s = [waits_s[v % run.stages] / 2 for v in range(num_virtual)]
    return Times(
        forward_s=[
            float(t.whole_forward_s) + wait for t, wait in zip(virtual, half_s, strict=True)
        ],
        backward_s=[
            float(t.whole_backward_s) + wait for t, wait in zip(virtual, half_s, strict=True)
        ],
        once_s=max(float(t.once_s) for t in whole),
    )


def _stage_times(
    run: Run, machine: Machine, fitted: Fitted, blocks: int, is_first: bool, is_last: bool
) -> StageTimes:
    device = machine.device
    speed = fitted.kinds.get(device.name, fitted.other_kinds)
    peaks = {dtype: speed * peak for dtype, peak in device.peak_flop_per_s.items()}
    link_bytes_per_s = speed * device.link.bandwidth_bytes_per_s
    device = dataclasses.replace(
        device,
        peak_flop_per_s=peaks,
        memory_bandwidth_bytes_per_s=speed * device.memory_bandwidth_bytes_per_s,
        link=dataclasses.replace(device.link, bandwidth_bytes_per_s=link_bytes_per_s),
        calibration=fitted.calibration(device.calibration),
    )
    implementation = dataclasses.replace(
        run.implementation, layer_call_s=fitted.layer_call * run.implementation.layer_call_s
    )
    shape = StageShape(
        blocks=(blocks,),
        is_first=is_first,
        is_last=is_last,
        data=run.data,
        tensor=run.tensor,
        sequences=run.sequences,
        chunks=run.chunks,
        in_flight=1,
        head_in_flight=1,
        dtype=run.dtype,
        checkpointing=run.checkpointing,
    )
    data, tensor = groups(run, dataclasses.replace(machine, device=device), fitted)
    return stage_times(run.model, shape, [device], data, tensor, implementation=implementation)


def bound_s(run: Run, fitted: Fitted) -> float:
    """A step if the slowest stage never waited, after one microbatch through the others.

    Close to the simulated step, and much faster: what a fit looks at.
    """
    return _step_s(run, fitted, _bound_s)


def predict_s(run: Run, fitted: Fitted) -> float:
    """A step, by simulating its tasks."""
    return _step_s(run, fitted, _simulated_s)


def _step_s(run: Run, fitted: Fitted, tasks_s: Callable[[Run, Times], float]) -> float:
    """The replica that is done last, then what comes once in a step."""
    replicas = times(run, fitted)
    last_s = max(tasks_s(run, replica) for replica in replicas)
    step_s = last_s + max(replica.once_s for replica in replicas)
    return step_s * fitted.layouts.get(run.layout, 1.0)


def _bound_s(run: Run, parts: Times) -> float:
    chunks = [f + b for f, b in zip(parts.forward_s, parts.backward_s, strict=True)]
    stages = [sum(chunks[s :: run.stages]) for s in range(run.stages)]
    return max(run.microbatches * s + (sum(stages) - s) / run.chunks for s in stages)


def _simulated_s(run: Run, parts: Times) -> float:
    name: Schedule = "interleaved_1f1b" if run.chunks > 1 else "1f1b"
    tasks = pipeline_schedules.schedule(name, run.stages, run.microbatches, num_chunks=run.chunks)
    no_time = [(0.0, 0.0)] * (run.stages - (run.chunks == 1))
    return pipeline_schedules.simulate(
        tasks, parts.forward_s, parts.backward_s, no_time
    ).step_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One published figure of what a device holds."""

    name: str
    model: ModelConfig
    stage: StageShape
    implementation: Implementation
    items: tuple[str, ...]  # of `memory.stage_memory_bytes`; none: all
    share_of: "Held | None" = None  # a percentage of this one; None: GiB
    measured: float


def predict_held(held: Held, _: Fitted = AS_SHIPPED) -> float:
    """In the unit of the figure. Nothing of it can be fitted."""
    bytes_of = memory.stage_memory_bytes(held.model, held.stage, held.implementation)
    total = sum(float(bytes_of[item]) for item in held.items or bytes_of)
    return 100 * total / _bytes(held.share_of) if held.share_of else total / 2**30


def _bytes(held: Held) -> float:
    return 2**30 * predict_held(held)
