"""Dialogues as a data source: only the tokens of the assistant count as targets.

A line of a file of JSON lines is a dialogue: `{"messages": [{"role": "user", "content": "..."},
...]}`, or `{"prompt": "...", "answer": "..."}`. The chat template of the tokenizer makes one text
of it, and this text becomes tokens as a whole: those from the first with a character of an answer
to the last with one count. The template sees the field `tools` of a line, if there is one.
Without a template, only prompts and answers can be read: their text is the prompt and, right
behind it, the answer and the mark of the end.

Tokens and marks are made once, into files beside the dialogues, and packed into rows. A dialogue
that is longer than a row is left out: a part of it would answer a missing question.

Dims: T tokens, D dialogues.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from holmesjax.config import BYTES, OF_DIALOGUES, Config, DataConfig
from holmesjax.data import (
    chat_template,
    corpus_files,
    object_stores,
    packing,
    text,
    text_documents,
    token_files,
    tokenizer_files,
    tokenizer_marks,
    tokenizer_paths,
)
from holmesjax.data.byte_tokenizer import BEGIN
from holmesjax.data.chat_template import (
    BEGIN_MARK,
    END_MARK,
    HIDDEN,
    THOUGHTS,
    Message,
    Tools,
    Variables,
)
from holmesjax.data.corpus_files import CorpusFile, CorpusFiles
from holmesjax.data.corpus_progress import LongWork
from holmesjax.data.file_kinds import JSON, LINES
from holmesjax.data.packing import DocumentRange, PackedRows, Spans
from holmesjax.data.sources import Splits
from holmesjax.data.tokenizer_files import FileTokenizer
from holmesjax.errors import DataError

WHERE = "data.corpus"
VERSION = 4  # raised when the same dialogue gives other tokens
VARIABLES = "chat_template_kwargs"  # the field of a line with variables for the template
READ = ("messages", "tools", "functions", VARIABLES)  # the fields of a line
# Fields beside the messages that other trainers make a part of the text, and what to do with them.
IN_TEXT = {
    **dict.fromkeys(("system", "system_prompt"), "write it as a first message of the role system"),
    "documents": "write what they say into a message",
}
DTYPES = {"tokens": "<i4", "trained": "|b1", "starts": "<i8", "dropped": "<i8"}
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'

tokenizer = text.tokenizer


class Dialogue(NamedTuple):
    """A line of a file."""

    messages: Sequence[Message]
    tools: Tools = None
    variables: Variables = chat_template.NO_VARIABLES  # of its own, for the template

    def texts(self) -> Iterator[tuple[str, str]]:
        """All that it says, each text with its place."""
        for number, message in enumerate(self.messages, 1):
            others = {key: value for key, value in message.items() if key != "content"}
            yield f"message {number}", message.get("content") or ""
            yield f"message {number}", json.dumps(others, ensure_ascii=False)
        yield "its tools", json.dumps(self.tools, ensure_ascii=False)
        yield f"its {VARIABLES}", json.dumps({**self.variables}, ensure_ascii=False)


# The tokens of a dialogue, and whether the assistant says each of them.
Encode = Callable[[Dialogue, str], tuple[list[int], list[bool]]]


def look(config: Config) -> None:
    """Reads the first dialogue of each file. Raises HolmesError."""
    data = config.data
    if data.tokenizer != BYTES:
        tokenizer = tokenizer_files.of_run(data)
        tokenizer_files.check_vocabulary(config.model, tokenizer.num_of_dialogues)
    encode = _encoder(data)
    for file in _files(data).files:
        where, dialogue = next(_dialogues(file), (str(file.path), None))
        if dialogue is None:
            fix = f"write lines as {EXAMPLE}"
            raise DataError(where, "has no dialogue", found="no line", fix=fix)
        encode(dialogue, where)


def read(config: DataConfig, length: int) -> Splits:
    """The dialogues as rows of so many tokens. Raises DataError for one that cannot be read."""
    corpus = _files(config)
    sources: Mapping[str, str] = {}
    files = {file.name: token_files.hash_of(file.path) for file in corpus.files}
    about = [VERSION, length, config.tokenizer == BYTES, *sorted(files.items())]
    if config.tokenizer != BYTES:
        its_files = tokenizer_paths.find(config.tokenizer)
        sources = chat_template.sources(its_files)
        about += [its_files.identity, sources]
        about += [config.chat_template_kwargs]
        # Marks of a class that only a config.json names, which is no part of an identity.
        about += filter(None, [tokenizer_marks.class_of_model(its_files)])
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    root = object_stores.path_of(config.corpus)
    beside = None if object_stores.is_remote(root) else root if root.is_dir() else root.parent
    make = lambda folder: _write(config, corpus.files, length, folder)
    found = packing.kept_arrays(key, DTYPES, make, beside)
    start_D, whole = found["starts"], len(found["tokens"])
    held_out = int(len(start_D) * config.validation_fraction)
    edges = [0, int(start_D[-held_out]) if held_out else whole, whole]
    splits: dict[str, PackedRows] = {}
    digests: dict[str, str] = {}
    for name, first, last in zip(("train", "validation"), edges, edges[1:], strict=False):
        own = DocumentRange(
            token_T=found["tokens"],
            start_D=start_D[slice(*np.searchsorted(start_D, (first, last)))],
            first=first,
            last=last,
            marks_end=config.tokenizer == BYTES,
            trained_T=found["trained"],
        )
        digests[name] = _digest(own)
        splits[name] = packing.packed(Spans([own]), length, digests[name], beside)
    dropped = int(found["dropped"][0])
    not_read = "; ".join(filter(None, [corpus.left_out.words, _unread(corpus.files, sources)]))
    left_out = f", {dropped:,} dialogues longer than {length:,} tokens left out" if dropped else ""
    return Splits(
        train=splits["train"],
        validation=splits["validation"],
        place=f"{object_stores.whole(object_stores.path_of(config.corpus))}{left_out}",
        digests=digests,
        files=dict(sorted(files.items())),
        left_out=corpus_files.with_remarks(not_read, corpus_files.doubtful([*files])),
    )


def _digest(own: DocumentRange) -> str:
    """SHA-256 of tokens, marks and places: a template may depend on more than the files."""
    digest = hashlib.sha256()
    assert own.trained_T is not None
    assert isinstance(own.start_D, np.ndarray), "dialogues are in arrays"
    for array in (own.token_T[own.first : own.last], own.trained_T[own.first : own.last]):
        digest.update(np.ascontiguousarray(array).data)
    digest.update((own.start_D - own.first).astype("<i8").tobytes())
    return digest.hexdigest()


def _files(config: DataConfig) -> CorpusFiles:
    """The files of dialogues; others of a folder are left out."""
    found = corpus_files.named_files(config)
    files, other = [], found.left_out
    for file in found.files:
        if file.kind.content in JSON:
            files.append(file)
        elif config.pattern is None:
            other.add(file.kind.words, file.name)
        else:
            fix = "choose files of JSON lines by data.pattern"
            raise DataError(str(file.path), "has no dialogues", found=file.kind.words, fix=fix)
    if not files:
        fix = f"name a file of lines as {EXAMPLE}, or a folder with such files"
        raise DataError(WHERE, "has no dialogues", found=f"left out: {other.words}", fix=fix)
    return CorpusFiles(files=files, left_out=other)


def _unread(files: Sequence[CorpusFile], sources: Mapping[str, str]) -> str:
    """The fields that are not read, by the first line of each file, in words.

    Args:
      files: of the corpus.
      sources: of the chat templates.
    """
    of_dialogues: dict[str, None] = {}
    of_messages: dict[str, None] = {}
    read = {"role", "content", *_of_loss(is_answer=True), *chat_template.words_of(sources.values())}
    if read & {*THOUGHTS[:2]}:  # which have the thoughts of all names
        read |= {*THOUGHTS}
    for file in files:
        if file.kind.content != LINES:  # it would be read whole for this
            continue
        _, first = next(text_documents.objects(file.path, file.kind), ("", None))
        own = first if isinstance(first, dict) else {}
        pair = () if own.get("messages") is not None else ("prompt", "answer")
        of_dialogues |= dict.fromkeys(key for key in own if key not in (*READ, *pair))
        for message in own.get("messages") or ():
            given = (key for key, value in message.items() if value is not None)
            of_messages |= dict.fromkeys(key for key in given if key not in read)
    named = (("dialogues", of_dialogues), ("messages", of_messages))
    return "; ".join(f"fields of {of}: {', '.join(names)}" for of, names in named if names)


def _write(config: DataConfig, files: Sequence[CorpusFile], length: int, folder: Path) -> None:
    """Writes the tokens of all dialogues."""
    encode = _encoder(config)
    end = [] if config.tokenizer == BYTES else [1]  # whose last token has no target
    place, dropped, starts = 0, 0, list[int]()
    work = LongWork("making tokens of dialogues, once")
    with (folder / "tokens").open("wb") as tokens, (folder / "trained").open("wb") as marks:
        for where, dialogue in chain.from_iterable(map(_dialogues, files)):
            token_T, trained_T = encode(dialogue, where)
            work.add(1)
            if len(token_T) - len(end) > length:
                dropped += 1
                continue
            starts.append(place)
            place += len(token_T)
            tokens.write(np.array(token_T, DTYPES["tokens"]).tobytes())
            marks.write(np.array(trained_T, DTYPES["trained"]).tobytes())
    if not starts:
        fix = f"use a model.context_length above {length:,}"
        found = f"{dropped:,} dialogues"
        raise DataError(
            WHERE, f"has no dialogue of at most {length:,} tokens", found=found, fix=fix
        )
    (folder / "starts").write_bytes(np.array(starts, DTYPES["starts"]).tobytes())
    (folder / "dropped").write_bytes(np.array([dropped], DTYPES["dropped"]).tobytes())


# ---- one dialogue ------------------------------------------------------------------------------


def _dialogues(file: CorpusFile) -> Iterator[tuple[str, Dialogue]]:
    """The dialogues of a file, each with its place for messages."""
    for where, item in text_documents.objects(file.path, file.kind):
        yield where, _dialogue(item, where)


def _dialogue(found: Any, where: str) -> Dialogue:
    said = found.get("messages") if isinstance(found, dict) else None
    if isinstance(found, dict) and said is None and {"prompt", "answer"} <= found.keys():
        said = [
            {"role": "user", "content": found["prompt"]},
            {"role": "assistant", "content": found["answer"]},
        ]
    if not isinstance(said, list) or not said:
        shown = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        fix = f'write lines as {EXAMPLE}, or as {{"prompt": "...", "answer": "..."}}'
        raise DataError(where, "is no dialogue", found=shown or "{}", fix=fix)
    for number, message in enumerate(said, 1):
        if not _is_message(message):
            fix = 'write a message as {"role": "user", "content": "..."}'
            problem = f"has no role and text in message {number}"
            raise DataError(where, problem, found=json.dumps(message), fix=fix)
        if key := _counted_otherwise(message):
            problem = f"has a {key} in message {number}, and all answers count alike"
            fix = "leave the dialogue out, or end it before this message"
            raise DataError(where, problem, found=json.dumps(message[key]), fix=fix)
    if not any(message["role"] == "assistant" and _is_said(message) for message in said):
        roles = ", ".join(message["role"] for message in said)
        fix = "give it an answer of the role assistant, or leave it out"
        raise DataError(where, "has nothing that a model is to say", found=roles, fix=fix)
    for key, fix in IN_TEXT.items():
        if (value := found.get(key)) and value not in [message.get("content") for message in said]:
            problem = f"has a field {key} beside its messages, which no template would see"
            shown = json.dumps(value)[: text_documents.SHOWN]
            raise DataError(where, problem, found=shown, fix=fix)
    if (weight := found.get("weight")) not in (1, None):
        problem, fix = "has a weight, and all dialogues count alike", "leave the dialogue out"
        raise DataError(where, problem, found=json.dumps(weight), fix=fix)
    if found.get("functions"):  # a table has an empty column of them
        fix = 'write them as "tools": [{"type": "function", "function": {...}}]'
        raise DataError(where, "has functions of an older form", found="functions", fix=fix)
    tools = found.get("tools")
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list:
        fix = "write a list of objects, or leave it out"
        raise DataError(where, "has tools that are none", found=json.dumps(tools), fix=fix)
    variables = found.get(VARIABLES) or {}
    if not isinstance(variables, dict) or (kept := {*variables} & {*OF_DIALOGUES}):
        shown = json.dumps(variables if not isinstance(variables, dict) else sorted(kept))
        fix = 'write names with values, such as {"enable_thinking": false}, or leave it out'
        raise DataError(where, f"has {VARIABLES} that are none", found=shown, fix=fix)
    dialogue = Dialogue(said, tools, variables)
    for place, words in dialogue.texts():
        text_documents.refuse_half_characters(words, where)
        if mark := next((mark for mark in (BEGIN_MARK, END_MARK) if mark in words), None):
            problem, fix = f"holds what is no character, in {place}", "leave it out"
            raise DataError(where, problem, found=ascii(mark), fix=fix)
    return dialogue


def _is_message(message: Any) -> bool:
    """Whether it has a role and a text; an answer that calls tools may have none, or null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    words = message.get("content")
    return isinstance(words, str) or (words is None and _calls_tools(message))


def _calls_tools(message: Message) -> bool:
    calls = message.get("tool_calls")
    return message["role"] == "assistant" and isinstance(calls, list) and len(calls) > 0


def _is_said(message: Message) -> bool:
    return bool(message.get("content")) or _calls_tools(message)


def _counted_otherwise(message: Message) -> str | None:
    """The field that asks for another loss than that of answers, as other trainers have it."""
    usual = _of_loss(is_answer=message["role"] == "assistant")
    return next((key for key, values in usual.items() if message.get(key) not in values), None)


def _of_loss(*, is_answer: bool) -> dict[str, tuple[Any, ...]]:
    """The fields of a message that other trainers read for its loss, and what asks for ours."""
    return {
        **dict.fromkeys(("train", "training", "trainable", "loss"), (is_answer, None)),
        **dict.fromkeys(("mask", "masked"), (not is_answer, None)),
        **dict.fromkeys(("train_detail", "training_detail"), (None,)),
        **(dict.fromkeys(("weight", "loss_weight", "loss_mask"), (1, None)) if is_answer else {}),
    }


def _encoder(config: DataConfig) -> Encode:
    """The function that makes tokens of dialogues. Raises DataError for a tokenizer without one."""
    if config.tokenizer == BYTES:
        return _bytes_of
    tokenizer = tokenizer_files.of_run(config)
    if (template := tokenizer.template) is None:
        if config.chat_template_kwargs:
            problem = "is for a chat template, and the tokenizer has none"
            shown, fix = json.dumps(config.chat_template_kwargs), "leave it out"
            raise DataError("data.chat_template_kwargs", problem, found=shown, fix=fix)
        return _plain_encoder(tokenizer)
    template.refuse_unread(config.chat_template_kwargs or {}, "data.chat_template_kwargs")

    def encode_dialogue(dialogue: Dialogue, where: str) -> tuple[list[int], list[bool]]:
        for place, words in dialogue.texts():
            if said := next((mark for mark in tokenizer.special if mark in words), None):
                problem = f"holds a special token in {place}"
                fix = "leave it out: it would end a turn"
                raise DataError(where, problem, found=said, fix=fix)
        if dialogue.tools and not template.reads("tools", dialogue.tools):
            problem = "has tools, and the chat template does not show them"
            fix = "leave them out, or use a tokenizer whose template does"
            raise DataError(where, problem, found=f"{len(dialogue.tools)} tools", fix=fix)
        calls = [number for number, x in enumerate(dialogue.messages, 1) if _calls_tools(x)]
        if calls and not template.reads("tool_calls", dialogue.tools):
            found, fix = f"tool_calls in message {calls[0]}", "use a tokenizer whose template does"
            raise DataError(where, HIDDEN, found=found, fix=fix)
        try:
            whole, answers = template.answers(*dialogue)
            hidden = template.hidden(whole, *dialogue)
        except DataError as error:
            fix = f"{error.fix}; the dialogue is {where}"
            raise DataError(error.where, error.problem, found=error.found, fix=fix) from None
        if hidden is not None:
            found = f"{dialogue.messages[hidden]['role']}, message {hidden + 1}"
            raise DataError(where, HIDDEN, found=found, fix=chat_template.SHOW)
        tokens, places = tokenizer.rendered(whole)
        return _checked(tokens, _in_answers(places, answers), where)

    return encode_dialogue


def _plain_encoder(tokenizer: FileTokenizer) -> Encode:
    """The function that makes tokens of prompts and answers without a template."""
    end = tokenizer.end

    def encode_pair(dialogue: Dialogue, where: str) -> tuple[list[int], list[bool]]:
        prompt, answer = _pair(dialogue, where)
        tokens, places = tokenizer.plain(prompt + answer)
        trained = _in_answers(places, [(len(prompt), len(prompt) + len(answer))])
        if tokens[-1] == end:
            return _checked(tokens, [*trained[:-1], True], where)
        return _checked([*tokens, end], [*trained, True], where)

    return encode_pair


def _bytes_of(dialogue: Dialogue, where: str) -> tuple[list[int], list[bool]]:
    prompt, answer = (words.encode() for words in _pair(dialogue, where))
    if BEGIN in prompt + answer:
        fix = "leave it out, or use another tokenizer"
        raise DataError(where, "holds a zero byte", found="a mark of documents", fix=fix)
    # The mark is the target of the last byte of the dialogue before.
    return [BEGIN, *prompt, *answer], [True, *[False] * len(prompt), *[True] * len(answer)]


def _pair(dialogue: Dialogue, where: str) -> tuple[str, str]:
    roles = [message["role"] for message in dialogue.messages]
    others = {
        "tools": dialogue.tools is not None,
        "tool_calls": any(map(_calls_tools, dialogue.messages)),
        VARIABLES: bool(dialogue.variables),
    }
    if roles != ["user", "assistant"] or any(others.values()):
        found = ", ".join([*roles, *(name for name, is_there in others.items() if is_there)])
        fix = "use a tokenizer with a chat template, or write a prompt and an answer"
        problem = "is a dialogue, and data.tokenizer has no chat template"
        raise DataError(where, problem, found=found, fix=fix)
    prompt, answer = (message["content"] for message in dialogue.messages)
    return prompt, answer


def _in_answers(
    places: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]
) -> list[bool]:
    """Marks the tokens of each answer: those from the first that has a character of it to the last.

    These are the tokens of `return_assistant_tokens_mask` in `transformers`, and of a last
    character that takes several tokens all of them, not the first alone.
    """
    found = [False] * len(places)
    for begin, end in answers:
        own = [i for i, (first, last) in enumerate(places) if first < end and last > begin]
        if begin < end and own:
            found[own[0] : own[-1] + 1] = [True] * (own[-1] + 1 - own[0])
    return found


def _checked(tokens: list[int], trained: list[bool], where: str) -> tuple[list[int], list[bool]]:
    """Tokens, of which one at least is to be said. Raises DataError."""
    if not any(trained[1:]):
        fix = "look at the template, or leave the dialogue out"
        problem = "has no token that counts in the loss"
        raise DataError(where, problem, found=f"{len(tokens):,} tokens", fix=fix)
    return tokens, trained
