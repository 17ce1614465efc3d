"""The ports at which others call a process: of each NIC, by fabric, and their addresses."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from socket import socket
from types import MappingProxyType

from holmesjax.errors import HolmesError
from holmesjax.plan.processes import Process
from holmesjax.transport import connections

Book = Mapping[str, Sequence[tuple[str, int]]]  # fabric -> address and port of each NIC


class Ports:
    """Listening sockets. They are open before JAX is up, so that others can be told the ports.

    Args:
      sockets: of each NIC, by fabric.
      advertised: addresses or names at which others reach these NICs, where they are not their own.
    """

    def __init__(
        self,
        sockets: Mapping[str, Sequence[socket]],
        advertised: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ):
        self.sockets, self._advertised = sockets, advertised

    @classmethod
    def open(
        cls,
        addresses: Mapping[str, Sequence[str]],
        *,
        ports: tuple[int, int] | None = None,
        advertised: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> "Ports":
        """Listens on a free port of each address: fabric -> addresses of this node's NICs.

        Args:
          addresses: of this node's NICs, by fabric.
          ports: the first and the last port that may be used; None: any.
          advertised: addresses or names at which others reach the NICs, by fabric. A network that
            is not named has its own. Ports must be the same on both sides of a translation.

        Raises:
          HolmesError: an address is not of this machine, no port of the range is free, or as many
            addresses are not advertised as there are.
        """
        for fabric, names in advertised.items():
            if len(names) != len(addresses.get(fabric, ())):
                raise HolmesError(
                    "HOLMES_ADVERTISED",
                    f"must have as many addresses on {fabric} as HOLMES_ADDRESSES",
                    found=f"{list(names)} for {list(addresses.get(fabric, ()))}",
                    fix="name one for each NIC, in their order",
                )
        with ExitStack() as opened:
            sockets = {
                fabric: [
                    opened.enter_context(connections.listen_in(address, ports))
                    for address in of_fabric
                ]
                for fabric, of_fabric in addresses.items()
            }
            opened.pop_all()
        return cls(sockets, advertised)

    @property
    def local(self) -> dict[str, list[tuple[str, int]]]:
        """Addresses and ports on this node, by fabric."""
        return {
            name: [connections.address_of(s) for s in listening]
            for name, listening in self.sockets.items()
        }

    @property
    def book(self) -> dict[str, list[tuple[str, int]]]:
        """Addresses and ports at which others reach this process, by fabric."""
        found = self.local
        for fabric, outside in self._advertised.items():
            ports = [port for _, port in found[fabric]]
            found[fabric] = list(zip(outside, ports, strict=True))
        return found

    def close(self) -> None:
        """Closes all sockets."""
        for sock in itertools.chain(*self.sockets.values()):
            sock.close()


def streams_over(at_least: int, *nics: int) -> int:
    """Returns a number of connections with which all NICs of both nodes carry some.

    The NICs of the node with more NICs carry equally many.

    >>> streams_over(4, 1, 1), streams_over(4, 8, 2), streams_over(4, 3, 1)
    (4, 8, 6)
    """
    return -(-at_least // max(nics)) * max(nics)


def nic(book: Book, process: Process, fabric: str, stream: int) -> tuple[str, int]:
    """Returns the NIC of a stream of a process, from the process's own book."""
    found = nics_of(book, process, fabric)
    return found[stream % len(found)]


def nics_of(book: Book, process: Process, fabric: str) -> Sequence[tuple[str, int]]:
    """Returns all NICs of a process on a fabric. Raises HolmesError if it has none."""
    found = book.get(fabric)
    if not found:
        raise HolmesError(
            "HOLMES_ADDRESSES",
            f"has no address of {process.node} on {fabric}",
            found=dict(book),
            fix=f'add "{fabric}": ["..."]',
        )
    return found
