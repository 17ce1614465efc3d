"""Losses of islands by each outer rule, and how far pairs drift: python -m benchmarks.island_rules

Trains a small GPT on the source of Python's standard library, on eight islands that meet every 10
steps: 400 steps with AdamW, whose learning rate falls to a tenth. The islands are one array program
on one device, whose rules are the functions that runs call; tests hold runs to the same rules. All
rules begin with the same parameters and read the same sequences, for each of three seeds. A
training that meets in every step with rate 1 and no momentum, of weights alone, is beside them.
Bars, a miniature of NoLoCo's claims:

    loss      of pairs within 2 % of that of the rule nesterov, by validation after the last step
    spread    of weights over islands, a standard deviation: bounded, and falling with the learning
              rate: at the end at most half of the most, and with half of the rate below that of it

A small model shows that nothing is broken. It cannot show how a large one trains for weeks.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from benchmarks.loops import composed_loss
from benchmarks.provenance import RESULTS, provenance
from holmesjax.config import ModelConfig, OuterConfig
from holmesjax.models.layer import init_params
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.gossip import pair_step, pairs
from holmesjax.plan.outer_rule import late_step, mean_of, own_step, owner_step

NAME = "island_rules"
MODEL = ModelConfig(num_layers=2, width=32, num_heads=2, context_length=32, positions="learned")
ISLANDS, SEQUENCES, EVERY, ROUNDS = 8, 2, 10, 40  # sequences of an island in a step
WARMUP, RATE = 40, 3e-3
SEEDS = (0, 1, 2)
TRAINING_BYTES, VALIDATION_BYTES = 1 << 20, 1 << 16
RULES = {
    "every step": (OuterConfig(rate=1.0, momentum=0.0), 1.0),
    "nesterov": (OuterConfig(), 1.0),
    "nesterov, bfloat16": (OuterConfig(codec="bfloat16"), 1.0),
    "noloco": (OuterConfig(rule="noloco"), 1.0),
    "noloco, bfloat16": (OuterConfig(rule="noloco", codec="bfloat16"), 1.0),
    "noloco, half the learning rate": (OuterConfig(rule="noloco"), 0.5),
    "eager": (OuterConfig(rule="eager"), 1.0),
    "co2": (OuterConfig(rule="co2"), 1.0),
}
Weights = list[jax.Array]  # of each island


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of 10 steps (%(default)s)")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {**provenance(NAME), "rules": {}}
    training = Training(args.rounds * EVERY)
    for name, (outer, share) in RULES.items():
        every = 1 if name == "every step" else EVERY
        result["rules"][name] = [training.measure(outer, share, every, seed) for seed in SEEDS]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{NAME}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(result), encoding="utf-8")
    print(page(result), flush=True)
    return 0


class Training:
    """Steps of all islands in one program, and what is measured of them."""

    def __init__(self, steps: int):
        self._steps = steps
        text = _text()
        self._text, validation = text[:TRAINING_BYTES], text[TRAINING_BYTES:]
        rows = len(validation) // (MODEL.context_length + 1)
        self._validation = validation[: rows * (MODEL.context_length + 1)].reshape(rows, -1)
        _, self._unravel = ravel_pytree(init_params(MODEL, 0))
        self._loss = jax.jit(self._loss_of)
        self._optimizers = {share: self._optimizer(share) for share in (1.0, 0.5)}
        self._steps_of = {share: self._step(share) for share in self._optimizers}

    def _optimizer(self, share: float) -> optax.GradientTransformation:
        peak = share * RATE
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, WARMUP, self._steps, 0.1 * peak)
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
        )

    def _loss_of(self, weights: jax.Array, rows: jax.Array) -> jax.Array:
        batch = {"token_BL": rows[:, :-1], "target_BL": rows[:, 1:]}
        return composed_loss(MODEL, self._unravel(weights), batch)

    def _step(self, share: float) -> Callable:
        def step(weights: jax.Array, state: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
            gradient = jax.grad(self._loss_of)(weights, rows)
            updates, state = self._optimizers[share].update(gradient, state, weights)
            return optax.apply_updates(weights, updates), state

        return jax.jit(jax.vmap(step))

    def measure(self, outer: OuterConfig, share: float, every: int, seed: int) -> dict[str, Any]:
        """The validation loss of the global weights, and the spread after each meeting."""
        first, _ = ravel_pytree(init_params(MODEL, seed))
        meet, rng = rounds(outer, first), np.random.default_rng(seed)
        next(meet)
        weights = jnp.stack([first] * ISLANDS)
        state = jax.vmap(self._optimizers[share].init)(weights)
        spreads, whole = [], first
        for step in range(1, self._steps + 1):
            weights, state = self._steps_of[share](weights, state, self._rows(rng))
            if step % every == 0:
                new, whole = meet.send((step, list(weights)))
                weights = jnp.stack(new)
                spreads.append(float(jnp.sqrt(jnp.mean(jnp.var(weights, axis=0)))))
        return {"loss": float(self._loss(whole, self._validation)), "spreads": spreads}

    def _rows(self, rng: np.random.Generator) -> np.ndarray:
        length = MODEL.context_length + 1
        starts = rng.integers(len(self._text) - length, size=(ISLANDS, SEQUENCES))
        return self._text[starts[..., None] + np.arange(length)]


def rounds(outer: OuterConfig, first: jax.Array) -> Generator[Any, Any, None]:
    """Takes the step and the weights of all islands; gives new ones, and the global weights.

    The global weights are those after the last round if the training ended there.
    """
    codec, zeros, count = codec_of(outer), jnp.zeros_like(first), ISLANDS
    start, own = [first] * count, [zeros] * count
    known = whole = before = first
    momentum, new, final = zeros, start, first

    def given_back(after: jax.Array) -> jax.Array:
        """Global weights as all islands have them: what owners send back is rounded, too."""
        return after if codec.is_exact else whole + codec.decode(codec.encode(after - whole))

    while True:
        step, weights = yield new, final
        if outer.has_pairs:
            sent = [codec.decode(codec.encode(s - x)) for s, x in zip(start, weights, strict=True)]
            old = list(start)
            for group in pairs(count, step):
                for k in group:
                    other = next((n for n in group if n != k), k)
                    of_group = [sent[n] for n in group]
                    start[k], own[k] = pair_step(outer, of_group, old[k], old[other], own[k])
            new, final = list(start), mean_of(start)
        elif outer.rule == "eager":
            sent = [codec.encode(s - x) for s, x in zip(start, weights, strict=True)]
            parts = [own_step(outer, x, count, m) for x, m in zip(sent, own, strict=True)]
            start, own = [whole - ahead for ahead, _ in parts], [after for _, after in parts]
            after, momentum = owner_step(outer, sent, whole, momentum, None)
            whole = given_back(after)
            new, final = start, whole
        elif outer.rule == "co2":
            difference = mean_of([codec.decode(codec.encode(known - x)) for x in weights])
            after, momentum = late_step(outer, difference, whole, before, momentum)
            known, before, whole = whole, whole, given_back(after)
            new, final = [known] * count, whole
        else:
            sent = weights if codec.is_exact else [codec.encode(whole - x) for x in weights]
            after, momentum = owner_step(outer, sent, whole, momentum, None)
            whole = given_back(after)
            new, final = [whole] * count, whole


def _text() -> np.ndarray:
    """Bytes of Python's standard library, in the order of its files' names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: TRAINING_BYTES + VALIDATION_BYTES]
    return np.frombuffer(text, np.uint8).astype(np.int32)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown.

    >>> rules = {"nesterov": [{"loss": 2.0, "spreads": [0.0]}],
    ...          "noloco": [{"loss": 2.02, "spreads": [0.0, 0.004, 0.001]}]}
    >>> print(page({"rules": rules, "commit": "c", "date": "d", "command": "x"}).splitlines()[3])
    | noloco | 2.0200 | +1.00 % | 0.00400 | 0.00100 |
    """
    rows = [
        "| rule | loss | beside nesterov | most spread | spread at the end |",
        "| --- |" + " ---: |" * 4,
    ]
    mean = lambda runs, of: float(np.mean([of(run) for run in runs]))
    loss_of = lambda runs: mean(runs, lambda run: run["loss"])
    plain = loss_of(result["rules"]["nesterov"])
    for name, runs in result["rules"].items():
        most = mean(runs, lambda run: max(run["spreads"]))
        end = mean(runs, lambda run: run["spreads"][-1])
        share = 100 * (loss_of(runs) / plain - 1)
        rows.append(f"| {name} | {loss_of(runs):.4f} | {share:+.2f} % | {most:.5f} | {end:.5f} |")
    made = f"commit {result['commit']}, {result['date']}, on a CPU: `{result['command']}`"
    return "\n".join([*rows, "", made]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
