"""The machine code of GPU kernels, compiled without a GPU: python -m benchmarks.kernels_compiled

Every configuration is compiled for an H200, down to machine code, by XLA's CUDA plugin and NVIDIA's
compiler. They are installed into a folder of their own, once (230 MB to download): where JAX found
them, it would look for a GPU in every program.

    registers   of a thread, of 255; fewer threads run at a time where it has many
    spilled     bytes that did not fit into them, stored and loaded in the middle of the kernel
    wgmma       instructions that multiply on Hopper's tensor cores; 0 is the slow way
    one by one  whether the compiler has each of them wait for the one before

Ends with 1 if a kernel does not compile, spills more than 64 bytes, multiplies the slow way, or one
product at a time, or if an optimizer's needs memory for a second copy of an array, or has an
instruction that does not round each operation by itself. A kernel that does none of this can still
be wrong or slow: only a GPU tells.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.provenance import RESULTS, provenance, versions
from kernels.adamw import Hyperparameters, Leaf, Turn
from kernels.adamw_pallas import FORMATS, adamw_pallas
from kernels.attention.choice import (
    DETERMINISTIC_HEAD_WIDTHS,
    HALF_PRECISION,
    PALLAS_HEAD_WIDTHS,
)
from kernels.attention.pallas import attention_pallas
from kernels.attention.pallas_backward import SEPARATE_WIDTHS
from kernels.attention.tiles import Rule
from kernels.moments import Kept, zero_moment

NAME = "kernels_compiled"
MOST_SPILLED = 64  # bytes of a thread
MOST_TEMPORARY = 2**20  # bytes beside the arrays that an optimizer's kernel changes in place
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / f".cuda-{version('jax')}"
COMPILER = ["nvidia-cuda-nvcc==13.1.*", "nvidia-nvvm==13.1.*"]

ONE_BY_ONE = "wgmma.mma_async instructions are serialized"

# PTX that joins a product and a sum, or allows the assembler to, or that is off by a unit.
UNROUNDED = re.compile(r"\b(?:fma\.\w+\.f32|mul\.f32|div\.(?:full|approx)\.|sqrt\.approx\.)")

# The lines that Mosaic prints of a kernel. JAX before 0.11 has another name for one that is given
# arrays to change.
MOSAIC = re.compile(
    r"Compiling entry function '_*(\w+?)(?:_kernel)?_mosaic_gpu_kernel'.*\n"
    r"(?:.*\n)*?.* (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers"
)


class Attention(NamedTuple):
    """Forward and backward, of 4 query and 2 key-value heads."""

    dtype: str
    head_width: int
    rule: str
    deterministic: bool

    @property
    def label(self) -> str:
        kind = ", deterministic" if self.deterministic else ""
        return f"attention, {self.dtype}, {self.head_width} wide, {self.rule}{kind}"

    @property
    def num_kernels(self) -> int:
        separate = self.deterministic or self.head_width in SEPARATE_WIDTHS
        return 3 if separate else 2  # otherwise one finds all gradients

    def trace(self, where: NamedSharding) -> jax.stages.Traced:
        rule, has_documents = RULES[self.rule]

        def both_ways(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
            segments = (ids, ids) if has_documents else None
            run = functools.partial(attention_pallas, deterministic=self.deterministic)
            out, pullback = jax.vjp(lambda q, k, v: run(q, k, v, segments, rule)[0], q, k, v)
            return out, pullback(dout)

        shape = lambda heads: jax.ShapeDtypeStruct(
            (1, 4096, heads, self.head_width), self.dtype, sharding=where
        )
        ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32, sharding=where)
        return jax.jit(both_ways).trace(shape(4), shape(2), shape(2), shape(4), ids)


class AdamW(NamedTuple):
    """A step of AdamW of three parameters in place."""

    kept: Kept
    is_transposed: bool  # the gradients

    @property
    def num_kernels(self) -> int:
        return 1

    @property
    def label(self) -> str:
        kind = ", transposed gradients" if self.is_transposed else ""
        return f"AdamW, moments in {self.kept}{kind}"

    def trace(self, where: NamedSharding) -> jax.stages.Traced:
        h = Hyperparameters(0.9, 0.95, 1e-8, 0.1)
        shape = (4096, 1024)
        moment = lambda which: zero_moment(shape, self.kept, which)
        placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        zeros = lambda: Leaf(jnp.zeros(shape), moment("first"), moment("second"))
        leaves = [jax.tree.map(placed, jax.eval_shape(zeros))] * 3
        given = shape[::-1] if self.is_transposed else shape
        gradients = [jax.ShapeDtypeStruct(given, jnp.float32, sharding=where)] * 3
        told = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=where)
        turns = [Turn(1) if self.is_transposed else None] * 3
        run = lambda leaves, gradients, told: adamw_pallas(
            leaves, gradients, told, [h] * 3, turns=turns
        )
        return jax.jit(run, donate_argnums=0).trace(leaves, gradients, told)


RULES = {
    "causal": (Rule(), False),
    "full": (Rule(causal=False), False),
    "window, soft cap, documents": (Rule(window=1024, soft_cap=30.0), True),
}
CONFIGURATIONS: list[Attention | AdamW] = [
    Attention(dtype, head_width, rule, deterministic)
    for deterministic, head_widths in (
        (False, PALLAS_HEAD_WIDTHS),
        (True, DETERMINISTIC_HEAD_WIDTHS),
    )
    for dtype in HALF_PRECISION
    for head_width in head_widths
    for rule in RULES
]
CONFIGURATIONS += [AdamW(kept, turned) for kept in FORMATS for turned in (False, True)]


def install(folder: Path) -> None:
    """The plugin, and the compiler beside it, where the plugin does not find it by itself."""
    jax_version = version("jax")
    plugin = [f"jax-cuda13-{part}=={jax_version}" for part in ("pjrt", "plugin")]
    for part, packages in (("plugin", plugin), ("compiler", COMPILER)):
        target = folder / part
        if not target.exists():
            print(f"installing {' and '.join(packages)} into {target}", flush=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", str(target), *packages], check=True)
    compiler = folder / "compiler" / "nvidia" / "cu13"
    data = folder / "data"
    (data / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("bin/ptxas", "nvvm"):
        (data / name).unlink(missing_ok=True)
        (data / name).symlink_to(compiler / name)


def compiling_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that sees the plugin.

    XLA takes the compiler of its flag, and Mosaic the first on PATH.
    """
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(folder / "data" / "bin"), os.environ.get("PATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "plugin")]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder / 'data'}",
    }


def described_devices(number: int) -> list[jax.Device]:
    """H200s that need not be there."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        topology=f"1x1x{number}",
        target_config=(Path(__file__).parent / "h200.txtpb").read_text(),
    )
    return list(topology.devices)


def compile_in_a_process(folder: Path, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """The results of configurations, by their numbers, as they get done."""
    environment = compiling_environment(folder)
    environment |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--compile", *map(str, numbers)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            printed: list[str] = []
            for text in process.stdout:
                if text.startswith('{"number"'):
                    line = json.loads(text)
                    kernels = kernels_in("".join(printed))
                    if isinstance(CONFIGURATIONS[line["number"]], AdamW):
                        kernels = dict(zip(["adamw"], kernels.values(), strict=True))
                    line["kernels"] = kernels
                    yield line
                    printed = []
                else:
                    printed.append(text)
            if process.wait():
                raise SystemExit(f"{NAME}: the compiling process ended with {process.returncode}")
        finally:
            process.kill()


def kernels_in(printed: str) -> dict[str, dict[str, int]]:
    """The kernels of which Mosaic has printed the instructions and then the assembler's lines."""
    found, end = {}, 0
    for match in MOSAIC.finditer(printed):
        name, *sizes = match.groups()
        said = printed[end : match.end()]
        stores, loads, registers = map(int, sizes)
        found[f"attention_{'joint' if name == 'new_body' else name}"] = {
            "registers": registers,
            "spilled": stores + loads,
            "wgmma": said.count("wgmma.mma_async.sync"),
            "one_by_one": ONE_BY_ONE in said,
            "unrounded": len(UNROUNDED.findall(said)),
        }
        end = match.end()
    return found


def compile_here(numbers: list[int]) -> None:
    """In a process that sees the plugin: a line of JSON for each configuration."""
    mesh = Mesh(np.array(described_devices(1)), ("device",))
    for number in numbers:
        configuration = CONFIGURATIONS[number]
        problem, temporary_bytes = None, 0
        try:
            with jax.sharding.set_mesh(mesh):
                compiled = configuration.trace(NamedSharding(mesh, P())).lower().compile()
            temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        except Exception as error:  # of XLA, or of what it ran: whatever it is, it is the result
            problem = str(error).strip().splitlines()[0]
        line = {"number": number, "what": configuration.label, "error": problem}
        line["temporary_bytes"] = temporary_bytes
        print(json.dumps(line), flush=True)


def is_good(line: dict[str, Any]) -> bool:
    configuration, kernels = CONFIGURATIONS[line["number"]], line["kernels"].values()
    if isinstance(configuration, AdamW):  # multiplies nothing, and keeps no second copy of an array
        slow = line["temporary_bytes"] > MOST_TEMPORARY
        slow |= any(kernel["unrounded"] for kernel in kernels)
    else:
        slow = any(not kernel["wgmma"] or kernel["one_by_one"] for kernel in kernels)
    spills = any(kernel["spilled"] > MOST_SPILLED for kernel in kernels)
    is_whole = not line["error"] and len(kernels) == configuration.num_kernels
    return is_whole and not slow and not spills


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| | kernel | registers | spilled | wgmma | one by one |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        label = line["what"]
        for name, kernel in sorted(line["kernels"].items()):
            numbers = [kernel["registers"], kernel["spilled"], kernel["wgmma"]]
            numbers.append("yes" if kernel["one_by_one"] else "no")
            rows.append(f"| {label} | `{name}` | {' | '.join(map(str, numbers))} |")
        if line["error"]:
            rows.append(f"| {label} | {line['error']} | | | | |")
    return "\n".join(rows)


def save(name: str, lines: list[dict[str, Any]], text: str, out: Path) -> None:
    """Writes and prints what became of all that was compiled: lines as JSON, text as Markdown."""
    installed = sorted(path.stem for path in FOLDER.glob("*/*.dist-info"))
    result = {
        **provenance(name, "described as an H200; none was there"),
        "versions": {**versions(), "installed": installed},
        "lines": lines,
    }
    path = out / f"{name}_{version('jax')}.json"
    out.mkdir(parents=True, exist_ok=True)
    about = f"commit {result['commit']}, {result['date']}, no GPU: `{result['command']}`"
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(f"{text}\n\n{about}\n")
    print("", text, about, sep="\n")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    parser.add_argument("--compile", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_here(args.compile)
        return 0
    install(FOLDER)
    lines = []
    for line in compile_in_a_process(FOLDER, list(range(len(CONFIGURATIONS)))):
        lines.append(line)
        print(*table([line]).splitlines()[2:], sep="\n", flush=True)
    save(NAME, lines, table(lines), args.out)
    return 0 if all(map(is_good, lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
