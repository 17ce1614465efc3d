"""The files of a tokenizer: those that a path names, and those that count beside them.

tokenizers     tokenizer.json of Hugging Face, alone or in the folder of a model
tiktoken       a file of ranks, with the pattern and the special tokens in a file NAME.json
sentencepiece  a file .model
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmesjax import hub_names
from holmesjax.data import object_stores, optional_packages
from holmesjax.errors import AbsentDataError, DataError
from holmesjax.files import json_text, regular_files

WHERE = "data.tokenizer"
MAIN, MODEL, RANKS = "tokenizer.json", "tokenizer.model", "tokenizer.tiktoken"
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
GENERATION, OF_MODEL = "generation_config.json", "config.json"
TEMPLATES = "additional_chat_templates"
# Files of a folder that count beside the one with the pieces, whatever its format.
BESIDE = (CONFIG, SPECIAL_MAP, ADDED, "vocab.json", "merges.txt", MODEL, TEMPLATE)
ENDS = (GENERATION, OF_MODEL)  # have the end tokens of a model
# Files that shape no tokens of a corpus.
OF_GENERATION = ("chat_template.", "generation_config.", OF_MODEL, TEMPLATES)
# The first line of a file of ranks that is not empty.
FIRST_RANK = re.compile(rb"(\xef\xbb\xbf)?\s*[A-Za-z0-9+/]+={0,2}[ \t]+\d+\s")
CONVERT = "AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW_DIR) of transformers 5"
SIDECAR = '{"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}, "end": "<|endoftext|>"}'


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The files of one tokenizer."""

    kind: str  # of the table above
    main: Path  # has the pieces
    files: Mapping[str, Path]  # by the name of their copy in a run folder; sorted

    @property
    def identity(self) -> str:
        """The kind, and a digest of the files that shape tokens: "tokenizers 0123456789ab"."""
        digest = hashlib.sha256()
        for name, path in self.files.items():
            if not name.startswith(OF_GENERATION):
                digest.update(f"{name}\n{hashlib.sha256(read(path)).hexdigest()}\n".encode())
        return f"{self.kind} {digest.hexdigest()[:12]}"

    def contents(self) -> dict[str, bytes]:
        """The bytes of all files, also of those that shape no tokens. Raises DataError."""
        return {name: read(path) for name, path in self.files.items()}

    def json(self, name: str) -> dict[str, Any]:
        """The object in one of the files; empty if there is no such file. Raises DataError."""
        return read_json(self.files[name]) if name in self.files else {}


def find(path: str | Path) -> TokenizerFiles:
    """The files that a path names. Raises DataError if they are not there, or no tokenizer."""
    path = Path(path)
    try:
        if path.is_dir():
            return _in_folder(path)
        with regular_files.open_file(main := path) as file:
            head = file.read(4096)
    except OSError as error:
        fix = "name a folder or a file of a tokenizer, or bytes"
        fix = hub_names.fix(str(path), fix, folder="tokenizers")
        found = f"{path}: {error.strerror}; the current folder is {Path.cwd()}"
        absent = AbsentDataError if isinstance(error, FileNotFoundError) else DataError
        raise absent(WHERE, "cannot be read", found=found, fix=fix) from None
    if head.lstrip().startswith(b"{"):
        return TokenizerFiles(kind="tokenizers", main=main, files={MAIN: main})
    if FIRST_RANK.match(head) or main.suffix == Path(RANKS).suffix:
        beside = main.with_name(f"{main.name}.json")
        if not beside.is_file():
            problem = "has the ranks of a tiktoken encoding, and neither pattern nor special tokens"
            fix = f"write them into {beside.name}: {SIDECAR}"
            raise DataError(str(main), problem, found=f"no {beside.name} beside it", fix=fix)
        files = {RANKS: main, f"{RANKS}.json": beside}
        return TokenizerFiles(kind="tiktoken", main=main, files=files)
    return TokenizerFiles(kind="sentencepiece", main=main, files={MODEL: main})


def has_one(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return bool(_mains(folder))


def _mains(folder: Path) -> list[Path]:
    """The files of a folder that may have the pieces; the first counts."""
    mains = [folder / MAIN, folder / MODEL, *sorted(folder.glob("*.tiktoken"))]
    return [path for path in mains if path.is_file()]


def _in_folder(folder: Path) -> TokenizerFiles:
    if not (there := _mains(folder)):
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        fix = f"name a folder with {MAIN}, {MODEL} or a file .tiktoken, or the file itself"
        fix += f"; a {MAIN} is written by {CONVERT}"
        if (snapshot := hub_names.snapshot_of(folder)) is not None:
            fix = f"name the folder that has the files: {snapshot}"
        raise DataError(WHERE, f"{folder} holds no tokenizer", found=names, fix=fix)
    found = find(there[0])
    beside = [folder / name for name in (*BESIDE, *ENDS)]
    beside += sorted(folder.glob(f"{TEMPLATES}/*.jinja"))
    files = {path.relative_to(folder).as_posix(): path for path in beside if path.is_file()}
    files |= found.files
    return TokenizerFiles(kind=found.kind, main=found.main, files=dict(sorted(files.items())))


def copy(path: str | Path, folder: Path) -> None:
    """Copies the files of a tokenizer into a folder, which is new or replaced as a whole."""
    found = find(path)
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, source in found.files.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(read(source))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def read(path: Path) -> bytes:
    """The bytes of a file. Raises DataError."""
    try:
        with object_stores.open_file(path) as file:
            return file.read()
    except OSError as error:
        fix = "make it readable"
        raise DataError(str(path), "cannot be read", found=error.strerror, fix=fix) from None


def read_text(path: Path) -> str:
    """The text in a file. Raises DataError."""
    try:
        return read(path).decode()
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8"
        raise DataError(str(path), "is no UTF-8", found=error.reason, fix=fix) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises DataError."""
    try:
        content = json_text.value_of(read(path))
    except ValueError as error:
        fix = "copy it again"
        raise DataError(str(path), "is no JSON", found=error, fix=fix) from None
    if not isinstance(content, dict):
        fix = "copy it again"
        raise DataError(str(path), "is no JSON object", found=type(content).__name__, fix=fix)
    return content


def extra(name: str) -> contextlib.AbstractContextManager[None]:
    """Says how to install a package of the extra `tokenizers` whose import inside fails."""
    return optional_packages.package(name, extra="tokenizers", where=WHERE)
