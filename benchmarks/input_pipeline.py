"""How fast a process makes batches, beside grain's own loop: python -m benchmarks.input_pipeline

    windows      a memory map of tokens, in windows: `Batches.train`, and what stages read of it
    mixture      three such maps, whose weights change
    packed       their documents packed into rows
    grain        `MapDataset.source(windows).shuffle().batch()`, item by item, in this thread
    grain, 16    the same through `to_iter_dataset`, with 16 threads that read 16 batches ahead

All read the same windows of the same map. The cases run in one process, and again in two at once:
each makes half of the rows of every batch, as the processes of two replicas do; grain's loop has
half of the items. Rates are the tokens that a process makes per second of its CPU (of all its
threads) and per second of the clock; medians, least and most over processes and rounds in turns.

Bar: windows, mixture and packed each make twice the tokens that a run of 10 M parameters consumes
on 2 cores, per second of the CPU of a process, whether there are one or two.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import grain
import numpy as np

from benchmarks.provenance import RESULTS, cpu_model, provenance
from holmesjax.config import DataConfig, MixedCorpus, MixtureChange
from holmesjax.data import sources, token_files, tokens
from holmesjax.data.batches import Batches, Rows, model_inputs
from holmesjax.data.byte_tokenizer import BEGIN
from holmesjax.data.sources import Item

NAME = "input_pipeline"
CONSUMED = 2_600  # tokens/s of a run of 10 M parameters on 2 cores
LENGTH, GLOBAL_BATCH = 1024, 32
NUM_TOKENS, MEAN_DOCUMENT = 20_000_000, 1_000
SEED = 7
ROUND_BATCHES = 100
COUNTS = (1, 2)  # processes at once
TIMEOUT_S = 300.0  # for the other process: it may have failed


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


def ours(batches: Batches, row_N: np.ndarray) -> Any:
    """Some rows of the batches of a run, as stages read them."""
    first = 0
    while True:
        rows = batches.train(first, row_N)
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


def grains(
    windows: tokens.FileWindows, index: int, count: int, num_threads: int | None = None
) -> Any:
    """grain's own loop over a share of the same windows."""
    dataset = grain.MapDataset.source(Windows(windows)).shuffle(seed=SEED)[index::count]
    whole = dataset.repeat().batch(GLOBAL_BATCH // count)
    if num_threads is None:
        return (whole[i] for i in itertools.count())
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_threads)
    return whole.to_iter_dataset(options).__iter__()


def cases(folder: Path, index: int, count: int) -> dict[str, Callable[[], Any]]:
    """The measured cases by name, in a process by its index among so many."""
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
    share = GLOBAL_BATCH // count
    own_N = np.arange(index * share, (index + 1) * share)
    return {
        "windows": lambda: ours(batches_of(plain), own_N),
        "mixture": lambda: ours(batches_of(mixed), own_N),
        "packed": lambda: ours(batches_of(packed), own_N),
        "grain": lambda: grains(windows, index, count),
        "grain, 16": lambda: grains(windows, index, count, num_threads=16),
    }


Rates = dict[str, dict[str, list[float]]]  # by case, then "cpu" or "clock"
_at_once: Barrier


def _begin(barrier: Barrier) -> None:
    global _at_once
    _at_once = barrier


def _measure(folder: Path, index: int, count: int, rounds: int) -> Rates:
    """The rates of each case in one process, by round."""
    makers = cases(folder, index, count)
    found: Rates = {name: {"cpu": [], "clock": []} for name in makers}
    size = ROUND_BATCHES * GLOBAL_BATCH // count * LENGTH
    for _ in range(rounds):
        for name, make in makers.items():
            with contextlib.closing(make()) as own:  # its threads end
                next(own)  # what is made once
                _at_once.wait()
                cpu_s, clock_s = time.process_time(), time.perf_counter()
                for _ in range(ROUND_BATCHES):
                    next(own)
                found[name]["cpu"].append(size / (time.process_time() - cpu_s))
                found[name]["clock"].append(size / (time.perf_counter() - clock_s))
    return found


def measure(rounds: int) -> dict[int, Rates]:
    """The rates of each number of processes: those of all of them, process by process."""
    context = multiprocessing.get_context("spawn")
    rates: dict[int, Rates] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(3):
            (folder / str(number)).mkdir()
            write_corpus(folder / str(number) / "corpus.bin", number)
        for count in COUNTS:
            barrier = context.Barrier(count, timeout=TIMEOUT_S)
            with ProcessPoolExecutor(count, context, _begin, (barrier,)) as pool:
                work = [pool.submit(_measure, folder, i, count, rounds) for i in range(count)]
                found = [task.result() for task in work]
            rates[count] = {
                case: {of: [rate for by_case in found for rate in by_case[case][of]] for of in by}
                for case, by in found[0].items()
            }
    return rates


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""

    def cell(rates: list[float]) -> str:
        return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"

    rows = [
        f"| {name} | {count} | {cell(of_case['cpu'])} | {cell(of_case['clock'])} |"
        for count, by_case in result["rates"].items()
        for name, of_case in by_case.items()
    ]
    head = [
        "| batches of 32 x 1,024 tokens | processes | tokens of one per second of its CPU | of the "
        "clock |",
        "| --- | ---: | ---: | ---: |",
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
    least = min(
        statistics.median(by_case[name]["cpu"])
        for by_case in rates.values()
        for name in ("windows", "mixture", "packed")
    )
    result |= {"rates": rates, "is_met": least >= 2 * CONSUMED}
    (RESULTS / f"{NAME}.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / f"{NAME}.md").write_text(table(result))
    print(table(result))
    return 0 if result["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
