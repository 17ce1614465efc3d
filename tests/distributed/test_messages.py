"""Messages are records: what is sent is what arrives, and nothing else is taken for one."""

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.distributed import messages
from holmesjax.distributed.messages import (
    FROM_CONTROLLER,
    FROM_MEMBER,
    Standing,
    Vote,
    decode,
    decode_from_member,
    encode,
)

WORDS = st.dictionaries(st.text("ab"), st.integers() | st.none())
VALUES = {
    "Any": st.sampled_from([1, "a", [1, "b"], {"c": [None]}]),
    "dict[str, typing.Any]": WORDS,
    "list[typing.Any]": st.lists(st.lists(st.text("ab"))),
    "<class 'float'>": st.floats(allow_nan=False, allow_infinity=False),
}


def records(kinds):
    """Any record of some kinds, with any fields of the right types."""
    made = []
    for kind in kinds.values():
        hints = typing.get_type_hints(kind)
        fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
        of = lambda hint: VALUES.get(str(hint).removeprefix("typing."), st.from_type(hint))
        made.append(st.builds(kind, **{name: of(hint) for name, hint in fields.items()}))
    return st.one_of(made)


def on_the_wire(message):
    return json.loads(json.dumps(message))


@given(records(FROM_MEMBER), records({"standing": Standing}))
@settings(max_examples=100, deadline=None)
def test_a_member_is_heard_as_it_speaks(record, standing):
    assert decode_from_member(on_the_wire(encode(record, standing))) == (record, standing)


@given(records(FROM_CONTROLLER))
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
        decode_from_member(message)


def test_the_bytes_of_a_record_are_pinned():
    """A change of these is a change of `PROTOCOL`."""
    message = encode(Vote(step=3), Standing(status="was busy", work="step", at_step=3, num_begun=3))
    standing = {"status": "was busy", "work": "step", "at_step": 3, "num_begun": 3, "num_done": 0}
    assert message == {"kind": "vote", "step": 3, **standing}
    assert messages.PROTOCOL == 2
