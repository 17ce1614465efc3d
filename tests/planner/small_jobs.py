"""Small jobs whose plans are priced, and what is asked of them."""

import dataclasses

from holmesjax.config import PlanConfig
from tests.clusters import make_cluster, make_topology


def priced(topology, egress=0.0, **rents):
    """With dollars an hour for the devices of each cluster, and for 10^9 bytes between any two."""
    clusters = []
    for cluster in topology.clusters:
        rent = rents[cluster.name]
        nodes = [
            dataclasses.replace(n, device=dataclasses.replace(n.device, price_dollars_per_h=rent))
            for n in cluster.nodes
        ]
        clusters.append(dataclasses.replace(cluster, nodes=tuple(nodes)))
    links = {
        way: dataclasses.replace(link, egress_dollars_per_gb=egress)
        for way, link in topology.links.items()
    }
    return dataclasses.replace(topology, clusters=tuple(clusters), links=links)


def asked(config, **plan):
    return dataclasses.replace(config, plan=PlanConfig(**plan))


def small(**rents):
    return priced(
        make_topology(
            make_cluster("ib", "infiniband", (2, 2, 2, 2)),
            make_cluster("roce", "roce", (2, 2), speed=0.5),
            ethernet_bytes_per_s=1e11,
        ),
        **rents,
    )
