"""The collectives of a program, and the order of its operations, read from XLA's text and JAX's."""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jax.extend.core import ClosedJaxpr, Var

KINDS = r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
COLLECTIVE = re.compile(
    rf"= (?P<shapes>\(.*?\)|\S+) {KINDS}"
    r".*?(replica_groups|source_target_pairs)=(?P<groups>.*?), "
    r"(channel|dimensions|use_global|to_apply|frontend|metadata)"
)
NUMBER = r"\d+(?:,\d+)*"
FLOAT_BYTES = {"f32": 4, "bf16": 2, "f16": 1, "f8e4m3fn": 1}  # XLA:CPU sends codes of fp8 as f16


def texts(program) -> list[str]:
    """The text of a compiled program, or of programs that run one after the other."""
    if isinstance(program, functools.partial):
        return [part.as_text() for part in program.args if hasattr(part, "as_text")]
    return [program.as_text()]


# ---- what is sent --------------------------------------------------------------------------------


def iota(text: str) -> np.ndarray:
    """`[2,2]T(1,0)`: the numbers from 0 in that shape, transposed."""
    shape, transposed = re.fullmatch(rf"\[({NUMBER})\](?:T\(({NUMBER})\))?", text).groups()
    sizes = [int(n) for n in shape.split(",")]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose([int(n) for n in transposed.split(",")]) if transposed else numbers


def groups_of(text: str) -> np.ndarray:
    """The groups of a collective in XLA's text, in its three notations: a row of devices each."""
    if text.startswith("{"):
        return np.array([row.split(",") for row in re.findall(rf"\{{({NUMBER})\}}", text)], int)
    if text.startswith("["):
        shape, source = text.split("<=")
        return iota(source).reshape([int(n) for n in shape[1:-1].split(",")])
    shape = dict(re.findall(r"'(\w+)'=(\d+)", text.partition("]")[0]))
    sizes = [int(size) for size in shape.values()]
    order = re.search(r"device_ids=\((.*?)\) \{", text)
    devices = iota(order[1]) if order else np.arange(math.prod(sizes))
    axes = [[*shape].index(name) for name in re.findall(r"'(\w+)'", text.rpartition("{")[2])]
    devices = np.moveaxis(devices.reshape(sizes), axes, range(-len(axes), 0))
    return devices.reshape(-1, math.prod(sizes[i] for i in axes))


def axes_of(groups: np.ndarray, mesh) -> tuple[str, ...]:
    """The axes of the mesh that the groups span."""
    places = np.unravel_index(groups, tuple(mesh.shape.values()))
    return tuple(a for a, at in zip(mesh.shape, places, strict=True) if (at != at[:, :1]).any())


def collectives(text: str, mesh) -> list[tuple[str, tuple[str, ...], int]]:
    """The kind, the axes and the bytes of each collective: those of the whole array of floats."""
    found = []
    for line in text.splitlines():
        if not re.search(f" {KINDS}", line):
            continue
        match = COLLECTIVE.search(line)
        assert match, line
        axes = axes_of(groups_of(match["groups"]), mesh)
        shapes = re.findall(rf"\b({'|'.join(FLOAT_BYTES)})\[([\d,]*)\]", match["shapes"])
        sizes = [FLOAT_BYTES[t] * math.prod(int(n) for n in s.split(",") if n) for t, s in shapes]
        num_bytes = sum(sizes)
        if match["kind"] == "reduce-scatter":
            num_bytes *= math.prod(mesh.shape[axis] for axis in axes)
        found.append((match["kind"], axes, num_bytes))
    return found


def sent(text: str, mesh) -> Counter:
    """Bytes of float numbers on each device, by kind of collective and axes."""
    total = Counter()
    for kind, axes, num_bytes in collectives(text, mesh):
        total[kind, axes] += num_bytes
    return total


def over(axis: str, program, mesh) -> list[tuple[str, int]]:
    """Kind and bytes of each collective that crosses an axis."""
    found = [x for text in texts(program) for x in collectives(text, mesh)]
    return [(kind, num_bytes) for kind, axes, num_bytes in found if axis in axes]


# ---- what waits for what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    kind: str
    line: str
    reads: tuple[str, ...]  # names of instructions
    num_products: int  # matrix products in it, and in what it calls


def entry(text: str) -> dict[str, Instruction]:
    """The instructions that a compiled program starts with, by name, in the order they run."""
    starts = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$|^(ENTRY )?%?([\w.-]+) \(.*")
    bodies: dict[str, list[str]] = {}
    main = name = ""
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (match := starts.match(line)):
            name = match[2] or match[4]
            bodies[name] = []
            main = name if line.startswith("ENTRY") else main
        elif name and " = " in line:
            bodies[name].append(line)

    def instructions(name: str) -> dict[str, Instruction]:
        found: dict[str, Instruction] = {}
        for line in bodies[name]:
            match = re.match(r"\s*(?:ROOT )?%([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)", line)
            assert match, line
            operands = match[3].partition(", metadata=")[0]
            called = re.findall(r"(?:calls|to_apply|body|condition)=%([\w.-]+)", operands)
            operands = re.sub(r"\w+=%[\w.-]+", "", operands)
            products = (match[2] == "dot") + sum(num_products(other) for other in called)
            reads = tuple(n for n in re.findall(r"%([\w.-]+)", operands) if n in found)
            found[match[1]] = Instruction(match[2], line, reads, products)
        return found

    @functools.cache
    def num_products(name: str) -> int:
        return sum(i.num_products for i in instructions(name).values())

    return instructions(main)


def waits_for(program: dict[str, Instruction], name: str) -> set[str]:
    """Everything that must have run before an instruction."""
    found: set[str] = set()
    ahead = [*program[name].reads]
    while ahead:
        if (other := ahead.pop()) not in found:
            found.add(other)
            ahead += program[other].reads
    return found


def num_products(program: dict[str, Instruction], names: set[str]) -> int:
    return sum(program[name].num_products for name in names)


def traced_events(closed: ClosedJaxpr, kinds: set[str]) -> list[tuple[str, frozenset[int]]]:
    """The equations of these kinds, each with the numbers of those that it waits for.

    Of a program before XLA, with the barriers that XLA:CPU takes out before it writes its text.
    """
    events: list[tuple[str, frozenset[int]]] = []

    def run(jaxpr, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
        needs = dict(zip(jaxpr.invars, inputs, strict=True))
        of = lambda var: needs.get(var, frozenset()) if isinstance(var, Var) else frozenset()
        for e in jaxpr.eqns:
            args = [of(var) for var in e.invars]
            before = frozenset().union(*args)
            if e.primitive.name in kinds:
                events.append((e.primitive.name, before))
                before |= {len(events) - 1}
            outputs = [before] * len(e.outvars)
            # A scatter's is the sum of two numbers.
            own = {} if e.primitive.name.startswith("scatter") else e.params
            inside = [getattr(x, "jaxpr", x) for x in own.values()]
            inside = [x for x in inside if hasattr(x, "eqns")]
            if e.primitive.name == "cond":  # of platforms: all their branches do the same
                inside, args = [e.params["branches"][0].jaxpr], args[1:]
            if inside:
                assert len(inside) == 1, e.primitive
                outputs = run(inside[0], args)
            needs.update(zip(e.outvars, outputs, strict=True))
        return [of(var) for var in jaxpr.outvars]

    run(closed.jaxpr, [frozenset()] * len(closed.jaxpr.invars))
    return events
