"""All there is to measure on one NVIDIA GPU, in one command: python -m benchmarks.gpu_day

The parts come in the order of their value, so that an hour that ends early has answered what
matters most. Each part is a process of its own with a limit of its own: a kernel that hangs, or
that leaves the device of its process unusable, costs one part. A failure is a row, not an end. Rows
are written after each part. The same command goes on where the last one stopped; a part that has
ended, well or not, is not run again at the same commit.

    machine     versions, clocks, and what the device reaches: copies and products
    values      cuDNN and each Pallas kernel beside plain JAX in float32, from the smallest case up,
                with the bits of many repeats
    speed       attention at 4k, 8k and 16k beside cuDNN; AdamW and moments beside a copy; the loss
    training    1.3 and 3.6 billion parameters: MFU, memory predicted and measured, PyTorch
    profile     what the planner takes the device for, as `launch profile` measures and writes it
    runs        the quickstart, and two processes of one pipeline that share the device through tcp
    tiles       the Pallas kernels with other tiles, each in a process of its own

DIR gets four small files: gpu_day.json, gpu_day.md, gpu_day.log and profile.yaml. `--rehearse` runs
every part on a CPU with tiny shapes. `gpu_day_parts` has what each part measures, and
`gpu_day_processes` runs them.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_day_parts import CUDNN, PALLAS, TILES
from benchmarks.gpu_day_processes import NAME, DayPart, report, run_parts

LENGTHS = (4096, 8192, 16384)


def _part(name: str, limit_s: float, function: str, argument: Any = None) -> DayPart:
    return DayPart(name, limit_s, f"benchmarks.gpu_day_parts:{function}", argument)


GQA = (64, 8, 128)
PARTS = [
    _part("machine", 90, "machine"),
    *(_part(f"values of cuDNN {n}", 60, "values_of_cudnn", x) for n, x in enumerate(CUDNN)),
    *(
        _part(f"speed of cuDNN at {n}", 60, "speed", {"case": [n, *GQA], "by": "cuDNN"})
        for n in LENGTHS
    ),
    _part("training 1.3B", 240, "training", {"model": "1.3B", "system": "HolmesJAX"}),
    *(_part(f"values of Pallas {n}", 60, "values_of_pallas", x) for n, x in enumerate(PALLAS)),
    *(
        _part(f"speed of Pallas at {n}", 60, "speed", {"case": [n, *GQA], "by": "ours"})
        for n in LENGTHS
    ),
    _part("speed of plain JAX", 60, "speed", {"case": [LENGTHS[0], *GQA], "by": "plain"}),
    _part("adamw", 120, "lines_of", "adamw"),
    _part("cross-entropy", 90, "lines_of", "cross_entropy"),
    _part("training 1.3B, PyTorch", 240, "training", {"model": "1.3B", "system": "PyTorch"}),
    _part("training 3.6B", 240, "training", {"model": "3.6B", "system": "HolmesJAX"}),
    _part("profile", 180, "profile"),
    _part("quickstart", 240, "quickstart"),
    _part("pipeline", 180, "pipeline"),
    *(_part(f"tiles {n}", 45, "tiles", x) for n, x in enumerate(TILES)),
]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts (25)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    result = run_parts(PARTS, args.out, args.minutes, args.rehearse)
    print("", report(result), sep="\n")
    missing = [part.name for part in PARTS if part.name not in result["parts"]]
    if missing:
        print(f"{len(missing)} parts had no time; the same command goes on with {missing[0]}")
    failed = [row for rows in result["parts"].values() for row in rows if row.get("problem")]
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
