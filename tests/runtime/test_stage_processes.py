"""A stage over several real processes: each makes its part of the first state, and digests it."""

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

from tests.jobs import HANG_S, free_listen
from tests.stage_process import digests_of, make_chunk, shards

ROOT = Path(__file__).parents[2]


def run(num_processes):
    """The output of each process."""
    words = [str(num_processes), free_listen()]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stage_process", str(rank), *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(num_processes)
    ]
    try:
        said = [process.communicate(timeout=HANG_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(text.splitlines()[-1]) for text in said]


def num_values(box):
    return math.prod(stop - start for start, stop in ast.literal_eval(box))


def test_each_process_draws_what_its_devices_hold_and_compares_nothing():
    """Programs over all devices have one key: each process finds what the first has compiled."""
    chunk = make_chunk()
    state = chunk.init(3)
    whole = shards(chunk, state)
    said = run(2)
    for process in said:
        drawn = {
            key: boxes
            for key, boxes in process["shards"].items()
            if key.startswith("params.") and not key.endswith(("scale_D", "bias_D"))
        }
        held = sum(num_values(box) for boxes in drawn.values() for box in boxes)
        assert (process["drawn"], process["compared"]) == (held, 0)
        assert process["digests"] == digests_of(state)
        for key, boxes in process["shards"].items():
            assert boxes.items() <= whole[key].items(), key
    for key, boxes in whole.items():
        assert set().union(*(process["shards"][key] for process in said)) == set(boxes)
    of_all = ("jit_init", "jit_on_shards")
    first, second = ({key for key in p["keys"] if key.startswith(of_all)} for p in said)
    assert first == second != set()
