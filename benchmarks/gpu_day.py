"""All there is to measure on one NVIDIA GPU, in one command: python -m benchmarks.gpu_day

The parts come in the order of their value, so that an hour that ends early has answered what
matters most. Each part is a process of its own with a limit of its own: a kernel that hangs, or
that leaves the device of its process unusable, costs one part. A failure is a row, not an end. Rows
are written after each part. The same command goes on where the last one stopped. A part that has
ended, well or not, is run again only if `--again` names it; a part that the end of `--minutes` cut
short is run again by itself. Each part's commit stands beside its rows.

    machine     versions, clocks, and what the device reaches: bytes and products
    pipeline    one model in one process, and in several that share the device by tcp, also without
                the events by which XLA says what hangs
    values      the kernel of AdamW's step, to the bit
    speed       AdamW by the kernel and by XLA: each format of moments, a transposed gradient, many
                small arrays; the loss of a large vocabulary
    training    1.3 billion parameters in fp8, with delayed scales and with current ones beside them
    profile     what the planner takes the device for, as `launch profile` measures and writes it
    quickstart  as it stands in the README
    tiles       the Pallas kernels with other tiles, the backward's first

The other parts that an H200 has answered once (`results/gpu_day_nvidia_h200.md`) come after that:

    values      cuDNN and each Pallas kernel beside plain JAX in float32, from the smallest case up,
                with the bits of many repeats; several cases at a time, without autotuning
    doctor      what `launch doctor` says of the Pallas kernels
    training    1.3 and 3.6 billion parameters in bfloat16, and PyTorch
    speed       attention at 4k, 8k and 16k beside cuDNN

DIR gets four small files for each kind of device: gpu_day_<device>.json, .md, .log and .yaml, the
last of which is the calibration. `--rehearse` runs every part on a CPU with tiny shapes and without
limits of their own. `gpu_day_parts` has what each part measures, and `gpu_day_processes` runs them.
"""

import argparse
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_day_parts import CUDNN, PALLAS, TILES
from benchmarks.gpu_day_processes import NAME, DayPart, has_ended, report, run_parts

FORMATS = ("float32", "bfloat16", "int8")  # of moments
LENGTHS = (4096, 8192, 16384)


def _part(
    name: str, limit_s: float, function: str, argument: Any = None, needs_s: float = 1.0
) -> DayPart:
    return DayPart(name, limit_s, f"benchmarks.gpu_day_parts:{function}", argument, needs_s)


def _checks(library: str, cases: Iterable[tuple[Any, Any]], limit_s: float = 110) -> list[DayPart]:
    name, function = f"values of {library}", f"values_of_{library.lower()}"
    parts = [_part(f"{name} {which}", limit_s, function, case, 40) for which, case in cases]
    return [part._replace(is_check=True) for part in parts]


def _training(model: str, needs_s: float, system: str = "HolmesJAX") -> DayPart:
    name = f"training {model}" if system == "HolmesJAX" else f"training {model}, {system}"
    return _part(name, 360, "training", {"model": model, "system": system}, needs_s)


def _speed(by: str, name: str, length: int) -> DayPart:
    return _part(f"speed of {name} at {length}", 60, "speed", {"case": [length, *GQA], "by": by})


GQA = (64, 8, 128)
# `needs_s` is what a part took on an H200, or a guess for one that has not ended there.
PARTS = [
    _part("machine", 90, "machine"),
    _part("pipeline", 240, "pipeline", needs_s=60),
    *_checks("AdamW", [(f"in {x}", x) for x in FORMATS], limit_s=240),
    _part("adamw", 300, "lines_of", "adamw", 60),
    _part("cross-entropy", 90, "lines_of", "cross_entropy", 30),
    _training("1.3B-fp8", 70),
    _training("1.3B-fp8-current", 70),
    _part("profile", 300, "profile", needs_s=60),
    _part("quickstart", 240, "quickstart", needs_s=40),
    *(_part(f"tiles {n}", 60, "tiles", x, 30) for n, x in enumerate(TILES)),
    *_checks("cuDNN", enumerate(CUDNN)),
    *_checks("Pallas", enumerate(PALLAS)),
    _part("doctor", 120, "doctor", needs_s=40),
    _training("1.3B", 70),
    _training("3.6B", 120),
    *(_speed("ours", "Pallas", n) for n in LENGTHS),
    *(_speed("cuDNN", "cuDNN", n) for n in LENGTHS),
    _speed("plain", "plain JAX", LENGTHS[0]),
    _training("1.3B", 100, "PyTorch"),
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
