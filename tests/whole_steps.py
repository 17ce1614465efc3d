"""The table of whole steps: each row is a plan, a model and the ways in which they are computed.

Rows are few because each of them changes many things at once. `tests/runtime/test_whole_steps.py`
runs every row against one device, and proves that every two values that can occur together do.
`tests/runtime/test_sent.py` reads what the same programs send and keep.
"""

import ast
import functools
import itertools
from typing import NamedTuple

import pytest

from holmesjax.config import KernelsConfig, ModelConfig, OptimizerConfig
from holmesjax.plan.plan import Plan
from holmesjax.runtime.compilation import compile_chunks, compile_whole_step
from holmesjax.runtime.pipeline import in_one_process, make_runner
from holmesjax.runtime.whole_step import WholeStep
from tests.hand_made_plans import hand_made_plan, make_chunks

# Heads of 64 numbers are whole blocks of int8, and together wider than the model. The parts of the
# feed-forward of "llama" on two devices are blocks and a half.
MODELS = {
    "gpt2": {"num_heads": 4, "head_dim": 64, "positions": "learned"},
    "llama": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "mlp_width": 192,
        "activation": "swiglu",
        "norm": "rms_norm",
        "norms": "both",
        "zero_centered_norms": True,
        "qk_norm": "all_heads",
        "biases": "qkv",
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
        "z_loss_multiplier": 0.01,
    },
}


class Row(NamedTuple):
    """Sizes of axes are one number, or one for each stage."""

    split: tuple[int, ...]  # blocks of each stage
    data: int | tuple[int, ...] = 1
    fsdp: int | tuple[int, ...] = 1
    tensor: int | tuple[int, ...] = 1
    context: int | tuple[int, ...] = 1
    schedule: str = "1f1b"  # which also stands for those that run the same programs
    chunks: int = 1
    microbatches: int = 1
    checkpointing: str = "none"
    recomputed: tuple[int, ...] = ()  # the first layers of each stage; empty: all
    cross_entropy: str = "reference"
    moments: str = "float32"
    clip_norm: float | None = None
    kind: str = "gpt2"  # of the model
    tied: bool = False
    mask: bool = False
    ramp: tuple[int, ...] = ()  # microbatches of each step of a batch that grows, in another run

    def __str__(self) -> str:
        changed = [
            f"{name} {value}"
            for name, value in self._asdict().items()
            if name == "split" or value != self._field_defaults[name]
        ]
        return ", ".join(changed)

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            num_layers=sum(self.split),
            width=128,
            context_length=16,
            tied_embeddings=self.tied,
            **MODELS[self.kind],
        )

    @property
    def optimizer(self) -> OptimizerConfig:
        """With beta1 = 0 the first moment is the gradient; rounded moments are summed over steps.

        A large epsilon: dividing by the root of a second moment near zero would magnify roundings.
        """
        return OptimizerConfig(
            learning_rate=1e-2,
            beta1=0.0 if self.moments == "float32" else 0.9,
            epsilon=1e-3,
            clip_norm=self.clip_norm,
            moments=self.moments,
        )

    @property
    def plan(self) -> Plan:
        return hand_made_plan(
            self.split,
            self.data,
            self.tensor,
            fsdp=self.fsdp,
            context=self.context,
            schedule=self.schedule,
            chunks=self.chunks,
            microbatches=self.microbatches,
            checkpointing=self.checkpointing,
            sequence_parallel=True,
            recomputed=self.recomputed,
        )

    @property
    def made_chunks(self):
        kernels = KernelsConfig(attention="reference", cross_entropy=self.cross_entropy)
        return make_chunks(
            self.model, self.plan, config=self.optimizer, mask=self.mask, kernels=kernels
        )

    @property
    def values(self) -> dict[str, str]:
        """The value of each thing that rows change, in words."""
        size = lambda sizes: "unequal" if isinstance(sizes, tuple) else str(sizes)
        cuts = {1: "one program", 2: "two stages"}
        own = self.schedule in ("interleaved_1f1b", "zero_bubble")
        return {
            "cut": self.schedule if own else cuts.get(len(self.split), "more stages"),
            "data": size(self.data),
            "fsdp": size(self.fsdp),
            "tensor": "whole" if self.tensor == 1 else "cut",
            "context": "whole" if self.context == 1 else "cut",
            "microbatches": "one" if self.microbatches == 1 else "several",
            "checkpointing": self.checkpointing,
            "computed again": "some layers" if self.recomputed else "all or none",
            **{name: str(getattr(self, name)) for name in Row._fields[10:-1]},
        }

    @property
    def cuts_its_table_twice(self) -> bool:
        """Whether the embedding is one that versions of XLA gather otherwise in a backward."""
        first = lambda sizes: sizes[0] if isinstance(sizes, tuple) else sizes
        is_cut = first(self.tensor) > 1 and first(self.fsdp) * first(self.context) > 1
        return is_cut and self.values["cut"] not in ("one program", "zero_bubble")


@functools.cache
def compiled(row: Row):
    """The programs of each chunk; of one stage, those of its whole step."""
    made = row.made_chunks
    return compile_chunks(made) if len(made) > 1 else compile_whole_step(made[0])


def runner(row: Row, plan: Plan, *, ramps: bool = False):
    """Runs a plan that needs the programs of a row; or steps of unlike batches, task by task."""
    programs = compiled(row)
    if isinstance(programs, list):
        return in_one_process(plan, programs)
    return make_runner(plan, row.made_chunks, ramps=True) if ramps else WholeStep(programs)


# In the order of the fields of `Row`; "-" is the default, and "interleaved" is interleaved_1f1b.
TABLE = """
2     -     2     -     2     -           - - full 1     chunked -        1e6 llama True -    -
2     2     -     2     2     -           - - dots 1     -       bfloat16 0.1 -     -    -    -
1     -     -     4     -     -           - 3 -    -     -       int8     -   -     -    True 1,3,2
1,1   2     1,2   -     -     -           - - dots 0,1   chunked -        -   llama -    True -
1,2   1,2   2     -     -     -           - 3 -    -     chunked bfloat16 0.1 -     True True -
1,1   -     -     2     2     -           - - full -     -       int8     1e6 llama -    -    -
1,1,1 1,2,1 1,2,1 2,1,1 1,1,2 -           - - full 1,0,1 -       -        0.1 -     -    True -
1,1,1 2     -     -     -     -           - 4 -    -     -       bfloat16 1e6 llama True -    1,4,2
1,1,1 -     2     2,1,1 -     -           - - dots -     chunked int8     -   -     True -    -
2,2   -     2     2,1   1,2   interleaved 2 4 -    -     chunked -        0.1 llama -    -    -
2,2   2     -     -     -     interleaved 2 4 full -     chunked bfloat16 -   -     -    True -
2,2   4,1   1,2   -     -     interleaved 2 4 dots 1,1   -       int8     1e6 -     True -    -
1,1   1,2   -     2     2,1   zero_bubble - - -    -     -       -        -   llama -    True -
1,1   -     1,2   -     -     zero_bubble - - -    -     chunked bfloat16 1e6 -     -    True -
2,1   2     2     -     -     zero_bubble - 3 -    -     -       int8     0.1 -     True -    2,1,3
"""


def _value(name: str, cell: str):
    if name in ("split", "recomputed") or "," in cell:
        return tuple(map(int, cell.split(",")))
    if cell == "interleaved":
        return "interleaved_1f1b"
    try:
        return ast.literal_eval(cell)
    except ValueError:
        return cell


def _read(line: str) -> Row:
    cells = zip(Row._fields, line.split(), strict=True)
    return Row(**{name: _value(name, cell) for name, cell in cells if cell != "-"})


ROWS = [_read(line) for line in TABLE.strip().splitlines()]


def _rows_with_each_value() -> list[Row]:
    """The fewest rows that have each value, and such an embedding; others show pairs of values."""
    every = {value for row in ROWS for value in row.values.items()}

    def have_each(rows):
        values = {value for row in rows for value in row.values.items()}
        return values == every and any(row.cuts_its_table_twice for row in rows)

    choices = (rows for n in range(1, len(ROWS) + 1) for rows in itertools.combinations(ROWS, n))
    return list(next(filter(have_each, choices)))


def _marks(number: int, row: Row) -> list[pytest.MarkDecorator]:
    """One worker has all tests of a row, so that its programs are compiled once.

    Each version of JAX has a row with each value.
    """
    group = pytest.mark.xdist_group(f"row {number}")
    return [group] if row in OF_EACH_VERSION else [group, pytest.mark.one_version]


OF_EACH_VERSION = _rows_with_each_value()
PARAMETERS = [
    pytest.param(row, id=str(row), marks=_marks(number, row)) for number, row in enumerate(ROWS)
]
