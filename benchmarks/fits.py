"""Fits a few unknowns of a machine to published runs, and tests the fit on others.

Every unknown is a factor of what is shipped, with a guess of how far off that may be, so that a few
rows cannot bend the model to their noise: least squares on logarithms of step times, each one's
weight falling as it strays (soft L1), and of the factors.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.published import AS_SHIPPED, Fitted, Layout, Run, bound_s

Factors = NDArray[Any]  # logarithms, one for each unknown

NOISE = 0.02  # of a step time; beyond it a row counts less and less
# Factor -> how far off, as a standard deviation of its logarithm.
UNKNOWNS = {
    "share": 0.05,
    "rows": 0.5,
    "columns": 0.5,
    "depth": 0.5,
    "attention": 0.2,
    "memory": 0.1,
    "layer_call": 0.2,
    "between": 0.3,
}
SPEED = 2.0  # the same, of all devices of a cluster that is not known at all
KIND = 0.5  # and of one kind of them, to the others


def fit(runs: Sequence[Run]) -> Fitted:
    """The unknowns of the machine of some runs; as shipped without any.

    What runs of one layout are off by in common, they are off by for a reason that the model does
    not know: runs of that layout are corrected by it, half of it where there is one run to tell.
    """
    if not runs:
        return AS_SHIPPED
    names = list(UNKNOWNS)
    spread = np.array([UNKNOWNS[name] for name in names])
    fitted = lambda x: Fitted(**dict(zip(names, np.exp(x).tolist(), strict=True)))
    found = fitted(_minimum(runs, fitted, spread))
    off: dict[Layout, list[float]] = {}
    for run in runs:
        off.setdefault(run.layout, []).append(math.log(run.measured_s / bound_s(run, found)))
    layouts = {layout: math.exp(sum(each) / (len(each) + 1)) for layout, each in off.items()}
    return dataclasses.replace(found, layouts=layouts)


def fit_kinds(runs: Sequence[Run]) -> Fitted:
    """One speed for each kind of device, as a factor of what its data sheet lets expect."""
    kinds = sorted({m.device.name for run in runs for machines in run.replicas for m in machines})
    spread = np.array([SPEED, *(KIND for _ in kinds)])

    def fitted(x: Factors) -> Fitted:
        speeds = np.exp(x[0] + x[1:]).tolist()
        by_kind = dict(zip(kinds, speeds, strict=True))
        return Fitted(kinds=by_kind, other_kinds=float(np.exp(x[0])))

    return fitted(_minimum(runs, fitted, spread))


def _minimum(runs: Sequence[Run], fitted: Callable[[Factors], Fitted], spread: Factors) -> Factors:
    """The logarithms of the factors."""
    measured_s = np.log([run.measured_s for run in runs])

    def residuals(x: Factors) -> Factors:
        found = fitted(x)
        errors = (np.log([bound_s(run, found) for run in runs]) - measured_s) / NOISE
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, x / spread])

    start = np.zeros_like(spread)
    found = least_squares(residuals, start, x_scale=spread, diff_step=1e-3, max_nfev=20).x
    return np.asarray(found)


def left_out(
    runs: Sequence[Run], parts: Sequence[Sequence[int]], how: Callable[[Sequence[Run]], Fitted]
) -> list[Fitted]:
    """For each run, what is fitted to all runs outside its own part."""
    found = [AS_SHIPPED] * len(runs)
    for part in parts:
        fitted = how([r for i, r in enumerate(runs) if i not in set(part) and not r.doubtful])
        for i in part:
            found[i] = fitted
    return found


def folds(num_runs: int, shuffle: int, num_folds: int = 5) -> list[list[int]]:
    """Runs shuffled into parts of equal size; the same ones each time for a shuffle."""
    order = np.random.default_rng(shuffle).permutation(num_runs).tolist()
    return [part for n in range(num_folds) if (part := order[n::num_folds])]


def by_model(runs: Sequence[Run]) -> list[list[int]]:
    """Runs of one size of model in one part."""
    sizes = [(run.model.width, run.model.num_layers) for run in runs]
    return [[i for i, size in enumerate(sizes) if size == one] for one in sorted(set(sizes))]
