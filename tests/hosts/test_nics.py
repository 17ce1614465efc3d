"""NICs of recorded hosts against what an administrator would say of them."""

import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.errors import HolmesError
from holmesjax.hosts import hardware, nics
from holmesjax.hosts.nics import OTHER_SOCKET, SAME_NUMA, SAME_ROOT, SAME_SWITCH, discover
from holmesjax.topology.fabrics import rdma_networks
from tests import host_files, recorded_hosts
from tests.cases import cases
from tests.host_files import materialise
from tests.recorded_hosts import HOSTS, Recorded


def found(recorded: Recorded, root):
    materialise(recorded.tree, root)
    return discover(root, addresses=recorded.ips, gpus=recorded.gpus)


@pytest.fixture(params=HOSTS)
def recorded(request):
    return HOSTS[request.param]


@pytest.fixture
def host(recorded, tmp_path):
    return found(recorded, tmp_path)


def nic(host, name):
    [only] = [nic for nic in host.nics if nic.name == name]
    return only


def test_every_nic_is_on_the_right_fabric_and_says_why(recorded, host):
    assert {nic.name: nic.fabric for nic in host.nics} == recorded.fabrics
    assert len(host.nics) == len(recorded.fabrics)
    assert all(nic.reason for nic in host.nics)


def test_addresses_of_each_fabric(recorded, host):
    assert nics.addresses(host) == {"local": ["127.0.0.1"], **recorded.addresses}


def test_ports_for_collectives(recorded, host):
    left_out = {name for fabric in rdma_networks() for name in nics.rdma_nics(host, fabric)[1]}
    assert left_out == recorded.left_out


@cases(
    "name, sentence",
    [
        ("mixed_infiniband_and_roce", "mlx5_0 port 1: link layer InfiniBand, 200 Gb/s, active"),
        (
            "mixed_infiniband_and_roce",
            "mlx5_1 port 1: link layer Ethernet, 100 Gb/s, active; GID 3 is RoCE v2 of 10.2.0.4 "
            "on ens2np0",
        ),
        (
            "down_ports",
            "mlx5_0 port 1: link layer InfiniBand, but no subnet manager has configured it "
            "(state INIT)",
        ),
        ("down_ports", "mlx5_1 port 1: link layer InfiniBand, but down (state DOWN, Polling)"),
        ("down_ports", "ens3np0: Ethernet, down (operstate down)"),
        ("roce_bonds", "ens0f1np1: part of bond0"),
        ("container", "eth0: Ethernet, 10 Gb/s, up, virtual, default route"),
        ("no_nic", "tun0: virtual (tun), and no default route leaves through it"),
        ("cloud_vm", "eth0: Ethernet, speed unknown, up, default route"),
        (
            "virtual_functions",
            "mlx5_1 port 1: link layer InfiniBand, a virtual function of mlx5_0, which is here",
        ),
        (
            "efa_and_iwarp",
            "rdmap0s6 port 1: link layer Unspecified, which is neither InfiniBand nor RoCE",
        ),
        (
            "efa_and_iwarp",
            "usb0: Ethernet, 425 Mb/s, up, no address that other hosts reach",
        ),
    ],
)
def test_reasons(name, sentence, tmp_path):
    assert sentence in map(str, found(HOSTS[name], tmp_path).nics)


def pod(*, layer: str, files: bool) -> host_files.Tree:
    """A pod with a virtual function, which shares the RDMA of its host, or that host itself."""
    own, other, function = (f"pci0000:00/0000:00:0{n}.0" for n in (1, 2, 3))
    gids = lambda ip, net: host_files.roce_gids(ip, net) if layer == "Ethernet" else None
    tree = recorded_hosts.LO | host_files.net("eth0") | host_files.default_route("eth0")
    tree |= host_files.rdma_of(own, "mlx5_0")
    rows = [("mlx5_0", own, "10.2.0.1", "ens1", ""), ("mlx5_1", other, "10.2.0.8", "net1", own)]
    for name, on, ip, net, physfn in [*rows, ("mlx5_2", function, "10.2.0.9", "net1", own)]:
        tree |= host_files.hca(name, on, layer=layer, gids=gids(ip, net), physfn=physfn)
        number, is_here = int(name[-1]), not files or name == "mlx5_2"
        tree |= host_files.verbs(number, name, is_here=is_here)
    names = ["net1"] if files else ["ens1"]
    for name in names if layer == "Ethernet" else []:
        tree |= host_files.net(name, function if files else own)
    return tree


@pytest.mark.parametrize("layer, fabric", [("InfiniBand", "infiniband"), ("Ethernet", "roce")])
def test_a_pod_has_the_devices_of_its_own_and_its_host_all(tmp_path, layer, fabric):
    """The kernel shows a pod all devices of its host, unless it is told to part them."""
    for files, name, ip in ((True, "mlx5_2", "10.2.0.9"), (False, "mlx5_0", "10.2.0.1")):
        root = materialise(pod(layer=layer, files=files), tmp_path / str(files))
        host = discover(root, addresses={"eth0": ["10.0.0.4"], "net1": [ip], "ens1": [ip]}, gpus=())
        rdma = {nic.name: nic for nic in host.nics if nic.port}
        assert [name for name, nic in rdma.items() if nic.fabric] == [f"{name} port 1"]
        assert rdma[f"{name} port 1"].fabric == fabric
        assert ("not in the /dev/infiniband" in rdma["mlx5_1 port 1"].reason) == files
        if fabric == "roce":
            assert nics.addresses(host)["roce"] == [ip]


def test_a_gid_is_of_the_interface_that_has_its_address(tmp_path):
    """Pods that share one device have interfaces of one name, and its table has those of all."""
    gids = host_files.roce_gids("10.9.0.1", "ens1np0")
    for index, ip in enumerate(("10.9.0.76", "10.9.0.77", "10.9.0.78"), 7):
        gids[index] = (host_files.mapped(ip), "RoCE v2", "net1")
    on = "pci0000:00/0000:00:01.0"
    tree = recorded_hosts.LO | host_files.net("net1", kind="macvlan")
    tree |= host_files.hca("mlx5_0", on, layer="Ethernet", gids=gids)
    root = materialise(tree, tmp_path)
    host = discover(root, addresses={"net1": ["10.9.0.77"]}, gpus=())
    assert [gid.index for gid in nic(host, "mlx5_0 port 1").gids] == [8]
    unknown = discover(root, addresses={}, gpus=())
    assert [gid.index for gid in nic(unknown, "mlx5_0 port 1").gids] == [7, 8, 9]


def test_facts_of_interfaces_and_ports(tmp_path):
    host = found(HOSTS["dgx_infiniband"], tmp_path)
    port = nic(host, "mlx5_10 port 1").port
    assert port.rate_bytes_per_s == 50e9
    assert port.pci[0] == "pci0000:e5"
    assert (port.numa_node, port.lid, port.link_layer) == (1, "0x11", "InfiniBand")
    [management] = [i for i in host.interfaces if i.name == "eno1"]
    assert management.speed_bytes_per_s == 1.25e9
    assert (management.driver, management.mtu_bytes, management.numa_node) == ("ixgbe", 1500, 0)
    [docker] = [i for i in host.interfaces if i.name == "docker0"]
    assert docker.speed_bytes_per_s is None
    assert docker.is_virtual
    vm = found(HOSTS["cloud_vm"], tmp_path / "vm")
    [eth0] = [i for i in vm.interfaces if i.name == "eth0"]
    assert (eth0.pci, eth0.numa_node) == (("pci0000:00", "0000:00:03.0"), None)
    assert eth0.ipv6 == ("fe80::fc:ff:fe00:1%eth0", "2001:db8::2")


@pytest.mark.parametrize(
    "state, carrier, is_up",
    [
        ("up", "1", True),
        ("unknown", "1", True),  # of drivers that never say "up"
        ("unknown", "0", False),
        ("dormant", "1", False),
        ("lowerlayerdown", "0", False),
        ("down", host_files.EINVAL, False),
    ],
)
def test_an_interface_is_up(state, carrier, is_up, tmp_path):
    tree = host_files.net("eth0", recorded_hosts.A, state=state) | {
        "/sys/class/net/eth0/carrier": carrier
    }
    materialise(tree, tmp_path)
    [eth0] = hardware.interfaces(tmp_path, {})
    assert eth0.is_up == is_up


def test_each_gpu_of_a_dgx_has_its_nic(tmp_path):
    host = found(HOSTS["dgx_infiniband"], tmp_path)
    for i, name in enumerate(recorded_hosts.COMPUTE):
        distances = nic(host, f"{name} port 1").distances
        assert [j for j, far in enumerate(distances) if far == SAME_SWITCH] == [i]
    assert nic(host, "mlx5_1 port 1").distances == (SAME_NUMA,) * 4 + (OTHER_SOCKET,) * 4


def test_default_routes_come_by_metric(tmp_path):
    routes = [
        host_files.default_route(name, m)["/proc/net/route"] for name, m in (("b", 200), ("a", 20))
    ]
    text = "\n".join([*routes[0].splitlines(), *routes[1].splitlines()[1:]])
    materialise({"/proc/net/route": text}, tmp_path)
    assert hardware.default_routes(tmp_path) == ["a", "b"]


# ---- the nearer, the longer the common path ------------------------------------------------------

BRIDGES = st.lists(
    st.sampled_from(["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]), min_size=1, max_size=4
)
PATHS = st.tuples(st.sampled_from(["pci0000:00", "pci0000:80"]), BRIDGES).map(
    lambda p: (p[0], *p[1])
)
NODES = st.sampled_from([0, 1, None])


@given(PATHS, NODES, PATHS, NODES)
def test_distance_is_symmetric_and_follows_the_tree(a, node_a, b, node_b):
    far = nics.distance(a, node_a, b, node_b)
    assert far == nics.distance(b, node_b, a, node_a)
    assert (far in (SAME_SWITCH, SAME_ROOT)) == (a[0] == b[0])
    assert (far == SAME_SWITCH) == (a[:2] == b[:2])
    if a[0] != b[0] and None not in (node_a, node_b):
        assert far == (SAME_NUMA if node_a == node_b else OTHER_SOCKET)


PORTS = st.lists(
    st.tuples(
        st.sampled_from(["InfiniBand", "Ethernet"]),
        st.sampled_from([host_files.UP, host_files.INIT, host_files.DOWN]),
        st.sampled_from([host_files.IB_400, host_files.IB_200]),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(PORTS)
def test_only_active_ports_of_the_link_layer_at_the_highest_rate(tmp_path_factory, ports):
    tree = dict(recorded_hosts.LO)
    for i, (layer, state, rate) in enumerate(ports):
        on = f"pci0000:{i:02x}/0000:{i:02x}:00.0"
        gids = host_files.roce_gids(f"10.{i}.0.4", f"ens{i}")
        tree |= host_files.hca(f"mlx5_{i}", on, layer=layer, state=state, rate=rate, gids=gids)
        tree |= host_files.net(f"ens{i}", on, type_=32 if layer == "InfiniBand" else 1)
    root = materialise(tree, tmp_path_factory.mktemp("host"))
    host = discover(root, addresses={}, gpus=())
    for fabric, layer in (("infiniband", "InfiniBand"), ("roce", "Ethernet")):
        active = [(i, p[2]) for i, p in enumerate(ports) if p[0] == layer and p[1] == host_files.UP]
        best = (
            host_files.IB_400 if host_files.IB_400 in dict(active).values() else host_files.IB_200
        )
        chosen, left_out = nics.rdma_nics(host, fabric)
        assert [nic.name for nic in chosen] == [f"mlx5_{i} port 1" for i, r in active if r == best]
        assert set(left_out) == {f"mlx5_{i} port 1" for i, r in active if r != best}


# ---- what is not there, or not readable ----------------------------------------------------------


def test_a_machine_without_sys_is_told_what_to_do(tmp_path):
    with pytest.raises(HolmesError, match="HOLMES_ADDRESSES") as error:
        discover(tmp_path, addresses={}, gpus=())
    assert "sys/class/net" in error.value.where


@pytest.mark.parametrize("path", [p for p in HOSTS["roce_bonds"].tree if "/class/" in p])
def test_any_file_may_be_unreadable(path, tmp_path):
    recorded = HOSTS["roce_bonds"]
    materialise({**recorded.tree, path: host_files.EINVAL}, tmp_path)
    assert discover(tmp_path, addresses=recorded.ips, gpus=()).nics


def test_this_host(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    host = discover()
    assert host.gpus == ()
    assert "lo" in {interface.name for interface in host.interfaces}
    assert "127.0.0.1" in hardware.kernel_addresses()["lo"]


class FakeNvml(types.ModuleType):
    """Two GPUs, of which the second has fallen off its bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, has_driver=True):
        super().__init__("pynvml")
        self.has_driver = has_driver

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError

    def nvmlShutdown(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return "570.86.15"

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index == 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId="00000000:1B:00.0")

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return [9, 0]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=80 * 2**30)


def test_gpus_come_from_the_driver_and_have_a_place(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    path = "pci0000:15/0000:15:01.0/0000:1b:00.0"
    place = {"/sys/bus/pci/devices/0000:1b:00.0": Path(f"/sys/devices/{path}")}
    materialise(host_files.device(path, "nvidia", 1) | place, tmp_path)
    [gpu] = hardware.gpus(tmp_path)
    assert gpu == hardware.Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * 2**30,
        driver="570.86.15",
        compute_capability="9.0",
        pci=tuple(path.split("/")),
        numa_node=1,
    )


def test_without_a_driver_there_are_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    assert hardware.gpus(tmp_path) == ()
