"""All there is to measure on one NVIDIA GPU, in one command: python -m benchmarks.gpu_day

The parts come in the order of their value, so that an hour that ends early has answered what
matters most. Each part is a process of its own with a limit of its own: a kernel that hangs, or
that leaves the device of its process unusable, costs one part. A failure is a row, not an end. Rows
are written after each part. The same command goes on where the last one stopped. A part that has
ended, well or not, is run again only if `--again` names it; a part that the end of `--minutes` cut
short is run again by itself. Each part's commit stands beside its rows.

    machine     versions, clocks, and what the device reaches: copies and products
    values      cuDNN and each Pallas kernel beside plain JAX in float32, from the smallest case up,
                with the bits of many repeats
    doctor      what `launch doctor` says of the Pallas kernels within its limit of a minute
    speed       attention at 4k, 8k and 16k beside cuDNN; AdamW and moments beside a copy; the loss
    training    1.3 and 3.6 billion parameters: MFU, memory predicted and measured, PyTorch
    profile     what the planner takes the device for, as `launch profile` measures and writes it
    runs        the quickstart; one model in one process, and in two that share the device by tcp
    tiles       the Pallas kernels with other tiles, each in a process of its own

DIR gets four small files for each kind of device: gpu_day_<device>.json, .md, .log and .yaml, the
last of which is the calibration. `--rehearse` runs every part on a CPU with tiny shapes and without
limits of their own. `gpu_day_parts` has what each part measures, and `gpu_day_processes` runs them.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_day_parts import CUDNN, PALLAS, TILES
from benchmarks.gpu_day_processes import NAME, DayPart, has_ended, report, run_parts

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
    _part("training 1.3B", 360, "training", {"model": "1.3B", "system": "HolmesJAX"}),
    *(_part(f"values of Pallas {n}", 60, "values_of_pallas", x) for n, x in enumerate(PALLAS)),
    _part("doctor", 120, "doctor"),
    *(
        _part(f"speed of Pallas at {n}", 60, "speed", {"case": [n, *GQA], "by": "ours"})
        for n in LENGTHS
    ),
    _part("speed of plain JAX", 60, "speed", {"case": [LENGTHS[0], *GQA], "by": "plain"}),
    _part("adamw", 180, "lines_of", "adamw"),
    _part("cross-entropy", 90, "lines_of", "cross_entropy"),
    _part("training 1.3B, PyTorch", 300, "training", {"model": "1.3B", "system": "PyTorch"}),
    _part("training 3.6B", 360, "training", {"model": "3.6B", "system": "HolmesJAX"}),
    _part("profile", 300, "profile"),
    _part("quickstart", 240, "quickstart"),
    _part("pipeline", 240, "pipeline"),
    *(_part(f"tiles {n}", 60, "tiles", x) for n, x in enumerate(TILES)),
]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts (25)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="PART", help="parts, or how their names begin"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part that runs, too
    # A busy CPU is no reason for a part of a rehearsal to fail.
    longest_s = 60 * args.minutes if args.rehearse else 0.0
    parts = [part._replace(limit_s=max(part.limit_s, longest_s)) for part in PARTS]
    result = run_parts(parts, args.out, args.minutes, args.rehearse, args.again)
    print("", report(result), sep="\n")
    found = result["parts"]
    missing = [part.name for part in PARTS if not has_ended(found.get(part.name))]
    if missing:
        print(
            f"{len(missing)} parts had too little time; the same command goes on with {missing[0]}"
        )
    failed = [row for rows in found.values() for row in rows if row.get("problem")]
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
