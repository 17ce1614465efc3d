"""Cases of `kernels.attention.check` for the kernel of AdamW's step.

The reference runs on the CPU, operation by operation: then each rounds by itself, as in the kernel,
and no number may differ in any bit. Every result must have the same bits in every repeat. A step
that does not apply must leave all as it was.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import moments
from kernels.adamw import Hyperparameters, Leaf, Turn, adamw_step, factors
from kernels.adamw_pallas import FORMATS, MOMENTS, adamw_pallas
from kernels.moments import Kept

REPEATS = 10
SHARED = Hyperparameters(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


class UpdateCase(NamedTuple):
    """Parameters of one step, whose gradients are drawn."""

    kept: Kept
    shapes: tuple[tuple[int, ...], ...]
    gradient: str = "float32"
    turn: Turn | None = None  # how gradients lie
    parameter: str = "float32"
    applies: bool = True

    @property
    def label(self) -> str:
        kind = f", gradients in {self.gradient}" * (self.gradient != "float32")
        kind += f", parameters in {self.parameter}" * (self.parameter != "float32")
        kind += ", turned gradients" * (self.turn is not None) + ", left out" * (not self.applies)
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in self.shapes[:2])
        more = f" and {len(self.shapes) - 2} more" * (len(self.shapes) > 2)
        return f"AdamW, moments in {self.kept}, {sizes}{more}{kind}"


SMALL = ((7, 64), (64,), (5, 3, 128), (40, 64), (2, 192))  # also less than a tile, and ragged ends


def cases(kept: Kept, *, small: bool = False) -> list[UpdateCase]:
    """Many arrays in one launch, some turned, one left out, and one of more than 300 blocks."""
    found = [
        UpdateCase(kept, SMALL[-2:] if small else SMALL),
        UpdateCase(kept, ((32, 128), (64, 64)), turn=Turn(1)),
        UpdateCase(kept, ((2, 2, 32, 2, 64),), turn=Turn(rows=2, stack=1), parameter="bfloat16"),
    ]
    if kept == FORMATS[0] or not small:
        found.append(UpdateCase(kept, SMALL[:2], applies=False))
    if not small:
        found.append(UpdateCase(kept, SMALL, gradient="bfloat16"))
        found.append(UpdateCase(kept, ((200, 64),) * 40))
        found.append(UpdateCase(kept, ((5000, 256),)))
    return found


def checks(
    kept: str | None, *, small: bool = False, interpret: bool = False
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The checks of moments kept so: what each is of, and what does it; none for None."""
    update = functools.partial(adamw_pallas, interpret=interpret)
    return [
        (case.label, functools.partial(check, case, update, 1 if small else REPEATS))
        for form in FORMATS
        if form == kept
        for case in cases(form, small=small)
    ]


def check(case: UpdateCase, update: Callable, repeats: int = REPEATS) -> dict[str, Any]:
    """Returns by array the share of numbers that differ, and `problem` if one does.

    Args:
      case: what is computed.
      update: as `adamw_pallas`.
      repeats: how often everything is computed.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.disable_jit():
        leaves, gradients, told = _inputs(case)
        settings = [
            SHARED._replace(
                seed=7 * n, rounding=5 + n, weight_decay=0.1 * (n % 2), rate=1.0 + 0.5 * (n % 3)
            )
            for n in range(len(leaves))
        ]
        rows = zip(leaves, gradients, settings, strict=True)
        want = leaves
        if case.applies:
            want = [adamw_step(leaf, gradient, told, h) for leaf, gradient, h in rows]
    want, leaves, gradients, told = jax.tree.map(np.asarray, (want, leaves, gradients, told))
    given = [case.turn.of(gradient) if case.turn else gradient for gradient in gradients]
    turns = [case.turn] * len(leaves)
    run = jax.jit(lambda *args: update(*args, settings, turns=turns))
    results = [jax.tree.map(np.asarray, run(leaves, given, told)) for _ in range(repeats)]
    differ = {
        name: _share(results[0], want, part)
        for name, part in {"parameter": 0, "first moment": 1, "second moment": 2}.items()
    }
    bad = [f"{share:.2g} of the {name}s differ" for name, share in differ.items() if share]
    bad += _first_that_differs(results[0], want) if bad else []
    if any(_bits(result) != _bits(results[0]) for result in results):
        bad.append("the bits change from run to run")
    problem = f"{case.label}: {'; '.join(bad)}" if bad else None
    return {"what": case.label, "errors": differ, "problem": problem}


def _inputs(case: UpdateCase) -> tuple[list[Leaf], list[jax.Array], jax.Array]:
    """Parameters, their moments after some steps, gradients, and the factors of the third step."""
    leaves, gradients = [], []
    for number, shape in enumerate(case.shapes):
        drawn = np.random.default_rng(number).standard_normal((4, *shape)).astype(np.float32)
        parameter, mu, nu, gradient = map(jnp.asarray, drawn)
        noise = moments.noise(moments.positions(shape), jnp.uint32(number))
        both = [
            moments.narrow(x, moments.zero_moment(shape, case.kept, which), bits, which)
            for x, bits, which in zip((mu, nu * nu), noise, MOMENTS.values(), strict=True)
        ]
        leaves.append(Leaf(parameter.astype(case.parameter), *both))
        gradients.append(gradient.astype(case.gradient))
    told = factors(jnp.int32(3), 0.7, 0.01, SHARED.beta1, SHARED.beta2, case.applies)
    return leaves, gradients, told


def _share(got: Sequence[Leaf], want: Sequence[Leaf], part: int) -> float:
    """The share of numbers that differ in one part of all leaves; NaN is equal to NaN."""
    pairs = zip(
        *(jax.tree.leaves([leaf[part] for leaf in leaves]) for leaves in (got, want)), strict=True
    )
    different = [one.view(np.uint8) != other.view(np.uint8) for one, other in pairs]
    return float(np.mean(np.concatenate([x.ravel() for x in different])))


def _first_that_differs(got: Sequence[Leaf], want: Sequence[Leaf]) -> list[str]:
    """The first array with a number that differs: its shape, how many do, and one of them."""
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        bits = [x.view(f"u{x.itemsize}") for x in (one, other)]
        where = np.argwhere(bits[0] != bits[1])
        if len(where):
            place = tuple(where[0].tolist())
            count = f"{len(where)} of {one.size} numbers of {one.dtype}{list(one.shape)}"
            return [f"first {count}, at {list(place)} {one[place]} for {other[place]}"]
    return []


def _bits(leaves: Sequence[Leaf]) -> list[bytes]:
    return [x.tobytes() for x in jax.tree.leaves(leaves)]
