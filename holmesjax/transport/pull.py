"""The pull protocol: who asks for which array when, and what has been delivered. No JAX, no I/O.

    source: offer, ready -> answer what was asked for, before or since -> delivered
    target: expect -> ask, a few arrays ahead -> every part lands once -> arrive -> take
            expect_later -> ask, many at a time, whatever is taken meanwhile -> ...

Methods change the state, and return what the byte mover (`tcp`) does next. They send nothing, wait
for nothing and take no lock: the mover calls them one at a time. A frame that the other end must
not send raises ViolationError.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holmesjax.transport.crossings import Key
from holmesjax.transport.frames import Frame, FrameKind, ViolationError, parts_of

# Arrays asked for and not yet taken: one that arrives while the one before is computed with. Each
# more would hold another boundary in memory and hide nothing longer than a task.
PREFETCH = 2
IN_BACKGROUND = 64  # arrays on their way while steps go on, so that a far link is filled
MAX_WAITING = 1 << 12  # arrays that others may have asked for and that are not yet offered

Where = tuple[int, int, int, int]  # crossing, step, microbatch and piece, as in a frame


class Shared(NamedTuple):
    """A piece that this process shares with another one."""

    peer: int  # number of the other process
    num_bytes: int
    num_streams: int  # connections between the two


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The pieces of one crossing that begin or end in this process, by their numbers."""

    index: int  # among the crossings of the plan
    name: str
    sends: Mapping[int, Shared] = field(default_factory=dict)
    receives: Mapping[int, Shared] = field(default_factory=dict)


@dataclass
class _Offer:
    """An array that has not been delivered completely."""

    unasked: set[int]  # pieces
    left: dict[int, int]  # bytes of each piece that are not delivered yet
    is_ready: bool = False


class Source:
    """The sending half.

    Args:
      traffic: of all crossings that this process takes part in.
    """

    def __init__(self, traffic: Sequence[Traffic]):
        self._by_index = {one.index: one for one in traffic}
        self._by_name = {one.name: one for one in traffic}
        self._offers: dict[Key, _Offer] = {}
        self._early: dict[Key, dict[int, None]] = {}  # pieces asked for before they were ready

    def offer(self, key: Key) -> bool:
        """Announces an array; returns False if other processes send all of it."""
        assert key not in self._offers, f"{key} is offered twice"
        sends = self._by_name[key.crossing].sends
        if sends:
            left = {piece: shared.num_bytes for piece, shared in sends.items()}
            self._offers[key] = _Offer(set(sends), left)
        return bool(sends)

    def ready(self, key: Key) -> list[int]:
        """Returns the pieces to send now that the bytes of an offered array are on the host."""
        offer, asked = self._offers[key], list(self._early.pop(key, {}))
        offer.is_ready = True
        offer.unasked.difference_update(asked)
        return asked

    def pulled(self, peer: int, frame: Frame) -> Key | None:
        """Returns the array that answers a PULL at once; None if the PULL has to wait."""
        traffic = self._by_index.get(frame.crossing)
        shared = traffic.sends.get(frame.piece) if traffic else None
        if traffic is None or shared is None or shared.peer != peer:
            raise ViolationError(f"a PULL for what is not sent from here to there: {frame}")
        size = shared.num_bytes
        if (frame.offset, frame.length) != (0, size):
            raise ViolationError(f"a PULL for another range than the {size} bytes: {frame}")
        key = Key(traffic.name, frame.step, frame.microbatch)
        offer = self._offers.get(key)
        if offer is None or not offer.is_ready:
            early = self._early.setdefault(key, {})
            if frame.piece in early or len(self._early) > MAX_WAITING:
                raise ViolationError(f"a PULL that is one too many: {frame}")
            early[frame.piece] = None
            return None
        if frame.piece not in offer.unasked:
            raise ViolationError(f"a PULL for what it has got: {frame}")
        offer.unasked.remove(frame.piece)
        return key

    def parts(self, key: Key, piece: int) -> Iterator[Frame]:
        """Yields the DATA frames that answer a PULL."""
        traffic = self._by_name[key.crossing]
        shared = traffic.sends[piece]
        for offset, length in parts_of(shared.num_bytes, shared.num_streams):
            where = (traffic.index, key.step, key.microbatch, piece)
            yield Frame(FrameKind.DATA, *where, offset, length)

    def delivered(self, frame: Frame) -> Key | None:
        """Counts a DATA frame that was received; returns the array if all of it is there now."""
        key = Key(self._by_index[frame.crossing].name, frame.step, frame.microbatch)
        left = self._offers[key].left
        left[frame.piece] -= frame.length
        if not left[frame.piece]:
            del left[frame.piece]
        if left:
            return None
        del self._offers[key]
        return key

    @property
    def owed_to(self) -> set[int]:
        """The processes to which offered arrays are still owed."""
        return {
            self._by_name[key.crossing].sends[piece].peer
            for key, offer in self._offers.items()
            for piece in offer.left
        }


@dataclass
class _Landing:
    """A piece on its way here."""

    key: Key
    shared: Shared
    unseen: dict[int, int]  # offset and length of the parts that have not begun to come
    missing: int  # parts


class Target:
    """The receiving half.

    Args:
      traffic: of all crossings that this process takes part in.
    """

    def __init__(self, traffic: Sequence[Traffic]):
        self._by_name = {one.name: one for one in traffic}
        self._expected: deque[Key] = deque()
        self._later: deque[Key] = deque()  # that come in the background, and are not asked for yet
        self._background: set[Key] = set()  # of these, asked for and not taken
        self._missing: dict[Key, int] = {}  # pieces of each array that was asked for
        self._arrived: set[Key] = set()
        self._awaited: dict[tuple[int, Where], _Landing] = {}  # by peer and piece

    def expect(self, keys: Sequence[Key]) -> list[Key]:
        """Adds the next arrays, in their order; returns the arrays to ask for now."""
        known = {*self._expected, *self._missing}
        assert known.isdisjoint(keys), f"{known & set(keys)} are expected twice"
        self._expected += keys
        return self._ahead()

    def expect_later(self, keys: Sequence[Key]) -> list[Key]:
        """Adds arrays that come in the background; returns those to ask for now."""
        known = {*self._later, *self._expected, *self._missing}
        assert known.isdisjoint(keys), f"{known & set(keys)} are expected twice"
        self._later += keys
        return self._of_background()

    def _of_background(self) -> list[Key]:
        on_way = len(self._background - self._arrived)
        found = [
            self._later.popleft() for _ in range(min(len(self._later), IN_BACKGROUND - on_way))
        ]
        self._background.update(found)
        self._missing.update(dict.fromkeys(found, 0))
        return found

    def hurry(self, key: Key) -> list[Key]:
        """Returns the arrays to ask for when one is waited for, wherever it is in the order."""
        if key in self._missing:
            return []
        if key in self._later:
            self._later.remove(key)
            self._background.add(key)
        else:
            assert key in self._expected, f"{key} was not expected, or has been fetched"
            self._expected.remove(key)
        self._missing[key] = 0
        return [key]

    def take(self, key: Key) -> list[Key]:
        """Takes an array that has arrived; returns the arrays to ask for now."""
        self._arrived.remove(key)
        self._background.discard(key)
        del self._missing[key]
        return self._ahead()

    def _ahead(self) -> list[Key]:
        found = []
        while self._expected and len(self._missing) - len(self._background) < PREFETCH:
            found.append(self._expected.popleft())
            self._missing[found[-1]] = 0
        return found

    def ask(self, key: Key) -> list[tuple[int, Frame]]:
        """Returns the PULL frames for an array, with their receivers; data may land from now on."""
        traffic = self._by_name[key.crossing]
        self._missing[key] = len(traffic.receives)
        frames = []
        for piece, shared in traffic.receives.items():
            where = (traffic.index, key.step, key.microbatch, piece)
            parts = dict(parts_of(shared.num_bytes, shared.num_streams))
            self._awaited[shared.peer, where] = _Landing(key, shared, parts, len(parts))
            frames.append((shared.peer, Frame(FrameKind.PULL, *where, 0, shared.num_bytes)))
        return frames

    def landing(self, peer: int, frame: Frame) -> Key:
        """Returns the array of a DATA frame; each part may come once."""
        landing = self._awaited.get((peer, frame.where))
        if landing is None or landing.unseen.pop(frame.offset, None) != frame.length:
            raise ViolationError(f"data that was not asked for: {frame}")
        return landing.key

    def landed(self, peer: int, frame: Frame) -> tuple[int, Key | None]:
        """Counts a part whose bytes are here.

        Returns the bytes of its piece if the piece is complete now, else 0; and the array if the
        array is complete.
        """
        landing = self._awaited[peer, frame.where]
        landing.missing -= 1
        if landing.missing:
            return 0, None
        del self._awaited[peer, frame.where]
        self._missing[landing.key] -= 1
        is_whole = not self._missing[landing.key]
        return landing.shared.num_bytes, landing.key if is_whole else None

    def arrive(self, key: Key) -> list[Key]:
        """Notes that an array can be taken; returns the arrays to ask for now."""
        self._arrived.add(key)
        return self._of_background()

    def arrived(self, key: Key) -> bool:
        return key in self._arrived

    def sources(self, key: Key) -> list[int]:
        """Returns the processes that send pieces of an array."""
        return [shared.peer for shared in self._by_name[key.crossing].receives.values()]

    def owing(self, key: Key) -> list[int]:
        """Returns the processes that have not sent all their pieces of an array."""
        return [one.shared.peer for one in self._awaited.values() if one.key == key]

    def awaited_from(self, peer: int) -> Key | None:
        """Returns the first array of which a process owes a piece."""
        return next((one.key for (who, _), one in self._awaited.items() if who == peer), None)
