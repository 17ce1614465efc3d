"""Saves checkpoints of a run until it is killed; started by `test_kills`.

    python -m tests.checkpoints.killed_saver RUN_DIR TOLD

For each line on its input it forks a process, which goes on from the newest checkpoint of the run
and saves after each step with the writer of a real run. That process tells its id, and adds a line
to TOLD for each step whose checkpoint it knows to be committed. JAX is imported once and started in
each fork: a process in which it has started cannot be forked.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from holmesjax.checkpoints import newest_whole
from tests.checkpoints.forked_process import fork_for_each_line
from tests.hand_made_plans import hand_made_plan, make_chunks
from tests.written_checkpoints import SMALL, write_states


def save_for_ever(run_dir: Path, told: Path, begun: int) -> None:
    """Saves after each step from the newest checkpoint on; writes its id to `begun`."""
    chunks = make_chunks(SMALL, hand_made_plan((SMALL.num_layers,), 1, 1))
    found = newest_whole.find(run_dir, print, move=Path.rename)
    first = found.step + 1 if found else 1

    def steps() -> Iterator[int]:
        with told.open("a") as file:
            for step in itertools.count(first):
                if step > first + 1:  # the save before the last has ended when the next is asked
                    file.write(f"{step - 2}\n")
                    file.flush()
                if step == first:
                    os.write(begun, f"{os.getpid()}\n".encode())
                yield step

    write_states(run_dir, SMALL, chunks, steps())


def main() -> None:
    run_dir, told = Path(sys.argv[1]), Path(sys.argv[2])
    fork_for_each_line(lambda begun: save_for_ever(run_dir, told, begun))


if __name__ == "__main__":
    main()
