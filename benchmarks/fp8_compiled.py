"""Compiles products in fp8 for a GPU, without one: python -m benchmarks.fp8_compiled

The first stage of a Llama, the embedding and three layers, is compiled whole for an H200, as
`benchmarks.memory_compiled` does, with the flags that jobs get: with fp8, and without. Then the
products of all its programs are counted by the dtypes of their operands. XLA joins products that
share an operand, so there are fewer than a layer has weights.

    forward    products of e4m3 and e4m3
    backward   products of e4m3 and e5m2
    others     all other products but those of attention, which has kernels of its own
    maxima     all-reduces of up to 1,024 numbers, in all programs: XLA joins largest magnitudes
    fast       products of a backward that cuBLAS may add up in 14 bits
    transposes of codes that are read from memory: kernels of their own

Ends with 1 if a stage in fp8 has other products, or none in fp8, or fast ones, or transposes.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import memory_compiled
from benchmarks.kernels_compiled import FOLDER, described_devices, install, save
from benchmarks.provenance import RESULTS
from holmesjax.config import Fp8Config, KernelsConfig, ModelConfig, OptimizerConfig
from holmesjax.models.layer import statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.parallel.mesh import build_meshes
from holmesjax.planner.stage_layouts import MeshShape
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.compilation import compile_chunks

NAME = "fp8_compiled"
PAIRS = {"forward": ("f8e4m3fn", "f8e4m3fn"), "backward": ("f8e4m3fn", "f8e5m2")}
DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[", re.MULTILINE)
TURNED = re.compile(r" = f8\w+\[[\d,]*\](\S*) (transpose|copy)\(\S*?%([\w.-]+)\)")
MADE = re.compile(r"%?([\w.-]+) = f8\w+\[[\d,]*\](\S*) ([\w-]+)\((?:%([\w.-]+))?")
OPERANDS = re.compile(r" (?:dot|custom-call)\(([^)]*)\)")
MOST = 1024  # numbers
CUBLAS = 'custom_call_target="__cublas'


class Fp8Case(NamedTuple):
    """Two stages of a Llama, in fp8 or not."""

    scaling: Any  # None: without fp8
    checkpointing: Any = "none"
    mesh: MeshShape = MeshShape(1, 1, 1)

    @property
    def label(self) -> str:
        numbers = f"fp8, {self.scaling} scales" if self.scaling else "bfloat16"
        return f"{numbers}, {self.like.label.partition(', ')[2]}"

    @property
    def like(self) -> memory_compiled.StageCase:
        return memory_compiled.StageCase("llama", self.checkpointing, self.mesh)

    @property
    def model(self) -> ModelConfig:
        fp8 = Fp8Config(scaling=self.scaling) if self.scaling else None
        return replace(memory_compiled.MODELS["llama"], fp8=fp8)


CASES = [
    Fp8Case(None),
    Fp8Case("delayed"),
    Fp8Case("current", "full"),
    Fp8Case("delayed", "none", MeshShape(1, 1, 2)),
    Fp8Case("delayed", "dots", MeshShape(1, 2, 1)),
]


def products_in(text: str) -> Counter[tuple[str, ...]]:
    """The dtypes of both operands of each product of a compiled program."""
    return Counter(pair for pair, _ in _products(text))


def fast_in(text: str) -> int:
    """The products of a backward that do not ask for precise sums."""
    own = (line for pair, line in _products(text) if pair == PAIRS["backward"])
    return sum("highest" not in line.lower() for line in own)


def _products(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The dtypes of both operands of each product, and its line."""
    dtypes = dict(DEFINED.findall(text))
    for line in text.splitlines():
        if " dot(" in line or CUBLAS in line:
            [operands] = OPERANDS.findall(line)
            names = re.findall(r"%([\w.-]+)", operands)[:2]
            yield tuple(sorted(dtypes[name] for name in names)), line


def transposes_in(text: str) -> int:
    """The transpositions of codes that a compiled program does not make in the same kernel."""
    made = {name: of for name, *of in MADE.findall(text)}
    found = 0
    for layout, opcode, operand in TURNED.findall(text):
        before, by, source = made.get(operand, ("", "", ""))
        while by == "bitcast":  # moves nothing
            _, by, source = made.get(source, ("", "", ""))
        is_turned = opcode == "transpose" or layout != before
        found += is_turned and by != "convert"
    return found


def small_all_reduces(text: str) -> int:
    """The all-reduces of a compiled program whose results are no larger than `MOST`."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    return sum(_num_elements(result) <= MOST for result in results)


def _num_elements(shapes: str) -> int:
    """The numbers in all arrays of a result, such as `(f32[2,3]{1,0}, f32[])`."""
    dims = re.findall(r"\w+\[([\d,]*)\]", shapes)
    return sum(math.prod(int(size) for size in shape.split(",") if size) for shape in dims)


def compile_here(number: int) -> None:
    """In a process that sees the plugin: a line of JSON."""
    case = CASES[number]
    model, plan = case.model, memory_compiled.plan_of(case.like)
    devices = described_devices(case.like.num_stages * case.mesh.num_devices)
    config = OptimizerConfig(learning_rate=1e-4)
    chunk = Chunk(
        model=model,
        plan=plan,
        index=0,
        mesh=build_meshes(plan, devices)[0],
        optimizer=make_optimizer(config, 100, statements(model)),
        compute_dtype="bfloat16",
        clip_norm=config.clip_norm,
        mask_documents=False,
        kernels=KernelsConfig(attention="pallas"),
    )
    [programs] = compile_chunks([chunk])
    texts = [program.as_text() for program in programs.table.values()]
    products = sum(map(products_in, texts), Counter())
    own = {name: products.pop(pair, 0) for name, pair in PAIRS.items()}
    others = {" ".join(pair): count for pair, count in products.items()}
    line = {"what": case.label, "in_fp8": bool(case.scaling), **own, "others": others}
    counted = {"maxima": small_all_reduces, "fast": fast_in, "transposes": transposes_in}
    line |= {name: sum(map(count, texts)) for name, count in counted.items()}
    print(json.dumps(line), flush=True)


def is_good(line: dict[str, Any]) -> bool:
    """Whether all products of a stage in fp8 are, and are as they should be."""
    has_fp8 = line["forward"] > 0 and line["backward"] > 0
    wrong = line["others"] or line["fast"] or line["transposes"]
    return has_fp8 and not wrong if line["in_fp8"] else not has_fp8


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| stage | forward | backward | others | maxima | fast | transposes |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for line in lines:
        others = ", ".join(f"{count} of {pair}" for pair, count in line["others"].items())
        numbers = f"{line['forward']} | {line['backward']} | {others or 'none'} | "
        numbers += " | ".join(str(line[name]) for name in ("maxima", "fast", "transposes"))
        rows.append(f"| {line['what']} | {numbers} |{' MISSED' * (not is_good(line))}")
    return "\n".join(rows)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:
        compile_here(args.compile)
        return 0
    install(FOLDER)
    lines = []
    for number in range(len(CASES)):
        lines += memory_compiled.compiled_apart(NAME, number)
        print(table(lines[-1:]).splitlines()[-1], flush=True)
    save(NAME, lines, table(lines), args.out)
    return 0 if all(map(is_good, lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
