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

from holmesjax.checkpoints import manifest
from holmesjax.hosts.process_environment import die_with
from tests.hand_made_plans import hand_made_plan, make_chunks
from tests.written_checkpoints import SMALL, write_states


def save_for_ever(run_dir: Path, told: Path, begun: int) -> None:
    """Saves after each step from the newest checkpoint on; writes its id to `begun`."""
    chunks = make_chunks(SMALL, hand_made_plan((SMALL.num_layers,), 1, 1))
    found = manifest.newest(run_dir, print, move=Path.rename)
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
    die_with(os.environ["HOLMES_PARENT"])
    run_dir, told = Path(sys.argv[1]), Path(sys.argv[2])
    for _ in iter(sys.stdin.readline, ""):
        own = str(os.getpid())
        if (child := os.fork()) == 0:
            die_with(own)
            begun = os.dup(1)
            os.dup2(2, 1)  # what is said goes to the errors
            save_for_ever(run_dir, told, begun)
            os._exit(1)  # it has ended by itself
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
