"""Loss against parameters on one corpus: python -m benchmarks.scaling_line

Trains four sizes of the model of configs/runs/small_llama.yaml on one device, on the text of
`benchmarks.technical_text`. All sizes read the same sequences in the same order. The learning rate
of a size is that of the run file, times its width over the size's (after Yang et al. 2022,
arXiv:2203.03466). Nothing was tuned.

The line is fitted to the logarithms of validation loss and of parameters without the embedding.
Kaplan et al. 2020 (arXiv:2001.08361) found loss ~ N^-0.076 for models that train to convergence. A
size here sees half a million tokens, so it is far from converged: the slope is the gain of a larger
model at the same few tokens. There is no bar.

Prints the numbers, and writes them and a picture after each size, the smallest first.
"""

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.provenance import RESULTS, provenance
from holmesjax import Trainer
from holmesjax.config import ModelConfig
from holmesjax.costs.parameters import parameter_counts, table_parameters
from holmesjax.errors import DataError, HolmesError
from holmesjax.report.figures import BLUE, GRID, INK, MUTED

NAME = "scaling_line"
RUN_FILE = "configs/runs/small_llama.yaml"
PUBLISHED = -0.076  # Kaplan et al. 2020, equation 1.1
HEAD_WIDTH = 32
LEARNING_RATE, ITS_WIDTH = 2e-3, 320  # of RUN_FILE
SETTINGS = (
    "topology=configs/topologies/one_cpu.yaml",
    "parallel.microbatches=null",
    "model.context_length=256",
    "train.steps=512",
    "train.global_batch=4",
    "train.eval_every=512",
    "train.eval_batches=64",
    "log.report=false",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One of the models; the others differ from it in these numbers alone."""

    num_layers: int
    width: int
    mlp_width: int  # about 8/3 of the width

    def settings(self) -> list[str]:
        num_heads = self.width // HEAD_WIDTH
        return [
            f"model.num_layers={self.num_layers}",
            f"model.width={self.width}",
            f"model.mlp_width={self.mlp_width}",
            f"model.num_heads={num_heads}",
            f"model.num_kv_heads={num_heads}",
            f"optimizer.learning_rate={LEARNING_RATE * ITS_WIDTH / self.width:.4g}",
        ]


SIZES = (
    Size(num_layers=2, width=64, mlp_width=176),
    Size(num_layers=3, width=96, mlp_width=256),
    Size(num_layers=4, width=160, mlp_width=432),
    Size(num_layers=6, width=192, mlp_width=512),
)


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--text", metavar="DIR", default="corpora/technical", help="(%(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for all sizes")
    args = parser.parse_args(arguments)
    text = Path(args.text)
    result: dict[str, Any] = {**provenance(NAME), "settings": [*SETTINGS, *args.settings]}
    result["sizes"] = []
    try:
        if not (text / "tokens").is_dir():
            problem, fix = "has no files of tokens", "run python -m benchmarks.technical_text"
            raise DataError(str(text), problem, found="no folder tokens", fix=fix)
        corpus = [f"data.corpus={text / 'tokens'}", f"data.tokenizer={text / 'tokenizer'}"]
        for size in SIZES:
            result["sizes"].append(measure(size, [*SETTINGS, *corpus, *args.settings]))
            print(json.dumps(result["sizes"][-1]), flush=True)
            _write(args.out, result)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(page(result))
    return 0


def measure(size: Size, settings: Sequence[str]) -> dict[str, Any]:
    """Trains a size, and returns its numbers."""
    started_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        own = [*size.settings(), *settings, f"run.dir={folder}/run"]
        trainer = Trainer(RUN_FILE, own, stream=io.StringIO())
        records = trainer.train()
    config = trainer.job.config
    return {
        "layers": size.num_layers,
        "width": size.width,
        "parameters": without_embedding(config.model),
        "learning_rate": config.optimizer.learning_rate,
        "tokens": config.train.sequences_after(config.train.steps) * config.model.context_length,
        "validation": records[-1]["val_loss"],
        "losses": [round(record["loss"], 5) for record in records],
        "cpu_min": (time.process_time() - started_s) / 60,
    }


def without_embedding(model: ModelConfig) -> int:
    """The parameters of all layers but the embedding, which is also the output projection."""
    return parameter_counts(model)[0] - table_parameters(model)


def slope(sizes: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The line through the logarithms of loss and parameters: its slope, and its value at 0.

    >>> sizes = [{"parameters": n, "validation": 100 * n**-0.25} for n in (1e4, 1e5, 1e6)]
    >>> [round(number, 6) for number in slope(sizes)] == [-0.25, 4.60517]
    True
    """
    numbers = np.log([size["parameters"] for size in sizes])
    losses = np.log([size["validation"] for size in sizes])
    found, at_0 = np.polyfit(numbers, losses, 1)
    return float(found), float(at_0)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    sizes = result["sizes"]
    rows = [
        "| layers | width | parameters without the embedding | learning rate | validation loss "
        "| CPU minutes |",
        "| ---: " * 6 + "|",
    ]
    for size in sizes:
        rows.append(
            f"| {size['layers']} | {size['width']} | {size['parameters']:,} "
            f"| {size['learning_rate']:.4g} | {size['validation']:.4f} | {size['cpu_min']:.1f} |"
        )
    lines = [*rows, "", f"Each size saw {sizes[0]['tokens']:,} tokens, the same ones."]
    lines += [
        f"Not measured: {size.num_layers} layers of width {size.width}."
        for size in SIZES[len(sizes) :]
    ]
    if len(sizes) > 2:
        without = [slope([*sizes[:i], *sizes[i + 1 :]])[0] for i in range(len(sizes))]
        lines += [
            f"Slope: loss ~ N^{slope(sizes)[0]:.3f} "
            f"({min(without):.3f} to {max(without):.3f} with one size left out).",
            "",
            f"Published: N^{PUBLISHED} (Kaplan et al. 2020, arXiv:2001.08361), for models of up to "
            "1.5 billion parameters that train to convergence. The models here are far from it. "
            "Probably so few tokens limit the loss more than parameters do, which makes the line "
            "flat. Text, tokenizer, context and schedule differ too.",
        ]
    made = f"commit {result['commit']}, {result['date']}, "
    made += f"{result['device']['cores']} cores of {result['device']['cpu']}"
    return "\n".join([*lines, "", f"{made}: `{result['command']}`"]) + "\n"


def chart(sizes: Sequence[dict[str, Any]]) -> Figure:
    """Validation loss by parameters, both logarithmic, with the line and the published slope."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    numbers = np.array([size["parameters"] for size in sizes], float)
    losses = np.array([size["validation"] for size in sizes])
    axes.loglog(numbers, losses, "o", color=BLUE, label="measured")
    lowest = losses.min()
    if len(sizes) > 1:
        own, at_0 = slope(sizes)
        line = np.exp(at_0) * numbers**own
        axes.plot(numbers, line, color=BLUE, linewidth=1, label=f"fitted: N^{own:.3f}")
        published = line[0] * (numbers / numbers[0]) ** PUBLISHED
        label = f"slope of Kaplan et al. 2020: N^{PUBLISHED}"
        axes.plot(numbers, published, "--", color=MUTED, linewidth=1, label=label)
        lowest = min(lowest, published[-1])
    for size in sizes:
        at = size["parameters"], size["validation"]
        text = f"{size['validation']:.3f}"
        axes.annotate(text, at, (0, 8), textcoords="offset points", color=INK, ha="center")
    axes.set_xticks(numbers, [f"{number / 1e6:.2g}M" for number in numbers])
    axes.set_xticks([], minor=True)
    ticks = np.arange(np.floor(lowest * 5) / 5, losses.max() + 0.2, 0.2)
    axes.set_yticks(ticks, [f"{tick:.1f}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("parameters without the embedding")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower left")
    return figure


def _write(folder: Path, result: dict[str, Any]) -> None:
    """Writes the result beside its picture and its page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{NAME}.md").write_text(page(result), encoding="utf-8")
    chart(result["sizes"]).savefig(folder / f"{NAME}.png", dpi=150, facecolor="white")


if __name__ == "__main__":
    sys.exit(main())
