"""The pictures of the documents that are drawn from other files, as plain SVG.

    gain.svg       from benchmarks/results: tokens/s over the rate of the link between two clusters

`python -m docs.pictures` writes them; a test compares each file with what is drawn here. Plain text
in and out, no fonts and no drawing library, so the bytes are the same on every Python.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULT = DOCS.parent / "benchmarks/results/holmes_lab_0.10.2.json"
INK, MUTED, GRID = "#1b2430", "#5b6675", "#e2e6eb"
BLUE, GREEN, RED = "#0072b2", "#009e73", "#d55e00"


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
    for name, svg in drawn().items():
        (DOCS / name).write_text(svg, encoding="utf-8")


def drawn() -> dict[str, str]:
    """Every picture as SVG, by the name of its file."""
    return {"gain.svg": gain(json.loads(RESULT.read_text(encoding="utf-8")))}


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
    marks = [_text(20, 30, "Tokens/s of one model over two clusters", bold=True, size=16)]
    marks.append(_text(20, 50, about, fill=MUTED))
    for tick in range(0, top + 1, 500):
        marks.append(_line([(left, y(tick)), (right, y(tick))], GRID, 1))
        marks.append(_text(left - 8, y(tick) + 4, f"{tick:,}", fill=MUTED, size=12, anchor="end"))
    for point in points:
        marks.append(_text(x(point), bottom + 20, f"1/{point}", anchor="middle"))
        name = f"{fast_mb_per_s / point:.0f} Mb/s"
        marks.append(_text(x(point), bottom + 36, name, fill=MUTED, size=12, anchor="middle"))
    labels = []  # above all curves
    for curve, lines in curves.items():
        color = curve.color
        where = [(x(line["point"]) + curve.aside, y(line["tokens_per_s"])) for line in lines]
        marks.append(_line(where, color, 2.5))
        for line, (across, down) in zip(lines, where, strict=True):
            marks.append(_line([(across, y(line["low"])), (across, y(line["high"]))], color, 1.5))
            marks.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{color}"/>')
            rate = f"{line['tokens_per_s']:,.0f}"
            if curve.is_lowest:
                at, anchor = (across - 8, down + 16), "end"
            else:
                at, anchor = (across + 10, down - 8), "start"
            labels.append(_text(*at, rate, fill=color, size=12, anchor=anchor))
        labels.append(_text(right + 20, where[-1][1] + 5, curve.name, fill=color, bold=True))
    marks += labels
    for number, text in enumerate(_how_measured(result)):
        marks.append(_text(20, 396 + 18 * number, text, fill=MUTED, size=12))
    return _svg(720, 445, "Tokens/s of HolmesJAX's plan, PyTorch 1F1B and PyTorch DDP", marks)


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


# ---- plain SVG -----------------------------------------------------------------------------------


def _svg(width: int, height: int, title: str, marks: Sequence[str]) -> str:
    """A picture on white of `marks`, which are elements of SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    lines = [head, f"<title>{escape(title)}</title>", paper, *marks, "</svg>"]
    return "\n".join(lines) + "\n"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    size: int = 14,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """A line of text whose baseline is at y, with a white edge that covers what lies below.

    Args:
        x, y: pixels, from the left and from the top.
        words: the text, not yet escaped.
        fill: a colour.
        size: of the font, in pixels.
        anchor: what x is to the text: its `start`, `middle` or `end`.
        bold: whether the font is bold.
    """
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" '
        f'text-anchor="{anchor}"{weight} stroke="#ffffff" stroke-width="4" '
        f'paint-order="stroke">{escape(words)}</text>'
    )


def _line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


if __name__ == "__main__":
    write()
