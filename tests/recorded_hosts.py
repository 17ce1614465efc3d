"""Hosts as the kernel shows them, and what is right for each.

The expected answers for a host are written by hand, as an administrator would give them.
"""

from dataclasses import dataclass, field
from pathlib import Path

from holmesjax.hosts.hardware import Gpu
from tests.host_files import (
    DOWN,
    EINVAL,
    IB_200,
    INIT,
    LINK_LOCAL,
    ROCE_100,
    Tree,
    default_route,
    device,
    gpu,
    hca,
    mapped,
    net,
    rdma_of,
    roce_gids,
    roce_nic,
)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A host, and what discovery must make of it."""

    tree: Tree
    ips: dict[str, list[str]] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    fabrics: dict[str, str | None]  # of every NIC
    addresses: dict[str, list[str]] = field(default_factory=dict)  # besides `local`
    variables: dict[str, dict[str, str]] = field(default_factory=dict)  # of fabrics it can use
    left_out: set[str] = field(default_factory=set)  # of collectives
    problems: int = 0


LO = net("lo", type_=772, state="unknown", speed=EINVAL)
MANAGEMENT = device("pci0000:00/0000:00:1c.0/0000:01:00.0", "ixgbe") | net(
    "eno1", "pci0000:00/0000:00:1c.0/0000:01:00.0"
)
DOCKER = net("docker0", kind="bridge", state="down") | net("veth3f2a91c", master="docker0")


# ---- eight GPUs, each on a switch with an InfiniBand NIC; two more NICs for storage --------------

SWITCH = "pci0000:{0}/0000:{0}:01.0/0000:{1}:00.0/"
BUSES = [("15", "16"), ("35", "36"), ("55", "56"), ("65", "66")]
BUSES += [("85", "86"), ("a5", "a6"), ("c5", "c6"), ("e5", "e6")]
COMPUTE = ["mlx5_0", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_10"]
STORAGE = {"mlx5_1": "pci0000:25/0000:25:01.0/0000:26:00.0", "mlx5_5": "pci0000:75/0000:75:00.0"}


def dgx() -> Recorded:
    tree = LO | MANAGEMENT | DOCKER | default_route("eno1")
    gpus = []
    for i, (name, (root, below)) in enumerate(zip(COMPUTE, BUSES, strict=True)):
        switch = SWITCH.format(root, below)
        nic = f"{switch}0000:{below}:01.0/0000:{below}:02.0"
        tree |= device(nic, "mlx5_core", i // 4) | hca(name, nic)
        tree |= net(f"ibp{i}", nic, type_=32, speed="400000")
        gpus.append(gpu(i, f"{switch}0000:{below}:04.0/0000:{below}:05.0", i // 4))
    for i, (name, path) in enumerate(STORAGE.items()):
        tree |= device(path, "mlx5_core", i) | hca(name, path)
        tree |= net(f"ibs{i}", path, type_=32, speed="400000")
    ports = {f"{name} port 1": "infiniband" for name in [*COMPUTE, *STORAGE]}
    return Recorded(
        tree=tree,
        ips={
            "lo": ["127.0.0.1"],
            "eno1": ["10.0.0.4"],
            "ibs0": ["10.5.0.4"],
            "docker0": ["172.17.0.1"],
        },
        gpus=tuple(gpus),
        fabrics={**ports, "eno1": "ethernet", "docker0": None, "veth3f2a91c": None, "lo": None},
        addresses={"infiniband": ["10.0.0.4"], "ethernet": ["10.0.0.4"]},
        variables={
            "infiniband": {
                "NCCL_NET": "IB",
                "NCCL_IB_HCA": "=mlx5_0:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,"
                "mlx5_10:1",
                "NCCL_SOCKET_IFNAME": "=eno1",
            },
            "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"},
        },
        left_out={"mlx5_1 port 1", "mlx5_5 port 1"},
    )


# ---- RoCE on two bonds of two ports each ---------------------------------------------------------


def roce_bonds() -> Recorded:
    tree = LO | MANAGEMENT | default_route("eno1")
    for i in range(2):
        first, second = (
            f"pci0000:{i + 1}0/0000:{i + 1}0:01.0/0000:{i + 1}1:00.{f}" for f in (0, 1)
        )
        slaves = (f"ens{i}f0np0", f"ens{i}f1np1")
        tree |= device(first, "mlx5_core", i) | device(second, "mlx5_core", i)
        for on, slave in zip((first, second), slaves, strict=True):
            tree |= net(slave, on, speed="100000", master=f"bond{i}")
        tree |= net(f"bond{i}", kind="bond", speed="200000", lower=slaves)
        gids = roce_gids(f"10.{20 + i}.0.4", f"bond{i}")
        tree |= hca(f"mlx5_bond_{i}", first, layer="Ethernet", rate=ROCE_100, gids=gids)
    return Recorded(
        tree=tree,
        ips={"eno1": ["10.0.0.4"], "bond0": ["10.20.0.4"], "bond1": ["10.21.0.4"]},
        # The second functions have no RDMA device of their own: a bond has one.
        fabrics={
            "mlx5_bond_0 port 1": "roce",
            "mlx5_bond_1 port 1": "roce",
            "ens0f1np1": None,
            "ens1f1np1": None,
            "eno1": "ethernet",
            "lo": None,
        },
        addresses={"roce": ["10.20.0.4", "10.21.0.4"], "ethernet": ["10.0.0.4"]},
        variables={
            "roce": {
                "NCCL_NET": "IB",
                "NCCL_IB_HCA": "=mlx5_bond_0:1,mlx5_bond_1:1",
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_SOCKET_IFNAME": "=bond0",
            },
            "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"},
        },
    )


# ---- small hosts ---------------------------------------------------------------------------------

A, B, C, D = (f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus + 1}:00.0" for bus in (10, 20, 30, 40))


HOSTS: dict[str, Recorded] = {"dgx_infiniband": dgx(), "roce_bonds": roce_bonds()}

HOSTS["mixed_infiniband_and_roce"] = Recorded(
    tree=LO
    | device(A, "mlx5_core")
    | hca("mlx5_0", A, rate=IB_200)
    | net("ib0", A, type_=32, speed="200000")
    | roce_nic("mlx5_1", B, "ens2np0", "10.2.0.4")
    | default_route("ens2np0"),
    ips={"ib0": ["10.1.0.4"], "ens2np0": ["10.2.0.4", "10.2.0.200"]},
    fabrics={"mlx5_0 port 1": "infiniband", "mlx5_1 port 1": "roce", "lo": None},
    # The RoCE NIC is also the way to other clusters; the second address may move.
    addresses={"infiniband": ["10.1.0.4"], "roce": ["10.2.0.4"], "ethernet": ["10.2.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_SOCKET_IFNAME": "=ib0",
        },
        "roce": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_1:1",
            "NCCL_IB_GID_INDEX": "3",
            "NCCL_SOCKET_IFNAME": "=ens2np0",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=ens2np0"},
    },
)

HOSTS["down_ports"] = Recorded(
    tree=LO
    | MANAGEMENT
    | device(A, "mlx5_core")
    | hca("mlx5_0", A, state=INIT, rate=IB_200)
    | device(B, "mlx5_core")
    | hca("mlx5_1", B, state=DOWN, rate="10 Gb/sec (4X SDR)")
    | net("ib1", B, type_=32, state="down")
    | device(C, "mlx5_core")
    | net("ens3np0", C, state="down")
    | hca(
        "mlx5_2", C, layer="Ethernet", state=("1: DOWN", "3: Disabled"), rate="40 Gb/sec (4X QDR)"
    ),
    ips={"eno1": ["10.0.0.4"], "ens3np0": ["10.2.0.4"]},
    fabrics={
        "mlx5_0 port 1": None,
        "mlx5_1 port 1": None,
        "mlx5_2 port 1": None,
        "ib1": None,
        "ens3np0": None,
        "eno1": "ethernet",
        "lo": None,
    },
    addresses={"ethernet": ["10.0.0.4"]},
    variables={"ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"}},
)

HOSTS["some_ports_down"] = Recorded(
    tree=LO
    | MANAGEMENT
    | device(A, "mlx5_core")
    | hca("mlx5_0", A, rate=IB_200)
    | device(B, "mlx5_core")
    | hca("mlx5_1", B, state=DOWN, rate="10 Gb/sec (4X SDR)")
    | device(C, "mlx5_core")
    | hca("mlx5_2", C, rate="100 Gb/sec (2X HDR)"),  # half of its lanes
    ips={"eno1": ["10.0.0.4"]},
    fabrics={
        "mlx5_0 port 1": "infiniband",
        "mlx5_1 port 1": None,
        "mlx5_2 port 1": "infiniband",
        "eno1": "ethernet",
        "lo": None,
    },
    addresses={"infiniband": ["10.0.0.4"], "ethernet": ["10.0.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_SOCKET_IFNAME": "=eno1",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"},
    },
    left_out={"mlx5_2 port 1"},
)

VIRTIO = "pci0000:00/0000:00:03.0"
HOSTS["cloud_vm"] = Recorded(
    tree=LO
    | {f"/sys/devices/{VIRTIO}/numa_node": "-1"}
    | {f"/sys/devices/{VIRTIO}/virtio2/driver": Path("/sys/bus/drivers/virtio_net")}
    | net("eth0", f"{VIRTIO}/virtio2", speed="-1")
    | default_route("eth0"),
    ips={"lo": ["127.0.0.1"], "eth0": ["192.0.2.2", "fe80::fc:ff:fe00:1%eth0", "2001:db8::2"]},
    fabrics={"eth0": "ethernet", "lo": None},
    addresses={"ethernet": ["192.0.2.2"]},
    variables={"ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth0"}},
)

HOSTS["no_nic"] = Recorded(
    tree=LO
    | DOCKER
    | net("tun0", type_=65534, state="unknown", speed="10")
    | {"/sys/class/net/tun0/tun_flags": "0x1001"},
    ips={"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "tun0": ["10.8.0.2"]},
    fabrics={"lo": None, "docker0": None, "veth3f2a91c": None, "tun0": None},
)

HOSTS["container"] = Recorded(  # of Docker: a veth is all it has, and there is no infiniband
    tree=LO | net("eth0") | default_route("eth0"),
    ips={"eth0": ["172.17.0.2"]},
    fabrics={"eth0": "ethernet", "lo": None},
    addresses={"ethernet": ["172.17.0.2"]},
    variables={"ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth0"}},
)

HOSTS["ipoib"] = Recorded(  # with a partition, which has the address
    tree=LO
    | MANAGEMENT
    | default_route("eno1")
    | device(A, "mlx5_core")
    | hca("mlx5_0", A, rate=IB_200)
    | net("ib0", A, type_=32, speed="200000")
    | net("ib0.8001", A, type_=32, speed="200000"),
    ips={"eno1": ["10.0.0.4"], "ib0.8001": ["10.1.0.4"]},
    fabrics={"mlx5_0 port 1": "infiniband", "eno1": "ethernet", "lo": None},
    addresses={"infiniband": ["10.1.0.4"], "ethernet": ["10.0.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_SOCKET_IFNAME": "=ib0.8001",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"},
    },
)

HOSTS["ipoib_bond"] = Recorded(  # and no Ethernet at all
    tree=LO
    | device(A, "mlx5_core")
    | device(B, "mlx5_core")
    | hca("mlx5_0", A, rate=IB_200)
    | hca("mlx5_1", B, rate=IB_200)
    | net("ib0", A, type_=32, master="bond0")
    | net("ib1", B, type_=32, master="bond0")
    | net("bond0", type_=32, kind="bond", lower=("ib0", "ib1"))
    | default_route("bond0"),
    ips={"bond0": ["10.1.0.4"]},
    fabrics={"mlx5_0 port 1": "infiniband", "mlx5_1 port 1": "infiniband", "lo": None},
    addresses={"infiniband": ["10.1.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
            "NCCL_SOCKET_IFNAME": "=bond0",
        }
    },
)

HOSTS["virtual_functions"] = Recorded(  # for virtual machines, still on their host
    tree=LO
    | MANAGEMENT
    | device(A, "mlx5_core")
    | rdma_of(A, "mlx5_0")
    | hca("mlx5_0", A, rate=IB_200)
    | device(B, "mlx5_core")
    | hca("mlx5_1", B, rate=IB_200, physfn=A),
    ips={"eno1": ["10.0.0.4"]},
    fabrics={"mlx5_0 port 1": "infiniband", "mlx5_1 port 1": None, "eno1": "ethernet", "lo": None},
    addresses={"infiniband": ["10.0.0.4"], "ethernet": ["10.0.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_SOCKET_IFNAME": "=eno1",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"},
    },
)

HOSTS["dual_port"] = Recorded(  # one device, one port on each fabric
    tree=LO
    | device(A, "mlx4_core")
    | hca("mlx4_0", A, rate="56 Gb/sec (4X FDR)", port=1)
    | hca(
        "mlx4_0",
        A,
        layer="Ethernet",
        rate="40 Gb/sec (4X QDR)",
        port=2,
        gids=roce_gids("10.2.0.4", "ens4d1"),
    )
    | net("ib0", A, type_=32, speed="56000")
    | net("ens4d1", A, speed="40000", dev_port=1),
    ips={"ib0": ["10.1.0.4"], "ens4d1": ["10.2.0.4"]},
    fabrics={"mlx4_0 port 1": "infiniband", "mlx4_0 port 2": "roce", "lo": None},
    addresses={"infiniband": ["10.1.0.4"], "roce": ["10.2.0.4"], "ethernet": ["10.2.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx4_0:1",
            "NCCL_SOCKET_IFNAME": "=ib0",
        },
        "roce": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx4_0:2",
            "NCCL_IB_GID_INDEX": "3",
            "NCCL_SOCKET_IFNAME": "=ens4d1",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=ens4d1"},
    },
)

HOSTS["two_infiniband_ports"] = Recorded(  # of one device, with an interface each
    tree=LO
    | device(A, "mlx4_core")
    | hca("mlx4_0", A, rate="56 Gb/sec (4X FDR)", port=1)
    | hca("mlx4_0", A, rate="56 Gb/sec (4X FDR)", port=2)
    | net("ib0", A, type_=32, speed="56000")
    | net("ib1", A, type_=32, speed="56000", dev_port=1),
    ips={"ib0": ["10.1.0.4"], "ib1": ["10.2.0.4"]},
    fabrics={"mlx4_0 port 1": "infiniband", "mlx4_0 port 2": "infiniband", "lo": None},
    addresses={"infiniband": ["10.1.0.4", "10.2.0.4"]},
    variables={
        "infiniband": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx4_0:1,mlx4_0:2",
            "NCCL_SOCKET_IFNAME": "=ib0",
        },
    },
)

HOSTS["gid_indexes_differ"] = Recorded(
    tree=LO
    | MANAGEMENT
    | default_route("eno1")
    | roce_nic("mlx5_0", A, "ens1np0", "10.2.0.4")
    | roce_nic("mlx5_1", B, "ens2np0", "10.3.0.4", first=4),
    ips={"eno1": ["10.0.0.4"], "ens1np0": ["10.2.0.4"], "ens2np0": ["10.3.0.4"]},
    fabrics={"mlx5_0 port 1": "roce", "mlx5_1 port 1": "roce", "eno1": "ethernet", "lo": None},
    addresses={"roce": ["10.2.0.4", "10.3.0.4"], "ethernet": ["10.0.0.4"]},
    variables={
        "roce": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
            "NCCL_SOCKET_IFNAME": "=ens1np0",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eno1"},
    },
    problems=1,
)

HOSTS["gid_index_in_common"] = Recorded(  # a VLAN on the first NIC has made its table longer
    tree=LO
    | roce_nic("mlx5_0", A, "ens1np0", "10.2.0.4")
    | net("ens1np0.7", kind="vlan", lower=("ens1np0",), speed="100000")
    | {
        "/sys/class/infiniband/mlx5_0/ports/1/gids/5": mapped("10.7.0.4"),
        "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/5": "RoCE v2",
        "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/5": "ens1np0.7",
    }
    | roce_nic("mlx5_1", B, "ens2np0", "10.3.0.4", first=4),
    ips={"ens1np0": ["10.2.0.4"], "ens1np0.7": ["10.7.0.4"], "ens2np0": ["10.3.0.4"]},
    fabrics={"mlx5_0 port 1": "roce", "mlx5_1 port 1": "roce", "ens1np0.7": "ethernet", "lo": None},
    # No default route: all that are equally fast.
    addresses={"roce": ["10.2.0.4", "10.3.0.4"], "ethernet": ["10.2.0.4", "10.3.0.4", "10.7.0.4"]},
    variables={
        "roce": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
            "NCCL_IB_GID_INDEX": "5",
            "NCCL_SOCKET_IFNAME": "=ens1np0",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=ens1np0,ens2np0,ens1np0.7"},
    },
)

HOSTS["pod_with_shared_rdma"] = Recorded(  # the table of GIDs names interfaces of the host, too
    tree=LO
    | net("eth0")
    | net("net1", kind="macvlan", speed="100000")
    | default_route("eth0")
    | device(A, "mlx5_core")
    | hca(
        "mlx5_0",
        A,
        layer="Ethernet",
        rate=ROCE_100,
        gids=roce_gids("10.9.0.1", "ens1np0") | {7: (mapped("10.9.0.77"), "RoCE v2", "net1")},
    ),
    ips={"eth0": ["10.244.1.7"], "net1": ["10.9.0.77"]},
    fabrics={"mlx5_0 port 1": "roce", "eth0": "ethernet", "lo": None},
    addresses={"roce": ["10.9.0.77"], "ethernet": ["10.244.1.7"]},
    variables={
        "roce": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_IB_GID_INDEX": "7",
            "NCCL_SOCKET_IFNAME": "=net1",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth0"},
    },
)

NETVSC = "LNXSYSTM:00/VMBUS:01/000d3a00-0000-0000-0000-000d3a000000"
HOSTS["accelerated_vm"] = Recorded(  # Hyper-V: a virtual function is part of the synthetic NIC
    tree=LO
    | {f"/sys/devices/{NETVSC}/driver": Path("/sys/bus/drivers/hv_netvsc")}
    | net("eth0", NETVSC, speed="50000", lower=("enP1s1",))
    | device(A, "mlx5_core")
    | net("enP1s1", A, speed="50000", master="eth0")
    | hca(
        "mlx5_0",
        A,
        layer="Ethernet",
        rate="50 Gb/sec (2X EDR)",
        gids={0: (LINK_LOCAL, "IB/RoCE v1", "enP1s1"), 1: (LINK_LOCAL, "RoCE v2", "enP1s1")},
    )
    | default_route("eth0"),
    ips={"eth0": ["10.0.0.4"]},
    fabrics={"mlx5_0 port 1": "roce", "lo": None},
    addresses={"roce": ["10.0.0.4"], "ethernet": ["10.0.0.4"]},
    variables={
        "roce": {
            "NCCL_NET": "IB",
            "NCCL_IB_HCA": "=mlx5_0:1",
            "NCCL_IB_GID_INDEX": "1",
            "NCCL_SOCKET_IFNAME": "=eth0",
        },
        "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth0"},
    },
)

HOSTS["efa_and_iwarp"] = Recorded(  # RDMA of other kinds, and a NIC that only reaches the BMC
    tree=LO
    | device(A, "efa")
    | hca("rdmap0s6", A, layer="Unspecified", node_type="7: <unknown>", rate=ROCE_100)
    | device(B, "irdma")
    | net("ens2", B)
    | hca(
        "irdma0",
        B,
        layer="Ethernet",
        node_type="4: RNIC",
        gids={0: (LINK_LOCAL, "IB/RoCE v1", "ens2")},
    )
    | device(C, "rndis_host")
    | net("usb0", C, speed="425", state="unknown"),
    ips={"ens2": ["10.0.0.4"], "usb0": ["169.254.3.1"]},
    fabrics={
        "rdmap0s6 port 1": None,
        "irdma0 port 1": None,
        "ens2": "ethernet",
        "usb0": "ethernet",
        "lo": None,
    },
    addresses={"ethernet": ["10.0.0.4"]},
    variables={"ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=ens2"}},
)
