"""Reads a YAML file that people write, with the line of every key, and writes one back.

The files are a subset of YAML, so that a file means what it looks like: one mapping of keys to
values, nested mappings and lists, texts, numbers (`3e-4` is one), `true`, `false`, `null`. Aliases,
tags and dates are not read, and `yes` and `no` are texts. `schema` turns the values into
dataclasses.

PyYAML's events are read here, and not a tree that a library builds. Events come from libyaml, and
they show what a tree hides: every duplicate key, aliases, tags, and how deep a file nests before
anything is built. docs/design/rejected.md has what ruamel.yaml does in their place.
"""

import contextlib
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holmesjax import hub_names
from holmesjax.errors import ConfigError, HolmesError, Mistakes, raise_if_passing

Keys = tuple[str | int, ...]  # where a value is: ("clusters", 0, "name")

BEGIN, END = "# Written by HolmesJAX, up to its last line.\n", "# The last line.\n"
MAX_BYTES = 2**20  # a run file has 2 kB; a topology that lists 10,000 unequal nodes about 800 kB
MAX_DEPTH = 10
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, ten times faster, if built in

WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
INTEGER = re.compile(r"[-+]?\d{1,3}(?:_?\d){0,300}", re.ASCII)
FLOAT = re.compile(r"[-+]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
# A zero byte ends a path, and a new line ends a line of a script that another host gets.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
INFINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)


def scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted text.

    >>> [scalar(text) for text in ("3e-4", "1_000", "true", "null", "yes", "25 Gb/s", ".inf")]
    [0.0003, 1000, True, None, 'yes', '25 Gb/s', inf]
    """
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "", 1)) if INFINITE.fullmatch(text) else text


def dotted(keys: Keys) -> str:
    """Keys as people write them.

    >>> dotted(("clusters", 0, "nics", 1, "kind"))
    'clusters[0].nics[1].kind'
    """
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys).removeprefix(".")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The values of a file and where each comes from, to say where a mistake is."""

    file: str
    error: type[HolmesError]  # raised for mistakes in such a file
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Keys, int] = field(default_factory=dict)  # of each key and list item, from 1
    overrides: dict[Keys, str] = field(default_factory=dict)  # "a.b=value" of the command line
    mistakes: list[HolmesError] = field(default_factory=list)  # those of the file as YAML

    def where(self, keys: Keys) -> str:
        """The file, the line of the key or of the nearest section around it, and the key."""
        for depth in range(len(keys), 0, -1):
            if (near := keys[:depth]) in self.overrides:
                override = f"override {self.overrides[near]}"
                return override if near == keys else f"{override}: {dotted(keys)}"
            if near in self.lines:
                return f"{self.file}:{self.lines[near]}: {dotted(keys)}"
        return f"{self.file}:1: {dotted(keys)}"

    def mistake(self, keys: Keys, problem: str, *, found: object, fix: str) -> HolmesError:
        return self.error(self.where(keys), problem, found=found, fix=fix)


def read(
    path: str | Path,
    error: type[HolmesError],
    overrides: Sequence[str] = (),
    change: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Document:
    """Reads a file, then puts `"a.b=value"` overrides on top. Raises `Mistakes` of `error`.

    `change` may change the values of the file, before overrides come on top.

    An item of a list is named by its place from 0, or by what it calls itself: `clusters.ib.nodes`,
    `links.ib<->roce.bandwidth`.
    """
    text = _file_text(Path(path), error)
    document = Document(file=str(path), error=error)
    values = _parsed(text, document)
    if values is None:
        raise Mistakes([error(str(path), "is empty", found="no settings", fix=SEE_EXAMPLES)])
    if not isinstance(values, dict):
        problem = "must be settings, one `key: value` a line"
        raise Mistakes([error(str(path), problem, found=shown(values), fix=SEE_EXAMPLES)])
    document.values.update(values)
    change(document.values)
    for override in overrides:
        _apply(override, document)
    return document


def may_be_file(path: Path) -> bool:
    """Tells whether a file is there; also true where that cannot be seen, since reading says why.

    >>> may_be_file(Path("pyproject.toml")), may_be_file(Path("absent.yaml"))
    (True, False)
    """
    try:
        return path.is_file()
    except OSError:
        return True


SEE_EXAMPLES = "start from a file of configs/"


def _file_text(path: Path, error: type[HolmesError]) -> str:
    """The text of a file, refused if it cannot be one that people wrote."""

    def refusal(problem: str, found: object, fix: str) -> Mistakes:
        return Mistakes([error(str(path), problem, found=found, fix=fix)])

    try:
        if path.exists() and not path.is_file():
            found = "a folder" if path.is_dir() else "a device or a pipe"
            raise refusal("must be a file", found, "name a file in it, such as run.yaml")
        if (size := path.stat().st_size) > MAX_BYTES:
            found = f"{size:,} bytes"
            raise refusal(
                f"must be at most {MAX_BYTES:,} bytes",
                found,
                "check the path: a YAML file that people write is smaller",
            )
        text = path.read_bytes().decode("utf-8-sig")
        if text.startswith(BEGIN) and not text.endswith(END):
            raise refusal("is cut off", f"{size:,} bytes, without the last line", "copy it again")
        return text
    except UnicodeDecodeError as failure:
        found = f"bytes that are no UTF-8 at offset {failure.start:,}"
        raise refusal("must be text", found, "save it as UTF-8, or name a YAML file") from None
    except FileNotFoundError:
        found = f"nothing there; the current folder is {Path.cwd()}"
        raise refusal("no such file", found, _near(path)) from None
    except (OSError, ValueError) as failure:  # ValueError: a zero byte in the path
        raise_if_passing(failure)
        raise refusal("cannot be read", failure, "check the path and its permissions") from None


def _near(path: Path) -> str:
    """Says how to mend a path that leads nowhere: by the file beside it with the nearest name."""
    with contextlib.suppress(OSError):
        names = [neighbour.name for neighbour in path.parent.iterdir()]
        if close := difflib.get_close_matches(path.name, names, n=1, cutoff=0.8):
            return f"did you mean {path.with_name(close[0])}?"
    use = "make a run of it: python -m launch import {} --to RUN_DIR"
    return hub_names.fix(str(path), "check the path", use=use)


def _parsed(text: str, document: Document) -> Any:
    """The value of a YAML text; fills `document.lines` and `document.mistakes`."""
    try:
        return _Parser(text, document).document_value()
    except (yaml.YAMLError, UnicodeError) as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f"{document.file}:{mark.line + 1}" if mark else document.file
        lines = text.splitlines()
        found = lines[mark.line].strip() if mark and mark.line < len(lines) else "the end of it"
        problem = f"cannot be read as YAML: {getattr(failure, 'problem', None) or failure}"
        fix = "indent with spaces; put quotes around a text that has `: ` or starts with a sign"
        mistake = document.error(where, problem, found=shown(found), fix=fix)
        raise Mistakes([*document.mistakes, mistake]) from None


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Parser:
    """Builds values from PyYAML's events, which unlike its loaders keep lines and duplicates."""

    def __init__(self, text: str, document: Document):
        self.document = document
        self.events: Iterator[Any] = yaml.parse(text, Loader=LOADER)

    def document_value(self) -> Any:
        next(self.events)  # the stream starts
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return None
        value = self.value((), next(self.events))
        next(self.events)  # the document ends
        if not isinstance(event := next(self.events), yaml.StreamEndEvent):
            fix = "remove the line `---` and what follows it"
            self.refuse((), event, "must hold one document", found="two", fix=fix)
        return value

    def value(self, keys: Keys, event: Any) -> Any:
        self.document.lines.setdefault(keys, _line(event))
        if isinstance(event, yaml.AliasEvent):
            fix = "write the value out, or put quotes around a text that starts with *"
            self.refuse(keys, event, "aliases are not read", found=f"*{event.anchor}", fix=fix)
            raise Mistakes(self.document.mistakes)  # others follow, a hundred in a bomb
        if event.tag is not None or event.anchor is not None:
            found = event.tag or f"&{event.anchor}"
            fix = "remove it, or put quotes around a text that starts with ! or &"
            self.refuse(keys, event, "tags and anchors are not read", found=found, fix=fix)
            raise Mistakes(self.document.mistakes)
        if isinstance(event, yaml.ScalarEvent):
            self.refuse_control(keys, event)
            return scalar(event.value) if event.implicit[0] else event.value
        if len(keys) >= MAX_DEPTH:
            found = f"more than {MAX_DEPTH} levels"
            self.refuse(keys, event, "is nested too deep", found=found, fix=SEE_EXAMPLES)
            raise Mistakes(self.document.mistakes)
        return self.mapping(keys) if isinstance(event, yaml.MappingStartEvent) else self.items(keys)

    def items(self, keys: Keys) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.value((*keys, len(items)), event))
        return items

    def mapping(self, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                fix = "write `key: value`, with quotes around a text that starts with [, { or *"
                self.refuse(keys, event, "a key must be a word", found="no word", fix=fix)
                raise Mistakes(self.document.mistakes)
            self.refuse_control(keys, event)
            below, line = (*keys, event.value), _line(event)
            if event.value in values:
                found = f"lines {self.document.lines[below]} and {line}"
                self.refuse(below, event, "is set twice", found=found, fix="remove one of them")
            self.document.lines[below] = line
            values[event.value] = self.value(below, next(self.events))
        return values

    def refuse_control(self, keys: Keys, event: Any) -> None:
        """Refuses a text with a control character, before it comes into a path or a command."""
        if found := CONTROL.search(event.value):
            problem = "must be one line of readable characters"
            shown_text = f"{shown(event.value)}, with {found[0]!r}"
            fix = "write it on one line, without \\0, \\n and the like"
            self.refuse(keys, event, problem, found=shown_text, fix=fix)

    def refuse(self, keys: Keys, event: Any, problem: str, *, found: str, fix: str) -> None:
        where = f"{self.document.file}:{_line(event)}"
        where = f"{where}: {dotted(keys)}" if keys else where
        mistake = self.document.error(where, problem, found=found, fix=fix)
        self.document.mistakes.append(mistake)


def as_overrides(settings: str | Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Overrides as `read` takes them, of what a program has: values by name, or names in sections.

    >>> as_overrides({"train.steps": 5, "run": {"dir": "007", "rehearse": True}})
    ['train.steps=5', 'run.dir="007"', 'run.rehearse=true']
    """
    if isinstance(settings, str):
        return [settings]
    if not isinstance(settings, Mapping):
        if isinstance(settings, Sequence) and all(isinstance(text, str) for text in settings):
            return list(settings)
        problem = "must be settings by name, or a list of texts"
        fix = 'write {"train.steps": 100} or ["train.steps=100"]'
        raise ConfigError("overrides", problem, found=repr(settings), fix=fix)
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found += [f"{name}.{override}" for override in as_overrides(value)]
        else:
            found.append(f"{name}={json.dumps(value, default=_plain)}")
    return found


def _plain(value: Any) -> Any:
    """A path as text, a number of NumPy as one of Python."""
    return value.item() if hasattr(value, "item") else str(value)


def _apply(override: str, document: Document) -> None:
    """Puts `"a.b=value"` on top of the values of a document."""

    def refuse(problem: str, found: str, fix: str) -> None:
        where = f"override {override}"
        document.mistakes.append(document.error(where, problem, found=found, fix=fix))

    name, equals, text = (part.strip() for part in override.partition("="))
    words = name.split(".")
    if not equals or not all(words):
        return refuse(
            "must be key=value", repr(override), "write it as train.steps=100, without spaces"
        )
    if not text:
        return refuse("has no value", repr(override), f"write {name}=null to set nothing")
    keys: Keys = ()
    section: Any = document.values
    for word in words:
        if keys and _at(section, keys[-1]) is None:
            section[keys[-1]] = {}
            document.overrides[keys] = override
        section = _at(section, keys[-1]) if keys else section
        if isinstance(section, list):
            names = [_name_of(item) for item in section]
            if word not in names and not (word.isdecimal() and int(word) < len(names)):
                known = ", ".join(filter(None, names)) or f"0 to {len(names) - 1}"
                return refuse(
                    f"{dotted(keys)} has no {word}", f"it has {known}", "name one of them"
                )
            keys = (*keys, names.index(word) if word in names else int(word))
        elif isinstance(section, dict):
            keys = (*keys, word)
        else:
            before = dotted(keys)
            return refuse(f"{before} is no section", shown(section), f"set {before} itself")
    if control := CONTROL.search(text):
        problem, fix = "must be one line of readable characters", "leave the character out"
        return refuse(problem, repr(control[0]), fix)
    section[keys[-1]] = _override_value(text, override, document)
    for inner in [k for k in (*document.lines, *document.overrides) if k[: len(keys)] == keys]:
        document.lines.pop(inner, None)
        document.overrides.pop(inner, None)
    document.overrides[keys] = override
    return None


def _at(section: Any, key: str | int) -> Any:
    """Returns the value of a section or a list at a key; None for nothing."""
    return section.get(key) if isinstance(section, dict) else section[key]


def _name_of(item: object) -> str:
    """Returns the name of an item of a list in overrides: `ib`, or `ib<->roce` of a link.

    >>> _name_of({"name": "ib"}), _name_of({"between": ["ib", "roce"]}), _name_of({"kind": "h100"})
    ('ib', 'ib<->roce', 'h100')
    """
    if not isinstance(item, dict):
        return ""
    if isinstance(ends := item.get("between"), list):
        return "<->".join(map(str, ends))
    return str(item.get("name", item.get("kind", "")))


def _override_value(text: str, override: str, document: Document) -> Any:
    """Lists, mappings and quoted texts are YAML; so that `data.pattern=**/*.py` works, no other."""
    if text[0] not in "[{'\"":
        return scalar(text)
    file = f"override {override}"
    return _parsed(text, Document(file=file, error=document.error, mistakes=document.mistakes))


def shown(value: object) -> str:
    """A value as the file shows it, shortened, for a message.

    >>> [shown(value) for value in ("12", 12, True, None, [1, 2], {"a": 1})]
    ["the text '12'", '12', 'true', 'nothing (null)', 'a list of 2', 'a section with a']
    """
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:60]!r}..."
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"a section with {', '.join(list(value)[:3])}" if value else "an empty section"
    return str(value) if len(str(value)) <= 60 else f"{str(value)[:60]}..."


class _Dumper(yaml.SafeDumper):
    """Writes what `read` reads: short collections on one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        short = None if len(str(mapping)) <= 110 else False  # None: flow if nothing is nested
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = node.flow_style if short is None else short
        return node


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if not text.isprintable() else None if scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_text(values: dict[str, Any]) -> str:
    """YAML text that `read` gives back as equal values.

    >>> print(to_text({"model": {"width": 64}, "layers": [2, 2], "name": "1e3"}), end="")
    model: {width: 64}
    layers: [2, 2]
    name: '1e3'
    """
    text: str = yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        width=100,
        allow_unicode=True,
        default_flow_style=None,
    )
    return text


def whole(text: str) -> str:
    """The text between two lines that tell `read` whether a file has all of it.

    Half of the settings of a run are settings, too: the others would have their defaults.
    """
    return f"{BEGIN}{text}{END}"


class _LineDumper(_Dumper):
    """Everything on one line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        return yaml.SafeDumper.represent_mapping(self, tag, mapping, True)


def to_line(values: dict[str, Any]) -> str:
    """A mapping as an item of a list that people may want to read.

    >>> to_line({"between": ["a", "b: c"], "latency": "5 us"})
    "{between: [a, 'b: c'], latency: 5 us}"
    """
    text: str = yaml.dump(
        values,
        Dumper=_LineDumper,
        sort_keys=False,
        width=math.inf,
        allow_unicode=True,
        default_flow_style=True,
    )
    return text.rstrip("\n")


def with_section(text: str, key: str, section: str) -> str:
    """The text of a file in which `section` stands for the section of a key; all else is as it was.

    A new one comes at the end. Comments between the lines of the old one go with it.

    >>> with_section("a: 1  # one\\nb:\\n  c: 2\\n\\n# d\\nd: 3\\n", "b", "b: 4\\n")
    'a: 1  # one\\nb: 4\\n\\n# d\\nd: 3\\n'
    >>> with_section("a: 1", "b", "b: 4\\n")
    'a: 1\\nb: 4\\n'
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    starts = [i for i, line in enumerate(lines) if re.match(rf"{re.escape(key)}[ \t]*:", line)]
    if not starts:
        end = "" if text.endswith("\n") or not text else "\n"
        return f"{text}{end}{section}"
    [start] = starts
    inside = [i for i in range(start + 1, len(lines)) if lines[i].strip()]
    end_at = start + 1
    for i in inside:
        if lines[i][0] not in " \t-":  # a comment on the left belongs to what follows
            break
        end_at = i + 1
    return "".join([*lines[:start], section, *lines[end_at:]])
