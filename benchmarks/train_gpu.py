"""A model trained on one NVIDIA GPU, beside PyTorch: python -m benchmarks.train_gpu

Llamas of about 1.3 and 3.6 billion parameters at 2k and 4k tokens of context, bfloat16 with float32
masters, AdamW with clipping, random tokens, 65,536 of them in a step; the smaller one in fp8, too.

    HolmesJAX   what `launch train` runs: the planner's plan for this device, one stage, kernels
                chosen by `auto`, and the launcher's XLA flags
    PyTorch     torch.compile, scaled_dot_product_attention, fused AdamW, autocast; the largest
                microbatch that fits, else with every layer computed again in the backward

    tokens/s    of a step, the median of the steps after the first three; `spread` is the middle
                half of them over it
    FLOP        three times the forward's products with weights, and of attention those of the pairs
                that a causal mask leaves: 6 N + 6 S H K L a token, for N parameters in products, L
                layers and S tokens of context
    MFU         FLOP/s over the data sheet's 989 TFLOP/s; `all pairs` counts attention twice, as
                papers that do not halve it
    memory      the allocator's peak

Both start from the same parameters and see the same tokens, so their losses must agree within 0.02
nats. Each is a process of its own, one after the other. `--rehearse` runs it small, on a CPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.pipeline_overhead import middle
from benchmarks.provenance import RESULTS, provenance
from holmesjax import xla_flags
from holmesjax.config import (
    AUTO,
    CHECKOUT,
    Config,
    DataConfig,
    Fp8Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from holmesjax.costs.products import blocks_forward_flop, head_forward_flop, layer_weight_flop
from holmesjax.job import Job
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.plan.device_pool import DevicePool
from holmesjax.planner.planner import make_plan
from holmesjax.topology import loading
from holmesjax.topology.catalogue import DATA_SHEETS
from holmesjax.units import parse

NAME = "train_gpu"
LLAMA: dict[str, Any] = {"activation": "swiglu", "norm": "rms_norm", "vocab_size": 32_000}
MODELS = {
    "1.3B": ModelConfig(
        num_layers=24, width=2048, num_heads=16, mlp_width=5504, context_length=1, **LLAMA
    ),
    "3.6B": ModelConfig(
        num_layers=30, width=3072, num_heads=24, mlp_width=8192, context_length=1, **LLAMA
    ),
}
# These are not of PyTorch.
MODELS["1.3B-fp8"] = dataclasses.replace(MODELS["1.3B"], fp8=Fp8Config())
MODELS["1.3B-fp8-current"] = dataclasses.replace(MODELS["1.3B"], fp8=Fp8Config(scaling="current"))
SMALL = ModelConfig(
    num_layers=2,
    width=64,
    num_heads=4,
    mlp_width=128,
    context_length=1,
    **LLAMA | {"vocab_size": 256},
)
CONTEXTS = (2048, 4096)
TOKENS = 65_536  # of a step
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, schedule="constant")
WARM_UP_STEPS, STEPS = 3, 10
MAX_DIFFERENCE = 0.02  # of losses, in nats
SYSTEMS = ("HolmesJAX", "PyTorch")
TIMEOUT_S = 1800.0

Line = dict[str, Any]


def sizes_of(name: str, context: int, kind: str) -> ModelConfig:
    """A model by its name; on a CPU a small one in its place."""
    model = MODELS[name]
    if kind == "cpu":
        model = dataclasses.replace(SMALL, fp8=model.fp8)
    return dataclasses.replace(model, context_length=context)


def make_config(model: ModelConfig, tokens: int, dtype: Literal["float32", "bfloat16"]) -> Config:
    return Config(
        topology="device",
        run=RunConfig(dir="unused"),
        train=TrainConfig(
            steps=WARM_UP_STEPS + STEPS,
            global_batch=tokens // model.context_length,
            compute_dtype=dtype,
        ),
        model=model,
        data=DataConfig(corpus="python-stdlib"),
        optimizer=OPTIMIZER,
        parallel=ParallelConfig(stages=1),
    )


def make_job(config: Config, kind: str) -> Job:
    """On one device of a kind."""
    text = (
        "name: device\nclusters:\n"
        "  - name: local\n    fabric: local\n    nodes: 1\n"
        f"    devices: {{kind: {kind}, count: 1}}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "device.yaml")
        path.write_text(text)
        topology = loading.load(path)
    usable_memory = DevicePool.of_run(os.environ).usable_memory
    plan = make_plan(config, topology, usable_memory=usable_memory)
    return Job(config=config, topology=topology, plan=plan)


def kind_of(device_name: str) -> str | None:
    """The catalogue's kind of a device, by what its driver calls it.

    >>> kind_of("NVIDIA H200"), kind_of("NVIDIA H100 80GB HBM3"), kind_of("Quadro")
    ('h200', 'h100', None)
    """
    name = device_name.lower()
    return next((kind for kind in ("h200", "h100", "b200") if kind in name), None)


def token_flop(model: ModelConfig, *, all_pairs: bool) -> float:
    """FLOP of a token's forward and backward.

    >>> model = ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16)
    >>> token_flop(model, all_pairs=True) == 6 * (12 * 8**2 + 8 * 16) + 12 * 4 * 8
    True
    >>> token_flop(model, all_pairs=True) - token_flop(model, all_pairs=False) == 6 * 4 * 8
    True
    """
    [block] = kinds(model).blocks
    weights = model.num_layers * layer_weight_flop(block, 1)
    pairs = blocks_forward_flop(model, 1) - weights
    layers = weights + (pairs if all_pairs else pairs / 2)
    return 3 * (layers + head_forward_flop(model, 1))


def inputs(config: Config, step: int) -> dict[str, np.ndarray]:
    shape = (config.train.global_batch, config.model.context_length + 1)
    rows = np.random.default_rng(step).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    return {"token_BL": rows[:, :-1].copy(), "target_BL": rows[:, 1:].copy()}


# ---- one system, in a process of its own ---------------------------------------------------------


def train_holmesjax(config: Config, kind: str) -> Iterator[Line]:
    import jax

    from holmesjax.parallel.mesh import build_meshes
    from holmesjax.runtime import program_cache
    from holmesjax.runtime.kernel_choice import attention_lines, optimizer_lines
    from holmesjax.runtime.pipeline import make_runner
    from holmesjax.runtime.timeline import Clock
    from holmesjax.training_setup import make_chunks

    job = make_job(config, kind)
    program_cache.use(AUTO, os.environ, print)  # a second try does not compile again
    meshes = build_meshes(job.plan, jax.devices()[:1])
    chunks = make_chunks(job, dict(enumerate(meshes)))
    runner = make_runner(job.plan, chunks)
    states = runner.init(config.train.seed)
    recompute = job.plan.activation_checkpointing
    how = [f"{job.plan.microbatches} microbatches", f"activation checkpointing {recompute}"]
    lines = (*attention_lines(chunks), *optimizer_lines(chunks))
    how += (" ".join(line.split()) for line in lines)
    yield {"how": ", ".join(how)}
    with Clock(1) as clock:
        for step in range(config.train.steps):
            batch, start = inputs(config, step), time.perf_counter()
            states, metrics = runner.train_step(
                states, runner.placer.place_all(batch), clock.timeline()
            )
            jax.block_until_ready(states)
            yield {"s": time.perf_counter() - start, "loss": float(metrics["loss"])}
    stats = jax.devices()[0].memory_stats() or {}
    yield {"peak_bytes": stats.get("peak_bytes_in_use", 0)}


def train_pytorch(config: Config, kind: str) -> Iterator[Line]:
    # Here, as PyTorch is an extra that nothing else needs.
    from benchmarks import pytorch_llama

    yield from pytorch_llama.train(config, lambda step: inputs(config, step), on_gpu=kind != "cpu")


def serve(told: Line) -> None:
    """Prints a line of JSON for each step."""
    train = train_holmesjax if told["system"] == "HolmesJAX" else train_pytorch
    model = sizes_of(told["model"], told["context"], told["kind"])
    config = make_config(model, told["tokens"], "float32" if told["kind"] == "cpu" else "bfloat16")
    for line in train(config, told["kind"]):
        print(json.dumps(line), flush=True)


def measure(system: str, model: str, context: int, tokens: int, kind: str) -> Line:
    """Returns the line that a process prints; `failed` has its last words if it fails.

    Args:
      system: what trains.
      model: a size by its name.
      context: tokens of a sequence.
      tokens: tokens of a step.
      kind: the kind of device.
    """
    told = {"system": system, "model": model, "context": context, "tokens": tokens, "kind": kind}
    flags = xla_flags.joined(xla_flags.for_devices({kind}), os.environ.get("XLA_FLAGS", ""))
    env = os.environ | {"XLA_FLAGS": flags, **DevicePool.of_run(os.environ).variables}
    if system == "PyTorch":
        env["JAX_PLATFORMS"] = "cpu"  # it needs the device's memory
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{NAME}", "--one", json.dumps(told)],
        cwd=CHECKOUT,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    line: Line = {**told, "xla_flags": flags, "s": [], "losses": []}
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return line | {"failed": done.stderr.strip().splitlines()[-1:]}
    for text in done.stdout.splitlines():
        if text.startswith("{"):
            found = json.loads(text)
            if "s" in found:
                line["s"].append(found["s"])
                line["losses"].append(found["loss"])
            else:
                line |= found
    return line


# ---- all of them ---------------------------------------------------------------------------------


def judge(line: Line, sizes: ModelConfig) -> Line:
    """With its rates."""
    times = middle(line["s"][WARM_UP_STEPS:])
    rate = line["tokens"] / times["median"]
    peak = parse(DATA_SHEETS[line["kind"]]["peak_flop_per_s"]["bfloat16"], "FLOP/s")
    flop = {pairs: rate * token_flop(sizes, all_pairs=pairs) for pairs in (False, True)}
    return line | {
        "tokens_per_s": rate,
        "spread": times["spread"],
        "tflop_per_s": flop[False] / 1e12,
        "mfu": flop[False] / peak,
        "mfu_all_pairs": flop[True] / peak,
    }


def table(lines: list[Line]) -> str:
    rows = [
        "| model | context | | tokens/s | spread | TFLOP/s | MFU | all pairs | memory | how |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for x in lines:
        start = f"| {x['model']} | {x['context']} | {x['system']} |"
        if "failed" in x:
            rows.append(f"{start} failed: {' '.join(x['failed'])} | | | | | | |")
            continue
        rows.append(
            f"{start} {x['tokens_per_s']:,.0f} | {x['spread']:.1%} | {x['tflop_per_s']:.0f} | "
            f"{x['mfu']:.1%} | {x['mfu_all_pairs']:.1%} | {x['peak_bytes'] / 2**30:.1f} GiB | "
            f"{x['how']} |"
        )
    return "\n".join(rows)


def disagreements(lines: list[Line]) -> list[str]:
    """Cases in which two systems did not train the same model on the same tokens."""
    found = []
    by_case: dict[tuple, list[Line]] = {}
    for line in lines:
        if "failed" not in line:
            by_case.setdefault((line["model"], line["context"]), []).append(line)
    for case, of_case in by_case.items():
        off = np.ptp([line["losses"] for line in of_case], axis=0).max()
        if off > MAX_DIFFERENCE:
            found.append(f"{case[0]} at {case[1]}: losses differ by {off:.3f} nats")
    return found


def device_kind() -> tuple[str, str | None]:
    """The name of JAX's first device, which only another process may ask for: it takes memory."""
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep=chr(9))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    platform, name = done.stdout.strip().splitlines()[-1].split("\t")
    return name, kind_of(name) if platform == "gpu" else None


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(all)")
    add("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="tokens (2048 4096)")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(all)")
    add("--rehearse", action="store_true", help="small, on a CPU; no result")
    add("--out", type=Path, default=RESULTS, help="folder (results/)")
    add("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        serve(args.one)
        return 0
    name, kind = device_kind()
    if args.rehearse:
        kind, args.models, args.contexts = "cpu", ["1.3B"], [32]
    elif kind is None:
        print(
            f"{NAME}: no GPU of a known kind here ({name}); not measured. --rehearse runs it small"
        )
        return 2
    lines = []
    for model in args.models:
        for context in args.contexts:
            for system in args.systems:
                if system == "PyTorch" and MODELS[model].fp8:
                    continue
                line = measure(system, model, context, 8 * 32 if args.rehearse else TOKENS, kind)
                if "failed" not in line:
                    line = judge(line, sizes_of(model, context, kind))
                lines.append(line)
                print(table([line]).splitlines()[-1], flush=True)
    wrong = disagreements(lines)
    print(*wrong, sep="\n")
    status = 1 if wrong or any("failed" in line for line in lines) else 0
    if args.rehearse:
        return status
    result = {
        **provenance(NAME, name),
        "lines": lines,
        "wrong": wrong,
    }
    file = f"{NAME}_{name.lower().replace(' ', '_')}"
    about = f"commit {result['commit']}, {result['date']}, {name}: `{result['command']}`"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{file}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{file}.md").write_text(f"{table(lines)}\n\n{about}\n")
    print("", table(lines), about, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
