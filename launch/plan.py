"""`launch plan`: prints the plan of a run and starts nothing."""

import argparse


def run(args: argparse.Namespace) -> int:
    print(args.job.plan.to_json() if args.json else "\n".join(args.job.describe()))
    return 0
