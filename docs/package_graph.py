"""The packages of the code and what they import, as a picture in plain SVG: packages.svg.

    place    a package; or a module at the root of `holmesjax` or `launch`, drawn by itself if it
             imports packages, else in one box with its like
    floor    the height of a place: it imports only from floors below its own

An arrow goes from a place to each place that it imports. An arrow that other arrows imply is left
out: if A imports B and C, and B imports C, then A has an arrow to B alone.
"""

import ast
import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from docs import svg
from docs.svg import BLUE, GREEN, MUTED, RED

ROOT = Path(__file__).parent.parent
TOPS = {"holmesjax": BLUE, "kernels": GREEN, "launch": RED}  # with the colours of their boxes
BOX, LINE, GAP, AISLE, CHARACTERS = 236, 15, 16, 44, 32  # pixels; and characters in a line
SWEEPS = 12

Graph = Mapping[str, set[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A box of the picture: its name, its sentence, and the places it imports."""

    name: str
    sentence: str
    imports: set[str]

    @property
    def lines(self) -> list[str]:
        return textwrap.wrap(self.sentence, CHARACTERS)

    @property
    def color(self) -> str:
        return TOPS[self.name.partition(".")[0]]


# ---- the graph -----------------------------------------------------------------------------------


@functools.cache
def places() -> Mapping[str, Place]:
    """The places of the code, by name."""
    sources = {name: parsed(file) for name, file in _files().items()}
    rooms = {name: _room(name) for name in sources if name not in ("holmesjax", "launch")}
    packages = {room for room in rooms.values() if _is_package(room)}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, room in rooms.items():
        graph[room] |= {rooms[other] for other in imports_of(sources[name]) & rooms.keys()} - {room}
    alone = {room for room in graph.keys() - packages if _below(graph, room) & packages}
    basement = {room: room.partition(".")[0] for room in graph.keys() - packages - alone}
    found: dict[str, Place] = {}
    for room in sorted(graph):
        name = basement.get(room, room)
        imports = {basement.get(other, other) for other in graph[room]} - {name}
        if name != room:
            before = found.get(name, Place(name=name, sentence="", imports=set()))
            sentence = ", ".join(filter(None, [before.sentence, room.partition(".")[2]]))
            found[name] = Place(name=name, sentence=sentence, imports=before.imports | imports)
        else:
            found[name] = Place(name=name, sentence=_sentence(sources[room]), imports=imports)
    return found


def _files() -> dict[str, Path]:
    """Every module that can be imported, with its file."""
    files = sorted(file for top in TOPS for file in ROOT.glob(f"{top}/**/*.py"))
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    named = {file: part[:-1] if part[-1] == "__init__" else part for file, part in parts.items()}
    return {".".join(part): file for file, part in named.items() if part[-1] != "__main__"}


def _room(module: str) -> str:
    """The package that holds a module; the module itself at the root of `holmesjax` or `launch`."""
    parts = module.split(".")
    return parts[0] if parts[0] == "kernels" else ".".join(parts[:2])


def _is_package(room: str) -> bool:
    return (ROOT / room.replace(".", "/")).is_dir()


@functools.cache
def parsed(file: Path) -> ast.Module:
    """The tree of a file of Python, which is read once."""
    return ast.parse(file.read_text(encoding="utf-8"))


def statements(source: ast.Module) -> Iterator[ast.AST]:
    """A module and everything in it but expressions, at any depth."""
    waiting: list[ast.AST] = [source]
    while waiting:
        yield (node := waiting.pop())
        children = ast.iter_child_nodes(node)
        waiting += [child for child in children if not isinstance(child, ast.expr)]


@functools.cache
def imports_of(source: ast.Module) -> Set[str]:
    """Everything that a module imports, at any depth, functions included; written in full."""
    found: set[str] = set()
    for node in statements(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def _sentence(source: ast.Module) -> str:
    """The first paragraph of a docstring, on one line."""
    paragraph = (ast.get_docstring(source) or "").partition("\n\n")[0]
    return " ".join(paragraph.replace("`", "").split())


def _below(graph: Graph, name: str) -> set[str]:
    """Everything that a node leads to."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def arrows(graph: Graph) -> dict[str, list[str]]:
    """The edges that no other edges imply, in order of name."""
    implied = {
        name: set().union(*(_below(graph, other) for other in graph[name])) for name in graph
    }
    return {name: sorted(graph[name] - implied[name]) for name in sorted(graph)}


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each node, as near to those that import it as it can be; the lowest is 0."""
    order = [*TopologicalSorter(graph).static_order()]  # CycleError names a cycle
    lowest: dict[str, int] = {}
    for name in order:
        lowest[name] = 1 + max((lowest[other] for other in graph[name]), default=-1)
    users = {name: [other for other in graph if name in graph[other]] for name in graph}
    found: dict[str, int] = {}
    for name in reversed(order):
        found[name] = min((found[user] for user in users[name]), default=lowest[name] + 1) - 1
    return found


# ---- the picture ---------------------------------------------------------------------------------


def draw(known: Mapping[str, Place]) -> str:
    """The picture: a row of boxes for each floor, and arrows between them."""
    graph = {name: place.imports for name, place in known.items()}
    rows, segments = _rows(floors(graph), arrows(graph))
    width = max(sum(BOX if name in known else 0 for name in row) + GAP * len(row) for row in rows)
    centers = _centers(rows, segments, known, width)
    tops, down = {}, 60
    for floor in range(len(rows) - 1, -1, -1):
        tops[floor] = down
        down += _height(rows[floor], known) + AISLE
    marks = [svg.text(20, 32, "The packages and what they import", bold=True, size=18)]
    for above, below in segments:
        floor = _floor(rows, above)
        start = tops[floor] + _height([above], known)
        end = tops[floor - 1]
        if above not in known:  # the long arrow goes on through its row
            start = tops[floor] + _height(rows[floor], known)
            marks.append(svg.path([(centers[above], tops[floor]), (centers[above], start)], MUTED))
        bend = (start + end) // 2
        points = [(centers[above], start), (centers[above], bend), (centers[below], bend)]
        marks.append(svg.path([*points, (centers[below], end)], MUTED, has_head=below in known))
    for floor, row in enumerate(rows):
        for name in filter(known.__contains__, row):
            marks += _box(known[name], centers[name] - BOX // 2, tops[floor])
    return svg.picture(
        width + 2 * GAP, down - AISLE + 20, "The packages and what they import", marks
    )


def _rows(
    floor_of: Mapping[str, int], edges: Mapping[str, list[str]]
) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Names floor by floor, and the pieces of arrows from each floor to the next one below.

    A long arrow has a name of its own in each row that it passes.
    """
    rows: list[list[str]] = [[] for _ in range(1 + max(floor_of.values()))]
    for name in sorted(floor_of):
        rows[floor_of[name]].append(name)
    segments = []
    for name, others in edges.items():
        for other in others:
            above = name
            for floor in range(floor_of[name] - 1, floor_of[other], -1):
                rows[floor].append(f"{name} > {other} {floor}")
                segments.append((above, rows[floor][-1]))
                above = rows[floor][-1]
            segments.append((above, other))
    return rows, segments


def _centers(
    rows: list[list[str]],
    segments: Iterable[tuple[str, str]],
    known: Mapping[str, Place],
    width: int,
) -> dict[str, int]:
    """Pixels from the left to the middle of each name; sorts each row, so that few arrows cross.

    Whole numbers throughout: sums of floats differ between versions of Python.
    """
    near: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for above, below in segments:
        near[above].append(below)
        near[below].append(above)
    room = {name: (BOX if name in known else 0) + GAP for name in near}
    centers = {
        name: GAP + width * (2 * i + 1) // (2 * len(row))
        for row in rows
        for i, name in enumerate(row)
    }
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 else rows[::-1]:
            wish = {name: sum(centers[x] for x in near[name]) // len(near[name]) for name in row}
            row.sort(key=lambda name: (wish[name], name))
            left = GAP
            for i, name in enumerate(row):  # each as far left as it wishes, if the rest has room
                rest = sum(room[other] for other in row[i + 1 :])
                least, most = left + room[name] // 2, GAP + width - rest - room[name] // 2
                centers[name] = max(least, min(most, wish[name]))
                left = centers[name] + room[name] // 2
    return centers


def _floor(rows: list[list[str]], name: str) -> int:
    [floor] = [floor for floor, row in enumerate(rows) if name in row]
    return floor


def _height(row: Iterable[str], known: Mapping[str, Place]) -> int:
    """Pixels of the highest box of a row."""
    return max((34 + LINE * len(known[name].lines) for name in row if name in known), default=0)


def _box(place: Place, left: int, top: int) -> list[str]:
    height = _height([place.name], {place.name: place})
    marks = [svg.rectangle(left, top, BOX, height, place.color)]
    name = place.name if "." in place.name or place.name == "kernels" else f"{place.name} (root)"
    marks.append(svg.text(left + 10, top + 19, name, fill=place.color, bold=True))
    for number, line in enumerate(place.lines):
        marks.append(svg.text(left + 10, top + 37 + LINE * number, line, size=12))
    return marks
