"""`launch train`: starts a run, or resumes it from its folder."""

import argparse
import signal
from types import FrameType

from holmesjax.trainer import Trainer

REQUEUE = 75  # EX_TEMPFAIL: what batch schedulers take for "start me again"


def run(args: argparse.Namespace) -> int:
    trainer = Trainer(args.job)
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if received:  # asked twice: do not wait for the step
            raise SystemExit(128 + number)
        received.append(number)
        trainer.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    trainer.train()
    return REQUEUE if signal.SIGTERM in received and not trainer.finished else 0
