"""Reads the CSV files of published training runs: each function takes a row of one file."""

import dataclasses
import functools
import re
from collections.abc import Mapping

from benchmarks.published import Held, Machine, Run
from holmesjax.config import ModelConfig
from holmesjax.costs.implementation import Implementation
from holmesjax.costs.products import blocks_forward_flop, head_forward_flop
from holmesjax.costs.stage_shape import StageShape
from holmesjax.planner.layer_ranges import split_chunks
from holmesjax.schedules import pipeline_schedules
from holmesjax.topology import fabrics, loading
from holmesjax.topology.machines import DeviceKind, Link

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
# Then products add to the gradients themselves. SELECTIVE: Korthikanti et al., arXiv:2205.05198.
MEGATRON_2022 = dataclasses.replace(MEGATRON_2021, accumulate_bytes=0.0)
SELECTIVE = dataclasses.replace(
    MEGATRON_2022, sequence_parallel=True, recomputes_attention=True, kept_score_bytes=0.0
)
# Megatron-Core in 2024: fused causal attention, nothing computed again, and in these runs
# `--tp-comm-overlap` (NVIDIA/Megatron-LM@0010ab7, README.md). Its loss makes float32 logits of
# those in half precision, then their maximum, differences, exponentials, sum and quotients, and the
# gradient's product and cast, each in an operation of its own
# (megatron/core/tensor_parallel/cross_entropy.py, @00611e6). Older systems do the same, but the
# calibration of the A100 was fitted to their steps, so it has what that takes.
MEGATRON_CORE = Implementation(
    sequence_parallel=True,
    gradient_bytes=4.0,
    accumulate_bytes=0.0,
    tensor_overlaps=True,
    loss_bytes=52.0,
)


def _machine(kind: str, per_node: int, nic_bytes_per_s: float) -> Machine:
    """A machine of the catalogue, on InfiniBand."""
    device = loading.known_device(kind)
    inside = fabrics.FABRICS["nvlink"].reached * device.link.bandwidth_bytes_per_s
    device = dataclasses.replace(
        device, link=dataclasses.replace(device.link, bandwidth_bytes_per_s=inside)
    )
    reached = fabrics.FABRICS["infiniband"].reached * nic_bytes_per_s
    return Machine(device=device, per_node=per_node, nic_bytes_per_s=reached)


machine = functools.cache(_machine)


def _integers(row: Row, *names: str) -> list[int]:
    return [int(float(row[name])) for name in names]


def _gpt(row: Row, vocab: int) -> ModelConfig:
    layers, width, heads, length = _integers(row, "layers", "hidden", "heads", "seq")
    return _model(layers, width, heads, length, vocab)


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
        replicas=((machine("a100_80gb", 8, 100e9),) * stages,),
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
        replicas=((machine("a100_80gb", 8, 200e9),) * stages,),
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
    blocks = blocks_forward_flop(model, tokens)
    flop = 3 * (blocks + head_forward_flop(model, tokens))
    return Run(
        name=row["model"],
        model=model,
        replicas=((machine("h100", 8, 400e9),) * stages,),
        layers=split_chunks(model.num_layers, stages),
        tensor=tensor,
        data=data,
        chunks=model.num_layers // stages if stages > 1 else 1,
        sequences=1,
        microbatches=batch // data,
        implementation=MEGATRON_CORE,
        measured_s=flop / (float(row["tflops_per_gpu"]) * 1e12 * tensor * stages * data),
    )


# Of the devices of Sailor's clusters: peaks of their data sheets (TFLOP/s in float32, memory in
# GB/s), and what 16 MB reach, in GB/s: from half of so many devices of a node to the other half,
# all pairs together, and from node to node (eth-easl/sailor@cf2c8e3, network_coeffs_all_homo.json,
# measured by sailor/profiling/networking/test_sendrecv.py).
SAILOR = {
    "RTX-3090": (35.6, 936.0, {2: 37.2, 8: 5.15}, 0.115),
    "RTX-2080": (10.1, 448.0, {2: 10.2, 8: 25.3}, 2.86),
    "Titan-RTX": (16.3, 672.0, {2: 10.4, 8: 24.1}, 2.86),
    "GH-96": (494.5, 4000.0, {4: 175.9}, 92.0),
}
# DeepSpeed's default, which they keep (ds_config.json there): float32. In NVIDIA's container, which
# they use, products are then TensorFloat-32 where the device has that: on the first and the last.
DEEPSPEED = dataclasses.replace(
    MEGATRON_2021,
    score_bytes=25.0,
    gradient_bytes=4.0,
    accumulate_bytes=12.0,
    layer_call_s=0.8e-3,
)


@functools.cache
def _sailor_machine(kind: str, tensor: int) -> Machine:
    peak, memory, inside, between = SAILOR[kind]
    pair_bytes_per_s = 1e9 * inside[tensor] / (tensor / 2)
    link = Link(fabric="local", bandwidth_bytes_per_s=pair_bytes_per_s, latency_s=5e-6)
    device = DeviceKind(
        name=kind,
        peak_flop_per_s={"float32": peak * 1e12},
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
    stages = [
        [
            (kind, int(tensor))
            for count, kind, tensor in re.findall(r"(\d+)x\[([\w-]+) tp(\d+)\]", stage)
            for _ in range(int(count))
        ]
        for stage in row["stage_replicas"].split("||")
    ]
    # A replica is a pipeline through the machines that have its place in the lists of all stages.
    replicas = dict.fromkeys(zip(*stages, strict=True))
    tensor = stages[0][0][1]
    return Run(
        name=f"{row['model']}, {row['stage_replicas']}, {sequences} sequences",
        model=model,
        replicas=tuple(tuple(_sailor_machine(*place) for place in places) for places in replicas),
        layers=tuple(layers),
        tensor=tensor,
        data=data,
        sequences=sequences,
        microbatches=batch // (data * sequences),
        dtype="float32",
        implementation=DEEPSPEED,
        sends_both_ways=False,  # `dist.send`, then `dist.recv` (deepspeed/p2p.py there)
        measured_s=float(row["measured_iter_time_s"]),
        doubtful=bool(row["note"]),
    )


# ---- memory --------------------------------------------------------------------------------------

STATES = ("parameters", "optimizer", "replicas", "gradients", "gathered")
# Layers, width, heads, stages, chunks, sequences, on 8 devices of `tensor`: arXiv:2205.05198,
# table 3.
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
    tasks = pipeline_schedules.schedule(
        "interleaved_1f1b" if chunks > 1 else "1f1b", stages, 2 * stages, num_chunks=chunks
    )
    stage = StageShape(
        blocks=(layers // stages,),
        is_first=False,
        is_last=False,
        data=1,
        tensor=8,
        sequences=sequences,
        chunks=chunks,
        in_flight=pipeline_schedules.max_in_flight(tasks[0], [1 / chunks] * chunks),
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
        blocks=(-(-layers // stages),),
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
