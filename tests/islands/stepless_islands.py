"""Islands without steps that share a mailbox: what they send is given to them."""

import numpy as np

from holmesjax.config import OuterConfig
from holmesjax.islands.mailbox import Mailbox
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import IslandProgress
from holmesjax.islands.mailbox_seat import MailboxSeat, Rules

RULES = Rules(outer=OuterConfig(), quorum=1, grace_s=10.0, lease_s=4.0)
SHAPES = {"embed.token_VD": (64, 16), "block_000.up_DF": (16, 40), "head.scale_D": (16,)}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Island:
    """An island without steps: what it sends is given to it."""

    def __init__(self, place, number, count=2, rules=RULES, clock=None, scratch=None):
        self.said, self.clock, self.beat_s = [], clock or Clock(), 0.0
        order = tuple("abcd"[:count])
        seat = MailboxSeat(
            order=order, number=number, part=0, parts=1, names=tuple(SHAPES), writes=True
        )
        scratch = scratch / order[number]
        self.box = Mailbox(Counted(place), seat, rules, scratch, self.said.append, self.clock)

    def send(self, number, seed, tokens=1, step=None):
        progress = IslandProgress(number, step or number, 8 * number, tokens)
        self.box.send(number, progress, arrays(seed).items)

    def turn(self, later_s=0.0):
        self.clock.now_s += later_s
        if self.clock.now_s - self.beat_s >= 1.0:
            self.beat_s = self.clock.now_s
            self.box.hold_lease()
        self.box.turn()

    def take(self, number):
        return self.box.take(number, 0.0)


def begun(make_island, **more):
    """Two islands that have merged round 0, and have its weights."""
    one, two = make_island(0, **more), make_island(1, **more)
    one.send(0, seed=0)
    for island in (one, two):
        island.turn()
        island.take(0)
    return one, two


def raise_away(name):
    raise OSError(5, "away")
