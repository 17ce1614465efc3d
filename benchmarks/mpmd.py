"""A job of two stages in two processes, beside what its schedule allows: python -m benchmarks.mpmd

(a) step    the measured time of a step, over the time that the schedule would take if every task
            took what it takes by itself, on its own core, and if nothing else took time: no
            transfer, no dispatch, no agreement. Bar: <= 1.10 with 16 microbatches of >= 50 ms.
            `pure` is measured before and after the job, on the same programs, one stage at a time
            and, as in the job, both at once: they share the memory of the machine.
(b) bytes   what crosses the link in a step, beside the formula: 2 B T D c. Must be equal.
(c) links   `benchmarks.transports`.

Each stage has a core of its own. A ratio is of medians; the spread of a time is its middle half
over its median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import transports
from benchmarks.pipeline_overhead import middle
from benchmarks.provenance import RESULTS, provenance
from holmesjax import job as jobs, job_files
from holmesjax.costs import work
from holmesjax.job import Job
from holmesjax.parallel import platforms
from holmesjax.parallel.mesh import build_mesh
from holmesjax.report import metrics
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.program_shapes import batch_shapes, boundary_shape
from holmesjax.runtime.programs import Programs
from holmesjax.schedules.simulation import simulate
from holmesjax.training_setup import make_chunks
from launch.launchers.launcher import EventSink, ProcessStart
from launch.launchers.local import LocalLauncher
from launch.supervisor import Supervisor

Result = dict[str, Any]
BAR, MICROBATCHES = 1.10, 16
CLUSTERS = """
name: two_cores
clusters:
  - {name: a, fabric: local, nodes: 1, devices: {kind: cpu, count: 1}, nics: [{kind: ethernet_25}]}
  - {name: b, fabric: local, nodes: 1, devices: {kind: cpu, count: 1}, nics: [{kind: ethernet_25}]}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}
"""
# The head takes the time of a layer: 3 + 2 layers are near equal.
RUN = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: 5, width: 256, num_heads: 4, context_length: 256, vocab_size: 3072}}
data: {{corpus: python-stdlib}}
train: {{steps: {steps}, global_batch: {batch}, log_every_s: 0}}
optimizer: {{learning_rate: 1.0e-3}}
parallel:
  clusters: [a, b]
  layers: [3, 2]
  microbatches: {microbatches}
  schedule: 1f1b
  activation_checkpointing: none
log: {{tensorboard: false}}
"""


class PinnedLauncher(LocalLauncher):
    """Every process on a core of its own."""

    def start(self, start: ProcessStart, events: EventSink) -> None:
        super().start(start, events)
        os.sched_setaffinity(
            self.pids[-1], {cores()[start.process.number]}
        )  # before it has threads


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:2]


# ---- a stage by itself ---------------------------------------------------------------------------


def pure(run_dir: str, stage: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the stage's programs, with nothing around them; runs on the core of the stage."""
    job = jobs.load_saved(run_dir)
    platforms.use_devices({"cpu"}, 1, rehearse=True)
    [device] = job.plan.stages[stage].devices
    mesh = build_mesh(job.plan.stages[stage], {device: jax.devices()[0]})
    programs = compile_chunks([make_chunks(job, {stage: mesh})[0]])[0]
    found: dict[str, list[float]] = {}
    state = programs.chunk.init(0)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(rounds):
        state = _timed_step(programs, state, found)
    return found


def _timed_step(programs: Programs, state: Any, found: dict[str, list[float]]) -> Any:
    """A step of two microbatches, which runs every program once."""
    chunk = programs.chunk
    full = lambda s: jax.device_put(jax.numpy.ones(s.shape, s.dtype), s.sharding)
    batch = {name: full(shape) for name, shape in batch_shapes(chunk).items()}
    x_BLD = None if chunk.is_first else full(boundary_shape(chunk))
    scalar = jax.device_put(jax.numpy.float32(1 / 16), jax.devices()[0])
    dy = scalar if chunk.is_last else full(boundary_shape(chunk))
    gradients = programs["zero_gradients"]()
    # A stage of one device has a single program of each function: it sends nothing.

    def timed(name: str, program: Any, *args: Any) -> Any:
        jax.block_until_ready(args)
        start_s = time.perf_counter()
        out = jax.block_until_ready(program(*args))
        found.setdefault(name, []).append(time.perf_counter() - start_s)
        return out

    replicas, fixed = timed("gather", programs["gather"], state.params), state.fixed
    for _ in range(2):
        *_, saved = timed("forward", programs["forward"], fixed, replicas, x_BLD, batch)
        args = fixed, replicas, saved, gradients, dy, None
        gradients, _ = timed("backward", programs["backward"], *args)
    totals = timed("chunk_totals", programs["chunk_totals"], gradients, {}, None)
    return timed("update", programs["update"], state, gradients, totals, {})[0]


def measure_pure(run_dir: Path, rounds: int, *, together: bool) -> list[dict[str, list[float]]]:
    """Measures both stages, each on its core."""
    found: list[dict[str, list[float]]] = []
    for stages in [(0, 1)] if together else [(0,), (1,)]:
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.mpmd",
                    "--pure",
                    str(run_dir),
                    str(s),
                    str(rounds),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for s in stages
        ]
        for s, child in zip(stages, children, strict=True):
            os.sched_setaffinity(child.pid, {cores()[s]})  # before it has threads
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        found += [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    return found


# ---- the job -------------------------------------------------------------------------------------


def run_job(job: Job) -> list[dict[str, Any]]:
    """Trains; the records of its steps."""
    status = Supervisor(job, PinnedLauncher(job.topology)).run()
    assert status == 0, f"the job ended with {status}"
    return metrics.read(job.run_dir)


def ideal_step_s(job: Job, times: Sequence[Mapping[str, list[float]]]) -> float:
    """The simulated schedule with the times of the programs by themselves, and no transfers.

    Parameters are gathered before it and gradients reduced behind it; the slowest update ends it.
    """
    median = [{name: statistics.median(s) for name, s in stage.items()} for stage in times]
    simulation = simulate(
        job.plan.tasks(),
        [m["forward"] for m in median],
        [m["backward"] for m in median],
        [(0.0, 0.0)],
    )
    extra = lambda m: m["gather"] + m["chunk_totals"] + m["update"]
    return simulation.step_time_s + max(map(extra, median))


def measure(steps: int, rounds: int, batch: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "topology.yaml").write_text(CLUSTERS)
        text = RUN.format(folder=folder, steps=steps, batch=batch, microbatches=MICROBATCHES)
        (path / "run.yaml").write_text(text)
        job = jobs.load(path / "run.yaml")
        job_files.save(job)
        alone = measure_pure(job.run_dir, rounds, together=False)
        together = measure_pure(job.run_dir, rounds, together=True)
        records = run_job(job)[3:]  # the first steps fill memory and caches
        again = measure_pure(job.run_dir, rounds, together=True)
    both = [{name: x[name] + y[name] for name in x} for x, y in zip(together, again, strict=True)]
    step_s = [record["step_time_s"] for record in records]
    ideals = {
        "one stage at a time": ideal_step_s(job, alone),
        "both at once": ideal_step_s(job, both),
    }
    num_tokens = job.config.train.global_batch * job.config.model.context_length
    want = int(work.boundary_bytes(job.config.model, num_tokens, "float32"))
    return {
        "microbatches": MICROBATCHES,
        "microbatch_s": [
            statistics.median(s["forward"]) + statistics.median(s["backward"]) for s in alone
        ],
        "pure_s": [
            {name: statistics.median(times) for name, times in stage.items()} for stage in both
        ],
        "step_s": middle(step_s),
        "steps": len(step_s),
        "ideal_s": ideals,
        "ratio": {name: statistics.median(step_s) / s for name, s in ideals.items()},
        "bar": BAR,
        "bytes_per_step": records[-1]["link_bytes"],
        "formula_bytes": {"a -> b": want, "b -> a": want},
    }


def show(result: Result) -> None:
    microbatch = ", ".join(f"{s * 1e3:.0f} ms" for s in result["microbatch_s"])
    step = result["step_s"]
    print(f"\n{MICROBATCHES} microbatches of {microbatch}; {result['steps']} steps")
    print(f"  step {step['median']:.3f} s (spread {step['spread']:.1%})")
    for name, ideal_s in result["ideal_s"].items():
        ratio = result["ratio"][name]
        print(f"  simulated {ideal_s:.3f} s, compute measured {name}: {ratio:.3f} (bar <= {BAR})")
    equal = result["bytes_per_step"] == result["formula_bytes"]
    print(f"  bytes {result['bytes_per_step']}: {'as' if equal else 'NOT as'} the formula")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mpmd", description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=15, help="of each job (15)")
    parser.add_argument("--rounds", type=int, default=10, help="of each program by itself (10)")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step (64)")
    parser.add_argument("--no-links", action="store_true", help="leave out part (c)")
    parser.add_argument("--pure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pure:
        print(json.dumps(pure(args.pure[0], int(args.pure[1]), int(args.pure[2]))))
        return
    load = os.getloadavg()[0]
    result: Result = {
        **provenance("mpmd", used=2),
        "load_average": {"before": load},
        "job": measure(args.steps, args.rounds, args.batch),
    }
    show(result["job"])
    if not args.no_links:
        result["links"] = transports.measure()
        transports.show(result["links"])
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"mpmd_{result['versions']['jax']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
