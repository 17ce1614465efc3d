"""Files and links of /sys and /proc, as the kernel shows them, as small as they can be."""

import os
from pathlib import Path

from holmesjax.hosts.hardware import Gpu

EINVAL = None  # as a file that is there and cannot be read
Tree = dict[str, "str | Path | None"]  # a Path is the target of a link

IB_400, IB_200 = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"
ROCE_100, ROCE_400 = "100 Gb/sec (4X EDR)", "400 Gb/sec (4X NDR)"
UP, INIT, DOWN = ("4: ACTIVE", "5: LinkUp"), ("2: INIT", "5: LinkUp"), ("1: DOWN", "2: Polling")
ZERO = ":".join(["0000"] * 8)


def materialise(tree: Tree, root: Path) -> Path:
    """Writes the files; a file that cannot be read is a folder, which cannot be read either."""
    for name, content in tree.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is EINVAL:
            path.mkdir()
        elif isinstance(content, Path):
            target = root / str(content).lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            path.symlink_to(os.path.relpath(target, path.parent))
        else:
            path.write_text(f"{content}\n")
    (root / "sys/class/net").mkdir(parents=True, exist_ok=True)
    return root


def device(path: str, driver: str, numa: int = 0) -> Tree:
    """A device, by its path below /sys/devices."""
    return {
        f"/sys/devices/{path}/numa_node": str(numa),
        f"/sys/devices/{path}/driver": Path(f"/sys/bus/drivers/{driver}"),
    }


def net(
    name: str,
    on: str | None = None,
    *,
    speed: str | None = "10000",
    state: str = "up",
    type_: int = 1,
    kind: str = "",
    master: str = "",
    lower: tuple[str, ...] = (),
    dev_port: int = 0,
) -> Tree:
    """An interface on a device, or virtual; when it is down its speed and carrier are EINVAL."""
    folder = f"/sys/class/net/{name}"
    is_down = state == "down"
    tree: Tree = {
        f"{folder}/type": str(type_),
        f"{folder}/operstate": state,
        f"{folder}/carrier": EINVAL if is_down else "1",
        f"{folder}/speed": EINVAL if is_down else speed,
        f"{folder}/mtu": "1500",
        f"{folder}/dev_port": str(dev_port),
        f"{folder}/uevent": f"DEVTYPE={kind}\nINTERFACE={name}" if kind else f"INTERFACE={name}",
    }
    if on:
        tree[f"{folder}/device"] = Path(f"/sys/devices/{on}")
    if master:
        tree[f"{folder}/master"] = Path(f"/sys/class/net/{master}")
    if kind == "bond":
        tree[f"{folder}/bonding/slaves"] = " ".join(lower)
    for other in lower:
        tree[f"{folder}/lower_{other}"] = Path(f"/sys/class/net/{other}")
    return tree


def hca(
    name: str,
    on: str,
    *,
    layer: str = "InfiniBand",
    state: tuple[str, str] = UP,
    rate: str = IB_400,
    gids: dict[int, tuple[str, str, str]] | None = None,
    port: int = 1,
    node_type: str = "1: CA",
    physfn: str = "",
) -> Tree:
    """An RDMA device with a port; its GIDs are (address, type, interface) by index."""
    folder = f"/sys/class/infiniband/{name}"
    here = f"{folder}/ports/{port}"
    tree: Tree = {
        f"{folder}/device": Path(f"/sys/devices/{on}"),
        f"{folder}/node_type": node_type,
        f"{here}/link_layer": layer,
        f"{here}/state": state[0],
        f"{here}/phys_state": state[1],
        f"{here}/rate": rate,
        f"{here}/lid": "0x11" if layer == "InfiniBand" else "0x0",
        # The place after the last one is empty, and its attributes are EINVAL.
        f"{here}/gids/250": ZERO,
        f"{here}/gid_attrs/types/250": EINVAL,
        f"{here}/gid_attrs/ndevs/250": EINVAL,
    }
    if layer == "InfiniBand":
        gids = {0: ("fe80:0000:0000:0000:a088:c203:0012:3456", "IB/RoCE v1", "")}
    for index, (address, kind, interface) in (gids or {}).items():
        tree[f"{here}/gids/{index}"] = address
        tree[f"{here}/gid_attrs/types/{index}"] = kind
        tree[f"{here}/gid_attrs/ndevs/{index}"] = interface or EINVAL
    if physfn:
        tree[f"/sys/devices/{on}/physfn"] = Path(f"/sys/devices/{physfn}")
    return tree


def rdma_of(on: str, name: str) -> Tree:
    """The files of a PCI device about its own RDMA device."""
    return {f"/sys/devices/{on}/infiniband/{name}/node_guid": "a088:c203:0012:3456"}


def verbs(number: int, of: str, *, is_here: bool) -> Tree:
    """The file of an RDMA device in /dev, which a container of others lacks, and its place."""
    about: Tree = {f"/sys/class/infiniband_verbs/uverbs{number}/ibdev": of}
    return about | ({f"/dev/infiniband/uverbs{number}": ""} if is_here else {})


def mapped(ipv4: str) -> str:
    """An IPv4 address as a GID."""
    a, b, c, d = map(int, ipv4.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


LINK_LOCAL = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"


def roce_gids(ipv4: str, interface: str, first: int = 2) -> dict[int, tuple[str, str, str]]:
    """The table as the kernel fills it: link-local, then IPv4, each in both versions."""
    return {
        0: (LINK_LOCAL, "IB/RoCE v1", interface),
        1: (LINK_LOCAL, "RoCE v2", interface),
        first: (mapped(ipv4), "IB/RoCE v1", interface),
        first + 1: (mapped(ipv4), "RoCE v2", interface),
    }


def default_route(interface: str, metric: int = 100) -> Tree:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    rows = (
        f"{interface}\t0000000A\t00000000\t0001\t0\t0\t{metric}\t0000FFFF\t0\t0\t0",
        f"{interface}\t00000000\t0100000A\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0",
    )
    return {"/proc/net/route": "\n".join([head, *rows])}


def gpu(index: int, path: str, numa: int = 0) -> Gpu:
    return Gpu(
        index=index,
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * 2**30,
        driver="570.86.15",
        compute_capability="9.0",
        pci=tuple(path.split("/")),
        numa_node=numa,
    )


def roce_nic(name: str, on: str, interface: str, ipv4: str, first: int = 2) -> Tree:
    return (
        device(on, "mlx5_core")
        | net(interface, on, speed="100000")
        | hca(name, on, layer="Ethernet", rate=ROCE_100, gids=roce_gids(ipv4, interface, first))
    )
