"""Losses of experts by what their loads are balanced over: python -m benchmarks.expert_balance

Trains a small model with experts on sequences of four topics, each a Markov chain of its own over
64 symbols. The balancing loss has the loads of the whole batch of 16 sequences, in the step before
(as runs have it), or those of each sequence by itself (BSZ 1 in "Demons in the Detail",
arXiv:2501.11873). Both begin with the same parameters and read the same sequences. Bars, a
miniature of that paper's claims, in the mean of five seeds:

    perplexity   of new sequences: lower with the loads of the batch
    topics       bits that the expert of a choice says about the topic: more with these

Ends with 1 if a bar is missed. A small model of made text shows a direction, and not how much a
large one gains.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.provenance import RESULTS, provenance
from holmesjax.config import ExpertsConfig, ModelConfig
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import experts, ops
from holmesjax.models.layer import apply, init_params, merged, split_by, statements

NAME = "expert_balance"
SYMBOLS, TOPICS, SUCCESSORS = 64, 4, 4
MODEL = ModelConfig(
    num_layers=2,
    width=32,
    num_heads=2,
    context_length=64,
    vocab_size=SYMBOLS,
    pattern=("expert_block",),
    experts=ExpertsConfig(count=8, active=2, width=32, balance_loss=0.05),
)
SEQUENCES, STEPS, RATE = 16, 300, 3e-3  # sequences of a step
NEW_SEQUENCES = 256
SEEDS = (0, 1, 2, 3, 4)
OVER = ("batch", "sequence")
Tree = Any


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training (%(default)s)")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {**provenance(NAME), "over": {}}
    for over in OVER:
        run = training(over, args.steps)
        result["over"][over] = [run(seed) for seed in SEEDS]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{NAME}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(result), encoding="utf-8")
    print(page(result), flush=True)
    mean = lambda over, what: np.mean([run[what] for run in result["over"][over]])
    is_lower = mean("batch", "loss") < mean("sequence", "loss")
    return 0 if is_lower and mean("batch", "topic_bits") > mean("sequence", "topic_bits") else 1


def training(over: str, steps: int) -> Callable[[int], dict[str, float]]:
    """A function that trains with a seed and measures; `over` is one of `OVER`."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 20, steps, 0.1 * RATE))

    def step(trained: Tree, fixed: Tree, state: Tree, rows: jax.Array) -> tuple:
        way = jax.value_and_grad(_loss, has_aux=True)
        (_, (_, counts)), gradient = way(trained, fixed, rows)
        updates, state = optimizer.update(gradient, state, trained)
        fixed = {layer: {"router": {"count_E": count}} for layer, count in counts.items()}
        return optax.apply_updates(trained, updates), fixed, state

    jitted, measured = jax.jit(step), jax.jit(_loss)

    def run(seed: int) -> dict[str, float]:
        rng = np.random.default_rng(seed)
        chain = chains(rng)
        whole = init_params(MODEL, seed)
        both = {layer: split_by(statements(MODEL)[layer], whole[layer]) for layer in whole}
        trained = {layer: part for layer, (part, _) in both.items()}
        fixed = {layer: part for layer, (_, part) in both.items() if part}
        state = optimizer.init(trained)
        with mock.patch.object(experts, "_auxiliary", LOADS_OF[over]):
            for _ in range(steps):
                rows = sequences(chain, rng, np.arange(SEQUENCES) % TOPICS)
                trained, fixed, state = jitted(trained, fixed, state, rows)
            losses, loads = [], []
            for topic in range(TOPICS):
                rows = sequences(chain, rng, np.full(NEW_SEQUENCES // TOPICS, topic))
                _, (loss, counts) = measured(trained, fixed, rows)
                losses.append(float(loss))
                loads.append(np.stack([*counts.values()]))  # [layer, expert]
        return {
            "loss": float(np.mean(losses)),
            "entropy": entropy(chain),
            "topic_bits": float(np.mean([bits(of_layer) for of_layer in np.stack(loads, 1)])),
        }

    return run


def _loss(trained: Tree, fixed: Tree, rows: jax.Array) -> tuple:
    """The loss that a step lowers; that of the next symbols, and the choices of experts."""
    x: Any = None
    total: Any = 0.0
    counts = {}
    arrays = {"position_L": jnp.arange(MODEL.context_length)}
    arrays |= {"token_BL": rows[:, :-1], "target_BL": rows[:, 1:]}
    num_targets = arrays["target_BL"].size
    for layer, kind in layers(MODEL).items():
        x, auxiliary = apply(
            layer, MODEL, merged(trained[layer], fixed.get(layer, {})), x, **arrays
        )
        weights = dict(kind.losses)
        total += sum(weights[name] * value for name, value in auxiliary.losses.items())
        if auxiliary.sums:
            counts[layer] = auxiliary.sums[experts.COUNT]
    return (x + total) / num_targets, (x / num_targets, counts)


_of_batch = experts._auxiliary


def _of_sequence(
    logits_BLE: jax.Array,
    scores_BLE: jax.Array,
    count_E: jax.Array,
    before_E: jax.Array,
    context: Any,
) -> dict:
    """The balancing loss with the loads of each sequence in this step."""
    found = _of_batch(logits_BLE, scores_BLE, count_E, before_E, context)
    choice_BLk = ops.largest(scores_BLE, context.model.experts.active)
    count_BE = jnp.sum(jax.nn.one_hot(choice_BLk, scores_BLE.shape[-1]), (1, 2))
    load_BE = count_BE / count_BE.mean(-1, keepdims=True)
    found["losses"]["expert_balance"] = jnp.sum(ops.shares(scores_BLE) * load_BE[:, None])
    return found


LOADS_OF = {"batch": _of_batch, "sequence": _of_sequence}


def chains(rng: np.random.Generator) -> np.ndarray:
    """The probability of each symbol behind each, for each topic: a few successors have some."""
    table = np.zeros((TOPICS, SYMBOLS, SYMBOLS))
    for topic, symbol in np.ndindex(TOPICS, SYMBOLS):
        successors = rng.permutation(SYMBOLS)[:SUCCESSORS]
        table[topic, symbol, successors] = rng.dirichlet(np.ones(SUCCESSORS))
    return table


def sequences(chain: np.ndarray, rng: np.random.Generator, topics: np.ndarray) -> np.ndarray:
    """A sequence of each topic, with the symbol behind it; int32 [B, L + 1]."""
    rows = np.zeros((len(topics), MODEL.context_length + 1), np.int32)
    rows[:, 0] = rng.integers(SYMBOLS, size=len(topics))
    cumulative = chain.cumsum(-1)
    for i in range(1, rows.shape[1]):
        below = cumulative[topics, rows[:, i - 1]] < rng.random((len(topics), 1))
        rows[:, i] = np.minimum(below.sum(-1), SYMBOLS - 1)
    return rows


def entropy(chain: np.ndarray) -> float:
    """Nats of a symbol, where the topic is known: no model's loss is lower in the long run."""
    found = []
    for table in chain:
        stays = np.linalg.matrix_power(table, 1000)[0]
        logs = np.log(table, where=table > 0, out=np.zeros_like(table))
        found.append(-np.sum(stays[:, None] * table * logs))
    return float(np.mean(found))


def bits(count_TE: np.ndarray) -> float:
    """The information of a choice's expert about the topic, in bits.

    >>> bits(np.array([[4, 0], [0, 4]])), bits(np.array([[2, 2], [2, 2]]))
    (1.0, 0.0)
    """
    joint = count_TE / count_TE.sum()
    even = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    ratio = np.divide(joint, even, where=joint > 0, out=np.ones_like(joint))
    return float(np.sum(joint * np.log2(ratio)))


def page(result: dict[str, Any]) -> str:
    """The result as Markdown.

    >>> run = {"loss": 1.0, "entropy": 0.5, "topic_bits": 0.25}
    >>> result = {"over": {"batch": [run]}, "commit": "c", "date": "d", "command": "x"}
    >>> print(page(result).splitlines()[2])
    | batch | 2.718 | 1.0000 | 1.0000 to 1.0000 | 0.250 |
    """
    rows = [
        "| loads of | perplexity | loss | losses of seeds | bits about the topic |",
        "| --- |" + " ---: |" * 4,
    ]
    for over, runs in result["over"].items():
        losses = [run["loss"] for run in runs]
        mean, told = np.mean(losses), np.mean([run["topic_bits"] for run in runs])
        span = f"{min(losses):.4f} to {max(losses):.4f}"
        rows.append(f"| {over} | {np.exp(mean):.3f} | {mean:.4f} | {span} | {told:.3f} |")
    made = f"commit {result['commit']}, {result['date']}, on a CPU: `{result['command']}`"
    return "\n".join([*rows, "", made]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
