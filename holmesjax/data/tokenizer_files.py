"""Tokenizers in files: which files a path names, how they become a tokenizer, how they are copied.

    tokenizers     tokenizer.json of Hugging Face, alone or in the folder of a model
    tiktoken       a file of ranks, with the pattern and the special tokens in a file NAME.json
    sentencepiece  a file .model

Each format is read by the library that owns it; the libraries are the extra `tokenizers`. A run
folder holds a copy of the files, so that sampling and exports need nothing else.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax import hub_names
from holmesjax.config import BYTES, ModelConfig
from holmesjax.data import extras
from holmesjax.data.pieces import Pieces
from holmesjax.errors import AbsentDataError, ConfigError, DataError

WHERE = "data.tokenizer"
FOLDER = "tokenizer"  # of a run folder
UNIT = 128  # a vocabulary is padded to a multiple, whatever the plan
MAIN, MODEL = "tokenizer.json", "tokenizer.model"
# Files that may stand beside `tokenizer.json`; the generation config has the end tokens of a model.
BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", MODEL, "chat_template.jinja", "generation_config.json"),
)
TEMPLATES = "additional_chat_templates"
OF_GENERATION = ("chat_template.", "generation_config.", TEMPLATES)
RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")  # the first line of a file of ranks
SIDECAR = '{"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}, "end": "<|endoftext|>"}'


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The files of one tokenizer."""

    kind: str  # the library that reads them
    main: Path
    files: Mapping[str, Path]  # by the name of their copy in a run folder; sorted

    @property
    def identity(self) -> str:
        """The library, and a digest of the files: "tokenizers 0123456789ab".

        Chat templates and settings of generation shape no tokens of a corpus.
        """
        digest = hashlib.sha256()
        for name, path in self.files.items():
            if name.startswith(OF_GENERATION):
                continue
            digest.update(f"{name}\n{hashlib.sha256(_read(path)).hexdigest()}\n".encode())
        return f"{self.kind} {digest.hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class FileTokenizer:
    """A tokenizer of a library."""

    num_tokens: int
    num_used: int  # more than any token of a corpus; of marks, a corpus has few
    end: int  # the mark behind a document
    ends: tuple[int, ...]  # the marks that end a text, `end` among them
    # The tokens of texts, each behind the mark that begins a document, if there is one. A special
    # token in a text is text.
    encode_all: Callable[[Sequence[str]], Iterable[Sequence[int]]]
    decode: Callable[[Sequence[int]], str]  # without special tokens

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of whole documents with their marks, int32."""
        found = []
        for text, tokens in zip(texts, self.encode_all(texts), strict=True):
            del text
            marks = [] if len(tokens) and tokens[-1] == self.end else [self.end]
            found.append(np.array([*tokens, *marks], np.int32))
        return found

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a document that begins with a text; int32."""
        tokens = self.documents([text])[0]
        return tokens[:-1] if len(tokens) > 1 else tokens

    def pieces(self, after: Sequence[int] = ()) -> Pieces:
        """The text of tokens that follow others, as they come."""
        return Pieces(self.decode, after)


def find(path: str | Path) -> TokenizerFiles:
    """The files that a path names. Raises DataError if they are not there, or no tokenizer."""
    path = Path(path)
    try:
        if path.is_dir():
            return _in_folder(path)
        with (main := path).open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        fix = "name a folder or a file of a tokenizer, or bytes"
        fix = hub_names.fix(str(path), fix, folder="tokenizers")
        found = f"{path}: {error.strerror}; the current folder is {Path.cwd()}"
        absent = AbsentDataError if isinstance(error, FileNotFoundError) else DataError
        raise absent(WHERE, "cannot be read", found=found, fix=fix) from None
    if head.lstrip().startswith(b"{"):
        return TokenizerFiles(kind="tokenizers", main=main, files={MAIN: main})
    if RANK.match(head):
        beside = main.with_name(f"{main.name}.json")
        if not beside.is_file():
            problem = "has the ranks of a tiktoken encoding, and neither pattern nor special tokens"
            fix = f"write them into {beside.name}: {SIDECAR}"
            raise DataError(str(main), problem, found=f"no {beside.name} beside it", fix=fix)
        name = "tokenizer.tiktoken"
        return TokenizerFiles(
            kind="tiktoken", main=main, files={name: main, f"{name}.json": beside}
        )
    return TokenizerFiles(kind="sentencepiece", main=main, files={MODEL: main})


def _in_folder(folder: Path) -> TokenizerFiles:
    if (main := folder / MAIN).is_file():
        beside = [folder / name for name in BESIDE] + sorted(folder.glob(f"{TEMPLATES}/*.jinja"))
        files = {
            path.relative_to(folder).as_posix(): path for path in (main, *beside) if path.is_file()
        }
        return TokenizerFiles(kind="tokenizers", main=main, files=dict(sorted(files.items())))
    others = [folder / MODEL, *sorted(folder.glob("*.tiktoken"))]
    if not (there := [path for path in others if path.is_file()]):
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        fix = f"name a folder with {MAIN}, {MODEL} or a file .tiktoken, or the file itself"
        raise DataError(WHERE, f"{folder} holds no tokenizer", found=names, fix=fix)
    return find(there[0])


def identity(tokenizer: str) -> str:
    """The identity of a `data.tokenizer`, wherever its files are."""
    return tokenizer if tokenizer == BYTES else find(tokenizer).identity


def place(tokenizer: str) -> str:
    """The place of the files of a `data.tokenizer`, for messages."""
    return tokenizer if tokenizer == BYTES else str(Path(tokenizer).absolute())


def copy(path: str | Path, folder: Path) -> None:
    """Copies the files of a tokenizer into a folder, which is new or replaced as a whole."""
    found = find(path)
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, source in found.files.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(_read(source))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def load(path: str | Path) -> FileTokenizer:
    """Reads a tokenizer. Raises DataError for files that are none, or lack what a run needs."""
    found = find(path)
    read = {"tokenizers": _tokenizers, "tiktoken": _tiktoken, "sentencepiece": _sentencepiece}
    return read[found.kind](found)


def padded(num_tokens: int) -> int:
    """The size of a vocabulary that holds them.

    >>> padded(4096), padded(50257)
    (4096, 50304)
    """
    return -(-num_tokens // UNIT) * UNIT


def check_vocabulary(model: ModelConfig, tokenizer: FileTokenizer) -> None:
    """Raises ConfigError if the model has fewer ids than a corpus may need."""
    if model.vocab_size < (least := tokenizer.num_used):
        problem = f"must be at least {least}: the tokenizer has so many tokens"
        fix = f"use {padded(least)}, the next multiple of {UNIT}"
        raise ConfigError("model.vocab_size", problem, found=model.vocab_size, fix=fix)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fix = "make it readable"
        raise DataError(str(path), "cannot be read", found=error.strerror, fix=fix) from None


def extra(name: str) -> contextlib.AbstractContextManager[None]:
    """Says how to install a package of the extra `tokenizers` whose import inside fails."""
    return extras.package(name, extra="tokenizers", where=WHERE)


def _no_tokenizer(path: Path, reader: str, error: Exception) -> DataError:
    """The refusal of a file that its library cannot read; libraries raise errors of any class."""
    found = (str(error) or type(error).__name__).splitlines()[0]
    fix = "name another file, or copy it again"
    return DataError(str(path), f"is no tokenizer that {reader} reads", found=found, fix=fix)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises DataError."""
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        fix = "copy it again"
        raise DataError(str(path), "is no JSON", found=error, fix=fix) from None
    if not isinstance(content, dict):
        fix = "copy it again"
        raise DataError(str(path), "is no JSON object", found=type(content).__name__, fix=fix)
    return content


# ---- one function for each library -----------------------------------------------------------


def _inner(found: TokenizerFiles) -> Any:
    """The object of the library `tokenizers`."""
    with extra("tokenizers"):
        # The name of a class: a folder `tokenizers` in the current one is a package without names.
        from tokenizers import Tokenizer
    try:
        inner = Tokenizer.from_str(_read(found.main).decode())
    except Exception as error:
        raise _no_tokenizer(found.main, "tokenizers", error) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def _tokenizers(found: TokenizerFiles) -> FileTokenizer:
    inner = _inner(found)
    inner.encode_special_tokens = True
    end = _hugging_face_end(found, inner)
    numbers = set(inner.get_vocab(with_added_tokens=True).values())
    marks = {n for n, token in inner.get_added_tokens_decoder().items() if token.special}
    return FileTokenizer(
        num_tokens=1 + max(numbers),
        num_used=1 + max(numbers - marks | {end, *inner.encode("").ids}),
        end=end,
        ends=(end, *_generation_ends(found, end)),
        encode_all=lambda texts: [encoding.ids for encoding in inner.encode_batch_fast(texts)],
        decode=lambda tokens: inner.decode(tokens, skip_special_tokens=True),
    )


def encode_rendered(folder: Path, text: str) -> list[int]:
    """The tokens of a text that a chat template has made: its special tokens are marks."""
    return encoder_with_places(folder, is_rendered=True)(text)[0]


def encoder_with_places(
    path: Path, *, is_rendered: bool
) -> Callable[[str], tuple[list[int], list[tuple[int, int]]]]:
    """A function that gives the tokens of a text, and the range of characters that each stands for.

    Args:
      path: of a tokenizer of the library `tokenizers`.
      is_rendered: whether a chat template has made the text: then its special tokens are marks,
        and no others are added.
    """
    inner = _inner(find(path))
    inner.encode_special_tokens = not is_rendered

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = inner.encode(text, add_special_tokens=not is_rendered)
        return encoding.ids, encoding.offsets

    return encode


def special_tokens(folder: Path) -> list[str]:
    """The tokens that are marks in such a text."""
    return [token.content for token in _inner(find(folder)).get_added_tokens_decoder().values()]


def _hugging_face_end(found: TokenizerFiles, inner: Any) -> int:
    """The id of the token that ends a document: as a file says, or the only special one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        said = read_json(found.files[name]).get("eos_token") if name in found.files else None
        token = said.get("content") if isinstance(said, dict) else said
        if token is None:
            continue
        number: int | None = inner.token_to_id(token) if isinstance(token, str) else None
        if number is None:
            problem, fix = "names an eos_token that the tokenizer does not have", "correct it"
            raise DataError(str(found.files[name]), problem, found=token, fix=fix)
        return number
    added = inner.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    if len(special) == 1:
        return int(*special.values())
    problem = "does not say which token ends a document"
    names = ", ".join(list(special)[:8]) or "none"
    fix = "name a folder whose tokenizer_config.json has an eos_token"
    raise DataError(str(found.main), problem, found=f"special tokens: {names}", fix=fix)


def _generation_ends(found: TokenizerFiles, end: int) -> list[int]:
    """The other tokens that end a text: models of dialogues have several."""
    if (path := found.files.get("generation_config.json")) is None:
        return []
    said = read_json(path).get("eos_token_id")
    numbers = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(number, int) for number in numbers):
        problem, fix = "names an eos_token_id that is no number", "correct it"
        raise DataError(str(path), problem, found=said, fix=fix)
    return [number for number in numbers if number != end]


def _tiktoken(found: TokenizerFiles) -> FileTokenizer:
    path = found.files["tokenizer.tiktoken.json"]
    said = read_json(path)
    specials: Any = said.get("special_tokens")
    end: Any = said.get("end")
    is_whole = isinstance(said.get("pattern"), str) and isinstance(specials, dict)
    if not is_whole or end not in specials:
        wanted = "needs a pattern, special_tokens, and an end that is one of them"
        raise DataError(str(path), wanted, found=", ".join(said) or "nothing", fix=f"as {SIDECAR}")
    with extra("tiktoken"):
        import tiktoken.load
    try:
        ranks = tiktoken.load.load_tiktoken_bpe(str(found.main))
        if missing := [i for i in range(256) if bytes([i]) not in ranks]:  # it would panic later
            raise ValueError(f"{len(missing)} of 256 bytes have no rank, 0x{missing[0]:02x} first")
        encoding = tiktoken.Encoding(
            found.main.name,
            pat_str=said["pattern"],
            mergeable_ranks=ranks,
            special_tokens=specials,
        )
    except Exception as error:
        raise _no_tokenizer(found.main, "tiktoken", error) from None
    special = set(specials.values())
    return FileTokenizer(
        num_tokens=encoding.n_vocab,
        num_used=1 + max(*ranks.values(), specials[end]),
        end=specials[end],
        ends=(specials[end],),
        encode_all=lambda texts: encoding.encode_ordinary_batch(list(texts)),
        decode=lambda tokens: encoding.decode([t for t in tokens if t not in special]),
    )


def _sentencepiece(found: TokenizerFiles) -> FileTokenizer:
    with extra("sentencepiece"):
        import sentencepiece
    try:
        inner = sentencepiece.SentencePieceProcessor(model_proto=_read(found.main))
    except Exception as error:
        raise _no_tokenizer(found.main, "sentencepiece", error) from None
    begin, end = inner.bos_id(), inner.eos_id()
    if end < 0:
        problem, fix = "has no end mark </s>", "train it with one: --eos_id=2"
        raise DataError(str(found.main), problem, found="eos_id -1", fix=fix)
    return FileTokenizer(
        num_tokens=inner.vocab_size(),
        num_used=inner.vocab_size(),
        end=end,
        ends=(end,),
        encode_all=lambda texts: inner.encode(list(texts), add_bos=begin >= 0),
        decode=inner.decode,
    )
