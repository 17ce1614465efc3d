"""Bytes that stages hold as compiled for GPUs, without one: python -m benchmarks.memory_compiled

Stages of two models, each with several ways to checkpoint and to be cut, are compiled whole for an
H200, as `benchmarks.kernels_compiled` does kernels, with the flags that jobs get: the two stages of
a pipeline, or a whole step of 16 and 32 layers on eight devices. Then what they hold is counted at
every moment of a step:

    state         parameters and moments, always; replicas and gradients until the update
    kept          what the forwards saved that were not yet followed by their backwards
    temporaries   what XLA allots to the program that runs (`memory_analysis`), and new results
    buffers       of boundaries, as `memory` counts them: no program has them

    compiled      the most of any moment, GiB a device
    predicted     the sum of `memory.stage_memory_bytes`
    error         of what is predicted; bar: 10% too little, what plans leave free on a device;
                  of a whole step 8%, too little or too much

Ends with 1 if a prediction misses its bar.
"""

import argparse
import functools
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.kernels_compiled import (
    FOLDER,
    ROOT,
    compiling_environment,
    described_devices,
    install,
    save,
)
from benchmarks.provenance import RESULTS
from holmesjax import xla_flags
from holmesjax.config import KernelsConfig, ModelConfig, OptimizerConfig
from holmesjax.costs import memory
from holmesjax.costs.stage_shape import StageShape
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name
from holmesjax.models.layer import statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.parallel.mesh import build_meshes
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan, StagePlan
from holmesjax.planner.stage_layouts import MeshShape
from holmesjax.runtime import microbatch
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.compilation import compile_chunks, compile_whole_step
from holmesjax.runtime.program_shapes import (
    batch_shapes,
    boundary_shape,
    gradient_shapes,
    replica_shapes,
)
from holmesjax.runtime.programs import ProgramKey, Programs

NAME = "memory_compiled"
BAR, WHOLE_STEP_BAR = 1.0 - USABLE_MEMORY, 0.08
MICROBATCHES, SEQUENCES = 4, 2  # sequences of a microbatch on a device
SIZES: dict[str, Any] = {"num_layers": 6, "width": 2048, "num_heads": 16, "context_length": 2048}
MODELS = {
    "gpt": ModelConfig(**SIZES, vocab_size=50_304, positions="learned"),
    "llama": ModelConfig(
        **SIZES, vocab_size=32_000, num_kv_heads=8, mlp_width=5632, activation="swiglu",
        norm="rms_norm",
    ),
}  # fmt: skip


class StageCase(NamedTuple):
    """Two stages of three layers each, on equal meshes; or one of more layers, a whole step."""

    model: str
    checkpointing: Any = "none"
    mesh: MeshShape = MeshShape(1, 1, 1)
    moments: Any = "float32"
    num_layers: int = 6
    num_stages: int = 2

    @property
    def label(self) -> str:
        axes = ", ".join(f"{axis.value} {n}" for axis, n in self.mesh.sizes.items() if n > 1)
        axes += ", sequences cut" * self.mesh.sequence_parallel
        moments = f"moments in {self.moments}" * (self.moments != "float32")
        layers = f"whole step of {self.num_layers} layers" * (self.num_stages == 1)
        what = [self.model, layers, f"checkpointing {self.checkpointing}", axes, moments]
        return ", ".join(filter(None, what))


CASES = [
    *(StageCase(model, policy) for model in MODELS for policy in ("none", "dots", "full")),
    *(
        StageCase("llama", "none", mesh)
        for mesh in (MeshShape(1, 1, 2), MeshShape(1, 2, 1), MeshShape(1, 1, 1, 2))
    ),
    *(StageCase("llama", policy, MeshShape(2, 1, 1)) for policy in ("none", "full")),
    StageCase("gpt", "dots", MeshShape(2, 2, 1)),
    StageCase("gpt", "none", moments="bfloat16"),
    *(
        StageCase("llama", policy, mesh, num_layers=num_layers, num_stages=1)
        for num_layers in (16, 32)
        for mesh in (
            MeshShape(1, 8, 1),
            MeshShape(8, 1, 1),
            MeshShape(1, 1, 8),
            MeshShape(2, 2, 2),
        )
        for policy in ("none", "dots", "full")
    ),
    *(
        StageCase("llama", policy, MeshShape(1, 1, 8, 1, 1), num_layers=16, num_stages=1)
        for policy in ("none", "full")
    ),
]


def job_environment() -> dict[str, str]:
    """The environment of a process that compiles with the flags of jobs."""
    environment = compiling_environment(FOLDER)
    flags = xla_flags.for_devices({"h200"})
    return environment | {"XLA_FLAGS": xla_flags.joined(flags, environment["XLA_FLAGS"])}


def plan_of(case: StageCase) -> Plan:
    num_layers = case.num_layers // case.num_stages
    size = case.mesh.num_devices
    stages = []
    for s in range(case.num_stages):
        layers = [block_name(s * num_layers + i) for i in range(num_layers)]
        layers = [EMBED] * (s == 0) + layers + [HEAD] * (s == case.num_stages - 1)
        stages.append(
            StagePlan(
                cluster="h200",
                nodes=("h200-0",),
                chunks=(tuple(layers),),
                devices=tuple(range(s * size, (s + 1) * size)),
                mesh=case.mesh.sizes,
                fabrics={},
                memory_bytes={},
                seconds={},
                sequence_parallel=bool(case.mesh.sequence_parallel),
            )
        )
    return Plan(
        topology="described",
        topology_hash="",
        stages=tuple(stages),
        global_batch=SEQUENCES * MICROBATCHES * case.mesh.batch_shards,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        in_flight=(),
        activation_checkpointing=case.checkpointing,
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )


def shape_of(case: StageCase, index: int) -> StageShape:
    in_flight = case.num_stages - index
    return StageShape(
        blocks=(case.num_layers // case.num_stages,),
        is_first=index == 0,
        is_last=index == case.num_stages - 1,
        data=case.mesh.data,
        tensor=case.mesh.tensor,
        fsdp=case.mesh.fsdp,
        context=case.mesh.context,
        sequences=SEQUENCES,
        chunks=1,
        in_flight=in_flight,
        head_in_flight=in_flight,
        dtype="bfloat16",
        checkpointing=case.checkpointing,
        kept=(case.moments,) * 2,
        sequence_parallel=case.mesh.sequence_parallel,
    )


def bytes_on_a_device(shapes: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
    )


def temporary_bytes(program: Any) -> int:
    """Bytes of a program's temporaries, and of results that take no argument's place."""
    analysis = program.memory_analysis()
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.temp_size_in_bytes + new)


def moments_of(programs: Programs, in_flight: int) -> dict[str, int]:
    """Bytes on a device at each moment of a step, but for buffers of boundaries."""
    chunk = programs.chunk
    state = bytes_on_a_device(chunk.state_shapes)
    replicas = bytes_on_a_device(replica_shapes(chunk))
    gradients = bytes_on_a_device(gradient_shapes(chunk))
    x_BLD = None if chunk.is_first else boundary_shape(chunk)
    run = functools.partial(microbatch.forward, chunk, chunk.state_shapes.fixed)
    *_, saved = jax.eval_shape(run, replica_shapes(chunk), x_BLD, batch_shapes(chunk))
    table = programs.table
    forward, backward = (table[ProgramKey(name, False)] for name in ("forward", "backward"))
    where = forward.output_shardings[-1].arrays
    kept = bytes_on_a_device(jax.tree.map(lambda x, s: x.update(sharding=s), saved.arrays, where))
    held = state + replicas + gradients
    found = {
        "forward": held + (in_flight - 1) * kept + temporary_bytes(forward),
        "backward": held + in_flight * kept + temporary_bytes(backward),
        "update": held + temporary_bytes(programs["update"]),
    }
    others = {"gather": state, "backward": held + kept, "reduce": held}
    for name, num_bytes in others.items():
        if program := table.get(ProgramKey(name, True)):
            moment = "last backward" if name == "backward" else name
            found[moment] = num_bytes + temporary_bytes(program)
    return found


def chunks_of(case: StageCase, model: ModelConfig) -> list[Chunk]:
    """The stages of a case on H200s that need not be there."""
    plan = plan_of(case)
    devices = described_devices(case.num_stages * case.mesh.num_devices)
    config = OptimizerConfig(learning_rate=1e-4, moments=case.moments)
    return [
        Chunk(
            model=model,
            plan=plan,
            index=index,
            mesh=mesh,
            optimizer=make_optimizer(config, 100, statements(model)),
            compute_dtype="bfloat16",
            clip_norm=config.clip_norm,
            mask_documents=False,
            kernels=KernelsConfig(attention="pallas"),
        )
        for index, mesh in enumerate(build_meshes(plan, devices))
    ]


def compile_here(number: int) -> None:
    """In a process that sees the plugin: a line of JSON for each stage of a case."""
    case = CASES[number]
    model = replace(MODELS[case.model], num_layers=case.num_layers)
    for index, chunk in enumerate(chunks_of(case, model)):
        shape = shape_of(case, index)
        items = memory.stage_memory_bytes(model, shape)
        if case.num_stages == 1:
            step = compile_whole_step(chunk, evaluates=False)["step"]
            found = {"step": bytes_on_a_device(chunk.state_shapes) + temporary_bytes(step)}
        else:
            found = moments_of(compile_chunks([chunk])[0], case.num_stages - index)
        moment = max(found, key=lambda name: found[name])
        compiled, predicted = found[moment] + items["boundaries"], sum(items.values())
        line = {
            "what": case.label,
            "stage": index,
            "moment": moment,
            "compiled_bytes": compiled,
            "predicted_bytes": float(predicted),
            "error": float(predicted / compiled - 1.0),
            "moments": found,
            "items": {name: float(size) for name, size in items.items()},
        }
        print(json.dumps(line), flush=True)


def misses(line: dict[str, Any]) -> bool:
    """Whether the prediction of a line is too far off."""
    if line["moment"] == "step":
        return bool(abs(line["error"]) > WHOLE_STEP_BAR)
    return bool(line["error"] < -BAR)


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| stages | number | most in | compiled GiB | predicted GiB | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for line in lines:
        size = [line[f"{name}_bytes"] / 2**30 for name in ("compiled", "predicted")]
        missed = " MISSED" * misses(line)
        rows.append(
            f"| {line['what']} | {line['stage']} | {line['moment']} | {size[0]:.2f} | "
            f"{size[1]:.2f} | {line['error']:+.1%}{missed} |"
        )
    errors = [abs(line["error"]) for line in lines]
    rows.append(f"\nmean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(rows)


def compiled_apart(
    name: str, number: int, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The lines that a process of its own prints of a case of `benchmarks.NAME`.

    Args:
      name: of the benchmark.
      number: of the case.
      environment: of the process; None: that of a job.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--compile", str(number)]
    env = job_environment() if environment is None else environment
    out = subprocess.run(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [json.loads(text) for text in out.splitlines() if text.startswith('{"what"')]


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
        print(f"{number + 1}/{len(CASES)}  {case.label}", flush=True)
        lines += compiled_apart(NAME, number)
    save(NAME, lines, table(lines), args.out)
    return 1 if any(map(misses, lines)) else 0


if __name__ == "__main__":
    sys.exit(main())
