"""The order of a program that XLA has compiled for GPUs, and what its collectives cost there.

    order       instructions of a computation as they are given to the device, one after the other
    collective  runs beside them from its start on, one at a time, in the order of the starts
    exposed     what instructions after the end of a collective wait for it

No GPU is asked: seconds are those of products, of memory and of links at rates that an H200 has
reached in measurements of others or of ours. What is compared with them is another order of the
same program, and not a clock.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FLOP_PER_S = 650e12  # of products in bfloat16
ATTENTION_FLOP_PER_S = 450e12
MEMORY_BYTES_PER_S = 4.2e12
LINK_BYTES_PER_S = 350e9  # of a device to the others of its node

DTYPE_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Instructions that give arrays another form and compute nothing.
MOVES = {"copy", "transpose", "concatenate", "slice", "pad", "dynamic-update-slice"}
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "convert", "reshape"}

COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    name: str
    type: str  # of its result
    kind: str
    operands: tuple[str, ...]
    rest: str  # of its line

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=[%\"]?([\w.\-$]+)", self.rest)
        return found[1] if found else None


@dataclass(frozen=True)
class Overlap:
    """The work and the collectives of a program on one device."""

    num_async: int = 0  # collectives with instructions between start and end
    num_bare: int = 0  # collectives that end where they start
    compute_s: float = 0.0
    collective_s: float = 0.0
    exposed_s: float = 0.0  # of them
    moved_bytes: float = 0.0  # of arrays that are copied, transposed, joined or cut
    exposed: tuple[tuple[str, float], ...] = ()  # name and seconds of each collective

    def times(self, number: int) -> "Overlap":
        """A loop that runs the program that many times; it has its instructions once."""
        return replace(
            self,
            compute_s=number * self.compute_s,
            collective_s=number * self.collective_s,
            exposed_s=number * self.exposed_s,
            moved_bytes=number * self.moved_bytes,
        )

    def plus(self, other: "Overlap") -> "Overlap":
        return Overlap(
            self.num_async + other.num_async,
            self.num_bare + other.num_bare,
            self.compute_s + other.compute_s,
            self.collective_s + other.collective_s,
            self.exposed_s + other.exposed_s,
            self.moved_bytes + other.moved_bytes,
            self.exposed + other.exposed,
        )


def num_bytes(type_: str) -> float:
    """Bytes of the arrays of a type.

    >>> num_bytes("(bf16[2,3]{1,0}, f32[])")
    16.0
    """
    sizes = (
        DTYPE_BYTES.get(dtype, 1) * math.prod(map(int, filter(None, dims.split(","))))
        for dtype, dims in ARRAY.findall(type_)
    )
    return float(sum(sizes))


def num_elements(type_: str) -> float:
    """Numbers of the arrays of a type."""
    shapes = (dims.split(",") for _, dims in ARRAY.findall(type_))
    return float(sum(math.prod(map(int, filter(None, shape))) for shape in shapes))


class Program:
    """A compiled program, read from its text.

    Args:
      text: `as_text()` of a compiled program with a schedule.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        instructions: list[Instruction] = []
        for line in text.splitlines():
            if head := COMPUTATION.match(line):
                instructions = self.computations[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            elif found := INSTRUCTION.match(line):
                name, type_, kind, rest = found.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.split(")")[0]))
                instructions.append(Instruction(name, type_, kind, operands, rest))
        self._types = {
            one.name: one.type
            for instructions in self.computations.values()
            for one in instructions
        }

    def overlap(self, computation: str | None = None) -> Overlap:
        """The overlap of a computation, by default of the program; loops within it included."""
        found, now_s, link_s = Overlap(), 0.0, 0.0
        ends_s: dict[str, float] = {}
        begun_s: dict[str, float] = {}
        for one in self.computations[computation or self.entry]:
            collective_s = self._collective_s(one)
            if one.kind == "while":
                body = self.overlap(one.attribute("body")).times(_trips(one))
                found = found.plus(body)
                now_s += body.compute_s + body.exposed_s
            elif collective_s is not None:
                link_s = max(link_s, now_s) + collective_s
                found = found.plus(Overlap(collective_s=collective_s))
                if one.kind.endswith("-start"):
                    ends_s[one.name], begun_s[one.name] = link_s, now_s
                else:
                    waited_s, now_s = link_s - now_s, link_s
                    new = Overlap(num_bare=1, exposed_s=waited_s, exposed=((one.name, waited_s),))
                    found = found.plus(new)
            elif one.kind.endswith("-done") and one.operands[0] in ends_s:
                start = one.operands[0]
                waited_s = max(0.0, ends_s[start] - now_s)
                is_bare = now_s == begun_s[start]
                new = Overlap(not is_bare, is_bare, 0.0, 0.0, waited_s, 0.0, ((start, waited_s),))
                found = found.plus(new)
                now_s += waited_s
            else:
                seconds = self._compute_s(one)
                now_s += seconds
                moved = num_bytes(one.type) if self._only_moves(one) else 0.0
                found = found.plus(Overlap(compute_s=seconds, moved_bytes=moved))
        return found

    def order(self, pattern: str, computation: str | None = None) -> list[str]:
        """The names of instructions that a pattern finds in their lines, in their order."""
        own = self.computations[computation or self.entry]
        return [one.name for one in own if re.search(pattern, f"{one.name} {one.rest}")]

    def _operand_bytes(self, one: Instruction) -> float:
        return sum(num_bytes(self._types.get(name, "")) for name in one.operands)

    def _called(self, one: Instruction) -> Sequence[Instruction]:
        return self.computations.get(one.attribute("calls") or one.attribute("to_apply") or "", [])

    def _collective_s(self, one: Instruction) -> float | None:
        """Seconds of a collective that begins; None: it is none, or its end."""
        kind, rest = one.kind.removesuffix("-start"), one.rest
        if kind == "async":
            for inner in self._called(one):
                if inner.kind in COLLECTIVES:
                    kind, rest = inner.kind, inner.rest
        if kind not in COLLECTIVES or one.kind.endswith("-done"):
            return None
        size, n = self._operand_bytes(one), _group_size(rest)
        shares = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return size * shares.get(kind, (n - 1) / n) / LINK_BYTES_PER_S

    def _compute_s(self, one: Instruction) -> float:
        if one.kind in FREE or one.kind.endswith(("-start", "-done")):
            return 0.0
        memory_s = (self._operand_bytes(one) + num_bytes(one.type)) / MEMORY_BYTES_PER_S
        if "mosaic" in one.rest:
            return max(memory_s, self._attention_s(one))
        of_product = one.kind == "custom-call" and "gemm" in (
            one.attribute("custom_call_target") or ""
        )
        is_product = of_product or any(inner.kind == "dot" for inner in self._called(one))
        if not is_product:
            return memory_s
        sizes = [num_elements(self._types.get(name, "")) for name in one.operands[:2]]
        # Of [M, K], [K, N] and [M, N].
        flop = 2.0 * math.sqrt(math.prod(sizes) * num_elements(one.type.split("}")[0] + "}"))
        return max(memory_s, flop / FLOP_PER_S)

    def _attention_s(self, one: Instruction) -> float:
        """Seconds of a kernel of causal attention: two products, or a half of those backward."""
        arrays = [ARRAY.search(self._types.get(name, "")) for name in one.operands]
        dims = [tuple(map(int, x[2].split(","))) for x in arrays if x and x[1] == "bf16"]
        if not dims:
            return 0.0
        query = max(dims, key=math.prod)
        products = 2.0 if len(one.operands) <= 4 else 3.5
        return products * math.prod(query) * query[1] / ATTENTION_FLOP_PER_S

    def _only_moves(self, one: Instruction) -> bool:
        if one.kind in MOVES:
            return True
        kinds = {inner.kind for inner in self._called(one)}
        return one.kind == "fusion" and bool(kinds & MOVES) and kinds <= MOVES | FREE


def _trips(loop: Instruction) -> int:
    found = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    return int(found[1]) if found else 1


def _group_size(rest: str) -> int:
    """Devices of a group of a collective, in each of the ways that XLA writes them.

    >>> _group_size("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, x")
    4
    >>> _group_size("replica_groups={{0,1,2},{3,4,5}}"), _group_size("replica_groups=[2,4]<=[8]")
    (3, 4)
    """
    if found := re.search(r"replica_groups=mesh\[(.*?)\](?: [^{]*)?\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in parts)
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(found[1].split(","))
    found = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(found[1]) if found else 2
