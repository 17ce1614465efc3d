"""What differs between JAX versions and platforms, and how devices are asked for."""

from collections.abc import Collection

import jax


def use_devices(kinds: Collection[str], num_devices: int, *, rehearse: bool) -> None:
    """Makes JAX show devices of these kinds: virtual CPU devices for a rehearsal.

    Must come before the first use of a device; afterwards JAX keeps the devices it has.
    """
    if not rehearse and set(kinds) != {"cpu"}:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # a backend is up, in a notebook or a test: `build_meshes` counts devices
        pass
