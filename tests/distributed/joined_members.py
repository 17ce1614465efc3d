"""A controller of this process and members that join it, and how a test waits for what they say."""

import time

from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import DistributedConfig
from holmesjax.distributed.controller import Controller
from holmesjax.distributed.member import Member
from holmesjax.runtime.step_timeout import Progress
from holmesjax.transport import key_files

ABOUT = {"plan hash": "aaaa", "jax": "1.0"}
KEY = b"k" * key_files.KEY_BYTES
SILENCE_S = 20.0
DEADLINE_S = 60.0  # for what must come: a hang guard


def wait_until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.005)


def pass_time(clock, controller, seconds, *, but=()):
    """Moves the clock, and waits until all members, but some, have been heard at that time."""
    clock.now_s += seconds
    heard = [seat for seat in controller._seats if seat.process.number not in but]
    wait_until(lambda: all(seat.connection.heard_s == clock.now_s for seat in heard))


SKIPPED = [[7, 9, 16], [7, 0, 64]]


def open_controller(processes, silence_s=SILENCE_S, allow=(), relay=None):
    return Controller(
        processes,
        address="127.0.0.1",
        port=0,
        about=ABOUT,
        resume=7,
        key=KEY,
        silence_s=silence_s,
        is_saving=lambda step: step % 2 == 0,
        progress=Progress(DistributedConfig()),
        allow=allow,
        relay=relay,
        skipped=[Skipped(*part) for part in SKIPPED],
    )


def join(
    controller,
    who,
    *,
    key=KEY,
    about=ABOUT,
    computing=None,
    on_loss=None,
    silence_s=SILENCE_S,
    address=None,
):
    address, port = address or controller.address
    return Member(
        process=who,
        address=address,
        port=port,
        key=key,
        about=about,
        computing=computing or {},
        timeout_s=silence_s,
        start_timeout_s=DEADLINE_S,
        on_loss=on_loss or (lambda error: None),
    )


def next_event(controller, kind):
    event = controller.events.get(timeout=DEADLINE_S)
    assert event.record.kind == kind, event
    return event
