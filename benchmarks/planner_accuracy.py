"""How close predictions come to published measurements: python -m benchmarks.planner_accuracy DIR

Reads every CSV file of DIR that has the name and columns of one it knows, any rows of it, and
prints for each: how many rows, the mean and the worst absolute percentage error of step time or
memory, and, among rows that train the same model on as many devices, how well predictions rank
them (Spearman) and how much slower the predicted best is than the measured best (regret).

    as shipped        nothing is fitted to these rows: `configs/calibrations`, data sheets
    cross-validated   fitted to four fifths of the rows, the rest predicted, in turns; the mean of
                      five ways to shuffle them where there are fewer than 200
    without its size  fitted to the models of all other sizes
    without the row   one speed for each kind of device, fitted to the other rows

Steps that HolmesJAX itself took on GPUs, from the result files of `benchmarks.gpu_day`, are
predicted as shipped, too, by the plan that a run would have. They are no test of a calibration that
was made from them.

The table, every row, and a picture of the errors go to benchmarks/results/. Each line has the
commit at which it was predicted: `--only` predicts some files again and leaves the lines of others.
"""

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from benchmarks import fits, measured_steps, published, published_files
from benchmarks.measured_steps import Planned
from benchmarks.provenance import RESULTS, commit
from benchmarks.published import AS_SHIPPED, Fitted, Held, Run
from benchmarks.published_files import Row
from holmesjax.errors import DataError, HolmesError
from holmesjax.report.figures import BLUE, GREEN, GRID, INK, MUTED, ORANGE

Result = dict[str, Any]
# What is fitted for each run, once or several times: errors are means over all of them.
How = Callable[[Sequence[Any]], list[list[Fitted]]]
OWN = "gpu_day_*.json"
OWN_BAR = 0.05  # of our own steps
SHUFFLES, FEW = 5, 200  # of fewer rows than that; what more rows come to depends less on chance


def as_shipped(runs: Sequence[Any]) -> list[list[Fitted]]:
    return [[AS_SHIPPED] * len(runs)]


def cross_validated(runs: Sequence[Run]) -> list[list[Fitted]]:
    shuffles = range(SHUFFLES if len(runs) < FEW else 1)
    return [fits.left_out(runs, fits.folds(len(runs), n), fits.fit) for n in shuffles]


def without_its_size(runs: Sequence[Run]) -> list[list[Fitted]]:
    return [fits.left_out(runs, fits.by_model(runs), fits.fit)]


def without_the_row(runs: Sequence[Run]) -> list[list[Fitted]]:
    return [fits.left_out(runs, [[i] for i in range(len(runs))], fits.fit_kinds)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One file, and the ways in which its rows are predicted."""

    read: Callable[[Row], Run | Held]
    hows: dict[How, float | None]  # way -> the mean error that it must not exceed
    what: str = ""  # part of the file
    only: Callable[[Row], bool] = lambda row: True
    predict: Callable[[Any, Fitted], float] = published.predict_s


CHECKS: dict[str, list[Check]] = {
    "vtrain_multi_node": [
        Check(
            read=published_files.vtrain,
            hows={as_shipped: None, cross_validated: 0.06, without_its_size: 0.10},
        )
    ],
    "vtrain_single_node": [
        Check(
            read=published_files.vtrain,
            hows={as_shipped: None, cross_validated: 0.08, without_its_size: None},
        )
    ],
    "megatron_sc21_weak_scaling": [Check(read=published_files.megatron, hows={as_shipped: 0.08})],
    "korthikanti2022_table5": [Check(read=published_files.megatron, hows={as_shipped: 0.04})],
    "megatron_core_h100_weak_scaling": [
        Check(read=published_files.megatron_core, hows={as_shipped: None})
    ],
    "sailor_validation": [
        Check(
            read=published_files.sailor,
            hows={without_the_row: 0.10},
            what="unlike devices",
            only=lambda row: row["cluster"] == "mit",
        ),
        Check(
            read=published_files.sailor,
            hows={without_the_row: None},
            what="GH200, OPT",
            only=lambda row: row["cluster"] == "clariden" and row["model"] == "OPT-350M",
        ),
        Check(
            read=published_files.sailor,
            hows={without_the_row: None},
            what="GH200, GPT-Neo",
            only=lambda row: row["cluster"] == "clariden" and row["model"] != "OPT-350M",
        ),
    ],
    "korthikanti2022_memory": [
        Check(
            read=published_files.korthikanti,
            hows={as_shipped: 0.03},
            what="memory",
            predict=published.predict_held,
        )
    ],
    "torchtitan": [
        Check(
            read=published_files.torchtitan,
            hows={as_shipped: 0.15},
            what="memory",
            only=lambda row: row["memory_GiB"] != "",
            predict=published.predict_held,
        )
    ],
}


def rows_of(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "give a folder of CSV files"
        raise DataError(str(path), "cannot be read", found=error, fix=fix) from None


def runs_of(path: Path, rows: Sequence[Row], read: Callable[[Row], Run | Held]) -> list[Run | Held]:
    runs = []
    for row in rows:
        try:
            runs.append(read(row))
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(
                str(path),
                "has a row that is not as expected",
                found=f"{type(error).__name__}: {error}, in {dict(row)}",
                fix="the columns must be those of the published file of this name",
            ) from None
    return runs


def check_file(path: Path) -> Iterable[Result]:
    """A line of the table for each part of a file, and each way to predict it."""
    rows = rows_of(path)
    for check in CHECKS[path.stem]:
        runs = runs_of(path, [row for row in rows if check.only(row)], check.read)
        for how, bar in check.hows.items():
            if runs:
                label = f"{path.stem} ({check.what})" if check.what else path.stem
                yield line_of(label, check.predict, runs, how, bar)


def check_own(path: Path) -> Iterable[Result]:
    """A line for the seconds and one for the memory of the steps that we measured ourselves."""
    steps = measured_steps.read(path)
    for what, runs in (("seconds", steps.seconds), ("memory", steps.gib)):
        planned = lambda own, _: own.predicted
        yield line_of(f"{path.stem} ({what})", planned, runs, as_shipped, OWN_BAR)


def line_of(
    label: str,
    predict: Callable[[Any, Fitted], float],
    runs: Sequence[Run | Held | Planned],
    how: How,
    bar: float | None,
) -> Result:
    """Predicts all runs of a file and returns the errors.

    Args:
      label: the file, and the part of it.
      predict: gives the number of a run.
      runs: the measured runs.
      how: returns the fitted numbers for each run, once or several times.
      bar: the largest mean error that is accepted; None: no such bar.
    """
    start_s = time.monotonic()
    print(f"  {label}, {how.__name__.replace('_', ' ')}", end="", file=sys.stderr, flush=True)
    rounds = [
        [predict(run, f) for run, f in zip(runs, fitted, strict=True)] for fitted in how(runs)
    ]
    errors = [
        p / run.measured - 1 for predicted in rounds for p, run in zip(predicted, runs, strict=True)
    ]
    chosen = [
        choices([(r, p) for r, p in zip(runs, predicted, strict=True) if isinstance(r, Run)])
        for predicted in rounds
    ]
    rank, regret = map(_mean, zip(*chosen, strict=True))
    print(f": {time.monotonic() - start_s:.1f} s", file=sys.stderr)
    return {
        "file": label,
        "how": how.__name__.replace("_", " "),
        "rows": len(runs),
        "mean_error": statistics.fmean(map(abs, errors)),
        "worst_error": max(errors, key=abs),
        "bar": bar,
        "rank": rank,
        "regret": regret,
        "commit": commit(),
        "runs": [
            {"run": run.name, "measured": run.measured, "predicted": statistics.fmean(each)}
            for run, *each in zip(runs, *rounds, strict=True)
        ],
    }


def merged(before: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """The lines of an earlier result, with new ones in the place of those that they are of."""
    key = lambda line: (line["file"], line["how"])
    by_key = {key(line): line for line in [*before, *new]}
    return [*by_key.values()]


def choices(pairs: Sequence[tuple[Run, float]]) -> tuple[float | None, float | None]:
    """Mean rank correlation and mean regret over sets of runs to choose from; of three, of two.

    Args:
      pairs: runs, and the seconds that are predicted of each.
    """
    sets: dict[Any, list[tuple[float, float]]] = {}
    for run, p in pairs:
        sets.setdefault(run.choice, []).append((p, run.measured_s))
    ranks = [
        float(spearmanr(*zip(*some, strict=True)).statistic)
        for some in sets.values()
        if len({measured_s for _, measured_s in some}) > 2
    ]
    regrets = [
        min(some)[1] / min(measured_s for _, measured_s in some) - 1
        for some in sets.values()
        if len(some) > 1
    ]
    return _mean(ranks), _mean(regrets)


def _mean(numbers: Iterable[float | None]) -> float | None:
    """The mean of the numbers that there are."""
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known else None


HEADER = ("file", "predicted", "rows", "mean", "worst", "bar", "rank", "regret", "commit")


def table(lines: Sequence[Result]) -> list[str]:
    cells = [HEADER, tuple("---" for _ in HEADER), *map(_cells, lines)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _cells(line: Result) -> tuple[str, ...]:
    percent = lambda share: "" if share is None else f"{share:.1%}"
    bar = line["bar"]
    verdict = "" if bar is None else "met" if line["mean_error"] <= bar else "missed"
    return (
        line["file"],
        line["how"],
        str(line["rows"]),
        percent(line["mean_error"]),
        f"{line['worst_error']:+.1%}",
        f"{percent(bar)} {verdict}".strip(),
        "" if line["rank"] is None else f"{line['rank']:.2f}",
        percent(line["regret"]),
        line["commit"],
    )


EDGE = 50.0  # %, of the picture: what is further off is drawn there


def picture(lines: Sequence[Result]) -> Figure:
    """The error of every row, a line for each file and way."""
    names = list(dict.fromkeys(line["file"] for line in lines))
    figure = Figure(figsize=(10, 0.6 + 0.42 * len(lines)), layout="constrained")
    axes = figure.subplots()
    colors = {name: (BLUE, ORANGE, GREEN)[i % 3] for i, name in enumerate(names)}
    for i, line in enumerate(lines):
        errors = [100 * (run["predicted"] / run["measured"] - 1) for run in line["runs"]]
        errors = [max(-EDGE, min(EDGE, error)) for error in errors]
        axes.scatter(errors, [i] * len(errors), s=14, alpha=0.5, color=colors[line["file"]])
        if line["bar"] is not None:
            bar = 100 * line["bar"]
            axes.plot([-bar, -bar], [i - 0.4, i + 0.4], [bar, bar], [i - 0.4, i + 0.4], color=INK)
    labels = [f"{line['file']}, {line['how']}" for line in lines]
    axes.set_yticks(range(len(lines)), labels, color=INK)
    axes.invert_yaxis()
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.grid(axis="x", color=GRID)
    axes.set_xlabel(
        f"error of what is predicted, % ({EDGE:g} or more at the edge); black: bar of the mean",
        color=INK,
    )
    return figure


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("planner_accuracy", description=__doc__, formatter_class=raw)
    parser.add_argument("dir", type=Path, metavar="DIR", help="a folder of CSV files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(benchmarks/results)")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="names without .csv or .json")
    args = parser.parse_args()
    try:
        paths = sorted(args.dir.glob("*.csv"))
        chosen = lambda path: not args.only or path.stem in args.only
        known = [path for path in paths if path.stem in CHECKS and chosen(path)]
        own = [path for path in sorted(RESULTS.glob(OWN)) if chosen(path)]
        if not known and not (args.only and own):
            found = f"{len(paths)} CSV files: {', '.join(path.stem for path in paths)}"
            fix = f"name one that has some of {', '.join(CHECKS)}"
            raise DataError(str(args.dir), "holds none of the known files", found=found, fix=fix)
        lines = [line for path in known for line in check_file(path)]
        lines += [line for path in own for line in check_own(path)]
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    found = args.out / "planner_accuracy.json"
    if args.only:
        lines = merged(json.loads(found.read_text())["lines"], lines)
    print(*table(lines), sep="\n")
    if left := [path.name for path in paths if path.stem not in CHECKS]:
        print(f"\nnot read: {', '.join(left)}")
    result = {
        "command": "python -m benchmarks.planner_accuracy DIR",
        "date": time.strftime("%Y-%m-%d"),
        "lines": lines,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    found.write_text(json.dumps(result, indent=1) + "\n")
    foot = f"{result['date']}: `{result['command']}`"
    (args.out / "planner_accuracy.md").write_text("\n".join([*table(lines), "", foot, ""]))
    picture(lines).savefig(args.out / "planner_accuracy.png", dpi=120)


if __name__ == "__main__":
    main()
