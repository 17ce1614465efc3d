"""The numbers of a run that head the report page."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from holmesjax.checkpoints import commit_alarm, scrub
from holmesjax.report import goodput
from holmesjax.report.history import History
from holmesjax.units import counted, duration

Record = Mapping[str, Any]


class Card(NamedTuple):
    """A number of the summary."""

    label: str
    value: str
    unit: str
    note: str


def cards(records: History) -> list[Card]:
    """The numbers of a run, in the order of the summary."""
    first, last = records.first, records.last
    validated = records.last_validated
    steps_s = records.of("step_time_s")
    tokens = float(np.dot(records.of("tokens_per_s"), steps_s))
    skipped = int(np.count_nonzero(records.of("skipped") > 0))
    rate, step_s = records.median("tokens_per_s"), records.median("step_time_s")
    has_mfu = bool(records.has("mfu").any())
    left_s = last.get("time_left_s", 0.0)
    total_s = float(steps_s.sum())
    return [
        Card(
            "Final loss",
            number_text(last["loss"], ".3f"),
            "nats/token",
            f"{number_text(first['loss'], '.3f')} at step {first['step']:,}",
        ),
        Card(
            "Validation loss",
            number_text(validated["val_loss"], ".3f") if validated else "none",
            "nats/token" if validated else "",
            f"at step {validated['step']:,}" if validated else "not measured in this run",
        ),
        *(
            Card(f"Validation: {name}", number_text(loss, ".3f"), "nats/token", "")
            for name, loss in (validated.get("val_losses", {}) if validated else {}).items()
        ),
        Card("Throughput", number_text(rate, ",.0f"), "tokens/s", "median over steps"),
        Card("Step time", number_text(step_s, ".3g"), "s", "median over steps"),
        *_input_wait(records),
        *_goodput(last),
        *_alarms(records),
        *_damages(records),
        Card(
            "Tokens",
            number_text(tokens, ",.0f"),
            "",
            f"{counted(len(records), 'step', form=',')}, {skipped:,} skipped",
        ),
        Card(
            "MFU",
            number_text(records.median("mfu"), ".1%") if has_mfu else "none",
            "",
            "of the devices' peak, median over steps"
            if has_mfu
            else "these devices have no data sheet",
        ),
        Card(
            "Wall time",
            number_text(total_s, duration),
            "",
            f"sum of all steps; {duration(left_s)} left" if left_s else "sum of all steps",
        ),
    ]


def _input_wait(records: History) -> list[Card]:
    """The wait for batches; nothing of runs that did not measure it."""
    waited = records.has("input_wait_s")
    if not waited.any():
        return []
    spent_s = records.of("step_time_s")[waited].sum()
    share = float(records.of("input_wait_s")[waited].sum() / spent_s)
    wait_s = number_text(records.median("input_wait_s"), ".3g")
    return [Card("Input wait", wait_s, "s", f"median over steps; {share:.1%} of the wall time")]


def _alarms(records: History) -> list[Card]:
    """The steps during which no checkpoint had been committed for too long."""
    steps, since = records.with_steps(commit_alarm.FIELD)
    if not len(steps):
        return []
    note = f"without a checkpoint, for {since.max():,.0f} steps at most; last at {steps[-1]:,.0f}"
    return [Card("Alarm", f"{len(steps):,}", "steps", note)]


def _damages(records: History) -> list[Card]:
    """The checkpoints that were found damaged while the run went on."""
    _, damaged = records.with_steps(scrub.FIELD)
    if not len(damaged):
        return []
    note = f"when they were read again; the newest is that after step {damaged.max():,.0f}"
    return [Card("Damaged checkpoints", f"{len(set(damaged)):,}", "", note)]


def _goodput(last: Record) -> list[Card]:
    """The share of the run's time in steps that count; nothing of runs that did not measure it."""
    if "wall_s" not in last:
        return []
    spent = ", ".join(f"{name} {duration(seconds)}" for name, seconds in goodput.rows(last))
    return [Card("Goodput", number_text(goodput.goodput(last), ".1%"), "", spent)]


def number_text(value: float, form: str | Callable[[float], str]) -> str:
    """A number in a format, or the word that it is not finite."""
    if not math.isfinite(value):
        return "not finite"
    return format(value, form) if isinstance(form, str) else form(value)
