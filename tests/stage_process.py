"""A process of a stage, as tests start it: python -m tests.stage_process RANK COUNT COORDINATOR

It prints one line of JSON: what it drew for the initial state, what its devices hold of it, its
digests, how often JAX compared or gathered what processes have, and the keys under which it looked
for compiled programs.
"""

import hashlib
import json
import os
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils


def shards(chunk, state):
    """array -> box -> SHA-256 of what is there, of the devices of this process."""
    from holmesjax.checkpoints import restoring

    found = {}
    for key, x in restoring.flatten(state).items():
        for shard in x.addressable_shards:
            box = str([s.indices(n)[:2] for s, n in zip(shard.index, x.shape, strict=True)])
            content = np.ascontiguousarray(shard.data)
            found.setdefault(key, {})[box] = hashlib.sha256(content.tobytes()).hexdigest()
    return found


def digests_of(state):
    from holmesjax.checkpoints import digests, restoring

    return digests.of(restoring.flatten(state))


def make_chunk():
    from tests.hand_made_plans import hand_made_plan, make_chunks, make_model

    # On four devices all but the norms are cut, over two axes; on more processes or fewer alike.
    return make_chunks(make_model(tied_embeddings=True), hand_made_plan((4,), 2, 1, fsdp=2))[0]


def main(rank, num_processes, coordinator):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // num_processes)
    jax.distributed.initialize(
        coordinator, num_processes, rank, coordinator_bind_address=coordinator
    )
    from holmesjax.checkpoints import digests
    from holmesjax.models import initial_values
    from holmesjax.runtime import program_cache

    digests.SMALL = 0  # programs add up all arrays
    keys, find = [], program_cache.Store.get
    program_cache.Store.get = lambda store, key: keys.append(key) or find(store, key)
    program_cache.use("auto", os.environ, print)
    counts = {"drawn": 0, "compared": 0}

    def counted(module, name, what, size=lambda _: 1):
        function = getattr(module, name)

        def wrapper(*args, **kwargs):
            result = function(*args, **kwargs)
            counts[what] += size(result)
            return result

        setattr(module, name, wrapper)

    counted(initial_values, "draw", "drawn", np.size)
    for name in ("assert_equal", "broadcast_one_to_all", "process_allgather"):
        counted(multihost_utils, name, "compared")
    chunk = make_chunk()
    state = chunk.init(3)
    said = {**counts, "shards": shards(chunk, state), "digests": digests_of(state), "keys": keys}
    print(json.dumps(said), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), sys.argv[3])
