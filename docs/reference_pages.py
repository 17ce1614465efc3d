"""Pages of the site that are written from the code: settings, commands, modules, a gallery.

settings.md    every section of a run file: its settings, their values, defaults and meaning. The
               meaning is the comment of a setting in its section: each has one
commands.md    the help of every verb
modules.md     every module with the first paragraph of its docstring
gallery.md     plans of configs/runs, drawn, and the topologies of configs/topologies

The first two are in the checkout, too. `python -m docs.reference_pages` writes them again.
"""

import argparse
import ast
import dataclasses
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.package_graph import ROOT as CHECKOUT, TOPS, parsed
from holmesjax import config as configs
from holmesjax.files.schema import OneOf
from holmesjax.plan.plan import Plan
from holmesjax.plan.plan_description import describe
from holmesjax.report import mesh_picture
from holmesjax.topology import description, loading
from launch import arguments

GOLDEN = CHECKOUT / "tests/golden"
NUMBERS = {int: "whole number", float: "number"}
WORDS = {bool: "`true` or `false`", str: "text"}
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
LIMIT = 2**14  # a bound from here on is only there to find slips


def write(folder: Path) -> None:
    """Writes all pages and their pictures into a folder."""
    write_kept(folder)
    _write(folder / "modules.md", modules())
    _write(folder / "gallery.md", gallery(folder))


def write_kept(folder: Path) -> None:
    """Writes the pages that are in the checkout."""
    folder.mkdir(exist_ok=True)
    for name, text in kept().items():
        _write(folder / name, text)


def kept() -> dict[str, str]:
    """Returns the pages that are in the checkout, by the names of their files."""
    return {"settings.md": settings(), "commands.md": commands()}


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # else it is built again
        path.write_text(text, encoding="utf-8")


# ---- settings ------------------------------------------------------------------------------------


def settings() -> str:
    """The page of all settings of a run file."""
    lines = [
        "# Settings",
        "",
        "A run file names a `topology`, a file of `configs/topologies`, and has these sections. A",
        "setting without a default must be given. On a command line a setting is",
        "`section.name=value`.",
    ]
    comments = dict[tuple[str, str], str]()
    for path in Path(configs.__file__).parent.glob("*sections.py"):
        comments |= _comments(path.read_text(encoding="utf-8"))
    for field in dataclasses.fields(configs.Config):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            lines += _section(field.name, field.type, comments)
    return "\n".join(lines) + "\n"


def _section(path: str, section: type, comments: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yields the lines of a section, and then those of the sections inside of it."""
    yield from ["", f"## `{path}`", "", _markdown(_summary(section)), ""]
    yield from [":::{container} settings", ""]  # narrow screens show its rows as cards: site.css
    yield from ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    inner = []
    hints = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        cells = [
            f"`{field.name}`",
            values_of(hints[field.name]),
            _default(field),
            _sentence(section, field.name, comments),
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        inner += [(field.name, part) for part in _parts(hints[field.name])]
    yield from ["", ":::"]
    for name, part in inner:
        yield from _section(f"{path}.{name}", part, comments)


def values_of(hint: Any) -> str:
    """The values that a type lets through, in words.

    >>> from holmesjax.config.allowed_values import Natural
    >>> values_of(Natural | None)
    'whole number, at least 0; or null'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [values_of(part) for part in arguments if part is not type(None)]
        return "; or ".join([*rest, *["null"] * (type(None) in arguments)])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of: {values_of(arguments[0])}"
    if origin is dict:
        return f"names, each with a value: {values_of(arguments[1])}"
    if dataclasses.is_dataclass(hint):
        return "a section"
    if origin is not typing.Annotated:
        return NUMBERS.get(hint) or WORDS.get(hint) or f"`{hint}`"
    base, *facts = arguments
    if names := [fact for fact in facts if isinstance(fact, OneOf)]:
        return ", ".join(f"`{name}`" for name in names[0].table)
    bounds = [
        words.format(f"{getattr(part, name):g}")
        for fact in facts
        for part in getattr(fact, "metadata", ())
        for name, words in BOUNDS.items()
        if hasattr(part, name) and abs(getattr(part, name)) < LIMIT
    ]
    return ", ".join([values_of(base), *bounds]) if base in NUMBERS else values_of(base)


def _parts(hint: Any) -> Iterator[type]:
    """Yields the dataclasses inside of a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _parts(part)


def _default(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else "its defaults"
    value = field.default
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return (
        "`null`"
        if value is None
        else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def _summary(section: type) -> str:
    return (section.__doc__ or "").strip().split("\n\n")[0]


def _sentence(section: type, name: str, comments: dict[tuple[str, str], str]) -> str:
    """The meaning of a setting: its comment in the first class that defines it."""
    found = [comments.get((base.__name__, name), "") for base in section.__mro__]
    text = _markdown(next(filter(None, found), ""))
    if not text:
        raise ValueError(f"{section.__name__}.{name} has no comment")
    return text[0].upper() + text[1:] + "." * (text[-1] != ".")


def _markdown(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip().replace("None", "`null`")
    return re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", text)  # no emphasis


def _comments(source: str) -> dict[tuple[str, str], str]:
    """The comment of each field by class and name: that on its lines, else that above it."""
    by_line: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            (alone if token.line.strip().startswith("#") else by_line)[token.start[0]] = text
    found = {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for section in classes:
        for field in section.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            last = field.end_lineno or field.lineno
            words = [by_line[n] for n in range(field.lineno, last + 1) if n in by_line]
            above = field.lineno - 1
            while above in alone:
                words.insert(0, alone[above])
                above -= 1
            found[section.name, field.target.id] = " ".join(words)
    return found


# ---- commands ------------------------------------------------------------------------------------


def commands() -> str:
    """The page of all verbs with their help."""
    lines = ["# Commands and their options", "", "[Commands](../verbs.md) says when to use which."]
    for name, verb in arguments.VERBS.items():
        parser = argparse.ArgumentParser(
            f"python -m launch {name}",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100),
        )
        verb.add_to(parser)
        sentence = verb.help[:1].upper() + verb.help[1:]
        lines += ["", f"## `{name}`", "", f"{sentence}.", "", "```text"]
        lines += [parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


# ---- modules -------------------------------------------------------------------------------------


def modules() -> str:
    """The page of all packages and their modules, with what each is for."""
    lines = ["# Modules", "", "[Packages](../design/packages.md) says what may import what."]
    for top in TOPS:
        for package in sorted(file.parent for file in CHECKOUT.glob(f"{top}/**/__init__.py")):
            lines += ["", f"## `{package.relative_to(CHECKOUT)}`", ""]
            lines += [_purpose(package / "__init__.py"), ""]
            lines += ["| module | purpose |", "| --- | --- |"]
            for file in sorted(package.glob("[!_]*.py")):
                lines.append(f"| `{file.stem}` | {_purpose(file)} |")
    return "\n".join(lines) + "\n"


def _purpose(file: Path) -> str:
    text = ast.get_docstring(parsed(file)) or ""
    return _markdown(text.split("\n\n")[0]).replace("|", "\\|")


# ---- gallery -------------------------------------------------------------------------------------


def gallery(folder: Path) -> str:
    """The page of plans and topologies, whose pictures are written into the folder."""
    lines = ["# Plans and topologies", "", "These plans are those of run files in `configs/runs`."]
    for path in sorted(GOLDEN.glob("plan_gpt_*.json")):
        name = path.stem.removeprefix("plan_")
        run_file = CHECKOUT / f"configs/runs/{name}.yaml"
        topology_file = configs.topology_path(configs.load(run_file), run_file)
        topology, plan = loading.load(topology_file), Plan.load(path)
        picture = f"{name}.svg"
        mesh_picture.mesh_picture(plan, topology).savefig(folder / picture)
        lines += ["", f"## {name} on {topology.name}", ""]
        lines += ["```text", *describe(plan), "```", "", f"![The plan of {name}]({picture})"]
    lines += ["", "## Topologies", "", "The files of `configs/topologies`:", "", "```text"]
    for path in sorted(CHECKOUT.glob("configs/topologies/*.yaml")):
        lines += description.describe(loading.load(path))
    lines.append("```")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_kept(CHECKOUT / "docs/reference")
