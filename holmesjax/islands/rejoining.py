"""The start of an island's job, by the mailbox: which of its data are in the global weights.

A job that was killed goes back to its checkpoint. What it has sent since may be merged, or may be
about to be: the sequences of it are in the global weights, and are left out. No JAX.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from holmesjax.checkpoints import island_states, skipped_data
from holmesjax.checkpoints.resume import Start
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import Config, PlaceConfig
from holmesjax.data.batches import Batches
from holmesjax.data.sources import ONLY
from holmesjax.errors import HolmesError, PeerError, of_system
from holmesjax.files import places, run_folder
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.mailbox import FOLDER_POLL_S, STORE_POLL_S, Mailbox
from holmesjax.islands.mailbox_claim import claim
from holmesjax.islands.mailbox_places import Counted, open_place
from holmesjax.islands.mailbox_records import DamagedObjectError, IslandProgress, Merged, Sent
from holmesjax.islands.mailbox_seat import ALONE, JobProgress, MailboxSeat, Rules

SCRATCH = "mailbox_scratch"
# Settings of `data` that islands have of their own: their paths, and what they validate on.
FREE = ("paths", "validation")
READINGS, PAUSE_S = 4, 2.0  # of a record at the start, before it counts as damaged


def place_of(config: Config) -> Counted:
    """The mailbox of an island's job, which is that of its run.

    Raises HolmesError for the mailbox of another run, or where it cannot be reached.
    """
    where = config.parallel.mailbox
    assert where is not None, "the job is of an island"
    place = Counted(open_place(where))
    try:
        claim(place, _identity(config), where)
    except OSError as error:
        raise of_system(error, where) from None
    return place


def _identity(config: Config) -> dict[str, Any]:
    """Settings that all islands of a run have in common, and no other run has."""
    parallel, place = config.parallel, config.parallel.place
    assert place is not None, "the job is of an island"
    model = {name: x for name, x in dataclasses.asdict(config.model).items() if name != "hf"}
    text = json.dumps(model, sort_keys=True, default=str)
    data = {name: x for name, x in dataclasses.asdict(config.data).items() if name not in FREE}
    settings = {
        "model": hashlib.sha256(text.encode()).hexdigest()[:12],
        **{f"model.{name}": x for name, x in model.items()},
        **{f"data.{name}": x for name, x in data.items()},
        "train.steps": place.steps,
        "seed": config.train.seed,
        "islands": list(place.names),
        "outer": dataclasses.asdict(parallel.outer_rule),
        "tokens of a step": config.train.global_batch * config.model.context_length,
    }
    found: dict[str, Any] = json.loads(json.dumps(settings, default=str))  # as it is read again
    return found


def shared_data(
    batches: Batches, own_sets: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The digests of the data that islands share, and of each file of them, by their names.

    Args:
      batches: of an island.
      own_sets: the names of `data.validation`, which an island has of its own.
    """
    of_own = {f"validation set {name}" for name in own_sets}
    digests = {name: x for name, x in batches.digests().items() if name not in of_own}
    begins = tuple(f"{name}: " for name in own_sets)
    files = {
        name.removeprefix(f"{ONLY}: "): digest  # which it has beside sets of its own
        for name, digest in batches.data.files.items()
        if not name.startswith(begins)
    }
    return digests, files


def open_mailbox(
    config: Config,
    run_dir: Path,
    seat: MailboxSeat,
    say: Callable[[str], object],
    progress: JobProgress = ALONE,
) -> Mailbox:
    """The mailbox of an island's job. Raises as `place_of`.

    Args:
      config, run_dir: of the job.
      seat: the part of the weights of this process.
      say: takes lines for the user.
      progress: told of bytes that come.
    """
    parallel = config.parallel
    rules = Rules(
        outer=parallel.outer_rule,
        quorum=parallel.quorum_of(len(seat.order)),
        grace_s=parallel.grace,
        lease_s=config.distributed.heartbeat_timeout_s,
    )
    poll_s = STORE_POLL_S if places.is_url(str(parallel.mailbox)) else FOLDER_POLL_S
    scratch = run_dir / SCRATCH / str(seat.part)  # only one process of a part writes
    return Mailbox(place_of(config), seat, rules, scratch, say, poll_s=poll_s, progress=progress)


def note(run_dir: Path, entry: Mapping[str, Any]) -> None:
    """Writes down a round that has landed, or an event, with its time."""
    line = json.dumps({"time_s": round(time.time(), 3), **entry})
    with contextlib.suppress(OSError), (run_dir / run_folder.ROUNDS).open("a") as file:
        file.write(f"{line}\n")


def newest(place: Counted, pause: Callable[[float], object] = time.sleep) -> Merged | None:
    """The record of the newest round, which is read some times before it counts as damaged.

    Raises OSError, and DamagedObjectError.
    """
    for last in range(READINGS):
        number = records.newest(records.in_rounds(place.listed(records.ROUNDS)))
        if number < 0:
            return None
        try:
            return records.read_merged(place, number)
        except (DamagedObjectError, FileNotFoundError):  # or it was removed since it was listed
            if last == READINGS - 1:
                raise
            pause(PAUSE_S)
    raise AssertionError("the last reading returns or raises")


def refuse_older(place: Counted, landed: int) -> None:
    """Raises HolmesError where a mailbox lacks a round that has landed on the island; -1: none.

    Its change since would count twice with the rounds of another beginning.
    """
    if landed < 0:
        return
    with _reading():
        last = newest(place)
    if last is None or last.round < landed:
        raise HolmesError(
            "parallel.mailbox",
            f"lacks round {landed}, with which this island goes on",
            found=f"round {last.round} is its newest" if last else "no round",
            fix="name the mailbox of the run, whole; or begin all islands anew, in new folders",
        )


def own_sent(place: Counted, own: PlaceConfig) -> tuple[int, IslandProgress] | None:
    """The progress that an island has sent to the round that comes, and that round.

    Raises HolmesError where the mailbox cannot be read.
    """
    with _reading():
        last = newest(place)
        number = last.round + 1 if last else 0
        folder = records.round_folder(number)
        sessions: dict[str, list[Sent]] = {}
        names = [name.removeprefix(f"{folder}/") for name in place.listed(folder)]
        for name in records.sent_by(own.name, names):
            name = f"{folder}/{name}"
            content = place.read(name)
            # One that is gone, or damaged, is merged by nobody.
            with contextlib.suppress(DamagedObjectError):
                if content is not None:
                    sent = Sent.from_bytes(content, name)
                    sessions.setdefault(sent.session, []).append(sent)
    whole = [parts[0].progress for parts in sessions.values() if records.are_whole(parts)]
    return (number, max(whole, key=lambda progress: progress.step)) if whole and number else None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raises HolmesError for what cannot be read in the mailbox, and PeerError for damage."""
    try:
        yield
    except OSError as error:
        raise of_system(error) from None
    except DamagedObjectError as error:
        fix = "put it back, or remove it: then its round is merged again, of what islands have sent"
        raise PeerError("the mailbox", "has a damaged object", found=error, fix=fix) from None


def go_on(start: Start, say: Callable[[str], object]) -> Start | None:
    """A start of an island's job that leaves out data which the global weights have already.

    Returns None where all steps are done, which it says. Other starts come back as they are.
    """
    config, place = start.job.config, start.job.config.parallel.place
    if start.step >= config.train.steps:
        for line in start.finished():
            say(line)
        return None
    if place is None:
        return start
    box = place_of(config)
    with _reading():
        last = newest(box)
    known = last.known.get(place.name) if last else None
    sent = own_sent(box, place)
    taken = max(known.sequences if known else 0, sent[1].sequences if sent else 0)
    left_out = sum(part.sequences for part in start.skipped if part.step == start.step)
    if (more := taken - start.sequences - left_out) > 0:
        entry = Skipped(start.step, 0, more)
        # Entries of a newer checkpoint, which is gone, are of data that are behind this one now.
        kept = [part for part in start.skipped if part.step <= start.step]
        skipped_data.write(start.job.run_dir, skipped := (*kept, entry))
        start = dataclasses.replace(start, skipped=skipped)
    all_tokens = place.steps * len(place.names) * config.train.global_batch
    all_tokens *= config.model.context_length
    is_over = bool(
        last
        and last.tokens >= all_tokens
        and start.checkpoint
        and start.checkpoint.step
        and not island_states.is_between_meetings(start.checkpoint)
    )
    if is_over and last:
        say(f"finished: round {last.round} has all {all_tokens:,} tokens of the run")
        return None
    return start
