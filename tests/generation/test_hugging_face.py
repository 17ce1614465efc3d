"""Models from folders of Hugging Face's format, with caches of keys."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from holmesjax.config import ModelConfig
from holmesjax.data import tokenizer_files
from holmesjax.errors import ConfigError
from holmesjax.generation.decoder import Decoder, on_devices
from holmesjax.generation.sampler import Sampler
from holmesjax.hugging_face import folder
from holmesjax.models.layer import source_of_values
from launch.__main__ import main
from tests.data import tokenizer_kinds
from tests.data.trained_tokenizers import write_bpe, write_corpus
from tests.generation.odd_models import extended
from tests.hugging_face.families import CONFIGS, tensors_of, write_config
from tests.one_device import logits_of

QUICK = "gemma3_text"  # has windows and no windows, with rotary bases of their own
OTHERS = [pytest.param(f, marks=pytest.mark.exhaustive) for f in CONFIGS if f != QUICK]


def write_folder(path, family, **changes):
    write_config(path, family, **changes)
    model = ModelConfig(**folder.settings_of(str(path)))
    save_file(tensors_of(family, model), path / folder.WEIGHTS)
    return model


@pytest.mark.parametrize("family", [QUICK, *OTHERS])
def test_a_family_has_the_same_logits_with_caches(family, tmp_path):
    """Prompts and single tokens, beyond the windows that a family has."""
    model = write_folder(tmp_path, family)
    values = source_of_values(dataclasses.replace(model, hf=str(tmp_path)), seed=0)
    decoder = Decoder.built(model, on_devices(model), values)
    token_BL = np.array([[(7 * i + 3) % 96 for i in range(24)]], np.int32)
    got, _ = extended(decoder, token_BL, (11, 1, 1, 11), most=32)
    want = logits_of(decoder.params, model, token_BL)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_generate_reads_a_folder(tmp_path, capsys):
    """The tokenizer lies beside the weights; what is wrong is told before they are read."""
    path = tmp_path / "hf"
    write_folder(path, "llama", vocab_size=384, num_hidden_layers=1)
    assert main(["generate", str(path), "--prompt", "def"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    write_bpe(write_corpus(tmp_path / "corpus"), path)
    words = ["--prompt", "def", "--max-tokens=5", "--temperature=0"]
    said = {"top_k": 20, "repetition_penalty": 1.05, "suppress_tokens": [7], "do_sample": True}
    said |= {"bad_words_ids": None, "_from_model_config": True}
    (path / "generation_config.json").write_text(json.dumps(said))
    assert main(["generate", str(path), *words]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("def")
    unused = "repetition_penalty 1.05, suppress_tokens [7], top_k 20"
    assert f"not used    generation_config.json: {unused}\n" in printed.err
    assert main(["generate", str(path), "--as-planned"]) == 2
    assert "python -m launch import" in capsys.readouterr().err
    assert main(["generate", str(tmp_path)]) == 2
    assert "is no run folder, and no folder" in capsys.readouterr().err
    write_folder(path, "llama", vocab_size=96, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"must be at least 300.*\n.*\n  fix: use 384"):
        Sampler.of_hugging_face(path)


def write_chains(path, *chains):
    """A model whose likeliest token follows from the one before, as tokens follow in a chain."""
    settings = dict(vocab_size=448, num_hidden_layers=1, hidden_size=96, tie_word_embeddings=False)
    write_config(path, "llama", **settings)
    tensors = tensors_of("llama", ModelConfig(**folder.settings_of(str(path))))
    table, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    head[:] = 0
    for chain in chains:
        for token, following in itertools.pairwise(chain):
            head[following] += table[token]
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
    tensors["model.norm.weight"][:] = 1
    save_file(tensors, path / folder.WEIGHTS)


def test_generate_ends_an_answer_with_its_turn_and_at_what_stop_names(tmp_path, capsys):
    """The end of a turn is in the template alone, and the end of the tokenizer comes nowhere."""
    path = tmp_path / "hf"
    quiet = "{% if quiet is defined and add_generation_prompt %}x{% endif %}"
    ends = "{{ '<|im_start|>' if quiet is defined else '<|im_end|>' }}{% endgeneration %}"
    chatml = tokenizer_kinds.CHATML.replace("<|im_end|>{% endgeneration %}", ends)
    config = {"eos_token": "<|endoftext|>", "chat_template": chatml + quiet}
    tokenizer_kinds.write(path, tokenizer_kinds.byte_level(), config)
    tokenizer = tokenizer_files.load(path)
    words, more = tokenizer.encode("on time").tolist(), tokenizer.encode("luck").tolist()
    start, end = (tokenizer.marks[mark] for mark in ("<|im_start|>", "<|im_end|>"))
    asked = tokenizer.answer_prompt([{"role": "user", "content": "When?"}])
    (raw,) = tokenizer.encode("x").tolist()
    assert len({*words, *more}) == len(words) + len(more), "a token has one that follows it"
    write_chains(path, [asked[-1], *words, end, end], [raw, *more, start, start])
    for options, text, ended_by in (
        (["--chat", "--prompt", "When?"], "on time", "end"),
        (["--chat", "--prompt", "When?", "--stop", " time"], "on", "stop"),
        (["--prompt", "x", "--stop", "<|im_start|>"], "luck", "stop"),
        (["--prompt", "x"], "luck", "length"),
        (
            ["--chat", "--prompt", "When?", "--chat-template-kwargs", '{"quiet": 1}'],
            "luck",
            "end",
        ),
    ):
        words = ["--temperature=0", "--max-tokens", str(len(more) + 9), "--json", *options]
        assert main(["generate", str(path), *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["text"], found["ended_by"]) == (text, ended_by), options
