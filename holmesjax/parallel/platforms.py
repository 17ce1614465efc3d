"""Differences between JAX versions and platforms, and the devices that JAX shows."""

import importlib
from collections.abc import Collection

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether it has started
from jax.sharding import Mesh

from holmesjax.errors import ConfigError
from holmesjax.parallel import first_calls

# The settings of JAX that change numbers, with the values that a run needs.
NUMBERS = {
    "jax_enable_x64": False,
    "jax_disable_jit": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
}


def use_devices(kinds: Collection[str], num_devices: int, *, rehearse: bool) -> None:
    """Makes JAX show devices of these kinds: virtual CPU devices for a rehearsal.

    Must come before the first use of a device; afterwards JAX keeps the devices it has. Programs
    are called for the first time alone from here on (`first_calls`).

    Raises ConfigError where the program has set JAX to compute other numbers.
    """
    _refuse_other_numbers()
    first_calls.take_turns()
    if not rehearse and set(kinds) != {"cpu"}:
        # Here: stages are compiled by threads, and the import changes what other threads read.
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # a backend is up, in a notebook or a test: `build_meshes` counts devices
        pass


def has_devices() -> bool:
    """Whether JAX has started its devices in this process: then it reads no flags any more."""
    return xla_bridge.backends_are_initialized()


def _refuse_other_numbers() -> None:
    """Refuses settings of JAX on which numbers depend: a run follows from its run file alone."""
    for name, needed in NUMBERS.items():
        if (value := getattr(jax.config, name)) != needed:
            raise ConfigError(
                f"jax.config.{name}",
                "changes what a run computes",
                found=value,
                fix=f'jax.config.update("{name}", {needed!r}) before the run',
            )


def sums_by_ring(mesh: Mesh, axis: str) -> bool:
    """Whether gradients are better summed step by step than by XLA's reduce-scatter.

    XLA:CPU's reduce-scatter between four processes sends 79 MB from each for 26 MB of gradients. A
    ring sends 20 MB (counted by the kernel, JAX 0.10.2). Two processes exchange halves either way,
    and XLA exchanges them in both directions at once.
    """
    return _is_of_cpu_processes(mesh) and mesh.shape[axis] > 2


def gathers_by_sum(mesh: Mesh, axis: str) -> bool:
    """Whether parameters are better gathered by a reduce-scatter than by XLA's all-gather.

    XLA:CPU's all-gather between two processes sends some of the bytes in one direction at a time.
    It reaches 16.7 Mb/s of 25, and a reduce-scatter 23.9 (`launch probe` in a lab, JAX 0.10.2).
    """
    return _is_of_cpu_processes(mesh) and mesh.shape[axis] == 2


def joins_collectives(mesh: Mesh) -> bool:
    """Whether XLA makes one collective of those of many arrays, each where it lies.

    XLA:GPU does (its combiners), up to a number of bytes. An array joined by hand is a copy, cut
    again behind the collective, and a gradient that is cut along another dim than its first is
    transposed besides.
    """
    return mesh.devices.flat[0].platform != "cpu"


def _is_of_cpu_processes(mesh: Mesh) -> bool:
    processes = {device.process_index for device in mesh.devices.flat}
    return mesh.devices.flat[0].platform == "cpu" and len(processes) > 1


def start_copy_to_host(array: jax.Array) -> jax.Array:
    """A shard in memory that a socket can send from: its `np.asarray` then copies nothing more.

    Returns at once. A CPU's own memory is that already; other platforms copy into pinned memory,
    while they compute.
    """
    [device] = array.devices()
    return array if device.platform == "cpu" else copy_to_pinned(array)


def copy_to_pinned(array: jax.Array) -> jax.Array:
    """A copy in pinned host memory, on its way. CPU devices of JAX 0.10.2 have that kind too."""
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
