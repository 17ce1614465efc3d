"""The parts of `gpu_day`: functions that yield rows, each called in a process of its own.

A function takes the argument of its part, and whether this is a rehearsal: tiny shapes on a CPU.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day_processes import Row
from holmesjax import xla_flags
from holmesjax.config import CHECKOUT

REPEATS = 30

# ---- the machine ---------------------------------------------------------------------------------


def machine(_: None, rehearse: bool) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    from benchmarks.kernels_gpu import limits, measure
    from holmesjax.hosts import kernel_check

    device = jax.devices()[0]
    if not rehearse and device.platform != "gpu":
        raise SystemExit(f"JAX finds no GPU here, but {device.device_kind}; --rehearse needs none")
    yield {"what": "device", "is": f"{device.device_kind}, {device.client.platform_version}"}
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    smi = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(smi, capture_output=True, text=True, timeout=20)
        yield {"what": "driver, clocks, power", "is": " ".join(done.stdout.split())}
    assembler = kernel_check.find_assembler()
    yield {
        "what": "assembler of the Pallas kernels (ptxas)",
        "is": ".".join(map(str, assembler)) if assembler else "none found",
        "problem": None if rehearse else kernel_check.miscompiles(assembler),
    }
    most = limits(rehearse)
    yield {"what": "product of 8192^3, bfloat16", "rate": tera(most["flop_per_s"])}
    yield {"what": "sum of two arrays, read and written", "rate": giga(most["bytes_per_s"])}
    x = jnp.ones(2**12 if rehearse else 2**28, jnp.float32)
    pinned = x.sharding.with_memory_kind("pinned_host")
    on_host = jax.device_put(x, pinned)
    ways = {
        "device to pinned host": lambda: jax.device_put(x, pinned),
        "pinned host to device": lambda: jax.device_put(on_host, x.sharding),
    }
    for what, timing in measure(ways, rehearse).items():
        yield {"what": what, "rate": giga(x.nbytes / timing["s"]), "spread": timing["spread"]}


def tera(flop_per_s: float) -> str:
    return f"{flop_per_s / 1e12:.4g} TFLOP/s"


def giga(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"


# ---- values --------------------------------------------------------------------------------------


def values_of_cudnn(argument: Row, rehearse: bool) -> Iterator[Row]:
    from kernels.attention.cudnn import attention_cudnn

    def cudnn(q: Any, k: Any, v: Any, segments: Any, rule: Any, deterministic: bool) -> Any:
        implementation = "xla" if rehearse else "cudnn"
        run = functools.partial(attention_cudnn, implementation=implementation)
        out, log_sum_BLH = run(q, k, v, rule, return_residual=True)
        return out, log_sum_BLH.swapaxes(1, 2).astype("float32")

    yield _values(argument | {"feeds_log_sum": False}, cudnn, rehearse)


def values_of_pallas(argument: Row, rehearse: bool) -> Iterator[Row]:
    from kernels.attention import pallas, reference

    def plain(*args: Any, deterministic: bool) -> Any:
        return reference.attention_reference(*args)

    yield _values(argument, plain if rehearse else pallas.attention_pallas, rehearse)


def values_of_adamw(kept: Any, rehearse: bool) -> Iterator[Row]:
    """The bits of the kernel beside the reference's; a rehearsal has the reference in its place."""
    import jax

    from kernels import adamw_check
    from kernels.adamw import adamw_step
    from kernels.adamw_pallas import adamw_pallas

    def plain(leaves: Any, gradients: Any, told: Any, settings: Any, turns: Any) -> Any:
        rows = zip(leaves, gradients, settings, turns, strict=True)
        return [adamw_step(x, turn.undo(g) if turn else g, told, h) for x, g, h, turn in rows]

    for case in adamw_check.cases(kept, small=rehearse):
        if rehearse and not case.applies:
            continue
        # So that each operation rounds by itself on the CPU, too.
        with jax.disable_jit() if rehearse else contextlib.nullcontext():
            update = plain if rehearse else adamw_pallas
            found = adamw_check.check(case, update, 1 if rehearse else REPEATS)
        verdict = "FAILED" if found["problem"] else "ok"
        yield {"what": found["what"], "is": verdict, "problem": found["problem"]}


def _values(argument: Row, attention: Callable, rehearse: bool) -> Row:
    from kernels.attention.check import Case, check
    from kernels.attention.tiles import Rule

    case = Case(**{**argument, "rule": Rule(**argument.get("rule", {}))})
    if rehearse:
        case = case._replace(length=min(case.length, 40), head_width=8)
    found = check(case, attention, 2 if rehearse else REPEATS)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
    verdict = "FAILED" if found["problem"] else "ok"
    return {"what": found["what"], "is": verdict, "errors": errors, "problem": found["problem"]}


def shape(batch: int, length: int, heads: int, kv_heads: int, width: int, **more: Any) -> Row:
    """Returns the fields of a case of attention.

    Args:
      batch: sequences.
      length: tokens of each.
      heads: heads of queries.
      kv_heads: heads of keys and values.
      width: the width of a head.
      more: other fields by name.
    """
    names = ("batch", "length", "heads", "kv_heads", "head_width")
    return dict(zip(names, (batch, length, heads, kv_heads, width), strict=True)) | more


CUDNN = [
    shape(2, 398, 4, 2, 128),
    shape(2, 397, 4, 2, 128),  # an odd length, at which JAX alone has no gradients
    shape(2, 398, 4, 2, 64, rule={"window": 100}),
    shape(2, 398, 4, 2, 256),
]
# From one tile on, one thing more each.
PALLAS = [
    shape(1, 64, 1, 1, 64, rule={"causal": False}),
    shape(1, 128, 1, 1, 64),
    shape(1, 128, 1, 1, 64, deterministic=True),
    shape(2, 397, 4, 2, 64),
    shape(2, 397, 4, 2, 128),
    shape(2, 397, 4, 2, 128, deterministic=True),
    shape(2, 397, 4, 2, 128, has_documents=True),
    shape(2, 397, 4, 2, 128, rule={"window": 100, "soft_cap": 2.0}, has_documents=True),
    shape(2, 397, 4, 2, 256),
    shape(2, 2048, 20, 10, 128, has_documents=True),
    shape(2, 2048, 20, 10, 256),
]


# ---- speed ---------------------------------------------------------------------------------------


def speed(argument: Row, rehearse: bool) -> Iterator[Row]:
    """Forward and backward of attention, by everyone whose name begins as `argument` says."""
    from benchmarks.kernels_gpu import Attention, attention_calls, attention_rows

    names = "plain" if rehearse else argument["by"]
    case = Attention(64, 4, 2, 64) if rehearse else Attention(*argument["case"])
    calls = attention_calls(case, rehearse)
    forward, both = (
        {name: call for name, call in by_name.items() if name.startswith(names)}
        for by_name in calls
    )
    yield from attention_rows(case, forward, both, rehearse)


def lines_of(part: str, rehearse: bool) -> Iterator[Row]:
    """A part of `kernels_gpu`, beside what the device reaches now."""
    from benchmarks import kernels_gpu

    yield from kernels_gpu.PARTS[part](rehearse, kernels_gpu.limits(rehearse))


# ---- training ------------------------------------------------------------------------------------


def training(argument: Row, rehearse: bool) -> Iterator[Row]:
    from benchmarks import train_gpu

    name, kind = train_gpu.device_kind()
    if rehearse:
        kind = "cpu"
    if kind is None:
        raise SystemExit(f"no GPU of a known kind here: {name}")
    context, tokens = (32, 256) if rehearse else (4096, train_gpu.TOKENS)
    sizes = train_gpu.sizes_of(argument["model"], context, kind)
    system = argument["system"]
    what = f"{system}: {argument['model']} at {context} tokens"
    if system == "PyTorch" and importlib.util.find_spec("torch") is None:
        yield {"what": what, "is": "PyTorch is not installed"}
        return
    line = train_gpu.measure(system, argument["model"], context, tokens, kind)
    if "failed" in line:
        yield {"what": what, "problem": " ".join(line["failed"])}
        return
    line = train_gpu.judge(line, sizes)
    row = {
        "what": what,
        "is": line["how"],
        "rate": f"{line['tokens_per_s']:,.0f} tokens/s, {line['tflop_per_s']:.4g} TFLOP/s",
        "mfu": line["mfu"],
        "spread": line["spread"],
        "measured_gib": line["peak_bytes"] / 2**30,
        "losses": line["losses"],
    }
    if system == "HolmesJAX":
        config = train_gpu.make_config(sizes, tokens, "float32" if rehearse else "bfloat16")
        job = train_gpu.make_job(config, kind)
        predicted = sum(job.plan.stages[0].memory_bytes.values())
        faster = tokens / line["tokens_per_s"] / job.plan.step_time_s
        row |= {"predicted_gib": predicted / 2**30, "predicted_mfu": line["mfu"] * faster}
    yield row


# ---- runs ----------------------------------------------------------------------------------------


ONE_DEVICE = """
name: device
clusters:
  - {{name: a, fabric: local, nodes: 1, devices: {device}}}
"""
PACKED = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: 1, width: 512, num_heads: 4, context_length: 256}}
data: {{corpus: python-stdlib, documents: mask}}
train: {{steps: 1, global_batch: 4, compute_dtype: bfloat16}}
optimizer: {{learning_rate: 1.0e-3}}
"""


def doctor(_: None, rehearse: bool) -> Iterator[Row]:
    """The check of the Pallas kernels that stands before a run with documents."""
    with tempfile.TemporaryDirectory() as folder:
        run = _write(folder, PACKED, ONE_DEVICE, rehearse)
        yield _launch(["doctor", run], shown=r"\w+ +attention kernels")


PROFILED = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: 1, width: {width}, num_heads: {heads}, context_length: {context}}}
data: {{corpus: python-stdlib}}
train: {{steps: 1, global_batch: 4, compute_dtype: {dtype}}}
optimizer: {{learning_rate: 1.0e-3}}
"""


def profile(_: None, rehearse: bool) -> Iterator[Row]:
    """The calibration, as a row: the file is small, and part of the result."""
    sizes = {"width": 64, "heads": 4, "context": 32, "dtype": "float32"}
    if not rehearse:
        sizes = {"width": 4096, "heads": 32, "context": 4096, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        run = _write(folder, PROFILED, ONE_DEVICE, rehearse, **sizes)
        row = _launch(["profile", run, "--output", f"{folder}/found.yaml"])
        with contextlib.suppress(OSError):
            row["calibration"] = Path(folder, "found.yaml").read_text()
        yield row


SMALL_RUN = ["train.steps=2", "model.num_layers=2", "model.width=64", "model.context_length=64"]


def quickstart(_: None, rehearse: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", "configs/runs/quickstart.yaml", f"run.dir={folder}/run"]
        yield _launch(run + SMALL_RUN * rehearse)


PIPELINE = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: {layers}, width: {width}, num_heads: 16, context_length: {context}}}
data: {{corpus: python-stdlib}}
train: {{steps: {steps}, global_batch: 16, compute_dtype: {dtype}, log_every_s: 0}}
optimizer: {{learning_rate: 1.0e-3}}
parallel: {{stages: {stages}, microbatches: 8, schedule: 1f1b}}
log: {{tensorboard: false}}
"""
PIPELINE_SIZES = {"layers": 8, "width": 2048, "context": 2048, "steps": 20, "dtype": "bfloat16"}
TWO_CLUSTERS = """
name: shared
clusters:
  - {{name: a, fabric: local, nodes: 1, devices: {device}, nics: [{{kind: ethernet_25}}]}}
  - {{name: b, fabric: local, nodes: 1, devices: {device}, nics: [{{kind: ethernet_25}}]}}
links:
  - {{between: [a, b], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}}
"""
# Two nodes a cluster, which only Ethernet joins: each is a stage.
FOUR_NODES = TWO_CLUSTERS.replace("fabric: local, nodes: 1", "fabric: ethernet, nodes: 2")


def pipeline(_: None, rehearse: bool) -> Iterator[Row]:
    """Two processes, and then four, each with a stage, share the device and its memory.

    Boundaries go through the host. One process trains the same model before. The difference of the
    times is the cost of staging and of tcp that nothing overlaps with. A shared device has no
    bubble.
    """
    small = {"layers": 4, "width": 64, "context": 32, "steps": 3, "dtype": "float32"}
    sizes = small if rehearse else PIPELINE_SIZES
    untracked = "" if rehearse else "--xla_gpu_execution_progress_tracking=0"
    for stages, topology, flags in (
        (2, TWO_CLUSTERS, ""),
        (2, TWO_CLUSTERS, untracked),  # whether calls of programs return at once without it
        (1, ONE_DEVICE, ""),
        (4, FOUR_NODES, ""),
    ):
        with tempfile.TemporaryDirectory() as folder:
            run = _write(folder, PIPELINE, topology, rehearse, stages=stages, **sizes)
            command = ["train", run, "--launcher", "local"]  # it divides the device's memory
            what = f"a pipeline of {stages}" + f", {flags}" * bool(flags)
            yield _launch(command, flags=flags) | {"what": what}


def _write(folder: str, run: str, topology: str, rehearse: bool, **sizes: Any) -> str:
    """Writes a topology of this machine's device, and a run on it; the path of the run."""
    from benchmarks import train_gpu

    kind = "cpu" if rehearse else train_gpu.device_kind()[1]
    device = f"{{kind: {kind}, count: 1}}"
    Path(folder, "topology.yaml").write_text(topology.format(device=device))
    path = Path(folder, "run.yaml")
    path.write_text(run.format(folder=folder, **sizes))
    return str(path)


def _launch(arguments: Sequence[str], shown: str = r"step +\d+/", flags: str = "") -> Row:
    """A command of HolmesJAX, with the last line that begins as `shown` says."""
    start_s, own = time.perf_counter(), os.environ.get("XLA_FLAGS", "")
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        cwd=CHECKOUT,
        env=os.environ | {"XLA_FLAGS": xla_flags.joined(own, flags)},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if re.match(shown, line)]
    row = {
        "what": " ".join(["launch", *arguments[:1], Path(arguments[1]).name]),
        "is": lines[-1] if lines else "",
        "s": time.perf_counter() - start_s,
    }
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        row["problem"] = f"exit status {done.returncode}: {' '.join(words)}"
    return row


# ---- tiles ---------------------------------------------------------------------------------------


def tiles(argument: Row, rehearse: bool) -> Iterator[Row]:
    """The kernels with other tiles, at 4k: 64 query and 8 key heads 128 wide."""
    from benchmarks.kernels_gpu import Attention, attention_calls, attention_rows
    from kernels.attention import pallas

    label = ", ".join(f"{kernel} {size} x {n}" for kernel, (size, n) in argument.items())
    if rehearse:
        yield {"what": label, "is": "not run: there is no GPU"}
        return
    same_bits = {"deterministic": is_deterministic(argument)}
    kernels = functools.partial(pallas.attention_pallas, tiles=tiles_of(argument))
    checked = _values(shape(2, 397, 4, 2, 128, **same_bits), kernels, rehearse)
    yield checked | {"what": f"{label}: {checked['what']}"}
    if not checked["problem"]:
        case = Attention(4096, 64, 8, 128)
        timed = functools.partial(kernels, **same_bits)
        calls = attention_calls(case, rehearse, {f"ours, {label}": timed})
        yield from attention_rows(case, *calls, rehearse)


def is_deterministic(argument: Row) -> bool:
    """Whether the part changes a kernel that only the deterministic backward has."""
    return not argument.keys().isdisjoint(("dq", "dkv"))


def tiles_of(argument: Row) -> Any:
    """The default tiles of heads 128 wide, but for what the part changes."""
    from kernels.attention import pallas_forward
    from kernels.attention.warpgroups import Tiles

    own = {kernel: Tiles(streamed=size, slots=n) for kernel, (size, n) in argument.items()}
    return dataclasses.replace(pallas_forward.default_tiles(128), **own)


# The backward has more to gain.
TILES = [{kernel: size} for kernel in ("dkv", "dq") for size in ([64, 3], [64, 1])]
TILES += [{"forward": size} for size in ([64, 2], [64, 3], [64, 4])]
