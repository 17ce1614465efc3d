"""Mistakes between settings: what finds them, and the words that several rules share."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.files import schema

Check = Callable[..., Iterator[ConfigError]]


def wrong(where: str, problem: str, found: object, fix: str) -> ConfigError:
    return ConfigError(where, problem, found=found, fix=fix)


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`: "60 or 66"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def mistakes_of(sections: Mapping[str, Any]) -> Iterator[HolmesError]:
    """Yields the mistakes found by the checks that read only these sections."""
    # `checks` needs the sections, whose modules need this one: they are all there by now.
    table = importlib.import_module("holmesjax.config.checks").CHECKS
    for names, checks in table.items():
        if sections.keys() >= set(names):
            for check in checks:
                yield from schema.findings(check, *(sections[name] for name in names))


def refuse_mistakes(**sections: Any) -> None:
    """Raises the mistakes of sections, given by name, that the checks of these sections find."""
    if mistakes := list(mistakes_of(sections)):
        raise Mistakes(mistakes)
