"""`transformers` in a process of its own, which has neither JAX nor our settings of warnings.

All tests of a process share it: PyTorch takes seconds to import.
"""

import atexit
import functools
import importlib
import importlib.util
import multiprocessing
import multiprocessing.pool
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_NEW = 12  # tokens that are generated after the first eight
TIMEOUT_S = 240.0
EMBEDDINGS = ("embed_tokens", "wte", "wpe")  # have no weight decay
# A large epsilon: dividing by the root of a second moment near zero would magnify roundings.
STEP = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-3, "weight_decay": 0.1}


class Theirs(NamedTuple):
    """The results of `transformers` for one folder."""

    problems: str  # with loading it: missing, unexpected or misshapen tensors
    logits: np.ndarray  # [L, V]
    greedy: np.ndarray  # the first eight tokens and those that follow them


def is_installed() -> bool:
    """Whether the extra `parity` is there."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def run(folder: Path, tokens: np.ndarray) -> Theirs:
    """Loads a folder and computes its logits and its likeliest tokens."""
    found: Theirs = _there(compute, folder, tokens)
    return found


def train(folder: Path, rows: np.ndarray) -> tuple[float, Path, Path]:
    """A step of AdamW with the settings of `STEP` on rows of tokens, [B, L + 1].

    Returns:
      The loss; a folder with the gradients in place of the weights, and one with the new weights.
    """
    gradients, weights = (folder.parent / name for name in ("gradients", "weights"))
    loss: float = _there(step, folder, rows, gradients, weights)
    return loss, gradients, weights


def _there(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of this module in the other process."""
    return _process().apply_async(function, arguments).get(TIMEOUT_S)


@functools.cache
def _process() -> multiprocessing.pool.Pool:
    """The other process, which ends with this one."""
    pool = multiprocessing.get_context("spawn").Pool(1, _stay_offline)
    atexit.register(pool.terminate)
    return pool


def _stay_offline() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def load(folder: Path) -> tuple[Any, Any]:
    """The model of a folder, and what was said of its tensors."""
    torch = importlib.import_module("torch")
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, info = auto.from_pretrained(folder, output_loading_info=True, **settings)
    return model, {name: sorted(names) for name, names in info.items() if names}


def step(folder: Path, rows: np.ndarray, gradients: Path, weights: Path) -> float:
    """Does what `train` says; returns the loss."""
    torch = importlib.import_module("torch")
    model, problems = load(folder)
    assert not problems, problems
    named = dict(model.named_parameters())
    is_map = lambda name, x: x.ndim > 1 and not any(part in name for part in EMBEDDINGS)
    decays = [x for name, x in named.items() if is_map(name, x)]
    others = [x for name, x in named.items() if not is_map(name, x)]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=STEP["learning_rate"],
        betas=(STEP["beta1"], STEP["beta2"]),
        eps=STEP["epsilon"],
        weight_decay=STEP["weight_decay"],
    )
    tokens = torch.tensor(rows, dtype=torch.long)
    logits = model(tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {name: x.grad.clone() for name, x in named.items()}
    optimizer.step()
    for where in (weights, gradients):
        # It writes tensors by their published names, which are not those of parameters of experts.
        model.save_pretrained(where)
        shutil.copy(folder / "config.json", where)
        for name, x in named.items():
            x.data.copy_(found[name])
    return float(loss)


def compute(folder: Path, tokens: np.ndarray) -> Theirs:
    """Does what `run` says."""
    torch = importlib.import_module("torch")
    model, problems = load(folder)
    row = torch.tensor(tokens)[None]
    with torch.no_grad():
        logits = model(row).logits[0].numpy()
        # An end of text would end the row.
        model.generation_config.eos_token_id = None
        ids, mask = row[:, :8], torch.ones(1, 8, dtype=torch.long)
        new = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
        greedy = model.generate(ids, attention_mask=mask, **new)[0].numpy()
    return Theirs(str(problems or ""), logits, greedy)
