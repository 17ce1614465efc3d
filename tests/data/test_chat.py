"""Dialogues train on answers alone, whatever packs and reads them."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest

from holmesjax import config as configs
from holmesjax.config import DataConfig
from holmesjax.data import (
    chat,
    chat_template,
    corpus_progress,
    packing,
    token_files,
    tokenizer_files,
    tokenizer_paths,
)
from holmesjax.data.batches import Batches, model_inputs
from holmesjax.errors import DataError, HolmesError
from tests.cases import cases
from tests.data.dialogues import MARKED, PLAIN, TURNS, write_dialogue_tokenizer
from tests.jobs import write_run

LENGTH = 64
SAID = [f"answer {n} of them" for n in range(20)]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with a chat template, and the words of its settings."""
    folder = write_dialogue_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


def write(tmp_path, dialogues, name="chat.jsonl"):
    lines = [
        dialogue if isinstance(dialogue, str) else json.dumps(dialogue) for dialogue in dialogues
    ]
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / name).write_text("\n".join(lines) + "\n")
    return tmp_path / "data"


def settings(corpus, tokenizer="bytes", **changes):
    return DataConfig(
        **{"corpus": str(corpus), "source": "chat", "tokenizer": str(tokenizer)},
        **{"documents": "mask", "validation_fraction": 0.0, **changes},
    )


def trained(rows):
    """The targets that count, in order of the rows, each behind the token before it."""
    batches = Batches.__new__(Batches)
    found = []
    for index in range(len(rows)):
        inputs = model_inputs(batches._rows([(rows, index)], None))
        token_L, target_L, segment_L = (x[0] for x in inputs.values())
        counted = target_L >= 0
        assert rows.num_targets(index) == np.count_nonzero(counted)
        for segment in np.unique(segment_L[counted]).tolist():
            here = counted & (segment_L == segment)
            found.append((token_L[segment_L == segment].tolist(), target_L[here].tolist()))
    return found


@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["prompts", "blocks"])
def test_answers_and_their_end_marks_are_the_targets_of_dialogues(tmp_path, folder, source):
    (folder / "chat_template.jinja").write_text(source)
    dialogues = [
        {"messages": [*TURNS[:3], {"role": "assistant", "content": answer}]} for answer in SAID
    ]
    rows = chat.read(settings(write(tmp_path, dialogues), folder), 4 * LENGTH).train
    tokenizer, end = tokenizer_files.load(folder), 301
    found = []
    for inputs, targets in trained(rows):
        assert tokenizer.decode(inputs).startswith(
            "user\nhi\nassistant\nok\nuser\nx\nassistant\nans"
        )
        assert targets.count(end) == 2
        found.append(tokenizer.decode(targets))
    assert sorted(found) == sorted(f"ok{answer}" for answer in SAID)
    assert len(rows) < len(SAID)  # packed


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_answers_are_the_targets_behind_a_plain_prompt(tmp_path, folder, name):
    (folder / "chat_template.jinja").unlink()
    pairs = [{"prompt": f"Q{n}: ", "answer": answer} for n, answer in enumerate(SAID)]
    corpus = write(tmp_path, pairs)
    found = trained(chat.read(settings(corpus, folder if name == "bpe" else name), LENGTH).train)
    if name == "bytes":
        said = [bytes(targets).decode() for _, targets in found]
        assert sorted(said) == sorted([f"{answer}\0" for answer in SAID[:-1]] + [SAID[-1]])
        return
    decode = tokenizer_files.load(folder).decode
    # The space before a word is in its token, whose last letter is the answer's.
    assert sorted(decode(targets) for _, targets in found) == sorted(
        f" {answer}" for answer in SAID
    )
    assert all(targets[-1] == 301 for _, targets in found)
    assert all(decode(inputs).startswith("Q") for inputs, _ in found)


def test_long_dialogues_are_left_out_and_counted_and_the_last_are_held_out(tmp_path):
    pairs = [{"prompt": "q", "answer": answer} for answer in [*SAID, "x" * 64, "y" * 62]]
    whole = chat.read(settings(write(tmp_path, pairs)), LENGTH)
    assert "1 dialogues longer than 64 tokens left out" in whole.place
    held = chat.read(settings(write(tmp_path, pairs), validation_fraction=0.2), LENGTH)
    said = [bytes(targets) for _, targets in trained(held.validation)]
    assert sorted(said) == sorted(
        [*(f"{answer}\0".encode() for answer in SAID[17:]), ("y" * 62).encode()]
    )
    assert len(trained(held.train)) == 17
    assert whole.digests != held.digests


def test_tokens_are_made_once_and_anew_for_other_dialogues(tmp_path, folder, monkeypatch):
    corpus = write(tmp_path, [{"messages": TURNS}] * 5)
    first = chat.read(settings(corpus, folder), LENGTH)
    with monkeypatch.context() as patch:
        patch.setattr(chat, "_write", None)  # would fail
        patch.setattr(packing, "pack", None)
        assert chat.read(settings(corpus, folder), LENGTH).digests == first.digests
    (folder / "chat_template.jinja").write_text(PLAIN.replace("im_end|>", "im_end|>!"))
    other = chat.read(settings(corpus, folder), LENGTH)
    assert other.digests["train"] != first.digests["train"]
    assert other.files == first.files
    # A mark that only the class of a model has, in a file that is no part of an identity.
    (folder / "chat_template.jinja").write_text("{{ pad_token }}" + PLAIN)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    digests = set()
    for kind in ("falcon", "qwen2"):
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        digests.add(chat.read(settings(corpus, folder), LENGTH).digests["train"])
    assert len(digests) == 2


def test_a_table_of_dialogues_keeps_its_name_where_the_class_is_in_the_identity(
    tmp_path, folder, monkeypatch
):
    """A run that goes on under a later version reads what it has trained with."""
    kept = []
    monkeypatch.setattr(packing, "kept_arrays", lambda key, *_: kept.append(key) or {})
    corpus = write(tmp_path, [{"messages": TURNS}])
    for named in ("", ', "tokenizer_class": "GPT2Tokenizer"'):
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"' + named + "}")
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        if not named:
            (folder / "config.json").unlink()
        with pytest.raises(KeyError):  # of the arrays that are not made
            chat.read(settings(corpus, folder), LENGTH)
        files = tokenizer_paths.find(folder)
        about = [chat.VERSION, LENGTH, False]
        about += [("chat.jsonl", token_files.hash_of(corpus / "chat.jsonl"))]
        about += [files.identity, chat_template.sources(files), None]
        assert kept.pop() == hashlib.sha256(json.dumps(about).encode()).hexdigest()


@cases(
    "line, problem, found",
    [
        ("{", "is no JSON", "Expecting"),
        ("[1]", "is no dialogue", "list"),
        ('{"text": "a"}', "is no dialogue", "text"),
        ('{"messages": []}', "is no dialogue", "messages"),
        ('{"messages": [{"role": "user"}]}', "no role and text in message 1", '{"role": "user"}'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing that a model is", "user"),
        ('{"prompt": "a", "answer": ""}', "nothing that a model is", "user, assistant"),
        ('{"prompt": "a", "answer": 3}', "no role and text in message 2", "3"),
        ('{"prompt": "a", "answer": "b<|im_end|>"}', "a special token in message 2", "<|im_end|>"),
        ('{"prompt": "a", "answer": "\\ufdd0"}', "no character, in message 2", "ufdd0"),
        ('{"prompt": "a", "answer": "b \\ud83d c"}', "half a character", "surrogates"),
        ('{"prompt": "a", "answer": "b", "tools": "[]"}', "tools that are none", '"[]"'),
        (
            '{"prompt": "a", "answer": "b", "tools": [{"name": "<|im_end|>"}]}',
            "a special token in its tools",
            "<|im_end|>",
        ),
        (
            '{"prompt": "a", "answer": "b", "tools": [{"name": "\\ufdd0"}]}',
            "no character, in its tools",
            "ufdd0",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "b", "weight": 0}]}',
            "a weight in message 1",
            "0",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "b", "train": false}]}',
            "a train in message 1",
            "false",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "training": true}]}',
            "a training in message 1",
            "true",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "b", "loss": false}]}',
            "a loss in message 1",
            "false",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "b", "masked": true}]}',
            "a masked in message 1",
            "true",
        ),
        ('{"prompt": "a", "answer": "b", "weight": 0.5}', "has a weight", "0.5"),
        ('{"prompt": "a", "answer": "b", "system": "Be brief."}', "a field system", "Be brief."),
        ('{"prompt": "a", "answer": "b", "documents": [{}]}', "a field documents", "[{}]"),
        ('{"prompt": "a", "answer": "b", "functions": [{}]}', "functions of an older", "functions"),
        (
            '{"prompt": "a", "answer": "b", "chat_template_kwargs": {"messages": 1}}',
            "chat_template_kwargs that are none",
            "messages",
        ),
        (
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}',
            "no role and text in message 1",
            "null",
        ),
    ],
)
def test_a_line_that_is_no_dialogue_is_refused_with_its_place(
    tmp_path, folder, line, problem, found
):
    corpus = write(tmp_path, [{"messages": TURNS}, line])
    with pytest.raises(DataError) as error:
        chat.read(settings(corpus, folder), LENGTH)
    assert f"{corpus / 'chat.jsonl'}, byte {len(json.dumps({'messages': TURNS})) + 1}" in str(
        error.value
    )
    assert problem in error.value.problem
    assert found in str(error.value.found)
    assert not list(corpus.glob(f"{packing.FOLDER}/*"))  # nothing half made stays


def test_fields_that_no_text_has_are_said(tmp_path, folder):
    """Those of the first dialogue of each file; what a message says may be beside it once more."""
    system = [{"role": "system", "content": "Be brief."}, *TURNS]
    write(tmp_path, [{"messages": system, "system": "Be brief.", "source": "web"}])
    corpus = write(tmp_path, [{"prompt": "a", "answer": "b", "tools": None, "id": 1}], "b.jsonl")
    (corpus / "x.png").write_bytes(b"\x89PNG\r\n")
    said = chat.read(settings(corpus, folder), LENGTH).left_out
    assert said == "1 (picture: 1, x.png); fields of dialogues: id, system, source"


def test_what_a_template_does_not_show_is_refused_or_said(tmp_path, folder):
    """Words and calls of a message that leave no trace in the text; other fields are named."""
    shown = "{% if m.role in ('user', 'assistant') %}{{ m.thinking }}"
    hides = MARKED.replace("%}<|im_start|>", f"%}}{shown}<|im_start|>", 1)
    hides = hides.replace("{% endfor %}", "{% endif %}{% endfor %}")
    (folder / "chat_template.jinja").write_text(hides)
    first, second = TURNS[:2]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    tokenizer = tokenizer_files.load(folder)
    for hidden, problem in (
        ([{"role": "system", "content": "Be brief, and kind to all."}, first, second], "message 1"),
        ([first, {"role": "tool", "content": "i"}, second], "message 2"),  # i is in "hi"
        ([first, call], "tool_calls in message 2"),
    ):
        corpus = write(tmp_path, [{"messages": hidden}])
        with pytest.raises(DataError, match=rf"byte 0: .* not show\n.*{problem}"):
            chat.read(settings(corpus, folder), LENGTH)
        if "tool" not in problem:
            with pytest.raises(DataError, match=r"--chat: .* not show"):
                tokenizer.answer_prompt(hidden[:-1])
    # Templates that leave out the second call, and thoughts before the last answer.
    twice = {**call, "tool_calls": 2 * call["tool_calls"]}
    thinks = {**second, "content": "long and long</think>42"}
    for answer, words in (
        (twice, "{{ m.content }}{{ m.tool_calls[0].function.name }}"),
        (thinks, "{{ m.content.split('</think>')[-1] }}"),
    ):
        template = MARKED.replace("{{ m.content }}", words, 1)
        (folder / "chat_template.jinja").write_text(template)
        corpus = write(tmp_path, [{"messages": [first, answer]}])
        with pytest.raises(DataError, match=r"not show\n.*message 2"):
            chat.read(settings(corpus, folder), LENGTH)
    (folder / "chat_template.jinja").write_text(hides)
    thought = {**second, "reasoning": "so", "name": "A", "weight": 1, "audio": None}
    corpus = write(tmp_path, [{"messages": [first, thought]}])
    said = chat.read(settings(corpus, folder), LENGTH).left_out
    assert said == "fields of messages: name"


def test_a_template_sees_the_variables_of_a_run_and_of_a_line(tmp_path, folder):
    """Those of `apply_chat_template(..., **chat_template_kwargs)`; a line's are the last."""
    think = "{% if thinks is defined and not thinks %}<no>{% endif %}"
    (folder / "chat_template.jinja").write_text(think + MARKED)
    lines = [{"messages": TURNS}, {"messages": TURNS, "chat_template_kwargs": {"thinks": True}}]
    corpus = write(tmp_path, lines)
    decode = tokenizer_files.load(folder).decode

    def begins(**changes):
        rows = chat.read(settings(corpus, folder, **changes), 2 * LENGTH).train
        return sorted(decode(inputs).startswith("<no>") for inputs, _ in trained(rows))

    assert begins() == [False, False]
    assert begins(chat_template_kwargs={"thinks": False}) == [False, True]


def test_a_variable_and_tools_that_no_template_reads_are_refused(tmp_path, folder):
    """A misspelt name would train, and generate, as if it were not there."""
    (folder / "chat_template.jinja").write_text("{% if thinks %}<no>{% endif %}" + MARKED)
    corpus = write(tmp_path, [{"messages": TURNS, "tools": []}, {"messages": TURNS, "tools": [{}]}])
    with pytest.raises(DataError, match=r"kwargs: names a variable.*\n.*thinsk\n.*reads: thinks"):
        chat.read(settings(corpus, folder, chat_template_kwargs={"thinsk": False}), LENGTH)
    with pytest.raises(DataError, match=r"byte \d+: has tools, and the chat template does not"):
        chat.read(settings(corpus, folder, chat_template_kwargs={"thinks": False}), LENGTH)
    template = tokenizer_files.load(folder).template
    with pytest.raises(DataError, match="--chat-template-kwargs: names a variable"):
        template.refuse_unread(["thinks", "x"], "--chat-template-kwargs")


def test_the_day_of_a_start_is_in_no_token(tmp_path, folder):
    """A template asks for the date: that of the run or of a line counts, and no clock."""
    (folder / "chat_template.jinja").write_text("{{ strftime_now('<%d %b %Y>') }}" + MARKED)
    decode = tokenizer_files.load(folder).decode

    def begins(date=None, **of_line):
        given = {} if date is None else {"chat_template_kwargs": {"strftime_now": date}}
        corpus = write(tmp_path, [{"messages": TURNS, **of_line}])
        rows = chat.read(settings(corpus, folder, **given), 2 * LENGTH).train
        [(inputs, _)] = trained(rows)
        return decode(inputs)[:13]

    before = corpus_progress.done.count
    with pytest.raises(DataError, match=r"asks for the date(.|\n)*--allow data.chat_temp"):
        begins()
    with pytest.raises(DataError, match=r"strftime_now that is no date\n  found: 'today'"):
        begins("today")
    assert corpus_progress.done.count == before
    assert begins("2024-07-26") == "<26 Jul 2024>"
    assert corpus_progress.done.count == before + 2  # a dialogue has tokens, and is in a row
    own = {"chat_template_kwargs": {"strftime_now": "2023-01-02"}}
    assert begins("2024-07-26", **own) == begins(**own) == "<02 Jan 2023>"
    template = chat_template.ChatTemplate.load(folder)  # and whoever asks a model has a clock
    assert re.match(r"<\d\d \w+ 20\d\d>", template.render(TURNS))


def test_an_answer_may_call_tools_without_words(tmp_path, folder):
    """Without a content, or with null; both are undefined for the template, as in transformers."""
    calls = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endgen"
    (folder / "chat_template.jinja").write_text(MARKED.replace("<|im_end|>{% endgen", calls))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    for answer in (call, {**call, "content": None}):
        corpus = write(tmp_path, [{"messages": [TURNS[0], answer]}])
        [(_, targets)] = trained(chat.read(settings(corpus, folder), 2 * LENGTH).train)
        assert tokenizer_files.load(folder).decode(targets) == json.dumps(call["tool_calls"])
    corpus = write(tmp_path, [{"messages": [TURNS[0], {**call, "content": "a"}]}])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"has no chat template\n  found: .*tool_calls"):
        chat.read(settings(corpus, folder), LENGTH)


def test_marks_of_turns_are_no_text_where_no_file_calls_them_special(tmp_path, folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|im_start|>"
    path.write_text(json.dumps(content))
    corpus = write(tmp_path, [{"prompt": "<|im_start|>", "answer": "b"}])
    with pytest.raises(DataError, match="holds a special token in message 1"):
        chat.read(settings(corpus, folder), LENGTH)


def test_what_cannot_be_read_is_told_before_a_run(tmp_path, folder):
    path = write_run(tmp_path, {"a": (1,), "b": (1,)})
    corpus = write(tmp_path, [{"messages": TURNS}] * 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "none/a.jsonl").write_text("\n")

    def said(*words):
        own = [f"data.corpus={corpus}", "data.source=chat", f"data.tokenizer={folder}"]
        with pytest.raises(HolmesError) as error:
            chat.look(configs.load(path, [*own, "data.documents=mask", *words]))
        return str(error.value)

    assert "must be mask where documents are packed" in said("data.documents=concatenate")
    assert "model.vocab_size: must be at least 302" in said("model.vocab_size=300")
    fits = "model.vocab_size=384"
    assert "data.corpus: is not there" in said(fits, "data.corpus=absent")
    assert "empty holds no text" in said(fits, f"data.corpus={tmp_path / 'empty'}")
    assert "has no dialogue\n" in said(fits, f"data.corpus={tmp_path / 'none'}")
    assert "data.tokenizer has no chat template" in said("data.tokenizer=bytes", fits)
    lines = dataclasses.replace(settings(corpus, folder), corpus=str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match="is no dialogue"):
        chat.read(lines, LENGTH)
    with pytest.raises(
        DataError, match="has no dialogue of at most 8 tokens\n  found: 3 dialogues"
    ):
        chat.read(settings(corpus, folder), 8)
