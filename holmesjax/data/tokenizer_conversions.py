"""Files of each format as an object of the library `tokenizers`, with which everything is done.

So the tokens of a run are those of the `tokenizer.json` that it exports, whatever it has read. What
a file of another format becomes is compared with the library that owns the format, on texts where
the two are known to differ.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holmesjax.data.byte_tokenizer import BEGIN, MARK
from holmesjax.data.tokenizer_paths import CONFIG, RANKS, SIDECAR, TokenizerFiles, extra, read
from holmesjax.errors import DataError

SPACE = "\u2581"  # a space in the pieces of sentencepiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # kinds of its pieces
UNIGRAM, BPE = 1, 2  # kinds of its models
# Repeats that give nothing back, as tiktoken has them; in Oniguruma they would repeat the repeat.
POSSESSIVE = re.compile(r"(\\[pP]\{[^}]*\}|\[(?:\\.|[^\]\\])+\]|\\.|[^\\)\]}])(\{\d+(?:,\d*)?\})\+")
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

    try:
        inner: Any = Tokenizer.from_str(read(files.main).decode())
    except Exception as error:
        raise _no_tokenizer(files, error) from None
    return Converted(inner, {}, None if inner.padding is None else inner.padding["pad_token"])


def _no_tokenizer(files: TokenizerFiles, error: Exception) -> DataError:
    """The refusal of a file that its library cannot read; libraries raise errors of any class."""
    found = (str(error) or type(error).__name__).splitlines()[0]
    fix = "name another file, or copy it again"
    problem = f"is no tokenizer that {files.kind} reads"
    return DataError(str(files.main), problem, found=found, fix=fix)


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
    for text in (*PROBES, *(f"a{symbol} b{symbol}c" for symbol in symbols)):
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


def _tiktoken(files: TokenizerFiles) -> Converted:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = f"{RANKS}.json"
    said = files.json(name)
    specials: Any = said.get("special_tokens")
    end: Any = said.get("end")
    is_whole = isinstance(said.get("pattern"), str) and isinstance(specials, dict)
    if not is_whole or end not in specials:
        wanted, shown = "needs a pattern, special_tokens, and an end that is one of them", said
        found, fix = ", ".join(shown) or "nothing", f"as {SIDECAR}"
        raise DataError(str(files.files[name]), wanted, found=found, fix=fix)
    with extra("tiktoken"):
        import tiktoken.load
    try:
        ranks = tiktoken.load.load_tiktoken_bpe(str(files.main))
        if missing := [i for i in range(256) if bytes([i]) not in ranks]:  # it would panic later
            raise ValueError(f"{len(missing)} of 256 bytes have no rank, 0x{missing[0]:02x} first")
        encoding = tiktoken.Encoding(
            files.main.name,
            pat_str=said["pattern"],
            mergeable_ranks=ranks,
            special_tokens=specials,
        )
    except Exception as error:
        raise _no_tokenizer(files, error) from None
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
    pattern = Regex(POSSESSIVE.sub(r"(?>\1\2)", said["pattern"]))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # What the pattern does not match is dropped, as tiktoken does.
            pre_tokenizers.Split(pattern, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(specials))
    _compare(files, inner, encoding.encode_ordinary)
    return Converted(inner, {"eos_token": end})


# ---- sentencepiece -----------------------------------------------------------------------------


def _sentencepiece(files: TokenizerFiles) -> Converted:
    with extra("sentencepiece"):
        import sentencepiece
    with extra("protobuf"):
        from sentencepiece import sentencepiece_model_pb2
    content = read(files.main)
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=content)
        model = vars(sentencepiece_model_pb2)["ModelProto"].FromString(content)
    except Exception as error:
        raise _no_tokenizer(files, error) from None
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
    symbols = [entry.piece for entry in model.pieces if entry.type == USER_DEFINED]
    _compare(files, inner, library.encode, symbols)
    if "bos_token" in named and files.json(CONFIG).get("add_bos_token", True):
        _add_begin(inner, named["bos_token"])
    return Converted(inner, named)


def _of_model(files: TokenizerFiles, model: Any) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

    inner: Any = Tokenizer(_pieces(files, model))
    spec = model.normalizer_spec
    inner.normalizer = _normalizer(spec)
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


def _normalizer(spec: Any) -> Any:
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
    return normalizers.Sequence([*found, normalizers.Replace(" ", SPACE)])
