"""The data that a run leaves out where it went back after a spike. Does not import JAX.

    skipped.json    in the run folder: for each time, the step that the run went back to, the step
                    of the spike, and how many sequences are left out behind the first

The batch of the next step comes behind them. So the order of the data is a function of the seed,
the sequences of each step and this record, whatever checkpoint a run goes on from.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holmesjax.config import TrainConfig
from holmesjax.errors import CheckpointError, FatalError, raise_if_passing
from holmesjax.files import json_text
from holmesjax.files.whole_files import write_whole

RECORD = "skipped.json"
MOST = 3  # the most times that a run goes back to the same step


class Skipped(NamedTuple):
    """Sequences that are left out behind a step."""

    step: int  # of a checkpoint, or 0
    spike: int  # the step that stood out; 0: other islands know the data from the mailbox
    sequences: int

    def __str__(self) -> str:
        why = f"spike in step {self.spike}" if self.spike else "the global weights have them"
        return f"{self.sequences:,} sequences behind step {self.step} ({why})"


def read(run_dir: Path) -> tuple[Skipped, ...]:
    """Reads the record of a run. Raises CheckpointError if it cannot be read."""
    path = run_dir / RECORD
    try:
        found = tuple(Skipped(**entry) for entry in json_text.read(path))
        if all(isinstance(number, int) for skipped in found for number in skipped):
            return found
        raise ValueError("a step that is no number")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise_if_passing(error)
        problem = "cannot be read, and the order of the data depends on it"
        fix = f"copy it back from elsewhere, or remove {path} to leave nothing out from here on"
        raise CheckpointError(str(path), problem, found=error, fix=fix) from None


def sequences(skipped: Sequence[Skipped], first: int, last: int) -> int:
    """The number of sequences that are left out behind the steps `first` to `last - 1`."""
    return sum(part.sequences for part in skipped if first <= part.step < last)


def write(run_dir: Path, skipped: Sequence[Skipped]) -> None:
    """Writes the record of a run."""
    entries = [part._asdict() for part in skipped]
    write_whole(run_dir / RECORD, json.dumps(entries, indent=1) + "\n")


def add(run_dir: Path, train: TrainConfig, spike: int, step: int) -> Skipped:
    """Records that a run goes back from a spike to an earlier step; the data between are left out.

    Raises FatalError where it has gone back there too often.
    """
    assert step < spike, f"step {step} is not before the spike in step {spike}"
    known = read(run_dir)
    before = [part.spike for part in known if part.step == step]
    if len(before) >= MOST:
        raise FatalError(
            str(run_dir),
            f"has gone back to step {step} {MOST} times, with other data each time, and a step "
            "behind it is a spike again",
            found=f"spikes in steps {', '.join(map(str, before))} and now {spike}",
            fix="lower optimizer.learning_rate, raise train.spike_sigmas, or set "
            "train.spike_policy to skip",
        )
    own = train.sequences_after(spike) - train.sequences_after(step)
    found = Skipped(step, spike, own + sequences(known, step + 1, spike))
    write(run_dir, (*known, found))
    return found
