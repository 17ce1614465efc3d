"""Collectives of steps as compiled for GPUs, without one: python -m benchmarks.overlap_compiled

Whole steps of two layers with the sizes of Llama-3-8B, one sequence of 8,192 tokens on a device,
are compiled for eight H200s, as `benchmarks.memory_compiled` compiles stages: with the flags that
jobs get, with one of them less or one more, and in ways that the code no longer has. The order of
the program says what its collectives hide behind (`benchmarks.compiled_order`):

    async        collectives with other instructions between start and end
    bare         collectives that end where they start
    computing    ms of all other instructions
    collectives  ms
    exposed      ms of them that others wait for
    moved        GB of arrays that are only copied, transposed, joined or cut
    temporaries  GiB on a device, and new results

Orders, bytes and numbers of collectives are facts of the program. Milliseconds are estimates from
its shapes, at 650 TFLOP/s in products, 450 in attention, 4.2 TB/s in memory, 350 GB/s in links.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.lax import optimization_barrier

from benchmarks import memory_compiled
from benchmarks.compiled_order import Program
from benchmarks.kernels_compiled import FOLDER, compiling_environment, install, save
from benchmarks.memory_compiled import StageCase, chunks_of, temporary_bytes
from benchmarks.provenance import RESULTS
from holmesjax import xla_flags
from holmesjax.config import ModelConfig
from holmesjax.parallel import platforms
from holmesjax.planner.stage_layouts import MeshShape
from holmesjax.runtime.compilation import compile_whole_step
from kernels import linear

NAME = "overlap_compiled"
MODEL = ModelConfig(
    num_layers=2, width=4096, num_heads=32, num_kv_heads=8, mlp_width=14_336, activation="swiglu",
    norm="rms_norm", context_length=8192, vocab_size=128_256,
)  # fmt: skip
PLANS = {
    "fsdp 8": MeshShape(1, 8, 1),
    "data 8": MeshShape(8, 1, 1),
    "tensor 8": MeshShape(1, 1, 8),
    "tensor 8, sequences cut": MeshShape(1, 1, 8, 1, 1),
}
HIDING = "xla_gpu_enable_latency_hiding_scheduler"
FOUR_AT_A_TIME = "xla_gpu_experimental_parallel_collective_overlap_limit=4"
WINDOWED = (
    "xla_gpu_threshold_for_windowed_einsum_mib=0",
    "xla_gpu_multi_streamed_windowed_einsum=true",
)
# The machine code is not looked at.
QUICKLY = ("xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true")
JOINED, BEHIND_BARRIER = "arrays of `data` joined by hand", "gradient of `down` behind a barrier"


class OverlapCase(NamedTuple):
    """A step, and what is other than in a job."""

    plan: str
    checkpointing: str = "none"
    microbatches: int = 1
    without: str = ""  # a flag of jobs
    flags: tuple[str, ...] = ()  # besides those of jobs
    before: str = ""  # how the code was

    @property
    def label(self) -> str:
        steps = f"{self.microbatches} microbatches" * (self.microbatches > 1)
        what = [self.plan, f"checkpointing {self.checkpointing}", steps]
        return ", ".join(filter(None, what))

    @property
    def change(self) -> str:
        less = f"without `{self.without}`" * bool(self.without)
        return ", ".join(filter(None, [less, *(f"`{flag}`" for flag in self.flags), self.before]))


CASES = [
    OverlapCase("fsdp 8"),
    *(OverlapCase("fsdp 8", without=name) for name in xla_flags.GPU),
    OverlapCase("fsdp 8", flags=(FOUR_AT_A_TIME,)),
    OverlapCase("fsdp 8", "full", 2),
    OverlapCase("data 8"),
    OverlapCase("data 8", flags=(FOUR_AT_A_TIME,)),
    OverlapCase("data 8", before=JOINED),
    OverlapCase("tensor 8"),
    OverlapCase("tensor 8, sequences cut"),
    OverlapCase("tensor 8, sequences cut", flags=WINDOWED),
    OverlapCase("data 8", "none", 2),
    OverlapCase("data 8", "none", 2, before=BEHIND_BARRIER),
    OverlapCase("fsdp 8", flags=(f"{HIDING}=false",)),
]


def environment_of(case: OverlapCase) -> dict[str, str]:
    environment = compiling_environment(FOLDER)
    of_jobs = [f"--{name}={value}" for name, value in xla_flags.GPU.items() if name != case.without]
    added = (*case.flags, *QUICKLY)
    flags = [*of_jobs, *(f"--{flag}" for flag in added), environment["XLA_FLAGS"]]
    return environment | {"XLA_FLAGS": " ".join(flags)}


def change_code(before: str) -> None:
    """Makes this process compile what the code was."""
    if before == JOINED:
        platforms.joins_collectives = lambda mesh: False
    elif before == BEHIND_BARRIER:
        now = linear.weight_gradient

        def weight_gradient(x_ND: Any, dy_NF: Any, dtype: Any) -> Any:
            if x_ND.shape[1] <= dy_NF.shape[1]:
                return now(x_ND, dy_NF, dtype)
            product = jnp.matmul(dy_NF.T, x_ND, preferred_element_type=dtype)
            return optimization_barrier(product).T

        linear.weight_gradient = weight_gradient


def compile_here(number: int) -> None:
    """In a process that sees the plugin: a line of JSON of a case."""
    case = CASES[number]
    change_code(case.before)
    memory_compiled.SEQUENCES = 1
    memory_compiled.MICROBATCHES = case.microbatches
    mesh = PLANS[case.plan]
    stage = StageCase("8b", case.checkpointing, mesh, num_layers=MODEL.num_layers, num_stages=1)
    [chunk] = chunks_of(stage, MODEL)
    step = compile_whole_step(chunk, evaluates=False)["step"]
    overlap = Program(step.as_text()).overlap()
    line = {
        "what": case.label,
        "change": case.change,
        "async": overlap.num_async,
        "bare": overlap.num_bare,
        "computing_ms": 1e3 * overlap.compute_s,
        "collectives_ms": 1e3 * overlap.collective_s,
        "exposed_ms": 1e3 * overlap.exposed_s,
        "moved_gb": overlap.moved_bytes / 1e9,
        "temporary_gib": temporary_bytes(step) / 2**30,
        "exposed": {name: round(1e3 * s, 3) for name, s in overlap.exposed if s > 1e-5},
    }
    print(json.dumps(line), flush=True)


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| step | changed | async | bare | computing ms | collectives ms | exposed ms | moved GB | "
        "temporaries GiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        milliseconds = [f"{line[f'{name}_ms']:.2f}" for name in ("computing", "collectives")]
        rows.append(
            f"| {line['what']} | {line['change']} | {line['async']} | {line['bare']} | "
            f"{' | '.join(milliseconds)} | {line['exposed_ms']:.2f} | {line['moved_gb']:.2f} | "
            f"{line['temporary_gib']:.2f} |"
        )
    return "\n".join(rows)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:
        compile_here(args.compile)
        return 0
    install(FOLDER)
    lines = []
    for number, case in enumerate(CASES):
        print(f"{number + 1}/{len(CASES)}  {case.label}  {case.change}", flush=True)
        environment = os.environ | environment_of(case)
        lines += memory_compiled.compiled_apart(NAME, number, environment)
        print(*table(lines[-1:]).splitlines()[2:], sep="\n", flush=True)
    save(NAME, lines, table(lines), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
