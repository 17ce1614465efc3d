"""One stage's part of a model that generates text in the processes of a plan.

The residual stream goes from chunk to chunk, and the tokens that the last stage draws go back from
stage to stage, each over a transport as in training. Caches of keys stay with their layers. Every
process runs the same loop (`sampler`) over the same texts, so nothing else has to be agreed on.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from holmesjax.generation.decoder import Decoder, ModelPart, bucket
from holmesjax.models.key_cache import Cache
from holmesjax.parallel import sharding
from holmesjax.plan.plan import Plan
from holmesjax.transport.crossings import Crossing, Key
from holmesjax.transport.local import Transport


def crossings(
    plan: Plan, *, num_rows: int, lengths: Sequence[int], width: int, dtype: str
) -> tuple[Crossing, ...]:
    """All that crosses between the stages of a plan, the same in every process.

    Args:
      plan: the plan.
      num_rows: texts.
      lengths: the numbers of tokens that a text is extended by at a time.
      width: of the model.
      dtype: of the residual stream.
    """

    def crossing(name: str, source: int, target: int, shape: tuple[int, ...], dtype: str) -> None:
        stages = plan.stages[source], plan.stages[target]
        whole = ((),) * len(shape)
        found.append(
            Crossing(
                name=name,
                source=source,
                target=target,
                link=f"{stages[0].cluster} -> {stages[1].cluster}",
                shape=shape,
                dtype=dtype,
                source_spec=whole,
                target_spec=whole,
                # Otherwise the processes of the target share it.
                is_whole=len(shape) == 1 or shape[-1] % len(stages[1].devices) != 0,
            )
        )

    found: list[Crossing] = []
    homes = [home for home, _ in plan.chunks]
    for v, (source, target) in enumerate(itertools.pairwise(homes)):
        for length in lengths:
            crossing(_stream(v, length), source, target, (num_rows, length, width), dtype)
    for stage in range(1, len(plan.stages)):
        crossing(_tokens(stage), stage, stage - 1, (num_rows,), "int32")
    return tuple(found)


def lengths(longest: int, most: int) -> list[int]:
    """The numbers of tokens by which texts are extended: one token, or a bucket of several.

    Args:
      longest: tokens of the longest text that may be read at once.
      most: tokens of the caches.

    >>> lengths(40, 100)
    [1, 16, 32, 64]
    """
    found = {bucket(length, most) for length in range(1, longest + 1)}
    return sorted({1} | found)


def _stream(v: int, length: int) -> str:
    return f"{length} tokens behind chunk {v}"


def _tokens(stage: int) -> str:
    return f"tokens from stage {stage}"


@dataclass(frozen=True, kw_only=True)
class StageDecoder(Decoder):
    """The chunks of one stage, on its mesh."""

    plan: Plan
    stage: int
    transport: Transport | None  # None: the plan has one stage
    advance: Callable[[], object] = lambda: None  # called with each extension
    _steps: Iterator[int] = field(default_factory=itertools.count)
    _draws: Iterator[int] = field(default_factory=itertools.count)

    def extend(
        self,
        caches: Sequence[dict[str, Cache]],
        token_BL: np.ndarray,
        position_BL: np.ndarray,
        wanted_B: np.ndarray | None = None,
    ) -> tuple[jax.Array | None, list[dict[str, Cache]]]:
        """Extends texts as `Decoder.extend` does; only the last stage has logits."""
        step, length = next(self._steps), token_BL.shape[1]
        chunks = [v for v, (home, _) in enumerate(self.plan.chunks) if home == self.stage]
        x: jax.Array | None = None
        after = []
        for i, (v, cache) in enumerate(zip(chunks, caches, strict=True)):
            x = self._fetch(Key(_stream(v - 1, length), step, 0)) if v else None
            x, cache = self.run_part(i, cache, x, (token_BL, position_BL, wanted_B))
            after.append(cache)
            if not self._is_last(v):
                self._offer(Key(_stream(v, length), step, 0), self._everywhere(x))
        self.advance()
        return (x if self._is_last(chunks[-1]) else None), after

    def shared(self, token_B: jax.Array | None) -> np.ndarray:
        """The tokens that the last stage has drawn, in every process."""
        draw = next(self._draws)
        if token_B is None:
            token_B = self._fetch(Key(_tokens(self.stage + 1), draw, 0))
        else:
            token_B = self._everywhere(token_B)
        if self.stage > 0:
            self._offer(Key(_tokens(self.stage), draw, 0), token_B)
        return np.asarray(token_B)

    def _is_last(self, v: int) -> bool:
        return v == len(self.plan.chunks) - 1

    def _fetch(self, key: Key) -> jax.Array:
        assert self.transport is not None, "another stage has it"
        self.transport.expect([key])
        return self.transport.fetch(key)

    def _offer(self, key: Key, array: jax.Array) -> None:
        assert self.transport is not None, "another stage waits for it"
        self.transport.offer(key, array)

    def _everywhere(self, array: jax.Array) -> jax.Array:
        """The array whole on every device of the stage."""
        return _copies(self.parts[0])(array)


@functools.cache
def _copies(part: ModelPart) -> Callable[[jax.Array], jax.Array]:
    found: Callable[[jax.Array], jax.Array] = jax.jit(
        lambda x: x, out_shardings=sharding.replicated(part.mesh)
    )
    return found
