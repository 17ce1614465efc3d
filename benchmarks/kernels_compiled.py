"""What GPU kernels compile to, without a GPU: python -m benchmarks.kernels_compiled

Every configuration is compiled for an H200, down to machine code, by XLA's CUDA plugin and NVIDIA's
compiler. They are installed into a folder of their own, once (230 MB to download): where JAX found
them, it would look for a GPU in every program.

    registers   of a thread, of 255; fewer threads run at a time where it has many
    spilled     bytes that did not fit into them, stored and loaded in the middle of the kernel
    wgmma       instructions that multiply on Hopper's tensor cores; 0 is the slow way
    one by one  whether the compiler has each of them wait for the one before

Ends with 1 if a kernel does not compile, spills more than 64 bytes, multiplies 16-bit numbers the
slow way, or one product at a time. One that does none of this can still be wrong or slow: only a
GPU tells.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.pipeline_overhead import RESULTS, commit, versions
from kernels.adamw import MOST_SHARING, Leaf, Part, Rule as AdamW, adamw_triton
from kernels.attention_pallas import Backend, attention_pallas
from kernels.attention_tiles import Rule
from kernels.moments import Kept, zero_moment

NAME = "kernels_compiled"
MOST_SPILLED = 64  # bytes of a thread
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / f".cuda-{version('jax')}"
COMPILER = ["nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*"]

# Stands where XLA looks for NVIDIA's assembler: notes what it was given and what it says, in one
# piece, since several run at a time.
PTXAS = """#!/bin/sh
said="$PTXAS_LOG.$$"
{compiler}/bin/ptxas -v "$@" 2>"$said"
status=$?
for file in "$@"; do
    if [ -s "$file" ] && grep -q '^\\.target' "$file"; then
        printf 'wgmma %s\\n' "$(grep -c wgmma.mma_async "$file")" >"$said.noted"
    fi
done
cat "$said" >>"$said.noted"
cat "$said.noted" >>"$PTXAS_LOG"
cat "$said" >&2
rm "$said" "$said.noted"
exit $status
"""
ENTRY = re.compile(
    r"wgmma (\d+)\n"
    r"(?:(?!wgmma ).*\n)*?.*Compiling entry function '(\w+)'.*\n"
    r"(?:(?!wgmma ).*\n)*?.* (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers"
)
ONE_BY_ONE = "wgmma.mma_async instructions are serialized"

# What Mosaic prints of its own kernels. JAX before 0.11 has another name for one that is given
# arrays to change.
MOSAIC = re.compile(
    r"Compiling entry function '_*(\w+?)(?:_kernel)?_mosaic_gpu_kernel'.*\n"
    r"(?:.*\n)*?.* (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers"
)


class Attention(NamedTuple):
    """Forward and backward, of 4 query and 2 key-value heads."""

    backend: Backend
    dtype: str
    head_width: int
    rule: str
    deterministic: bool

    @property
    def label(self) -> str:
        kind = ", deterministic" if self.deterministic else ""
        return f"attention, {self.backend}, {self.dtype}, {self.head_width} wide, {self.rule}{kind}"

    @property
    def num_kernels(self) -> int:
        return 2 if self.has_joint_backward and not self.deterministic else 3

    @property
    def has_joint_backward(self) -> bool:
        return self.backend == "mosaic"

    @property
    def multiplies(self) -> bool:
        """Whether there are products for tensor cores: not of float32 in full precision."""
        return self.dtype != "float32"

    def trace(self, where: NamedSharding) -> jax.stages.Traced:
        rule, has_documents = RULES[self.rule]

        def both_ways(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
            segments = (ids, ids) if has_documents else None
            run = functools.partial(
                attention_pallas, backend=self.backend, deterministic=self.deterministic
            )
            out, pullback = jax.vjp(lambda q, k, v: run(q, k, v, segments, rule)[0], q, k, v)
            return out, pullback(dout)

        shape = lambda heads: jax.ShapeDtypeStruct(
            (1, 4096, heads, self.head_width), self.dtype, sharding=where
        )
        ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32, sharding=where)
        return jax.jit(both_ways).trace(shape(4), shape(2), shape(2), shape(4), ids)


class Update(NamedTuple):
    """AdamW, of a part of a matrix, or of several small arrays in a launch."""

    moments: Kept
    arrays: int

    @property
    def label(self) -> str:
        return f"adamw, moments in {self.moments}, {self.arrays} in a launch"

    @property
    def num_kernels(self) -> int:
        return 1

    @property
    def multiplies(self) -> bool:
        return False

    def trace(self, where: NamedSharding) -> jax.stages.Traced:
        shape = (1024, 2048) if self.arrays == 1 else (100, 192)
        rule = AdamW(0.9, 0.95, 1e-8, 0.1)

        def update(leaves: Any, gradients: Any, factors: Any, start: Any) -> Any:
            parts = [Part((4096, 4096), start)] * self.arrays
            return adamw_triton(leaves, gradients, factors, [rule] * self.arrays, parts)

        def make() -> Leaf:
            both = (zero_moment(shape, self.moments, which) for which in ("first", "second"))
            return Leaf(jnp.zeros(shape), *both)

        lie = lambda tree: jax.tree.map(lambda x: x.update(sharding=where), jax.eval_shape(tree))
        leaves, gradients = [lie(make)] * self.arrays, [lie(make).parameter] * self.arrays
        factors, start = lie(lambda: jnp.zeros(6)), lie(lambda: jnp.zeros(2, jnp.int32))
        return jax.jit(update, donate_argnums=0).trace(leaves, gradients, factors, start)


RULES = {
    "causal": (Rule(), False),
    "full": (Rule(causal=False), False),
    "window, soft cap, documents": (Rule(window=1024, soft_cap=30.0), True),
}
BACKENDS: dict[Backend, tuple[str, ...]] = {
    "triton": ("bfloat16", "float16", "float32"),
    "mosaic": ("bfloat16", "float16"),
}
MOMENTS: tuple[Kept, ...] = ("float32", "bfloat16", "int8")
ATTENTIONS = [
    Attention(backend, dtype, head_width, rule, False)
    for backend, dtypes in BACKENDS.items()
    for dtype in dtypes
    for head_width in (64, 128, 256)
    for rule in RULES
]
CONFIGURATIONS: list[Attention | Update] = [
    *ATTENTIONS,
    *(each._replace(deterministic=True) for each in ATTENTIONS if each.has_joint_backward),
    *(Update(moments, arrays) for moments in MOMENTS for arrays in (1, MOST_SHARING)),
]


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
    (data / "bin" / "ptxas").write_text(PTXAS.format(compiler=compiler))
    (data / "bin" / "ptxas").chmod(0o755)
    if not (data / "nvvm").exists():
        (data / "nvvm").symlink_to(compiler / "nvvm")


def compiling_environment(folder: Path, log: Path) -> dict[str, str]:
    """Of a process that sees the plugin; what the assembler says goes into the log."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PTXAS_LOG": str(log),
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
    """What became of each configuration, by their numbers, as they get done."""
    log = folder / f"ptxas-{os.getpid()}.log"
    environment = compiling_environment(folder, log)
    environment |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--compile", *map(str, numbers)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            printed: list[str] = []
            for text in process.stdout:
                if text.startswith('{"number"'):
                    line = json.loads(text)
                    line["kernels"] |= _mosaic_kernels("".join(printed))
                    yield line
                    printed = []
                else:
                    printed.append(text)
            if process.wait():
                raise SystemExit(f"{NAME}: the compiling process ended with {process.returncode}")
        finally:
            process.kill()
            log.unlink(missing_ok=True)


def _mosaic_kernels(printed: str) -> dict[str, dict[str, int]]:
    """What Mosaic said of its kernels, each after its own instructions."""
    found, end = {}, 0
    for match in MOSAIC.finditer(printed):
        name, *sizes = match.groups()
        said = printed[end : match.end()]
        wgmma = said.count("wgmma.mma_async.sync")
        found[f"attention_{'joint' if name == 'new_body' else name}"] = _kernel(wgmma, said, *sizes)
        end = match.end()
    return found


def kernels_in(log: str) -> dict[str, dict[str, int]]:
    """What the assembler said of Triton's kernels."""
    found = {}
    for match in ENTRY.finditer(log):
        wgmma, name, *sizes = match.groups()
        if name.startswith(("attention", "adamw")):
            found[name] = _kernel(int(wgmma), match.group(), *sizes)
    return found


def _kernel(wgmma: int, said: str, stores: str, loads: str, registers: str) -> dict[str, int]:
    return {
        "registers": int(registers),
        "spilled": int(stores) + int(loads),
        "wgmma": wgmma,
        "one_by_one": ONE_BY_ONE in said,
    }


def compile_here(numbers: list[int]) -> None:
    """In a process that sees the plugin: a line of JSON for each configuration."""
    mesh = Mesh(np.array(described_devices(1)), ("device",))
    log = Path(os.environ["PTXAS_LOG"])
    for number in numbers:
        configuration = CONFIGURATIONS[number]
        log.write_text("")
        problem = None
        try:
            with jax.sharding.set_mesh(mesh):
                configuration.trace(NamedSharding(mesh, P())).lower().compile()
        except Exception as error:  # of XLA, or of what it ran: whatever it is, it is the result
            problem = str(error).strip().splitlines()[0]
        kernels = kernels_in(log.read_text())
        line = {"number": number, "what": configuration.label, "kernels": kernels, "error": problem}
        print(json.dumps(line), flush=True)


def is_good(line: dict[str, Any]) -> bool:
    configuration, kernels = CONFIGURATIONS[line["number"]], line["kernels"].values()
    slow = configuration.multiplies and not all(kernel["wgmma"] for kernel in kernels)
    slow |= any(kernel["one_by_one"] for kernel in kernels)
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
        "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": "described as an H200; none was there",
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
