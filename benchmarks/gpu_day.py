"""All there is to measure on one NVIDIA GPU, in one command: python -m benchmarks.gpu_day

The parts come in the order of their value, so that an hour that ends early has answered what
matters most. Each part is a process of its own with a limit of its own: a kernel that hangs, or
that leaves the device of its process unusable, costs one part. A failure is a row, not an end. Rows
are written after each part. The same command goes on where the last one stopped; a part that has
ended, well or not, is not run again at the same commit.

    machine     versions, clocks, and what the device reaches: copies and products
    values      cuDNN and each Pallas kernel beside plain JAX in float32, from the smallest case up,
                with the bits of many repeats
    speed       attention at 4k, 8k and 16k beside cuDNN; AdamW and moments beside a copy; the loss
    training    1.3 and 3.6 billion parameters: MFU, memory predicted and measured, PyTorch
    profile     what the planner takes the device for, as `launch profile` measures and writes it
    runs        the quickstart, and two processes of one pipeline that share the device through tcp
    tiles       the Pallas kernels with other tiles, each in a process of its own

DIR gets four small files: gpu_day.json, gpu_day.md, gpu_day.log and profile.yaml. `--rehearse` runs
every part on a CPU with tiny shapes.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import commit, provenance
from holmesjax import xla_flags
from holmesjax.config import CHECKOUT

NAME = "gpu_day"
LOG_BYTES = 20_000  # of the end of each part's output
REPEATS = 30
LENGTHS = (4096, 8192, 16384)

Row = dict[str, Any]

ANCHORS = """
| published, TFLOP/s, causal, 128 wide | forward at 4k / 8k / 16k | backward |
| --- | ---: | ---: |
| cuDNN 9.19 on an H200, 64 query and 8 key heads | 591 / 644 / 673 | 474 / 541 / 579 |
| tokamax 0.0.17 on an H100 | 567 / 620 / 637 | 408 / 438 / 452 |

| published | MFU |
| --- | ---: |
| MaxText, Llama 3.1 70B on H200 | 51.4% |
| GPT-3 175B on 128 H100 | 54% |
"""


class Part(NamedTuple):
    """Some rows, by one process."""

    name: str
    limit_s: float
    function: str  # module:function, which takes `argument` and whether this is a rehearsal
    argument: Any = None


def here(name: str, limit_s: float, function: str, argument: Any = None) -> Part:
    return Part(name, limit_s, f"benchmarks.{NAME}:{function}", argument)


# ---- the machine ---------------------------------------------------------------------------------


def machine(_: None, rehearse: bool) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    from benchmarks.kernels_gpu import limits, measure

    device = jax.devices()[0]
    yield {"what": "device", "is": f"{device.device_kind}, {device.client.platform_version}"}
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    for what, command in (
        ("driver, clocks, power", ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]),
        ("assembler", ["ptxas", "--version"]),
    ):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            yield {"what": what, "is": " ".join(done.stdout.split())[-200:]}
    most = limits(rehearse)
    yield {"what": "product of 8192^3, bfloat16", "rate": tera(most["flop_per_s"])}
    yield {"what": "copy, read and written", "rate": giga(most["bytes_per_s"])}
    x = jnp.ones(2**12 if rehearse else 2**28, jnp.float32)
    pinned = x.sharding.with_memory_kind("pinned_host")
    on_host = jax.device_put(x, pinned)
    ways = {
        "device to pinned host": lambda: jax.device_put(x, pinned),
        "pinned host to device": lambda: jax.device_put(on_host, x.sharding),
    }
    for what, found in measure(ways, rehearse).items():
        yield {"what": what, "rate": giga(x.nbytes / found["s"]), "spread": found["spread"]}


def tera(flop_per_s: float) -> str:
    return f"{flop_per_s / 1e12:.4g} TFLOP/s"


def giga(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"


# ---- values --------------------------------------------------------------------------------------


def values_of_cudnn(argument: Row, rehearse: bool) -> Iterator[Row]:
    import jax

    def cudnn(q: Any, k: Any, v: Any, segments: Any, rule: Any, deterministic: bool) -> Any:
        local = None if rule.window is None else (rule.window - 1, 0)
        attention = functools.partial(
            jax.nn.dot_product_attention,
            is_causal=rule.causal,
            local_window_size=local,
            implementation="xla" if rehearse else "cudnn",
            return_residual=True,
        )
        out, log_sum_BLH = attention(q, k, v)
        return out, log_sum_BLH.swapaxes(1, 2).astype("float32")

    yield _values(argument | {"feeds_log_sum": False}, cudnn, rehearse)


def values_of_pallas(argument: Row, rehearse: bool) -> Iterator[Row]:
    from kernels.attention import pallas, reference

    def plain(*args: Any, deterministic: bool) -> Any:
        return reference.attention_reference(*args)

    yield _values(argument, plain if rehearse else pallas.attention_pallas, rehearse)


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
    names = ("batch", "length", "heads", "kv_heads", "head_width")
    return dict(zip(names, (batch, length, heads, kv_heads, width), strict=True)) | more


CUDNN = [
    shape(2, 397, 4, 2, 128),
    shape(2, 397, 4, 2, 64, rule={"window": 100}),
    shape(2, 397, 4, 2, 256),
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
        {name: call for name, call in found.items() if name.startswith(names)} for found in calls
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
    sizes = train_gpu.SMALL if rehearse else train_gpu.MODELS[argument["model"]]
    sizes = dataclasses.replace(sizes, context_length=context)
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
        row |= {"predicted_gib": predicted / 2**30, "predicted_s": job.plan.step_time_s}
    yield row


PROFILED = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: 1, width: {width}, num_heads: {heads}, context_length: {context}}}
data: {{corpus: python-stdlib}}
train: {{steps: 1, global_batch: 4, compute_dtype: {dtype}}}
optimizer: {{learning_rate: 1.0e-3}}
"""
ONE_DEVICE = """
name: device
clusters:
  - {{name: a, fabric: local, nodes: 1, devices: {{kind: {kind}, count: 1}}}}
"""


def profile(_: None, rehearse: bool) -> Iterator[Row]:
    """The calibration, as a row: the file is small, and part of the result."""
    from benchmarks import train_gpu

    kind = "cpu" if rehearse else train_gpu.device_kind()[1]
    sizes = {"width": 64, "heads": 4, "context": 32, "dtype": "float32"}
    if not rehearse:
        sizes = {"width": 4096, "heads": 32, "context": 4096, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "topology.yaml").write_text(ONE_DEVICE.format(kind=kind))
        Path(folder, "run.yaml").write_text(PROFILED.format(folder=folder, **sizes))
        row = _launch(["profile", f"{folder}/run.yaml", "--output", f"{folder}/found.yaml"], {})
        with contextlib.suppress(OSError):
            row["calibration"] = Path(folder, "found.yaml").read_text()
        yield row


# ---- runs ----------------------------------------------------------------------------------------


SMALL_RUN = ["train.steps=2", "model.num_layers=2", "model.width=64", "model.context_length=64"]


def quickstart(_: None, rehearse: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", "configs/runs/quickstart.yaml", f"run.dir={folder}/run"]
        yield _launch(run + SMALL_RUN * rehearse, {})


TWO_STAGES = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: {layers}, width: {width}, num_heads: 16, context_length: {context}}}
data: {{corpus: python-stdlib}}
train: {{steps: {steps}, global_batch: 16, compute_dtype: {dtype}, log_every_s: 0}}
optimizer: {{learning_rate: 1.0e-3}}
parallel: {{clusters: [a, b], microbatches: 8, schedule: 1f1b}}
log: {{tensorboard: false}}
"""
TWO_CLUSTERS = """
name: shared
clusters:
  - {{name: a, fabric: local, nodes: 1, devices: {device}, nics: [{{kind: ethernet_25}}]}}
  - {{name: b, fabric: local, nodes: 1, devices: {device}, nics: [{{kind: ethernet_25}}]}}
links:
  - {{between: [a, b], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}}
"""


def pipeline(_: None, rehearse: bool) -> Iterator[Row]:
    """Two processes, each with a stage, share the device; boundaries go through its host."""
    from benchmarks import train_gpu

    kind = "cpu" if rehearse else train_gpu.device_kind()[1]
    sizes = {"layers": 2, "width": 64, "context": 32, "steps": 3, "dtype": "float32"}
    if not rehearse:
        sizes = {"layers": 8, "width": 2048, "context": 2048, "steps": 20, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        device = f"{{kind: {kind}, count: 1}}"
        Path(folder, "topology.yaml").write_text(TWO_CLUSTERS.format(device=device))
        Path(folder, "run.yaml").write_text(TWO_STAGES.format(folder=folder, **sizes))
        run = ["train", f"{folder}/run.yaml", "--launcher", "local"]
        yield _launch(run, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"})


def _launch(arguments: Sequence[str], environment: dict[str, str]) -> Row:
    """A command of HolmesJAX, with its last lines of steps."""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        cwd=CHECKOUT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    steps = [line for line in done.stdout.splitlines() if re.match(r"step +\d+/", line)]
    row = {
        "what": " ".join(["launch", *arguments[:1], Path(arguments[1]).name]),
        "is": steps[-1] if steps else "",
        "s": time.perf_counter() - start_s,
    }
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        row["problem"] = f"exit status {done.returncode}: {' '.join(words)}"
    return row


# ---- tiles ---------------------------------------------------------------------------------------


def tiles(argument: Row, rehearse: bool) -> Iterator[Row]:
    """The kernels with other tiles, at 4k: 64 query and 8 key heads 128 wide."""
    import jax

    from benchmarks.kernels_gpu import Attention, attention_calls, attention_rows
    from kernels.attention import pallas, pallas_forward
    from kernels.attention.warpgroups import Tiles

    found = dataclasses.replace(
        pallas_forward.default_tiles(128),
        **{kernel: Tiles(streamed=size, slots=n) for kernel, (size, n) in argument.items()},
    )
    label = ", ".join(f"{kernel} {size} x {n}" for kernel, (size, n) in argument.items())
    if rehearse:
        yield {"what": label, "is": "not run: there is no GPU"}
        return
    case = Attention(4096, 64, 8, 128)
    attention = functools.partial(pallas.attention_pallas, tiles=found)
    calls = attention_calls(case, rehearse, {f"ours, {label}": attention})
    jax.block_until_ready([call() for call in calls[0].values()])
    yield from attention_rows(case, *calls, rehearse)


TILES = [{"forward": size} for size in ([64, 2], [64, 3], [128, 3])]
TILES += [{"joint": size} for size in ([64, 1], [128, 1])]


# ---- all of them ---------------------------------------------------------------------------------

GQA = (64, 8, 128)
PARTS = [
    here("machine", 90, "machine"),
    *(here(f"values of cuDNN {n}", 60, "values_of_cudnn", x) for n, x in enumerate(CUDNN)),
    *(
        here(f"speed of cuDNN at {n}", 60, "speed", {"case": [n, *GQA], "by": "cuDNN"})
        for n in LENGTHS
    ),
    here("training 1.3B", 240, "training", {"model": "1.3B", "system": "HolmesJAX"}),
    *(here(f"values of Pallas {n}", 60, "values_of_pallas", x) for n, x in enumerate(PALLAS)),
    *(
        here(f"speed of Pallas at {n}", 60, "speed", {"case": [n, *GQA], "by": "ours"})
        for n in LENGTHS
    ),
    here("speed of plain JAX", 60, "speed", {"case": [LENGTHS[0], *GQA], "by": "plain"}),
    here("adamw", 120, "lines_of", "adamw"),
    here("cross-entropy", 90, "lines_of", "cross_entropy"),
    here("training 1.3B, PyTorch", 240, "training", {"model": "1.3B", "system": "PyTorch"}),
    here("training 3.6B", 240, "training", {"model": "3.6B", "system": "HolmesJAX"}),
    here("profile", 180, "profile"),
    here("quickstart", 240, "quickstart"),
    here("pipeline", 180, "pipeline"),
    *(here(f"tiles {n}", 45, "tiles", x) for n, x in enumerate(TILES)),
]


def serve(part: Part, rehearse: bool) -> int:
    """Runs a part in this process: a line of JSON for each row."""
    module, _, function = part.function.partition(":")
    for row in getattr(importlib.import_module(module), function)(part.argument, rehearse):
        print(json.dumps({"row": row}), flush=True)
    return 0


def run_part(part: Part, limit_s: float, rehearse: bool) -> tuple[list[Row], str]:
    """Returns the rows of a process, with one of its failure, and the end of what it printed."""
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--part", json.dumps(part)]
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # an error's last line is it
    if rehearse:
        own = os.environ.get("XLA_FLAGS", "")
        flags = xla_flags.joined(xla_flags.for_tiny_programs(), own)
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    start_s = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(
            command + ["--rehearse"] * rehearse,
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # so that what it starts ends with it
        ) as process,
    ):
        assert process.stdout
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        whole = (line for line in process.stdout if line.startswith('{"row"') and line[-1] == "\n")
        rows = [json.loads(line)["row"] for line in whole]
        status = process.wait()
        timer.cancel()
        _kill(process)
        said.seek(0)
        words = said.read()
    took_s = time.monotonic() - start_s
    if is_late.is_set():
        rows.append({"what": part.name, "problem": f"no end within {limit_s:.0f} s"})
    elif status:
        last = words.strip().splitlines()[-1:]
        problem = f"exit status {status}: {' '.join(last)}"
        rows.append({"what": part.name, "problem": problem})
    text = f"---- {part.name}: {took_s:.1f} s, exit status {status}\n{words[-LOG_BYTES:]}\n"
    return rows, text


def _kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_parts(parts: Iterable[Part], out: Path, minutes: float, rehearse: bool) -> dict[str, Any]:
    """Returns the result, which is written after each part, and goes on from one that is there."""
    end_s = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}.json"
    result = {**provenance(NAME, "not known"), "rehearsal": rehearse, "parts": {}}
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(path.read_text())
        if (before["commit"], before["rehearsal"]) == (commit(), rehearse):
            result = before
    for part in parts:
        if part.name in result["parts"]:
            continue
        limit_s = min(part.limit_s, end_s - time.monotonic())
        if limit_s < 1:
            print(f"{part.name}: no time left", flush=True)
            continue
        rows, words = run_part(part, limit_s, rehearse)
        if part.name == "machine" and rows:
            result["device"] = rows[0].get("is", "not known")
        for text in (row["calibration"] for row in rows if "calibration" in row):
            _write(out / "profile.yaml", text)
        result["parts"][part.name] = rows
        with open(out / f"{NAME}.log", "a", encoding="utf-8") as log:
            log.write(words)
        _write(path, json.dumps(result, indent=1) + "\n")
        _write(path.with_suffix(".md"), report(result))
        print(*table({part.name: rows})[2:], sep="\n", flush=True)
    return result


def _write(path: Path, text: str) -> None:
    """Whole or not at all: the machine may go away at any moment."""
    temporary = path.with_suffix(path.suffix + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def table(parts: dict[str, list[Row]]) -> list[str]:
    lines = ["| part | what | by | result |", "| --- | --- | --- | --- |"]
    for name, rows in parts.items():
        for row in rows:
            found = [str(row[key]) for key in ("is", "rate", "errors") if row.get(key)]
            found += [f"{row['ms']:.3f} ms"] if "ms" in row else []
            found += [f"{row['s']:.1f} s"] if "s" in row else []
            found += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
            found += [f"{row['limit']:.0%} of what the device reaches"] if "limit" in row else []
            found += [f"spread {row['spread']:.1%}"] if "spread" in row else []
            if "measured_gib" in row:
                predicted = row.get("predicted_gib")
                beside = "" if predicted is None else f", predicted {predicted:.1f}"
                found.append(f"{row['measured_gib']:.1f} GiB{beside}")
            if row.get("problem"):
                found.append(f"FAILED: {row['problem']}")
            cells = [name, row["what"], row.get("by", ""), "; ".join(found)]
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def report(result: dict[str, Any]) -> str:
    about = f"commit {result['commit']}, {result['date']}, {result['device']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    kind = "A rehearsal on a CPU: no number here means anything.\n\n" * result["rehearsal"]
    text = "\n".join(table(result["parts"]))
    return f"{kind}{text}\n{ANCHORS}\n{about}: `{result['command']}`; {versions}\n"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts (25)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return serve(Part(*args.part), args.rehearse)
    if args.out is None:
        parser.error("--out says where the results go")
    result = run_parts(PARTS, args.out, args.minutes, args.rehearse)
    print("", report(result), sep="\n")
    missing = [part.name for part in PARTS if part.name not in result["parts"]]
    if missing:
        print(f"{len(missing)} parts had no time; the same command goes on with {missing[0]}")
    failed = [row for rows in result["parts"].values() for row in rows if row.get("problem")]
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
