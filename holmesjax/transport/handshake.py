"""The first messages of a connection: both ends prove the job's key, and learn the other's hello.

Both ends prove the key before anything else is read, by a keyed hash over two fresh nonces:

    listener -> caller    Challenge: a nonce
    caller -> listener    Introduction: a nonce, its hello, the proof
    listener -> caller    Welcome: its hello, the proof; or Rejection: the reason, the proof
    caller -> listener    Entered: it has read the welcome

A caller believes a rejection only with its proof. One without a proof comes from a stranger, or
from a listener with another key; the two look the same to a caller.

The listener lets nobody in before `Entered`. A caller that has lost the `Welcome` has no seat yet,
and takes it when it calls again.

A hello is a record; each kind of connection has a hello of its own. This module sends nothing: each
half is a generator of messages. No JAX.
"""

import hmac
import json
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from holmesjax.errors import RefusedError
from holmesjax.transport.records import Message, R, Record, by_kind, decode, decode_as, encode

WRONG_KEY = "it does not hold the key of this job"

Check = Callable[[R], str | None]  # what is wrong with the other end's hello, if anything


@dataclass(frozen=True, kw_only=True)
class Challenge(Record):
    """The first words of a listener."""

    kind = "challenge"
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Introduction(Record):
    """The caller's hello, with the proof that it holds the key."""

    kind = "introduction"
    nonce: str
    hello: Message
    mac: str


@dataclass(frozen=True, kw_only=True)
class Welcome(Record):
    """The listener's hello, with the proof that it holds the key."""

    kind = "welcome"
    hello: Message
    mac: str


@dataclass(frozen=True, kw_only=True)
class Rejection(Record):
    """The reason why a caller is sent away."""

    kind = "rejection"
    reason: str
    mac: str | None = None  # None: the caller has not proved the key, and gets no proof of it


@dataclass(frozen=True, kw_only=True)
class Entered(Record):
    """The last words of a caller, which has read the welcome."""

    kind = "entered"


FROM_LISTENER = by_kind(Welcome, Rejection)


class RejectedError(Exception):
    """The caller is told why, and sent away."""

    def __init__(self, rejection: Rejection):
        super().__init__(rejection.reason)
        self.rejection = rejection


def call(
    key: bytes, hello: Record, expected: type[R], check: Check[R], where: str
) -> Generator[Message, Message, R]:
    """The caller's half: is sent what it hears, gives what it says, ends with the other's hello.

    Its first message is empty and is not sent. The caller sends `Entered` at the end.

    Args:
      key: the key of the job.
      hello: the hello of this end.
      expected: the kind of the other end's hello.
      check: looks at the other end's hello.
      where: the purpose of the connection, in errors.

    Raises:
      ValueError: the other end does not prove that it holds the key.
      RefusedError: one of the two ends refuses the other.
    """
    theirs, mine = decode_as((yield {}), Challenge).nonce, secrets.token_hex(16)
    said = encode(hello)
    mac = prove(key, "caller", theirs, mine, said)
    answer = decode((yield encode(Introduction(nonce=mine, hello=said, mac=mac))), FROM_LISTENER)
    if isinstance(answer, Rejection):
        if not _is_proof(prove(key, "refusal", mine, theirs, answer.reason), answer.mac):
            raise ValueError(f"{answer.reason[:200]!r}, without proof")
        raise _refused(where, answer.reason)
    assert isinstance(answer, Welcome), answer
    if not _is_proof(prove(key, "listener", mine, theirs, answer.hello), answer.mac):
        raise ValueError("no proof")
    found, reason = _judge(answer.hello, expected, check)
    if found is None:
        raise _refused(where, reason)
    return found


def answer(
    key: bytes, hello: Record, expected: type[R], check: Check[R]
) -> Generator[Message, Message, R]:
    """The listener's half: gives what it says, is sent what it hears, ends with the caller's hello.

    Args:
      key: the key of the job.
      hello: the hello of this end.
      expected: the kind of the caller's hello.
      check: looks at the caller's hello.

    Raises:
      ValueError: the caller says what no caller says.
      RejectedError: the caller does not hold the key, or its hello is refused.
    """
    mine = secrets.token_hex(16)
    caller = decode_as((yield encode(Challenge(nonce=mine))), Introduction)
    theirs = caller.nonce
    if not _is_proof(prove(key, "caller", mine, theirs, caller.hello), caller.mac):
        raise RejectedError(Rejection(reason=WRONG_KEY))
    found, reason = _judge(caller.hello, expected, check)
    if found is None:
        mac = prove(key, "refusal", theirs, mine, reason)
        raise RejectedError(Rejection(reason=reason, mac=mac))
    said = encode(hello)
    mac = prove(key, "listener", theirs, mine, said)
    decode_as((yield encode(Welcome(hello=said, mac=mac))), Entered)
    return found


def prove(key: bytes, role: str, *parts: Any) -> str:
    """The proof over nonces and a hello that only a holder of the key can give."""
    text = json.dumps([role, *parts], sort_keys=True)
    return hmac.digest(key, text.encode(), "sha256").hex()


def _is_proof(expected: str, found: str | None) -> bool:
    # As bytes: the comparison raises for text that is not ASCII.
    return hmac.compare_digest(expected.encode(), (found or "").encode())


def _judge(hello: Message, expected: type[R], check: Check[R]) -> tuple[R | None, str]:
    """The hello of an end that has proved the key; or None, and the reason why it is refused."""
    try:
        found = decode_as(hello, expected)
    except ValueError as error:  # of another version, or for another kind of connection
        return None, str(error)
    reason = check(found)
    return (found, "") if reason is None else (None, reason)


def _refused(where: str, reason: str) -> RefusedError:
    fix = "start all processes of a job from one run folder and one installation"
    return RefusedError(where, "the other end was refused", found=reason, fix=fix)
