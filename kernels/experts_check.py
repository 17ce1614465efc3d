"""Cases of `kernels.attention.check` for the products of groups of rows.

The reference is a product in float32 for each group. Gradients of weights are compared by
themselves, and so is every group: a kernel that is wrong for some sizes of groups would go
unnoticed in a loss that falls all the same.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.experts_pallas import ROWS, group_gradients, group_products

LIMIT = 0.01  # of the largest number of a group's result: a few roundings to bfloat16
REPEATS = 10


class GroupsCase(NamedTuple):
    """Rows of groups, and the widths of a product."""

    sizes: tuple[int, ...]  # of the groups
    width: int
    inner: int
    dtype: str = "bfloat16"
    empty: int = 0  # rows behind the last group

    @property
    def label(self) -> str:
        shown = ", ".join(map(str, self.sizes[:4])) + ", ..." * (len(self.sizes) > 4)
        behind = f" and {self.empty} rows behind them" * (self.empty > 0)
        return f"experts, {self.width} x {self.inner}, groups of {shown}{behind}"


def cases(width: int, inner: int, dtype: str, *, small: bool = False) -> list[GroupsCase]:
    """Empty groups, all rows in one, groups of no whole tile; large ones, unless it is `small`."""
    sizes = [(100, 0, 60, 33), (0, 0, 0, 192), (1, 2, 3, 122)]
    if not small:
        rng = np.random.default_rng(0)
        sizes.append(tuple(rng.multinomial(8192, rng.dirichlet(np.ones(16))).tolist()))
    cases = [GroupsCase(groups, width, inner, dtype) for groups in sizes]
    return [*cases, GroupsCase((64, 0, 50), width, inner, dtype, empty=78)]


def checks(
    asked: Mapping[str, Any] | None, *, small: bool = False
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The checks of experts of a width: what each is of, and what does it; none for None."""
    own = {} if asked is None else {name: asked[name] for name in ("width", "inner", "dtype")}
    repeats = 1 if small else REPEATS
    return [
        (case.label, functools.partial(check, case, repeats=repeats))
        for case in (cases(**own, small=small) if own else ())
    ]


def check(
    case: GroupsCase,
    products: Callable[..., jax.Array] = group_products,
    gradients: Callable[..., jax.Array] = group_gradients,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """Returns by result the largest error over the largest number, and `problem` if one is wrong.

    Args:
      case: what is computed.
      products, gradients: as `group_products` and `group_gradients`.
      repeats: how often all is computed; the bits must not change.
    """
    rng, num_rows = np.random.default_rng(0), sum(case.sizes) + case.empty
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), case.dtype)
    num_rows += -num_rows % ROWS
    x_SD, dy_SF = draw(num_rows, case.width), draw(num_rows, case.inner)
    w_EDF = draw(len(case.sizes), case.width, case.inner)
    size_E = jnp.asarray(case.sizes, jnp.int32)

    @jax.jit
    def run(x: jax.Array, dy: jax.Array, w: jax.Array, size: jax.Array) -> dict[str, jax.Array]:
        return {
            "product": products(x, w, size),
            "gradient of rows": products(dy, w, size, is_turned=True),
            "gradient of weights": gradients(x, dy, size),
        }

    results = [jax.tree.map(np.asarray, run(x_SD, dy_SF, w_EDF, size_E)) for _ in range(repeats)]
    x, dy, w = (np.asarray(a, np.float32) for a in (x_SD, dy_SF, w_EDF))
    want = {name: np.zeros(result.shape, np.float32) for name, result in results[0].items()}
    ends = np.cumsum(case.sizes).tolist()
    rows = [slice(end - size, end) for end, size in zip(ends, case.sizes, strict=True)]
    for e, span in enumerate(rows):
        want["product"][span] = x[span] @ w[e]
        want["gradient of rows"][span] = dy[span] @ w[e].T
        want["gradient of weights"][e] = x[span].T @ dy[span]
    by_rows, by_group = [*rows, slice(ends[-1], None)], [slice(e, e + 1) for e in range(len(rows))]
    errors = {
        name: _errors(result, want[name], by_group if result.ndim == 3 else by_rows)
        for name, result in results[0].items()
    }
    bad = [f"the {name} is off by {error:.2g}" for name, error in errors.items() if error > LIMIT]
    bits = [[x.tobytes() for x in jax.tree.leaves(result)] for result in results]
    if any(of_run != bits[0] for of_run in bits):
        bad.append("the bits change from run to run")
    problem = f"{case.label}: {'; '.join(bad)}" if bad else None
    return {"what": case.label, "errors": errors, "problem": problem}


def _errors(got: np.ndarray, want: np.ndarray, parts: Sequence[slice]) -> float:
    """The largest error of a part over its largest number; infinite for NaN, and where 0 is due."""
    found = []
    for part in parts:
        error = np.abs(got[part].astype(np.float32) - want[part]).max(initial=0.0)
        largest = np.abs(want[part]).max(initial=0.0)
        off = error / largest if largest else np.inf if error else 0.0
        found.append(np.inf if np.isnan(off) else float(off))
    return max(found)
