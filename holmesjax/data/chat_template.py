"""Chat templates: dialogues as the text that a model of dialogues was trained on.

It is a file `chat_template.jinja`, or stands in `tokenizer_config.json`. It comes with a tokenizer
and may come from anybody: it runs in the sandbox of jinja2, and not for ever. It sees the variables
that `transformers` gives it: a token that a tokenizer does not have is undefined.

A template may ask for the date, by `strftime_now`. Tokens that are trained on must be the same on
each day and host. So the clock is not asked for them: the variable `strftime_now` has the date.
"""

import datetime
import functools
import json
import math
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holmesjax.data import tokenizer_marks, tokenizer_paths
from holmesjax.data.tokenizer_paths import CONFIG, TEMPLATE, TEMPLATES, TokenizerFiles
from holmesjax.errors import DataError

LONGEST_S = 5.0  # of a processor: a host may stand still, or have others to serve
STARVED_S = 600.0  # in which a thread has had no more of a processor
LOOK_S = 0.05  # between two looks at that
Message = Mapping[str, Any]  # "role" and "content"
Tools = Sequence[Mapping[str, Any]] | None  # that a model may call; None: none are named
Variables = Mapping[str, Any]  # that a template sees, by name
NO_VARIABLES: Variables = types.MappingProxyType({})
WHERE = "--chat"
DEFAULT, FOR_TOOLS = "default", "tool_use"  # of several templates
CLOCK = "strftime_now"  # a function for templates; as a variable, the date that it gives
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"  # no characters of any text, by Unicode's own rule
ANSWER = "Yes"  # whose end is looked for
THOUGHT = "</think>"  # the end of thoughts in the words of an answer
SHORT = 16  # characters that may be elsewhere in a text by chance
HIDDEN = "has what the chat template does not show"
SHOW = "leave these words out, or use a tokenizer whose template shows them"
WORD = re.compile(r"\w+")
USUAL = {"messages", "tools", "documents", "add_generation_prompt"}  # what all templates get


class _Generation(Extension):
    """Blocks that hold what a model says: a scope of their own, as `transformers` has it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it
    marks = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller().join(self.marks)


class _MarkedGeneration(_Generation):
    """The same, with marks around what a model says."""

    marks = (BEGIN_MARK, END_MARK)


THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one field, the usual one first


def _with_thoughts(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn whose thoughts have both names that templates read, as in `transformers` 5.23."""
    if (thoughts := next((turn[key] for key in THOUGHTS if key in turn), None)) is None:
        return turn
    return {"thinking": thoughts, **turn, "reasoning_content": thoughts}


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The template of a tokenizer."""

    where: str  # for messages
    source: str
    variables: Variables  # that all dialogues have: tokens by name, such as bos_token
    for_tools: str | None = None  # in place of `source` where a dialogue has tools

    @classmethod
    def load(cls, path: Path) -> "ChatTemplate":
        """Finds the template of a tokenizer. Raises DataError if there is none."""
        if not path.exists():
            fix = f"leave {WHERE} out"
            found = f"no {path}: the tokens are bytes"
            raise DataError(WHERE, "needs a tokenizer with a chat template", found=found, fix=fix)
        files = tokenizer_paths.find(path)
        if (found_template := cls.of(files, tokenizer_marks.read(files).named)) is None:
            fix = f"leave {WHERE} out, or add a {TEMPLATE}"
            raise DataError(
                str(path), "has no chat template", found=", ".join(files.files), fix=fix
            )
        return found_template

    @classmethod
    def of(cls, files: TokenizerFiles, variables: Variables) -> "ChatTemplate | None":
        """The template that the files of a tokenizer have; None if they have none.

        Raises DataError for several, none of which is the usual one.
        """
        found = sources(files)
        if (source := found.get(DEFAULT)) is None:
            if found:
                problem, fix = f"has no chat template named {DEFAULT}", "give one of them this name"
                shown = ", ".join(found)
                raise DataError(str(files.main.parent), problem, found=shown, fix=fix)
            return None
        where, for_tools = str(files.main.parent), found.get(FOR_TOOLS)
        return cls(where=where, source=source, variables=variables, for_tools=for_tools)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        own: Variables = NO_VARIABLES,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a dialogue, which may have variables of its own.

        Raises DataError for a template that fails.
        """
        asks = {"add_generation_prompt": add_generation_prompt}
        return self._in_time(lambda: self._render(messages, tools, {**own, **asks}))

    def answers(
        self, messages: Sequence[Message], tools: Tools = None, own: Variables = NO_VARIABLES
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole dialogue, and the ranges of it that a model says.

        These are the blocks `generation` of the template. Without such blocks, a range goes from
        the prompt of an answer to the end of its turn, but for a newline there: then a dialogue
        must begin as a shorter one does.

        Raises DataError for a template that fails, or asks for a date that no variable has.
        """
        own = {CLOCK: self._refuse_clock, **self.variables, **own}
        if GENERATION.search(self._source(tools)):
            marked = lambda: self._render(messages, tools, own, is_marked=True)
            whole, found = _without_marks(self._in_time(marked))
            if whole != self.render(messages, tools, own):  # a filter has seen the marks
                problem = "has blocks `generation` in a text that it changes or measures afterwards"
                fix = "change what is said inside of the blocks"
                raise DataError(self.where, problem, found=repr(whole[:80]), fix=fix)
            return whole, found
        render = functools.partial(self.render, tools=tools, own=own)
        whole = render(messages)
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = render(messages[:number], add_generation_prompt=True)
            turn = render(messages[: number + 1])
            if not (turn.startswith(prompt) and whole.startswith(turn)):
                problem = "has no blocks `generation`, and changes a turn where others follow"
                fix = "write {% generation %} and {% endgeneration %} around what a model says"
                found_turn = f"turn {number + 1} of a dialogue"
                raise DataError(self.where, problem, found=found_turn, fix=fix)
            found.append((len(prompt), max(len(prompt), len(turn.rstrip()))))
        return whole, found

    def hidden(
        self,
        whole: str,
        messages: Sequence[Message],
        tools: Tools = None,
        own: Variables = NO_VARIABLES,
        *,
        add_generation_prompt: bool = False,
    ) -> int | None:
        """The first message of which a part changes nothing of its dialogue's text; None: all do.

        The parts are its words, each of its calls of tools, and the thoughts of the last answer:
        templates leave out earlier ones on purpose. Words that are not in the text as they are may
        be there in another form, and short ones by chance. So the text is made again with others.

        Args:
          whole: the text.
          messages: of the dialogue.
          tools: that the text shows.
          own: variables of the dialogue.
          add_generation_prompt: whether the text ends with the prompt of an answer.
        """
        asks = add_generation_prompt
        for number, message in enumerate(messages):
            for other in _others(message, whole, is_last=number == len(messages) - 1):
                changed = [*messages[:number], other, *messages[number + 1 :]]
                try:
                    text = self.render(changed, tools, own, add_generation_prompt=asks)
                except DataError:  # of these words alone
                    continue
                if text == whole:
                    return number
        return None

    def reads(self, name: str, tools: Tools = None) -> bool:
        """Tells whether a variable may change the text."""
        return name in WORD.findall(self._source(tools))

    def refuse_unread(self, names: Iterable[str], where: str) -> None:
        """Raises DataError for a variable that no template reads, such as a misspelt one."""
        sources = [x for x in (self.source, self.for_tools) if x is not None]
        if unread := sorted({*names} - words_of(sources)):
            known = {name for source in sources for name in variables_of(source)}
            others = known - USUAL - {*self.variables}
            own = sorted(name for name in others if not name.endswith("_token"))
            problem, fix = "names a variable that the chat template does not read", "leave it out"
            fix += f", or write one that it reads: {', '.join(own)}" if own else ""
            raise DataError(where, problem, found=", ".join(unread), fix=fix)

    def end_of_turn(self, marks: Iterable[str]) -> str | None:
        """The one of some marks that comes behind an answer; None if none does."""
        turns = [*of_user("Hello"), {"role": "assistant", "content": ANSWER}]
        try:
            after = self.render(turns).rpartition(ANSWER)[2].lstrip()
        except DataError:  # for this dialogue; whoever uses the template hears of it
            return None
        return max((mark for mark in marks if after.startswith(mark)), key=len, default=None)

    @property
    def around(self) -> str:
        """The text that the template writes around an answer and its neighbours."""
        turns = [*of_user(""), {"role": "assistant", "content": ANSWER}, *of_user("")]
        try:
            return self.render(turns)
        except DataError:  # for this dialogue; whoever uses the template hears of it
            return ""

    def _source(self, tools: Tools) -> str:
        return self.source if tools is None or self.for_tools is None else self.for_tools

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        own: Variables,
        *,
        is_marked: bool = False,
    ) -> str:
        usual = {"tools": tools, "documents": None, "add_generation_prompt": False}
        said = [
            _with_thoughts({k: x for k, x in turn.items() if x is not None}) for turn in messages
        ]
        values = {**usual, **self.variables, "messages": said, **own}
        if CLOCK in values:
            values[CLOCK] = self._clock(values[CLOCK])
        return _compiled(self._source(tools), is_marked).render(values)

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
        end_s = time.monotonic() + STARVED_S
        while thread.is_alive() and _cpu_s(thread) < LONGEST_S and time.monotonic() < end_s:
            thread.join(LOOK_S)
        if found:
            return found[0]
        if errors and isinstance(errors[0], DataError):
            raise errors[0]
        reason = errors[0] if errors else f"no end after {LONGEST_S:g} s"
        fix = f"leave {WHERE} out, or correct the template"
        raise DataError(self.where, "the chat template fails", found=reason, fix=fix)

    def _clock(self, date: Any) -> Callable[[str], str]:
        """The function `strftime_now` that gives a date, such as 2026-11-28."""
        if callable(date):
            clock: Callable[[str], str] = date
            return clock
        try:
            return datetime.datetime.fromisoformat(date).strftime
        except (TypeError, ValueError):
            problem, fix = f"has a variable {CLOCK} that is no date", f"write {_example()}"
            raise DataError(self.where, problem, found=repr(date), fix=fix) from None

    def _refuse_clock(self, form: str) -> str:
        problem = "has a chat template that asks for the date, and tokens may not change with it"
        fix = f"set data.chat_template_kwargs={_example()}; where the run has begun before, set "
        fix += "the day on which it began, and add --allow data.chat_template_kwargs"
        raise DataError(self.where, problem, found=f"{CLOCK}({form!r})", fix=fix)


def _others(message: Message, whole: str, *, is_last: bool) -> Iterator[Message]:
    """The message with one part made another one, for each part that a text must show."""
    content = message.get("content") or ""
    words = content.strip() if isinstance(content, str) else ""
    if words and (len(words) <= SHORT or words not in whole):
        yield {**message, "content": content + ANSWER}
    if is_last and message["role"] == "assistant" and THOUGHT in words:
        yield {**message, "content": content.replace(THOUGHT, ANSWER + THOUGHT, 1)}
    given = message.get("tool_calls")
    calls = given if isinstance(given, list) else []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            called = {**call, "function": {**function, "name": function["name"] + ANSWER}}
            yield {**message, "tool_calls": [*calls[:number], called, *calls[number + 1 :]]}


def _cpu_s(thread: threading.Thread) -> float:
    """The seconds of a processor that a thread has had; infinite where the system does not say."""
    try:
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        return int(path.read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended meanwhile, or this is no Linux
        return math.inf


def sources(files: TokenizerFiles) -> dict[str, str]:
    """The templates of a tokenizer by name: those in files of their own, or those of its config."""
    found = {
        Path(name).stem: tokenizer_paths.read_text(path)
        for name, path in files.files.items()
        if name.startswith(TEMPLATES)
    }
    if TEMPLATE in files.files:
        found[DEFAULT] = tokenizer_paths.read_text(files.files[TEMPLATE])
    if found:
        return found
    said = files.json(CONFIG).get("chat_template")
    if isinstance(said, list):
        said = {row.get("name"): row.get("template") for row in said if isinstance(row, dict)}
    own = said if isinstance(said, dict) else {DEFAULT: said}
    return {name: source for name, source in own.items() if isinstance(source, str)}


def words_of(sources: Iterable[str]) -> set[str]:
    """All words of templates, and so at least the names that they read."""
    return {word for source in sources for word in WORD.findall(source)}


def variables_of(source: str) -> set[str]:
    """The names that a template does not define itself; none for one that is no template."""
    try:
        return meta.find_undeclared_variables(_environment(False).parse(source))
    except jinja2.TemplateError:  # whoever uses the template hears of it
        return set()


@functools.lru_cache(maxsize=8)
def _compiled(source: str, is_marked: bool) -> jinja2.Template:
    return _environment(is_marked).from_string(source)


def _environment(is_marked: bool) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_MarkedGeneration if is_marked else _Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = lambda x, **how: json.dumps(x, **{"ensure_ascii": False, **how})
    environment.globals |= {"raise_exception": _refuse, CLOCK: _now}
    return environment


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


def _example() -> str:
    return json.dumps({CLOCK: datetime.date.today().isoformat()})
