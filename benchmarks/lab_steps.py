"""Words of a node's process about its steps, on standard output, for `benchmarks.holmes_lab`."""

import json
import time

import psutil


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has been busy, since it was started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def tell_step(loss: float | None) -> None:
    """Prints a JSON object: the step's loss, where it is known, and when it ended by clocks."""
    record = {
        "loss": loss,
        "end_s": time.monotonic(),
        "cpu_s": time.process_time(),
        "machine_cpu_s": machine_cpu_s(),
    }
    print(json.dumps(record), flush=True)
