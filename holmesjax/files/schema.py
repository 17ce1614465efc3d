"""Checks the values of a file against dataclasses, and says in plain words what does not fit.

The fields of a dataclass are the keys that a section may have; their types, with pydantic's
constraints, are what the values may be. All mistakes are found in one pass.

Pydantic checks each value. `_Reader` walks the sections, because pydantic validates a dataclass
whole or not at all. The checks across settings run on a file with other mistakes too, so they need
the values that are right by themselves. docs/design/rejected.md has what else would suffer.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, GetCoreSchemaHandler, TypeAdapter, ValidationError

from holmesjax.errors import HolmesError
from holmesjax.files.yaml_files import Document, Keys, dotted, shown

# Pydantic's name of a mistake -> the problem and the fix. `{...}` is filled in from the constraint;
# `{example}` is the default of the field, or a value of its type.
WORDS = {
    "int_type": ("must be a whole number", "write a number such as {example}"),
    "float_type": ("must be a number", "write a number such as {example}"),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be a text", "write a text, in quotes if it looks like something else"),
    "string_unicode": ("must be readable text", "type the text again; save the file as UTF-8"),
    "tuple_type": ("must be a list", "write it as [1, 2]"),
    "dict_type": ("must be names with values", "write it as {{NAME: value}}"),
    "finite_number": ("must be a finite number", "write a number such as {example}"),
    "greater_than_equal": ("must be at least {ge}", "use {ge} or more"),
    "greater_than": ("must be more than {gt}", "use a number above {gt}"),
    "less_than_equal": ("must be at most {le}", "use {le} or less"),
    "less_than": ("must be less than {lt}", "use a number below {lt}"),
    "too_short": ("must not be empty", "give at least one, or leave the key out"),
    "string_too_short": ("must not be empty", "write a text"),
}
EXAMPLES = {"int_type": 8, "float_type": 0.1, "finite_number": 0.1}


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """An annotation: the value is a name in a table, which may grow after the annotation is made.

    A `Literal` would have the names that the table has now.
    """

    table: Mapping[str, object]
    # Names that a user may expect in the table -> what is wrong with them, and what to do.
    refused: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[Any, BeforeValidator(self._check)])

    def _check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.table:
            raise ValueError("no name of the table")
        return value


class Unknown(Exception):
    """A setting that a check needs is itself a mistake."""


class Known:
    """The values of one section that are right by themselves; reading another raises `Unknown`."""

    def __init__(self, cls: type, values: dict[str, Any]):
        self._cls, self._values = cls, values

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise Unknown(name)
        return self._values[name]


def known_values(known: Known) -> dict[str, Any]:
    """The values that are right by themselves, by key."""
    return known._values


def build(value: Any) -> Any:
    """The dataclass of `Known` values, once nothing is unknown."""
    if isinstance(value, Known):
        return value._cls(**{name: build(inner) for name, inner in value._values.items()})
    return tuple(map(build, value)) if isinstance(value, tuple) else value


def findings(check: Callable[..., Iterable[HolmesError]], *args: Any) -> list[HolmesError]:
    """Returns what a check finds before it needs a setting that is itself a mistake."""
    found: list[HolmesError] = []
    with contextlib.suppress(Unknown):
        for mistake in check(*args):  # one by one, to keep those before `Unknown`
            found.append(mistake)
    return found


def near(name: object, choices: Sequence[str]) -> str:
    """Suggests what to do about a misspelt name.

    >>> near("schedul", ["schedule", "stages"]), near("x", ["schedule", "stages"])
    ("did you mean 'schedule'?", 'choose from: schedule, stages')
    """
    close = difflib.get_close_matches(str(name)[:100], choices, n=1)
    return (
        f"did you mean {close[0]!r}?"
        if close
        else f"choose from: {', '.join(dict.fromkeys(choices))}"
    )


def read(
    cls: type, document: Document, gone: Mapping[str, str] = types.MappingProxyType({})
) -> tuple[Known, list[HolmesError]]:
    """The values of a document that fit `cls`, and all mistakes, with those of the file first.

    `gone` has settings of earlier versions, by their dotted names, and what to do instead.
    """
    reader = _Reader(cls, document, gone)
    known = reader.section(cls, document.values, ())
    return known, [*document.mistakes, *reader.mistakes]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


class _Reader:
    """One pass over a document."""

    def __init__(self, root: type, document: Document, gone: Mapping[str, str]):
        self.root, self.document, self.gone = root, document, gone
        self.mistakes: list[HolmesError] = []

    def refuse(self, keys: Keys, problem: str, *, found: object, fix: str) -> None:
        self.mistakes.append(self.document.mistake(keys, problem, found=found, fix=fix))

    def section(self, cls: Any, value: Any, keys: Keys) -> Known:
        """A mapping for a dataclass. A section with nothing in it is a section of defaults."""
        if not isinstance(value, dict | None):
            fix = f"write keys below it: {', '.join(_hints(cls))}"
            self.refuse(keys, "must be a section of keys", found=shown(value), fix=fix)
            return Known(cls, {})
        given = value or {}
        unknown = [key for key in given if key not in _hints(cls)]
        for key in unknown:
            if (where := dotted((*keys, key))) in self.gone:
                problem, found, fix = "no longer a setting", shown(given[key]), self.gone[where]
            else:
                problem, found, fix = "no such setting", key, self.suggestion(cls, key)
            self.refuse((*keys, key), problem, found=found, fix=fix)
        values = {}
        for field in dataclasses.fields(cls):
            below = (*keys, field.name)
            try:
                if field.name in given:
                    hint = _hints(cls)[field.name]
                    values[field.name] = self.value(hint, given[field.name], below, field.default)
                elif field.default is not dataclasses.MISSING:
                    values[field.name] = field.default
                elif field.default_factory is not dataclasses.MISSING:
                    values[field.name] = field.default_factory()
                elif not difflib.get_close_matches(field.name, map(str, unknown), n=1):
                    fix = f"add `{field.name}:` to {_place(keys)}"
                    self.refuse(below, "is missing", found="nothing", fix=fix)
            except Unknown:
                continue
        return Known(cls, values)

    def value(self, hint: Any, value: Any, keys: Keys, default: Any = dataclasses.MISSING) -> Any:
        """The value for a type, or `Unknown` after a note of what is wrong with it."""
        if get_origin(hint) in (Union, types.UnionType):
            members = get_args(hint)
            if value is None and type(None) in members:
                return None
            hint = _member(members, value)
        if dataclasses.is_dataclass(hint):
            return self.section(hint, value, keys)
        if get_origin(hint) is tuple and dataclasses.is_dataclass(item := get_args(hint)[0]):
            if not isinstance(value, list):
                fix = "write a list: one line `- key: value` for each, keys below it"
                self.refuse(keys, "must be a list of sections", found=shown(value), fix=fix)
                raise Unknown
            return tuple(self.section(item, v, (*keys, i)) for i, v in enumerate(value))
        return self.leaf(hint, value, keys, default)

    def leaf(self, hint: Any, value: Any, keys: Keys, default: Any) -> Any:
        try:
            return _adapter(hint).validate_python(value)
        except HolmesError as quantity:  # refused by `units`
            self.refuse(keys, quantity.problem, found=shown(value), fix=quantity.fix)
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
            for error in errors:
                if error["type"] == "too_short" and len(errors) > 1:
                    continue  # only items that are mistakes are missing
                found = error["input"] if error["loc"] else value
                problem, fix = _words(error, hint, found, default)
                where = (key for key in error["loc"] if key != "[key]")  # pydantic's, behind a name
                self.refuse((*keys, *where), problem, found=shown(found), fix=fix)
        raise Unknown

    def suggestion(self, cls: type, key: str) -> str:
        """The section that has this very name, or a near name in this one."""
        if (before := key.partition(":")[0]) in _hints(cls):
            return f"write a space behind the colon of `{before}:`"
        name = key.split(".")[-1]
        if (homes := sections_with(self.root, name)) and name not in _hints(cls):
            return f"write it in section {' or '.join(map(repr, homes))}"
        return near(key, list(_hints(cls)))


def _member(members: Sequence[Any], value: Any) -> Any:
    """The member of a union that a value is meant for: one of its form, else the first."""
    members = [member for member in members if member is not type(None)]
    form = "list" if isinstance(value, list) else "section" if isinstance(value, dict) else "leaf"
    return next((member for member in members if _form(member) == form), members[0])


def _form(hint: Any) -> str:
    """Returns the form in which a value of a type is written: a list, a section, or a leaf."""
    if dataclasses.is_dataclass(hint):
        return "section"
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return "list" if get_origin(hint) is tuple else "leaf"


def sections_with(cls: type, name: str) -> list[str]:
    """The sections of a dataclass, by their dotted names, that have a key."""
    return [place for place, other in _settings(cls) if place and other == name]


def _settings(cls: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a dataclass and of the dataclasses in it, as (section, key)."""
    for name, hint in _hints(cls).items():
        yield place, name
        for section in _sections(hint):
            yield from _settings(section, f"{place}.{name}".removeprefix("."))


def _sections(hint: Any) -> Iterator[type]:
    """The dataclasses in a type: those of unions and tuples too."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for inner in get_args(hint):
        yield from _sections(inner)


def _place(keys: Keys) -> str:
    return f"section {dotted(keys)!r}" if keys else "the file"


def _words(error: Any, hint: Any, value: Any, default: Any) -> tuple[str, str]:
    """Returns the problem and the fix for one of pydantic's errors."""
    kind, limits = error["type"], error.get("ctx", {})
    if kind in ("literal_error", "value_error"):
        for choice in (hint, *get_args(hint)):
            if isinstance(choice, OneOf) and isinstance(value, str) and value in choice.refused:
                return choice.refused[value]
        choices = [str(choice) for choice in _choices(hint)]
        return f"must be one of {', '.join(choices)}", near(value, choices)
    problem, fix = WORDS[kind]
    if (number := _number(value, kind)) is not None:
        if beyond := _out_of_bounds(hint, number):
            return _words(beyond, hint, number, default)
        return problem, f"write {number}" + " without quotes" * isinstance(value, str)
    example = EXAMPLES.get(kind) if default in (None, (), dataclasses.MISSING) else default
    return problem.format(**limits), fix.format(example=example, **limits)


def _out_of_bounds(hint: Any, number: float) -> Any:
    """The error of a number that is of the right type and too small or too large; else None."""
    try:
        _adapter(hint).validate_python(number)
    except ValidationError as failure:
        [*_, error] = failure.errors(include_url=False)
        return error if error["type"].startswith(("less_than", "greater_than")) else None
    return None


def _choices(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, OneOf):
        return tuple(hint.table)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next(filter(None, map(_choices, get_args(hint))), ())


def _number(value: Any, kind: str) -> int | float | None:
    """The number that was meant by "12" or 12.0 where a whole number or a number is wanted."""
    if isinstance(value, bool) or kind not in ("int_type", "float_type"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if kind == "int_type":
        return int(number) if number.is_integer() else None
    return number if math.isfinite(number) else None
