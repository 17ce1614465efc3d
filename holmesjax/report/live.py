"""A run that goes on, as a terminal shows it: its loss, stages, links, and the time left. No JAX.

The record of a run is read again for each look, from its last part alone. So a look costs as much
after a million steps as after ten, and disturbs no run, on whichever host it is.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holmesjax import job as jobs
from holmesjax.checkpoints import scrub
from holmesjax.checkpoints.commit_alarm import FIELD
from holmesjax.config import Config
from holmesjax.liveness import lease
from holmesjax.plan.plan import Plan
from holmesjax.plan.plan_description import layers_text
from holmesjax.report import history, link_losses, metrics
from holmesjax.report.console import validation_losses
from holmesjax.report.goodput import goodput, rows
from holmesjax.units import duration, show

TAIL_BYTES = 2**18  # of the file, a few hundred steps
RECENT = 20  # steps whose medians are shown
BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 60  # of the picture of losses, in columns

Record = Mapping[str, Any]


class View:
    """Looks at a run folder.

    Raises:
      ConfigError: it is no run folder.
    """

    def __init__(self, run_dir: str | Path):
        self._run_dir = Path(run_dir)
        self._config = jobs.load_config(run_dir)

    def look(self) -> RenderableType:
        """The run as it is now."""
        plan_file = self._run_dir / jobs.PLAN
        plan = Plan.load(plan_file) if plan_file.exists() else None
        records = metrics.read_tail(self._run_dir, TAIL_BYTES)
        metrics.check_whole(self._run_dir, records)
        owner = lease.owner(self._run_dir)
        return Group(*describe(self._run_dir, self._config, plan, records, owner))


def describe(
    run_dir: Path,
    config: Config,
    plan: Plan | None,
    records: Sequence[Record],
    owner: str | None,
) -> list[RenderableType]:
    """The lines and tables that show a run.

    Args:
      run_dir: its folder.
      config: its settings.
      plan: of its stages; None: it has not begun.
      records: the last ones.
      owner: who trains it; None: nobody.
    """
    state = f"trained by {owner}" if owner else "nobody trains it"
    shown: list[RenderableType] = [Text(f"{run_dir}: {state}")]
    if not records:
        return [*shown, Text("no step is finished yet")]
    last, recent = records[-1], records[-RECENT:]
    middle = lambda name: statistics.median(record[name] for record in recent)
    left = f", left {duration(last['time_left_s'])}" if owner and "time_left_s" in last else ""
    shown.append(Text(f"step {last['step']:,} of {config.train.steps:,}{left}"))
    mfu = f"  MFU {middle('mfu'):.1%}" if "mfu" in last else ""
    rates = f"{middle('tokens_per_s'):,.0f} tokens/s  {show(middle('step_time_s'), 's')} a step"
    wait = f"  input wait {show(middle('input_wait_s'), 's')}" if "input_wait_s" in last else ""
    shown.append(Text(f"{rates}{mfu}{wait}  (medians of {len(recent)} steps)"))
    validated = [r for r in records if "val_loss" in r]
    validation = f"  {validation_losses(validated[-1])}" if validated else ""
    skipped = sum(bool(record["skipped"]) for record in records)
    bad = f"  {skipped} of the last {len(records)} steps skipped" if skipped else ""
    shown.append(Text(f"loss {last['loss']:.4f}{validation}{bad}"))
    if owner and FIELD in last:
        text = f"ALARM: no checkpoint since {last[FIELD]:,} steps; the launcher's output says more"
        shown.append(Text(text))
    if damaged := [record[scrub.FIELD] for record in records if scrub.FIELD in record]:
        shown.append(Text(f"ALARM: the checkpoint after step {damaged[-1]:,} is damaged"))
    shown.append(Text(sparkline([record["loss"] for record in records], WIDTH)))
    if others := _others(records):
        shown.append(Text(others))
    shown.extend(Text(line) for line in _time(last))
    if plan is not None:
        peaks = _peaks(plan, records)
        if len(plan.stages) > 1 or any(peaks):
            shown += [Text(""), _stages(plan, recent, peaks)]
        if len(plan.stages) > 1:
            shown += [Text(""), _links(records, middle("step_time_s"))]
            shown += [Text(line) for line in link_losses.lines(records)]
    return shown


def _others(records: Sequence[Record]) -> str:
    """The last of each number that a callback or layers gave, and the step if it is not the last.

    >>> _others([{"step": 3, "loss": 2.5, "perplexity": 12.18}, {"step": 4, "norm": 1 / 3}])
    'perplexity 12.18 (step 3)  norm 0.3333'
    """
    known = {}
    for record in records:
        for name in record.keys() - history.TAKEN:
            if metrics.is_number(record[name]):
                known[name] = record["step"], record[name]
    when = lambda step: "" if step == records[-1]["step"] else f" (step {step:,})"
    order = [name for record in records for name in record if name in known]
    return "  ".join(
        f"{name} {known[name][1]:.4g}{when(known[name][0])}" for name in dict.fromkeys(order)
    )


def _time(record: Record) -> list[str]:
    """Returns the line of what the run's time was spent on, besides its steps; often none."""
    if "wall_s" not in record:
        return []
    spent = [f"{name} {duration(seconds)}" for name, seconds in rows(record) if name != "step"]
    return ["  ".join([f"goodput {goodput(record):.1%}", *spent])]


def _peaks(plan: Plan, records: Sequence[Record]) -> list[int | None]:
    """Returns the bytes in use on the fullest device of each stage; None: it is not known."""
    peaks: dict[str, int] = {}
    for record in records:
        peaks |= record.get("memory_bytes", {})
    of = lambda stage: [peaks.get(f"device {number}", 0) for number in stage.devices]
    return [max(of(stage)) or None for stage in plan.stages]


def _stages(plan: Plan, records: Sequence[Record], peaks: Sequence[int | None]) -> Table:
    """Each stage with its share of the step; the busiest sets the pace of all.

    The memory of the fullest device stands beside what was predicted of it, if devices tell it.
    """
    memory = ("memory", "predicted") if any(peaks) else ()
    titles = ("stage", "cluster", "nodes", "layers", *memory, "busy")
    table = Table(*titles, box=None, pad_edge=False)
    shares = [
        _median([r["busy_share"].get(f"stage {i}") for r in records if "busy_share" in r])
        for i in range(len(plan.stages))
    ]
    busiest = max((share for share in shares if not math.isnan(share)), default=math.nan)
    for number, (stage, share) in enumerate(zip(plan.stages, shares, strict=True)):
        busy = "-" if math.isnan(share) else f"{share:.0%}"
        mark = "  slowest" if share == busiest else ""
        nodes = f"{stage.nodes[0]} .. {stage.nodes[-1]}" if stage.nodes[1:] else stage.nodes[0]
        cells = [str(number), stage.cluster, nodes, layers_text(stage, {})]
        if memory:
            peak = peaks[number]
            predicted = show(sum(stage.memory_bytes.values()), "B")
            cells += ["-" if peak is None else show(peak, "B"), predicted]
        table.add_row(*cells, f"{busy}{mark}")
    return table


def _links(records: Sequence[Record], step_time_s: float) -> Table:
    """The mean of each link: islands send in few steps."""
    table = Table("link", "a step", "rate", box=None, pad_edge=False)
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record["link_bytes"])
    for name, total in totals.items():
        num_bytes = total / len(records)
        table.add_row(name, show(num_bytes, "B"), show(num_bytes / step_time_s, "b/s"))
    return table


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else math.nan


def sparkline(values: Sequence[float], width: int) -> str:
    """Numbers as a row of bars, each of which is the mean of its neighbours.

    >>> sparkline([1.0, 1.0, 2.0, 3.0, float("nan")], 5)
    '▁▁▅█ '
    """
    size = -(-len(values) // width)
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    finite = [[value for value in group if math.isfinite(value)] for group in groups]
    means = [statistics.fmean(group) if group else math.nan for group in finite]
    known = [mean for mean in means if not math.isnan(mean)]
    if not known:
        return BARS[0] * len(means)
    low, high = min(known), max(known)
    scale = (len(BARS) - 2) / (high - low) if high > low else 0.0
    return "".join(
        BARS[0] if math.isnan(mean) else BARS[1 + round((mean - low) * scale)] for mean in means
    )
