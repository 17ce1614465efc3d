"""JAX's coordinator of a domain lets in processes of the job only, where JAX can do that."""

import contextlib
import inspect
import socket
import ssl
import subprocess
import sys
import time

import jax
import pytest

from holmesjax.runtime import domain
from holmesjax.transport import tls
from tests.jobs import HANG_S, free_listen

KEY = bytes(range(32))
COORDINATOR = f"""
import sys
from types import SimpleNamespace

import jax

from holmesjax.runtime import domain

jax.config.update("jax_platforms", "cpu")
processes = tuple(SimpleNamespace(rank=rank, devices=(rank,), name="") for rank in range(2))
config = SimpleNamespace(start_timeout_s=240.0, heartbeat_timeout_s=60.0)
domain.join(processes[0], processes, (sys.argv[1], int(sys.argv[2])), config, {KEY})
"""


@pytest.mark.skipif(
    "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters,
    reason="this JAX cannot encrypt what goes to its coordinator",
)
def test_the_coordinator_speaks_with_holders_of_the_key_only():
    host, port = free_listen().split(":")
    address = (host, int(port))
    with subprocess.Popen([sys.executable, "-c", COORDINATOR, host, port]) as process:
        try:
            own = tls.authority(KEY)
            assert first_bytes(address, own.issue(uri=domain.DOMAIN_URI)) != b""
            assert (
                first_bytes(address, tls.authority(bytes(32)).issue(uri=domain.DOMAIN_URI)) == b""
            )
            assert first_bytes(address, None) == b""
        finally:
            process.kill()


def first_bytes(address, pem):
    """The first bytes that a coordinator says, over HTTP/2, to a caller with this certificate.

    Without one it calls in the clear. It waits until the coordinator listens.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=tls.authority(KEY).pem.decode())
    context.set_alpn_protocols(["h2"])
    if pem is not None:
        with contextlib.closing(tls.SecretFile(pem)) as file:
            context.load_cert_chain(file.path)
    deadline_s = time.monotonic() + HANG_S
    while True:
        try:
            sock = socket.create_connection(address, HANG_S)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    try:
        with sock if pem is None else context.wrap_socket(sock) as end:
            end.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
            return end.recv(9)
    except (ssl.SSLError, ConnectionResetError):
        return b""
