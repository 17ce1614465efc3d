"""`launch tokenize`: turns text into files of tokens, which `data.source: tokens` reads."""

import argparse
import sys
import time
from pathlib import Path

from holmesjax.config import BYTES, DataConfig
from holmesjax.data import tokenizer_files, tokenizing
from holmesjax.data.documents import Wanted
from holmesjax.data.tokenizing import Tokenized
from launch.corpus_options import as_options
from launch.writable_outputs import make_folder, refuse_corpus


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    refuse_corpus(out, args.corpus, args.pattern)
    config = DataConfig(corpus=args.corpus, pattern=args.pattern, tokenizer=args.tokenizer)
    make_folder(out, "--out")
    began_s = time.monotonic()

    def say(done: Tokenized) -> None:
        rate = (done.tokens - done.was_there) / (time.monotonic() - began_s)
        shards = f"{done.shards:,} of {done.of:,} shards"
        print(f"tokenize: {shards}, {done.tokens:,} tokens, {rate:,.0f} a second", file=sys.stderr)

    with as_options():
        done = tokenizing.tokenize(
            config,
            out,
            wanted=Wanted(column=args.column, dtype=args.dtype),
            shard_bytes=args.shard_bytes,
            workers=args.workers,
            say=say,
            warn=lambda words: print(f"tokenize: {words}", file=sys.stderr),
        )
    print(f"{done.tokens:,} tokens of {done.documents:,} documents in {done.of:,} shards in {out}")
    print(f"files   {done.files}")
    if done.left_out:
        print(f"        left out: {done.left_out}")
    settings = f"data.source=tokens data.corpus={out} data.tokenizer={args.tokenizer}"
    if args.tokenizer != BYTES:
        num_tokens = tokenizer_files.load(args.tokenizer).num_used
        settings += f" model.vocab_size={tokenizer_files.padded(num_tokens)}"
    print(f"use     {settings}")
    return 0
