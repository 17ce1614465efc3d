"""Files of each format as an object of the library `tokenizers`, with which everything is done.

So the tokens of a run are those of the `tokenizer.json` that it exports, whatever it has read. What
a file of another format becomes is compared with the library that owns the format, on texts where
the two are known to differ.
"""

import base64
import binascii
import codecs
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holmesjax.data.byte_tokenizer import BEGIN, MARK
from holmesjax.data.tokenizer_paths import (
    CONFIG,
    CONVERT,
    MAIN,
    RANKS,
    SIDECAR,
    TokenizerFiles,
    extra,
    read,
)
from holmesjax.errors import DataError

SPACE = "\u2581"  # a space in the pieces of sentencepiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # kinds of its pieces
KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)
UNIGRAM, BPE = 1, 2  # kinds of its models
# Repeats that give nothing back, as tiktoken has them; in Oniguruma they would repeat the repeat.
POSSESSIVE = re.compile(r"(\\[pP]\{[^}]*\}|\[(?:\\.|[^\]\\])+\]|\\.|[^\\)\]}])(\{\d+(?:,\d*)?\})\+")
# What `\w` is for Rust and not in Oniguruma, and the other way round, by all characters of Unicode.
WORD = r"\w\x{200c}\x{200d}&&[^\x{b2}\x{b3}\x{b9}\x{bc}\x{bd}\x{be}]"
WORDS = {r"\w": f"[{WORD}]", r"\W": f"[^{WORD}]"}
POSIX = re.compile(r"\[:\^?\w+:\]")
SHOWN = 8  # names in a message
PROBES = (
    "hello world",
    "  two spaces,  and two more  ",
    "def f(x):\n    return x + 1\n\n\n\tif y:\r\n  ",
    "It's HE'LL we'Re 1234567890 3.14 \n",
    "naïve → 🙂 ñandú 日本語のテキスト Привет мир \u00a0\u3000x",
    "<s> a </s> <unk> <0x41> \u2581 _",
)


class Converted(NamedTuple):
    """An object of the library `tokenizers`, and the marks that its format names."""

    inner: Any
    named: Mapping[str, str]  # such as bos_token
    padding: str | None = None  # the mark that fills up a batch, which is no mark for all classes


def of(files: TokenizerFiles) -> Converted:
    """Reads the file with the pieces. Raises DataError if its library cannot."""
    convert = {"tokenizers": _whole, "tiktoken": _tiktoken, "sentencepiece": _sentencepiece}
    with extra("tokenizers"):
        # The name of a class: a folder `tokenizers` in the current one is a package without names.
        from tokenizers import Tokenizer  # noqa: F401
    found = convert[files.kind](files)
    found.inner.no_truncation()
    found.inner.no_padding()
    return found


def of_bytes() -> Converted:
    """The tokens of `byte_tokenizer.ByteTokenizer`."""
    with extra("tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: byte for byte, letter in enumerate(_letters())}
    del vocab[_letters()[0]]  # which no text holds
    inner: Any = Tokenizer(models.BPE(vocab=vocab | {MARK: BEGIN}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([MARK])
    _add_begin(inner, MARK)
    return Converted(inner, {"bos_token": MARK, "eos_token": MARK})


def _whole(files: TokenizerFiles) -> Converted:
    from tokenizers import Tokenizer

    if "model" not in files.json(MAIN):  # of a tekken.json, or a vocab.json
        problem, fix = f"is no {MAIN}", f"name one; it is written by {CONVERT}"
        found = ", ".join([*files.json(MAIN)][:SHOWN]) or "an empty object"
        raise DataError(str(files.main), problem, found=found, fix=fix)
    with _library(files):
        inner: Any = Tokenizer.from_str(read(files.main).decode())
    return Converted(inner, {}, None if inner.padding is None else inner.padding["pad_token"])


@contextlib.contextmanager
def _library(files: TokenizerFiles) -> Iterator[None]:
    """Refuses a file that its library cannot read; libraries raise errors of any class.

    A library in Rust may panic, which is no `Exception`.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        found = (str(error) or type(error).__name__).splitlines()[0]
        fix = "name another file, or copy it again"
        problem = f"is no tokenizer that {files.kind} reads"
        raise DataError(str(files.main), problem, found=found, fix=fix) from None


def _add_begin(inner: Any, begin: str) -> None:
    """Begins every text with a mark."""
    from tokenizers import processors

    inner.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin} $B:1",
        special_tokens=[(begin, inner.token_to_id(begin))],
    )


def _compare(
    files: TokenizerFiles,
    inner: Any,
    right: Callable[[str], list[int]],
    symbols: Sequence[str] = (),
) -> None:
    """Raises DataError if the library that owns the format gives other tokens.

    Symbols are those that are no marks, and tokens wherever they stand.
    """
    inner.encode_special_tokens = True
    for text in (*PROBES, *(f"{symbol}a{symbol} b{symbol}c" for symbol in symbols)):
        if (got := inner.encode(text, add_special_tokens=False).ids) != (own := right(text)):
            problem = "has no tokenizer.json with the same tokens, so no run could be exported"
            found = f"{text!r}: {got} in place of {own}"
            fix = "name a folder with the tokenizer.json that its maker publishes"
            raise DataError(str(files.main), problem, found=found, fix=fix)
    inner.encode_special_tokens = False


# ---- tiktoken ----------------------------------------------------------------------------------


def _letters() -> list[str]:
    """The character that stands for each byte in the pieces of a byte-level tokenizer."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _ranks(files: TokenizerFiles) -> dict[bytes, int]:
    """The ranks of pieces, one a line. Raises DataError.

    The library's own reader keeps a copy of whatever a path has held first, and takes a later file
    there for the same.
    """

    def refusal(where: str, problem: str, found: object) -> DataError:
        fix = "name another file, or copy it again"
        return DataError(where, problem, found=found, fix=fix)

    ranks: dict[bytes, int] = {}
    pieces: dict[int, bytes] = {}
    lines = read(files.main).removeprefix(codecs.BOM_UTF8).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, cells = f"{files.main}, line {number:,}", line.split()
        try:
            piece = base64.b64decode(cells[0], validate=True)
        except binascii.Error:
            piece = b""
        if len(cells) != 2 or not piece or not cells[1].isdigit():
            problem = "is not a piece in base64 and its rank"
            raise refusal(where, problem, repr(line[:80]))
        rank = int(cells[1])
        if piece in ranks or rank in pieces:
            raise refusal(where, "has a piece or a rank that an earlier line has", repr(line[:80]))
        ranks[piece], pieces[rank] = rank, piece
    if missing := [i for i in range(256) if bytes([i]) not in ranks]:  # it would panic later
        problem = "is no tokenizer that tiktoken reads"
        found = f"{len(missing)} of 256 bytes have no rank, 0x{missing[0]:02x} first"
        raise refusal(str(files.main), problem, found)
    return ranks


def _sidecar(files: TokenizerFiles, ranks: Mapping[bytes, int]) -> dict[str, Any]:
    """The pattern, the special tokens and the end beside a file of ranks. Raises DataError."""
    name = f"{RANKS}.json"
    said = files.json(name)
    where = str(files.files[name])
    pattern, specials, end = (said.get(key) for key in ("pattern", "special_tokens", "end"))
    is_whole = isinstance(pattern, str) and pattern != "" and isinstance(end, str)
    if not is_whole or not isinstance(specials, dict) or end not in specials:
        wanted = "needs a pattern, special_tokens, and an end that is one of them"
        found, fix = ", ".join(said) or "nothing", f"as {SIDECAR}"
        raise DataError(where, wanted, found=found, fix=fix)
    if found_class := POSIX.search(str(pattern)):
        problem = "has a class that is of ASCII for tiktoken, and of Unicode elsewhere"
        fix = r"write the letters themselves, or \p{L}"
        raise DataError(where, problem, found=found_class[0], fix=fix)
    taken = {*ranks.values()}
    for token, number in specials.items():  # two may share one, as in OpenAI's o200k_harmony
        if not token or type(number) is not int or number < 0 or number in taken:
            problem = "needs a text and a number that is no rank for each special token"
            fix = "write a number that no piece has"
            raise DataError(where, problem, found=f"{token!r}: {number!r}", fix=fix)
    return said


def _in_oniguruma(pattern: str) -> str:
    r"""Writes a pattern of tiktoken as the library `tokenizers` reads it.

    >>> print(_in_oniguruma(r"\p{N}{1,3}+|\\w"))
    (?>\p{N}{1,3})|\\w
    """
    pattern = POSSESSIVE.sub(r"(?>\1\2)", pattern)
    return re.sub(r"\\.", lambda found: WORDS.get(found[0], found[0]), pattern)


def _tiktoken(files: TokenizerFiles) -> Converted:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = _ranks(files)
    said = _sidecar(files, ranks)
    specials: dict[str, int] = said["special_tokens"]
    end = said["end"]
    with extra("tiktoken"):
        import tiktoken
    with _library(files):
        encoding = tiktoken.Encoding(
            files.main.name,
            pat_str=said["pattern"],
            mergeable_ranks=ranks,
            special_tokens=specials,
        )
        pattern = Regex(_in_oniguruma(said["pattern"]))
    letters = _letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (rank, ranks[left], ranks[right], spelled[left], spelled[right])
        for token, rank in ranks.items()
        for left, right in ((token[:i], token[i:]) for i in range(1, len(token)))
        if left in ranks and right in ranks
    ]
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | specials
    model: Any = models.BPE(vocab=vocab, merges=[merge[3:] for merge in sorted(merges)])
    # A word that is a token is one, also where no merges lead to it.
    model.ignore_merges = any(len(model.tokenize(word)) > 1 for word in spelled.values())
    inner: Any = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # What the pattern does not match is dropped, as tiktoken does.
            pre_tokenizers.Split(pattern, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(specials))
    with _library(files):
        _compare(files, inner, encoding.encode_ordinary)
    return Converted(inner, {"eos_token": end})


# ---- sentencepiece -----------------------------------------------------------------------------


def _sentencepiece(files: TokenizerFiles) -> Converted:
    with extra("sentencepiece"):
        import sentencepiece
    with extra("protobuf"):
        from sentencepiece import sentencepiece_model_pb2
    content = read(files.main)
    with _library(files):
        library = sentencepiece.SentencePieceProcessor(model_proto=content)
        model = vars(sentencepiece_model_pb2)["ModelProto"].FromString(content)
    if other := next((entry for entry in model.pieces if entry.type not in KINDS), None):
        # An unused piece is left in pairs that lead to others; no library but its own has that.
        problem, fix = "has a piece that is unused, or of a new kind", "train it without such"
        found = f"{other.piece!r} of type {other.type}"
        raise DataError(str(files.main), problem, found=found, fix=fix)
    if library.eos_id() < 0:
        problem, fix = "has no end mark </s>", "train it with one: --eos_id=2"
        raise DataError(str(files.main), problem, found="eos_id -1", fix=fix)
    inner = _of_model(files, model)
    ids = {
        "unk_token": library.unk_id(),
        "bos_token": library.bos_id(),
        "eos_token": library.eos_id(),
        "pad_token": library.pad_id(),
    }
    named = {name: library.id_to_piece(number) for name, number in ids.items() if number >= 0}
    _compare(files, inner, library.encode, _symbols(model))
    if "bos_token" in named and files.json(CONFIG).get("add_bos_token", True):
        _add_begin(inner, named["bos_token"])
    return Converted(inner, named)


def _of_model(files: TokenizerFiles, model: Any) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

    inner: Any = Tokenizer(_pieces(files, model))
    spec = model.normalizer_spec
    inner.normalizer = _normalizer(spec, _symbols(model))
    fallback = [decoders.ByteFallback(), decoders.Fuse()]
    cuts: list[Any] = []
    begun = []
    if spec.add_dummy_prefix:
        cuts.append(pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
        begun = [decoders.Strip(" ", 1, 0)]
    if model.trainer_spec.model_type == UNIGRAM:
        words = Regex("|".join(_cuts(model)))
        cuts.append(pre_tokenizers.Split(words, behavior="merged_with_previous"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *fallback, *begun])
    added = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}  # whether they are special
    inner.add_tokens(
        [
            AddedToken(
                entry.piece, special=added[entry.type], normalized=entry.type == USER_DEFINED
            )
            for entry in model.pieces
            if entry.type in added
        ]
    )
    return inner


def _cuts(model: Any) -> Iterator[str]:
    """Patterns behind which a text is cut that spells a mark or a byte, which is no such piece.

    Two letters that are unknown stay together: they become one token.
    """
    known = {entry.piece for entry in model.pieces if entry.type == NORMAL}
    marks = [entry.piece for entry in model.pieces if entry.type in (CONTROL, UNKNOWN, BYTE)]
    for word in marks:
        places = range(1, len(word))
        apart = (i for i in places if known & {word[i - 1], word[i]})
        if (place := next(apart, min(1, len(word) - 1))) > 0:
            yield f"{re.escape(word[:place])}(?={re.escape(word[place:])})"


def _pieces(files: TokenizerFiles, model: Any) -> Any:
    """The pieces, and how a text is cut into them."""
    from tokenizers import models

    about, normal = model.trainer_spec, [entry for entry in model.pieces if entry.type == NORMAL]
    if about.model_type == UNIGRAM:
        rows = [(entry.piece, entry.score) for entry in model.pieces]
        return models.Unigram(rows, unk_id=about.unk_id, byte_fallback=about.byte_fallback)
    if about.model_type != BPE:
        problem, fix = "is no model of unigrams or pairs", "train it with --model_type=bpe"
        raise DataError(str(files.main), problem, found=f"model {about.model_type}", fix=fix)
    numbers = {entry.piece: number for number, entry in enumerate(model.pieces)}
    score = {entry.piece: entry.score for entry in normal}
    merges = [
        (-score[word], len(left), left, right)
        for word in score
        for left, right in ((word[:i], word[i:]) for i in range(1, len(word)))
        if left in score and right in score
    ]
    return models.BPE(
        vocab=numbers,
        merges=[merge[2:] for merge in sorted(merges)],
        unk_token=about.unk_piece,
        fuse_unk=not about.byte_fallback,
        byte_fallback=about.byte_fallback,
    )


def _symbols(model: Any) -> list[str]:
    """The pieces that are tokens wherever they stand in a text."""
    return [entry.piece for entry in model.pieces if entry.type == USER_DEFINED]


def _normalizer(spec: Any, symbols: Sequence[str]) -> Any:
    """The changes of a text before it is cut into pieces."""
    from tokenizers import Regex, normalizers

    found: list[Any] = []
    if spec.precompiled_charsmap:
        found.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # A space that begins a text stays, in place of the one that would be put there.
        found += [normalizers.Strip(left=False, right=True)]
        found += [normalizers.Replace(Regex(" {2,}"), " ")]
    elif spec.add_dummy_prefix:
        # The space that begins a text is one more, also where the text begins with a space.
        found += [normalizers.Replace(Regex(rf"\A{space}"), space * 2) for space in (" ", SPACE)]
    if spec.add_dummy_prefix and symbols:
        # A space comes before a symbol that begins a text, too, where no cut is. The library also
        # changes the symbols themselves so, which have to stay as they are.
        any_symbol = "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))
        begun = Regex(rf"\A(?=(?:{any_symbol}))(?!(?:{any_symbol})\z)")
        found += [normalizers.Replace(begun, SPACE)]
    return normalizers.Sequence([*found, normalizers.Replace(" ", SPACE)])
