"""Steps that a day on a GPU has measured, beside what is planned for them now.

The result files of `benchmarks.gpu_day` have them. A row counts if its part is still one of a day,
so that rows of trials, with other flags or kernels, do not.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import gpu_day_parts, train_gpu
from benchmarks.gpu_day import PARTS
from holmesjax import config as configs
from holmesjax.job import Job
from holmesjax.planner.planner import make_plan
from holmesjax.topology import loading

TRAINED = re.compile(r"HolmesJAX: (\S+) at (\d+) tokens")
ALONE = "a pipeline of 1"  # process: its boundaries are none


class Planned(NamedTuple):
    """One number of a run: as it was measured, and as the planner predicts it."""

    name: str
    measured: float
    predicted: float


class Steps(NamedTuple):
    """The numbers of all steps of a result file."""

    seconds: list[Planned]
    gib: list[Planned]  # the most that the device held


def read(path: Path) -> Steps:
    """The steps of a result file.

    Raises:
      AssertionError: the file is of a device that is not in the catalogue.
    """
    result = json.loads(path.read_text())
    kind = train_gpu.kind_of(result["device"])
    assert kind, f"{path}: no kind of device is named {result['device']}"
    steps = Steps([], [])
    for part in PARTS:
        for row in result["parts"].get(part.name, []):
            for name, job, tokens_per_s in _jobs(row, kind):
                tokens = job.config.train.global_batch * job.config.model.context_length
                seconds = tokens / tokens_per_s, job.plan.step_time_s
                steps.seconds.append(Planned(name, *seconds))
                if "measured_gib" in row:
                    predicted = sum(job.plan.stages[0].memory_bytes.values()) / 2**30
                    steps.gib.append(Planned(name, row["measured_gib"], predicted))
    return steps


def _jobs(row: dict[str, Any], kind: str) -> Iterator[tuple[str, Job, float]]:
    """The name, the job and the tokens/s of a row; nothing if it has no step."""
    if row.get("problem"):
        return
    if found := TRAINED.match(row["what"]):
        [tokens_per_s] = re.findall(r"([\d,]+) tokens/s", row["rate"])
        sizes = train_gpu.sizes_of(found[1], int(found[2]), kind)
        config = train_gpu.make_config(sizes, train_gpu.TOKENS, "bfloat16")
        yield found[1], train_gpu.make_job(config, kind), float(tokens_per_s.replace(",", ""))
    elif row["what"] == ALONE:
        [thousands] = re.findall(r"([\d.]+)k tok/s", row["is"])
        yield "GPT of 8 layers", _alone(kind), 1e3 * float(thousands)


def _alone(kind: str) -> Job:
    """The part `pipeline` in one process."""
    with tempfile.TemporaryDirectory() as folder:
        topology_path, path = Path(folder, "topology.yaml"), Path(folder, "run.yaml")
        device = f"{{kind: {kind}, count: 1}}"
        topology_path.write_text(gpu_day_parts.ONE_DEVICE.format(device=device))
        sizes = gpu_day_parts.PIPELINE_SIZES
        path.write_text(gpu_day_parts.PIPELINE.format(folder=folder, stages=1, **sizes))
        config, topology = configs.load(path), loading.load(topology_path)
    return Job(config=config, topology=topology, plan=make_plan(config, topology))
