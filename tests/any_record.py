"""Any records of some kinds, with any fields of the right types, and the way they take."""

import dataclasses
import json
import typing

from hypothesis import strategies as st

from holmesjax.transport.records import Record

WORDS = st.dictionaries(st.text("ab"), st.integers() | st.none())
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ANY = {
    typing.Any: st.sampled_from([1, "a", [1, "b"], {"c": [None]}]),
    dict[str, typing.Any]: WORDS,
    float: FLOATS,
}


def any_of(hint):
    """A value of a field's type."""
    if hint in ANY:
        return ANY[hint]
    if isinstance(hint, type) and issubclass(hint, Record):
        return any_record(hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:  # of bounds, which these are inside of
        return st.integers(1, 1000) if arguments[0] is int else any_of(arguments[0]).filter(bool)
    if typing.get_origin(hint) is list:
        return st.lists(any_of(arguments[0]), max_size=3)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(*map(any_of, arguments), max_size=3)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*map(any_of, arguments))
    if len(arguments) > 1 and typing.get_origin(hint) is not typing.Literal:
        return st.one_of(*map(any_of, arguments))
    return st.from_type(hint)


def any_record(*kinds):
    """A record of one of some kinds."""
    made = []
    for kind in kinds:
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {one.name: any_of(hints[one.name]) for one in dataclasses.fields(kind)}
        made.append(st.builds(kind, **fields))
    return st.one_of(made)


def on_the_wire(message):
    return json.loads(json.dumps(message))
