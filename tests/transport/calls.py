"""Calls between two processes that are both here."""

import json
import queue
import socket
import struct
from dataclasses import dataclass

from holmesjax.transport import connections
from holmesjax.transport.admission import Admission
from holmesjax.transport.records import Record

KEY = bytes(range(32))


@dataclass(frozen=True, kw_only=True)
class Named(Record):
    kind = "named"
    name: str
    number: int = 0


GUEST = Named(name="guest")


DEADLINE_S = 60.0  # for what must come: a hang guard


def call_at(
    address,
    key=KEY,
    check=lambda hello: None,
    hello=GUEST,
    timeout_s=DEADLINE_S,
    source=None,
    encrypt=True,
):
    return connections.connect(
        *address,
        key=key,
        hello=hello,
        expected=Named,
        check=check,
        where="a to b",
        timeout_s=timeout_s,
        source=source,
        encrypt=encrypt,
    )


class Inn:
    """A admission, who came in, and what it warned of."""

    def __init__(
        self, check=lambda hello: None, key=KEY, sock=None, num_callers=1, may_be_plain=True
    ):
        self.entered, self.warnings = queue.Queue(), queue.Queue()
        sock = sock or connections.listen("127.0.0.1")
        self.address = connections.address_of(sock)
        self.admission = Admission(
            sock,
            key=key,
            hello=Named(name="inn"),
            expected=Named,
            check=check,
            enter=self.entered.put,
            may_be_plain=lambda hello: may_be_plain,
            num_callers=num_callers,
            warn=self.warnings.put,
        )

    def call(self, **options):
        return call_at(self.address, **options)

    def stranger(self):
        sock = socket.create_connection(self.address)
        sock.settimeout(DEADLINE_S)
        return sock


def frame(message):
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(text)) + text


def read_frame(sock):
    (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    return json.loads(sock.recv(length, socket.MSG_WAITALL))


def rest_of(sock):
    """The bytes that come before the other end closes; a reset is an end too."""
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def still_opens(inn):
    ours = inn.call()
    theirs = inn.entered.get(timeout=DEADLINE_S)
    ours.send({"text": "hello"})
    assert theirs.receive() == {"text": "hello"}
    ours.close()
    theirs.close()
