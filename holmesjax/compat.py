"""What differs between JAX versions and platforms, and how devices are asked for."""

import jax

from holmesjax.topology import Topology


def use_devices(topology: Topology, *, rehearse: bool) -> None:
    """Makes JAX show the devices of the topology: virtual CPU devices for a rehearsal.

    Must come before the first use of a device; afterwards JAX keeps the devices it has.
    """
    kinds = {node.device.name for cluster in topology.clusters for node in cluster.nodes}
    if not rehearse and kinds != {"cpu"}:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", topology.num_devices)
    except RuntimeError:  # a backend is up, in a notebook or a test: `build_meshes` counts devices
        pass
