"""Questions of `launch doctor` and `launch probe` to agents, and answers, as records. No JAX.

An agent answers a question with the record that the question names, or with `NoAnswer` and the
reason. `transport.records` turns a record into a message and back.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from holmesjax.topology.file import CollectiveKind
from holmesjax.transport.records import Endpoint, Record, by_kind

MAX_ARRAY_BYTES = 2**30  # that an agent holds memory for
MAX_STREAMS, MAX_ROUNDS = 1024, 1000

A = TypeVar("A", bound=Record, covariant=True)
ArrayBytes = Annotated[int, Field(ge=1, le=MAX_ARRAY_BYTES)]
Rounds = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
Book = dict[str, list[Endpoint]]  # fabric -> address and port of each NIC


# ---- hellos --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AgentHello(Record):
    """An agent, to the launcher's end or to another agent."""

    kind = "agent"
    process: int  # its number among the nodes of the topology


@dataclass(frozen=True, kw_only=True)
class AskerHello(Record):
    """The launcher's end, which asks."""

    kind = "asker"


# ---- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoAnswer(Record):
    """The reason why a question has no answer."""

    kind = "no answer"
    problem: str
    found: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.found}"


@dataclass(frozen=True, kw_only=True)
class NicFacts(Record):
    """A NIC, and whether it can be used."""

    kind = "nic"
    name: str
    fabric: str | None  # None: it cannot be used
    reason: str
    rate_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class FolderFacts(Record):
    """The run folder, as a node sees it."""

    kind = "folder"
    problem: str | None = None  # why it cannot be written to
    is_shared: bool = False  # whether it is the folder of the launcher's end
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeFacts(Record):
    """The facts of a node."""

    kind = "facts"
    now_s: float  # of its clock
    host: str
    resolves_to: str | None  # the address that its own name leads to
    python: str
    packages: dict[str, str | None]  # versions; None: not installed
    source: str  # digest of the package's Python files
    folder: FolderFacts
    max_open_files: int | None  # None: no limit
    max_locked_bytes: int | None  # None: no limit
    # The most that one TCP connection may have on its way; None: the system does not say.
    max_window_bytes: int | None
    gpus: list[str]
    drivers: list[str]
    nics: list[NicFacts]
    mtu_bytes: dict[str, list[int]]  # by fabric
    addresses: dict[str, list[str]]  # by fabric
    twins: list[str]  # NICs that share a subnet with others, and carry their traffic or none
    loses_memory: bool  # whether /dev/shm loses what this user has when the last session ends


@dataclass(frozen=True, kw_only=True)
class KernelFacts(Record):
    """The verdict of a check of the attention kernels."""

    kind = "kernels"
    problem: str | None  # None: they have passed, or there is none to check
    text: str
    has_ended: bool = True  # False: the check ran out of time

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class FreePort(Record):
    """A port on which the node can listen."""

    kind = "port"
    port: int


@dataclass(frozen=True, kw_only=True)
class Listening(Record):
    """The addresses at which the node listens from now on."""

    kind = "listening"
    book: Book


@dataclass(frozen=True, kw_only=True)
class ReachTimes(Record):
    """For each path the seconds until it was open, or the reason why it is shut."""

    kind = "reach times"
    seconds: list[float | str]


@dataclass(frozen=True, kw_only=True)
class SendTimes(Record):
    """The seconds of each round: of a message there and back, then of each size."""

    kind = "send times"
    seconds: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Joined(Record):
    """The node is in the JAX job of its cluster."""

    kind = "joined"


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes(Record):
    """The seconds of each round of a collective."""

    kind = "collective times"
    seconds: list[float]


# ---- questions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Question(Record, Generic[A]):
    """A question that an agent answers with one kind of record."""

    answer: ClassVar[type[Record]]


@dataclass(frozen=True, kw_only=True)
class NicPath(Record):
    """A path from a NIC here to a port there."""

    kind = "path"
    source: str  # an address of the node
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Inspect(Question[NodeFacts]):
    """Asks for the facts of the node: versions, clock, folder, limits, NICs, GPUs."""

    kind, answer = "inspect", NodeFacts
    folder: str
    marker: str  # name of a file that only the folder of the launcher's end has


@dataclass(frozen=True, kw_only=True)
class CheckKernels(Question[KernelFacts]):
    """Do the attention kernels compute what plain JAX does? May take minutes, once."""

    kind, answer = "check kernels", KernelFacts
    asked: dict[str, Any]  # `kernel_check.asked_of` a run


@dataclass(frozen=True, kw_only=True)
class Bind(Question[FreePort]):
    """Can this port be listened on? Port 0: which one is free?"""

    kind, answer = "bind", FreePort
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Open(Question[Listening]):
    """Listens on every address of the node."""

    kind, answer = "open", Listening


@dataclass(frozen=True, kw_only=True)
class Reach(Question[ReachTimes]):
    """Connects over all paths at once."""

    kind, answer = "reach", ReachTimes
    paths: list[NicPath]
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Send(Question[SendTimes]):
    """Sends bytes to another node, as boundaries are sent, over all paths at once."""

    kind, answer = "send", SendTimes
    paths: Annotated[list[NicPath], Field(min_length=1, max_length=MAX_STREAMS)]
    sizes_bytes: list[ArrayBytes]
    rounds: Rounds
    window_bytes: Annotated[int, Field(ge=0)]  # that each connection should have on their way
    timeout_s: float  # for a connection
    limit_s: float  # sizes after one that takes this much longer than a message are left out


@dataclass(frozen=True, kw_only=True)
class Join(Question[Joined]):
    """Joins the JAX job of its cluster: the only question whose answer imports JAX."""

    kind, answer = "join", Joined
    fabric: str
    coordinator: str
    num_nodes: int
    rank: int
    on_cpu: bool
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Collect(Question[CollectiveTimes]):
    """Takes part in collectives of that job."""

    kind, answer = "collect", CollectiveTimes
    collective: CollectiveKind
    group_nodes: int
    num_bytes: int
    rounds: Rounds


QUESTIONS = by_kind(Inspect, CheckKernels, Bind, Open, Reach, Send, Join, Collect)


# ---- between agents ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Echo(Record):
    """A message that is answered with another one, at once."""

    kind = "echo"


@dataclass(frozen=True, kw_only=True)
class Arrays(Record):
    """The arrays that follow, in frames, over several connections."""

    kind = "arrays"
    name: str  # the same on all their connections
    sizes_bytes: Annotated[list[ArrayBytes], Field(max_length=100 * MAX_ROUNDS)]
    window_bytes: Annotated[int, Field(ge=0)]  # that each connection should have on their way


BETWEEN_AGENTS = by_kind(Echo, Arrays)
