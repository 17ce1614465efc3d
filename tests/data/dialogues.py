"""A dialogue, templates for it, and a tokenizer with its marks."""

import json

import pytest

from tests.data.trained_tokenizers import write_bpe, write_corpus

TURNS = [
    {"role": role, "content": content}
    for role, content in (("user", "hi"), ("assistant", "ok"), ("user", "x"), ("assistant", "yes"))
]


PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


MARKED = PLAIN.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}",
)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with two marks of dialogues."""
    return write_dialogue_tokenizer(tmp_path)


def write_dialogue_tokenizer(tmp_path):
    write_corpus(tmp_path / "corpus")
    folder = tmp_path / "bpe"
    folder.mkdir()
    write_bpe(tmp_path / "corpus", folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    for number, mark in enumerate(("<|im_start|>", "<|im_end|>"), start=300):
        own = {**whole["added_tokens"][0], "id": number, "content": mark}
        whole["added_tokens"].append(own)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder
