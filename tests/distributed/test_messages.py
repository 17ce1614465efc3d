"""Messages are records: what is sent is what arrives, and nothing else is taken for one."""

import dataclasses

import pytest
from hypothesis import given, settings

from holmesjax.distributed import messages
from holmesjax.distributed.messages import (
    FROM_CONTROLLER,
    FROM_MEMBER,
    Standing,
    Vote,
    decode_of_member,
    encode_of_member,
)
from holmesjax.transport.records import decode, encode
from tests.any_record import any_record, on_the_wire


@given(any_record(*FROM_MEMBER.values()), any_record(Standing))
@settings(max_examples=100, deadline=None)
def test_a_member_is_heard_as_it_speaks(record, standing):
    assert decode_of_member(on_the_wire(encode_of_member(record, standing))) == (record, standing)


@given(any_record(*FROM_CONTROLLER.values()))
@settings(max_examples=100, deadline=None)
def test_a_controller_is_heard_as_it_speaks(record):
    assert decode(on_the_wire(encode(record)), FROM_CONTROLLER) == record


def test_no_field_is_of_the_record_and_of_the_standing():
    for record in FROM_MEMBER.values():
        own = {field.name for field in dataclasses.fields(record)}
        assert own.isdisjoint(messages.STANDING), record


@pytest.mark.parametrize(
    "message, problem",
    [
        ({"step": 1}, "unknown kind None"),
        ({"kind": ["vote"]}, r"unknown kind \['vote'\]"),
        ({"kind": "verdict", "step": 1}, "unknown kind 'verdict'"),  # members send none
        ({"kind": "vote"}, "a message vote without step"),
        ({"kind": "saved", "step": 1}, "a message saved without arrays and files"),
        ({"kind": "vote", "step": "1"}, "a message vote whose step is wrong: .* valid integer"),
        ({"kind": "vote", "step": True}, "a message vote whose step is wrong: .* valid integer"),
        ({"kind": "vote", "step": 1, "more": 2}, "a message vote with an unknown field 'more'"),
        ({"kind": "vote", "step": 1, "work": "play"}, "standing whose work is wrong"),
        ({"kind": "compiled", "digests": {"a": 1}, "source": ""}, "compiled whose digests is"),
    ],
)
def test_whatever_is_no_record_is_refused_with_a_reason(message, problem):
    with pytest.raises(ValueError, match=problem):
        decode_of_member(message)


def test_the_bytes_of_a_record_are_pinned():
    """A change of these is a change of `PROTOCOL`."""
    record = Standing(status="was busy", work="step", at_step=3, num_begun=3, received=7, arrived=6)
    message = encode_of_member(Vote(step=3, opened=7), record)
    standing = {"status": "was busy", "work": "step", "at_step": 3, "num_begun": 3, "num_done": 0}
    standing |= {"received": 7, "arrived": 6}
    assert message == {"kind": "vote", "step": 3, "opened": 7, **standing}
    assert messages.PROTOCOL == 18
