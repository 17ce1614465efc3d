"""Plan, train and sample: python -m launch <verb> ...

examples:
  python -m launch train configs/runs/quickstart.yaml                  # the run as it is written
  python -m launch train configs/runs/quickstart.yaml train.steps=20   # with an override
  python -m launch train runs/quickstart                               # resume it
  python -m launch plan configs/runs/quickstart.yaml --json            # print the plan and stop
  python -m launch generate runs/quickstart --prompt "def "            # sample from it
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from holmesjax.errors import HolmesError


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m launch", description=__doc__, formatter_class=raw)
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)

    train = verbs.add_parser("train", help="start a run, or resume one from its folder")
    plan = verbs.add_parser("plan", help="print the plan of a run and start nothing")
    for verb in (train, plan):
        verb.add_argument("target", help="a file of configs/runs/, or a run folder")
        verb.add_argument("overrides", nargs="*", metavar="key=value", help="dotted if nested")
    plan.add_argument("--json", action="store_true", help="for programs")

    generate = verbs.add_parser("generate", help="sample text from a run's newest checkpoint")
    generate.add_argument("run_dir", help="a run folder")
    generate.add_argument("--prompt", default="", help="text to continue")
    generate.add_argument("--max-tokens", type=int, default=256, help="tokens to add (256)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    generate.add_argument("--top-k", type=int, default=0, help="of the k likeliest only; 0: all (0)")
    generate.add_argument("--top-p", type=float, default=1.0, help="of the likeliest share (1.0)")
    generate.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 2 a mistake of the user, 75 asked to be started again."""
    args = make_parser().parse_intermixed_args(argv)
    try:
        # The verb's module is imported last: a mistake in a run file needs no JAX to be found.
        if args.verb in ("train", "plan"):
            args.job = importlib.import_module("holmesjax.job").load(args.target, args.overrides)
        return importlib.import_module(f"launch.{args.verb}").run(args)
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        return 0


if __name__ == "__main__":
    sys.exit(main())
