"""Finds the fastest tiles of attention's kernels on this GPU: python -m benchmarks.kernels_tune

For every backend, head width and length it compiles all candidates, times those that compile, in
turns, and writes the best into `kernels/tuned.json`, in the place of what was there for this kind
of device. Causal, bfloat16, 16 query and 4 key-value heads. From then on attention takes them where
the device, the backend, the dtype and the head width are the same, of the nearest length.

Without a GPU nothing is measured; `--rehearse` does all of it with two candidates, small and
interpreted.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels_gpu import Calls, measure, normal
from benchmarks.pipeline_overhead import commit
from kernels import attention_mosaic, attention_mosaic_backward, attention_triton, tuned, warpgroups
from kernels.attention_tiles import Rule
from kernels.tuned import Case, Kernels

NAME = "kernels_tune"
HEADS, KV_HEADS = 16, 4
LENGTHS, WIDTHS = (1024, 4096, 16384), (64, 128, 256)
TRITON = [
    attention_triton.Tiles(queries=queries, keys=keys, num_warps=warps, num_stages=stages)
    for queries, keys, warps, stages in itertools.product(
        (32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)
    )
    if queries * keys >= 2048
]
MOSAIC = [
    warpgroups.Tiles(streamed=streamed, slots=slots)
    for streamed, slots in itertools.product((64, 128), (1, 2, 3, 4))
]


def cases(device_kind: str, *, rehearse: bool) -> Iterator[Case]:
    if rehearse:
        yield Case(device_kind, "triton", "bfloat16", 16, 64)
        return
    device = jax.devices()[0]
    is_hopper = str(getattr(device, "compute_capability", "")) == "9.0"
    backends = ("triton", "mosaic") if is_hopper else ("triton",)
    for backend, width, length in itertools.product(backends, WIDTHS, LENGTHS):
        yield Case(device_kind, backend, "bfloat16", width, length)


def functions(case: Case, *, rehearse: bool) -> dict[str, Callable[[Kernels], Callable]]:
    """What runs each kernel alone, with given tiles, of q, k, v and the output's gradient."""
    is_mosaic = case.backend == "mosaic"
    ahead: Any = attention_mosaic if is_mosaic else attention_triton
    back: Any = attention_triton.backward
    if is_mosaic:
        back = functools.partial(attention_mosaic_backward.backward, deterministic=True)
    joint = functools.partial(attention_mosaic_backward.backward, deterministic=False)
    rule = Rule()

    def forward(tiles: Kernels) -> Callable:
        return lambda q, k, v, saved: ahead.forward(rule, tiles, rehearse, q, k, v, None)

    def backward(tiles: Kernels, run: Callable, which: slice) -> Callable:
        # XLA leaves out the kernel of the gradients that nobody asks for.
        return lambda q, k, v, saved: run(rule, tiles, rehearse, q, k, v, None, *saved)[which]

    found: dict[str, Callable[[Kernels], Callable]] = {"forward": forward}
    if not is_mosaic or case.head_width in attention_mosaic_backward.DETERMINISTIC_HEAD_WIDTHS:
        found["dq"] = functools.partial(backward, run=back, which=slice(1))
        found["dkv"] = functools.partial(backward, run=back, which=slice(1, 3))
    if is_mosaic:
        found["joint"] = functools.partial(backward, run=joint, which=slice(3))
    return found


def best(case: Case, kernel: str, *, rehearse: bool) -> dict[str, Any] | None:
    """The entry of the fastest candidate; None if none compiles."""
    shape = lambda heads: (1, case.length, heads, case.head_width)
    q, dout = normal(0, *shape(HEADS)), normal(1, *shape(HEADS))
    k, v = (normal(seed, *shape(KV_HEADS)) for seed in (2, 3))
    candidates: list[Any] = MOSAIC if case.backend == "mosaic" else TRITON
    if rehearse:
        candidates = [dataclasses.replace(TRITON[0], queries=size, keys=size) for size in (16, 32)]
    make = functions(case, rehearse=rehearse)
    defaults = default_tiles(case)
    out, log_sum = jax.jit(make["forward"](defaults))(q, k, v, None)
    saved = out, log_sum, dout, log_sum
    calls: Calls = {}
    for i, tiles in enumerate(candidates):
        run = jax.jit(make[kernel](dataclasses.replace(defaults, **{kernel: tiles})))
        try:
            jax.block_until_ready(run(q, k, v, saved))
        except Exception:  # of XLA or of a compiler: too much memory, or no such product
            continue
        calls[str(i)] = functools.partial(run, q, k, v, saved)
    if not calls:
        return None
    times = measure(calls, rehearse)
    fastest = min(times, key=lambda name: times[name]["s"])
    entry = {**case._asdict(), "kernel": kernel}
    entry["tiles"] = dataclasses.asdict(candidates[int(fastest)])
    entry["ms"] = times[fastest]["s"] * 1e3
    entry["compiled"] = f"{len(calls)} of {len(candidates)}"
    return entry | {"commit": commit(), "jax": jax.__version__}


def default_tiles(case: Case) -> Kernels:
    if case.backend == "mosaic":
        return attention_mosaic.default_tiles(case.head_width)
    return attention_triton.default_tiles(case.head_width, jnp.dtype(case.dtype))


def write(entries: list[dict[str, Any]], device_kind: str) -> None:
    """In the place of what was known of this kind of device."""
    others = [x for x in json.loads(tuned.PATH.read_text()) if x["device_kind"] != device_kind]
    tuned.PATH.write_text(json.dumps(others + entries, indent=1) + "\n")


def tune(device_kind: str, *, rehearse: bool) -> Iterator[list[dict[str, Any]]]:
    """All entries so far, after each."""
    entries: list[dict[str, Any]] = []
    for case in cases(device_kind, rehearse=rehearse):
        for kernel in functions(case, rehearse=rehearse):
            what = f"{case.backend} {kernel}, {case.head_width} wide, {case.length} tokens"
            if (entry := best(case, kernel, rehearse=rehearse)) is None:
                print(f"{what}: nothing compiles", flush=True)
                continue
            entries.append(entry)
            print(f"{what}: {entry['tiles']}, {entry['ms']:.3f} ms", flush=True)
            yield entries


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--rehearse", action="store_true", help="small, anywhere; writes nothing")
    args = parser.parse_args()
    device = jax.devices()[0]
    if not args.rehearse and device.platform != "gpu":
        print(f"{NAME}: no GPU here ({device.device_kind}); not measured. --rehearse runs it small")
        return 2
    for entries in tune(device.device_kind, rehearse=args.rehearse):
        if not args.rehearse:
            write(entries, device.device_kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
