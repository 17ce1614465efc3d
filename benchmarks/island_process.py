"""One island of `benchmarks.islands_apart`: it takes a set time for each step, and stops in time.

A process of its own: RUN_FILE SETTINGS_JSON OPTIONS_JSON.
"""

import io
import json
import sys
import time
from typing import Any

from holmesjax import Trainer
from holmesjax.callbacks import Callback
from holmesjax.islands import round_merging
from holmesjax.islands.merge import merge


class Pace(Callback):
    """Lets each step take at least so long, notes validations with their time, and stops.

    Args:
      step_s: seconds of a step.
    """

    def __init__(self, step_s: float):
        self._step_s, self._last_s = step_s, 0.0
        self.until_s = 0.0  # by `time.time`: when training stops
        self.losses: list[tuple[float, float]] = []

    def before_step(self, trainer: Any, step: int) -> None:
        time.sleep(max(0.0, self._last_s + self._step_s - time.monotonic()))
        self._last_s = time.monotonic()
        if time.time() > self.until_s:
            trainer.stop()

    def on_validation(self, trainer: Any, step: int, losses: Any) -> None:
        self.losses.append((time.time(), losses["val_loss"]))


def main() -> None:
    run_file, settings, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if options["merge"] == "uniform":
        round_merging.merge = lambda outer, arrays, tokens, *rest: merge(
            outer, arrays, [1] * len(arrays), *rest
        )
    pace = Pace(options["step_s"])
    with Trainer(run_file, settings, io.StringIO(), callbacks=[pace]) as trainer:
        print("ready", flush=True)
        pace.until_s = float(sys.stdin.readline())
        trainer.run()
        print(json.dumps({"losses": pace.losses, "steps": trainer.history[-1]["step"]}), flush=True)


if __name__ == "__main__":
    main()
