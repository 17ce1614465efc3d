"""Times collectives over the nodes of a cluster, for `launch probe`."""

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax.parallel import collectives, platforms
from holmesjax.topology.file import CollectiveKind

ITEM_BYTES = 4  # float32
ROWS = P(("group", "node"), "device")  # each node has a row, on all its devices


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
        platforms.use_devices({"cpu"} if on_cpu else {"gpu"}, 1, rehearse=on_cpu)
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
        self._devices = np.array([by_node[n][:count] for n in by_node])

    def time(
        self, kind: CollectiveKind, group_nodes: int, num_bytes: int, rounds: int
    ) -> list[float]:
        """Returns the seconds of each round, after one that compiles. All groups run at once.

        Each node holds about `num_bytes`, of what is gathered afterwards.
        """
        num_nodes, num_devices = self._devices.shape
        grouped = self._devices.reshape(num_nodes // group_nodes, group_nodes, num_devices)
        mesh = Mesh(grouped, ("group", "node", "device"))
        run = _on_rows(mesh, kind)
        length = num_bytes // ITEM_BYTES // num_devices // group_nodes * group_nodes
        held = length // group_nodes if kind == "all_gather" else length
        sharding = NamedSharding(mesh, ROWS)
        shape = (num_nodes, num_devices * held)
        ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
        found = run(ones).block_until_ready().addressable_shards[0].data
        kept = length // group_nodes if kind == "reduce_scatter" else length
        assert found.shape == (1, kept), found.shape
        assert float(found[0, 0]) == (1 if kind == "all_gather" else group_nodes)
        seconds = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            run(ones).block_until_ready()
            seconds.append(time.perf_counter() - start_s)
        return seconds


def _on_rows(mesh: Mesh, kind: CollectiveKind) -> Callable[[jax.Array], jax.Array]:
    """Compiles a collective for an array [nodes, n]."""
    by_ring, by_sum = (
        has(mesh, "node") for has in (platforms.sums_by_ring, platforms.gathers_by_sum)
    )
    functions: Mapping[CollectiveKind, Callable[[jax.Array], jax.Array]] = {
        "all_reduce": lambda x: jax.lax.psum(x, "node"),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, 0, "node", by_ring=by_ring),
        "all_gather": lambda x: collectives.all_gather(x, 0, "node", by_sum=by_sum),
    }
    run = lambda row: functions[kind](row[0])[None]
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False))
