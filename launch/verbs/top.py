"""`launch top`: a run that goes on, in a terminal; `report.live` says what is shown."""

import argparse
import sys
import time

from rich.console import Console
from rich.live import Live

from holmesjax.report import live

LOOK_S = 1.0


def run(args: argparse.Namespace) -> int:
    view = live.View(args.run_dir)
    if args.once or not sys.stdout.isatty():
        Console(highlight=False).print(view.look())
        return 0
    try:
        with Live(view.look(), auto_refresh=False, screen=True) as shown:
            while True:
                time.sleep(LOOK_S)
                shown.update(view.look(), refresh=True)
    except KeyboardInterrupt:
        return 0
