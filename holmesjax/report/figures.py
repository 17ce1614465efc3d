"""Pictures of a run: its loss, its pipeline, its traffic; `mesh_picture` has its machines.

Every function returns a `matplotlib.figure.Figure` that belongs to no window, so it works without a
display and inside notebooks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter

from holmesjax.report import history as histories
from holmesjax.report.history import History
from holmesjax.report.style import (
    BLUE,
    DARK,
    GREEN,
    GRID,
    IDLE,
    INK,
    LIGHT,
    MUTED,
    ORANGE,
    PAPER,
    PINK,
    RED,
    SERIES,
    SKY,
    TEXT_ON,
    draw_text,
)
from holmesjax.report.trace import KINDS
from holmesjax.topology.machines import Topology
from holmesjax.topology.probe_speed import ProbeSpeed
from holmesjax.units import QUANTITY, show

# Kinds of task; whole steps and gathering are never in one picture.
COLOR_OF = {"G": SKY, "F": BLUE, "B": ORANGE, "W": GREEN, "R": RED, "U": PINK, "S": SKY}
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK}

Record = Mapping[str, Any]
# Points of a curve, bars of an area; more are averaged, or a long run would make a huge page.
MAX_POINTS, MAX_BARS = 800, 200


def loss_curve(records: History | Sequence[Record]) -> Figure:
    """Training and validation loss over steps, in nats per token; skipped steps are marked."""
    history = histories.of(records)
    figure, axes = _figure(height_in=3.6)
    _draw_loss(axes, history, BLUE, "training")
    if history.last_validated:
        style: dict[str, Any] = {"color": ORANGE, "markersize": 4.5, "linewidth": 1}
        points = map(_thinned, history.with_steps("val_loss"))
        axes.plot(*points, "o-", **style, clip_on=False, label="validation")
        for number, name in enumerate(history.last_validated.get("val_losses", {})):
            points = map(_thinned, history.with_steps(("val_losses", name)))
            style = {"color": SERIES[(number + 2) % len(SERIES)], "markersize": 3, "linewidth": 0.8}
            axes.plot(*points, "o--", **style, clip_on=False, label=f"validation: {name}")
    step, is_finite = history.of("step"), np.isfinite(history.of("loss"))
    if len(bad := step[(history.of("skipped") > 0) | ~is_finite]):
        bad = bad[:: -(-len(bad) // MAX_POINTS)]
        transform = axes.get_xaxis_transform()
        label = "skipped: gradient not finite"
        if (history.of("spike") > 0).any():
            label += ", or a spike"
        style = {"color": RED, "markersize": 5, "transform": transform, "label": label}
        axes.plot(bad, [0.03] * len(bad), "x", **style)
    if not is_finite.any():
        axes.set_yticks([])
    axes.set_ylabel("loss (nats per token)")
    _step_axis(axes, history.first["step"], history.last["step"])
    axes.legend(loc="upper right", **LEGEND)
    return figure


def number_curve(history: History, name: str) -> Figure:
    """A number of the user's or of layers over the steps that have it."""
    figure, axes = _figure(height_in=2.0)
    points = map(_thinned, history.with_steps(name))
    axes.plot(*points, color=BLUE, marker="o", markersize=2.5, linewidth=1.2)
    axes.set_ylabel(name.replace("$", r"\$"))
    _step_axis(axes, history.first["step"], history.last["step"])
    return figure


def loss_curves(runs: Mapping[str, History | Sequence[Record]]) -> Figure:
    """Training losses of runs over steps, by name; dots are validation losses."""
    figure, axes = _figure(height_in=4.2)
    found = {name: histories.of(records) for name, records in runs.items()}
    for number, (name, history) in enumerate(found.items()):
        color = SERIES[number % len(SERIES)]
        _draw_loss(axes, history, color, name)
        points = map(_thinned, history.with_steps("val_loss"))
        axes.plot(*points, "o", color=color, markersize=4.5, clip_on=False)
    axes.set_ylabel("loss (nats per token)")
    ends = [(history.first["step"], history.last["step"]) for history in found.values()]
    _step_axis(axes, min(first for first, _ in ends), max(last for _, last in ends))
    axes.legend(loc="upper right", **LEGEND)
    return figure


def _thinned(values: np.ndarray) -> np.ndarray:
    """Means of as many neighbours as leave `MAX_POINTS` at most."""
    return _group_means(values, max(-(-len(values) // MAX_POINTS), 1))


def _draw_loss(axes: Axes, history: History, color: str, label: str) -> None:
    """Draws a training loss, and behind a mean of many steps the losses themselves."""
    loss = history.of("loss")
    group = -(-len(loss) // MAX_POINTS)
    x = _group_means(history.of("step"), group)
    y = _group_means(np.where(np.isfinite(loss), loss, np.nan), group)
    if len(x) < 50:
        axes.plot(x, y, color=color, marker="o", markersize=3.5, label=label)
        return
    window = len(x) // 40 | 1  # odd, so that it has a middle
    axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
    if window * group > 1:
        label = f"{label} (mean of {window * group} steps)"
    smooth = _centred_means(x, window), _centred_means(y, window)
    axes.plot(*smooth, color=color, linewidth=1.8, label=label)


def pipeline_timeline(tasks: Sequence[Record], transfers: Sequence[Record] = ()) -> Figure:
    """One step: a row per stage, then one per way between two; hatched is waiting.

    Numbers are microbatches. A transfer has the colour of the task whose result it is.
    """
    num_stages, start_s = 1 + max(t["stage"] for t in tasks), min(t["start_s"] for t in tasks)
    span_s = max(task["end_s"] for task in tasks) - start_s
    unit, scale = ("ms", 1e3) if span_s < 1 else ("s", 1.0)
    ways = sorted({(transfer["source"], transfer["target"]) for transfer in transfers})
    num_rows = num_stages + len(ways)
    figure, axes = _figure(height_in=1.3 + 0.55 * num_rows)
    for stage in range(num_stages):
        idle = Rectangle((0, stage - 0.38), span_s * scale, 0.76)
        idle.set(facecolor=IDLE, edgecolor=GRID, hatch="////", linewidth=0)
        axes.add_patch(idle)
        share = idle_share([task for task in tasks if task["stage"] == stage], span_s)
        style = {"va": "center", "color": INK, "fontsize": 9}
        axes.text(1.01, stage, f"idle {share:.0%}", style, transform=axes.get_yaxis_transform())
    row_of = {way: num_stages + i for i, way in enumerate(ways)}
    bars = [(task, task["stage"], 0.76) for task in tasks]
    bars += [
        (transfer, row_of[transfer["source"], transfer["target"]], 0.4) for transfer in transfers
    ]
    for bar, row, height in bars:
        size = {"start_s": start_s, "scale": scale, "points_per_s": 7.6 * 72 / span_s}
        _draw_bar(axes, bar, row, height, **size)
    axes.set_xlim(0, span_s * scale)
    axes.set_ylim(num_rows - 0.5, -0.5)
    names = [f"stage {stage}" for stage in range(num_stages)] + [f"{a} to {b}" for a, b in ways]
    axes.set_yticks(range(num_rows), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the step began ({unit})")
    used = {task["kind"] for task in tasks}
    handles = [
        Patch(color=color, label=KINDS[kind]) for kind, color in COLOR_OF.items() if kind in used
    ]
    handles.append(Patch(facecolor=IDLE, edgecolor=MUTED, hatch="////", label="idle (bubble)"))
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(handles)}
    axes.legend(handles=handles, **above, **LEGEND)
    return figure


def idle_share(tasks: Sequence[Record], span_s: float) -> float:
    """The part of `span_s` in which none of the tasks runs; tasks may overlap.

    >>> task = lambda start_s, end_s: {"start_s": start_s, "end_s": end_s}
    >>> idle_share([task(0, 2), task(1, 3), task(6, 7)], span_s=8)
    0.5
    """
    busy_s, reached_s = 0.0, -math.inf
    for task in sorted(tasks, key=lambda task: task["start_s"]):
        busy_s += max(0.0, task["end_s"] - max(task["start_s"], reached_s))
        reached_s = max(reached_s, task["end_s"])
    return 1 - busy_s / span_s if span_s > 0 else 0.0


def _draw_bar(
    axes: Axes,
    bar: Record,
    row: int,
    height: float,
    *,
    start_s: float,
    scale: float,
    points_per_s: float,
) -> None:
    color = COLOR_OF[bar["kind"]]
    left_s, width_s = bar["start_s"] - start_s, bar["end_s"] - bar["start_s"]
    patch = Rectangle((left_s * scale, row - height / 2), width_s * scale, height)
    patch.set(facecolor=color, edgecolor=PAPER, linewidth=0.6)
    axes.add_patch(patch)
    if bar["microbatch"] is not None:
        text = str(bar["microbatch"])
        if width_s * points_per_s > 6.5 * len(text):
            middle = (left_s + width_s / 2) * scale, row + 0.02
            axes.text(*middle, text, ha="center", va="center", fontsize=8.5, color=TEXT_ON[color])


def link_traffic(records: History | Sequence[Record]) -> Figure:
    """Bytes that crossed each link: in every step, and since the first; links are stacked."""
    history = histories.of(records)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    per_step, cumulative = figure.subplots(1, 2)
    sent = {
        name: np.nan_to_num(history.of(("link_bytes", name)))
        for name in history.entries("link_bytes")
    }
    first, last = history.first["step"], history.last["step"]
    group = -(-len(history) // MAX_BARS)
    edges = [*(history.of("step")[::group] - 0.5), last + 0.5]
    num_steps = [min(group, len(history) - at) for at in range(0, len(history), group)]
    for axes, title in ((per_step, "per step"), (cumulative, "since the first step")):
        heights = {name: _group_means(values, group) for name, values in sent.items()}
        if axes is cumulative:
            heights = {name: np.cumsum(means * num_steps) for name, means in heights.items()}
        top = max(sum(heights.values(), np.zeros(len(num_steps))), default=0.0)
        unit, scale = _byte_unit(top)
        baseline = np.zeros(len(num_steps))
        for index, (name, height) in enumerate(heights.items()):
            color = SERIES[index % len(SERIES)]
            label = f"{name}: {show(float(sent[name].sum()), 'B')}"
            stacked = baseline + height / scale
            axes.stairs(stacked, edges, baseline=baseline, fill=True, color=color, label=label)
            baseline = stacked
        _style(axes)
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.set_ylabel(f"{unit} sent")
        _step_axis(axes, first, last)
        axes.set_ylim(0, 1.1 * top / scale or 1.0)
    if sent:
        handles, labels = per_step.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", **LEGEND, ncols=4)
    else:
        per_step.text(0.5, 0.5, "one stage: no links", transform=per_step.transAxes, ha="center")
    return figure


def expert_loads(loads: Mapping[str, Sequence[float]]) -> Figure:
    """The load of each expert (column) of each layer (row), over the mean; 0 is marked."""
    choices = np.array(list(loads.values()), float)
    load = choices / np.maximum(choices.mean(1, keepdims=True), 1e-30)
    figure, axes = _figure(height_in=min(1.1 + 0.28 * len(load), 9.0))
    shade = LinearSegmentedColormap.from_list("loads", [PAPER, SKY, BLUE])
    edges = np.arange(load.shape[1] + 1) - 0.5, np.arange(load.shape[0] + 1) - 0.5
    norm = Normalize(0.0, max(2.0, float(np.max(load))))
    # One image, however many experts there are: a shape for each would make a huge page.
    image = axes.imshow(load, cmap=shade, norm=norm, aspect="auto", interpolation="nearest")
    rows, columns = np.nonzero(load == 0)
    axes.plot(columns[:MAX_POINTS], rows[:MAX_POINTS], "x", color=RED, markersize=4)
    axes.set(xlim=(edges[0][0], edges[0][-1]), ylim=(edges[1][-1], edges[1][0]))
    every = -(-len(load) // 32)  # names that have room
    axes.set_yticks(range(0, len(load), every), list(loads)[::every])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("expert")
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8, labelcolor=INK)
    return figure


def measured_ways(topology: Topology, speeds: Mapping[tuple[str, str], ProbeSpeed]) -> Figure:
    """Bandwidth and latency from each node (row) to each other (column); hatched: not measured."""
    names = [node.name for node in topology.nodes]
    count, cell_in = len(names), max(0.28, min(1.05, 9 / len(topology.nodes)))
    figure = Figure(figsize=(count * cell_in + 2.2, count * cell_in + 0.9), layout="constrained")
    axes = figure.subplots()
    rates = [8 * speed.bandwidth_bytes_per_s for speed in speeds.values()]  # bits: for the ticks
    shade = LinearSegmentedColormap.from_list("rates", [GRID, SKY, BLUE])
    norm = LogNorm(min(rates) / 1.5, max(rates) * 1.5)
    for row, a in enumerate(names):
        for column, b in enumerate(names):
            square = Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, linewidth=0)
            axes.add_patch(square)
            if (speed := speeds.get((a, b))) is None:
                hatch = "" if a == b else "////"
                square.set(facecolor=IDLE, edgecolor=GRID, hatch=hatch)
                continue
            color = shade(norm(8 * speed.bandwidth_bytes_per_s))
            square.set_facecolor(color)
            if cell_in > 0.8:  # smaller cells have colours only
                ink = LIGHT if norm(8 * speed.bandwidth_bytes_per_s) > 0.8 else DARK
                style = {"ha": "center", "color": ink}
                rate, latency = show(speed.bandwidth_bytes_per_s, "b/s"), show(speed.latency_s, "s")
                draw_text(axes, column, row - 0.12, rate, **style)
                draw_text(axes, column, row + 0.2, latency, **style, fontsize=7.5)
    edge = -0.5
    for cluster in topology.clusters[:-1]:
        edge += len(cluster.nodes)
        axes.axhline(edge, color=INK, linewidth=1)
        axes.axvline(edge, color=INK, linewidth=1)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(count), names, rotation=90 if cell_in <= 0.8 else 0)
    axes.set_yticks(range(count), names)
    _style(axes)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("from")
    axes.set_xlabel("to")
    axes.xaxis.set_label_position("top")
    bar = figure.colorbar(ScalarMappable(norm, shade), ax=axes, shrink=0.7)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda rate, _: show(rate / 8, "b/s"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.tick_params(colors=MUTED, labelsize=8, labelcolor=INK)
    return figure


def _byte_unit(largest: float) -> tuple[str, float]:
    """The unit of an axis that reaches up to `largest` bytes.

    >>> _byte_unit(3_100_000)
    ('MiB', 1048576.0)
    """
    units = QUANTITY["B"][3]
    return max((item for item in units.items() if item[1] <= max(1, largest)), key=lambda i: i[1])


def _group_means(values: np.ndarray, size: int) -> np.ndarray:
    """Means of `size` neighbours, NaN left out.

    >>> _group_means(np.array([1.0, 3.0, np.nan, 4.0, 5.0]), 2).tolist()
    [2.0, 4.0, 5.0]
    """
    starts = range(0, len(values), size)
    return np.array([_mean(values[start : start + size]) for start in starts])


def _centred_means(values: np.ndarray, window: int) -> np.ndarray:
    """Averages each value with the `window // 2` on both sides, and with fewer at both ends."""
    reach = [min(window // 2, i, len(values) - 1 - i) for i in range(len(values))]
    return np.array([_mean(values[i - n : i + n + 1]) for i, n in enumerate(reach)])


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _figure(*, height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, height_in), layout="constrained")
    axes = figure.subplots()
    _style(axes)
    return figure, axes


def _step_axis(axes: Axes, first: int, last: int) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=MUTED, fontsize=9.5)
    axes.yaxis.label.set(color=MUTED, fontsize=9.5)
