"""Table and chart of `benchmarks.holmes_lab`, and what must hold of its losses."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lab_rows import BARS, ROWS, in_turn
from holmesjax.report.figures import BLUE, GREEN, GRID, INK, MUTED, ORANGE

Result = dict[str, Any]
COLORS = {"HolmesJAX": BLUE, "JAX": ORANGE, "PyTorch": GREEN}
MAX_DISTURBED = 0.10  # of the machine's cores, taken by what is not the lab
# Of the same work's CPU seconds above its fastest run's: more, and the machine itself was slower,
# as a virtual one is while others use its memory or its cores' clock.
MAX_SLOWED = 0.15
# The largest relative difference from the losses of the same steps of HolmesJAX.
MAX_DIFFERENCE = {"HolmesJAX": 1e-5, "JAX": 1e-5, "PyTorch": 1e-3}
HEADER = (
    "network",
    "row",
    "system",
    "tokens/s",
    "spread",
    "share",
    "bar",
    "slower by",
    "compute s",
    "waiting s",
    "others",
)


def disturbed(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Runs that tell of the machine, not of the row: others had its cores, or it was slower."""
    fastest: dict[tuple[str, int | None], float] = {}
    measured = [run for run in runs if "compute_s" in run]
    for run in measured:
        cell = (run["row"], run["point"])
        fastest[cell] = min(run["compute_s"], fastest.get(cell, math.inf))
    return [
        run
        for run in measured
        if run["disturbed_share"] > MAX_DISTURBED
        or run["compute_s"] > (1 + MAX_SLOWED) * fastest[run["row"], run["point"]]
    ]


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[Result]:
    """A line for every row at every point, whatever the order of the runs.

    Medians of the repeats that have a figure; `share`, `bar` and `slower_by` where there are such.
    These two are ratios within a repeat, and the median of them: from one repeat to the next the
    machine is faster or slower for all.
    """
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["row"], run["point"]), []).append(run)
    lines = [_line(name, point, groups[name, point]) for name, point in in_turn(groups)]
    for line in lines:
        row, group = ROWS[line["row"]], groups[line["row"], line["point"]]
        best = best_homogeneous(lines, row.system)
        if best and row.network != "fast" and (shares := _ratios(group, groups[best["row"], None])):
            line["share"] = statistics.median(shares)
            line["shares"] = [min(shares), max(shares)]
            if line["row"] == "plan":
                line["bar"] = BARS[line["point"]]
        faster = groups.get((row.slower_than, line["point"]), []) if row.slower_than else []
        if ratios := _ratios(group, faster):
            line["slower_by"] = 1 - statistics.median(ratios)
    return lines


def _ratios(group: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[float]:
    """Rates of a row over those of another, for each repeat that has both."""
    rates = {run["repeat"]: run["tokens_per_s"] for run in others if "tokens_per_s" in run}
    return [
        run["tokens_per_s"] / rates[run["repeat"]]
        for run in group
        if "tokens_per_s" in run and run["repeat"] in rates
    ]


def _line(name: str, point: int | None, group: Sequence[Mapping[str, Any]]) -> Result:
    line: Result = {"row": name, "point": point, "repeats": len(group)}
    measured = [run for run in group if "tokens_per_s" in run]
    if failures := [run["failed"] for run in group if "failed" in run]:
        line["failures"] = failures
    if measured:
        rates = [run["tokens_per_s"] for run in measured]
        median = statistics.median(rates)
        line |= {
            "tokens_per_s": median,
            "low": min(rates),
            "high": max(rates),
            "spread": (max(rates) - min(rates)) / median,
            "compute_s": statistics.median(run["compute_s"] for run in measured),
            "waiting_s": statistics.median(run["waiting_s"] for run in measured),
            "disturbed_share": max(run["disturbed_share"] for run in measured),
        }
    return line


def best_homogeneous(lines: Sequence[Result], system: str) -> Result | None:
    """The line of a system with the best median in the fast network; None if it has none."""
    fast = [
        line
        for line in lines
        if ROWS[line["row"]].network == "fast"
        and ROWS[line["row"]].system == system
        and "tokens_per_s" in line
    ]
    return max(fast, key=lambda line: line["tokens_per_s"], default=None)


# ---- losses --------------------------------------------------------------------------------------


def check_losses(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """The largest relative difference of each system's losses from those of the first run of
    HolmesJAX, or of any system where that has none; and what is wrong with them."""
    known = [run for run in runs if "losses" in run]
    finite = [run for run in known if all(map(math.isfinite, run["losses"]))]
    name = lambda run: f"{run['row']}, repeat {run['repeat'] + 1}"
    wrong = [f"{name(run)}: a loss is not finite" for run in known if run not in finite]
    if not finite:
        return {}, wrong
    own = [run for run in finite if ROWS[run["row"]].system == "HolmesJAX"]
    reference = (own or finite)[0]["losses"]
    found: dict[str, float] = {}
    for run in finite:
        system = ROWS[run["row"]].system
        pairs = zip(run["losses"], reference, strict=True)
        apart = max(abs(a - b) / abs(b) for a, b in pairs)
        found[system] = max(found.get(system, 0.0), apart)
        if apart > MAX_DIFFERENCE[system]:
            bar = MAX_DIFFERENCE[system]
            wrong.append(f"{name(run)}: losses differ by {apart:.2g}, bar {bar:g}")
        if run["losses"][-1] >= run["losses"][0]:
            wrong.append(f"{name(run)}: the loss does not fall: {run['losses']}")
    return found, wrong


# ---- table ---------------------------------------------------------------------------------------


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    out = ["| " + " | ".join(HEADER) + " |", "| --- | --- | --- " + "| ---: " * 8 + "|"]
    for line in lines:
        row = ROWS[line["row"]]
        rate = f", Ethernet 1/{line['point']}" if line["point"] else ""
        cells = [row.network + rate, row.label, row.system]
        if "tokens_per_s" in line:
            bar = line.get("bar")
            met = "" if bar is None else " met" if line["share"] >= bar else " MISSED"
            cells += [
                f"{line['tokens_per_s']:.0f}",
                f"{line['spread']:.1%}",
                _share(line),
                f">= {bar:.0%}{met}" if bar else "",
                _percent(line.get("slower_by")),
                f"{line['compute_s']:.2f}",
                f"{line['waiting_s']:.2f}",
                f"{line['disturbed_share']:.0%}"
                + " disturbed" * (line["disturbed_share"] > MAX_DISTURBED),
            ]
        else:
            reason = line["failures"][-1].splitlines()[0]
            cells += [f"failed: {reason}".replace("|", "/"), *[""] * 7]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def _share(line: Mapping[str, Any]) -> str:
    """With the range of its repeats, where they differ."""
    if "share" not in line:
        return ""
    low, high = line["shares"]
    return f"{line['share']:.1%}" + (f" ({low:.1%} to {high:.1%})" if low < high else "")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


# ---- chart ---------------------------------------------------------------------------------------


def chart(lines: Sequence[Result], about: str) -> Figure:
    """Bars of tokens/s: the fast network, then a panel for each point."""
    points = list(dict.fromkeys(line["point"] for line in lines))
    panels = [[line for line in lines if line["point"] == point] for point in points]
    heights = [len(panel) + 1.2 for panel in panels]
    figure = Figure(figsize=(10, 0.3 * sum(heights) + 0.9), layout="constrained")
    axes = figure.subplots(
        len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    top = max((line["high"] for line in lines if "high" in line), default=1.0)
    for ax, point, panel in zip(axes, points, panels, strict=True):
        _bars(ax, panel, top)
        for system, color in COLORS.items():
            if point and (best := best_homogeneous(lines, system)):
                ax.axvline(best["tokens_per_s"], color=color, linewidth=1, linestyle="--", zorder=0)
        title = f"Ethernet at 1/{point} of the fast rate" if point else "homogeneous, fast"
        ax.set_title(title, loc="left", fontsize=10, color=INK)
    axes[-1].set_xlabel(
        "tokens/s: median and range; share of the system's best in the fast network (dashed)"
    )
    figure.text(0.99, 0.995, about, ha="right", va="top", fontsize=7, color=MUTED)
    return figure


def _bars(ax: Axes, panel: Sequence[Mapping[str, Any]], top: float) -> None:
    labels = []
    for y, line in enumerate(panel):
        row = ROWS[line["row"]]
        labels.append(row.label + (", all Ethernet" if row.network == "ethernet" else ""))
        if "tokens_per_s" not in line:
            ax.text(0.01 * top, y, "failed", va="center", fontsize=8, color=MUTED)
            continue
        value = line["tokens_per_s"]
        ax.barh(y, value, color=COLORS[row.system], height=0.72)
        ax.plot([line["low"], line["high"]], [y, y], color=INK, linewidth=1.5)
        share = f" ({line['share']:.0%})" if "share" in line else ""
        at = max(value, line["high"]) + 0.01 * top
        ax.text(at, y, f"{value:.0f}{share}", va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.set_ylim(len(labels) - 0.5, -0.6)
    ax.set_xlim(0, 1.14 * top)
    ax.grid(axis="x", color=GRID)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


# ---- files ---------------------------------------------------------------------------------------


def write(result: Result, path: Path) -> int:
    """Prints the table, and writes it and the chart beside the JSON; 1 if something is wrong."""
    result["lines"] = lines = summarise(result["runs"])
    result["loss_differences"], wrong = check_losses(result["runs"])
    result["wrong"] = wrong = wrong + [
        f"{line['row']}: {failure}" for line in lines for failure in line.get("failures", ())
    ]
    path.write_text(json.dumps(result, indent=1) + "\n")
    if not lines:
        return 1
    versions = result["versions"]
    about = (
        f"commit {result['commit']}, {result['date']}, {result['device']['cores']} cores of "
        f"{result['device']['cpu']}, JAX {versions['jax']}, PyTorch {versions.get('torch', 'none')}"
    )
    apart = ", ".join(f"{name} {x:.1g}" for name, x in result["loss_differences"].items())
    text = f"{table(lines)}\n\n{about}: `{result['command']}`\n\n"
    text += f"Largest relative difference of losses: {apart or 'none known'}.\n"
    path.with_suffix(".md").write_text(text)
    chart(lines, about).savefig(path.with_suffix(".png"), dpi=120)
    print("", text, *(f"WRONG: {problem}" for problem in wrong), path, sep="\n")
    return 1 if wrong else 0
