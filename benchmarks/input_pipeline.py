"""How fast a process makes batches, beside grain's own loop: python -m benchmarks.input_pipeline

    windows      a memory map of tokens, in windows: `Batches.train`, and what stages read of it
    mixture      three such maps, whose weights change
    packed       their documents packed into rows
    grain        `MapDataset.source(windows).shuffle().batch()`, item by item, in this thread
    grain, 16    the same through `to_iter_dataset`, with 16 threads that read 16 batches ahead

All read the same windows of the same map. Rates are tokens of a batch per second of the CPU (of all
threads of the process) and per second of the clock; medians, least and most of rounds in turns.

Bar: windows, mixture and packed each make twice the tokens that a run of 10 M parameters consumes
on 2 cores, per second of the CPU.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np

from benchmarks.provenance import RESULTS, cpu_model, provenance
from holmesjax.config import DataConfig, MixedCorpus, MixtureChange
from holmesjax.data import sources, token_files, tokens
from holmesjax.data.batches import Batches, Rows, model_inputs
from holmesjax.data.sources import Item
from holmesjax.data.tokenizer import BEGIN

NAME = "input_pipeline"
CONSUMED = 2_600  # tokens/s of a run of 10 M parameters on 2 cores
LENGTH, GLOBAL_BATCH = 1024, 32
NUM_TOKENS, MEAN_DOCUMENT = 20_000_000, 1_000
SEED = 7
ROUND_BATCHES = 100


def write_corpus(path: Path, seed: int) -> None:
    """A file of tokens, of documents whose lengths have a long tail."""
    random = np.random.default_rng(seed)
    token_T = random.integers(1, 256, NUM_TOKENS).astype("<u2")
    sizes = random.lognormal(np.log(MEAN_DOCUMENT), 1.2, 4 * NUM_TOKENS // MEAN_DOCUMENT)
    start_D = np.cumsum([0, *(sizes.astype(int) + 2)])
    start_D = start_D[start_D < NUM_TOKENS].astype("<i8")
    token_T[start_D] = BEGIN
    token_T.tofile(path)
    start_D.tofile(path.with_suffix(".starts"))
    said = {"dtype": "uint16", "tokens": NUM_TOKENS, "documents": len(start_D), "largest": 255}
    said |= {"tokenizer": "bytes", "sha256": token_files.hash_of(path)}
    said |= {"starts_sha256": token_files.hash_of(path.with_suffix(".starts"))}
    path.with_suffix(".json").write_text(token_files.as_json(said))


def batches_of(config: DataConfig) -> Batches:
    data = sources.module_of(config).read(config, LENGTH)
    return Batches(data=data, seed=SEED, global_batch=GLOBAL_BATCH, length=LENGTH, num_validation=0)


def ours(batches: Batches) -> Any:
    """The batches of a run, as stages read them."""
    first = 0
    while True:
        rows = batches.train(first)
        assert isinstance(rows, Rows)
        yield model_inputs(rows)
        first += GLOBAL_BATCH


class Windows:
    """The windows as grain reads them: arrays by name."""

    def __init__(self, windows: tokens.FileWindows):
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        item: Item = self._windows[index]
        return {"tokens": item.tokens, "begins": item.begins}


def grains(windows: tokens.FileWindows, num_threads: int | None) -> Any:
    """grain's own loop over the same windows."""
    dataset = grain.MapDataset.source(Windows(windows)).shuffle(seed=SEED).repeat()
    whole = dataset.batch(GLOBAL_BATCH)
    if num_threads is None:
        return (whole[i] for i in itertools.count())
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_threads)
    return whole.to_iter_dataset(options).__iter__()


def cases(folder: Path) -> dict[str, Callable[[], Any]]:
    """The measured cases, by name."""
    for number in range(3):
        (folder / str(number)).mkdir()
        write_corpus(folder / str(number) / "corpus.bin", number)
    one: dict[str, Any] = {"source": "tokens", "validation_fraction": 0.0}
    plain = DataConfig(corpus=str(folder / "0"), **one)
    packed = DataConfig(corpus=str(folder / "0"), packing="best_fit", documents="mask", **one)
    mixture = tuple(
        MixedCorpus(name=name, source="tokens", corpus=str(folder / str(number)), weight=weight)
        for number, (name, weight) in enumerate({"a": 0.6, "b": 0.3, "c": 0.1}.items())
    )
    change = MixtureChange(tokens=50 * GLOBAL_BATCH * LENGTH, weights={"b": 1.0, "c": 1.0})
    mixed = DataConfig(mixture=mixture, mixture_changes=(change,), validation_fraction=0.0)
    windows = batches_of(plain).data.train
    assert isinstance(windows, tokens.FileWindows)
    return {
        "windows": lambda: ours(batches_of(plain)),
        "mixture": lambda: ours(batches_of(mixed)),
        "packed": lambda: ours(batches_of(packed)),
        "grain": lambda: grains(windows, None),
        "grain, 16": lambda: grains(windows, 16),
    }


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Rates of each case, by round: tokens per second of the CPU and of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        makers = cases(Path(folder))
        found: dict[str, dict[str, list[float]]] = {n: {"cpu": [], "clock": []} for n in makers}
        count = ROUND_BATCHES * GLOBAL_BATCH * LENGTH
        for _ in range(rounds):
            for name, make in makers.items():
                with contextlib.closing(make()) as own:  # its threads end
                    next(own)  # what is made once
                    cpu_s, clock_s = time.process_time(), time.perf_counter()
                    for _ in range(ROUND_BATCHES):
                        next(own)
                    found[name]["cpu"].append(count / (time.process_time() - cpu_s))
                    found[name]["clock"].append(count / (time.perf_counter() - clock_s))
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""

    def cell(rates: list[float]) -> str:
        return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"

    rows = [
        f"| {name} | {cell(own['cpu'])} | {cell(own['clock'])} |"
        for name, own in result["rates"].items()
    ]
    head = [
        "| batches of 32 x 1,024 tokens | tokens per second of the CPU | of the clock |",
        "| --- | ---: | ---: |",
    ]
    bar = f"Bar: twice the {CONSUMED:,} tokens/s of a run of 10 M parameters on 2 cores, "
    bar += "met." if result["is_met"] else "missed."
    own = f"commit {result['commit']}, {result['date']}, {result['device']['cores']} cores of "
    own += f"{cpu_model()}, grain {grain.__version__}, medians (least to most): "
    return "\n".join([*head, *rows, "", bar, "", f"{own}`{result['command']}`", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result = provenance(NAME)
    result["versions"]["grain"] = grain.__version__
    rates = measure(args.rounds)
    least = min(statistics.median(rates[name]["cpu"]) for name in ("windows", "mixture", "packed"))
    result |= {"rates": rates, "is_met": least >= 2 * CONSUMED}
    (RESULTS / f"{NAME}.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / f"{NAME}.md").write_text(table(result))
    print(table(result))
    return 0 if result["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
