"""`python -m launch`, for processes that gather and reduce in programs of their own.

HolmesJAX has no switch for this. Parameters are then gathered when the first microbatch has come,
before its forward starts, and gradients reduced once the last backward has ended.
"""

import dataclasses
from functools import partial
from typing import Any

from holmesjax.runtime import compilation, program_shapes
from holmesjax.runtime.chunk import Chunk, Tree
from holmesjax.runtime.compilation import Compiler
from holmesjax.runtime.programs import Compiled, ProgramKey, Programs
from launch.__main__ import main

_compile_overlapped = compilation.compile_chunk


def compile_chunk(chunk: Chunk, compiler: Compiler) -> Programs:
    made = _compile_overlapped(chunk, compiler)
    if chunk.num_replicas == 1:  # it sends nothing
        return made
    forward, backward = (made.table[ProgramKey(name, False)] for name in ("forward", "backward"))
    masters, replicas = chunk.state_shapes.params, program_shapes.replica_shapes(chunk)
    gather = compilation._submit(compiler, chunk.gather, masters, out=replicas).result()
    gradients = program_shapes.gradient_shapes(chunk)
    reduce = compilation._submit(compiler, chunk.reduce, gradients, out=masters).result()
    alone = ("gather", "reduce")
    table = {key: program for key, program in made.table.items() if key.function not in alone}
    table[ProgramKey("forward", True)] = partial(_gather_and_forward, gather, forward)
    table[ProgramKey("backward", True)] = partial(_backward_and_reduce, backward, reduce)
    return dataclasses.replace(made, table=table)


def _gather_and_forward(gather: Compiled, forward: Compiled, fixed: Tree, *args: Any) -> tuple:
    params, *rest = args
    replicas = gather(params)
    return replicas, *forward(fixed, replicas, *rest)


def _backward_and_reduce(backward: Compiled, reduce: Compiled, *args: Any) -> tuple:
    gradients, *rest = backward(*args)
    return reduce(gradients), *rest


if __name__ == "__main__":
    compilation.compile_chunk = compile_chunk
    raise SystemExit(main())
