"""`launch tokenizer`: trains a byte-level BPE on a corpus."""

import argparse
import sys
from pathlib import Path

from holmesjax.config import DataConfig
from holmesjax.data import tokenizer_training
from launch.corpus_options import as_options
from launch.progress_message import ProgressMessage
from launch.writable_outputs import check_file, make_folder, refuse_corpus


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    refuse_corpus(out, args.corpus, args.pattern)
    if out.suffix == ".json":
        check_file(out, "--out")
    else:
        make_folder(out, "--out")
    config = DataConfig(corpus=args.corpus, pattern=args.pattern)
    with ProgressMessage("tokenizer") as say, as_options():
        is_shown = sys.stderr.isatty()
        trained = tokenizer_training.train(config, args.vocab, out, say, is_shown, args.column)
    rate = trained.num_bytes / max(trained.num_encoded, 1)
    print(f"{trained.num_tokens:,} tokens in {out}")
    print(
        f"corpus  {trained.num_bytes:,} bytes, {trained.num_encoded:,} tokens: {rate:.2f} a token"
    )
    if trained.left_out:
        print(f"        left out: {trained.left_out}")
    if trained.num_tokens < args.vocab:
        print(f"        the corpus has no more pairs: fewer tokens than --vocab {args.vocab}")
    print("use     " + " ".join(tokenizer_training.settings(out, trained)))
    return 0
