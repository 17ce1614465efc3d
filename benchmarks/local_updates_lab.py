"""Islands between processes in a lab: what `benchmarks.local_updates` runs for L4 and for peers.

Two nodes, each a cluster of its own with one core's share, and a link that is shaped. The nodes'
control groups have the largest weight, and the supervisor goes before others, so that a busy
machine takes little of their quotas.
"""

import bisect
import contextlib
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.holmes_lab import Failed, cpu_seconds
from benchmarks.lab_rows import load_topology
from benchmarks.lab_steps import machine_cpu_s
from holmesjax import config as configs
from holmesjax.config import (
    CHECKOUT,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from holmesjax.job import Job
from holmesjax.lab import scaled_topology
from holmesjax.lab.scaled_topology import Share
from holmesjax.lab.shell import WEIGHTS, Commands
from holmesjax.planner.planner import make_plan
from holmesjax.report import metrics
from launch.lab_machine import namespaces
from launch.lab_machine.counters import Counters
from launch.supervisor import Supervisor

QUOTA = 0.35  # cores of a node
FAST_BIT_PER_S = 1.6e9  # of the fast network whose parts the links are
WINDOW_S, SAMPLE_S = 0.1, 0.01  # of the peak of bytes
MODEL = ModelConfig(
    num_layers=6,
    width=192,
    num_heads=4,
    context_length=128,
    vocab_size=256,
    positions="learned",
    tied_embeddings=False,
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant")
Result = dict[str, Any]


def topology_text(rate_bit_per_s: float) -> str:
    """Two clusters of one node each."""
    rate = f"{rate_bit_per_s / 1e3:.3f} kb/s"
    cluster = (
        "  - name: {0}\n    fabric: ethernet\n    nodes: [{{name: {0}-0}}]\n"
        "    devices: {{kind: cpu, count: 1, peak_flop_per_s: {{float32: 90 GFLOP/s}}}}\n"
        "    nics: [{{kind: ethernet_25, rate: 1000 Mb/s}}]\n"
    )
    link = f"  - {{between: [a, b], fabric: ethernet, bandwidth: {rate}, latency: 50 us}}\n"
    return f"name: two\nclusters:\n{cluster.format('a')}{cluster.format('b')}links:\n{link}"


def config_of(
    folder: Path, steps: int, batch: int, parallel: ParallelConfig, model: ModelConfig = MODEL
) -> Config:
    """A run of so many steps."""
    return Config(
        topology=str(folder / "network.yaml"),
        run=RunConfig(dir=str(folder / "run")),
        train=TrainConfig(steps=steps, global_batch=batch, log_every_s=0.0),
        model=model,
        data=DataConfig(corpus="python-stdlib"),
        optimizer=OPTIMIZER,
        parallel=parallel,
        log=LogConfig(tensorboard=False, report=False),
    )


@contextlib.contextmanager
def built(rate_bit_per_s: float, folder: Path) -> Iterator[Commands]:
    """A lab with a link of this rate each way."""
    network = load_topology(topology_text(rate_bit_per_s), folder / "network.yaml")
    shares = [Share(quota=QUOTA, cores=(core,)) for core in (0, 1)]
    commands = namespaces.commands_for(scaled_topology.make_lab(network, shares, 1.0))
    with namespaces.built(commands):
        for node in commands.lab.nodes:
            group = Path(commands.cgroup(node))
            file, value = WEIGHTS[commands.cgroup_version]
            (group / file).write_text(str(value))
        yield commands


class Peak:
    """Reads what the nodes' interfaces have sent, often, while a job runs."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, int]]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            self._samples.append((time.monotonic(), _sent()))

    def most_bytes(self, since_s: float, until_s: float) -> float:
        """The most bytes that a node can have sent in any 100 ms of a time.

        Between two samples nobody has looked, so each window begins with the sample before it.
        """
        found, first, times_s = 0.0, 0, [at_s for at_s, _ in self._samples]
        begin = max(bisect.bisect_right(times_s, since_s) - 1, 0)
        samples = self._samples[begin : bisect.bisect_left(times_s, until_s) + 1]
        for at_s, sent in samples:
            while samples[first + 1 :] and samples[first + 1][0] <= at_s - WINDOW_S:
                first += 1
            found = max(found, *(sent[name] - samples[first][1][name] for name in sent))
        return found


def _sent() -> dict[str, int]:
    """The bytes that each node has sent: what its port of the bridge has received."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    ports = [line.split(":") for line in lines if line.strip().startswith("n")]
    return {name.strip(): int(values.split()[0]) for name, values in ports}


class _Watch:
    """Notes the time and the nodes' CPU seconds at each step."""

    def __init__(self, commands: Commands):
        self._commands = commands
        self.times_s: list[float] = []
        self.cpu_s: list[list[float]] = []

    def step(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        self.times_s.append(time.monotonic())
        self.cpu_s.append([*cpu_seconds(self._commands), machine_cpu_s()])
        return {}

    def end(self) -> None:
        pass


def run_ours(
    rate_bit_per_s: float,
    folder: Path,
    steps: int,
    batch: int,
    parallel: ParallelConfig,
    first: int,
    model: ModelConfig = MODEL,
) -> Result:
    """Trains in a lab of its own.

    Args:
      rate_bit_per_s: of the link, each way.
      folder: of the run's files.
      steps: of the run.
      batch: sequences of a step, of all islands.
      parallel: the islands and their meetings.
      first: the first step that is timed; the last is not, since everything meets after it.
      model: what trains.

    Raises Failed or HolmesError.
    """
    with built(rate_bit_per_s, folder) as commands:
        config = config_of(folder, steps, batch, parallel, model)
        job = Job(
            config=config,
            topology=commands.lab.topology,
            plan=make_plan(config, commands.lab.topology),
        )
        launcher, watch = namespaces.LabLauncher(commands), _Watch(commands)
        counters = Counters(commands, [["a"], ["b"]])
        log = (folder / "job.log").open("w")
        with Peak() as peak, log, contextlib.redirect_stdout(log):
            Supervisor(job, launcher, watch=watch).run()
        counters.write(folder, [])
    records = metrics.read(job.run_dir)
    if len(records) < steps:
        raise Failed(f"{len(records)} of {steps} steps")
    links = json.loads((folder / "lab.json").read_text())["links"]
    timed = records[first - 1 : -1]
    until, since = watch.times_s[-2], watch.times_s[first - 2]
    cpu_s = [
        end - start for start, end in zip(watch.cpu_s[first - 2], watch.cpu_s[-2], strict=True)
    ]
    told = [sum(record["link_bytes"].values()) for record in records]
    return {
        "step_s": statistics.fmean(record["step_time_s"] for record in timed),
        "wall_s": (until - since) / len(timed),
        "steps": len(timed),
        "compute_s": sum(cpu_s[:-1]) / len(timed) / QUOTA / len(commands.lab.nodes),
        "others": (cpu_s[-1] - sum(cpu_s[:-1])) / (until - since) / 2,
        "losses": [record["loss"] for record in records],
        "step_times_s": [record["step_time_s"] for record in records],
        "told_bytes": sum(told),
        "kernel_bytes": sum(link["kernel_bytes"] for link in links),
        "header_bytes": sum(link["parts"]["headers"] for link in links),
        "peak_bytes": peak.most_bytes(since, until),
        "meeting_bytes": sum(job.plan.meeting.bytes) if job.plan.meeting else 0.0,
        "island_bytes": max(job.plan.meeting.bytes) if job.plan.meeting else 0.0,
    }


def islands(every: int, fragments: int = 1, delay: int = 0, blend: float = 1.0) -> ParallelConfig:
    return ParallelConfig(
        across="local_updates",
        microbatches=1,
        every=every,
        fragments=fragments,
        delay=delay,
        blend=blend,
    )


# ---- L4: overlap that is real --------------------------------------------------------------------

EVERY, FRAGMENTS = 20, 2
BATCH = 4  # sequences of a step, of both islands
SHARE = 0.85  # with what it computes, a meeting that stops all takes as long as the steps
L4_ROWS = {
    "never": islands(10_000),  # meets after the last step alone
    "blocking": islands(EVERY),
    "overlap": islands(EVERY, FRAGMENTS, EVERY // FRAGMENTS, 0.5),
}


def measure_overlap(repeats: int) -> list[Result]:
    """Runs without meetings, with meetings that stop all, and with fragments that stream.

    Sending takes SHARE of the time of the steps from one meeting to the next. That is a tenth of
    the rate at which it would take a tenth of SHARE.
    """
    runs = list[Result]()
    for repeat in range(repeats):
        step_s = math.nan
        for name, parallel in L4_ROWS.items():
            rate = FAST_BIT_PER_S
            if name != "never":
                rate = 8 * runs[-1]["island_bytes"] / (SHARE * EVERY * step_s)
            with tempfile.TemporaryDirectory(prefix="local_updates_") as folder:
                steps = 1 + 3 * EVERY  # two periods are timed
                run = run_ours(rate, Path(folder), steps, BATCH, parallel, 1 + EVERY)
            if name == "never":
                step_s = run["wall_s"]
            run |= {"row": name, "repeat": repeat, "rate_bit_per_s": rate, "never_s": step_s}
            print(f"{name}: {run['wall_s']:.3f} s a step", flush=True)
            runs.append(run)
    return runs


# ---- peers ---------------------------------------------------------------------------------------

POINTS = {64: FAST_BIT_PER_S / 64, 1000: FAST_BIT_PER_S / 1000}
PEER_MODEL = dataclasses.replace(MODEL, num_layers=4, width=96)
PEER_BATCH, PEER_EVERY = 16, 50
PORT = 29500  # of the rendezvous; every lab has its own network
RUN_TIMEOUT_S = 600.0
PEER_ROWS: dict[str, ParallelConfig | str] = {
    "ours, alone": islands(10_000),
    "ours, all wait": islands(PEER_EVERY),
    "ours, streaming": islands(PEER_EVERY, 5, PEER_EVERY // 5, 0.5),
    "torchft DiLoCo": "diloco",
    "PyTorch DDP": "ddp",
}


def measure_peers(repeats: int, python: str | None) -> list[Result]:
    """Tokens/s of each system over each link; those of PyTorch need a Python that has it."""
    runs = list[Result]()
    order = itertools.product(range(repeats), POINTS.items(), PEER_ROWS.items())
    for repeat, (point, rate), (name, how) in order:
        with tempfile.TemporaryDirectory(prefix="local_updates_") as folder:
            steps, first = 1 + 2 * PEER_EVERY, 1 + PEER_EVERY
            if not isinstance(how, str):
                run = run_ours(rate, Path(folder), steps, PEER_BATCH, how, first, PEER_MODEL)
            elif python is None:
                continue
            else:
                steps = 12 if how == "ddp" else steps
                run = run_torch(rate, Path(folder), steps, how, python)
        tokens_per_s = PEER_BATCH * PEER_MODEL.context_length / run["wall_s"]
        run |= {"row": name, "repeat": repeat, "point": point, "tokens_per_s": tokens_per_s}
        print(name, point, f"{tokens_per_s:.0f} tokens/s", flush=True)
        runs.append(run)
    return runs


def run_torch(rate_bit_per_s: float, folder: Path, steps: int, mode: str, python: str) -> Result:
    """A process of PyTorch on each node. Raises Failed with the last lines of one that fails."""
    with built(rate_bit_per_s, folder) as commands:
        config = config_of(folder, steps, PEER_BATCH, ParallelConfig(), PEER_MODEL)
        configs.save(config, folder / "run.yaml")
        nodes = commands.lab.nodes
        packages = [path for path in sys.path if path.endswith("site-packages")]
        outs = [folder / f"rank{rank}.jsonl" for rank in range(len(nodes))]
        errors = [folder / f"rank{rank}.log" for rank in range(len(nodes))]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, node in enumerate(nodes):
                words = [python, "-m", "benchmarks.local_updates_torch", mode]
                words += [str(folder / "run.yaml"), str(rank)]
                words += [f"{nodes[0].slow_address}:{PORT}", str(PEER_EVERY)]
                own = {
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "PYTHONPATH": ":".join([str(CHECKOUT), *packages]),
                    "HOLMES_NODE_ADDRESS": node.slow_address,
                }
                with outs[rank].open("wb") as out, errors[rank].open("wb") as error:
                    child = subprocess.Popen(
                        commands.enter(node, words),
                        env={**os.environ, **own},
                        stdout=out,
                        stderr=error,
                        start_new_session=True,
                    )
                children.append(child)
            for child, log in zip(children, errors, strict=True):
                if child.wait(RUN_TIMEOUT_S):
                    raise Failed("\n".join(log.read_text(errors="replace").splitlines()[-12:]))
        finally:
            for child in children:
                child.kill()
                child.wait()
        sent = sum(_sent().values())
    records = [json.loads(line) for line in outs[0].read_text().splitlines() if line[:1] == "{"]
    # Of DiLoCo a whole period: from the end of a meeting to that of the next.
    timed = records[1:] if mode == "ddp" else records[PEER_EVERY - 1 : 2 * PEER_EVERY]
    return {
        "wall_s": (timed[-1]["end_s"] - timed[0]["end_s"]) / (len(timed) - 1),
        "steps": len(timed) - 1,
        "losses": [record["loss"] for record in records],
        "sent_bytes": sent,
    }


def measure(group: str, repeats: int, python: str | None) -> list[Result]:
    """The runs of a group of rows, `overlap` or `peers`."""
    os.nice(-10)
    runs = measure_overlap(repeats) if group == "overlap" else measure_peers(repeats, python)
    return [{"group": group, **run} for run in runs]
