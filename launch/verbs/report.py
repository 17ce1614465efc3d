"""`launch report`: writes the report of a run once more, as far as the run has come."""

import argparse

from holmesjax import job as jobs
from holmesjax.report import page


def run(args: argparse.Namespace) -> int:
    jobs.load_config(args.run_dir)  # it is a run folder
    print(f"report  {page.write_report(args.run_dir)}")
    return 0
