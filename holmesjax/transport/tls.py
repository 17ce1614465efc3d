"""TLS 1.3 between the processes of a job, with certificates that follow from the job's key. No JAX.

The private key of a job's certificate authority is derived from the job's key, so every process
signs its own certificate, and nothing else is sent to the nodes. Both ends verify the other. There
are no session tickets: what was recorded opens nothing. [The design](../../docs/design/networks.md)
says why.
"""

import contextlib
import datetime
import functools
import hashlib
import hmac
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holmesjax.transport.handshake import WRONG_KEY

FIRST_BYTE = b"\x16"  # of a TLS connection; a message begins with its length, which is less
SKEW = datetime.timedelta(days=1)  # that the clocks of two hosts may be apart
VALID = datetime.timedelta(days=7)
ALWAYS = datetime.timedelta(days=36500)  # it is worth as much as the key, which ends with its job
RENEW_S = 86400.0  # after which a process signs itself a new certificate
CHUNK_BYTES = 256 << 10  # that are encrypted at once; the copies stay in the processor's cache
FIRST_READ_BYTES = 4096  # a connection that is read in larger pieces gets more memory for them
# RFC 8446, 5.5: AES-GCM keeps its margin for 2**24.5 records, of 16 KiB at most.
KEY_LIMIT_BYTES = 256 << 30
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256
REASONS = {  # why OpenSSL does not accept a certificate
    9: "its certificate is not valid yet: compare the clocks of both hosts",
    10: "its certificate has expired",
    18: "its certificate is not of this job",
    19: "its certificate is not of this job",
    20: "its certificate is not of this job",
    21: "its certificate is not of this job",
}
ALERTS = {  # what the other end says of the certificate of this end
    "TLSV1_ALERT_UNKNOWN_CA": WRONG_KEY,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "to it, the certificate of this end has expired",
}


class Authority:
    """The certificate authority of a job.

    Args:
      key: the key of the job.
    """

    def __init__(self, key: bytes):
        seed = hmac.digest(key, b"certificate authority of a job", "sha512")
        number = int.from_bytes(seed, "big") % (_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        self._name = _name(f"HolmesJAX job {hashlib.sha256(seed).hexdigest()[:16]}")
        self.certificate = self._sign(
            self._name, self._key.public_key(), is_authority=True, valid=ALWAYS
        )

    def issue(
        self,
        *,
        uri: str | None = None,
        now: datetime.datetime | None = None,
        valid: datetime.timedelta = VALID,
    ) -> bytes:
        """Returns a new private key with its certificate, as PEM.

        Args:
          uri: names the holder, for programs that compare that.
          now: the begin of the certificate's life; None: the present.
          valid: how long it lasts.
        """
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name("process"), own.public_key(), uri=uri, now=now, valid=valid)
        pem = serialization.Encoding.PEM
        private = own.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private + certificate.public_bytes(pem)

    @property
    def pem(self) -> bytes:
        """The certificate of the authority."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def _sign(
        self,
        subject: x509.Name,
        public: ec.EllipticCurvePublicKey,
        *,
        is_authority: bool = False,
        uri: str | None = None,
        now: datetime.datetime | None = None,
        valid: datetime.timedelta,
    ) -> x509.Certificate:
        begin = (now or datetime.datetime.now(datetime.UTC)) - SKEW
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        own = self._key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + SKEW + valid)
            .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), False)
        )
        if not is_authority:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        if uri is not None:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
            builder = builder.add_extension(names, False)
        return builder.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@functools.lru_cache(maxsize=16)
def authority(key: bytes) -> Authority:
    """Returns the certificate authority of a job with this key."""
    return Authority(key)


def make_context(trusted: bytes, own: bytes, *, server_side: bool) -> ssl.SSLContext:
    """Returns a context of TLS 1.3 in which both ends verify the other.

    Args:
      trusted: certificate of the authority, as PEM.
      own: private key and certificate of this end, as PEM.
      server_side: whether this end listens.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the authority signs for this job alone
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=trusted.decode())
    with contextlib.closing(SecretFile(own)) as file:  # `ssl` reads keys from files only
        context.load_cert_chain(file.path)
    if server_side:
        context.num_tickets = 0
    return context


class SecretFile:
    """A file that others cannot read, until it is closed; in memory where the system has such."""

    def __init__(self, data: bytes):
        self._file: Any
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("holmesjax")
            self._file, self.path = os.fdopen(number, "wb", 0), f"/proc/self/fd/{number}"
        else:
            self._file = tempfile.NamedTemporaryFile(buffering=0)  # noqa: SIM115 (mode 0600)
            self.path = self._file.name
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Contexts:
    made_s: float
    of_caller: ssl.SSLContext
    of_listener: ssl.SSLContext


_contexts: dict[bytes, _Contexts] = {}
_making = threading.Lock()


def context(key: bytes, *, server_side: bool) -> ssl.SSLContext:
    """Returns this process's context in a job, with a certificate that is a day old at most."""
    with _making:
        found = _contexts.get(key)
        if found is None or time.monotonic() - found.made_s > RENEW_S:
            trusted, own = authority(key).pem, authority(key).issue()
            ends = (make_context(trusted, own, server_side=side) for side in (False, True))
            _contexts[key] = found = _Contexts(time.monotonic(), *ends)
    return found.of_listener if server_side else found.of_caller


class TlsSocket(socket.socket):
    """A connected socket whose bytes are encrypted on the way.

    One thread may send while another receives. A `send` that raises BlockingIOError must be called
    again with the same bytes, as OpenSSL asks for. Bytes may wait here that the system does not
    show any more: after `recv` has raised BlockingIOError, there are none.

    Args:
      sock: connected; this object takes it over.
      context: of `context`.
      server_side: whether this end listens.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool):
        timeout_s = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout_s)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._using = threading.Lock()  # the object of OpenSSL
        self._records = memoryview(b"")  # encrypted, and not yet sent
        self._taken = 0  # bytes of the caller's that these are
        self._sent_bytes = 0
        self._scratch = memoryview(bytearray(FIRST_READ_BYTES))

    def shake_hands(self, deadline_s: float | None = None) -> None:
        """Makes sure of the other end, by a deadline of the monotonic clock.

        Raises:
          BlockingIOError: the socket does not block, and the other end has to answer first.
          OSError: the other end is gone, or does not answer in time.
          ValueError: it does not speak TLS 1.3, or one of the two ends refuses the other.
        """
        while True:
            refusal, is_done = None, False
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                refusal = ValueError(_why(error))
            records = self._outgoing.read()
            if refusal is not None:
                with contextlib.suppress(OSError):  # an alert, so that the other end hears why
                    super().sendall(records)
                raise refusal from None
            if records:
                super().sendall(records)
            if is_done:
                return
            if deadline_s is not None:
                self.settimeout(max(deadline_s - time.monotonic(), 0.001))
            if not self._fill():
                raise ConnectionResetError("the other end closed the connection")

    # ---- sending -------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Sends some of the bytes; returns their number. Raises OSError as a socket does."""
        if not self._records:
            if self._sent_bytes > KEY_LIMIT_BYTES:
                raise ConnectionAbortedError("its keys have done their part, and are made anew")
            part = memoryview(data)[:CHUNK_BYTES]
            with self._using:
                self._taken = self._tls.write(part)
                self._records = memoryview(self._outgoing.read())
            self._sent_bytes += self._taken
        while self._records:
            self._records = self._records[super().send(self._records) :]
        return self._taken

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest) :]

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """Sends some of the bytes of all buffers, as `send` does."""
        parts: list[memoryview] = []
        size = 0
        for buffer in buffers:
            parts.append(memoryview(buffer)[: CHUNK_BYTES - size])
            size += len(parts[-1])
            if size == CHUNK_BYTES:
                break
        return self.send(parts[0] if len(parts) == 1 else b"".join(parts))

    # ---- receiving -----------------------------------------------------------------------------

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Returns some bytes; none after the end. Raises OSError as a socket does."""
        data = memoryview(bytearray(bufsize))
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receives some bytes into a buffer; returns their number, 0 after the end."""
        view = memoryview(buffer)
        while True:
            try:
                with self._using:
                    count: Any = self._tls.read(nbytes or len(view), view)  # typed as the bytes
                return int(count)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                is_said = "ALERT" in (error.reason or "")
                what = "the other end ended it" if is_said else "bytes were changed on the way"
                raise ConnectionAbortedError(f"{what} (TLS: {_why(error)})") from None
            if not self._fill():
                return 0

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> Any:
        """Fills all buffers, or receives what comes before the end or a timeout of the system.

        Returns the number of bytes, and no ancillary data.
        """
        count = 0
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                try:
                    received = self.recv_into(rest)
                except OSError:
                    if count:
                        return count, [], 0, None  # the next call hears it again
                    raise
                if not received:
                    return count, [], 0, None
                rest = rest[received:]
                count += received
        return count, [], 0, None

    def _fill(self) -> int:
        """Reads what has come, still encrypted; returns its size in bytes, 0 after the end."""
        received = super().recv_into(self._scratch)
        with self._using:
            self._incoming.write(self._scratch[:received])
        if received == len(self._scratch) < CHUNK_BYTES:
            self._scratch = memoryview(bytearray(2 * received))
        return received


def _why(error: ssl.SSLError) -> str:
    """The reason of a failure in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return REASONS.get(error.verify_code, error.verify_message)
    reason = error.reason or str(error)
    return ALERTS.get(reason, reason.lower().replace("_", " "))
