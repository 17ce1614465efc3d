"""The tokenizer of an export is the run's: its tokens, marks, ends and texts of dialogues.

The right values are those of the library that owns a format and, in `make test-all`, of
`AutoTokenizer` in `transformers` 5 and 4.57 (HOLMESJAX_TRANSFORMERS names other interpreters).
"""

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tiktoken.load
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from holmesjax.config import DataConfig, ModelConfig
from holmesjax.data import chat, tokenizer_files
from holmesjax.data.byte_tokenizer import ByteTokenizer
from holmesjax.data.tokenizer_files import FileTokenizer
from holmesjax.errors import DataError
from holmesjax.hugging_face import export, folder
from launch.__main__ import main
from tests.data.tokenizer_kinds import (
    CHATML,
    KINDS,
    SPECIAL,
    byte_level,
    random_dialogues,
    random_texts,
    write,
)
from tests.hugging_face.families import tensors_of, write_config
from tests.hugging_face.read_back import layers_of

CHILD = Path(__file__).with_name("auto_tokenizer.py")
FAMILIES = ("llama", "qwen2", "gemma3_text", "phi3")
BYTES = "bytes"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """A tokenizer of each format."""
    root = tmp_path_factory.mktemp("kinds")
    return {name: make(root / name) for name, make in KINDS.items()}


def loaded(sources: dict[str, Path], name: str) -> FileTokenizer:
    return tokenizer_files.of_bytes() if name == BYTES else tokenizer_files.load(sources[name])


def for_kind(name: str, texts: list[str]) -> list[str]:
    """Texts without what the library `tokenizers` itself loses, each version of it another part.

    A normalizer of sentencepiece that changes a letter drops the accents that follow.
    """
    if name != "sentencepiece-nfkc":
        return texts
    kept = lambda own: unicodedata.category(own)[0] != "M" and unicodedata.category(own) != "Cn"
    return ["".join(filter(kept, text)) for text in texts]


def of_library(path: Path | None) -> Callable[[str], list[int]]:
    """The tokens of a text, without the marks of documents, by the library that owns a format."""
    if path is None:
        return lambda text: ByteTokenizer().encode(text).tolist()[1:]
    if (path / "tokenizer.model").exists():
        return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model")).encode
    if (path / "tokenizer.tiktoken").exists():
        about = json.loads((path / "tokenizer.tiktoken.json").read_text())
        ranks = tiktoken.load.load_tiktoken_bpe(str(path / "tokenizer.tiktoken"))
        return tiktoken.Encoding(
            "x",
            pat_str=about["pattern"],
            mergeable_ranks=ranks,
            special_tokens=about["special_tokens"],
        ).encode_ordinary
    own = Tokenizer.from_file(str(path if path.is_file() else path / "tokenizer.json"))
    return lambda text: own.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", [*KINDS, BYTES])
def test_a_run_and_its_export_have_the_tokens_of_the_library_that_owns_a_format(
    name, sources, tmp_path
):
    tokenizer = loaded(sources, name)
    right = of_library(sources.get(name))
    tokenizer.write(tmp_path)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    again = tokenizer_files.load(tmp_path)
    begins = written.encode("").ids[:1] if name != "two-files" else []
    for text in for_kind(name, random_texts(300)):
        tokens = tokenizer.inner.encode(text).ids
        assert written.encode(text).ids == again.inner.encode(text).ids == tokens
        want = right(text)
        assert tokens in (want, begins + want, [*begins, *want, tokenizer.end]), text
    assert (again.end, again.marks) == (tokenizer.end, tokenizer.marks)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer.end == written.token_to_id(said["eos_token"])
    if tokenizer.template is not None:
        for dialogue in random_dialogues(20):
            whole = tokenizer.template.render(dialogue)
            assert again.template.render(dialogue) == whole
            assert again.rendered(whole) == tokenizer.rendered(whole)


# Of transformers 5.23 and 4.57, on the same folders: the ids that end a text, and a mark's.
@pytest.mark.parametrize(
    "name, ends, mark, number",
    [
        ("ours", (0,), "<|endoftext|>", 0),
        ("alone", (0,), "<|endoftext|>", 0),
        ("byte-level", (0, 2), "<|im_end|>", 2),  # the end of a turn is the template's
        ("qwen", (2, 0), "<tool_call>", 322),  # generation_config.json
        ("llama3", (0, 2), "<|im_start|>", 1),  # the default of several templates
        ("two-files", (2, 1), "<|fim|>", 328),  # config.json, special_tokens_map.json
        ("sentencepiece-bpe", (2, 5), "</s>", 2),  # generation_config.json
        ("tiktoken", (280, 286), "<|im_end|>", 286),
    ],
)
def test_ends_and_marks_are_those_of_all_files(name, ends, mark, number, sources):
    tokenizer = loaded(sources, name)
    assert (tokenizer.ends, tokenizer.marks[mark]) == (ends, number)
    assert tokenizer.rendered(mark)[0] == [number]


def test_a_model_needs_no_row_for_a_mark_that_only_pads(tmp_path):
    """A name without a token becomes one, as in transformers; no dialogue has it."""
    config = {"eos_token": "<|endoftext|>", "pad_token": "[PAD]", "chat_template": CHATML}
    plain = byte_level()
    size = plain.get_vocab_size()
    tokenizer = tokenizer_files.load(write(tmp_path / "t", plain, config))
    assert (tokenizer.num_tokens, tokenizer.num_of_dialogues) == (size + 1, size)
    assert tokenizer.ids()["pad_token_id"] == size


# Of transformers 5.23 and 4.57.
def test_a_mark_with_a_name_has_its_flags(tmp_path):
    """`lstrip`: the spaces before it are a part of it."""
    config = {"eos_token": "<|im_end|>"}
    mask = {"mask_token": {"content": "<mask>", "lstrip": True, "normalized": False}}
    tokenizer = tokenizer_files.load(
        write(tmp_path / "t", byte_level(), config, special_tokens_map__json=mask)
    )
    assert tokenizer.rendered("a  <mask>")[0] == [67, tokenizer.marks["<mask>"]]


@pytest.mark.parametrize(
    "kind, config, model, problem",
    [
        ("ours", {"add_prefix_space": True}, None, "another add_prefix_space than tokenizer.json"),
        ("ours", {"split_special_tokens": True}, None, "makes text of the marks of a template"),
        ("word-piece", {"do_lower_case": False}, None, "another do_lower_case than tokenizer.json"),
        (
            "word-piece",
            {"tokenizer_class": "BertTokenizer", "strip_accents": False},
            None,
            "another strip_accents than tokenizer.json",
        ),
        (
            "word-piece",
            {"tokenizer_class": "ElectraTokenizerFast", "do_lower_case": False},
            None,
            "another do_lower_case than tokenizer.json",
        ),
        (
            "word-piece",
            {"tokenizer_class": "MPNetTokenizer", "tokenize_chinese_chars": False},
            None,
            "another tokenize_chinese_chars than tokenizer.json",
        ),
        (
            "sentencepiece-bpe",
            {"add_prefix_space": False},
            None,
            "another add_prefix_space than tokenizer.json",
        ),
        ("cased", {}, "mpnet", "another do_lower_case than tokenizer.json"),  # true by default
        ("llama3", {"add_bos_token": False}, None, "another add_bos_token than tokenizer.json"),
        ("llama3", {"add_eos_token": True}, None, "another add_eos_token than tokenizer.json"),
        (
            "byte-level",
            {"tokenizer_class": "GemmaTokenizerFast", "bos_token": SPECIAL[1]},
            None,
            "another add_bos_token than .*\n  found: true, the default of GemmaTokenizer",
        ),
    ],
)
def test_settings_that_contradict_the_pieces_are_refused(kind, config, model, problem, tmp_path):
    """Classes of transformers 5 and 4.57 follow the settings, whatever tokenizer.json says.

    GPT2Tokenizer begins a text with a space, and BertTokenizer keeps capital letters. Where a text
    gets its marks, version 4 follows the settings, and version 5 tokenizer.json.
    """
    path = KINDS["word-piece" if kind == "cased" else kind](tmp_path / "t")
    if kind == "cased":
        pieces = json.loads((path / "tokenizer.json").read_text())
        pieces["normalizer"]["lowercase"] = False
        (path / "tokenizer.json").write_text(json.dumps(pieces))
        assert tokenizer_files.load(path).ends  # alone it contradicts nothing
    if model is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model}))
    said = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(said | config))
    with pytest.raises(DataError, match=problem):
        tokenizer_files.load(path)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer", "strip_accents": True},  # null of tokenizer.json, too
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},  # reads no such key
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True},
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},  # reads no such key
    ],
)
def test_settings_that_mean_what_the_pieces_do_are_no_contradiction(config, tmp_path):
    kind = "sentencepiece-bpe" if "add_prefix_space" in config else "word-piece"
    path = KINDS[kind](tmp_path / "t")
    said = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(said | config))
    assert tokenizer_files.load(path).ends


def test_pieces_that_are_drawn_anew_each_time_are_refused(tmp_path):
    pieces = json.loads(byte_level().to_str())
    pieces["model"]["dropout"] = 0.1
    path = write(tmp_path / "t", Tokenizer.from_str(json.dumps(pieces)), {"eos_token": SPECIAL[2]})
    with pytest.raises(DataError, match=r"draws the pieces of a text anew.*\n.*dropout 0.1"):
        tokenizer_files.load(path)


def test_marks_keep_their_flags_beside_a_class_that_drops_them(tmp_path):
    """Qwen2Tokenizer of transformers 5.23 adds marks with a name once more, without flags."""
    mask = {"mask_token": {"content": "<mask>", "lstrip": True, "normalized": False}}
    others = {"additional_special_tokens": [{"content": "<x>", "rstrip": True}, "<y>"]}
    config = {"eos_token": SPECIAL[2], "chat_template": CHATML, **mask, **others}
    tokenizer = tokenizer_files.load(write(tmp_path / "t", byte_level(), config))
    (tmp_path / "out").mkdir()
    tokenizer.write(tmp_path / "out", "qwen2")
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert ("mask_token" in said, said["additional_special_tokens"]) == (False, ["<y>"])
    text = "a  <mask> <x>  b <y>  c"  # as AutoTokenizer of 5.23 and 4.57 on the export
    want = [67, 325, 223, 326, 68, 223, 327, 223, 223, 69]
    assert tokenizer_files.load(tmp_path / "out").rendered(text)[0] == want
    for changes in (
        {"added_tokens_decoder": {"2": {"content": SPECIAL[2], "lstrip": True, "special": True}}},
        {"chat_template": "{{ mask_token }}" + CHATML},
    ):
        path = write(tmp_path / f"of {[*changes]}", byte_level(), config | changes)
        with pytest.raises(DataError, match=r"that transformers drops beside a qwen2\n.*lstrip"):
            tokenizer_files.load(path).write(tmp_path / "out", "qwen2")


@pytest.mark.parametrize("key", ["extra_special_tokens", "model_specific_special_tokens"])
def test_names_of_marks_that_only_one_model_has_are_said_to_both_versions(key, tmp_path):
    """Version 5 of transformers takes them from all places, and 4.57 from the first alone."""
    more = {"eos_token": SPECIAL[2], key: {"image_token": "<image>"}}
    path = write(tmp_path / "t", byte_level(), more | {"chat_template": "{{ image_token }}"})
    tokenizer = tokenizer_files.load(path)
    (tmp_path / "out").mkdir()
    tokenizer.write(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said["extra_special_tokens"] == more[key]
    assert tokenizer_files.load(tmp_path / "out").template.render(HI) == "<image>"


HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
IN_CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
NO_PROMPT = "{% if add_generation_prompt == false %}F{% endif %}"


# Rendered by transformers 5.23 and 4.57.
@pytest.mark.parametrize(
    "first, config, files, want",
    [
        ("{{ bos_token }}", {"bos_token": None}, {}, ""),
        (
            "{{ bos_token }}",
            {},
            {"special_tokens_map__json": {"bos_token": "<|im_end|>"}},
            SPECIAL[2],
        ),
        ("{{ bos_token }}", {"bos_token": {"content": "<|im_end|>"}}, {}, SPECIAL[2]),
        ("{{ bos_token }}", {"tokenizer_class": "GPT2TokenizerFast"}, {}, SPECIAL[0]),
        ("{{ bos_token }}", {"tokenizer_class": "GPT2Tokenizer", "bos_token": None}, {}, ""),
        ("{{ pad_token }}", {"tokenizer_class": "LlamaTokenizer"}, {}, ""),
        ("{{ unk_token }}", {}, {"config__json": {"model_type": "gpt2"}}, SPECIAL[0]),
        ("{{ pad_token }}", {"tokenizer_class": "Qwen2TokenizerFast"}, {}, SPECIAL[0]),
        ("{{ bos_token is defined }}", {"add_bos_token": True}, {}, "False"),
        (
            "{{ eos_token }}",
            {},
            {"special_tokens_map__json": {"eos_token": "<|im_end|>"}},
            SPECIAL[2],
        ),
        (NO_PROMPT, {}, {}, "F"),
        ("{{ tools }}{{ messages[0].name is defined }}", {}, {}, "NoneFalse"),
    ],
)
def test_a_template_has_the_variables_that_transformers_gives(first, config, files, want, tmp_path):
    config = {"eos_token": "<|endoftext|>", **config, "chat_template": first + CHATML}
    path = write(tmp_path / "t", byte_level(), config, **files)
    template = tokenizer_files.load(path).template
    asked = [{**HI[0], "name": None}, HI[1]]
    assert template.render(asked) == want + IN_CHATML


PADDING = {"pad_token": SPECIAL[1], "pad_id": 1, "pad_type_id": 0, "pad_to_multiple_of": None}


# Of transformers 5.23, and of 4.57 for a class with a name.
@pytest.mark.parametrize(
    "config, want",
    [
        ({}, SPECIAL[1]),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, SPECIAL[1]),
        ({"pad_token": None}, ""),
        ({"pad_token": SPECIAL[2]}, SPECIAL[2]),
        ({"tokenizer_class": "Qwen2Tokenizer"}, SPECIAL[0]),
    ],
)
def test_the_mark_for_padding_is_that_of_the_pieces_where_no_file_and_no_class_says(
    config, want, tmp_path
):
    pieces = json.loads(byte_level().to_str())
    pieces["padding"] = {**PADDING, "strategy": "BatchLongest", "direction": "Right"}
    config = {"eos_token": SPECIAL[0], "chat_template": "{{ pad_token }}", **config}
    path = write(tmp_path / "t", Tokenizer.from_str(json.dumps(pieces)), config)
    (path / "tokenizer.json").write_text(json.dumps(pieces))
    assert tokenizer_files.load(path).template.render(HI) == want
    of_gpt2 = config | {"tokenizer_class": "GPT2Tokenizer"}  # 4.57 takes it, and 5.23 does not
    (path / "tokenizer_config.json").write_text(json.dumps(of_gpt2))
    if "pad_token" not in config:
        with pytest.raises(DataError, match="does not say what pad_token is"):
            tokenizer_files.load(path)


@pytest.mark.parametrize(
    "name, config, model",
    [
        ("bos_token", {"tokenizer_class": "InternLM2Tokenizer"}, {}),  # of code beside the files
        ("pad_token", {"tokenizer_class": "GemmaTokenizer"}, {}),  # <pad>, which is no piece
        ("pad_token", {"tokenizer_class": "GPTNeoXTokenizer"}, {}),  # 5.23 has one, 4.57 none
        ("bos_token", {}, {"model_type": "llama"}),  # none in 5.23, <s> in 4.57
    ],
)
def test_marks_that_only_an_unknown_class_could_say_are_asked_for(name, config, model, tmp_path):
    config = {"eos_token": SPECIAL[0], "chat_template": f"{{{{ {name} }}}}", **config}
    path = write(tmp_path / "t", byte_level(), config, config__json=model)
    with pytest.raises(DataError, match=rf"{name}.*\n.*\n.*the mark, or null"):
        tokenizer_files.load(path)
    (path / "tokenizer_config.json").write_text(json.dumps(config | {name: None}))
    assert tokenizer_files.load(path).template.render(HI) == ""


def test_a_class_of_llama_over_pieces_of_bytes_gives_no_marks(tmp_path):
    """Version 4.57 takes the class and its <s>, and 5.23 takes no class there."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    config = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ bos_token }}"}
    path = write(tmp_path / "t", tokenizer, {**config, "eos_token": "</s>"})
    with pytest.raises(DataError, match="does not say what bos_token is"):
        tokenizer_files.load(path)
    said = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config | said))
    assert tokenizer_files.load(path).template.render(HI) == "<s>"
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "x"}))
    with pytest.raises(DataError, match="does not say which token ends a document"):
        tokenizer_files.load(path)


# Decoded by transformers 5.23; on the exports by 4.57, too.
@pytest.mark.parametrize(
    "kind, more, want",
    [
        ("sentencepiece-unigram", {}, "a's b. c, it's do 'n? x"),
        ("byte-level", {}, "a 's b . c , it ' s do 'n ? x"),
        ("byte-level", {tokenizer_files.CLEANS_BPE: True}, "a's b. c, it's do 'n? x"),
    ],
)
def test_spaces_before_punctuation_go_where_transformers_takes_them(kind, more, want, tmp_path):
    path = KINDS[kind](tmp_path / "t")
    said = json.loads((path / "tokenizer_config.json").read_text()) | more
    said["clean_up_tokenization_spaces"] = True
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = tokenizer_files.load(path)
    tokens = tokenizer.inner.encode("a 's b . c , it ' s do 'n ? x").ids
    stream = tokenizer.decode_stream()
    assert "".join([*map(stream.push, tokens), stream.rest()]) == want
    (tmp_path / "out").mkdir()
    tokenizer.write(tmp_path / "out")
    assert tokenizer_files.load(tmp_path / "out").decode(tokens) == want


def test_what_a_file_calls_null_is_undefined_whatever_the_format_says(tmp_path):
    """So does transformers with `"bos_token": null` beside pieces of sentencepiece."""
    path = KINDS["sentencepiece-bpe"](tmp_path / "t")
    said = {
        "eos_token": None,
        "bos_token": None,
        "chat_template": "{{ bos_token }}|{{ eos_token }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = tokenizer_files.load(path)
    assert (tokenizer.template.render(HI), tokenizer.end) == ("|", 2)


@pytest.mark.parametrize("trim", [False, True])
def test_spaces_of_an_answer_count(trim, tmp_path):
    """The mask is that of `return_assistant_tokens_mask` in transformers: 16 tokens."""
    said = "if a:\n        b = 2  \n\n        c ñ"
    dialogue = [{"role": "user", "content": "write"}, {"role": "assistant", "content": said}]
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    path = write(tmp_path / "t", byte_level(trim=trim), config)
    data = DataConfig(source="chat", corpus="x", tokenizer=str(path), documents="mask")
    tokens, counts = chat._encoder(data)(chat.Dialogue(dialogue), "x")
    decode = lambda own: tokenizer_files.load(path).inner.decode(own, skip_special_tokens=False)
    assert sum(counts) == 16
    learned = [t for t, counted in zip(tokens, counts, strict=True) if counted]
    assert decode(learned) == f"{said}<|im_end|>"
    dialogue[1] = {
        "role": "assistant",
        "content": "    x",
    }  # whose first space is no character less
    tokens, counts = chat._encoder(data)(chat.Dialogue(dialogue), "x")
    assert "    x<|im_end|>" in decode(
        [t for t, is_counted in zip(tokens, counts, strict=True) if is_counted]
    )


def test_runs_of_spaces_that_are_tokens_are_text_in_a_dialogue(tmp_path):
    """GPT-NeoX has them as added tokens that are not special."""
    plain = byte_level()
    plain.add_tokens([AddedToken("    ", normalized=True)])
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    path = write(tmp_path / "t", plain, config)
    data = DataConfig(source="chat", corpus="x", tokenizer=str(path), documents="mask")
    said = [{"role": "user", "content": "x    y"}, {"role": "assistant", "content": "a\n    b"}]
    tokens, counts = chat._encoder(data)(chat.Dialogue(said), "x")
    spaces = plain.token_to_id("    ")
    assert [count for token, count in zip(tokens, counts, strict=True) if token == spaces] == [0, 1]
    assert tokenizer_files.load(path).answer_prompt(said[:1]).count(spaces) == 1


def write_model(path: Path, **changes: object) -> ModelConfig:
    """A folder with a tiny model, whose config.json has an end of its own."""
    write_config(path, "llama", vocab_size=512, num_hidden_layers=1, eos_token_id=0, **changes)
    model = ModelConfig(**folder.settings_of(str(path)))
    save_file(tensors_of("llama", model), path / folder.WEIGHTS)
    return model


def test_an_export_mixes_no_two_tokenizers(tmp_path, capsys):
    """The base has a template and marks in files that the tokenizer of the run does not have."""
    base, out = tmp_path / "base", tmp_path / "out"
    write_model(base, bos_token_id=0)
    settings = {"temperature": 0.6, "eos_token_id": [0], "_from_model_config": True}
    settings |= {"suppress_tokens": [7], "bad_words_ids": [[8]], "stop_strings": ["<|fim|>"]}
    files = {
        "chat_template__jinja": "OLD{% for m in messages %}<|fim|>{{ m.content }}{% endfor %}",
        "special_tokens_map__json": {"eos_token": "<|endoftext|>"},
        "added_tokens__json": {"<|fim|>": 400},
        "generation_config__json": settings,
    }
    for path in write(tmp_path / "old", byte_level(), {}, **files).iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    own = write(tmp_path / "own", byte_level(vocab=380), config)
    line = {"prompt": "hi", "answer": "hello"}
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(line)}\n" * 20)
    run = [str(tmp_path / "run"), "topology=configs/topologies/one_cpu.yaml", "log.report=false"]
    data = ["data.source=chat", f"data.corpus={tmp_path}/d.jsonl", "data.documents=mask"]
    data += [f"data.tokenizer={own}", "data.packing=best_fit", "data.validation_fraction=0.0"]
    more = ["train.global_batch=2", "train.steps=2", "train.eval_every=0"]
    assert main(["import", str(base), "--to", *run, *data, *more]) == 0
    capsys.readouterr()
    assert main(["export", run[0], "--out", str(out)]) == 0
    first, *others = capsys.readouterr().out.split(f"{out}: ")[1].strip().split(", ")
    assert first == "model.safetensors"
    assert {first, *others} == {path.name for path in out.iterdir()}
    weights = {"config.json", "generation_config.json", "model.safetensors"}
    tokens = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == weights | tokens
    found = tokenizer_files.load(out)
    prompt = found.template.render(HI[:1], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert found.rendered("x <|fim|>")[0] == [90, 223, 30, 94, 72, 75, 79, 94, 32]
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    read = lambda name: json.loads((out / name).read_text())
    assert read("generation_config.json") == {"temperature": 0.6, **ids}
    assert ids.items() <= read("config.json").items()


@pytest.mark.parametrize("name", ["ours", "byte-level", BYTES])
def test_a_model_from_scratch_leaves_with_the_ends_of_its_tokenizer(name, sources, tmp_path):
    model = write_model(tmp_path / "in")
    layers = layers_of(folder.open_weights(tmp_path / "in", model))
    config = export.config_of(model, None, "llama", None)
    tokenizer = loaded(sources, name)
    export.write(tmp_path / "out", config, model, layers, max_bytes=10**9, tokenizer=tokenizer)
    for file in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / "out" / file).read_text())
        assert said["eos_token_id"] == ([0, 2] if name == "byte-level" else 0)


# ---- transformers ------------------------------------------------------------------------------


def interpreters() -> list[str]:
    """This one, which the extra `parity` gives transformers 5, and the one that has version 4."""
    if said := os.environ.get("HOLMESJAX_TRANSFORMERS"):
        return said.split(os.pathsep)
    four = Path(sys.prefix) / "transformers4/bin/python"
    return [sys.executable, *([str(four)] if four.exists() else [])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("python", interpreters())
def test_auto_tokenizer_gives_the_tokens_of_the_run(python, sources, tmp_path):
    """2,000 texts and 200 dialogues of each format, beside a model of each class of tokenizers."""
    if subprocess.run([python, "-c", "import transformers"], capture_output=True).returncode:
        pytest.skip("needs transformers: make test-all")
    texts, dialogues = [text for text in random_texts(2100) if text][:2000], random_dialogues(200)
    asked, own = [], []
    for name in [*KINDS, BYTES]:
        for family in FAMILIES if name == "qwen" else FAMILIES[:2]:
            tokenizer, out = loaded(sources, name), tmp_path / f"{name}-{family}"
            out.mkdir()
            tokenizer.write(out, family)
            for file in ("config.json", "generation_config.json"):
                tokenizer_files.write_json(out / file, {"model_type": family, **tokenizer.ids()})
            said = [
                [{**turn, "content": for_kind(name, [turn["content"]])[0]} for turn in dialogue]
                for dialogue in dialogues
            ]
            asked.append({"folder": str(out), "texts": for_kind(name, texts), "dialogues": said})
            own.append((f"{name} {family}", tokenizer))
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(CHILD)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = zip(own, asked, json.loads(done.stdout), strict=True)
    for (name, tokenizer), question, theirs in rows:
        want = [tokenizer.inner.encode(text).ids for text in question["texts"]]
        assert theirs["tokens"] == want, name
        assert theirs["decoded"] == list(map(tokenizer.decode, want)), name
        assert theirs["names"] == ["attention_mask", "input_ids"], name
        assert theirs["eos_token_id"] == tokenizer.end, name
        assert theirs["ends"] in ([*tokenizer.ends], *tokenizer.ends), name
        if tokenizer.template is None:
            assert not theirs["dialogues"], name
            continue
        for dialogue, rendered in zip(question["dialogues"], theirs["dialogues"], strict=True):
            assert rendered["text"] == tokenizer.template.render(dialogue), name
            asks = tokenizer.template.render(dialogue[:1], add_generation_prompt=True)
            assert rendered["prompt"] == asks, name
            tokens, places = tokenizer.rendered(rendered["text"])
            assert rendered["tokens"] == tokens, name
            if rendered["counts"] is not None:
                counts = chat._in_answers(places, tokenizer.template.answers(dialogue)[1])
                # Where places are trimmed, transformers loses the spaces that begin an answer.
                trims = "byte-level" in name or "llama3" in name
                for ours, their in zip(counts, rendered["counts"], strict=True):
                    assert ours == bool(their) or (ours and trims), name
