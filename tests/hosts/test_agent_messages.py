"""Questions and answers of agents are records: what is sent arrives, and nothing else is taken."""

import pytest
from hypothesis import given, settings

from holmesjax.hosts import agent
from holmesjax.hosts.agent_messages import (
    BETWEEN_AGENTS,
    MAX_ARRAY_BYTES,
    QUESTIONS,
    AgentHello,
    Arrays,
    AskerHello,
    Bind,
    FreePort,
    NicPath,
    NoAnswer,
    NodeFacts,
    Send,
)
from holmesjax.hosts.process_environment import ProcessEnvironment
from holmesjax.transport.records import by_kind, decode, encode
from tests.any_record import any_record, on_the_wire

SAID = by_kind(
    *QUESTIONS.values(),
    *{question.answer for question in QUESTIONS.values()},
    *BETWEEN_AGENTS.values(),
    NoAnswer,
    AgentHello,
    AskerHello,
)
PATH = NicPath(source="10.0.0.1", address="10.0.0.2", port=7000)
SEND = encode(
    Send(paths=[PATH], sizes_bytes=[1], rounds=1, window_bytes=1, timeout_s=1.0, limit_s=1.0)
)


@given(any_record(*SAID.values()))
@settings(max_examples=200, deadline=None)
def test_what_is_said_is_heard(record):
    assert decode(on_the_wire(encode(record)), SAID) == record


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**SEND, "paths": []}, "send whose paths is wrong: .* at least 1 item"),
        ({**SEND, "paths": [["10.0.0.1", "10.0.0.2", 7000]]}, "paths is wrong: .* no message path"),
        ({**SEND, "paths": [{"kind": "path", "port": 1}]}, "path without source and address"),
        ({**SEND, "sizes_bytes": [MAX_ARRAY_BYTES + 1]}, "less than or equal to 1073741824"),
        ({**SEND, "rounds": 10**9}, "send whose rounds is wrong: .* less than or equal to 1000"),
        (
            encode(Arrays(name="a", sizes_bytes=[0], window_bytes=1)),
            "arrays whose sizes_bytes is wrong",
        ),
        ({**SEND, "to": "a"}, "a message send with an unknown field 'to'"),
    ],
)
def test_questions_out_of_bounds_are_refused_by_the_name_of_the_field(message, problem):
    with pytest.raises(ValueError, match=problem):
        decode(message, SAID)


@pytest.fixture
def answers():
    environment = ProcessEnvironment(
        number=0,
        restart=0,
        controller=("127.0.0.1", 1),
        key=bytes(32),
        addresses={},
        advertised={},
    )
    with agent._Agent(environment, lambda: None, {}) as opened:
        yield opened


def test_an_agent_answers_what_it_does_not_know_with_the_reason(answers):
    """Its node may have another version of HolmesJAX: `doctor` is to say so."""
    assert answers.answer({"kind": "sing"}) == NoAnswer(
        problem="was asked by another version of HolmesJAX",
        found="a message of unknown kind 'sing'",
    )
    port = answers.answer(encode(Bind(address="127.0.0.1", port=0)))
    assert isinstance(port, FreePort)
    assert 0 < port.port < 65536


def test_facts_of_another_version_are_refused_by_the_name_of_the_field():
    with pytest.raises(ValueError, match="a message facts without now_s and host and"):
        decode({"kind": "facts"}, by_kind(NodeFacts))
