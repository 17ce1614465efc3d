"""`transformers` in a process of its own, which has neither JAX nor our settings of warnings."""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_NEW = 12  # tokens that are generated after the first eight
ROOT = Path(__file__).parent.parent.parent
WEIGHTS = "model.safetensors"
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
    given, result = folder.parent / "tokens.npy", folder.parent / "result.npz"
    np.save(given, tokens)
    _start("compute", folder, given, result)
    with np.load(result) as found:
        return Theirs(str(found["problems"]), found["logits"], found["greedy"])


def train(folder: Path, rows: np.ndarray) -> tuple[float, Path, Path]:
    """A step of AdamW with the settings of `STEP` on rows of tokens, [B, L + 1].

    Returns:
      The loss; a folder with the gradients in place of the weights, and one with the new weights.
    """
    given, result = folder.parent / "rows.npy", folder.parent / "trained"
    np.save(given, rows)
    _start("step", folder, given, result)
    loss = float((result / "loss.txt").read_text())
    return loss, result / "gradients", result / "weights"


def _start(what: str, folder: Path, given: Path, result: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    argv = [sys.executable, "-m", __spec__.name, what, folder, given, result]
    subprocess.run(argv, cwd=ROOT, env={**os.environ, **offline}, check=True, timeout=240)


def load(folder: str) -> tuple[Any, Any]:
    """The model of a folder, and what was said of its tensors."""
    torch = importlib.import_module("torch")
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, info = auto.from_pretrained(folder, output_loading_info=True, **settings)
    return model, {name: sorted(found) for name, found in info.items() if found}


def step(folder: str, given: str, result: str) -> None:
    """Writes what `train` returns."""
    torch = importlib.import_module("torch")
    save = importlib.import_module("safetensors.torch").save_file
    model, problems = load(folder)
    assert not problems, problems
    named = dict(model.named_parameters())
    is_map = lambda name, x: x.ndim > 1 and not any(own in name for own in EMBEDDINGS)
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
    rows = torch.tensor(np.load(given), dtype=torch.long)
    logits = model(rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in named.items()}
    optimizer.step()
    for name, tensors in (("gradients", gradients), ("weights", named)):
        where = Path(result) / name
        where.mkdir(parents=True)
        shutil.copy(Path(folder) / "config.json", where)
        save({name: x.detach().contiguous() for name, x in tensors.items()}, where / WEIGHTS)
    (Path(result) / "loss.txt").write_text(str(loss.item()))


def compute(folder: str, given: str, result: str) -> None:
    """Writes what `Theirs` has."""
    torch = importlib.import_module("torch")
    model, problems = load(folder)
    tokens = torch.tensor(np.load(given))[None]
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
        # An end of text would end the row.
        model.generation_config.eos_token_id = None
        ids, mask = tokens[:, :8], torch.ones(1, 8, dtype=torch.long)
        new = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
        greedy = model.generate(ids, attention_mask=mask, **new)[0].numpy()
    np.savez(result, problems=str(problems or ""), logits=logits, greedy=greedy)


if __name__ == "__main__":
    {"compute": compute, "step": step}[sys.argv[1]](*sys.argv[2:])
