"""The topology file as people write it: its keys, and the catalogue behind it.

A file of ten lines describes a whole topology, because a device or a NIC is named by its `kind` in
the catalogue and equal nodes are counted. `file_checks` has what must hold between
entries, and `loading` makes machines of them.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from holmesjax import units
from holmesjax.errors import HolmesError, TopologyError
from holmesjax.files import schema
from holmesjax.files.yaml_files import Document
from holmesjax.topology.calibration import Calibration
from holmesjax.topology.fabrics import ClusterFabric, DeviceFabric, Network


def _quantity(unit: units.Unit) -> BeforeValidator:
    return BeforeValidator(functools.partial(units.parse, unit=unit))


def _one_way_s(text: object) -> float:
    """Parses seconds; an error says that a latency is half of a round trip."""
    try:
        return units.parse(text, "s")
    except HolmesError as error:
        fix = f"{error.fix}; one way, which is half of a round trip"
        raise HolmesError(error.where, error.problem, found=error.found, fix=fix) from None


Name = Annotated[str, Field(min_length=1, strict=True)]
Count = Annotated[int, Field(ge=1, le=10_000, strict=True)]
Size = Annotated[float, _quantity("B"), Field(gt=0)]
NetworkRate = Annotated[float, _quantity("b/s"), Field(gt=0)]
MemoryRate = Annotated[float, _quantity("B/s"), Field(gt=0)]
Speed = Annotated[float, _quantity("FLOP/s"), Field(gt=0)]
Rent = Annotated[float, _quantity("$/h")]
Egress = Annotated[float, _quantity("$/GB")]
Latency = Annotated[float, _quantity("s")]
OneWayLatency = Annotated[float, BeforeValidator(_one_way_s)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakEntry:
    """Dense, by dtype."""

    float32: Speed | None = None
    tf32: Speed | None = None
    float16: Speed | None = None
    bfloat16: Speed | None = None
    float8: Speed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLinkEntry:
    """The link from one device to the others of its node, one way."""

    fabric: DeviceFabric
    bandwidth: MemoryRate
    latency: Latency


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesEntry:
    """Equal devices of a node: a kind of the catalogue, with whatever differs from it."""

    kind: Name
    count: Count
    peak_flop_per_s: PeakEntry = PeakEntry()
    memory: Size | None = None
    memory_bandwidth: MemoryRate | None = None
    link: DeviceLinkEntry | None = None
    calibration: Name | Calibration | None = None  # a file, the name of a shipped one, or a section
    price: Rent | None = None  # of each device, with its share of the node


@dataclass(frozen=True, kw_only=True, slots=True)
class NicEntry:
    """Equal NICs of a node: a kind of the catalogue, with whatever differs from it."""

    kind: Name
    count: Count = 1
    fabric: Network | None = None
    rate: NetworkRate | None = None
    latency: Latency | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEntry:
    """One node of a cluster with unequal nodes; what it leaves out is the cluster's."""

    name: Name
    devices: DevicesEntry | None = None
    nics: tuple[NicEntry, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterEntry:
    """Nodes joined by one fabric; `local` is a single node."""

    name: Name
    fabric: ClusterFabric
    nodes: Count | tuple[NodeEntry, ...]
    devices: DevicesEntry | None = None  # of each node
    nics: tuple[NicEntry, ...] | None = None  # of each node


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEntry:
    """Between two clusters: both ways, unless another entry names them in the other order."""

    between: tuple[Name, ...]
    fabric: Network
    bandwidth: NetworkRate  # of each node, one way
    latency: OneWayLatency
    egress: Egress = 0.0  # price of what is sent
    capacity: NetworkRate | None = None  # of all nodes together, one way; none: no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class UplinkEntry:
    """A capacity that links share: both ways, unless an entry names all in the other order."""

    pairs: tuple[tuple[Name, ...], ...]  # of clusters, the sender first
    capacity: NetworkRate  # of all nodes and pairs together, one way


@dataclass(frozen=True, kw_only=True, slots=True)
class PairEntry:
    """A measurement from one node, the sender, to another."""

    between: tuple[Name, ...]
    fabric: Network
    bandwidth: NetworkRate
    latency: OneWayLatency


CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveEntry:
    """One over nodes of a cluster."""

    cluster: Name
    nodes: Count  # of a group; as many groups as the cluster has ran at once
    kind: CollectiveKind
    size: Size  # of the array that each node holds before it is scattered or when it is gathered
    bandwidth: NetworkRate  # that each node sends at, in a ring


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportEntry:
    """The speed at which one process of a cluster sends boundaries to another one."""

    cluster: Name
    bandwidth: NetworkRate


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityEntry:
    """The rate at which all nodes of one cluster send to those of another together."""

    between: tuple[Name, ...]
    capacity: NetworkRate


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredEntry:
    """Measurements of `launch probe`."""

    date: Name
    pairs: tuple[PairEntry, ...] = ()
    collectives: tuple[CollectiveEntry, ...] = ()
    transports: tuple[TransportEntry, ...] = ()
    capacities: tuple[CapacityEntry, ...] = ()
    uplinks: tuple[UplinkEntry, ...] = ()  # each for one direction


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyEntry:
    """The file."""

    name: Name
    clusters: tuple[ClusterEntry, ...]
    links: tuple[LinkEntry, ...] = ()
    uplinks: tuple[UplinkEntry, ...] = ()
    measured: MeasuredEntry | None = None


def nodes_of(cluster: ClusterEntry) -> list[NodeEntry]:
    """Every node of a cluster with a name; counted nodes are called `<cluster>-<i>`."""
    if isinstance(cluster.nodes, int):
        return [NodeEntry(name=f"{cluster.name}-{i}") for i in range(cluster.nodes)]
    return list(cluster.nodes)


def filled(entry: Any, kinds: dict[str, dict[str, Any]]) -> Any:
    """A `DevicesEntry` or `NicEntry` with what it leaves out taken from the catalogue.

    >>> from holmesjax.topology import catalogue
    >>> filled(NicEntry(kind="roce_100", count=4), catalogue.NICS).rate
    12500000000.0
    """
    if entry.kind not in kinds or not missing_values(entry, isinstance(entry, DevicesEntry)):
        return entry
    values = {"kind": entry.kind, "count": entry.count, **kinds[entry.kind]}
    document = Document(file="holmesjax/topology/catalogue.py", error=TopologyError, values=values)
    known, mistakes = schema.read(type(entry), document)
    assert not mistakes, mistakes
    return _merged(entry, schema.build(known))


def _merged(entry: Any, kind: Any) -> Any:
    """`entry`, with the values of `kind` where it has none; peaks dtype by dtype."""
    if entry is None or not isinstance(entry, NicEntry | DevicesEntry | PeakEntry):
        return kind if entry is None else entry
    names = [field.name for field in dataclasses.fields(entry)]
    values = {name: _merged(getattr(entry, name), getattr(kind, name)) for name in names}
    return type(entry)(**values)


def missing_values(entry: Any, is_device: bool) -> list[str]:
    """Keys that an entry still needs to be complete, with the peaks of the dtypes we compute in."""
    if not is_device:
        return [name for name in ("fabric", "rate", "latency") if getattr(entry, name) is None]
    names = ("memory", "memory_bandwidth", "link")
    peaks = entry.peak_flop_per_s
    missing = [dtype for dtype in ("float32", "bfloat16") if getattr(peaks, dtype) is None]
    gaps = [name for name in names if getattr(entry, name) is None]
    return [*gaps, *(f"peak_flop_per_s.{dtype}" for dtype in missing)]
