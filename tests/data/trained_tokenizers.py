"""A corpus, and tokenizers that are trained on it."""

from holmesjax.config import DataConfig
from holmesjax.data import (
    tokenizer_training,
)

TEXTS = [
    "def f(x):\n    return x  # naïve → 🙂\n",
    "<|endoftext|> is text here\n",
    "a  b\n\tc " * 40,
]


def write_corpus(folder):
    folder.mkdir()
    for i, words in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(words)
    return folder


def write_bpe(folder, out):
    config = DataConfig(corpus=str(folder))
    tokenizer_training.train(config, 300, out, lambda _: None, is_shown=False)
