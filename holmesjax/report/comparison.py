"""Runs side by side: what they have reached, what a step costs, and the settings that differ."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax import job as jobs
from holmesjax.config import BYTES, Config
from holmesjax.data import tokenizer_files, tokenizer_paths
from holmesjax.errors import DataError
from holmesjax.files import regular_files
from holmesjax.report import history, metrics
from holmesjax.report.goodput import goodput
from holmesjax.report.history import History
from holmesjax.units import duration, show

LAST = 0.1  # the share of the common steps over which the last loss is a mean
NOWHERE = "-"  # a run has no such number


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run that has finished at least one step."""

    name: str
    history: History  # of all steps
    config: Config
    contents: Mapping[str, str]  # digests of the files that settings name, of the run's copies


def load(run_dirs: Sequence[str]) -> list[ComparedRun]:
    """Reads the runs of some folders; each is named by the part of its path that is its own.

    Raises:
      ConfigError: a folder is no run folder.
      DataError: a run has no finished step, or its record is damaged.
    """
    found = []
    for run_dir, name in zip(run_dirs, short_names(run_dirs), strict=True):
        config, found_steps = jobs.load_config(run_dir), history.read(run_dir)
        if not len(found_steps):
            raise DataError(
                str(Path(run_dir) / metrics.FILE),
                "has no finished step, so there is nothing to compare",
                found="no records",
                fix="train at least one step, or leave this run out",
            )
        found.append(ComparedRun(name, found_steps, config, _contents(Path(run_dir), config)))
    return found


def _contents(run_dir: Path, config: Config) -> dict[str, str]:
    """Digests of the copies of files that a run folder has, by the settings that named the files.

    A copy that is not there, or cannot be read, has none.
    """
    found = {}
    with contextlib.suppress(OSError):
        found["topology"] = _digest([regular_files.read_bytes(run_dir / jobs.TOPOLOGY)])
    with contextlib.suppress(DataError):
        if config.data.tokenizer != BYTES:
            files = tokenizer_paths.find(run_dir / tokenizer_files.FOLDER).contents()
            parts = [part for name, content in files.items() for part in (name.encode(), content)]
            found["data.tokenizer"] = _digest(parts)
    return found


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def short_names(run_dirs: Sequence[str]) -> list[str]:
    """The paths without the folders that all of them share.

    >>> short_names(["runs/a/run", "runs/b/run/"])
    ['a/run', 'b/run']
    >>> short_names(["runs/a", "runs/a"])
    ['a', 'a']
    """
    paths = [os.path.abspath(run_dir) for run_dir in run_dirs]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def numbers(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a name, and a text for each run.

    The last losses are means over the same steps, those before the last step that all runs have.
    """
    common = min(run.history.last["step"] for run in runs)
    first = common - max(1, round(LAST * common)) + 1
    window = f"{first} to {common}" if first < common else str(common)

    def loss(run: ComparedRun) -> str:
        step = run.history.of("step")
        own = run.history.of("loss")[(first <= step) & (step <= common)]
        return _text(own, np.mean, "{:.4f}")

    def validation(run: ComparedRun) -> str:
        step, value = run.history.with_steps("val_loss")
        if not np.isfinite(value).any():
            return NOWHERE
        best = np.nanargmin(np.where(np.isfinite(value), value, np.nan))
        return f"{value[best]:.4f} at {step[best]:.0f}"

    def middle(name: str, form: Any) -> Any:
        return lambda run: _text(run.history.of(name), np.median, form)

    def traffic(run: ComparedRun) -> str:
        links = run.history.entries("link_bytes")
        sent = [np.nan_to_num(run.history.of(("link_bytes", name))) for name in links]
        # The mean: islands send in few steps.
        return show(float(np.mean(sum(sent, np.zeros(len(run.history))))), "B")

    whole = lambda run: duration(float(run.history.of("step_time_s").sum()))
    skipped = lambda run: str(np.count_nonzero(run.history.of("skipped") > 0))
    useful = lambda run: (
        f"{goodput(run.history.last):.1%}" if "wall_s" in run.history.last else NOWHERE
    )
    lost = lambda run: (
        duration(run.history.last["wall_s"]["lost"]) if "wall_s" in run.history.last else NOWHERE
    )

    def memory(run: ComparedRun) -> str:
        peaks = run.history.memory_bytes.values()
        return show(max(peaks), "B") if peaks else NOWHERE

    def last(name: str) -> Callable[[ComparedRun], str]:
        def cell(run: ComparedRun) -> str:
            step, value = run.history.with_steps(name)
            return f"{value[-1]:.4g} at {step[-1]:.0f}" if len(step) else NOWHERE

        return cell

    others = [name for run in runs for name in run.history.others]
    rows: list[tuple[str, Any]] = [
        ("steps", lambda run: f"{run.history.last['step']:,} of {run.config.train.steps:,}"),
        (f"loss, steps {window}", loss),
        ("best validation loss", validation),
        ("steps skipped", skipped),
        ("tokens/s", middle("tokens_per_s", "{:,.0f}")),
        ("time of a step", middle("step_time_s", lambda s: show(s, "s"))),
        ("input wait, a step", middle("input_wait_s", lambda s: show(s, "s"))),
        ("time of all steps", whole),
        ("goodput", useful),
        ("lost time", lost),
        ("memory of the fullest device", memory),
        ("MFU", middle("mfu", "{:.1%}")),
        ("bubble", middle("bubble_share", "{:.1%}")),
        ("bytes between stages, a step", traffic),
        *((f"{name}, the last", last(name)) for name in dict.fromkeys(others)),
    ]
    table = [(name, [cell(run) for run in runs]) for name, cell in rows]
    return [(name, cells) for name, cells in table if set(cells) != {NOWHERE}]


def _text(values: np.ndarray, mean: Callable[[np.ndarray], Any], form: Any) -> str:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return NOWHERE
    value = float(mean(finite))
    return form.format(value) if isinstance(form, str) else str(form(value))


def settings(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ, but for their folders, in rows as of `numbers`.

    Settings that name files differ where the contents of the files do, whatever their paths are.
    """
    flat = [_flat(dataclasses.asdict(run.config)) for run in runs]
    names = dict.fromkeys(name for values_of_run in flat for name in values_of_run)
    rows = []
    for name in names:
        cells = [values_of_run.get(name, NOWHERE) for values_of_run in flat]
        contents = [run.contents[name] for run in runs if name in run.contents]
        if len(contents) == len(runs):
            is_equal = len(set(contents)) == 1
            cells = [f"{cell} ({content})" for cell, content in zip(cells, contents, strict=True)]
        else:
            is_equal = len(set(cells)) == 1
        if not is_equal and name != "run.dir":
            rows.append((name, cells))
    return rows


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings by dotted name, as texts.

    >>> _flat({"train": {"steps": 8}, "topology": "x.yaml"})
    {'train.steps': '8', 'topology': '"x.yaml"'}
    """
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(value, ensure_ascii=False)
    return found
