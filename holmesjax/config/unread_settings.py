"""Settings that others leave without an effect: the table of them, and the check that refuses them.

A setting that a run changes and that nothing reads is a mistake of whoever wrote it: the run is
another one than its file says. Checks of single subjects, as of islands, have rows of their own.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from holmesjax.config.data_sections import DataConfig
from holmesjax.config.data_sources import SOURCES
from holmesjax.config.mistakes import Check, wrong
from holmesjax.config.sections import KernelsConfig, ParallelConfig
from holmesjax.config.training_sections import OptimizerConfig, TrainConfig
from holmesjax.config.update_rules import OF_RULES, RATE_SCHEDULES, RULES
from holmesjax.errors import ConfigError

ConfigOfRun = TypeVar("ConfigOfRun", bound=Any)
SECTIONS: dict[str, Any] = {
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "kernels": KernelsConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
}


class Unread(NamedTuple):
    """Settings of a section that are read in some runs alone."""

    section: str
    names: tuple[str, ...]
    is_read: Callable[[Any], bool]  # of the section
    problem: str  # {own} is the section
    fix: str
    plain: tuple[Any, ...] = ()  # values, besides the default, that ask for nothing either


def _named(names: Any) -> str:
    return " or ".join(names)


def _of_optimizer(name: str) -> Unread:
    names = _named(rule for rule, facts in RULES.items() if name in facts.reads)
    return Unread(
        "optimizer",
        (name,),
        lambda own: name in RULES[own.name].reads,
        f"is only for optimizer {names}, not for {{own.name}}",
        f"leave it out, or set optimizer.name to {names}",
    )


def _may_be_stated(data: DataConfig) -> bool:
    named = [*(data.mixture or (data,)), *(data.validation or ())]
    return any(SOURCES[each.source].reads_dtype for each in named)


FALLING = _named(name for name, rate in RATE_SCHEDULES.items() if rate.fallen is not None)
STATED = _named(name for name, source in SOURCES.items() if source.reads_dtype)
TABLE = (
    *map(_of_optimizer, OF_RULES),
    Unread(
        "optimizer",
        ("final_fraction",),
        lambda own: RATE_SCHEDULES[own.schedule].fallen is not None,
        f"is only for schedule {FALLING}, not for {{own.schedule}}",
        "leave it out, or use another optimizer.schedule",
    ),
    Unread(
        "train",
        ("spike_window", "spike_sigmas"),
        lambda own: own.spike_policy != "none",
        "is only for a train.spike_policy, which is none",
        "leave it out, or set train.spike_policy to record",
    ),
    Unread(
        "kernels",
        ("loss_chunk_mib",),
        lambda own: own.cross_entropy != "reference",
        "is for a loss in chunks, which kernels.cross_entropy = reference has not",
        "leave it out, or set kernels.cross_entropy to auto",
    ),
    Unread(
        "parallel",
        ("expert_chunks", "expert_placement"),
        lambda own: own.expert != 1,
        "is for devices that share experts, and parallel.expert is 1",
        "leave it out, or leave parallel.expert to the planner",
        plain=(1,),
    ),
    Unread(
        "data",
        ("dtype",),
        _may_be_stated,
        "is only for files of tokens",
        f"leave it out, or set data.source to {STATED}",
    ),
)


_ARE_ALLOWED = contextvars.ContextVar("unread settings are allowed", default=False)


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    token = _ARE_ALLOWED.set(True)
    try:
        yield
    finally:
        _ARE_ALLOWED.reset(token)


def of_begun_run(load: Callable[[], ConfigOfRun]) -> ConfigOfRun:
    """The config of a run that an earlier version may have begun, without what nothing reads."""
    with _allowed():
        config = load()
        sections = {name: _without_unread(name, getattr(config, name)) for name in SECTIONS}
        return dataclasses.replace(config, **sections)


def section_of_begun_run(section: str, saved: Mapping[str, Any]) -> Any:
    """A section of such a config, from the settings in a checkpoint."""
    with _allowed():
        return _without_unread(section, SECTIONS[section](**saved))


def _default(section: str, name: str) -> Any:
    return SECTIONS[section].__dataclass_fields__[name].default


def _without_unread(section: str, settings: Any) -> Any:
    unread = {
        name: _default(section, name)
        for row in TABLE
        if row.section == section and not row.is_read(settings)
        for name in row.names
    }
    return dataclasses.replace(settings, **unread) if unread else settings


def _refused(row: Unread, section: Any) -> Iterator[ConfigError]:
    if row.is_read(section) or _ARE_ALLOWED.get():
        return
    problem = row.problem.format(own=section)
    for name in row.names:
        if (value := getattr(section, name)) not in (_default(row.section, name), *row.plain):
            yield wrong(f"{row.section}.{name}", problem, value, row.fix)


def checks_of(section: str) -> tuple[Check, ...]:
    """The checks of the settings of a section."""
    return tuple(partial(_refused, row) for row in TABLE if row.section == section)
