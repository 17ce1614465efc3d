"""The choices of each expert: what a step counts, and what a run tells after some steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax.layer_specs.experts import COUNT
from holmesjax.models.layer import changing
from holmesjax.runtime.chunk import Chunk

PREFIX = "choices/"  # of the name of a layer, among the numbers of a step


def of_chunk(chunk: Chunk, sums_MR: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The choices of each expert in a step, [E] for each layer of a chunk that has experts.

    Args:
      chunk: whose layers count.
      sums_MR: what all microbatches and replicas have counted, by layer and name.
    """
    return {
        PREFIX + layer: jnp.sum(jnp.stack(sums_MR[f"{layer}/{COUNT}"]), (0, 1))
        for layer, kind in chunk.kinds.items()
        if any(parameter.name == COUNT for parameter in changing(kind))
    }


class ExpertLoads:
    """The choices of each expert since they were told last.

    Args:
      every: steps after which they are told; 0: never.
      last: the last step of the run, after which they are told, too.
    """

    def __init__(self, every: int, last: int):
        self._every, self._last = every, last
        self._count, self._sums = 0, dict[str, np.ndarray]()

    def after_step(self, step: int, metrics: Mapping[str, Any], *, skipped: bool) -> dict[str, Any]:
        """Adds the choices of a step; what the process tells of them, where it is time.

        A step that was skipped does not count.
        """
        if not self._every:
            return {}
        own = {name: x for name, x in metrics.items() if name.startswith(PREFIX)}
        if own and not skipped:
            self._count += 1
            for name, of_step_E in jax.device_get(own).items():
                layer = name.removeprefix(PREFIX)
                before_E = self._sums.get(layer, np.zeros_like(of_step_E, np.float64))
                self._sums[layer] = before_E + of_step_E
        if not self._count or (step % self._every and step != self._last):
            return {}
        told = {layer: np.rint(sums_E).astype(int).tolist() for layer, sums_E in self._sums.items()}
        count, self._count, self._sums = self._count, 0, {}
        return {"expert_load_steps": count, "expert_loads": told}
