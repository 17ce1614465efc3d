"""The overhead of HolmesJAX beside plain loops: python -m benchmarks.pipeline_overhead

(a) one stage     a step of one stage, beside a plain jitted optax loop over the same layer
                  functions; with 1 and with 4 microbatches. Ratio of step times, bar: <= 1.03.
(b) two stages    what cutting a step in two stages adds. All devices share one core, so the work of
                  both stages is done one after the other and fills the bubble of the schedule. What
                  is left is
                      extra = (time of 2 stages - time of 1 stage) / number of tasks,
                  where a task is one forward or backward of one microbatch on one stage: starting
                  the programs, what passes between them, the timeline, and a step's end, which now
                  runs on each stage. `dispatch` is the CPU time that the calling thread takes for a
                  task before `train_step` returns. The model is small, so that all this shows.
(c) one core      tokens per second of one stage, beside PyTorch and textbook JAX. Bar: >= 1.
(d) a Llama       of 10 million parameters, the same beside `transformers`. Bar: >= 1.

Every loop is a process of its own on one core, and the parent lets one at a time take a step, in
rounds, so what disturbs the machine disturbs all of them. A ratio is the median of the ratios of a
round; the spread of a time is its middle half over its median; `busy` is the share of the time in
which the loop had the core.
"""

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import RESULTS, provenance

MAX_SPREAD, MIN_BUSY = 0.05, 0.95  # beyond these, something else had the core
MAX_DIFFERENCE = 1e-3  # of the losses of loops that do the same, in nats

Result = dict[str, Any]


class Comparison(NamedTuple):
    """Loops that take turns, and the ratios of their times."""

    loops: tuple[str, ...]
    ratios: dict[str, tuple[str, str, float]]  # name: (time of this, over time of this, bar)
    steps_per_turn: int


PARTS = {
    "a": Comparison(
        ("holmesjax", "plain jax", "holmesjax, 4 microbatches", "plain jax, 4 microbatches"),
        {
            "1 microbatch": ("holmesjax", "plain jax", 1.03),
            "4 microbatches": ("holmesjax, 4 microbatches", "plain jax, 4 microbatches", 1.03),
        },
        1,
    ),
    "b": Comparison(("1 stage", "2 stages", "1 stage of 2x2", "2 stages of 2x2"), {}, 5),
    "c": Comparison(
        ("holmesjax", "textbook jax", "pytorch"),
        {
            "pytorch": ("pytorch", "holmesjax", 1.0),
            "textbook jax": ("textbook jax", "holmesjax", 1.0),
        },
        1,
    ),
    "d": Comparison(
        ("holmesjax, a Llama", "transformers, a Llama"),
        {"transformers": ("transformers, a Llama", "holmesjax, a Llama", 1.0)},
        1,
    ),
}
INSTALL = "pip install -c constraints.txt -e '.[bench]'"
PAIRS = {"1 device a stage": ("2 stages", "1 stage"), "2x2": ("2 stages of 2x2", "1 stage of 2x2")}


# ---- a loop, in a process of its own -------------------------------------------------------------


def serve(name: str, core: int) -> None:
    """Builds a loop; then for each line of input takes that many steps and prints their cost."""
    os.sched_setaffinity(0, {core})
    # Only now: the number of XLA's threads follows the cores that the process may use.
    jax, loops = (importlib.import_module(module) for module in ("jax", "benchmarks.loops"))
    make_step, sizes = loops.LOOPS[name]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", sizes.num_devices)
    step = make_step(sizes)

    def turn(num_steps: int) -> Result:
        dispatch_s, start_cpu_s, start_s = 0.0, time.process_time(), time.perf_counter()
        for _ in range(num_steps):
            cpu_s = time.thread_time()
            out = step()
            dispatch_s += time.thread_time() - cpu_s
            jax.block_until_ready(out)
        step_s = (time.perf_counter() - start_s) / num_steps
        busy = (time.process_time() - start_cpu_s) / num_steps / step_s
        losses = [float(x) for x in jax.tree.leaves(out[0])]
        page = os.sysconf("SC_PAGE_SIZE")
        rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * page
        return {
            "step_s": step_s,
            "busy": busy,
            "dispatch_s": dispatch_s / num_steps,
            "loss": statistics.mean(losses),
            "rss_bytes": rss_bytes,
        }

    first = [turn(1)["loss"] for _ in range(3)]
    tokens = sizes.global_batch * sizes.model.context_length
    tasks = 2 * sizes.stages * sizes.microbatches
    print(json.dumps({"losses": first, "tokens": tokens, "tasks": tasks}), flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(int(line))), flush=True)


class Loop:
    """The parent's end of a loop."""

    def __init__(self, name: str, core: int):
        command = [sys.executable, "-m", "benchmarks.pipeline_overhead", "--serve", name]
        self._process = subprocess.Popen(
            [*command, "--core", str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name, self.turns = name, list[Result]()
        self.about = self._read()

    def _read(self) -> Result:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the loop {self.name!r} ended; its message is above")
        return json.loads(line)

    def turn(self, num_steps: int) -> None:
        assert self._process.stdin
        print(num_steps, file=self._process.stdin, flush=True)
        self.turns.append(self._read())

    def close(self) -> None:
        self._process.communicate()

    def seconds(self, key: str = "step_s") -> list[float]:
        return [turn[key] for turn in self.turns]


# ---- a part --------------------------------------------------------------------------------------


def middle(values: Sequence[float]) -> Result:
    """Median, and the middle half over it."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "spread": (high - low) / abs(median)}


def measure(names: Sequence[str], part: Comparison, rounds: int, core: int) -> dict[str, Loop]:
    """Starts the loops, checks that they compute the same, and lets them take turns."""
    loops = {}
    for name in names:
        print(f"  starting {name}", file=sys.stderr)
        loops[name] = Loop(name, core)
    starts = [loop.about["losses"] for loop in loops.values()]
    apart = max(max(losses) - min(losses) for losses in zip(*starts, strict=True))
    assert apart < MAX_DIFFERENCE, f"the loops differ: losses {starts}"
    for _ in range(rounds):
        for loop in loops.values():
            loop.turn(part.steps_per_turn)
    for loop in loops.values():
        loop.close()
    return loops


def ratio(over: Loop, under: Loop) -> Result:
    return middle([a / b for a, b in zip(over.seconds(), under.seconds(), strict=True)])


def summary(loop: Loop) -> Result:
    step = middle(loop.seconds())
    return {
        "step_ms": 1e3 * step["median"],
        "spread": step["spread"],
        "busy": statistics.median(turn["busy"] for turn in loop.turns),
        "tokens_per_s": loop.about["tokens"] / step["median"],
        "rss_mib": [round(loop.turns[i]["rss_bytes"] / 2**20) for i in (0, -1)],
        "losses": loop.about["losses"],
        "steps_ms": [round(1e3 * s, 3) for s in loop.seconds()],
    }


def extra(two: Loop, one: Loop) -> Result:
    """Microseconds that the cut in two stages adds to each task."""
    tasks = two.about["tasks"]
    pairs = zip(two.seconds(), one.seconds(), strict=True)
    each = middle([1e6 * (a - b) / tasks for a, b in pairs])
    dispatch = middle([1e6 * s / tasks for s in two.seconds("dispatch_s")])
    return {
        "extra_us_per_task": each["median"],
        "extra_spread": each["spread"],
        "dispatch_us_per_task": dispatch["median"],
        "tasks": tasks,
    }


def run_part(label: str, rounds: int, core: int) -> Result:
    part = PARTS[label]
    names = part.loops
    for module, start in (("torch", "pytorch"), ("transformers", "transformers")):
        if importlib.util.find_spec(module) is None and any(n.startswith(start) for n in names):
            print(f"no {module} here: part ({label}) runs without it. Install: {INSTALL}")
            names = tuple(name for name in names if not name.startswith(start))
    loops = measure(names, part, rounds, core)
    found: Result = {"loops": {name: summary(loop) for name, loop in loops.items()}}
    found["ratios"] = {
        name: {**ratio(loops[a], loops[b]), "time_of": a, "over_time_of": b, "bar": bar}
        for name, (a, b, bar) in part.ratios.items()
        if a in loops and b in loops
    }
    if label == "b":
        found["two_stages"] = {
            name: extra(loops[two], loops[one]) for name, (two, one) in PAIRS.items()
        }
    return found


def show(label: str, part: Result) -> None:
    print(
        f"\n({label}) {'loop':<34} ms/step  spread   busy   tokens/s   RSS MiB, first and last turn"
    )
    for name, x in part["loops"].items():
        mark = "  disturbed" if x["spread"] > MAX_SPREAD or x["busy"] < MIN_BUSY else ""
        times = (
            f"{x['step_ms']:9.1f}  {x['spread']:6.1%}  {x['busy']:5.0%}  {x['tokens_per_s']:9.0f}"
        )
        print(f"    {name:<32} {times}   {x['rss_mib'][0]:4} {x['rss_mib'][1]:4}{mark}")
    for x in part["ratios"].values():
        bar = f"bar {'<=' if label == 'a' else '>='} {x['bar']}"
        print(f"    {x['time_of']} / {x['over_time_of']}: {x['median']:.3f} ({bar})")
    for name, x in part.get("two_stages", {}).items():
        print(
            f"    2 stages, {name}: {x['extra_us_per_task']:.0f} us extra per task, of {x['tasks']}"
            f" (spread {x['extra_spread']:.0%}); dispatch {x['dispatch_us_per_task']:.0f} us"
        )


# ---- where it ran --------------------------------------------------------------------------------


def count(text: str) -> int:
    """A number above 0, of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("pipeline_overhead", description=__doc__, formatter_class=raw)
    last = max(os.sched_getaffinity(0))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each loop (11)")
    parser.add_argument("--core", type=int, default=last, help=f"the core of all loops ({last})")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.core)
        return
    load = os.getloadavg()[0]
    result: Result = {
        **provenance("pipeline_overhead", used=1),
        "load_average": {"before": load},
        "rounds": args.rounds,
        "parts": {},
    }
    for label in args.parts:
        result["parts"][label] = run_part(label, args.rounds, args.core)
        show(label, result["parts"][label])
    result["load_average"]["after"] = os.getloadavg()[0]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"pipeline_overhead_{result['versions']['jax']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
