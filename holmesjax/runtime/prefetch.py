"""The batches of a process, on its devices before a step asks for them.

A thread makes them ahead, in the order of the steps. A process makes only the rows that its devices
hold, and of those only what its stages read: the first tokens, the last targets, and others
documents where attention stays inside of them.

Dims: M microbatches, B sequences of one, N of them that devices of this process hold.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from holmesjax.data.batches import Batches, model_inputs
from holmesjax.errors import LostDataError
from holmesjax.parallel import first_calls, sharding
from holmesjax.plan.plan import Plan
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.microbatch import Batch
from holmesjax.runtime.program_shapes import batch_shapes

# What layers draw has numbers of 31 bits, and begins again behind so many sequences of a run.
DRAWN_SEQUENCES = 2**30
AHEAD = 2  # batches that are made or being made, besides the batch of the step


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The parts of one global batch that the chunks of this process read."""

    num_targets: int  # tokens of the whole batch that count in its loss
    # Beside the arrays of a batch stands `sequence`, where layers draw: the number of its first
    # sequence in the run, or -1 in a validation.
    # By each chunk's place in the model. Where a training step is one program, all of its
    # microbatches are one batch, [M, B, L].
    microbatches: Mapping[int, Sequence[Batch]]


def drawn_numbers(first_sequence: int, start_M: np.ndarray) -> np.ndarray:
    """The numbers from which layers draw for the first sequences of microbatches, int32 [M].

    >>> drawn_numbers(2**40 + 2**30 - 8, np.array([0, 8], np.int32)).tolist()
    [1073741816, 0]
    """
    return (start_M + np.int32(first_sequence % DRAWN_SEQUENCES)) % np.int32(DRAWN_SEQUENCES)


class Placer:
    """Puts rows of batches on the devices of the stages here.

    Args:
      plan: of the run.
      chunks: those of this process.
      is_one_program: whether a training step is one program, which takes all microbatches at once.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], *, is_one_program: bool = False):
        self._chunks = chunks
        self._num_microbatches = plan.microbatches
        self._is_one_program = is_one_program
        self.names = sorted({name for chunk in chunks for name in chunk.inputs})
        microbatch, held = plan.global_batch // plan.microbatches, set[int]()
        for chunk in chunks:
            for x in batch_shapes(chunk).values():
                for rows, *_ in x.sharding.addressable_devices_indices_map(x.shape).values():
                    held.update(range(microbatch)[rows])
        self._held_N = np.array(sorted(held), int)
        self._microbatch_size = microbatch
        self._start_M = np.arange(plan.microbatches, dtype=np.int32) * microbatch
        self.row_MN = self._start_M[:, None] + self._held_N  # in the global batch

    def place(
        self,
        host: Mapping[str, np.ndarray],
        num_targets: int,
        *,
        trains: bool = True,
        first_sequence: int = 0,
        num_microbatches: int | None = None,
    ) -> Inputs:
        """A batch on the devices, which has some of the first microbatches or all of them.

        Args:
          host: what `names` names, of the rows `row_MN` of its microbatches; each [M * N, ...].
          num_targets: of the whole batch.
          trains: whether it is for a training step, and not for a validation.
          first_sequence: of a training step: how many sequences the run had before.
          num_microbatches: of this batch; None: all.
        """
        num_microbatches = num_microbatches or self._num_microbatches
        shape = num_microbatches, len(self._held_N)
        host_MN = {name: host[name].reshape(*shape, *host[name].shape[1:]) for name in self.names}
        of_mesh: dict[Any, list[jax.Array]] = {}  # what several chunks of a stage read is put once
        placed: dict[int, list[Batch]] = {}
        for chunk in self._chunks:
            is_stacked = trains and self._is_one_program
            shapes = batch_shapes(chunk, self._num_microbatches if is_stacked else None)
            for name, x in shapes.items():
                if (chunk.mesh, name) not in of_mesh:
                    parts = host_MN[name][None] if is_stacked else host_MN[name]
                    of_mesh[chunk.mesh, name] = [
                        self._put(part, x, num_leading=int(is_stacked)) for part in parts
                    ]
            num_parts = 1 if is_stacked else num_microbatches
            placed[chunk.index] = [
                {name: of_mesh[chunk.mesh, name][m] for name in shapes} for m in range(num_parts)
            ]
            if chunk.draws:
                start_M = self._start_M[:num_microbatches]
                of_run_M = drawn_numbers(first_sequence, start_M)
                first_M = of_run_M if trains else -np.ones_like(start_M)
                for m, batch in enumerate(placed[chunk.index]):
                    own = first_M if is_stacked else first_M[m]
                    batch["sequence"] = sharding.put(own, sharding.replicated(chunk.mesh))
        return Inputs(num_targets=num_targets, microbatches=placed)

    def place_all(
        self, host: Mapping[str, np.ndarray], *, trains: bool = True, first_sequence: int = 0
    ) -> Inputs:
        """Places arrays that have all rows of the batch, [M * B, L]."""
        rows = self.row_MN.ravel()
        num_targets = int(np.count_nonzero(host["target_BL"] >= 0))
        own = {name: host[name][rows] for name in self.names}
        return self.place(own, num_targets, trains=trains, first_sequence=first_sequence)

    def make(self, batches: Batches, what: "Step | Validation") -> Inputs:
        """Makes a batch of a run, and puts it on the devices."""
        if isinstance(what, Validation):
            own = batches.validation(what.index, self.row_MN.ravel())
            host = model_inputs(own, self.names)
            with first_calls.moving():
                return self.place(host, own.num_targets, trains=False)
        count = what.global_batch // self._microbatch_size
        batches = batches.of_size(what.global_batch)
        own = batches.train(what.first_sequence, self.row_MN[:count].ravel())
        host = model_inputs(own, self.names)
        first_draw = what.first_sequence if what.first_draw is None else what.first_draw
        with first_calls.moving():
            return self.place(
                host,
                own.num_targets,
                first_sequence=first_draw,
                num_microbatches=count,
            )

    def _put(self, host: np.ndarray, x: jax.ShapeDtypeStruct, num_leading: int) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            rows = range(x.shape[num_leading])[index[num_leading]]
            start, stop = np.searchsorted(self._held_N, (rows[0], rows[-1]))
            after = index[num_leading + 1 :]
            return host[(*index[:num_leading], slice(start, stop + 1), *after)]

        host = host.astype(x.dtype, copy=False)
        return jax.make_array_from_callback(x.shape, x.sharding, part)


@dataclass(frozen=True)
class Step:
    """The batch of a training step, and the sequences that were consumed before it."""

    first_sequence: int
    global_batch: int
    first_draw: int | None = None  # the number of its first in what layers draw; None: the same


@dataclass(frozen=True)
class Validation:
    """A batch of a validation."""

    index: int


class Maker(Protocol):
    """A placer, as a feed knows it."""

    def make(self, batches: Batches, what: Step | Validation) -> Inputs:
        """Makes a batch of a run, and puts it on the devices."""


class Feed:
    """Batches in the order in which they will be taken; a context manager.

    Args:
      batches: of the run.
      placer: puts them on the devices.
      order: gives each batch that will be taken, as `Step` or `Validation` says it.
      timeout_s: how long one may take.
    """

    def __init__(
        self,
        batches: Batches,
        placer: Maker,
        order: Iterator[Step | Validation],
        timeout_s: float,
    ):
        self._batches, self._placer, self._order = batches, placer, order
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1, "feed")
        self._ahead: deque[Future[Inputs]] = deque()
        self._make_ahead()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self) -> Inputs:
        """The next batch. Raises what made it fail, and LostDataError where it does not come.

        A file system whose server is away lets a read wait, and may be back for another start.
        """
        future = self._ahead.popleft()
        self._make_ahead()
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            raise LostDataError(
                "data.corpus",
                "a batch could not be made in time",
                found=f"nothing for {self._timeout_s:g} s",
                fix="look at the file system of the corpus, and at the memory and processors here, "
                "or raise distributed.start_timeout_s",
            ) from error

    def _make_ahead(self) -> None:
        while len(self._ahead) < AHEAD and (what := next(self._order, None)) is not None:
            self._ahead.append(self._pool.submit(self._placer.make, self._batches, what))
