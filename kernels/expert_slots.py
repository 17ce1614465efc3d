"""How many slots devices that share experts exchange; without JAX, for planners."""

from typing import Any

# Slots of choices over choices: a quarter of an even load may be on top of it without a new round.
SLOTS_PER_CHOICE = 1.25


def slots_of_each(num_choices: Any, num_devices: Any, num_chunks: int = 1) -> Any:
    """Slots of a device for the choices that go to each device, itself among them.

    Integers, or arrays of them. They are as many in each chunk of an exchange.

    >>> slots_of_each(64, 4), slots_of_each(2, 8), slots_of_each(64, 4, 8)
    (20, 1, 24)
    """
    return num_chunks * -(-5 * num_choices // (4 * num_devices * num_chunks))
