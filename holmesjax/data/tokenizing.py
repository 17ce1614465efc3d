"""Text to files of tokens, by processes side by side; what was finished is kept.

A corpus is a folder or a file, in the formats of `document_formats`. Documents that are tokens
already are copied. Shards are a function of the names and sizes of the files. A shard is finished
when its `.json` is there, which is written last, with the hashes of the rest; what a killed process
has left is written again.
"""

import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.config import BYTES, DataConfig
from holmesjax.data import document_formats, object_stores, token_files, tokenizer_files
from holmesjax.data.byte_tokenizer import BEGIN, ByteTokenizer
from holmesjax.data.documents import Documents, FilePart, Wanted
from holmesjax.data.tokenizer_files import FileTokenizer
from holmesjax.data.tokenizer_paths import read_json
from holmesjax.errors import ConfigError, DataError
from holmesjax.files import regular_files
from holmesjax.files.whole_files import write_whole

EMPTY = "empty_documents"  # key of how many were left out
BATCH_BYTES = 2**20  # of the texts that a library tokenizes at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The work of one process at a time."""

    name: str
    parts: Sequence[FilePart]
    tokenizer: str
    wanted: Wanted
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenized:
    """The finished work, with the shards that were there before."""

    shards: int
    of: int
    tokens: int
    documents: int
    was_there: int = 0  # tokens of these that were made before
    files: str = ""  # of the corpus, by kind, in words
    empty: int = 0  # documents that are lists without a token: no place in a file can be theirs
    left_out: str = ""  # what the corpus has and is not read, in words; empty: nothing


def tokenize(
    config: DataConfig,
    out: Path,
    *,
    wanted: Wanted | None = None,
    shard_bytes: int = 2**28,
    workers: int | None = None,
    say: Callable[[Tokenized], None],
    warn: Callable[[str], None] = lambda words: None,
) -> Tokenized:
    """Writes the tokens of a corpus into a folder, or what is missing of them there.

    Args:
      config: names the corpus, its files and the tokenizer.
      out: the folder, new or of the same corpus and tokenizer.
      wanted: what is read of rows; None: their text.
      shard_bytes: of the corpus, in a shard.
      workers: processes; None: one for each core that this process may use.
      say: takes what is done, after each shard.
      warn: takes what is left out, and what makes the work slower than it need be.

    Raises:
      ConfigError: there are no workers, no bytes in a shard, or another process writes here.
      DataError: a file is no text, there is no document, or the folder has the tokens of
        something else.
    """
    for option, value in {"--workers": workers, "--shard-bytes": shard_bytes}.items():
        if value is not None and value < 1:
            raise ConfigError(option, "must be 1 or more", found=value, fix="leave it out")
    identity = tokenizer_files.identity(config.tokenizer)
    wanted = (wanted or Wanted())._replace(is_picked=config.pattern is not None)
    try:
        corpus = document_formats.corpus_of(config)
        if left_out := corpus.left_out.words:
            warn(f"left out: {left_out}")
        plan = _plan([file.path for file in corpus.files], shard_bytes, warn)
        paths = {piece.path for shard_pieces in plan for piece in shard_pieces}
        changed = {
            path: object_stores.version_of(object_stores.path_of(path)) for path in sorted(paths)
        }
    except object_stores.errors() as error:
        raise unreadable(error, config.corpus) from None
    names = [f"shard-{i:05d}" for i in range(len(plan))]
    inputs = hashlib.sha256(json.dumps([plan, changed, wanted]).encode()).hexdigest()
    job = {"tokenizer": identity, "inputs": inputs, "shards": names}
    job |= {token_files.TOKENIZER_PATH: tokenizer_files.place(config.tokenizer)}
    with open(out / token_files.LOCK, "w", opener=regular_files.opener) as lock:
        _lock(lock, out)
        _begin(out / token_files.JOB, job)
        for left in out.glob("*.tmp"):
            left.unlink()
        shards = [
            Shard(
                name=name,
                parts=parts,
                tokenizer=config.tokenizer,
                wanted=wanted,
                out=out,
            )
            for name, parts in zip(names, plan, strict=True)
        ]
        if not shards:
            raise no_document(config, len(corpus.files))
        done = _run(shards, workers or len(os.sched_getaffinity(0)), say)
        if done.tokens <= done.documents:  # nothing but marks
            raise no_document(config, len(corpus.files))
        if done.empty:
            lists = f"{done.empty:,} documents that are empty lists of tokens"
            warn(f"left out: {lists}")
            left_out = f"{left_out}; {lists}" if left_out else lists
        return dataclasses.replace(done, files=corpus.words, left_out=left_out)


def no_document(config: DataConfig, num_files: int) -> DataError:
    """The refusal of files that are read and have nothing."""
    found = "nothing in its file" if num_files == 1 else f"nothing in {num_files:,} files"
    fix = "name a corpus that has one"
    return DataError("data.corpus", f"{config.corpus} is empty", found=found, fix=fix)


def _lock(file: Any, out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process holds it no longer
    except OSError:
        fix = "wait for it, or name another folder"
        raise ConfigError("--out", "is being written", found=f"{out}, locked", fix=fix) from None


def _begin(path: Path, job: dict[str, Any]) -> None:
    """Writes what the folder will have. Raises DataError if it has something else."""
    if not path.exists():
        if others := sorted(path.parent.glob("*.bin")):
            fix = "name a new folder"
            problem = f"{path.parent} has files of tokens that are not of this command"
            raise DataError("--out", problem, found=others[0].name, fix=fix)
        write_whole(path, json.dumps(job, indent=2) + "\n")
        return
    before = read_json(path)
    for key, what in {"tokenizer": "tokenizer", "inputs": "files or shards"}.items():
        if before.get(key) != job[key]:
            problem = f"{path.parent} has the tokens of another corpus or tokenizer"
            found = f"other {what} than there"
            if key == "tokenizer":
                own, key = job[token_files.TOKENIZER_PATH], token_files.TOKENIZER_PATH
                there = before.get(key, "one that is not named")
                found = f"other files of a tokenizer: {there} there, {own} now"
            raise DataError("--out", problem, found=found, fix="name a new folder")


def _plan(
    paths: Sequence[Path], shard_bytes: int, warn: Callable[[str], None]
) -> list[list[FilePart]]:
    """The parts of each shard, in the order of the names of their files."""
    shards: list[list[FilePart]] = []
    room = 0
    for path in paths:
        parts = list(document_formats.cut(path, shard_bytes))
        if len(parts) == 1 and parts[0][1] > shard_bytes:
            warn(f"{path} is read by one process: it cannot be divided")
        for part, num_bytes in parts:
            if not shards or num_bytes > room:
                shards.append([])
                room = shard_bytes
            shards[-1].append(part)
            room -= num_bytes
    return shards


def _run(shards: Sequence[Shard], workers: int, say: Callable[[Tokenized], None]) -> Tokenized:
    done = Tokenized(shards=0, of=len(shards), tokens=0, documents=0)
    context = multiprocessing.get_context("spawn")
    size = min(workers, len(shards))
    with ProcessPoolExecutor(size, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(_work, shard) for shard in shards]):
                said, was_there, refusal = future.result()
                if refusal is not None:
                    raise DataError(**refusal)
                done = Tokenized(
                    shards=done.shards + 1,
                    of=done.of,
                    tokens=done.tokens + said["tokens"],
                    documents=done.documents + said["documents"],
                    empty=done.empty + said.get(EMPTY, 0),
                    was_there=done.was_there + (said["tokens"] if was_there else 0),
                )
                say(done)
        except BrokenProcessPool:
            found = f"{done.shards} of {done.of} shards are finished"
            fix = "run the same command again, with fewer --workers if memory was short"
            problem = "a process was killed"
            raise DataError("tokenize", problem, found=found, fix=fix) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def _end_with_parent() -> None:
    """Ends this process when its parent is killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(shard: Shard) -> tuple[dict[str, Any], bool, dict[str, str] | None]:
    """The content of a shard's `.json`, and whether it was there, or the parts of a refusal.

    Errors are not pickled.
    """
    try:
        said = written(shard)
        return said or write_shard(shard), said is not None, None
    except DataError as error:
        return {}, False, error.parts()
    except object_stores.errors() as error:
        return {}, False, unreadable(error, shard.out).parts()


def unreadable(error: Exception, where: object) -> DataError:
    """The refusal of a file that the system cannot read, or a folder that it cannot write."""
    place, fix = getattr(error, "filename", None) or where, "make room, or make it readable"
    words = object_stores.said_by(error)
    return DataError(str(place), "cannot be read or written", found=words, fix=fix)


def written(shard: Shard) -> dict[str, Any] | None:
    """The content of the `.json` of a shard that is there as it was written; None: it is not."""
    path = shard.out / f"{shard.name}.bin"
    about = path.with_suffix(".json")
    if not about.exists():
        return None
    said = read_json(about)
    hashes = {path: said.get("sha256"), path.with_suffix(".starts"): said.get("starts_sha256")}
    if all(file.exists() and token_files.hash_of(file) == h for file, h in hashes.items()):
        return said
    about.unlink()
    return None


def write_shard(shard: Shard) -> dict[str, Any]:
    """Writes a shard; returns what its `.json` says."""
    path = shard.out / f"{shard.name}.bin"
    about, starts = path.with_suffix(".json"), path.with_suffix(".starts")
    by = None if shard.tokenizer == BYTES else tokenizer_files.load(shard.tokenizer)
    name = "uint16" if by is None or by.num_tokens <= 2**16 else "uint32"
    count, largest, num_empty, start_D = 0, 0, 0, []
    temporary = {file: file.with_name(f"{file.name}.{os.getpid()}.tmp") for file in (path, starts)}
    with temporary[path].open("wb") as file:
        for tokens in _documents(shard, by):
            if not len(tokens):
                num_empty += 1
                continue
            start_D.append(count)
            count += len(tokens)
            largest = max(largest, int(np.max(tokens)))
            file.write(tokens.astype(token_files.DTYPES[name]).tobytes())
        _sync(file)
    with temporary[starts].open("wb") as file:
        file.write(np.array(start_D, token_files.STARTS).tobytes())
        _sync(file)
    said = {"dtype": name, "tokens": count, "documents": len(start_D), "largest": largest}
    said |= {EMPTY: num_empty} if num_empty else {}
    said |= {"tokenizer": tokenizer_files.identity(shard.tokenizer)}
    said |= {token_files.TOKENIZER_PATH: tokenizer_files.place(shard.tokenizer)}
    said |= {"sha256": token_files.hash_of(temporary[path])}
    said |= {"starts_sha256": token_files.hash_of(temporary[starts])}
    for final, temporary_path in temporary.items():
        temporary_path.replace(final)
    write_whole(about, token_files.as_json(said))
    return said


def _documents(shard: Shard, by: FileTokenizer | None) -> Iterator[np.ndarray]:
    """The tokens of each document; none of an empty list of tokens."""
    num_tokens = ByteTokenizer.num_tokens if by is None else by.num_tokens
    texts: list[str] = []
    size = 0
    for where, document in _found(shard):
        is_text = isinstance(document, str)
        if isinstance(document, str):
            texts.append(document)
            size += len(document)
        if size >= BATCH_BYTES or not is_text:
            yield from _encoded(texts, by)
            texts, size = [], 0
        if not isinstance(document, str):
            if len(document):
                _refuse_no_token(where, document, num_tokens)
            yield document
    yield from _encoded(texts, by)


def _found(shard: Shard) -> Documents:
    for part in shard.parts:
        for where, document in document_formats.read(part, shard.wanted):
            if shard.tokenizer == BYTES and isinstance(document, str) and chr(BEGIN) in document:
                fix = "leave it out, or use another tokenizer"
                raise DataError(where, "holds a zero byte", found="a mark of documents", fix=fix)
            yield where, document


def _encoded(texts: Sequence[str], by: FileTokenizer | None) -> list[np.ndarray]:
    if by is None:
        return [np.frombuffer(bytes([BEGIN]) + text.encode(), np.uint8) for text in texts]
    return by.documents(texts) if texts else []


def _refuse_no_token(where: str, tokens: np.ndarray, num_tokens: int) -> None:
    wrong = (tokens < 0) | (tokens >= num_tokens)
    if wrong.any():
        place = int(np.argmax(wrong))
        problem = f"holds a number that is no token: the tokenizer has {num_tokens:,}"
        fix = "name the tokenizer that the tokens are of"
        raise DataError(where, problem, found=f"{tokens[place]} at place {place:,}", fix=fix)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
