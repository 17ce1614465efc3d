"""`launch data`: shows what a run would read: documents, tokens and windows, and some of these."""

import argparse
import os
from pathlib import Path

import numpy as np

from holmesjax import config as configs, job as jobs
from holmesjax.config import Config
from holmesjax.data import sources, text, tokens
from holmesjax.data.batches import ArrayRows, Batches, Rows
from holmesjax.data.named_corpora import ONLY
from holmesjax.data.packing import PackedRows
from holmesjax.data.sources import Mixed, Sequences, Splits, Tokenizer
from holmesjax.errors import ConfigError

SHOWN = 12  # digits of a digest
WIDTH = 300  # characters of a window


def run(args: argparse.Namespace) -> int:
    if args.windows < 0:
        raise ConfigError("--windows", "must be 0 or more", found=args.windows, fix="use 0 or more")
    config = _config(args.run, args.overrides)
    module = sources.module_of(config.data)
    module.look(config)
    if args.verify:
        _verify(config)
    length = config.model.context_length
    splits = module.read(config.data, length)
    print(f"corpus      {splits.place}: {len(splits.files):,} files")
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
        _show(rows, module.tokenizer(config.data))
    return 0


def _show_splits(config: Config, splits: Splits) -> None:
    """The size of each corpus that trains, and of each validation set, and all digests."""
    length, train, digests = config.model.context_length, splits.train, splits.digests
    parts = train.parts if isinstance(train, Mixed) else {"": train}
    for name, part in parts.items():
        of = f" of {name}" if name else ""
        said = f"train{of}"
        print(f"{said:<11} {_size(part, length)}, digest {digests[said][:SHOWN]}")
    for name, part in splits.validation_sets().items():
        keys = ("validation" if name == ONLY else name, f"validation of {name}")
        said = next(key for key in (*keys, f"validation set {name}") if key in digests)
        print(f"{said:<11} {_size(part, length)}, digest {digests[said][:SHOWN]}")


def _show_run(config: Config, splits: Splits) -> None:
    """How often a run reads what it reads."""
    consumed, train = config.train.steps * config.train.global_batch, splits.train
    if not isinstance(train, Mixed):
        print(f"run         {consumed:,} sequences: {consumed / len(train):.3g} epochs")
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


def _show(rows: Rows, tokenizer: Tokenizer) -> None:
    """The first windows of the first step."""
    for row, (token_L, begins_L) in enumerate(zip(rows.token_NL, rows.begins_NL, strict=True)):
        pieces = tokenizer.pieces()
        said = "".join(pieces.push(token) for token in token_L.tolist()) + pieces.rest()
        shown = repr(said[:WIDTH]) + (" ..." if len(said) > WIDTH else "")
        begun = f"{np.count_nonzero(begins_L)} documents begin"
        if rows.target_NL is not None:
            target_L = rows.target_NL[row]
            begun += f", {np.count_nonzero(target_L >= 0):,} of {len(target_L):,} targets count"
        print(f"step 1, sequence {row}: {begun}, {len(said):,} characters\n  {shown}")
