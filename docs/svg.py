"""Plain SVG: elements as text, so that a picture has the same bytes on every Python."""

from collections.abc import Sequence
from html import escape

INK, MUTED, GRID, PAPER = "#1b2430", "#5b6675", "#e2e6eb", "#ffffff"
BLUE, GREEN, RED = "#0072b2", "#009e73", "#d55e00"  # of Okabe and Ito: apart for every eye


def picture(width: int, height: int, title: str, marks: Sequence[str]) -> str:
    """A picture on white of `marks`, which are elements; sizes in pixels."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    lines = [head, f"<title>{escape(title)}</title>", paper, *marks, "</svg>"]
    return "\n".join(lines) + "\n"


def text(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    size: int = 14,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """A line of text, with a white edge that covers what lies below it.

    Args:
        x, y: pixels from the left and from the top, to the baseline.
        words: the text, not yet escaped.
        fill: a colour.
        size: of the font, in pixels.
        anchor: the place of x in the text: its `start`, `middle` or `end`.
        bold: whether the font is bold.
    """
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" '
        f'text-anchor="{anchor}"{weight} stroke="{PAPER}" stroke-width="4" '
        f'paint-order="stroke">{escape(words)}</text>'
    )


def line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    """Straight lines through points."""
    through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{through}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def path(points: Sequence[tuple[int, int]], color: str, *, has_head: bool = False) -> str:
    """A straight line through 2 points or a cubic curve of 4, with the head of an arrow below."""
    kind = " C" if len(points) == 4 else " L"
    first, *rest = (f"{x} {y}" for x, y in points)
    curve = f'<path d="M{first}{kind}{" ".join(rest)}" fill="none" stroke="{color}"/>'
    x, y = points[-1]
    head = f'<path d="M{x} {y} l-4 -8 h8 z" fill="{color}"/>' if has_head else ""
    return curve + head


def rectangle(left: int, top: int, width: int, height: int, color: str) -> str:
    """Returns a white box with a coloured edge and round corners.

    Args:
      left, top: the upper left corner, in pixels.
      width, height: in pixels.
      color: of the edge.
    """
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="{PAPER}" '
        f'stroke="{color}" stroke-width="1.5"/>'
    )
