"""Chat templates: what a user says, as the text that a model of dialogues was trained on.

A template comes with a tokenizer and may come from anybody: it runs in the sandbox of jinja2, and
not for ever.
"""

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holmesjax.data import tokenizer_files
from holmesjax.errors import DataError

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
LONGEST_S = 5.0
Message = Mapping[str, str]  # "role" and "content"
WHERE = "--chat"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"  # no characters of any text, by Unicode's own rule


class _Generation(Extension):
    """Blocks that hold what a model says; they change nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    """The same, with marks around what a model says."""

    def parse(self, parser: Parser) -> list[nodes.Node]:
        body = super().parse(parser)
        mark = lambda text: nodes.Output([nodes.TemplateData(text)])
        return [mark(BEGIN_MARK), *body, mark(END_MARK)]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The template of a tokenizer."""

    folder: Path  # of the tokenizer
    source: str
    special: dict[str, Any]  # tokens by name: bos_token and others

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Finds the template in a tokenizer's folder. Raises DataError if there is none."""
        if not folder.exists():
            fix = f"leave {WHERE} out"
            found = f"no {folder}: the tokens are bytes"
            raise DataError(WHERE, "needs a tokenizer with a chat template", found=found, fix=fix)
        if (found_template := cls.find(folder)) is None:
            fix = f"leave {WHERE} out, or add a {FILE}"
            names = ", ".join(tokenizer_files.find(folder).files)
            raise DataError(str(folder), "has no chat template", found=names, fix=fix)
        return found_template

    @classmethod
    def find(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a tokenizer; None if it has none."""
        files = tokenizer_files.find(folder).files
        config = tokenizer_files.read_json(files[CONFIG]) if CONFIG in files else {}
        said = files[FILE].read_text("utf-8") if FILE in files else config.get("chat_template")
        if isinstance(said, list):
            said = next((own.get("template") for own in said if own.get("name") == "default"), None)
        if not isinstance(said, str):
            return None
        content = lambda token: token.get("content") if isinstance(token, dict) else token
        special = {name: content(own) for name, own in config.items() if name.endswith("_token")}
        return cls(folder=folder, source=said, special=special)

    def tokens(self, messages: Sequence[Message]) -> Sequence[int]:
        """The tokens of a dialogue, whose last message is to be answered.

        Raises DataError for a special token in what is said, or a template that fails.
        """
        special = tokenizer_files.special_tokens(self.folder)
        for message in messages:
            if found := [token for token in special if token in message["content"]]:
                fix = "leave it out: it would not be text in a dialogue"
                problem = f"the words of {message['role']} hold a special token"
                raise DataError(WHERE, problem, found=found[0], fix=fix)
        text = self._in_time(lambda: self.render(messages, add_generation_prompt=True))
        return tokenizer_files.encode_rendered(self.folder, text)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a dialogue."""
        return self._render(messages, is_marked=False, **variables)

    def answers(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole dialogue, and the ranges of it that a model says.

        These are the blocks `generation` of the template. Without such blocks, a range goes from
        the prompt of an answer to the end of its turn, but for a newline there: then a dialogue
        must begin as a shorter one does.

        Raises DataError for a template that fails.
        """
        if GENERATION.search(self.source):
            return _without_marks(self._in_time(lambda: self._render(messages, is_marked=True)))
        whole = self._in_time(lambda: self.render(messages))
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, turn = (
                self._in_time(lambda n=n, more=more: self.render(messages[:n], **more))  # type: ignore[misc]
                for n, more in ((number, {"add_generation_prompt": True}), (number + 1, {}))
            )
            if not (turn.startswith(prompt) and whole.startswith(turn)):
                problem = "has no blocks `generation`, and changes a turn where others follow"
                fix = "write {% generation %} and {% endgeneration %} around what a model says"
                where = str(self.folder)
                raise DataError(where, problem, found=f"turn {number + 1} of a dialogue", fix=fix)
            found.append((len(prompt), max(len(prompt), len(turn.rstrip()))))
        return whole, found

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, is_marked: bool, **variables: Any
    ) -> str:
        nothing = {"tools": None, "documents": None}
        values = {**nothing, **self.special, "messages": list(messages), **variables}
        return _compiled(self.source, is_marked).render(values)

    def _in_time(self, render: Callable[[], str]) -> str:
        """The result of a function, which a thread of its own may go on with for ever."""
        found: list[str] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                found.append(render())
            except Exception as error:  # of any class: a template is a program
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(LONGEST_S)
        if found:
            return found[0]
        reason = errors[0] if errors else f"no end after {LONGEST_S:g} s"
        fix = f"leave {WHERE} out, or correct the template"
        raise DataError(str(self.folder), "the chat template fails", found=reason, fix=fix)


@functools.lru_cache(maxsize=8)
def _compiled(source: str, is_marked: bool) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_MarkedGeneration if is_marked else _Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = lambda x, **how: json.dumps(x, ensure_ascii=False, **how)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and the ranges between them.

    >>> _without_marks("ab\ufdd0cd\ufdd1e\ufdd0\ufdd1")
    ('abcde', [(2, 4), (5, 5)])
    """
    text, found = "", []
    first, *others = marked.split(BEGIN_MARK)
    text += first
    for part in others:
        inside, _, after = part.partition(END_MARK)
        found.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, found


def of_user(text: str) -> list[Message]:
    """A dialogue that begins with what a user says."""
    return [{"role": "user", "content": text}]


def read_messages(path: Path) -> list[Message]:
    """Reads a dialogue: a list of messages in JSON, each with its role and its content.

    Raises DataError unless the last one is to be answered.
    """
    fix = 'write [{"role": "user", "content": "Hello"}]'

    def refusal(problem: str, found: object) -> DataError:
        return DataError(f"--messages {path}", problem, found=found, fix=fix)

    try:
        messages = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise refusal("cannot be read", error.strerror) from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise refusal("is no JSON", error) from None
    if not isinstance(messages, list) or not messages:
        raise refusal("must be a list of messages", repr(messages)[:80])
    for i, message in enumerate(messages, start=1):
        is_whole = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not is_whole or not all(isinstance(value, str) for value in message.values()):
            problem = f"message {i} must have a role and a content, which are texts"
            raise refusal(problem, repr(message)[:80])
    if messages[-1]["role"] == "assistant":
        raise refusal("the last message must be one to answer", "a message of the assistant")
    found: list[Message] = messages
    return found


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
