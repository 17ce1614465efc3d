"""How many slots devices that share experts exchange; without JAX, for planners."""

from typing import Any

# Slots of choices over choices: a quarter of an even load may be on top of it without a new round.
SLOTS_PER_CHOICE = 1.25


def slots_of_each(num_choices: Any, num_devices: Any) -> Any:
    """Slots of a device for the choices that go to each device, itself among them.

    Integers, or arrays of them.

    >>> slots_of_each(64, 4), slots_of_each(2, 8)
    (20, 1)
    """
    return -(-5 * num_choices // (4 * num_devices))
