"""Training runs that others have published, read from CSV files as layouts of our own terms.

    run      one row: a model, how it was cut over which devices, and what was measured of it
    machine  the devices and networks that the runs of a file had
    fitted   what is not known of a machine beforehand: a calibration, and shares of bandwidths

Ranks are placed as Megatron-LM does: `tensor` on neighbouring devices, then `data`, then stages.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holmesjax import catalogue, costs, memory, schedule, topology
from holmesjax.calibration import Calibration
from holmesjax.config import ModelConfig, Schedule
from holmesjax.costs import Checkpointing, Implementation, StageShape
from holmesjax.network import Group
from holmesjax.planner import split_chunks
from holmesjax.stage_times import StageTimes, stage_times
from holmesjax.topology import DeviceKind, Fabric, Link

Row = Mapping[str, str]

# PyTorch systems before fused attention: scores go through memory, in half precision, masked,
# normalised and dropped out: written, read and written by the softmax, read and written by the
# dropout with its mask of a byte, read again. Gradients are summed in half precision.
MEGATRON_2021 = Implementation(
    attention_pairs=1.0,
    attention_backward=2.0,
    score_bytes=13.0,
    gradient_bytes=2.0,
    overlaps=False,
    accumulate_bytes=6.0,
    shards_optimizer=False,
    kept_score_bytes=5.0,  # after the softmax and after the dropout, and its mask
    kept_mask_bytes=2.0,
    keeps_activation=True,
)
# Then products add to the gradients themselves; and what Korthikanti et al. (arXiv:2205.05198) added.
MEGATRON_2022 = dataclasses.replace(MEGATRON_2021, accumulate_bytes=0.0)
SELECTIVE = dataclasses.replace(
    MEGATRON_2022, sequence_parallel=True, recomputes_attention=True, kept_score_bytes=0.0
)


# Megatron-Core in 2024: fused causal attention, nothing computed again.
MEGATRON_CORE = Implementation(sequence_parallel=True, gradient_bytes=4.0, accumulate_bytes=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Nodes of one kind."""

    device: DeviceKind
    per_node: int
    nic_bytes_per_s: float  # that messages get of all NICs of a node
    fabric: Fabric = "infiniband"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What is fitted to runs, as factors of what is shipped."""

    rows: float = 1.0  # of the calibration's products: `ProductSpeed`
    columns: float = 1.0
    depth: float = 1.0
    share: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    layer_call: float = 1.0  # of `Implementation.layer_call_s`
    inside: float = 1.0  # of the bandwidth inside nodes
    between: float = 1.0  # of that of their NICs
    kinds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of devices, by kind
    other_kinds: float = 1.0

    def calibration(self, shipped: Calibration) -> Calibration:
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
    machines: tuple[tuple[Machine, ...], ...]  # of each stage: one for each kind in it
    layers: tuple[int, ...]  # of each stage
    tensor: int
    data: int
    chunks: int = 1
    sequences: int  # in a microbatch
    microbatches: int
    dtype: str = "bfloat16"
    checkpointing: Checkpointing = "none"
    implementation: Implementation = MEGATRON_2021
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
    def choice(self) -> tuple[object, ...]:
        """Runs with the same one do the same on as many devices: there one can choose."""
        return self.model, self.num_devices, self.sequences * self.microbatches * self.data


def groups(run: Run, machine: Machine, fitted: Fitted) -> tuple[Group | None, Group | None]:
    """Of `data` and of `tensor`, where all nodes are like this one."""
    per_node, own = machine.per_node, machine.device.link
    inside = dataclasses.replace(
        own, bandwidth_bytes_per_s=fitted.inside * own.bandwidth_bytes_per_s
    )

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
    """What one of several has of a node's network."""
    bandwidth = fitted.between * machine.nic_bytes_per_s / sharers
    return Link(fabric=machine.fabric, bandwidth_bytes_per_s=bandwidth, latency_s=2e-6)


def transfer_s(run: Run, machine: Machine, fitted: Fitted) -> float:
    """Seconds of a boundary: each device of `tensor` sends its part, all of a node at once."""
    num_tokens = run.sequences * run.model.context_length
    part = costs.boundary_bytes(run.model, num_tokens, run.dtype) / run.tensor
    if run.num_devices <= machine.per_node:
        return part / (fitted.inside * machine.device.link.bandwidth_bytes_per_s)
    return nic(machine, fitted, min(machine.per_node, run.data * run.tensor)).time_s(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a run's parts: forward and backward of each virtual stage, and once a step."""

    forward_s: list[float]
    backward_s: list[float]
    once_s: float


def times(run: Run, fitted: Fitted) -> Times:
    """What is predicted of each part. The slowest replica of a stage sets its pace.

    These systems wait for a boundary at both ends of it, so its time is part of the tasks: of both
    ways at once, half of it in the forward and half in the backward.
    """
    sent_s = [
        max(transfer_s(run, m, fitted) for m in (*here, *there))
        for here, there in itertools.pairwise(run.machines)
    ]
    waits_s = [before + after for before, after in itertools.pairwise([0.0, *sent_s, 0.0])]
    known: dict[tuple[int, bool, bool, int], StageTimes] = {}

    def part(stage: int, blocks: int, is_first: bool, is_last: bool) -> list[StageTimes]:
        found = []
        for machine in run.machines[stage]:
            key = (blocks, is_first, is_last, id(machine))
            if key not in known:
                known[key] = _stage_times(run, machine, fitted, blocks, is_first, is_last)
            found.append(known[key])
        return found

    num_virtual = run.stages * run.chunks
    shares = [split_chunks(blocks, run.chunks) for blocks in run.layers]
    virtual = [
        part(v % run.stages, shares[v % run.stages][v // run.stages], v == 0, v == num_virtual - 1)
        for v in range(num_virtual)
    ]
    ends = range(run.stages)
    whole = [part(s, run.layers[s], s == 0, s == run.stages - 1) for s in ends]
    return Times(
        forward_s=[
            max(t.whole_forward_s for t in kinds) + waits_s[v % run.stages] / 2
            for v, kinds in enumerate(virtual)
        ],
        backward_s=[
            max(t.whole_backward_s for t in kinds) + waits_s[v % run.stages] / 2
            for v, kinds in enumerate(virtual)
        ],
        once_s=max(t.once_s for kinds in whole for t in kinds),
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
        num_blocks=blocks,
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
    parts = times(run, fitted)
    chunks = [f + b for f, b in zip(parts.forward_s, parts.backward_s, strict=True)]
    stages = [sum(chunks[s :: run.stages]) for s in range(run.stages)]
    most = max(run.microbatches * s + (sum(stages) - s) / run.chunks for s in stages)
    return most + parts.once_s


def predict_s(run: Run, fitted: Fitted) -> float:
    """A step, by simulating its tasks."""
    parts = times(run, fitted)
    name: Schedule = "interleaved_1f1b" if run.chunks > 1 else "1f1b"
    tasks = schedule.schedule(name, run.stages, run.microbatches, num_chunks=run.chunks)
    no_time = [(0.0, 0.0)] * (run.stages - (run.chunks == 1))
    simulation = schedule.simulate(tasks, parts.forward_s, parts.backward_s, no_time)
    return simulation.step_time_s + parts.once_s


# ---- files ---------------------------------------------------------------------------------------


def _machine(kind: str, per_node: int, nic_bytes_per_s: float) -> Machine:
    """Of the catalogue, on InfiniBand."""
    device = topology.known_device(kind)
    inside = catalogue.REACHED["nvlink"] * device.link.bandwidth_bytes_per_s
    device = dataclasses.replace(
        device, link=dataclasses.replace(device.link, bandwidth_bytes_per_s=inside)
    )
    reached = catalogue.REACHED["infiniband"] * nic_bytes_per_s
    return Machine(device=device, per_node=per_node, nic_bytes_per_s=reached)


machine = functools.cache(_machine)


def _integers(row: Row, *names: str) -> list[int]:
    return [int(float(row[name])) for name in names]


def _gpt(row: Row, vocab: int) -> ModelConfig:
    return _model(*_integers(row, "layers", "hidden", "heads", "seq"), vocab)


def _model(layers: int, width: int, heads: int, length: int, vocab: int) -> ModelConfig:
    """GPT: learned positions, tied embeddings."""
    return ModelConfig(
        num_layers=layers,
        width=width,
        num_heads=heads,
        context_length=length,
        vocab_size=vocab,
        positions="learned",
        tied_embeddings=True,
    )


def vtrain(row: Row) -> Run:
    """Megatron-DeepSpeed, full checkpointing; the source of the file assumes the vocabulary.

    A forward of a layer takes its Python 0.8 ms: the shortest of the runs on single nodes.
    """
    model = _gpt(row, 51200)
    tensor, data, stages = _integers(row, "t", "d", "p")
    batch, sequences = _integers(row, "global_batch", "micro_batch")
    return Run(
        name=f"{model.width} wide, {model.num_layers} layers, "
        f"tensor {tensor} data {data} stages {stages}, {sequences} sequences",
        model=model,
        machines=((machine("a100_80gb", 8, 100e9),),) * stages,
        layers=split_chunks(model.num_layers, stages),
        tensor=tensor,
        data=data,
        sequences=sequences,
        microbatches=batch // (data * sequences),
        checkpointing="full",
        implementation=dataclasses.replace(MEGATRON_2021, layer_call_s=0.8e-3),
        measured_s=float(row["measured_iter_time_ms"]) / 1e3,
    )


def megatron(row: Row) -> Run:
    """Megatron-LM on Selene: 8 HDR NICs a node."""
    model = _gpt(row, *_integers(row, "vocab"))
    tensor, stages, data, chunks = _integers(row, "t", "p", "d", "interleave_v")
    batch, sequences = _integers(row, "global_batch", "micro_batch")
    mode = row.get("mode", "")
    implementation = MEGATRON_2022 if mode else MEGATRON_2021
    return Run(
        name=f"{row['model']}, {mode}" if mode else row["model"],
        model=model,
        machines=((machine("a100_80gb", 8, 200e9),),) * stages,
        layers=split_chunks(model.num_layers, stages),
        tensor=tensor,
        data=data,
        chunks=chunks,
        sequences=sequences,
        microbatches=batch // (data * sequences),
        checkpointing="none" if "selective" in mode else "full",
        implementation=SELECTIVE if "selective" in mode else implementation,
        measured_s=float(row.get("measured_iter_time_s") or row["derived_iter_time_s"]),
    )


def megatron_core(row: Row) -> Run:
    """Megatron-Core on 8 H100 a node with a 400 Gb/s NIC each.

    The table leaves out the microbatch and the interleaving: taken for one sequence and one layer.
    """
    model = _gpt(row, *_integers(row, "vocab"))
    tensor, stages, data, batch = _integers(row, "t", "p", "d", "global_batch")
    tokens = batch * model.context_length
    blocks = model.num_layers * costs.block_forward_flop(model, tokens)
    flop = 3 * (blocks + costs.head_forward_flop(model, tokens))
    return Run(
        name=row["model"],
        model=model,
        machines=((machine("h100", 8, 400e9),),) * stages,
        layers=split_chunks(model.num_layers, stages),
        tensor=tensor,
        data=data,
        chunks=model.num_layers // stages if stages > 1 else 1,
        sequences=1,
        microbatches=batch // data,
        implementation=MEGATRON_CORE,
        measured_s=flop / (float(row["tflops_per_gpu"]) * 1e12 * tensor * stages * data),
    )


# Of the devices of Sailor's clusters: dense peaks of their data sheets (TFLOP/s in float16 with
# sums in float32, memory in GB/s), and what all-reduces of 8 MB reach on so many devices of a node, in
# GB/s, and messages between nodes (eth-easl/sailor@cf2c8e3, network_coeffs_all_homo.json).
SAILOR = {
    "RTX-3090": (71.0, 936.0, {2: 31.0, 8: 5.0}, 0.115),
    "RTX-2080": (40.3, 448.0, {2: 9.5, 8: 24.0}, 2.86),
    "Titan-RTX": (65.2, 672.0, {2: 9.8, 8: 23.0}, 2.86),
    "GH-96": (989.0, 4000.0, {4: 155.0}, 92.0),
}


@functools.cache
def _sailor_machine(kind: str, tensor: int) -> Machine:
    peak, memory, inside, between = SAILOR[kind]
    link = Link(fabric="local", bandwidth_bytes_per_s=inside[tensor] * 1e9, latency_s=5e-6)
    device = DeviceKind(
        name=kind,
        peak_flop_per_s={"bfloat16": peak * 1e12},
        memory_bytes=0.0,
        memory_bandwidth_bytes_per_s=memory * 1e9,
        link=link,
        calibration=machine("a100_80gb", 8, 0.0).device.calibration,
    )
    return Machine(device=device, per_node=tensor, nic_bytes_per_s=between * 1e9, fabric="ethernet")


def sailor(row: Row) -> Run:
    """DeepSpeed without checkpointing on nodes of unlike devices; layers count the two ends."""
    model = _gpt(row, *_integers(row, "vocab"))
    data, batch, sequences = _integers(row, "d", "global_batch", "micro_batch")
    layers = [int(n) for n in row["profile_layers_per_stage_incl_embed_head"].split("|")]
    layers[0] -= 1
    layers[-1] -= 1
    if sum(layers) != model.num_layers:  # one row has the layers of another model
        layers = list(split_chunks(model.num_layers, len(layers)))
    found = [re.findall(r"\[([\w-]+) tp(\d+)\]", stage) for stage in row["stage_replicas"].split("||")]
    tensor = int(found[0][0][1])
    return Run(
        name=f"{row['model']}, {row['stage_replicas']}, {sequences} sequences",
        model=model,
        machines=tuple(
            tuple(_sailor_machine(kind, int(tp)) for kind, tp in dict.fromkeys(stage))
            for stage in found
        ),
        layers=tuple(layers),
        tensor=tensor,
        data=data,
        sequences=sequences,
        microbatches=batch // (data * sequences),
        implementation=dataclasses.replace(MEGATRON_2021, gradient_bytes=4.0, layer_call_s=0.8e-3),
        measured_s=float(row["measured_iter_time_s"]),
        doubtful=bool(row["note"]),
    )


# ---- memory --------------------------------------------------------------------------------------


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
    total = sum(bytes_of[item] for item in held.items or bytes_of)
    return 100 * total / _bytes(held.share_of) if held.share_of else total / 2**30


def _bytes(held: Held) -> float:
    return 2**30 * predict_held(held)


STATES = ("parameters", "optimizer", "replicas", "gradients", "gathered")
# Layers, width, heads, stages, chunks, sequences: arXiv:2205.05198, table 3. 8 devices share a layer.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 3, 1),
    "530B": (105, 20480, 128, 35, 3, 1),
    "1T": (128, 25600, 160, 64, 1, 1),
}


def korthikanti(row: Row) -> Held:
    """Figures 1 and 7: of a first stage, its Transformer layers alone."""
    layers, width, heads, stages, chunks, sequences = KORTHIKANTI[row["model"]]
    mode = row["mode"]
    implementation = dataclasses.replace(
        MEGATRON_2022,
        sequence_parallel="seqpar" in mode,
        kept_score_bytes=0.0 if "selective" in mode else MEGATRON_2022.kept_score_bytes,
    )
    tasks = schedule.schedule(
        "interleaved_1f1b" if chunks > 1 else "1f1b", stages, 2 * stages, num_chunks=chunks
    )
    stage = StageShape(
        num_blocks=layers // stages,
        is_first=False,
        is_last=False,
        data=1,
        tensor=8,
        sequences=sequences,
        chunks=chunks,
        in_flight=schedule.max_in_flight(tasks[0], [1 / chunks] * chunks),
        head_in_flight=0,
        dtype="bfloat16",
        checkpointing="full" if mode == "full" else "none",
    )
    held = Held(
        name=f"{row['model']}, {mode}, {row['quantity']}",
        model=_model(layers, width, heads, 2048, 51200),
        stage=stage,
        implementation=implementation,
        items=STATES[:4] if "param" in row["quantity"] else ("activations",),
        measured=float(row["published_value"]),
    )
    if "pct_of_none" not in row["quantity"]:
        return held
    none = dataclasses.replace(
        held,
        stage=dataclasses.replace(stage, checkpointing="none"),
        implementation=MEGATRON_2022,
    )
    return dataclasses.replace(held, share_of=none)


# Llama 3.1 (arXiv:2407.21783, table 3): layers, width, heads, key-value heads, feed-forward.
LLAMA = {"8B": (32, 4096, 32, 8, 14336), "405B": (126, 16384, 128, 8, 53248)}
# Selective checkpointing keeps the results of attention and of every second product. PyTorch's loss
# keeps logits in bfloat16 and float32, log-softmax in float32, and both gradients.
TORCHTITAN = Implementation(sequence_parallel=True, kept_products=0.5, logit_bytes=16.0)


def torchtitan(row: Row) -> Held:
    """The largest stage of Llama 3.1 on H100 and H200; `context` cuts sequences."""
    layers, width, heads, kv_heads, inner = LLAMA[row["model"].split("-")[1]]
    fsdp, tensor, stages, context, local = _integers(row, "fsdp", "tp", "pp", "cp", "local_batch")
    length = int(row["seq"] or 8192)
    model = ModelConfig(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_width=inner,
        context_length=length // context,
        vocab_size=128256,
        activation="swiglu",
        norm="rms_norm",
    )
    full = "full" in row["recompute"]
    chunks = 2 if "Interleaved" in row["technique"] else 1
    shards, microbatches = fsdp * context, stages * chunks
    stage = StageShape(
        num_blocks=-(-layers // stages),
        is_first=True,
        is_last=stages == 1,
        # In a pipeline, parameters stay gathered, and gradients whole, for all microbatches.
        data=shards if stages > 1 else 1,
        fsdp=1 if stages > 1 else shards,
        tensor=tensor,
        sequences=max(1, local // microbatches),
        chunks=chunks,
        in_flight=min(microbatches, (2 * stages - 1 + (chunks - 1) * stages) / chunks),
        head_in_flight=1,
        dtype="bfloat16",
        checkpointing="full" if full else "dots",
    )
    return Held(
        name=f"{row['model']}, {row['technique']}, {row['gpus']} GPUs, {length} tokens",
        model=model,
        stage=stage,
        implementation=TORCHTITAN,
        items=(),
        measured=float(row["memory_GiB"]),
    )
