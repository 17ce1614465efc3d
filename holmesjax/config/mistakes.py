"""A mistake between settings, and the words that several rules share."""

from holmesjax.errors import ConfigError


def wrong(where: str, problem: str, found: object, fix: str) -> ConfigError:
    return ConfigError(where, problem, found=found, fix=fix)


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`: "60 or 66"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
