"""Islands that fail at any moment of a round: all agree on each round, and rounds go on.

Time passes as the test says, so one thread has all islands. One that is stopped stands in the
middle of what it does with the mailbox, while the others go on.
"""

import errno
import hashlib
import random
from collections import Counter

import numpy as np
import pytest

from holmesjax.config import OuterConfig, PlaceConfig
from holmesjax.errors import HolmesError
from holmesjax.islands import mailbox_records as records, rejoining
from holmesjax.islands.mailbox import Mailbox
from holmesjax.islands.mailbox_claim import claim
from holmesjax.islands.mailbox_places import Counted, Folder
from holmesjax.islands.mailbox_records import IslandProgress, Merged
from holmesjax.islands.mailbox_seat import MailboxSeat, Rules
from holmesjax.islands.merge import merge

NAMES, SHAPES = ("a", "b", "c"), {"embed.token_VD": (8, 4), "head.scale_D": (4,)}
RULES = Rules(outer=OuterConfig(), quorum=2, grace_s=3.0, lease_s=4.0)
FAULTS = ["is killed", "is stopped", "reads nothing", "has a full mailbox", "sees an empty folder"]
WRITES = ("put", "put_file")
FEW = [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed > 0)) for seed in range(20)]
NUM_FAULTS, ROUNDS_AFTER, LIMIT_S = 8, 3, 300.0


class KilledError(BaseException):
    """Ends an island where it stands."""


class World:
    """Islands, their mailbox, and what befalls them."""

    def __init__(self, folder, seed):
        self.rng, self.now_s, self.left = random.Random(seed), 0.0, 0
        self.folder, self.empty = Folder(folder / "box"), Folder(folder / "empty")
        self.scratch, self.away_until_s, self.full_until_s = folder / "scratch", 0.0, 0.0
        self.letters = {}  # the weights of each island after a step
        self.records, self.momenta, self.weights = {}, {}, {}  # by round
        self.had = Counter()  # faults
        self.calls_left = self.rng.randrange(300)
        self.islands = [Island(self, number) for number in range(len(NAMES))]

    @property
    def is_away(self):
        """Whether the folder of the mailbox is another one, which is empty."""
        return self.now_s < self.away_until_s

    def go_on(self, seconds=0.0, until=lambda: False):
        """Lets islands that can take turns for some seconds."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            self.now_s += self.rng.uniform(0.0, 0.3)
            able = [island for island in self.islands if not island.is_inside]
            if able:
                self.rng.choice(able).act()

    def strike(self, island):
        """Perhaps a fault, in a call of an island."""
        self.calls_left -= 1
        if self.calls_left >= 0 or not self.left:
            return
        self.left -= 1
        self.calls_left = self.rng.randrange(10, 300)
        fault, seconds = self.rng.choice(FAULTS), self.rng.uniform(1.0, 12.0)
        self.had[fault] += 1
        if fault == "is killed":
            island.starts_s = self.now_s + seconds
            raise KilledError
        if fault == "is stopped":
            self.go_on(seconds)
        elif fault == "reads nothing":
            island.deaf_until_s = self.now_s + seconds
        elif fault == "has a full mailbox":
            self.full_until_s = self.now_s + seconds
        else:
            self.away_until_s = self.now_s + seconds

    def merged(self, content, name):
        """A round has its record: it must be the rule's, of what the islands have sent."""
        record = Merged.from_bytes(content, name)
        assert record.round == len(self.records), "each round is merged once, and in order"
        self.records[record.round] = record
        if not record.round:
            self.weights[0] = weights_of("first", 0)
            self.momenta[0] = {key: np.zeros_like(x) for key, x in self.weights[0].items()}
            return
        before = self.records[record.round - 1]
        assert len(record.islands) >= RULES.quorum
        assert record.tokens == before.tokens + sum(record.islands.values())
        self.weights[record.round], self.momenta[record.round] = {}, {}
        sent = [self.letters[island, record.known[island].step] for island in record.islands]
        for key in SHAPES:
            old, momentum = (of[record.round - 1][key] for of in (self.weights, self.momenta))
            tokens = list(record.islands.values())
            new, kept = merge(RULES.outer, [x[key] for x in sent], tokens, old, momentum)
            self.weights[record.round][key], self.momenta[record.round][key] = new, kept
            assert record.weights[key].sha256 == hashlib.sha256(new.tobytes()).hexdigest()
            assert record.momentum[key].sha256 == hashlib.sha256(kept.tobytes()).hexdigest()


def weights_of(name, step):
    rng = np.random.default_rng([*name.encode(), step])
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}


class Place:
    """The mailbox, as an island reaches it."""

    def __init__(self, world, island):
        self.world, self.island = world, island

    def __getattr__(self, name):
        world, island = self.world, self.island

        def call(*args, **options):
            is_late = world.rng.random() < 0.5  # whether it fails behind what it does
            if not is_late:
                world.strike(island)
            if world.now_s < island.deaf_until_s:
                raise PermissionError(errno.EACCES, "no entry")
            if world.now_s < world.full_until_s and name in WRITES:
                raise OSError(errno.ENOSPC, "full")
            is_away, folder = world.is_away, world.empty if world.is_away else world.folder
            is_record = name == "put" and args[0].endswith(records.MERGED)
            is_new = is_record and not is_away and folder.read(args[0]) is None
            found = getattr(folder, name)(*args, **options)
            if is_new:
                world.merged(args[1], args[0])
            if is_late:
                world.strike(island)
            return found

        return call


class Island:
    """An island whose steps only count, with the mailbox of its job."""

    def __init__(self, world, number):
        self.world, self.number, self.name = world, number, NAMES[number]
        self.starts_s, self.deaf_until_s, self.is_inside = 0.0, 0.0, False
        self.box, self.round = None, -1

    def act(self):
        if self.world.now_s < self.starts_s:
            return
        self.is_inside = True
        try:
            if self.box is None:
                self.start()
            self.turn()
        except KilledError:
            self.box = None
        finally:
            self.is_inside = False

    def start(self):
        """The job starts as a real one does, with a checkpoint of the newest round."""
        place = Counted(Place(self.world, self))
        of_run = PlaceConfig(names=NAMES, number=self.number, steps=1)
        if self.round < 0 and self.world.is_away:  # it would begin a run of its own
            self.starts_s = self.world.now_s + 1.0
            raise KilledError
        try:
            claim(place, {"seed": 0}, "the mailbox")
            rejoining.refuse_older(place, self.round)
            last = rejoining.newest(place, pause=lambda seconds: None)
            sent = rejoining.own_sent(place, of_run)
        except (HolmesError, OSError, records.DamagedObjectError):  # it starts again
            self.starts_s = self.world.now_s + 1.0
            raise KilledError from None
        known = last.known.get(self.name) if last else None
        self.counted = known.step if known else 0
        self.done = max(self.counted, sent[1].step if sent else 0)
        self.sent_round, self.beat_s, standing, self.round = -1, -1.0, self.round, -1
        seat = MailboxSeat(
            order=NAMES, number=self.number, part=0, parts=1, names=tuple(SHAPES), writes=True
        )
        say, scratch = lambda text: None, self.world.scratch / self.name
        self.box = Mailbox(place, seat, RULES, scratch, say, lambda: self.world.now_s)
        if sent:
            try:
                self.box.adopt(*sent)
            except OSError:
                raise KilledError from None
            self.sent_round = sent[0]
        # Threads of a job would begin here.
        if standing < 0:
            first = IslandProgress(0, 0, 0, 0)
            self.box.sending.offer_first(first, weights_of("first", 0).items)

    def turn(self):
        world, box = self.world, self.box
        if world.now_s - self.beat_s >= 1.0:
            self.beat_s = world.now_s
            box.hold_lease()
        box.turn()
        self.done += 1
        if (arrived := box.news().arrived) > self.round:
            self.land(box.take(arrived, 0.0))
        has_new = self.round >= 0 and self.done > self.counted and self.sent_round <= self.round
        if has_new and world.rng.random() < 0.3:
            self.sent_round = self.round + 1
            tokens = self.done - self.counted
            weights = world.letters[self.name, self.done] = weights_of(self.name, self.done)
            progress = IslandProgress(self.sent_round, self.done, self.done, tokens)
            box.send(self.sent_round, progress, weights.items)

    def land(self, arrived):
        self.round = arrived.record.round
        for key, x in self.world.weights[self.round].items():
            np.testing.assert_array_equal(arrived.weights[key], x)
        if known := arrived.record.known.get(self.name):
            self.counted = max(self.counted, known.step)


@pytest.mark.parametrize("seed", FEW)
def test_islands_that_fail_at_any_moment_agree_on_each_round(tmp_path, seed):
    """Killed and started again, stopped in a call, without a mailbox, or with a full one."""
    world = World(tmp_path, seed)
    world.go_on(LIMIT_S, until=lambda: min(x.round for x in world.islands) >= 0)
    world.left = NUM_FAULTS
    world.go_on(LIMIT_S, until=lambda: not world.left)
    assert sum(world.had.values()) == NUM_FAULTS
    last = len(world.records) + ROUNDS_AFTER
    world.go_on(LIMIT_S, until=lambda: min(x.round for x in world.islands) >= last)
    assert min(island.round for island in world.islands) >= last, world.had
    newest = world.records[max(world.records)]
    for name in NAMES:  # each step counts once
        merged = sum(record.islands.get(name, 0) for record in world.records.values())
        assert merged == newest.known[name].step > 0
