"""Collectives over the nodes of a cluster, timed, for `launch probe`."""

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax import buckets, compat
from holmesjax.topology_file import CollectiveKind

ITEM_BYTES = 4  # float32


class Collectives:
    """This node's part in the `jax.distributed` job of a cluster; waits for all nodes to come.

    Each device takes part with those in its place on the other nodes, all at once: as by data
    parallelism over nodes. Arrays are gathered and reduce-scattered as a stage does it.

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
        by_ring = compat.sums_by_ring(self._mesh, "node")
        self._run = {
            "all_reduce": self._on_rows(lambda x: jax.lax.psum(x, "node")),
            "reduce_scatter": self._on_rows(
                lambda x: buckets.reduce_scatter(x, 0, "node", by_ring=by_ring)
            ),
            "all_gather": self._on_rows(lambda x: buckets.all_gather(x, 0, "node")),
        }

    def _on_rows(self, function: Callable[[jax.Array], jax.Array]) -> Callable:
        """Compiled for an array [nodes, n] of which each node has a row, on all its devices."""
        rows = P("node", "device")
        run = lambda row: function(row[0])[None]
        return jax.jit(
            jax.shard_map(run, mesh=self._mesh, in_specs=rows, out_specs=rows, check_vma=False)
        )

    def time(self, kind: CollectiveKind, num_bytes: int, rounds: int) -> list[float]:
        """Seconds of each round, after one that compiles.

        Each node holds about `num_bytes`, of what is gathered afterwards.
        """
        num_nodes, num_devices = self._mesh.devices.shape
        length = num_bytes // ITEM_BYTES // num_devices // num_nodes * num_nodes
        held = length // num_nodes if kind == "all_gather" else length
        sharding = NamedSharding(self._mesh, P("node", "device"))
        shape = (num_nodes, num_devices * held)
        ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
        run = self._run[kind]
        found = run(ones).block_until_ready().addressable_shards[0].data
        kept = length // num_nodes if kind == "reduce_scatter" else length
        assert found.shape == (1, kept), found.shape
        assert float(found[0, 0]) == (1 if kind == "all_gather" else num_nodes)
        seconds = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            run(ones).block_until_ready()
            seconds.append(time.perf_counter() - start_s)
        return seconds
