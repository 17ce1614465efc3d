"""`python -m tests.launch.script_launcher FOLDER VERB ...`: `launch` with one more launcher.

The launcher `script` is added by one module and one row of the table. For each process it writes a
script of a few lines into the folder, and starts it.
"""

import os
import shlex
import sys
from pathlib import Path

from launch.__main__ import main
from launch.launchers import table
from launch.launchers.launcher import Children, variables_here
from launch.launchers.local import addresses
from launch.launchers.table import LauncherKind


class ScriptLauncher:
    address = "127.0.0.1"
    port = 0
    sees_exits = True
    files_each = 1

    def __init__(self, topology):
        self._topology = topology
        self._children = Children()

    def start(self, start, events):
        here = variables_here(addresses(self._topology, start.process.node))
        variables = {**start.env, **here}
        words = [sys.executable, "-m", "launch", *start.command]
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        script = Path(sys.argv[1]) / f"start-{start.process.number}.sh"
        script.write_text("\n".join([*lines, f"exec {shlex.join(words)}"]))
        self._children.start(start.process.number, ["sh", str(script)], dict(os.environ), events)

    def end(self):
        self._children.end()


def for_nodes(topology, options):
    assert options.max_restarts == 0
    return ScriptLauncher(topology)


if __name__ == "__main__":
    kind = LauncherKind(module="tests.launch.script_launcher", reads=("--max-restarts",))
    table.LAUNCHERS["script"] = kind
    sys.exit(main(sys.argv[2:]))
