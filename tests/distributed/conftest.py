"""A controller with its members, over real sockets, and with a clock that the tests move.

Heartbeats go many times a second, by the machine's own clock; silence and patience are measured by
the clock of the tests. So no machine is too busy for them.
"""

import time
from types import SimpleNamespace

import pytest

from holmesjax.distributed import (
    controller as controllers_end,
    member as members_end,
    member_records,
)
from holmesjax.transport import connection_loop
from tests.distributed.joined_members import join, open_controller, wait_until
from tests.distributed.scripted_jobs import PROCESSES


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)

    def sleep(seconds):
        clock.now_s += seconds

    times = SimpleNamespace(
        monotonic=lambda: clock.now_s, perf_counter=time.perf_counter, sleep=sleep
    )
    for module in (controllers_end, members_end, connection_loop, member_records):
        monkeypatch.setattr(module, "time", times)
    for module in (controllers_end, members_end):
        monkeypatch.setattr(module, "BEATS", 400)
    return clock


@pytest.fixture
def controller(clock):
    with open_controller(PROCESSES) as controller:
        yield controller


@pytest.fixture
def members(controller):
    members = [join(controller, who) for who in PROCESSES]
    wait_until(lambda: all(seat.connection for seat in controller._seats))
    yield members
    for member in members:
        member.close()
