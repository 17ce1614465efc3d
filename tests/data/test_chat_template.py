"""Chat templates: known texts, and templates that must not do harm."""

import json
import time

import pytest

from holmesjax.data import chat_template as chat, tokenizer_files
from holmesjax.data.chat_template import ChatTemplate, of_user
from holmesjax.errors import DataError
from tests.data.dialogues import MARKED, PLAIN, TURNS, write_dialogue_tokenizer

CHATML = r"""{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\nBe brief.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}{% generation %}{{ message.content | trim }}
    {%- endgeneration %}{{ '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi <b>ü</b><|im_end|>\n"
    "<|im_start|>assistant\n"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]"
    "{{ m | tojson }}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with two marks of dialogues."""
    return write_dialogue_tokenizer(tmp_path)


def template(source, **special):
    return ChatTemplate(where="here", source=source, variables=special)


def test_known_templates_give_known_texts():
    messages = [{"role": "user", "content": " hi <b>ü</b> "}]
    assert template(CHATML).render(messages, add_generation_prompt=True) == RENDERED
    want = '<s>[INST]  hi <b>ü</b>  [/INST]{"role": "user", "content": " hi <b>ü</b> "}'
    assert template(LLAMA, bos_token="<s>").render(messages) == want


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_each_name_that_a_template_reads(name):
    """The oracle is `_alias_reasoning_fields` of transformers 5.23."""
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    turn = {"role": "assistant", "content": "x", name: "hm"}
    assert template(source).render([turn]) == "hm|hm"


@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["prompts", "blocks"])
def test_answers_are_found_in_the_text_of_a_whole_dialogue(source):
    text, answers = template(source).answers(TURNS)
    assert text == "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TURNS
    )
    assert (len(text), answers) == (130, [(52, 64), (116, 129)])
    assert [text[first:last] for first, last in answers] == ["ok<|im_end|>", "yes<|im_end|>"]


@pytest.mark.parametrize("source", [PLAIN, MARKED], ids=["prompts", "blocks"])
def test_a_dialogue_with_tools_has_the_template_for_them(source):
    """`transformers` takes `tool_use` wherever tools are named, also none."""
    tools = [{"name": "f"}]
    own = ChatTemplate(
        where="here", source="no", variables={}, for_tools="{{ tools | tojson }}" + source
    )
    without = template(source).answers(TURNS)[0]
    text, answers = own.answers(TURNS, tools)
    assert text == '[{"name": "f"}]' + without
    assert [text[first:last] for first, last in answers] == ["ok<|im_end|>", "yes<|im_end|>"]
    assert own.answers(TURNS, [])[0] == "[]" + without
    assert own.render(TURNS) == "no"


def test_a_template_that_changes_earlier_turns_needs_blocks():
    source = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")
    with pytest.raises(DataError, match=r"changes a turn .*\n  found: turn 2 of"):
        template(source).answers(TURNS)


@pytest.mark.parametrize("use", ["body | length", "body | trim"])
def test_what_a_template_says_is_not_changed_or_measured_behind_its_blocks(use):
    said = "{% generation %}{{ messages[1].content }} {% endgeneration %}"
    template = ChatTemplate(
        where="here", source=f"{{% set body %}}{said}{{% endset %}}{{{{ {use} }}}}", variables={}
    )
    with pytest.raises(DataError, match="changes or measures"):
        template.answers(TURNS[:2])


def test_marks_of_a_template_are_tokens_and_those_of_a_user_are_refused(folder):
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|im_end|>",
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": CHATML},
                ],
            }
        )
    )
    tokenizer = tokenizer_files.load(folder)
    tokens = tokenizer.answer_prompt(of_user("hi <b>ü</b>"))
    assert tokens.count(300) == 3
    assert tokens.count(301) == 2
    bare = RENDERED.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.decode(tokens) == bare
    with pytest.raises(DataError, match=r"found: <\|im_end\|>"):
        tokenizer.answer_prompt(of_user("<|im_end|>"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # wins
    tokenizer = tokenizer_files.load(folder)
    assert tokenizer.decode(tokenizer.answer_prompt(of_user("hi"))) == "hi"


def test_a_template_cannot_do_harm(folder, monkeypatch):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for source, reason in {
        "{{ messages.__class__.__mro__ }}": "unsafe|undefined",
        "{{ messages.append(1) }}": "unsafe",
        "{% for i in range(100001) %}{% endfor %}": "Range too big",
        "{{ raise_exception('roles must alternate') }}": "roles must alternate",
        "{% if %}": "Expected an expression",
        loop.replace("99999", "6000"): "no end after 0.5 s",
    }.items():
        monkeypatch.setattr(chat, "LONGEST_S", 0.5 if "6000" in source else 60.0)
        (folder / "chat_template.jinja").write_text(source)
        with pytest.raises(DataError, match=f"the chat template fails\n  found: .*({reason})"):
            ChatTemplate.load(folder).render(of_user("hi"), add_generation_prompt=True)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is no UTF-8"):
        ChatTemplate.load(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate.load(folder)
    named = {"chat_template": [{"name": "tools", "template": "x"}], "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(DataError, match="no chat template named default\n  found: tools"):
        tokenizer_files.load(folder).answer_prompt(of_user("hi"))


def test_a_host_that_stands_still_is_no_fault_of_a_template(folder, monkeypatch):
    """A template that has had no processor has not taken long."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setattr(chat, "LONGEST_S", 0.1)
    compiled = chat._compiled

    def wait(*arguments):
        time.sleep(0.4)
        return compiled(*arguments)

    monkeypatch.setattr(chat, "_compiled", wait)
    found = ChatTemplate.load(folder).render(of_user("hi"), add_generation_prompt=True)
    assert found == "hi"


def test_a_dialogue_of_several_turns_comes_from_a_file(tmp_path, folder):
    (folder / "chat_template.jinja").write_text(CHATML)
    said = [("system", "Be kind."), ("user", "hi"), ("assistant", "hello"), ("user", "bye")]
    messages = [{"role": role, "content": content} for role, content in said]
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(messages))
    tokens = tokenizer_files.load(folder).answer_prompt(chat.read_messages(path))
    want = "".join(f"{role}\n{content}\n" for role, content in said) + "assistant\n"
    assert tokenizer_files.load(folder).decode(tokens) == want
    with pytest.raises(DataError, match="the words of assistant hold a special token"):
        tokenizer_files.load(folder).answer_prompt(
            [{"role": "assistant", "content": "a<|im_end|>"}]
        )


@pytest.mark.parametrize(
    "text, message",
    [
        ("[", "is no JSON"),
        ("[]", r"must be a list of messages\n  found: \[\]"),
        ('{"role": "user", "content": "a"}', "must be a list"),
        ('[{"role": "user"}]', r"message 1 must have a role and a content"),
        ('[{"role": "user", "content": ["a"]}]', "message 1 must have"),
        ('[{"role": "user", "content": "a"}, 7]', "message 2 must have"),
        ('[{"role": "user", "content": "a", "tools": []}]', "message 1 must have"),
        ('[{"role": "assistant", "content": "a"}]', "must be one to answer"),
        (None, "cannot be read\n  found: No such file"),
    ],
)
def test_a_file_that_is_no_dialogue_is_refused(tmp_path, text, message):
    path = tmp_path / "messages.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        chat.read_messages(path)
