"""`launch compare`: runs side by side, in a table and a picture."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from holmesjax.errors import ConfigError
from holmesjax.report import comparison
from launch.writable_outputs import check_file

SUFFIXES = (".png", ".svg", ".pdf")
MIN_COLUMNS = 100  # where the output is no terminal, it may be wider


def run(args: argparse.Namespace) -> int:
    out = Path(args.out) if args.out else None
    if out:
        if out.suffix not in SUFFIXES:
            problem, fix = "must be a picture", f"end its name in {' or '.join(SUFFIXES)}"
            raise ConfigError("--out", problem, found=str(out), fix=fix)
        check_file(out, "--out")
    runs = comparison.load(args.run_dirs)
    names = [run.name for run in runs]
    _print(names, comparison.numbers(runs))
    if different := comparison.settings(runs):
        print("\nsettings that differ")
        _print(names, different)
    if out:
        # Here: it takes longer to import than the tables to make.
        from holmesjax.report.figures import loss_curves

        figure = loss_curves({run.name: run.history for run in runs})
        figure.savefig(out, dpi=150, facecolor="white")
        print(f"\npicture {out}")
    return 0


def _print(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    table = Table("", *names, box=None, pad_edge=False, header_style="")
    for column in table.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    for name, cells in rows:
        table.add_row(name, *cells)
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else max(MIN_COLUMNS, 40 + 24 * len(names))
    Console(highlight=False, markup=False, width=width, no_color=True).print(table)
