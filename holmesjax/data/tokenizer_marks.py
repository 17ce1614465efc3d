"""Tokens that are marks and no text, as the files of a tokenizer name them.

Several files say it, and `transformers` reads them in this order: the tokens of `tokenizer.json`;
the list `added_tokens_decoder` of `tokenizer_config.json` or, where there is none,
`special_tokens_map.json` and `added_tokens.json`; then the tokens with a name, such as `bos_token`.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holmesjax.data.tokenizer_paths import (
    ADDED,
    CONFIG,
    CONVERT,
    GENERATION,
    MAIN,
    OF_MODEL,
    SPECIAL_MAP,
    TokenizerFiles,
    read as read_file,
)
from holmesjax.errors import DataError

LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
NAMES = ("unk_token", "bos_token", "eos_token", "pad_token")
OTHER_NAMES = ("sep_token", "cls_token", "mask_token")  # that every class has beside them
# Classes of `transformers` whose marks are those that files name.
GENERIC = ("None", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


def _named(names: str, tokens: str) -> Mapping[str, str]:
    """Marks by their names, which are written without their end."""
    return {f"{name}_token": mark for name, mark in zip(names.split(), tokens.split(), strict=True)}


# Marks that classes of `transformers` 5 and 4.57 have where no file says another, or null. Where
# the two versions have unlike ones, it is "".
OF_GPT2: Mapping[str, str] = dict.fromkeys(NAMES[:3], "<|endoftext|>")
OF_LLAMA = _named("bos eos unk", "<s> </s> <unk>")
OF_T5 = _named("eos unk pad", "</s> <unk> <pad>")
OF_ROBERTA = {**OF_T5, **_named("bos cls sep mask", "<s> <s> </s> <mask>")}
OF_BERT = _named("unk sep pad cls mask", "[UNK] [SEP] [PAD] [CLS] [MASK]")
OF_XLNET = {**OF_ROBERTA, **_named("sep cls", "<sep> <cls>")}
OF_ALBERT = {**OF_BERT, **_named("bos eos unk pad", "[CLS] [SEP] <unk> <pad>")}
OF_COHERE = _named("bos eos unk", "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <UNK>")
OF_CLASSES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "WhisperTokenizer"), OF_GPT2),
    "GPTNeoXTokenizer": {**OF_GPT2, "pad_token": ""},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    **dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer"), OF_LLAMA),
    "GemmaTokenizer": {**_named("bos eos unk pad", "<bos> <eos> <unk> <pad>"), "mask_token": ""},
    "CohereTokenizer": {**dict.fromkeys(("pad_token", *OTHER_NAMES), ""), **OF_COHERE},
    **dict.fromkeys(("T5Tokenizer", "ByT5Tokenizer"), OF_T5),
    "ReformerTokenizer": _named("eos unk", "</s> <unk>"),
    "XGLMTokenizer": {**OF_T5, **_named("bos cls sep", "<s> <s> </s>")},
    **dict.fromkeys(("RobertaTokenizer", "XLMRobertaTokenizer", "BartTokenizer"), OF_ROBERTA),
    **dict.fromkeys(("MBartTokenizer", "NllbTokenizer", "CamembertTokenizer"), OF_ROBERTA),
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"), OF_BERT),
    "XLNetTokenizer": OF_XLNET,
    **dict.fromkeys(("AlbertTokenizer", "RemBertTokenizer"), OF_ALBERT),
}
# The class where files of a tokenizer name none and a model is beside them. It is that of both
# versions; of other models they have unlike ones, or one that is not in the table.
OF_MODELS: Mapping[str, str] = {
    **dict.fromkeys(("gpt2", "gptj", "opt", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("codegen", "phi"), "CodeGenTokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    "cohere": "CohereTokenizer",
    "falcon": "PreTrainedTokenizerFast",
    "t5": "T5Tokenizer",
}
# Classes over a file of sentencepiece that leave its ids as they are. Others move them, as that of
# XLM-RoBERTa does, or have other marks, as that of T5, and code in a folder may do either.
OF_PIECES = (
    *GENERIC,
    *("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "BaichuanTokenizer"),
    *("InternLMTokenizer", "InternLM2Tokenizer"),
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The marks that files name beside those of the format itself."""

    named: Mapping[str, str]  # such as bos_token; a name without a token is absent
    others: Sequence[str] = ()  # special tokens without a name
    listed: Sequence[Mapping[str, Any]] = ()  # content and flags of each, in order of the ids
    flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)  # of those with a name
    where: Mapping[str, str] = field(default_factory=dict)  # the file that has a name, or null


def read(files: TokenizerFiles, has: Callable[[str], bool] = lambda token: False) -> Marks:
    """Reads what the files say. Raises DataError for what is no token.

    `has` tells whether a token is among the pieces, for marks that only the class names.
    """
    try:
        return _read(files, has)
    except (TypeError, ValueError, AttributeError) as error:
        problem, fix = (
            f"has {CONFIG}, {SPECIAL_MAP} or {ADDED} with what is no mark",
            "copy it again",
        )
        raise DataError(str(files.main.parent), problem, found=error, fix=fix) from None


def _read(files: TokenizerFiles, has: Callable[[str], bool]) -> Marks:
    config = files.json(CONFIG)
    of_class = _of_class(files) or {}
    named: dict[str, Any] = {name: token for name, token in of_class.items() if has(token)}
    flags: dict[str, Mapping[str, bool]] = {}
    where: dict[str, str] = {}
    others: list[str] = []
    listed: list[Mapping[str, Any]] = []
    is_listed = "added_tokens_decoder" in config
    for name in (CONFIG,) if is_listed else (CONFIG, SPECIAL_MAP):
        said = files.json(name)
        for key, value in said.items():
            if key.endswith("_token") and not isinstance(value, bool):
                named[key] = None if value is None else _content(files, name, value)
                where[key] = str(files.files[name])
                if isinstance(value, dict):
                    flags[value["content"]] = _flags(value)
        for key in LISTS:
            value = said.get(key) or []
            for token in value.values() if isinstance(value, dict) else value:
                if isinstance(token, dict):
                    flags[_content(files, name, token)] = _flags(token)
            if isinstance(value, dict):  # tokens with names of their own
                named |= {
                    own_name: _content(files, name, token) for own_name, token in value.items()
                }
            else:
                others += [_content(files, name, token) for token in value]
    found = {key: token for key, token in named.items() if token is not None}
    special = {*found.values(), *others}
    if is_listed:
        rows = config["added_tokens_decoder"].items()
        for _, token in sorted(rows, key=lambda row: int(row[0])):
            content = _content(files, CONFIG, token)
            listed.append({"content": content, **_flags(token)})
    else:
        for content, _ in sorted(files.json(ADDED).items(), key=lambda row: row[1]):
            is_special = content in special
            listed.append({"content": content, "normalized": not is_special, "special": is_special})
    return Marks(
        named=found, others=list(dict.fromkeys(others)), listed=listed, flags=flags, where=where
    )


def class_of_model(files: TokenizerFiles) -> str:
    """The class of a tokenizer where only the files of a model say it; else empty."""
    is_named = files.json(CONFIG).get("tokenizer_class") or OF_MODEL not in files.files
    return "" if is_named else class_of(files)


def class_of(files: TokenizerFiles) -> str:
    """The class that `transformers` takes for a tokenizer, or words that are no class."""
    model = files.json(OF_MODEL)
    named = files.json(CONFIG).get("tokenizer_class") or model.get("tokenizer_class")
    if named is None and "model_type" in model:
        kind = str(model["model_type"])
        return OF_MODELS.get(kind, f"none, beside a model {kind}")
    name = str(named)
    return name if name in GENERIC else name.removesuffix("Fast")


def _of_class(files: TokenizerFiles) -> Mapping[str, str] | None:
    """The marks that the class of a tokenizer has where no file says one; None: not known.

    Over pieces of bytes, version 5 takes no class of Llama, and version 4 does.
    """
    name = class_of(files)
    of_class = OF_CLASSES.get(name)
    is_of_bytes = files.kind == "tokenizers" and b'"ByteLevel"' in read_file(files.main)
    if of_class is not None and name == "LlamaTokenizer" and is_of_bytes:
        return dict.fromkeys(of_class, "")
    return of_class


def refuse_other_pieces(files: TokenizerFiles) -> None:
    """Raises DataError for a file of sentencepiece whose class has other ids, or may have them."""
    name = class_of(files)
    if files.kind == "sentencepiece" and name not in OF_PIECES and not name.startswith("none, "):
        problem = f"has a class that may have other ids than {files.main.name}"
        found = f"tokenizer_class {name}"
        fix = f"name {files.main.name} itself for its own ids, or write a {MAIN}: {CONVERT}"
        raise DataError(str(files.main.parent), problem, found=found, fix=fix)


def refuse_other_ids(files: TokenizerFiles, inner: Any) -> None:
    """Raises DataError where a file gives a token another id than it has.

    The library takes the id of the piece, or the next one, and says nothing; the model was trained
    with what the file says. The ids of an added_tokens.json are no more than an order.

    Args:
      files: of the tokenizer.
      inner: of the library `tokenizers`, with all marks.
    """
    said: list[tuple[str, Any, Any]] = []  # file, token and its id
    if files.kind == "tokenizers":
        whole = files.json(MAIN)
        added = whole.get("added_tokens") or []
        said += [(MAIN, token["content"], token["id"]) for token in added]
        around = _special_of(whole.get("post_processor") or {})
        said += [(MAIN, token, number) for token, number in around]
        _refuse_shared(files, whole, {token["id"] for token in added})
    rows = files.json(CONFIG).get("added_tokens_decoder") or {}
    said += [(CONFIG, _content(files, CONFIG, token), int(n)) for n, token in rows.items()]
    for name, token, number in said:
        if (own := inner.token_to_id(token)) != number:
            problem = f"gives {token} another id than the pieces and the order of tokens, {own}"
            fix = "correct the id, or add the token that is missing before it"
            raise DataError(str(files.files[name]), problem, found=f"id {number}", fix=fix)


def _refuse_shared(files: TokenizerFiles, whole: Mapping[str, Any], added: Container[int]) -> None:
    """Raises DataError for two pieces of one id; special tokens may share one."""
    vocab = whole["model"].get("vocab")
    if not isinstance(vocab, dict) or len({*vocab.values()}) == len(vocab):
        return
    pieces: dict[int, str] = {}
    for piece, number in vocab.items():
        if (other := pieces.setdefault(number, piece)) != piece and number not in added:
            problem, fix = "gives two pieces one id", "copy the file again"
            found = f"{other!r} and {piece!r}: {number}"
            raise DataError(str(files.files[MAIN]), problem, found=found, fix=fix)


def _special_of(processor: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The tokens that a post-processor of a tokenizer.json puts around texts, with their ids."""
    for part in processor.get("processors", ()):
        yield from _special_of(part)
    if processor.get("type") == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            yield from zip(token["tokens"], token["ids"], strict=True)
    for key in ("sep", "cls"):  # of BERT and RoBERTa
        if key in processor:
            token, number = processor[key]
            yield token, number


def end_of_model(files: TokenizerFiles) -> str:
    """Says in words which mark ends a document, as the files of a model name it.

    Empty where those of the tokenizer name it. It is no part of an identity, so it is compared by
    itself.
    """
    is_named = any("eos_token" in files.json(name) for name in (CONFIG, SPECIAL_MAP))
    if files.kind != "tokenizers" or is_named or not {GENERATION, OF_MODEL} & files.files.keys():
        return ""
    return f"class {class_of(files)}, eos_token_id {ends(files)[:1]}"


def refuse_unknown(
    files: TokenizerFiles, marks: Marks, used: Container[str], *, pads: bool
) -> None:
    """Raises DataError for a mark that a template uses and of which only a class could say more.

    Args:
      files: of the tokenizer.
      marks: all that are known.
      used: the names in the template.
      pads: whether the file with the pieces has a mark for padding, which some classes take.
    """
    name_of_class = class_of(files)
    if name_of_class in GENERIC:
        return
    of_class = _of_class(files)
    for name in (*NAMES, *OTHER_NAMES):
        is_told = name in marks.named or name in marks.where
        is_open = of_class is None or name in of_class or (pads and name == "pad_token")
        if name in used and not is_told and is_open:
            problem = f"does not say what {name} is, which its chat template uses"
            found = f"tokenizer_class {name_of_class}, whose own is not known or no piece"
            fix = f"write {name} into {CONFIG}: the mark, or null"
            raise DataError(str(files.main.parent), problem, found=found, fix=fix)


def _flags(token: Mapping[str, Any]) -> Mapping[str, bool]:
    return {flag: token[flag] for flag in FLAGS if flag in token}


def _content(files: TokenizerFiles, name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        problem, fix = "has a special token that is no text", "correct it"
        raise DataError(str(files.files[name]), problem, found=token, fix=fix)
    return content


def add(inner: Any, marks: Marks) -> None:
    """Adds marks to an object of the library `tokenizers`, as `transformers` does.

    A mark that is a piece already keeps its id, and another gets the next one.
    """
    from tokenizers import AddedToken

    there = inner.get_added_tokens_decoder().values()
    known, equal = {token.content for token in there}, {repr(token) for token in there}
    named = {*marks.named.values(), *marks.others}
    new = []
    for token in (AddedToken(**mark) for mark in marks.listed):
        if repr(token) not in equal:
            token.special = token.special or token.content in named
            new.append(token)
        known.add(token.content)
    for content in (*marks.named.values(), *marks.others):
        if content not in known:
            new.append(AddedToken(content, **{**marks.flags.get(content, {}), "special": True}))
            known.add(content)
    if new:
        inner.add_tokens(new)


def ends(files: TokenizerFiles) -> list[int]:
    """The ids that end a text of a model: of its generation config, or of its config."""
    for name in (GENERATION, OF_MODEL):
        whole = files.json(name)
        said = whole.get("eos_token_id")
        if said is None and isinstance(whole.get("text_config"), dict):  # a model with images
            said = whole["text_config"].get("eos_token_id")
        if said is None:
            continue
        numbers = said if isinstance(said, list) else [said]
        if not all(type(number) is int for number in numbers):
            problem, fix = "names an eos_token_id that is no number", "correct it"
            raise DataError(str(files.files[name]), problem, found=said, fix=fix)
        return [number for number in numbers if number >= 0]  # old files have -1 for none
    return []
