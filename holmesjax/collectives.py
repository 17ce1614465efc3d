"""An all-reduce over the nodes of a cluster, timed, for `launch probe`."""

import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax import compat

ITEM_BYTES = 4  # float32


class AllReduce:
    """This node's part in the `jax.distributed` job of a cluster; waits for all nodes to come.

    Each device is reduced with those in its place on the other nodes, all at once: as by data
    parallelism over nodes.

    Args:
      coordinator: HOST:PORT of rank 0.
      num_nodes: of the cluster.
      rank: of this node.
      on_cpu: whether CPUs stand for its devices; one a node.
      timeout_s: for all nodes to come.

    Raises RuntimeError where JAX does.
    """

    def __init__(
        self, coordinator: str, num_nodes: int, rank: int, *, on_cpu: bool, timeout_s: float
    ):
        compat.use_devices({"cpu"} if on_cpu else {"gpu"}, 1, rehearse=on_cpu)
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            coordinator,
            num_processes=num_nodes,
            process_id=rank,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_s),
            coordinator_bind_address=coordinator,
        )
        by_node: Mapping[int, list[jax.Device]] = {
            n: [device for device in jax.devices() if device.process_index == n]
            for n in range(num_nodes)
        }
        count = min(map(len, by_node.values()))
        self._mesh = Mesh(np.array([by_node[n][:count] for n in by_node]), ("node", "device"))
        self._reduce = jax.jit(
            jax.shard_map(
                lambda part: jax.lax.psum(part, "node"),
                mesh=self._mesh,
                in_specs=P("node", "device"),
                out_specs=P(None, "device"),
            )
        )

    def time(self, num_bytes: int, rounds: int) -> list[float]:
        """Seconds of each round, after one that compiles; each node holds about `num_bytes`."""
        num_nodes, num_devices = self._mesh.devices.shape
        shape = (num_nodes, num_devices * (num_bytes // ITEM_BYTES // num_devices))
        sharding = NamedSharding(self._mesh, P("node", "device"))
        ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
        total = self._reduce(ones).block_until_ready()
        assert float(total.addressable_shards[0].data[0, 0]) == num_nodes
        found = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            self._reduce(ones).block_until_ready()
            found.append(time.perf_counter() - start_s)
        return found
