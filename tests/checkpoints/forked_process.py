"""Forks a process for each line on the input of this one, which imports modules once."""

import os
import sys
from collections.abc import Callable

from holmesjax.hosts.process_environment import die_with


def fork_for_each_line(run: Callable[[int], None]) -> None:
    """Calls `run` in a process for each line, and tells how the process has ended.

    `run` gets the file to which the process writes its id when it begins; it does not return.
    """
    die_with(os.environ["HOLMES_PARENT"])
    for _ in iter(sys.stdin.readline, ""):
        parent = str(os.getpid())
        if (child := os.fork()) == 0:
            die_with(parent)
            begun = os.dup(1)
            os.dup2(2, 1)  # what is said goes to the errors
            run(begun)
            os._exit(1)  # it has ended by itself
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
