"""A tokenizer as a whole: pieces, ids, marks, ends, template and split, of a folder or a file.

Training, dialogues, generation, import and export take them from here alone. A run folder holds a
copy of the files, so that sampling and exports need nothing else.
"""

import copy as copies
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.config import BYTES, DataConfig, ModelConfig
from holmesjax.data import (
    chat_template,
    tokenizer_conversions,
    tokenizer_marks,
    tokenizer_paths,
)
from holmesjax.data.byte_tokenizer import BEGIN
from holmesjax.data.chat_template import DEFAULT, ChatTemplate, Message
from holmesjax.data.decode_stream import DecodeStream
from holmesjax.data.tokenizer_conversions import SPACE
from holmesjax.data.tokenizer_marks import GENERIC, NAMES, OTHER_NAMES, Marks
from holmesjax.data.tokenizer_paths import (
    CONFIG,
    MAIN,
    OF_MODEL,
    TEMPLATE,
    TEMPLATES,
    TokenizerFiles,
    find,
)
from holmesjax.errors import CheckpointError, ConfigError, DataError
from holmesjax.files.run_folder import METRICS

FOLDER = "tokenizer"  # of a run folder
UNIT = 128  # a vocabulary is padded to a multiple, whatever the plan
# What `transformers` is told of an export: the split of tokenizer.json is the one that counts.
CLASS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],  # what `generate` takes
}
CLEANS = "clean_up_tokenization_spaces"
CLEANS_BPE = f"{CLEANS}_for_bpe_even_though_it_will_corrupt_output"
# What these settings replace, in this order.
CLEANED = (
    *((f" {sign}", sign) for sign in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
USUAL_NAMES = {*NAMES, *OTHER_NAMES}  # that every class has
# The class of this family makes a split of its own in `transformers` 5, whatever tokenizer.json
# says, but where a folder names code of its own. There is no code here, so none can run.
OWN_SPLIT = {"qwen2": {"trust_remote_code": True}}
# What classes of BERT put above the normalizer, its name in tokenizer.json, and their default. A
# part of the name of a class, or of the type of a model beside it, says that it is one of them.
BERT = "BertNormalizer"
OF_BERTS = ("bert", "dpr", "electra", "funnel", "layoutlm", "lxmert", "mpnet", "realm", "splinter")
OF_BERT = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
# Classes whose settings say in `transformers` 4 which marks a text gets, and in version 5 do not;
# and whether a text gets a BOS where the settings are absent.
OF_AROUND = {
    **dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"), True),
    **{"CohereTokenizer": True, "GPTNeoXTokenizer": False},
}
# Settings of a tokenizer_config.json that an export leaves alone; all others are of its class.
KEPT = ("model_max_length", "padding_side", "truncation_side")


@dataclass(frozen=True, kw_only=True)
class FileTokenizer:
    """A tokenizer, and what its files say of it."""

    files: TokenizerFiles | None  # None: bytes
    inner: Any  # of the library `tokenizers`; a special token in a text is text for it
    said: Marks  # of its files
    variables: Mapping[str, Any] | None = None  # for its template
    num_tokens: int
    num_used: int  # more than any token of a corpus; of marks, a corpus has few
    end: int  # the mark behind a document
    model_ends: Sequence[int]  # that a generation config or a config of a model names

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, if there is one."""
        if self.files is None:
            return None
        return ChatTemplate.of(self.files, {**self.said.named, **(self.variables or {})})

    @functools.cached_property
    def marks(self) -> dict[str, int]:
        """The ids of all tokens that are marks in the text of a template, by their content."""
        added = self.inner.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    @functools.cached_property
    def special(self) -> Sequence[str]:
        """The marks that no text may hold; the others, such as runs of spaces, are text.

        Marks that the template writes around what is said are not always flagged as special.
        """
        around = "" if self.template is None else self.template.around
        added = self.inner.get_added_tokens_decoder().values()
        is_of_turns = lambda content: bool(content.strip()) and content in around
        return [x.content for x in added if x.special or is_of_turns(x.content)]

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The marks that end a text, `end` first: of the files, and of an answer's turn."""
        turn = None if self.template is None else self.template.end_of_turn(self.marks)
        own = [] if turn is None else [self.marks[turn]]
        return tuple(dict.fromkeys([self.end, *self.model_ends, *own]))

    @property
    def num_of_dialogues(self) -> int:
        """More than any token of a dialogue: a template may use all marks but those for padding."""
        template = self.template
        text = template.source + (template.for_tools or "") if template else ""
        unused = {
            self.marks[token]
            for name, token in self.said.named.items()
            if name not in ("bos_token", "eos_token") and name not in text and token not in text
        }
        known = {*self.inner.get_vocab(with_added_tokens=True).values()}
        return 1 + max(known - (unused - {*self.ends}))

    @functools.cached_property
    def _of_rendered(self) -> Any:
        """The same for a text that a template has made: its marks are marks, and none is added."""
        other = copies.deepcopy(self._without_marks)
        other.encode_special_tokens = False
        return other

    @functools.cached_property
    def _without_marks(self) -> Any:
        """The same for texts that get no marks."""
        other = copies.deepcopy(self.inner)
        other.encode_special_tokens = True
        other.post_processor = None  # it may take the spaces away from the places of tokens
        return other

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of whole documents with their marks, int32. A special token in one is text."""
        found = []
        for encoding in self.inner.encode_batch_fast(list(texts)):
            tokens = encoding.ids
            marks = [] if tokens and tokens[-1] == self.end else [self.end]
            found.append(np.array([*tokens, *marks], np.int32))
        return found

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a document that begins with a text; int32."""
        tokens = self.documents([text])[0]
        return tokens[:-1] if len(tokens) > 1 else tokens

    def rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text that a template has made, and the characters of each."""
        encoding = self._of_rendered.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text with the marks around it, and the characters of each."""
        encoding = self.inner.encode(text)
        places = iter(self._without_marks.encode(text).offsets)
        own = [(0, 0) if is_mark else next(places) for is_mark in encoding.special_tokens_mask]
        return encoding.ids, own

    def answer_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a dialogue, whose last message is to be answered.

        The tokenizer has a template. Raises DataError for a special token in what is said, a
        template that fails, or one that does not show all of it.
        """
        template = self.template
        assert template is not None, "ChatTemplate.load has refused others"
        for message in messages:
            if found := [mark for mark in self.special if mark in message["content"]]:
                fix = "leave it out: it would not be text in a dialogue"
                problem = f"the words of {message['role']} hold a special token"
                raise DataError(chat_template.WHERE, problem, found=found[0], fix=fix)
        whole = template.render(messages, add_generation_prompt=True)
        hidden = template.hidden(whole, messages, add_generation_prompt=True)
        if hidden is not None:
            shown = f"{messages[hidden]['role']}, message {hidden + 1}"
            where, fix = chat_template.WHERE, chat_template.SHOW
            raise DataError(where, chat_template.HIDDEN, found=shown, fix=fix)
        return self.rendered(whole)[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.inner.decode(list(tokens), skip_special_tokens=True)
        for spaced, together in CLEANED if self.cleans else ():
            text = text.replace(spaced, together)
        return text

    @functools.cached_property
    def cleans(self) -> bool:
        """Whether texts lose the spaces before punctuation, as `transformers` 5 does it.

        Version 4 does it for pairs of bytes, too; an export says that there it is not done.
        """
        said = {} if self.files is None else self.files.json(CONFIG)
        is_bpe = type(self.inner.model).__name__ == "BPE"
        return bool(said.get(CLEANS)) and (not is_bpe or bool(said.get(CLEANS_BPE)))

    def decode_stream(self, after: Sequence[int] = ()) -> DecodeStream:
        """The text of tokens that follow others, as they come."""
        return DecodeStream(self.decode, after, is_open=self.cleans)

    def ids(self) -> dict[str, int | list[int] | None]:
        """The ids of marks that a config.json and a generation_config.json of its model have."""
        ends = list(self.ends)
        of = lambda name: self.marks.get(self.said.named.get(name, ""))
        return {
            "bos_token_id": of("bos_token"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends,
            "pad_token_id": of("pad_token"),
        }

    def _flagged(self) -> dict[str, str]:
        """The flags of marks that are not those of a usual special token, in words."""
        is_changed = str(self.inner.normalizer) not in ("None", "NFC()")  # so `normalized` counts
        names = ("lstrip", "rstrip", "single_word", *(("normalized",) if is_changed else ()))
        found = {}
        for token in self.inner.get_added_tokens_decoder().values():
            if flags := [name for name in names if getattr(token, name)]:
                found[token.content] = ", ".join(flags)
        return found

    def is_of(self, folder: Path) -> bool:
        """Whether a folder holds this tokenizer."""
        if self.files is None or not tokenizer_paths.has_one(folder):
            return False
        return find(folder).identity == self.files.identity

    def write(self, folder: Path, family: str = "") -> None:
        """Writes into a folder what `exported` returns, and raises what it does."""
        write_all(folder, self.exported(family))

    def exported(self, family: str = "") -> dict[str, bytes]:
        """All files that `transformers` needs to give the same tokens and texts of dialogues.

        Raises DataError for an end or another usual mark whose flags it would lose.

        Args:
          family: of the model beside them, such as llama, if there is one.
        """
        said = {} if self.files is None else self.files.json(CONFIG)
        sources = {} if self.files is None else chat_template.sources(self.files)
        # A mark without its name keeps its flags: that class adds those with a name once more.
        lost = self._flagged() if family in OWN_SPLIT else {}
        for name, token in self.said.named.items():
            is_needed = name in NAMES or any(name in source for source in sources.values())
            if is_needed and token in lost:
                where = BYTES if self.files is None else str(self.files.main)
                problem = f"gives {name} flags that transformers drops beside a {family}"
                fix = "make them false"
                raise DataError(where, problem, found=f"{token}: {lost[token]}", fix=fix)
        named = {name: token for name, token in self.said.named.items() if token not in lost}
        config = {key: said[key] for key in KEPT if key in said} | CLASS
        config[CLEANS] = self.cleans
        if self.cleans and type(self.inner.model).__name__ == "BPE":
            config[CLEANS_BPE] = True
        # A name without a token is null, where classes have defaults of their own.
        config |= dict.fromkeys(NAMES) | named | OWN_SPLIT.get(family, {})
        own = {name: token for name, token in named.items() if name not in USUAL_NAMES}
        if own:
            config["extra_special_tokens"] = own  # where transformers 4 looks for them
        if others := [token for token in self.said.others if token not in lost]:
            config["additional_special_tokens"] = others
        split = json.loads(self.inner.to_str())["pre_tokenizer"] or {}
        if "add_prefix_space" in split:  # transformers 4 would take it as false
            config["add_prefix_space"] = split["add_prefix_space"]
        files = {MAIN: self.inner.to_str(pretty=True).encode(), CONFIG: _json(config)}
        for name, source in sources.items():
            path = TEMPLATE if name == DEFAULT else f"{TEMPLATES}/{name}.jinja"
            files[path] = source.encode()
        return files


def load(path: str | Path, variables: Mapping[str, Any] | None = None) -> FileTokenizer:
    """Reads a tokenizer. Raises DataError for files that are none, or lack what a run needs.

    Args:
      path: a folder, or the file with the pieces.
      variables: for its chat template, as `data.chat_template_kwargs`.
    """
    is_copy = Path(path).name == FOLDER and (Path(path).parent / METRICS).is_file()
    try:
        return _loaded(path, variables, has_trained=is_copy)
    except DataError as error:
        if not is_copy:
            raise
        fix = f"{error.fix}; an earlier version that began the run still takes it"
        raise DataError(error.where, error.problem, found=error.found, fix=fix) from None


def _loaded(
    path: str | Path, variables: Mapping[str, Any] | None, *, has_trained: bool
) -> FileTokenizer:
    files = find(path)
    tokenizer_marks.refuse_other_pieces(files)
    converted = tokenizer_conversions.of(files)
    has = lambda token: converted.inner.token_to_id(token) is not None
    marks = tokenizer_marks.read(files, has)
    of_format = dict(converted.named)
    if converted.padding is not None and tokenizer_marks.class_of(files) in GENERIC:
        of_format["pad_token"] = converted.padding
    said = {name: token for name, token in of_format.items() if name not in marks.where}
    marks = replace(marks, named={**said, **marks.named})
    sources = chat_template.sources(files)
    used = {name for source in sources.values() for name in chat_template.variables_of(source)}
    tokenizer_marks.refuse_unknown(files, marks, used, pads=converted.padding is not None)
    _refuse_new_end(files, converted.inner, marks)
    _refuse_drawn_pieces(files, converted.inner)
    _refuse_contradictions(files, converted.inner)
    if not has_trained:  # with the marks of its pieces, and an export says that to all versions
        _refuse_other_around(files, converted.inner, marks)
    tokenizer_marks.add(converted.inner, marks)
    tokenizer_marks.refuse_other_ids(files, converted.inner)
    model_ends = tokenizer_marks.ends(files)
    named_end = marks.named.get("eos_token", of_format.get("eos_token"))
    end = _end(files, converted.inner, named_end, model_ends)
    if "eos_token" not in marks.named and not sources:
        # Of a template, no variable may appear that its files do not define.
        marks = replace(marks, named={**marks.named, "eos_token": converted.inner.id_to_token(end)})
    return _of(converted.inner, marks, files, end, model_ends, variables)


def of_run(data: DataConfig, path: str | Path | None = None) -> FileTokenizer:
    """Reads the tokenizer of a run, or its copy at another path."""
    return load(path or data.tokenizer, data.chat_template_kwargs)


def of_bytes() -> FileTokenizer:
    """The tokenizer of a run that reads bytes."""
    converted = tokenizer_conversions.of_bytes()
    return _of(converted.inner, Marks(named=converted.named), None, BEGIN, ())


def _of(
    inner: Any,
    marks: Marks,
    files: TokenizerFiles | None,
    end: int,
    model_ends: Sequence[int],
    variables: Mapping[str, Any] | None = None,
) -> FileTokenizer:
    inner.encode_special_tokens = True
    numbers = set(inner.get_vocab(with_added_tokens=True).values())
    special = {n for n, token in inner.get_added_tokens_decoder().items() if token.special}
    return FileTokenizer(
        files=files,
        inner=inner,
        said=marks,
        variables=variables,
        num_tokens=1 + max(numbers),
        num_used=1 + max(numbers - special | {end, *inner.encode("").ids}),
        end=end,
        model_ends=model_ends,
    )


def _refuse_new_end(files: TokenizerFiles, inner: Any, marks: Marks) -> None:
    """Raises DataError for an end that is no token yet: no model has been trained with it."""
    token = marks.named.get("eos_token")
    is_listed = token in [mark["content"] for mark in marks.listed]
    if token is not None and not is_listed and inner.token_to_id(token) is None:
        where = marks.where.get("eos_token", str(files.main))
        problem, fix = "names an eos_token that the tokenizer does not have", "correct it"
        raise DataError(where, problem, found=token, fix=fix)


def _refuse_drawn_pieces(files: TokenizerFiles, inner: Any) -> None:
    """Raises DataError for pieces that are drawn anew each time: no two runs would be the same."""
    if dropout := json.loads(inner.to_str())["model"].get("dropout"):
        problem, fix = "draws the pieces of a text anew each time", 'say "dropout": null'
        raise DataError(str(files.main), problem, found=f"dropout {dropout}", fix=fix)


def _refuse_contradictions(files: TokenizerFiles, inner: Any) -> None:
    """Raises DataError for settings that classes of `transformers` put above tokenizer.json."""
    where, said = str(files.files.get(CONFIG)), files.json(CONFIG)
    whole = json.loads(inner.to_str())
    split, normalizer = (whole[part] or {} for part in ("pre_tokenizer", "normalizer"))
    key, fix = "add_prefix_space", "make both what the model was trained with"
    begins = split.get(key, said.get(key))  # some splits have no such setting
    of_pieces = _begins_with_space(split, normalizer)
    if "Llama" in str(said.get("tokenizer_class")) and of_pieces is not None:
        begins = of_pieces
    if said.get(key) not in (None, begins):
        raise DataError(where, f"has another {key} than {MAIN}", found=said[key], fix=fix)
    own_class = said.get("tokenizer_class")
    kind = str(own_class or files.json(OF_MODEL).get("model_type")).lower()
    is_of_bert = "herbert" not in kind and any(part in kind for part in OF_BERTS)
    is_asked = normalizer.get("type") == BERT and (is_of_bert or own_class is None)
    for key, (name, default) in OF_BERT.items() if is_asked else ():
        value, other = said.get(key, default if is_of_bert else normalizer[name]), normalizer[name]
        if name == "strip_accents":  # null means: where letters become small
            value, other = (normalizer["lowercase"] if x is None else x for x in (value, other))
        if value != other:
            problem, shown = f"has another {key} than {MAIN}", json.dumps(value)
            raise DataError(where, problem, found=shown, fix=fix)
    if said.get("split_special_tokens"):
        problem, fix = "makes text of the marks of a template", "remove the key"
        raise DataError(where, problem, found="split_special_tokens true", fix=fix)


def _refuse_other_around(files: TokenizerFiles, inner: Any, marks: Marks) -> None:
    """Raises DataError where settings and the post-processor put other marks around a text."""
    own_class, said = tokenizer_marks.class_of(files), files.json(CONFIG)
    if files.kind != "tokenizers" or own_class not in OF_AROUND:
        return
    tokens = inner.encode("a").tokens or [""]
    for name, at, default in (("bos_token", 0, OF_AROUND[own_class]), ("eos_token", -1, False)):
        key, is_added = f"add_{name}", tokens[at] == marks.named.get(name)
        if name in marks.named and bool(said.get(key, default)) != is_added:
            shown = json.dumps(said.get(key, default))
            shown += "" if key in said else f", the default of {own_class}"
            fix = "let transformers 4 write the folder, if the model was trained with that: "
            fix += "AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW_DIR); or write "
            fix += f"{key}: {json.dumps(is_added)}"
            where = str(files.files.get(CONFIG, files.main))
            raise DataError(where, f"has another {key} than {MAIN}", found=shown, fix=fix)


def _begins_with_space(split: Any, normalizer: Any) -> bool | None:
    """Whether a text gets a space before it, in pieces of sentencepiece; None: there are none."""
    parts = [split, *split.get("pretokenizers", ()), normalizer, *normalizer.get("normalizers", ())]
    if SPACE not in json.dumps(parts, ensure_ascii=False):
        return None
    is_prepend = lambda part: part.get("prepend_scheme", "never") != "never"
    return any(part.get("type") == "Prepend" or is_prepend(part) for part in parts)


def _end(files: TokenizerFiles, inner: Any, token: str | None, model_ends: Sequence[int]) -> int:
    """The id of the token that ends a document: as a file says, or the only special one."""
    if token is not None:
        return int(inner.token_to_id(token))
    if model_ends:
        if inner.id_to_token(model_ends[0]) is None:
            problem = "does not have the token that ends a text of the model beside it"
            fix = f"name the tokenizer of that model, or an eos_token in {CONFIG}"
            found = f"eos_token_id {model_ends[0]}"
            raise DataError(str(files.main), problem, found=found, fix=fix)
        return model_ends[0]
    special = {
        token.content: number
        for number, token in inner.get_added_tokens_decoder().items()
        if token.special
    }
    if len(special) == 1:
        return int(*special.values())
    problem = "does not say which token ends a document"
    names = ", ".join(list(special)[:8]) or "none"
    fix = f"name a folder whose {CONFIG} has an eos_token"
    raise DataError(str(files.main), problem, found=f"special tokens: {names}", fix=fix)


def copy_of_run(run_dir: Path, named: str, checkpoint: Path) -> Path:
    """The copy of a run's tokenizer. Raises CheckpointError unless a checkpoint is of that one.

    Args:
      run_dir: the folder of the run.
      named: the identity that the checkpoint names.
      checkpoint: its folder, for the message.
    """
    own = run_dir / FOLDER
    if find(own).identity != named:
        problem = f"is not the tokenizer of {checkpoint.name}"
        fix = f"copy the files that the run was started with back to {own}"
        raise CheckpointError(str(own), problem, found="other files", fix=fix)
    return own


def identity(tokenizer: str) -> str:
    """The identity of a `data.tokenizer`, wherever its files are."""
    return tokenizer if tokenizer == BYTES else find(tokenizer).identity


def identity_with_end(tokenizer: str) -> str:
    """The identity, with what ends a document where only files of a model say it."""
    end = "" if tokenizer == BYTES else tokenizer_marks.end_of_model(find(tokenizer))
    return ", ".join(filter(None, [identity(tokenizer), end]))


def place(tokenizer: str) -> str:
    """The place of the files of a `data.tokenizer`, for messages."""
    return tokenizer if tokenizer == BYTES else str(Path(tokenizer).absolute())


def padded(num_tokens: int) -> int:
    """The size of a vocabulary that holds them.

    >>> padded(4096), padded(50257)
    (4096, 50304)
    """
    return -(-num_tokens // UNIT) * UNIT


def check_vocabulary(model: ModelConfig, least: int) -> None:
    """Raises ConfigError if the model has fewer ids than texts may need, which are `least`."""
    if model.vocab_size < least:
        problem = f"must be at least {least}: the tokenizer has so many tokens"
        fix = f"use {padded(least)}, the next multiple of {UNIT}"
        raise ConfigError("model.vocab_size", problem, found=model.vocab_size, fix=fix)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object with its keys in order."""
    path.write_bytes(_json(value))


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a folder by their names, which may be in folders of their own."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
