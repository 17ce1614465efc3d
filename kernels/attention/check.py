"""A check of attention kernels on the device at hand, against plain JAX in float32.

A kernel that is wrong may hang, or leave the device of its process unusable. So the check is a
process of its own, and its caller sets the limit of time: `python -m kernels.attention.check`. All
cases share the process: JAX starts once, which takes most of the time of a single case. It prints a
line before a case and one after it. A check that its caller has left behind ends by itself
(`--limit-s`).

    error    of an output or a gradient: the largest difference from plain JAX over the largest
             number there, below 2^-6
    bits     the same in every repeat; not those of a query's gradient whose parts are added in the
             order in which blocks end
"""

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import adamw_check, experts_check
from kernels.attention.reference import attention_reference
from kernels.attention.tiles import Rule

KERNELS = {
    "pallas": "kernels.attention.pallas:attention_pallas",
    "triton": "kernels.attention.triton:attention_triton",
}
MOST = 2.0**-6
MOST_SOFT_CAP = 2.0
REPEATS = 10
NAMES = ("output", "log-sum-exp", "query gradient", "key gradient", "value gradient")


class Case(NamedTuple):
    """Arrays to compute attention of, and how."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_width: int
    dtype: str = "bfloat16"
    rule: Rule = Rule()
    has_documents: bool = False
    deterministic: bool = False
    feeds_log_sum: bool = True  # whether a gradient of the log-sum-exp comes in; cuDNN ignores it

    @property
    def label(self) -> str:
        kind = "causal" if self.rule.causal else "full"
        kind += f", window {self.rule.window}" * (self.rule.window is not None)
        kind += f", soft cap {self.rule.soft_cap}" * (self.rule.soft_cap is not None)
        kind += f", scale {self.rule.scale}" * (self.rule.scale is not None)
        kind += ", documents" * self.has_documents + ", deterministic" * self.deterministic
        heads = f"{self.heads}/{self.kv_heads} heads {self.head_width} wide"
        return f"{self.batch} x {self.length} tokens, {heads}, {self.dtype}, {kind}"


def cases(asked: Mapping[str, Any], length: int = 397) -> list[Case]:
    """Small cases with ragged tiles for each rule, and one of more than 300 blocks.

    Args:
      asked: what a run needs: `dtype`, `has_documents`, `deterministic` and `is_cut` (whether
        devices share sequences), and of each of its `layers` the `head_width` and a rule's
        `window`, `soft_cap` and `scale`.
      length: of the small cases.
    """
    small = [case for layer in asked["layers"] for case in _small_cases(asked, layer, length)]
    large = [case._replace(length=2048, heads=20, kv_heads=10) for case in small[:1]]
    return [*dict.fromkeys(small), *large]


def _small_cases(asked: Mapping[str, Any], layer: Mapping[str, Any], length: int) -> Iterator[Case]:
    """The cases of a layer: its rule, with numbers that the arrays of a check feel.

    A window of thousands of keys would hide nothing there, and scores are not much above 1. Where
    devices share sequences, queries also see all keys of another device, or with a window belong
    to no document (`ring`).
    """
    window, soft_cap = layer["window"], layer["soft_cap"]
    rule = Rule(
        window=window and min(window, 3 * length // 8),
        soft_cap=soft_cap and min(soft_cap, MOST_SOFT_CAP),
        scale=layer["scale"],
    )
    case = Case(
        batch=2,
        length=length,
        heads=4,
        kv_heads=2,
        head_width=layer["head_width"],
        dtype=asked["dtype"],
        rule=rule,
        has_documents=asked["has_documents"],
        deterministic=asked["deterministic"],
    )
    yield case
    if asked["is_cut"] and window is None:
        yield case._replace(rule=replace(rule, causal=False))
    elif asked["is_cut"]:
        yield case._replace(has_documents=True)


def check(case: Case, attention: Callable, repeats: int = REPEATS) -> dict[str, Any]:
    """Returns the errors by name, which results changed their bits, and `problem` if one is bad.

    Args:
      case: what is computed.
      attention: takes queries, keys, values, segments, a rule and `deterministic`, and returns the
        output and the log-sum-exp.
      repeats: how often everything is computed.
    """
    arrays, segments = _inputs(case)
    run = jax.jit(_both_ways(_bound(attention, case), segments))
    wide = [x.astype(jnp.float32) for x in arrays]
    plain = lambda q, k, v, segments: attention_reference(q, k, v, segments, case.rule)
    with jax.default_matmul_precision("highest"):
        want = jax.tree.map(np.asarray, jax.jit(_both_ways(plain, segments))(*wide))
    first = jax.tree.map(np.asarray, run(*arrays))
    errors = {name: _error(*pair) for name, *pair in zip(NAMES, first, want, strict=True)}
    changed: dict[str, None] = {}
    for _ in range(repeats - 1):
        again = run(*arrays)
        changed |= {
            name: None
            for name, one, other in zip(NAMES, first, again, strict=True)
            if one.tobytes() != np.asarray(other).tobytes()
        }
    if not case.deterministic:
        changed.pop("query gradient", None)
    # Not "above": NaN is no number.
    bad = [f"the {name} is off by {x:.2g}" for name, x in errors.items() if not x < MOST]
    bad += [f"the {name} changes from run to run" for name in changed]
    problem = f"{case.label}: {'; '.join(bad)}" if bad else None
    return {"what": case.label, "errors": errors, "changed": [*changed], "problem": problem}


def _inputs(case: Case) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array] | None]:
    """Queries, keys, values and the gradients of both outputs; and documents of unlike lengths."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = lambda heads: (case.batch, case.length, heads, case.head_width)
    shapes = [shape(n) for n in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    normal = lambda key, shape, dtype: jax.random.normal(key, shape, jnp.float32).astype(dtype)
    arrays = [normal(key, shape, case.dtype) for key, shape in zip(keys[:4], shapes, strict=True)]
    of_log_sum = normal(keys[4], (case.batch, case.heads, case.length), "float32")
    arrays.append(of_log_sum if case.feeds_log_sum else jnp.zeros_like(of_log_sum))
    if not case.has_documents:
        return arrays, None
    ends = jnp.asarray([13, 150, 151, 300, 301, 1000, 1700])
    ids = jnp.searchsorted(ends, jnp.arange(case.length), side="right").astype(jnp.int32)
    ids_BL = jnp.stack([ids, jnp.zeros_like(ids)] * case.batch)[: case.batch]
    return arrays, (ids_BL, ids_BL)


def _bound(attention: Callable, case: Case) -> Callable:
    return lambda q, k, v, segments: attention(
        q, k, v, segments, case.rule, deterministic=case.deterministic
    )


def _both_ways(attention: Callable, segments: Any) -> Callable:
    def run(q: Any, k: Any, v: Any, dout: Any, dlog_sum: Any) -> tuple:
        outs, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments), q, k, v)
        return *outs, *pullback((dout, dlog_sum))

    return run


def _error(got: np.ndarray, want: np.ndarray) -> float:
    largest = float(np.abs(want).max())
    return float(np.abs(got.astype(np.float32) - want).max()) / largest


def named(name: str) -> Callable:
    """A function by its module and name.

    >>> named("math:sqrt")(4.0)
    2.0
    """
    module, _, function = name.partition(":")
    found: Callable = getattr(importlib.import_module(module), function)
    return found


def checks(
    asked: Mapping[str, Any], attention: Callable, *, small: bool
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The checks of a process: what each is of, and what does it, as `check` of a case.

    Those of kernels of another sort go behind these.
    """
    all_cases, repeats = (cases(asked, 20)[:-1], 2) if small else (cases(asked), REPEATS)
    found = [(case.label, partial(check, case, attention, repeats)) for case in all_cases]
    return [
        *found,
        *adamw_check.checks(asked.get("moments"), small=small),
        *experts_check.checks(asked.get("experts"), small=small),
    ]


def results(
    asked: Mapping[str, Any],
    attention: Callable,
    *,
    small: bool,
    begin: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Yields the results of `checks` up to the first bad one; `left` counts the others.

    `begin` takes what a check is of before it is made.
    """
    for left, (what, run) in reversed(
        [*enumerate(reversed(checks(asked, attention, small=small)))]
    ):
        begin(what)
        found = run()
        yield {**found, "left": left}
        if found["problem"]:
            return


def main() -> int:
    parser = argparse.ArgumentParser("kernels.attention.check", description=__doc__)
    parser.add_argument("asked", type=json.loads, help="what a run needs, as JSON")
    parser.add_argument("--attention", help="module:function (the kernels that are asked for)")
    parser.add_argument("--small", action="store_true", help="short cases, to try the check itself")
    limit = "seconds for each case, and for the start; 0: no limit"
    parser.add_argument("--limit-s", type=float, default=0.0, help=limit)
    args = parser.parse_args()

    def begin(what: str) -> None:
        # Without a handler the signal ends a process that hangs in a kernel, too.
        signal.setitimer(signal.ITIMER_REAL, args.limit_s)
        print(json.dumps({"begins": what}), flush=True)

    signal.setitimer(signal.ITIMER_REAL, args.limit_s)
    attention = named(args.attention or KERNELS[args.asked["kernels"]])
    for result in results(args.asked, attention, small=args.small, begin=begin):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
