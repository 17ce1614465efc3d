"""The pictures of the documents that are drawn from other files.

    gain.svg       from benchmarks/results: tokens/s over the rate of the link between two clusters
    packages.svg   from the code: the packages and what they import (`docs.package_graph`)

`python -m docs.pictures` writes them; a test compares each file with what is drawn here.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs import package_graph, svg
from docs.svg import BLUE, GREEN, GRID, MUTED, RED

DOCS = Path(__file__).parent
RESULT = DOCS.parent / "benchmarks/results/holmes_lab_0.10.2.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A row of the benchmark as the chart draws it; offsets are in pixels."""

    row: str
    name: str
    color: str
    aside: int  # to the right, so that the ranges of two curves do not cover each other
    is_lowest: bool = False  # its numbers are below it, to the left


CURVES = (
    Curve(row="plan", name="HolmesJAX's plan", color=BLUE, aside=-5),
    Curve(row="1f1b", name="PyTorch 1F1B", color=GREEN, aside=0),
    Curve(row="ddp", name="PyTorch DDP", color=RED, aside=5, is_lowest=True),
)


def write() -> None:
    """Writes every picture into docs/."""
    for name, picture in drawn().items():
        (DOCS / name).write_text(picture, encoding="utf-8")


def drawn() -> dict[str, str]:
    """Every picture as SVG, by the name of its file."""
    return {
        "gain.svg": gain(json.loads(RESULT.read_text(encoding="utf-8"))),
        "packages.svg": package_graph.draw(package_graph.places()),
    }


# ---- the chart of the gain -----------------------------------------------------------------------


def gain(result: dict[str, Any]) -> str:
    """A chart with a curve for each of `CURVES`: medians of tokens/s, and the range of the repeats.

    `result` is a result file of `benchmarks.holmes_lab`.
    """
    cells = {(line["row"], line["point"]): line for line in result["lines"]}
    points = sorted({point for row, point in cells if row == CURVES[0].row})
    curves = {curve: [cells[curve.row, point] for point in points] for curve in CURVES}
    top = 500 * math.ceil(max(line["high"] for lines in curves.values() for line in lines) / 500)
    left, right, bottom, height = 60, 560, 330, 250
    first, last = math.log2(points[0]), math.log2(points[-1])
    x = lambda point: left + 40 + (right - left - 80) * (math.log2(point) - first) / (last - first)
    y = lambda rate: bottom - height * rate / top

    fast_mb_per_s = result["settings"]["fast_bit_per_s"] / 1e6
    about = f"by the rate of the Ethernet between them; inside each {fast_mb_per_s:,.0f} Mb/s"
    marks = [svg.text(20, 30, "Tokens/s of one model over two clusters", bold=True, size=16)]
    marks.append(svg.text(20, 50, about, fill=MUTED))
    for tick in range(0, top + 1, 500):
        marks.append(svg.line([(left, y(tick)), (right, y(tick))], GRID, 1))
        marks.append(
            svg.text(left - 8, y(tick) + 4, f"{tick:,}", fill=MUTED, size=12, anchor="end")
        )
    for point in points:
        marks.append(svg.text(x(point), bottom + 20, f"1/{point}", anchor="middle"))
        name = f"{fast_mb_per_s / point:.0f} Mb/s"
        marks.append(svg.text(x(point), bottom + 36, name, fill=MUTED, size=12, anchor="middle"))
    labels = []  # above all curves
    for curve, lines in curves.items():
        color = curve.color
        where = [(x(line["point"]) + curve.aside, y(line["tokens_per_s"])) for line in lines]
        marks.append(svg.line(where, color, 2.5))
        for line, (across, down) in zip(lines, where, strict=True):
            marks.append(
                svg.line([(across, y(line["low"])), (across, y(line["high"]))], color, 1.5)
            )
            marks.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{color}"/>')
            rate = f"{line['tokens_per_s']:,.0f}"
            if curve.is_lowest:
                at, anchor = (across - 8, down + 16), "end"
            else:
                at, anchor = (across + 10, down - 8), "start"
            labels.append(svg.text(*at, rate, fill=color, size=12, anchor=anchor))
        labels.append(svg.text(right + 20, where[-1][1] + 5, curve.name, fill=color, bold=True))
    marks += labels
    for number, words in enumerate(_how_measured(result)):
        marks.append(svg.text(20, 396 + 18 * number, words, fill=MUTED, size=12))
    return svg.picture(
        720, 445, "Tokens/s of HolmesJAX's plan, PyTorch 1F1B and PyTorch DDP", marks
    )


def _how_measured(result: dict[str, Any]) -> list[str]:
    """The caption of the chart, in lines."""
    model, versions, device = result["settings"]["model"], result["versions"], result["device"]
    repeats = {line["repeats"] for line in result["lines"]}
    assert len(repeats) == 1, repeats
    return [
        f"A GPT of {model['num_layers']} layers of width {model['width']} on two clusters of two "
        "nodes, rebuilt with shaped networks on one machine:",
        f"{device['cores']} cores of {device['cpu']}, no GPU, JAX {versions['jax']}, "
        f"PyTorch {versions['torch']}, commit {result['commit']}, {result['date']}.",
        f"Medians of {repeats.pop()} runs; a vertical bar is their range.",
    ]


if __name__ == "__main__":
    write()
