"""The codec: what is encoded is decoded, and whatever is no record is refused by name."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from holmesjax.distributed.messages import ControllerHello, MemberHello
from holmesjax.transport import handshake
from holmesjax.transport.handshake import Challenge, Entered, Introduction, Rejection, Welcome
from holmesjax.transport.records import Endpoint, Record, by_kind, decode, decode_as, encode
from holmesjax.transport.rendezvous import NeighbourHello
from tests.any_record import any_record, on_the_wire


@dataclass(frozen=True, kw_only=True)
class Leaf(Record):
    kind = "leaf"
    colour: str


@dataclass(frozen=True, kw_only=True)
class Tree(Record):
    kind = "tree"
    one: Leaf
    leaves: list[Leaf]
    maybe: Leaf | None = None
    book: dict[str, list[Endpoint]]


# Everything that is said before a connection is let in, and a record of records.
SAID = by_kind(
    Challenge, Introduction, Welcome, Rejection, Entered,
    MemberHello, ControllerHello, NeighbourHello, Tree,
)  # fmt: skip
TREE = encode(Tree(one=Leaf(colour="red"), leaves=[], book={"roce": [("10.0.0.1", 7)]}))


@given(any_record(*SAID.values()))
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_is_decoded(record):
    assert decode(on_the_wire(encode(record)), SAID) == record


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "bush"}, "a message of unknown kind 'bush'"),
        ({"kind": None}, "a message of unknown kind None"),
        ({"root": 1}, "a message tree with an unknown field 'root'"),
        ({"one": {"kind": "leaf"}}, "tree whose one is wrong: .* a message leaf without colour"),
        ({"one": {"kind": "tree"}}, "tree whose one is wrong: .* unknown kind 'tree'"),
        ({"one": "leaf"}, "tree whose one is wrong: .* no message leaf"),
        ({"maybe": {"kind": "leaf", "colour": 3}}, "leaf whose colour is wrong: .* valid string"),
        ({"leaves": [{"kind": "leaf", "size": 1}]}, "leaf with an unknown field 'size'"),
        ({"book": {"roce": [["10.0.0.1", "7"]]}}, "tree whose book is wrong: .* valid integer"),
        ({"book": {"roce": [["10.0.0.1", 7, 8]]}}, "tree whose book is wrong: .* at most 2"),
    ],
)
def test_whatever_is_no_record_is_refused_by_name(change, problem):
    with pytest.raises(ValueError, match=problem):
        decode({**TREE, **change}, SAID)


def test_two_records_of_one_kind_are_our_mistake():
    with pytest.raises(AssertionError, match="of one kind"):
        by_kind(Leaf, Leaf)


@pytest.mark.parametrize("record", [Challenge, Introduction, Welcome])
def test_a_missing_field_of_a_handshake_is_named(record):
    with pytest.raises(ValueError, match=rf"a message {record.kind} without \w+"):
        decode_as({"kind": record.kind}, record)


def test_the_bytes_of_a_handshake_are_pinned():
    """A change of these keeps older processes from hearing why they are refused."""
    talk = handshake.call(bytes(32), Leaf(colour="red"), Leaf, lambda hello: None, "")
    next(talk)
    said = talk.send({"kind": "challenge", "nonce": "n"})
    assert {**said, "nonce": "", "mac": ""} == {
        "kind": "introduction",
        "nonce": "",
        "hello": {"kind": "leaf", "colour": "red"},
        "mac": "",
    }
    assert encode(Entered()) == {"kind": "entered"}
    assert encode(Rejection(reason="r")) == {"kind": "rejection", "reason": "r", "mac": None}
