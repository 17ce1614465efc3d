"""Fabrics: the kinds of network in a topology, and what is known of each kind."""

from typing import Literal, get_args

Network = Literal["infiniband", "roce", "ethernet"]  # joins nodes
ClusterFabric = Literal["local", Network]  # joins the nodes of a cluster; `local`: there is one
Fabric = Literal["local", "nvlink", Network]  # joins devices
NETWORKS: tuple[Network, ...] = get_args(Network)
RDMA: tuple[Network, ...] = ("infiniband", "roce")  # NICs move bytes without the CPU
NAMES: dict[str, str] = {"infiniband": "InfiniBand", "roce": "RoCE", "ethernet": "Ethernet"}

# Share of a nominal bandwidth that long messages reach. NVLink: the 231 GB/s that 280 NCCL
# all-reduces approach, of 300 (the source is at `collective_times.START_S`). RDMA: what all-reduces
# of 16 GiB reach on 16 to 512 GPUs (aliyun/SimAI@cef83f9, nic_ratio.csv). Ethernet: what TCP
# carries in a frame of 1,500 bytes, 1,448 of the 1,538 that it takes on the wire.
REACHED: dict[Fabric, float] = {
    "local": 1.0,
    "nvlink": 0.77,
    "infiniband": 0.96,
    "roce": 0.96,
    "ethernet": 0.94,
}
# Seconds of each step of a collective beyond the latency of the link, which NCCL's kernels take to
# synchronise with a neighbour over RDMA; the source is at `collective_times.START_S`.
STEP_S: dict[Fabric, float] = dict.fromkeys(RDMA, 30e-6)
