"""Quantities with units: "25 Gb/s" to a number, and a number back to text.

Inside the code every quantity is a float in a base unit: bytes, bytes per second, seconds, FLOP per
second, dollars per hour, dollars per 10^9 bytes. Text has a unit, always: `b` is a bit and `B` a
byte, `k M G T P` are powers of 1000, `Ki Mi Gi Ti Pi` powers of 1024.
"""

import math
import re
from typing import Literal

from holmesjax.errors import HolmesError

# How a quantity is written: memory as "B", memory bandwidth as "B/s", networks as "b/s". The
# number is in bytes per second for both of the rates.
Unit = Literal["B", "B/s", "b/s", "s", "FLOP/s", "$/h", "$/GB"]

DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
SMALL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}


def _scaled(prefixes: dict[str, float], base: str, factor: float = 1.0) -> dict[str, float]:
    """Every prefix with one base unit: {"B": 1.0, "kB": 1e3, ...}."""
    return {prefix + base: scale * factor for prefix, scale in prefixes.items()}


BYTES = _scaled(DECIMAL | BINARY, "B") | _scaled(DECIMAL | BINARY, "b", 1 / 8)
BYTES_PER_S = {f"{unit}/s": scale for unit, scale in BYTES.items()} | _scaled(DECIMAL, "bps", 1 / 8)
SECONDS = _scaled(SMALL, "s") | {"µs": 1e-6, "μs": 1e-6, "min": 60.0, "h": 3600.0}
FLOP_PER_S = _scaled(DECIMAL, "FLOP/s") | _scaled(DECIMAL, "FLOPS")

# For each unit: the quantity, an example, the units in which text may have it, and the units in
# which it is printed, the smallest first.
QUANTITY: dict[Unit, tuple[str, str, dict[str, float], dict[str, float]]] = {
    "B": ("size", "80 GiB", BYTES, {"B": 1.0} | _scaled(BINARY, "B")),
    "B/s": ("bandwidth", "3.35 TB/s", BYTES_PER_S, _scaled(DECIMAL, "B/s")),
    "b/s": ("bandwidth", "25 Gb/s", BYTES_PER_S, _scaled(DECIMAL, "b/s", 1 / 8)),
    "s": ("duration", "5 us", SECONDS, _scaled(SMALL, "s") | {"min": 60.0, "h": 3600.0}),
    "$/h": ("price", "2.5 $/h", {"$/h": 1.0}, {"$/h": 1.0}),
    "$/GB": ("price", "0.08 $/GB", {"$/GB": 1.0, "$/TB": 1e-3}, {"$/GB": 1.0}),
    "FLOP/s": ("speed", "989 TFLOP/s", FLOP_PER_S, _scaled(DECIMAL, "FLOP/s")),
}
NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)", re.DOTALL | re.ASCII)


def parse(text: object, unit: Unit) -> float:
    """The quantity in base units: bytes, bytes/s, seconds or FLOP/s.

    >>> parse("25 Gb/s", "b/s"), parse("3.35 TB/s", "B/s"), parse("5 us", "s")
    (3125000000.0, 3350000000000.0, 5e-06)
    >>> parse("80 GiB", "B"), parse("989 TFLOP/s", "FLOP/s")
    (85899345920.0, 989000000000000.0)
    """
    measured, example, scales, _ = QUANTITY[unit]
    fix = f"write a number and a unit, such as {example}"
    match = NUMBER.fullmatch(text.strip() if isinstance(text, str) else repr(text))
    if match is None:
        raise HolmesError(measured, f"must be a {measured}", found=repr(text), fix=fix)
    number, suffix = match.groups()
    if suffix not in scales:
        problem = f"{suffix!r} is not a unit of {measured}" if suffix else "has no unit"
        raise HolmesError(measured, problem, found=text, fix=_near(number, suffix, scales) or fix)
    scale = scales[suffix]  # 5 / 1e6 is the float nearest to 5 us; 5 * 1e-6 is not
    value = float(number) * scale if scale >= 1 else float(number) / round(1 / scale)
    if not 0 <= value < math.inf:
        problem = "must not be negative" if value < 0 else "is too large"
        raise HolmesError(measured, problem, found=text, fix=fix)
    return value


def _near(number: str, suffix: str, scales: dict[str, float]) -> str:
    """Suggests the units that differ only in case, such as "Gb/s" and "GB/s" for "gb/s"."""
    same = [unit for unit in scales if unit.lower() == suffix.lower()]
    return "did you mean " + " or ".join(f"{number} {unit}" for unit in same) + "?" if same else ""


def show(value: float, unit: Unit) -> str:
    """Readable text with three significant digits, for plans and logs.

    >>> show(3.125e9, "b/s"), show(1.5 * 2**30, "B"), show(0.012, "s"), show(3.2e12, "FLOP/s")
    ('25 Gb/s', '1.5 GiB', '12 ms', '3.2 TFLOP/s')
    >>> show(0, "s"), show(999.9e-6, "s"), show(5400, "s")
    ('0 s', '1 ms', '1.5 h')
    """
    return _text(value, QUANTITY[unit][3], digits=3)


def duration(seconds: float) -> str:
    """Readable text of what people wait for.

    >>> duration(0.012), duration(9.94), duration(132.4), duration(7384), duration(500 * 3600)
    ('12 ms', '9.9 s', '2 min 12 s', '2 h 3 min', '20 days 20 h')
    """
    if seconds < 1:
        return show(seconds, "s")
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days {hours % 24} h"
    return f"{hours} h {rest_min} min" if hours else f"{minutes} min {rest_s} s"


def exact(value: float, unit: Unit) -> str:
    """The shortest text that `parse` reads back as the same number, for files.

    >>> exact(3.125e9, "b/s"), exact(80e9, "B"), exact(80 * 2**30, "B"), exact(1 / 3, "s")
    ('25 Gb/s', '80 GB', '80 GiB', '0.3333333333333333 s')
    """
    decimal = _scaled(DECIMAL, "B") if unit == "B" else {}
    for digits in range(1, 7):
        for scales in filter(None, (QUANTITY[unit][3], decimal)):
            if parse(text := _text(value, scales, digits=digits), unit) == value:
                return text
    return f"{float(value)!r} {'B/s' if unit == 'b/s' else unit}"


def _text(value: float, scales: dict[str, float], *, digits: int) -> str:
    """`value` in the largest of the units that leaves at least 1 in front of it."""
    scaled = {name: float(f"{value / scale:.{digits}g}") for name, scale in scales.items()}
    large = [name for name, number in scaled.items() if abs(number) >= 1]
    base = next(name for name, scale in scales.items() if scale in (1, 1 / 8))
    name = large[-1] if large else next(iter(scales)) if value else base
    return f"{scaled[name]:.15g} {name}"


def counted(number: int, noun: str, plural: str = "s", *, form: str = "") -> str:
    """A number of things.

    >>> counted(1, "stage"), counted(4, "microbatch", "es"), counted(2048, "step", form=",")
    ('1 stage', '4 microbatches', '2,048 steps')
    """
    return f"{number:{form}} {noun}{plural if number != 1 else ''}"
