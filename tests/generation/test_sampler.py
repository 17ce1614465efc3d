"""Texts that a sampler continues: each as it would be alone, and until it ends."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax import job as jobs
from holmesjax.checkpoints import fetching, manifest, restoring
from holmesjax.data import tokenizer_files
from holmesjax.data.byte_tokenizer import BEGIN, ByteTokenizer
from holmesjax.errors import CheckpointError, ConfigError
from holmesjax.generation import decoder
from holmesjax.generation.sampler import Sampler
from holmesjax.generation.sampling import Sampling
from holmesjax.models.layer import init_params
from launch.__main__ import main
from tests.data.tokenizer_kinds import CHATML, byte_level, write as write_tokenizer
from tests.generation.odd_models import WINDOWS, loud
from tests.hand_made_plans import make_model
from tests.jobs import write_run
from tests.one_device import logits_of
from tests.written_checkpoints import damage, folders, write

GREEDY = Sampling(temperature=0.0)
BYTES = ByteTokenizer()
PROMPTS = ("d", "def f(x): return x  # ", "a = 7\n")


@pytest.fixture(scope="module")
def sampler():
    """A model of layers with and without a window of 5, and a context of 16."""
    model = make_model(num_layers=2, num_kv_heads=2, **WINDOWS)
    return Sampler.of(model, loud(init_params(model, 1)), BYTES)


def without_cache(sampler, prompt, num_tokens):
    """The likeliest tokens, with the model run as a whole for each."""
    model, known, found = sampler.model, BYTES.encode(prompt).tolist()[-16:], []
    for _ in range(num_tokens):
        known = known[-8:] if len(known) > 16 else known
        padded = known + [BEGIN] * (16 - len(known))  # what follows a token does not change it
        logits = logits_of(sampler.decoder.params, model, np.array([padded], np.int32))
        found.append(int(jnp.argmax(logits[0, len(known) - 1])))
        known.append(found[-1])
    return found


def test_rows_of_a_batch_are_what_each_is_alone_and_without_a_cache(sampler):
    """Prompts of 2, 7 and 23 tokens, the last of which outgrows the context; 40 tokens more."""
    encoded = [BYTES.encode(prompt).tolist() for prompt in PROMPTS]
    together = np.array(list(sampler.tokens(encoded, 40, GREEDY))).T.tolist()
    for prompt, tokens, row in zip(PROMPTS, encoded, together, strict=True):
        assert row == without_cache(sampler, prompt, 40)
        assert row == [token for [token] in sampler.tokens([tokens], 40, GREEDY)]
        assert len(set(row)) > 3


def test_a_row_draws_as_a_single_text_with_its_seed(sampler):
    encoded = [BYTES.encode(prompt).tolist() for prompt in PROMPTS]
    sampling = Sampling(seed=5, top_p=0.95)
    together = np.array(list(sampler.tokens(encoded, 12, sampling))).T.tolist()
    for i, tokens in enumerate(encoded):
        alone = sampler.tokens([tokens], 12, Sampling(seed=5 + i, top_p=0.95))
        assert together[i] == [token for [token] in alone]
    other = [token for [token] in sampler.tokens(encoded[:1], 12, Sampling(seed=6, top_p=0.95))]
    assert other != together[0]


def test_programs_are_compiled_once_for_each_bucket_of_lengths():
    """A program for prompts, and one for single tokens; the next bucket of prompts adds its own."""
    model = make_model(num_layers=1, context_length=64)
    sampler = Sampler.of(model, init_params(model, 0), BYTES)
    counts = [decoder._run_part._cache_size()]
    for length, num_tokens in ((3, 20), (9, 12), (15, 8), (20, 4), (31, 1)):
        list(sampler.tokens([[65] * length] * 2, num_tokens, GREEDY))
        counts.append(decoder._run_part._cache_size() - counts[0])
    assert counts[1:] == [2, 2, 2, 3, 3]


def continued(monkeypatch, sampler, streams, **options):
    """The pieces that come of tokens, one after the other."""
    rows = [list(stream) for stream in streams]

    def tokens(self, prompts, max_tokens, sampling, is_over):
        for i in range(max_tokens):
            yield [row[i] if i < len(row) else 33 for row in rows]
            if all(is_over(row) for row in range(len(rows))):
                return

    monkeypatch.setattr(Sampler, "tokens", tokens)
    shown = [[] for _ in rows]
    show = lambda row, piece: shown[row].append(piece)
    found, _ = sampler.complete([""] * len(rows), 12, GREEDY, show=show, **options)
    assert ["".join(pieces) for pieces in shown] == [row.text for row in found]
    return found, shown


def test_text_comes_in_whole_characters_until_it_ends(monkeypatch, sampler):
    """At an end token, before a stop string, or after all tokens; a row's end ends no other."""
    streams = ["añ→z".encode() + b"\xff", b"ab\0cd", b"abSTOcSTOPd", "xé".encode()[:2]]
    found, shown = continued(monkeypatch, sampler, streams, stop=["STOP", "zzz"])
    assert [row.ended_by for row in found] == ["length", "end", "stop", "length"]
    assert [row.text for row in found] == ["añ→z�!!!!", "ab", "abSTOc", "x�!!!!!!!!!!"]
    assert shown[0][:3] == ["a", "ñ", "→"]
    assert found[1].tokens == [97, 98, 0]


def test_an_answer_ends_with_its_turn_and_at_a_special_token(monkeypatch, sampler, tmp_path):
    """The end of a turn is in the template alone; text ends at <|endoftext|>."""
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    tokenizer = tokenizer_files.load(write_tokenizer(tmp_path / "t", byte_level(), config))
    own = dataclasses.replace(sampler, tokenizer=tokenizer)
    words, more = tokenizer.encode("on a mat").tolist(), tokenizer.encode("rain").tolist()
    start, end = (tokenizer.marks[mark] for mark in ("<|im_start|>", "<|im_end|>"))
    streams = [[*words, mark, *more] for mark in (0, end, start)]
    found, _ = continued(monkeypatch, own, streams, stop=["<|im_start|>", "zzz"])
    assert [row.text for row in found] == ["on a mat"] * 3
    assert [row.ended_by for row in found] == ["end", "end", "stop"]
    with pytest.raises(ConfigError, match=r"--stop: holds a special token.*\n.*\n.*'<\|im_end\|>'"):
        continued(monkeypatch, own, streams, stop=["<|im_end|>\n"])


def test_a_model_of_more_ids_than_bytes_makes_text():
    """Untrained, so that all 320 ids are about as likely: one of five draws would be no byte."""
    model = make_model(vocab_size=320, num_layers=1)
    sampler = Sampler.of(model, init_params(model, 0), BYTES)
    tokens = [t for [t] in sampler.tokens([[BEGIN]], 100, Sampling(temperature=1.0))]
    assert max(tokens) < 256


# ---- run folders and the command line ------------------------------------------------------------


@pytest.mark.parametrize("place", ["here", "url"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, monkeypatch, place):
    model = make_model()
    write(tmp_path, model, steps=(1, 2))
    if place == "here":
        damage(tmp_path, 2)

    def bring(checkpoint, _):
        if place == "url" and checkpoint.step == 2:
            raise manifest.damaged(checkpoint, "part_0/a", "is damaged", "another SHA-256")

    monkeypatch.setattr(fetching, "bring_of_url", bring)
    monkeypatch.setattr(jobs, "load_config", lambda _: SimpleNamespace(model=model))
    said, before = [], folders(tmp_path)
    sampler = Sampler.load(tmp_path, said.append)
    assert "is damaged" in said[0]
    assert folders(tmp_path) == before
    [found] = [checkpoint for checkpoint in manifest.find(tmp_path) if checkpoint.step == 1]
    wanted = restoring.flatten(restoring.restore_params(found, model))
    for key, got in restoring.flatten(sampler.decoder.params).items():
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted[key]))


@pytest.mark.one_version
def test_a_run_is_sampled_on_one_device_as_planned_and_by_processes(tmp_path, capsys):
    """The lines of JSON are the same, and those of a run with another tokenizer are refused."""
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    corpus.mkdir()
    for i in range(12):
        (corpus / f"{i}.txt").write_text(f"def f_{i}(x):\n    return x + {i}\n" * 40)
    tokenizer = str(tmp_path / "bpe")
    assert main(["tokenizer", str(corpus), "--vocab", "300", "--out", tokenizer]) == 0
    run_file = write_run(tmp_path, {"a": (2,), "b": (1,)})
    small = ["model.num_layers=2", "model.width=16", "model.vocab_size=384", "train.steps=1"]
    own = [f"data.corpus={corpus}", f"data.tokenizer={tokenizer}", "parallel.tensor=null"]
    assert main(["train", str(run_file), *small, *own]) == 0
    capsys.readouterr()
    words = ["--prompt", "def f", "--prompt", "", "--max-tokens=6", "--json", "--temperature=0"]
    said = []
    for options in ([], ["--as-planned"], ["--devices=2"], ["--launcher=local"]):
        assert main(["generate", str(run), *words, *options]) == 0
        said.append(capsys.readouterr())
    assert len({captured.out for captured in said}) == 1
    assert not list(run.glob("*.key"))
    lines = [json.loads(line) for line in said[0].out.splitlines()]
    assert [line["prompt"] for line in lines] == ["def f", ""]
    assert all(len(line["tokens"]) == 6 for line in lines)
    assert "tokens/s" in said[0].err
    (run / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    with pytest.raises(CheckpointError, match="is not the tokenizer of step_00000001"):
        Sampler.load(run)


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("--max-tokens", "-3", "-3"),
        ("--max-tokens", "0", "0"),
        ("--prompt", "caf\udce9", r"'caf\udce9'"),
        ("--stop", "caf\udce9", r"'caf\udce9'"),
        ("--stop", "", "''"),
        ("--hosts", "hosts.yaml", "hosts.yaml"),
        ("--listen", "10.0.0.1", "10.0.0.1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(capsys, option, value, found):
    assert main(["generate", "/nowhere", f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {option}: ")
    assert f"found: {found}\n" in said


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--launcher=local", "--as-planned"), "--as-planned and --launcher"),
        (("--devices=2", "--launcher=local"), "--devices and --launcher"),
        (("--messages=a.json", "--prompt=a"), "--messages"),
        (("--messages=a.json",), "--messages a.json"),
        (("--chat-template-kwargs={}",), "--chat-template-kwargs"),
        (("--chat", "--chat-template-kwargs={"), "--chat-template-kwargs"),
        (("--chat", '--chat-template-kwargs={"tools": []}'), "--chat-template-kwargs"),
    ],
)
def test_options_that_exclude_each_other_are_refused(capsys, options, where):
    assert main(["generate", "/nowhere", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {where}: ")


@pytest.mark.parametrize(
    ("count", "problem"), [(0, "must be devices"), (99, "must be devices"), (3, "cannot share")]
)
def test_devices_that_cannot_have_a_model_are_refused(count, problem):
    with pytest.raises(ConfigError, match=f"--devices: {problem}"):
        decoder.on_devices(make_model(), count)
