"""Colours and text of the pictures of a report.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color), which stay apart for
colour-blind eyes; the greys have names, so a page can replace them.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Text

INK, MUTED, GRID, IDLE, PAPER = "#1b2430", "#5b6675", "#e2e6eb", "#f1f3f6", "#fffffe"
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
PINK, RED, SKY = "#cc79a7", "#d55e00", "#56b4e9"
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
DARK, LIGHT = "#10151b", "#fefefe"  # text on a colour: the same on a white and a black page
TEXT_ON = {BLUE: LIGHT, ORANGE: DARK, GREEN: DARK, PINK: DARK, RED: DARK, SKY: DARK}
# Colours of the names of axes, by the fabric of their collectives. Other fabrics are orange.
FABRIC_COLOR = {
    "nvlink": GREEN,
    "infiniband": BLUE,
    "roce": PINK,
    "ethernet": RED,
    "local": MUTED,
}
ROUND = "round,pad=0,rounding_size=0.15"  # the corners of a box


def fabric_color(fabric: str) -> str:
    return FABRIC_COLOR.get(fabric, ORANGE)


def draw_text(axes: Axes, x: float, y: float, text: str, **style: Any) -> Text:
    """Draws text as it is: a `$` in a name starts no formula.

    Args:
      axes: to draw on.
      x, y: left end and middle of the text, in units of the axes.
      text: one line.
      style: more of `Axes.text`.
    """
    style = {"color": INK, "fontsize": 9, "va": "center", **style}
    return axes.text(x, y, text, parse_math=False, **style)
