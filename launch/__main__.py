"""Runs one verb: `python -m launch VERB ...`; `arguments` describes them."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from holmesjax.errors import REQUEUE, HolmesError
from launch.arguments import parse
from launch.patience import Patience


def _reads_data(args: argparse.Namespace) -> bool:
    """Whether the run would read its data on this machine; `plan` shows what `train` would do."""
    return args.verb == "plan" or (args.verb == "train" and args.launcher in (None, "local"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 cannot go on, 2 a mistake of the user, 75 start again."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        # The verb's module is imported last: a mistake in a run file needs no JAX to be found.
        planned = args.command if args.verb == "lab" else args
        if args.verb == "train":  # before there is anything to save
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUE))
        if planned and planned.verb in ("train", "plan", "doctor", "profile"):
            load = importlib.import_module("holmesjax.job").load
            reads_data = _reads_data(planned)
            with Patience("planning") as say:
                planned.job = load(
                    planned.target, planned.overrides, reads_data=reads_data, say=say
                )
        return importlib.import_module(f"launch.verbs.{args.verb}").run(args)
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # before there was anything to save
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        return 0


if __name__ == "__main__":
    sys.exit(main())
