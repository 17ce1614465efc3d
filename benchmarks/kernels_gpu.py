"""Kernels on an NVIDIA GPU, beside what else there is: python -m benchmarks.kernels_gpu

First the tests of the kernels run on the device. Then every line times ours and its rivals on the
same random arrays, in turns:

    attention       cuDNN through JAX, JAX's own Pallas kernel, and PyTorch where installed;
                    forward, and forward and backward together, from which the backward follows
    adamw           XLA's pass, the kernel, and PyTorch's fused optimizer: by the format of moments,
                    with a transposed gradient, and for many small arrays
    cross_entropy   the logits all at once: time, and memory besides arguments and results

    time            median of the rounds; each is as many calls as take 50 ms, waited for at the end
    spread          the middle half of the rounds over their median
    rate            TFLOP/s, of unmasked scores only, or GB/s of the bytes that have to be moved
    limit           the share of what the device reaches here: a matrix product of 8192^3 in
                    bfloat16, or the sum of two arrays of 1 GiB, counting bytes read and written

A backward counts 2.5 forwards (Dao, arXiv:2307.08691). Without a GPU nothing is measured;
`--rehearse` runs every line once, small and interpreted, to see that it works.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.pipeline_overhead import middle
from benchmarks.provenance import RESULTS, provenance
from holmesjax.costs.optimizer_state import KEPT_BYTES, update_bytes
from holmesjax.runtime import call_times
from holmesjax.runtime.call_times import Call, normal
from kernels.adamw import Hyperparameters, Leaf, Turn, adamw_step, factors
from kernels.adamw_pallas import adamw_pallas
from kernels.attention import warpgroups
from kernels.attention.choice import is_hopper, pallas_lacks
from kernels.attention.pallas import attention_pallas
from kernels.attention.reference import attention_reference
from kernels.attention.tiles import Rule as Seen
from kernels.cross_entropy import cross_entropy, linear_cross_entropy
from kernels.linear import linear
from kernels.moments import Kept, Which, narrow, zero_moment

NAME = "kernels_gpu"
TESTS = ["tests/kernels"]
ROUND_S = 0.05
ROUNDS = 11
HYPER = Hyperparameters(0.9, 0.95, 1e-8, 0.1)

Calls = dict[str, Call]


class Attention(NamedTuple):
    """A line of the table: bfloat16, one sequence unless it is short."""

    length: int
    heads: int
    kv_heads: int
    head_width: int
    seen: Seen = Seen()
    documents: int = 1  # of equal length

    @property
    def label(self) -> str:
        what = "causal" if self.seen.causal else "full"
        if self.seen.window:
            what += f", window {self.seen.window}"
        if self.documents > 1:
            what += f", {self.documents} documents"
        heads = f"{self.heads}/{self.kv_heads} heads {self.head_width} wide"
        return f"{self.length} tokens, {heads}, {what}"

    @property
    def pairs(self) -> int:
        """Scores that are not masked, of a head."""
        length = self.length // self.documents
        if not self.seen.causal:
            return self.documents * length * length
        window = min(self.seen.window or length, length)
        return self.documents * (window * (window + 1) // 2 + (length - window) * window)

    @property
    def forward_flop(self) -> float:
        return 4.0 * self.pairs * self.heads * self.head_width


ATTENTION = [
    *(Attention(length, 64, 8, 128) for length in (2048, 4096, 8192, 16384)),
    *(Attention(length, 64, 8, 64) for length in (4096, 8192)),
    *(Attention(length, 32, 8, 256) for length in (4096, 8192)),
    Attention(8192, 64, 8, 128, Seen(causal=False)),
    Attention(8192, 64, 8, 128, Seen(window=1024)),
    Attention(8192, 64, 8, 128, documents=8),
]
SMALL_ATTENTION = [Attention(64, 4, 2, 64), Attention(64, 4, 2, 64, Seen(window=8), 2)]


# ---- what is compared --------------------------------------------------------------------------


def attention_calls(
    case: Attention, interpret: bool, only: Mapping[str, Callable] | None = None
) -> tuple[Calls, Calls]:
    """Forward, and forward and backward, of everyone that can compute this, or of these only."""
    shape = lambda heads: (1, case.length, heads, case.head_width)
    drawn = functools.partial(normal, dtype="bfloat16")
    q, dout = (drawn(seed, *shape(case.heads)) for seed in (0, 1))
    k, v = (drawn(seed, *shape(case.kv_heads)) for seed in (2, 3))
    segment = jnp.arange(case.length, dtype=jnp.int32)[None] // (case.length // case.documents)
    segments = (segment, segment) if case.documents > 1 else None

    def ours(attention: Callable) -> Callable:
        return lambda q, k, v: attention(q, k, v, segments, case.seen)[0]

    functions = {"plain JAX": ours(attention_reference)}
    if only is not None:
        functions = {name: ours(attention) for name, attention in only.items()}
    elif not interpret:
        for deterministic in (False, True):
            if not pallas_lacks({str(q.dtype)}, case.head_width, deterministic):
                kernels = functools.partial(attention_pallas, deterministic=deterministic)
                functions["ours" + ", deterministic" * deterministic] = ours(kernels)
        functions |= _library_attention(case, segment)

    def both(function: Callable) -> Callable:
        def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pullback = jax.vjp(function, q, k, v)
            return out, pullback(dout)

        return run

    forward: Calls = {}
    backward: Calls = {}
    for name, function in functions.items():
        forward[name] = functools.partial(jax.jit(function), q, k, v)
        backward[name] = functools.partial(jax.jit(both(function)), q, k, v, dout)
    if only is None and not interpret and case.documents == 1 and not case.seen.window:
        with contextlib.suppress(ImportError):
            forward["PyTorch"], backward["PyTorch"] = _torch_attention(case)
    return forward, backward


def _library_attention(case: Attention, segment: jax.Array) -> dict[str, Callable]:
    causal, window = case.seen.causal, case.seen.window
    functions: dict[str, Callable] = {}
    if case.documents == 1:
        local = None if window is None else (window - 1, 0)
        functions["cuDNN"] = lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=local, implementation="cudnn"
        )
    if window is None:
        with contextlib.suppress(ImportError):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                from jax.experimental.pallas.ops.gpu.attention import mha

            scale, shared = case.head_width**-0.5, case.heads // case.kv_heads
            ids = segment if case.documents > 1 else None
            wide = lambda x: jnp.repeat(x, shared, axis=2)  # it has no grouped queries
            functions["JAX's Pallas"] = lambda q, k, v: mha(
                q, wide(k), wide(v), ids, sm_scale=scale, causal=causal
            )
    return functions


def _torch_attention(case: Attention) -> tuple[Call, Call]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not torch.cuda.is_available():
        raise ImportError
    make = lambda heads: torch.randn(
        1, heads, case.length, case.head_width, dtype=torch.bfloat16, device="cuda"
    )
    q, k, v = (make(n).requires_grad_() for n in (case.heads, case.kv_heads, case.kv_heads))
    dout = make(case.heads)
    causal = case.seen.causal
    attention = lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def forward() -> Any:
        with torch.no_grad():
            return attention()

    def both() -> Any:
        return torch.autograd.grad(attention(), (q, k, v), dout)

    return forward, both


def adamw_calls(
    sizes: list[tuple[int, int]], kept: Kept, interpret: bool, *, is_transposed: bool = False
) -> Calls:
    """A step in place by XLA's pass, by the kernel where there is one, and by PyTorch."""

    def moment(shape: tuple[int, int], which: Which, seed: int) -> Any:
        x = normal(seed, *shape, dtype="float32")
        bits = jnp.zeros(shape, jnp.uint32)
        like = zero_moment(shape, kept, which)
        return narrow(x if which == "first" else x * x, like, bits, which)

    leaves = [
        Leaf(
            normal(0, *shape, dtype="float32"),
            moment(shape, "first", 1),
            moment(shape, "second", 2),
        )
        for shape in sizes
    ]
    # Those of a product whose dims are exchanged lie so in memory.
    given = [shape[::-1] if is_transposed else shape for shape in sizes]
    gradients = [normal(9, *shape, dtype="float32") for shape in given]
    step = factors(jnp.int32(10), 0.5, 1e-4, HYPER.beta1, HYPER.beta2)

    def by_xla(leaves: list[Leaf], gradients: list[jax.Array]) -> list[Leaf]:
        pairs = zip(leaves, gradients, strict=True)
        return [
            adamw_step(leaf, gradient.T if is_transposed else gradient, step, HYPER)
            for leaf, gradient in pairs
        ]

    def by_kernel(leaves: list[Leaf], gradients: list[jax.Array]) -> list[Leaf]:
        settings, turn = [HYPER] * len(leaves), Turn(1) if is_transposed else None
        turns = [turn] * len(leaves)
        return adamw_pallas(leaves, gradients, step, settings, turns=turns, interpret=interpret)

    def in_place(function: Callable) -> Call:
        run, held = jax.jit(function, donate_argnums=0), [jax.tree.map(jnp.copy, leaves)]

        def call() -> Any:
            held[0] = run(held[0], gradients)
            return held[0]

        return call

    calls = {"XLA": in_place(by_xla)}
    if warpgroups.CAN_SIMULATE if interpret else is_hopper(jax.devices()[0]):
        calls["the kernel"] = in_place(by_kernel)
    if not interpret and not is_transposed and kept == "float32":
        with contextlib.suppress(ImportError):
            calls["PyTorch"] = _torch_adamw(sizes)
    return calls


def _torch_adamw(sizes: list[tuple[int, int]]) -> Call:
    import torch

    if not torch.cuda.is_available():
        raise ImportError
    parameters = [torch.nn.Parameter(torch.randn(*shape, device="cuda")) for shape in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, betas=HYPER[:2], fused=True)

    def call() -> Any:
        optimizer.step()
        return parameters[0]

    return call


def cross_entropy_calls(tokens: int, width: int, vocab: int, chunks: int) -> tuple[Calls, dict]:
    """The calls, and the bytes of temporaries of each."""
    shapes = (1, tokens, width), (width, vocab)
    x, w = (normal(seed, *shape, dtype="bfloat16") for seed, shape in enumerate(shapes))
    target = jax.random.randint(jax.random.key(2), (1, tokens), 0, vocab)
    functions = {
        "ours": lambda x, w: linear_cross_entropy(x, w, target, num_chunks=chunks)[0],
        "all at once": lambda x, w: cross_entropy(linear(x, w, "float32"), target).sum(),
    }
    calls: Calls = {}
    temporary_bytes = {}
    for name, function in functions.items():
        compiled = jax.jit(jax.value_and_grad(function, (0, 1))).lower(x, w).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None, "no compiler without"
        temporary_bytes[name] = analysis.temp_size_in_bytes
        calls[name] = functools.partial(compiled, x, w)
    return calls, temporary_bytes


@jax.jit
def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """A sum that moves three times the bytes of an array, two of them read.

    A copy asks for too little at a time: a thread of XLA's kernels has four numbers of each array,
    so one array in bfloat16 keeps half as many bytes on their way as two. On an H200 kernels of a
    training step that read one reached 3.3 TB/s, as a copy did, and additions of two 4.3.
    """
    return x + y


def limits(rehearse: bool) -> dict[str, float]:
    """FLOP/s of a large product, and bytes/s of the sum of two large arrays."""
    side, size = (64, 2**12) if rehearse else (8192, 2**30)
    x, y = (normal(seed, size // 2, dtype="bfloat16") for seed in (2, 3))
    product = call_times.product(side, side, side, "bfloat16")
    times = measure({"product": product, "sum": functools.partial(added, x, y)}, rehearse)
    return {
        "flop_per_s": 2.0 * side**3 / times["product"]["s"],
        "bytes_per_s": 3.0 * x.nbytes / times["sum"]["s"],
    }


# ---- measuring ---------------------------------------------------------------------------------


def wait(result: Any) -> None:
    jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.synchronize()


def measure(calls: Calls, rehearse: bool) -> dict[str, dict[str, float]]:
    """Seconds of each, in turns, and their spread."""
    rounds, round_s = (2, 0.0) if rehearse else (ROUNDS, ROUND_S)
    times = call_times.rounds_s(calls, rounds=rounds, round_s=round_s, wait=wait)
    found = {name: middle(took) for name, took in times.items()}
    return {name: {"s": x["median"], "spread": x["spread"]} for name, x in found.items()}


def attention_rows(
    case: Attention, forward: Calls, both: Calls, rehearse: bool
) -> Iterator[dict[str, Any]]:
    """A line for each way of everyone, from `attention_calls`."""
    forward_times, both_times = measure(forward, rehearse), measure(both, rehearse)
    for name, one in forward_times.items():
        backward_s = both_times[name]["s"] - one["s"]
        for way, s, flop, spread in (
            ("forward", one["s"], case.forward_flop, one["spread"]),
            ("backward", backward_s, 2.5 * case.forward_flop, both_times[name]["spread"]),
        ):
            yield {
                "what": f"attention {way}: {case.label}",
                "by": name,
                "ms": s * 1e3,
                "spread": spread,
                "rate": f"{flop / s / 1e12:.0f} TFLOP/s",
                "flop_per_s": flop / s,
            }


def attention_lines(rehearse: bool, most: dict[str, float]) -> Iterator[dict[str, Any]]:
    for case in SMALL_ATTENTION if rehearse else ATTENTION:
        for row in attention_rows(case, *attention_calls(case, rehearse), rehearse):
            yield {**row, "limit": row["flop_per_s"] / most["flop_per_s"]}


def adamw_lines(rehearse: bool, most: dict[str, float]) -> Iterator[dict[str, Any]]:
    one, many = ((64, 64), [(5, 64)] * 2) if rehearse else ((2**16, 2**12), [(256, 192)] * 300)
    cases = (
        ("one array", [one], False),
        ("one array, its gradient transposed", [one], True),
        (f"{len(many)} arrays", many, False),
    )
    for label, sizes, is_transposed in cases:  # the last compiles for minutes
        for kept, num_bytes in KEPT_BYTES.items():
            count = sum(rows * columns for rows, columns in sizes)
            calls = adamw_calls(sizes, kept, rehearse, is_transposed=is_transposed)
            for name, time_of in measure(calls, rehearse).items():
                rate = update_bytes(count, 2 * num_bytes * count) / time_of["s"]
                yield {
                    "what": f"adamw: {count:,} parameters, {label}, moments in {kept}",
                    "by": name,
                    "bytes": update_bytes(count, 2 * num_bytes * count),
                    "ms": time_of["s"] * 1e3,
                    "spread": time_of["spread"],
                    "rate": f"{rate / 1e9:.0f} GB/s",
                    "limit": rate / most["bytes_per_s"],
                }


def cross_entropy_lines(rehearse: bool, most: dict[str, float]) -> Iterator[dict[str, Any]]:
    sizes = (64, 16, 512, 4) if rehearse else (16384, 4096, 128_256, 16)
    tokens, width, vocab, _ = sizes
    calls, temporary_bytes = cross_entropy_calls(*sizes)
    for name, time_of in measure(calls, rehearse).items():
        rate = 6.0 * tokens * width * vocab / time_of["s"]
        yield {
            "what": f"cross-entropy: {tokens} tokens, width {width}, vocabulary {vocab}",
            "by": name,
            "ms": time_of["s"] * 1e3,
            "spread": time_of["spread"],
            "rate": f"{rate / 1e12:.0f} TFLOP/s",
            "limit": rate / most["flop_per_s"],
            "temporary_mib": temporary_bytes[name] / 2**20,
        }


PARTS = {
    "attention": attention_lines,
    "adamw": adamw_lines,
    "cross_entropy": cross_entropy_lines,
}


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| | | ms | spread | rate | limit | temporaries |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for x in lines:
        memory = f"{x['temporary_mib']:.0f} MiB" if "temporary_mib" in x else ""
        rows.append(
            f"| {x['what']} | {x['by']} | {x['ms']:.3f} | {x['spread']:.1%} | {x['rate']} | "
            f"{x['limit']:.0%} | {memory} |"
        )
    return "\n".join(rows)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--rehearse", action="store_true", help="small, anywhere; no result")
    parser.add_argument("--no-tests", action="store_true", help="only times")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some, too
    if not args.rehearse and not args.no_tests:
        tests = [sys.executable, "-m", "pytest", "-q", "--gpu", *TESTS]
        if status := subprocess.run(tests, cwd=RESULTS.parent.parent).returncode:
            print(f"{NAME}: the kernels' tests fail on this device; nothing is timed")
            return status
    device = jax.devices()[0]
    if not args.rehearse and device.platform != "gpu":
        print(f"{NAME}: no GPU here ({device.device_kind}); not measured. --rehearse runs it small")
        return 2
    most = limits(args.rehearse)
    lines = []
    for part in args.parts:
        for line in PARTS[part](args.rehearse, most):
            lines.append(line)
            print(table([line]).splitlines()[-1], flush=True)
    if args.rehearse:
        return 0
    result = {
        **provenance(NAME, device.device_kind),
        "limits": most,
        "lines": lines,
    }
    name = f"{NAME}_{device.device_kind.lower().replace(' ', '_')}"
    about = (
        f"commit {result['commit']}, {result['date']}, {device.device_kind}: `{result['command']}`"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(f"{table(lines)}\n\n{about}\n")
    print("", table(lines), about, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
