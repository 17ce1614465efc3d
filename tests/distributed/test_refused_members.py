"""Processes that are none of a job are refused: another key, plan, version or way to compute."""

import itertools
import queue
import re
import socket
from unittest import mock

import pytest

from holmesjax.distributed import member_link
from holmesjax.distributed.controller import differences
from holmesjax.distributed.messages import PROTOCOL, ControllerHello, MemberHello
from holmesjax.errors import DataError, PeerError, RefusedError
from holmesjax.transport import connections, key_files
from holmesjax.transport.handshake import WRONG_KEY
from tests.clock import stop_callers_clock
from tests.distributed.joined_members import (
    ABOUT,
    DEADLINE_S,
    KEY,
    join,
    next_event,
    open_controller,
)
from tests.distributed.scripted_jobs import PROCESSES, process

pytestmark = pytest.mark.usefixtures("clock")


def test_a_mistake_of_the_job_ends_all_members_with_it(controller):
    ends = [queue.Queue() for _ in PROCESSES]
    members = [
        join(controller, who, on_loss=end.put) for who, end in zip(PROCESSES, ends, strict=True)
    ]
    for member in members:  # who has told something is seated
        member.send_compiled({}, "here", {})
        next_event(controller, "compiled")
    mistake = DataError("c0/n0", "has other data", found="1, not 2", fix="copy it")
    controller.refuse(mistake)
    controller.__exit__()  # its closing the connection comes too late to be the reason
    for member, end in zip(members, ends, strict=True):
        error = end.get(timeout=DEADLINE_S)
        assert (str(error), error.exit_status) == (str(mistake), 2)
        member.close()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"about": {**ABOUT, "plan hash": "bbbb"}}, ["plan hash is bbbb, not aaaa"]),
        ({"about": {**ABOUT, "jax": "0.9"}}, ["jax is 0.9, not 1.0"]),
        ({"who": process(9, 1)}, ["3 processes", "number 9"]),
    ],
)
def test_who_does_not_belong_is_refused(controller, members, change, words):
    who = change.pop("who", PROCESSES[0])
    with pytest.raises(RefusedError) as error:
        join(controller, who, **change)
    for word in words:
        assert word in str(error.value)
    if "about" in change:  # whoever started the job is told too
        assert words[0] in str(next_event(controller, "refused").record)


def connect_once(controller, who):
    """Calls as a member does; the connection."""
    hello = MemberHello(
        process=who.number, about=ABOUT, computing={}, protocol=PROTOCOL, session="another"
    )
    return connections.connect(
        *controller.address,
        key=KEY,
        hello=hello,
        expected=ControllerHello,
        check=lambda hello: None,
        where="here",
        timeout_s=DEADLINE_S,
    )


def test_a_process_whose_predecessor_is_not_missed_yet_calls_again(
    controller, members, monkeypatch
):
    """Kubernetes, say, has replaced it at once; a mistake would end the whole run for good."""
    monkeypatch.setattr(member_link, "TAKEN_S", 0.01)
    with pytest.raises(RefusedError) as taken:
        connect_once(controller, PROCESSES[1])
    changed = RefusedError("", "", found="its plan differs", fix="")
    answers = mock.Mock(side_effect=[taken.value, taken.value, changed])
    monkeypatch.setattr(connections, "connect", answers)
    with pytest.raises(RefusedError, match="its plan differs"):
        join(controller, PROCESSES[1])
    answers.side_effect = itertools.repeat(taken.value)
    monkeypatch.setattr(member_link, "TAKEN_S", 2 * DEADLINE_S)
    with pytest.raises(PeerError, match="is here already"):
        join(controller, PROCESSES[1])


FACTS = {"source": "12", "jax": "0.10.2", "--xla_a": "1", "driver": "570"}


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"source": "34"}, "its source is 34, not 12 as on"),
        ({"--xla_a": "2", "jax": "0.12.0"}, "its jax is 0.12.0, not 0.10.2, its --xla_a is 2"),
        ({"--xla_b": "1"}, "its --xla_b is 1, not unset as on"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "its NVIDIA_TF32_OVERRIDE is 0, not unset as on"),
        ({"driver": "580"}, "its driver is 580, not 570 as on"),
    ],
)
def test_a_member_that_computes_otherwise_than_the_first_is_refused(controller, changed, words):
    """Clusters may have drivers of their own; the processes of a stage may not."""
    first = join(controller, PROCESSES[0], computing=FACTS)
    with pytest.raises(RefusedError, match=re.escape(words)):
        join(controller, PROCESSES[1], computing={**FACTS, **changed})
    refused = next_event(controller, "refused").record
    assert words in refused.reason
    assert set(refused.unlike) == set(changed)
    of_other_stage = {**FACTS, "driver": "580"}
    others = [join(controller, PROCESSES[1], computing=FACTS)]
    others.append(join(controller, PROCESSES[2], computing=of_other_stage))
    for member in (first, *others):
        member.close()


def test_unlike_members_are_taken_where_it_is_permitted_by_name():
    with open_controller(PROCESSES, allow=("source", "--xla_b")) as controller:
        unlike = {**FACTS, "source": "34", "--xla_b": "1"}
        for who, facts in zip(PROCESSES[:2], (FACTS, unlike), strict=True):
            join(controller, who, computing=facts).close()
        with pytest.raises(RefusedError, match=r"its jax is 0\.12\.0"):
            join(controller, PROCESSES[2], computing={**unlike, "jax": "0.12.0"})


def test_a_wrong_key_is_told_on_both_ends(controller, monkeypatch):
    stop_callers_clock(monkeypatch)
    with pytest.raises(PeerError, match="nobody who holds the key of this job answers"):
        join(controller, PROCESSES[0], key=b"x" * key_files.KEY_BYTES)
    assert WRONG_KEY in next_event(controller, "warning").record.text


def test_differences_are_told_with_both_values():
    assert differences(ABOUT, {**ABOUT, "more": 1}) is None
    assert differences(ABOUT, {}) == "its plan hash is None, not aaaa, its jax is None, not 1.0"


def test_strangers_cost_nothing(controller, members):
    strangers = [socket.create_connection(controller.address) for _ in range(20)]
    for i, stranger in enumerate(strangers):
        stranger.sendall([b"", b"\xff" * 100, b"\x7f\xff\xff\xff{", b"\x00\x00\x00\x02[]"][i % 4])
    members[0].vote(1)
    members[2].vote(1)
    assert not members[1].verdict(1).stop
    for stranger in strangers:
        stranger.close()
