"""`launch data`: shows what a run would read: documents, tokens and windows, and some of these.

A corpus that no run names is shown as a run would have it with `data.packing: best_fit`.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from holmesjax import config as configs, job as jobs
from holmesjax.config import Config
from holmesjax.data import object_stores, sources, text, token_formats, tokenizing, tokens
from holmesjax.data.batches import ArrayRows, Batches, Rows
from holmesjax.data.documents import Wanted
from holmesjax.data.packing import PackedRows
from holmesjax.data.sources import ONLY, Mixed, Sequences, Splits, Tokenizer
from holmesjax.errors import ConfigError

SHOWN = 12  # digits of a digest; also parts of a sequence
WIDTH = 300  # characters of a window
# For a corpus that no run names: a run file, and settings that fit any tokenizer and any size.
SETTINGS = configs.CHECKOUT / "configs/runs/quickstart.yaml"
FOR_ANY = (
    *("data.source=tokens", "data.validation_fraction=0", "model.vocab_size=16777216"),
    *("data.documents=mask", "train.eval_every=0", "train.global_batch=1"),
    "parallel.microbatches=null",
)


def run(args: argparse.Namespace) -> int:
    if args.windows < 0:
        raise ConfigError("--windows", "must be 0 or more", found=args.windows, fix="use 0 or more")
    _refuse_runs(args.run)
    if _is_corpus(args.run):
        with tempfile.TemporaryDirectory() as folder:
            _show_corpus(args, Path(folder))
        return 0
    config = _config(args.run, args.overrides)
    module = sources.module_of(config.data)
    module.look(config)
    if args.verify:
        _verify(config)
    length = config.model.context_length
    splits = module.read(config.data_by_tokens(), length)
    print(f"corpus      {splits.place}: {len(splits.files):,} files")
    if splits.left_out:
        print(f"left out    {splits.left_out}")
    _show_splits(config, splits)
    batches = Batches(
        data=splits,
        seed=config.train.seed,
        global_batch=config.train.global_batch,
        length=length,
        num_validation=config.train.eval_batches if config.train.eval_every else 0,
    )
    _show_run(config, splits)
    count = min(args.windows, config.train.global_batch)
    rows = batches.train(0, np.arange(count)) if count else None
    if isinstance(rows, ArrayRows):
        for name, array in rows.arrays.items():
            print(f"{name:<11} {array.dtype} {list(array.shape[1:])}")
    elif rows is not None:
        _show(rows, module.tokenizer(config.data), "step 1, sequence")
    return 0


def _refuse_runs(name: str) -> None:
    """Raises ConfigError for a folder of run folders."""
    if not os.path.isdir(name):
        return
    found = (path.parent for path in Path(name).glob(f"*/{jobs.TOPOLOGY}"))
    if runs := sorted(run_folder for run_folder in found if (run_folder / jobs.CONFIG).exists()):
        shown = ", ".join(run_folder.name for run_folder in runs[:8])
        fix = f"name one of them: python -m launch data {runs[0]}; launch top shows how it trains"
        raise ConfigError(name, "holds run folders, and is no corpus", found=shown, fix=fix)


def _is_corpus(name: str) -> bool:
    """Tells whether documents or tokens are named, and neither a run file nor a run folder."""
    if name == configs.PYTHON_STDLIB or object_stores.is_remote(name):
        return True
    path = Path(name)
    if path.is_dir():
        return not (path / jobs.CONFIG).exists() and any(path.iterdir())
    return path.exists() and path.suffix not in (".yaml", ".yml")


def _show_corpus(args: argparse.Namespace, folder: Path) -> None:
    """Shows a corpus by itself. Documents become files of tokens in a folder that may go."""
    config = configs.load(SETTINGS, [*FOR_ANY, f"data.corpus={args.run}", *args.overrides])
    data, length, left_out, kinds = config.data, config.model.context_length, "", ""
    if data.source == "tokens" and not _has_tokens(object_stores.path_of(args.run)):
        warn = lambda words: print(f"data: {words}", file=sys.stderr)
        wanted = Wanted(column=args.column)
        done = tokenizing.tokenize(data, folder, wanted=wanted, say=lambda done: None, warn=warn)
        left_out, kinds = done.left_out, done.files
        data = dataclasses.replace(data, corpus=str(folder), pattern=None)
    if data.source == "tokens":
        files = token_formats.find(data)
        num_tokens = sum(len(file.token_T) for file in files)
        known = all(file.documents is not None for file in files)
        documents = sum(file.num_documents(0, len(file.token_T)) for file in files)
        of = f"{documents:,} documents" if known else "documents: unknown"
        print(f"corpus      {args.run}: {num_tokens:,} tokens, {of}")
        if kinds:
            print(f"files       {kinds}")
        if known:
            data = dataclasses.replace(data, packing="best_fit")
        else:
            data = dataclasses.replace(data, documents="concatenate")
    config = dataclasses.replace(config, data=data)
    module = sources.module_of(data)
    module.look(config)
    if args.verify:
        _verify(config)
    splits = module.read(data, length)
    assert not isinstance(splits.train, Mixed), "a corpus by itself is no mixture"
    if left_out := left_out or splits.left_out:
        print(f"left out    {left_out}")
    print(f"as read     {_size(splits.train, length)}")
    if count := min(args.windows, len(splits.train)):
        rows = Batches(
            data=splits, seed=0, global_batch=count, length=length, num_validation=0
        ).train(0)
        assert isinstance(rows, Rows), "a corpus has tokens"
        _show(rows, module.tokenizer(data), "sequence")


def _has_tokens(path: Path) -> bool:
    """Tells whether files of tokens are named, and not documents."""
    names = [inner.name for inner in path.iterdir()] if path.is_dir() else [path.name]
    return any(name.endswith(token_formats.ENDINGS) for name in names)


def _show_splits(config: Config, splits: Splits) -> None:
    """The size of each corpus that trains, and of each validation set, with their digests."""
    length, train, digests = config.model.context_length, splits.train, splits.digests
    parts = train.parts if isinstance(train, Mixed) else {"": train}
    for name, part in parts.items():
        of = f" of {name}" if name else ""
        said = f"train{of}"
        print(f"{said:<11} {_size(part, length)}, digest {digests[said][:SHOWN]}")
    for name, part in splits.validation_sets().items():
        if not len(part):  # of a run that does not validate
            continue
        keys = ("validation" if name == ONLY else name, f"validation of {name}")
        said = next(key for key in (*keys, f"validation set {name}") if key in digests)
        print(f"{said:<11} {_size(part, length)}, digest {digests[said][:SHOWN]}")


def _show_run(config: Config, splits: Splits) -> None:
    """How often a run reads what it reads."""
    consumed, train = config.train.steps * config.train.global_batch, splits.train
    if not isinstance(train, Mixed):
        print(f"run         {consumed:,} sequences: {consumed / len(train):.3g} epochs")
        return
    if by_island := config.data.mixture_by_island:
        for island, weights in by_island.items():
            shares = (f"{x / sum(weights.values()):.1%} of {name}" for name, x in weights.items())
            print(f"run         island {island}: {', '.join(shares)}")
        return
    counts = train.schedule.counts(consumed).tolist()
    for (name, part), count in zip(train.parts.items(), counts, strict=True):
        epochs = f"{count / len(part):.3g} epochs"
        print(f"run         {count:,} of {consumed:,} sequences are of {name}: {epochs}")


def _config(run: str, overrides: list[str]) -> Config:
    """The settings of a run file, or of a run folder. Raises HolmesError."""
    if os.path.isdir(run):
        folder = Path(run)
        own = f"data.tokenizer={jobs.saved_tokenizer(folder, jobs.load_config(folder))}"
        return configs.load(folder / jobs.CONFIG, [own, *overrides], jobs.SETTINGS_OF)
    return configs.load(Path(run), overrides, jobs.SETTINGS_OF)


def _verify(config: Config) -> None:
    """Reads all tokens. Raises DataError for what is damaged."""
    if config.data.source != "tokens":
        problem, fix = "is for files of tokens", "leave it out: other sources are read whole"
        raise ConfigError("--verify", problem, found=f"source {config.data.source}", fix=fix)
    count = tokens.verify(config.data)
    print(f"verified    every token was read; {count:,} files have their SHA-256")


def _size(windows: Sequences, length: int) -> str:
    if isinstance(windows, PackedRows):
        rows = f"{len(windows):,} rows of {length:,} tokens, {windows.padding:.2%} of them padding"
        return f"documents: {len(windows.spans):,} in {len(windows.table.place):,} pieces, {rows}"
    size = f"{len(windows):,} windows of {length:,} tokens"
    if isinstance(windows, tokens.FileWindows):
        num_tokens = sum(part.num_tokens for part in windows.parts)
        known = all(part.file.documents is not None for part in windows.parts)
        documents = f"{sum(part.num_documents for part in windows.parts):,}" if known else "unknown"
        return f"{num_tokens:,} tokens, documents: {documents}, {size}"
    if isinstance(windows, text.Windows):
        return f"documents: {len(windows.first_D):,}, {size}"
    return size


def _show(rows: Rows, tokenizer: Tokenizer, name: str) -> None:
    """Prints sequences as text, each with its number behind a name, and what of them counts."""
    for row, (token_L, begins_L) in enumerate(zip(rows.token_NL, rows.begins_NL, strict=True)):
        own_L, num_begun = token_L, int(np.count_nonzero(begins_L))
        if rows.target_NL is not None:  # what a packed row has behind its last document is padding
            own_L, num_begun = token_L[: np.flatnonzero(begins_L)[-1]], num_begun - 1
        said = _text(own_L, tokenizer)
        begun = f"{num_begun} documents begin"
        counted = []
        if rows.target_NL is not None:
            target_L = rows.target_NL[row]
            begun += f", {np.count_nonzero(target_L >= 0):,} of {len(target_L):,} targets count"
            edges = np.flatnonzero(np.diff(target_L >= 0)) + 1
            runs = [run for run in np.split(target_L, edges) if run[0] >= 0]
            counted = [_shown(_text(run, tokenizer)) for run in runs]
        print(f"{name} {row}: {begun}, {len(said):,} characters\n  {_shown(said)}")
        if len(counted) > 1 or (counted and np.any(target_L < 0)):
            more = f", and {len(counted) - SHOWN} more" if len(counted) > SHOWN else ""
            print(f"  of it count {', '.join(counted[:SHOWN])}{more}")


def _text(token_L: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of tokens, with the marks that no text has."""
    written = {number: mark for mark, number in tokenizer.marks.items()}
    stream, said = tokenizer.decode_stream(), []
    for place, token in enumerate(token_L.tolist(), 1):
        if token in written:
            said += [stream.rest(), written[token]]
            stream = tokenizer.decode_stream(token_L[:place].tolist())
        else:
            said.append(stream.push(token))
    return "".join([*said, stream.rest()])


def _shown(text: str) -> str:
    return repr(text[:WIDTH]) + (" ..." if len(text) > WIDTH else "")
