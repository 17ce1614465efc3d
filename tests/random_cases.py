"""Random machines and models for the planner."""

import random

from tests.clusters import make_cluster, make_config, make_topology


def random_case(seed):
    """Machines, a config without pins, and the generator of what is pinned."""
    rng = random.Random(seed)
    memory = rng.choice([(0.3, 0.6, 1.0), (0.5, 0.8, 1.2), (1.0, 2.0, 3.0), (8.0, 80.0)])
    clusters = [
        make_cluster(
            f"c{i}",
            rng.choice(["infiniband", "roce", "ethernet"]),
            (rng.choice([1, 2, 4]),) * rng.choice([1, 1, 2]),
            speed=round(rng.uniform(0.2, 1.0), 2),
            memory_gib=rng.choice(memory),
        )
        for i in range(rng.choice([1, 2, 3]))
    ]
    topology = make_topology(*clusters, ethernet_bytes_per_s=10 ** rng.uniform(8, 10.5))
    model = {
        "num_layers": rng.choice([2, 4, 6, 8]),
        "width": rng.choice([512, 1024]),
        "num_heads": rng.choice([4, 8]),
        "vocab_size": rng.choice([256, 32_000]),
        "context_length": rng.choice([256, 1024, 2048]),
    }
    train = {"global_batch": rng.choice([2, 4, 8])}
    return topology, make_config(model=model, parallel={}, train=train), rng
