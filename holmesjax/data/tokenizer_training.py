"""A byte-level BPE, trained on the text of a corpus (Sennrich et al., arXiv:1508.07909).

The same corpus gives the same file, byte for byte. Every text can be told in its tokens, since each
byte is one, and comes back as it was. A corpus is what `tokenizing` reads; it is read twice, and no
more than a few of its documents are in memory.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holmesjax.config import DataConfig
from holmesjax.data import document_formats, object_stores, tokenizer_files, tokenizing
from holmesjax.data.documents import Wanted
from holmesjax.data.tokenizer_files import padded
from holmesjax.data.tokenizer_paths import MAIN, extra
from holmesjax.errors import ConfigError, DataError

END = "<|endoftext|>"  # token 0: the mark behind a document
LEAST = 257  # tokens: the mark, and each byte
MOST = 2**24  # tokens, as `model.vocab_size`
PART_BYTES = 2**26  # of a file that is read at once, where its format allows parts


class Trained(NamedTuple):
    """The result of a training."""

    num_tokens: int
    num_bytes: int  # of the text of the corpus
    num_encoded: int  # tokens of the corpus
    left_out: str = ""  # what the corpus has and is not read, in words; empty: nothing


def train(
    config: DataConfig,
    num_tokens: int,
    out: Path,
    say: Callable[[str], None],
    is_shown: bool,
    column: str = Wanted().column,
) -> Trained:
    """Trains a tokenizer on all documents of a corpus, and writes it.

    Args:
      config: names the corpus.
      num_tokens: of the vocabulary; fewer, if the corpus has no more pairs.
      out: a file `.json`, or a folder, which also says which token ends a document.
      say: takes what is worked on.
      is_shown: whether the library draws its progress on the terminal.
      column: the field of a line, or the column of a table, that has the text.

    Raises:
      ConfigError: the vocabulary has no room for all bytes.
      DataError: a document is no text, or does not come back as it was.
    """
    if not LEAST <= num_tokens <= MOST:
        fix = f"use 4096, or {LEAST} for bytes alone"
        problem = f"must be from {LEAST}, a token for each byte and the mark {END}, to {MOST}"
        raise ConfigError("--vocab", problem, found=num_tokens, fix=fix)
    with extra("tokenizers"):
        import tokenizers
        from tokenizers.pre_tokenizers import ByteLevel
    say("looking at the corpus")
    try:
        corpus = document_formats.corpus_of(config)
    except object_stores.errors() as error:
        raise tokenizing.unreadable(error, config.corpus) from None
    files = [file.path for file in corpus.files]
    wanted = Wanted(column=column, is_picked=config.pattern is not None)
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[END],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=is_shown,
    )
    say(f"counting pairs in {len(files):,} files")
    tokenizer.train_from_iterator(_texts(files, wanted), trainer)
    tokenizer.encode_special_tokens = True
    say("telling the corpus in tokens, and back")
    num_bytes, num_encoded = _check(tokenizer, _texts(files, wanted))
    if not num_bytes:
        raise tokenizing.no_document(config, len(files))
    _write(tokenizer, out)
    left_out = corpus.left_out.words
    return Trained(tokenizer.get_vocab_size(), num_bytes, num_encoded, left_out)


def _texts(files: Sequence[Path], wanted: Wanted) -> Iterator[str]:
    """The documents of files, one after another. Raises DataError for one that is no text."""
    for path in files:
        try:
            parts = [part for part, _ in document_formats.cut(path, PART_BYTES)]
            for where, document in (
                read_document for p in parts for read_document in document_formats.read(p, wanted)
            ):
                if not isinstance(document, str):
                    problem, fix = "is tokens already", "name a field or column of text by --column"
                    raise DataError(where, problem, found=f"{len(document):,} numbers", fix=fix)
                yield document
        except object_stores.errors() as error:
            raise tokenizing.unreadable(error, path) from None


def _check(tokenizer: Any, texts: Iterable[str]) -> tuple[int, int]:
    """The bytes and the tokens of all texts. Raises DataError if one does not come back."""
    num_bytes = num_tokens = 0
    for text in texts:
        tokens = tokenizer.encode(text).ids
        num_bytes, num_tokens = num_bytes + len(text.encode()), num_tokens + len(tokens)
        if tokenizer.decode(tokens, skip_special_tokens=False) != text:
            fix = "leave it out by --pattern"
            problem = "a text does not come back from its tokens as it was"
            raise DataError("the corpus", problem, found=repr(text[:40]), fix=fix)
    return num_bytes, num_tokens


def _write(tokenizer: Any, out: Path) -> None:
    if out.suffix == ".json":
        tokenizer.save(str(out))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MAIN
        tokenizer.save(str(path))
        tokenizer_files.load(path).write(out)


def settings(out: Path, trained: Trained) -> list[str]:
    """The settings of a run that uses it.

    >>> settings(Path("bpe"), Trained(4096, 10, 5))
    ['data.tokenizer=bpe', 'model.vocab_size=4096']
    """
    return [f"data.tokenizer={out}", f"model.vocab_size={padded(trained.num_tokens)}"]
