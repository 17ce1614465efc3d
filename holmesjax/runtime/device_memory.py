"""The most bytes that programs and arrays have taken on each device of this process."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from holmesjax.runtime.chunk import Chunk


def devices_of(chunks: Iterable[Chunk]) -> dict[str, jax.Device]:
    """The devices of this process by the names that records have for them: their plan's numbers."""
    own = jax.process_index()
    return {
        f"device {number}": device
        for chunk in chunks
        for number, device in zip(_numbers(chunk), chunk.mesh.devices.flat, strict=True)
        if device.process_index == own
    }


def _numbers(chunk: Chunk) -> tuple[int, ...]:
    place, _ = chunk.plan.chunks[chunk.index]
    return chunk.plan.stages[place].devices


AGAIN = 50  # steps after which all peaks are told, for those who read the end of a record alone


class PeakMemory:
    """Tells of the devices whose peak has risen, so that records of a long run stay short.

    Args:
      devices: by name. Devices without statistics, such as CPUs, are left out.
    """

    def __init__(self, devices: Mapping[str, Any]):
        self._devices, self._told = devices, dict.fromkeys(devices, 0)
        self._num_asked = 0

    def risen(self) -> dict[str, int]:
        """Bytes of the devices whose peak is above what was told; each `AGAIN`th time, of all."""
        self._num_asked += 1
        if self._num_asked % AGAIN == 0:
            self._told = dict.fromkeys(self._devices, 0)
        found = {}
        for name, device in self._devices.items():
            num_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
            if num_bytes > self._told[name]:
                found[name] = self._told[name] = num_bytes
        return found
