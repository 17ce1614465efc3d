"""Tokenizers of each library: what a path names, documents, text and back, and mistakes."""

import base64
import codecs
import gzip
import json
import shutil
import sys
import types
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
import tiktoken
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet
from sentencepiece import sentencepiece_model_pb2

from holmesjax import job_files
from holmesjax.config import DataConfig
from holmesjax.data import (
    corpus_files,
    text,
    tokenizer_conversions,
    tokenizer_files,
    tokenizer_paths,
    tokenizer_training,
)
from holmesjax.data.byte_tokenizer import ByteTokenizer
from holmesjax.errors import ConfigError, DataError
from launch.__main__ import main
from tests.data.trained_tokenizers import TEXTS, write_bpe, write_corpus

END = tokenizer_training.END
MOVED = ("XLMRoberta", "MBart", "Nllb", "T5", "XLNet", "ChatGLM")


def write_ranks(path):
    """A tiktoken file: all bytes, and two pairs."""
    tokens = [*(bytes([i]) for i in range(256)), b"  ", b"de"]
    lines = [f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens)]
    path.write_text("".join(lines))
    path.with_name(f"{path.name}.json").write_text(beside(r"\w+|\s+|."))


def beside(pattern, **specials):
    """The text of the file that stands beside a tiktoken file."""
    return json.dumps({"pattern": pattern, "special_tokens": {END: 260, **specials}, "end": END})


def write_sentencepiece(folder, path):
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(map(str, sorted(folder.glob("*.txt")))),
        model_prefix=str(path.with_suffix("")),
        vocab_size=300,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One tokenizer of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    folder = write_corpus(root / "corpus")
    (root / "bpe").mkdir()
    write_bpe(folder, root / "bpe")
    write_bpe(folder, root / "alone.json")
    write_ranks(root / "ranks.tiktoken")
    write_sentencepiece(folder, root / "pieces.model")
    return root


KINDS = {
    "bpe": "tokenizers",
    "alone.json": "tokenizers",
    "ranks.tiktoken": "tiktoken",
    "pieces.model": "sentencepiece",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_text_comes_back_whole_and_in_pieces(paths, name, tmp_path):
    """Documents have their end mark; a special token in a text is text; a copy is the same."""
    tokenizer_paths.copy(paths / name, tmp_path / "copy")
    found = tokenizer_paths.find(tmp_path / "copy")
    assert found.kind == KINDS[name]
    assert found.identity == tokenizer_paths.find(paths / name).identity
    for copied, source in tokenizer_paths.find(paths / name).files.items():
        assert (tmp_path / "copy" / copied).read_bytes() == source.read_bytes()
    tokenizer = tokenizer_files.load(tmp_path / "copy")
    documents = tokenizer.documents(TEXTS)
    for tokens, words in zip(documents, TEXTS, strict=True):
        assert tokens.dtype == np.int32
        assert tokens[-1] == tokenizer.end == tokenizer.ends[0]
        assert np.count_nonzero(tokens == tokenizer.end) == 1
        assert tokens.max() < tokenizer.num_tokens
        np.testing.assert_array_equal(tokenizer.encode(words), tokens[:-1])
        for cut in (0, len(tokens) // 2):
            known, new = tokens[:cut].tolist(), tokens[cut:].tolist()
            stream = tokenizer.decode_stream(known)
            said = "".join([*map(stream.push, new), stream.rest()])
            assert tokenizer.decode(known) + said == words
    assert len(tokenizer.encode("")) == 1  # a text has something to begin with


def test_windows_are_the_documents_one_after_the_other(paths):
    """Against the documents themselves; each begins where its first token is."""
    config = DataConfig(
        corpus=str(paths / "corpus"), tokenizer=str(paths / "bpe"), validation_fraction=0.0
    )
    tokenizer = tokenizer_files.load(paths / "bpe")
    texts = [file.path.read_text() for file in corpus_files.named_files(config).files]
    documents = tokenizer.documents(texts)
    want = np.concatenate(documents)
    begins = np.zeros(len(want), bool)
    begins[np.cumsum([0, *map(len, documents)])[:-1]] = True
    train = text.read(config, 7).train
    assert len(train) == (len(want) - 1) // 7 > 3
    for i, item in enumerate(train):
        np.testing.assert_array_equal(item.tokens, want[7 * i : 7 * i + 8])
        np.testing.assert_array_equal(item.begins, begins[7 * i : 7 * i + 8])
        if i == len(train) - 1:
            break


def test_training_is_deterministic_and_the_settings_it_prints_are_right(paths, tmp_path, capsys):
    out = tmp_path / "again"
    assert main(["tokenizer", str(paths / "corpus"), "--vocab", "300", "--out", str(out)]) == 0
    assert f"data.tokenizer={out} model.vocab_size=384" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (paths / "bpe" / name).read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (paths / "alone.json").read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "hf", "a.array_record"])
def test_training_reads_the_formats_that_tokenize_reads(paths, tmp_path, name, capsys):
    """The same documents give the same file as text does, byte for byte."""
    path = tmp_path / name
    lines = "".join(json.dumps({"own": document}) + "\n" for document in TEXTS).encode()
    match name:
        case "a.jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "a.jsonl.zst":
            path.write_bytes(zstandard.ZstdCompressor().compress(lines))
        case "a.parquet":
            parquet.write_table(pa.table({"own": TEXTS}), path, row_group_size=2)
        case "hf":
            datasets.Dataset.from_dict({"own": TEXTS}).save_to_disk(path)
        case "a.array_record":
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for document in TEXTS:
                writer.write(document.encode())
            writer.close()
    command = ["tokenizer", str(path), "--vocab", "300", "--column", "own", "--out"]
    assert main([*command, str(tmp_path / "bpe.json")]) == 0
    assert (tmp_path / "bpe.json").read_bytes() == (paths / "alone.json").read_bytes()
    assert f"{sum(len(document.encode()) for document in TEXTS):,} bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", b'{"text": [1, 2, 3]}\n', "byte 0: is tokens already"),
        ("a.jsonl", b'{"own": "x"}\n', "has no text in a field `text`"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "found: text: null"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "byte 14: is no JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9],
            "is no whole gzip file",
        ),
        ("a.parquet", b"PAR1", "is no whole parquet file"),
        ("a.txt", b"caf\xe9", "is no UTF-8"),
    ],
)
def test_documents_that_train_no_tokenizer_are_refused_by_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    config = DataConfig(corpus=str(tmp_path / name))
    with pytest.raises(DataError) as error:
        tokenizer_training.train(config, 300, tmp_path / "t.json", lambda _: None, is_shown=False)
    assert f"{tmp_path / name}" in error.value.where
    assert said in str(error.value)
    assert not (tmp_path / "t.json").exists()


def damaged(paths, tmp_path, name, *, drop=(), **texts):
    """A copy of a tokenizer without some files, and with others in their place."""
    folder = tmp_path / "damaged"
    tokenizer_paths.copy(paths / name, folder)
    for file in drop:
        (folder / file).unlink()
    for file, content in texts.items():
        (folder / file.replace("__", ".")).write_text(content)
    return folder


def test_an_end_that_only_files_of_a_model_say_is_compared(paths, tmp_path):
    """Processes of a job compare it, and a run that goes on is refused another one."""
    shutil.copytree(paths / "bpe", tmp_path / "own")
    (tmp_path / "own" / "tokenizer_config.json").unlink()
    said = tmp_path / "own" / "generation_config.json"
    job = types.SimpleNamespace(run_dir=tmp_path / "run")
    job.config = types.SimpleNamespace(data=DataConfig(corpus="x", tokenizer=str(tmp_path / "own")))
    found = set()
    for number in (5, 6):
        said.write_text(json.dumps({"eos_token_id": number}))
        assert tokenizer_files.load(tmp_path / "own").end == number
        found.add(tokenizer_files.identity_with_end(str(tmp_path / "own")))
        if number == 5:
            job_files._save_tokenizer(job, 0)
    assert len(found) == 2
    with pytest.raises(DataError, match=r"before: .*eos_token_id \[5\]\n  found: .*\[6\]"):
        job_files._save_tokenizer(job, 3)
    job_files._save_tokenizer(job, 0)  # nothing is trained yet
    said.unlink()
    with pytest.raises(DataError, match=r"before: .*\[6\]\n  found: none in "):
        job_files._save_tokenizer(job, 3)
    (tmp_path / "run" / "tokenizer" / said.name).unlink()
    said.write_text(json.dumps({"eos_token_id": 5}))
    with pytest.raises(DataError, match=r"before: none\n  found: .*\[5\] in "):
        job_files._save_tokenizer(job, 3)
    whole = str(paths / "bpe")
    assert tokenizer_files.identity_with_end(whole) == tokenizer_files.identity(whole)


def test_mistakes_say_where_and_what(paths, tmp_path):
    bpe = json.loads((paths / "alone.json").read_text())
    more = {**bpe["added_tokens"][0], "id": 300, "content": "<|other|>"}
    two = json.dumps({**bpe, "added_tokens": [*bpe["added_tokens"], more]})
    (tmp_path / "empty").mkdir()
    around = {"id": END, "ids": [9], "tokens": [END]}
    pieces = [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
    begun = json.dumps({**bpe, "post_processor": {**template, "special_tokens": {END: around}}})
    gap = json.dumps({**bpe, "added_tokens": [*bpe["added_tokens"], {**more, "id": 900}]})
    other = {"eos_token": END, "added_tokens_decoder": {"7": {"content": END, "special": True}}}
    vocab = {**bpe["model"]["vocab"], "zz": 7}
    shared = json.dumps({**bpe, "model": {**bpe["model"], "vocab": vocab}})
    rows = [
        (("bpe", {"tokenizer__json": shared}), "gives two pieces one id"),
        (("bpe", {"tokenizer__json": begun}), f"tokenizer.json: gives {END} another id"),
        (("bpe", {"tokenizer__json": gap}), "tokenizer.json: gives <|other|> another id"),
        (("bpe", {"tokenizer_config__json": json.dumps(other)}), "config.json: gives"),
        (tmp_path / "missing", "data.tokenizer: cannot be read"),
        (tmp_path / "empty", "holds no tokenizer"),
        (("bpe", {"tokenizer__json": '{"model": 3}'}), "is no tokenizer that tokenizers reads"),
        (("bpe", {"tokenizer_config__json": "[]"}), "is no JSON object"),
        (("bpe", {"tokenizer_config__json": "{"}), "is no JSON"),
        (("bpe", {"tokenizer_config__json": '{"eos_token": "</s>"}'}), "names an eos_token"),
        (("bpe", {"tokenizer_config__json": "{}", "tokenizer__json": two}), "which token ends"),
        (("bpe", {"generation_config__json": '{"eos_token_id": ["x"]}'}), "is no number"),
        (
            ("bpe", {"tokenizer_config__json": "{}", "config__json": '{"eos_token_id": 900}'}),
            "beside",
        ),
        (("bpe", {"added_tokens__json": '{"<|fim|>": "x", "<|x|>": 3}'}), "with what is no mark"),
        (
            ("bpe", {"tokenizer_config__json": '{"eos_token": 3}'}),
            "a special token that is no text",
        ),
        (("ranks.tiktoken", {"drop": ["tokenizer.tiktoken.json"]}), "and neither pattern"),
        (("ranks.tiktoken", {"tokenizer__tiktoken__json": "{}"}), "needs a pattern"),
        (("ranks.tiktoken", {"tokenizer__tiktoken": "IQ== 0\n"}), "255 of 256 bytes have no rank"),
        (("ranks.tiktoken", {"tokenizer__tiktoken": "IQ== 0\nIQ== 1\n"}), "an earlier line has"),
        (("ranks.tiktoken", {"tokenizer__tiktoken": "IQ== 0\nIg== 0\n"}), "an earlier line has"),
        (
            ("ranks.tiktoken", {"tokenizer__tiktoken": "IQ== 0\nI!Q== 1\n"}),
            "line 2: is not a piece",
        ),
        (("ranks.tiktoken", {"tokenizer__tiktoken": "IQ== 0 1\n"}), "line 1: is not a piece"),
        (("ranks.tiktoken", {"tokenizer__tiktoken__json": beside("")}), "needs a pattern"),
        (("ranks.tiktoken", {"tokenizer__tiktoken__json": beside("[")}), "that tiktoken reads"),
        (("ranks.tiktoken", {"tokenizer__tiktoken__json": beside("[[:alpha:]]+")}), "of ASCII"),
        (("ranks.tiktoken", {"tokenizer__tiktoken__json": beside(r"\w*")}), "that tiktoken reads"),
        (
            ("ranks.tiktoken", {"tokenizer__tiktoken__json": beside(".", a=257)}),
            "a number that is no rank",
        ),
        (
            ("ranks.tiktoken", {"tokenizer__tiktoken__json": beside(".", a=True)}),
            "a number that is no rank",
        ),
        (("pieces.model", {"tokenizer__model": "no model"}), "that sentencepiece reads"),
        (("bpe", {"tokenizer__json": '{"config": {}, "vocab": []}'}), "is no tokenizer.json\n"),
    ]
    for what, problem in rows:
        if isinstance(what, Path):
            path = what
        else:
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            path = damaged(paths, tmp_path, what[0], **what[1])
        with pytest.raises(DataError) as error:
            tokenizer_files.load(path)
        assert problem in str(error.value), (what, str(error.value))


def test_a_class_that_moves_the_ids_of_sentencepiece_is_refused(paths, tmp_path):
    """That of XLM-RoBERTa has the ids of the file and one; the code of a folder may do anything."""
    shutil.copy(paths / "pieces.model", tmp_path / "tokenizer.model")
    known = tokenizer_files.load(tmp_path).encode("a b").tolist()
    of_t5 = {"config.json": '{"model_type": "t5"}', "tokenizer_config.json": "{}"}
    rows = [
        *({"tokenizer_config.json": f'{{"tokenizer_class": "{name}Tokenizer"}}'} for name in MOVED),
        of_t5,
    ]
    for row in rows:
        for name, content in row.items():
            (tmp_path / name).write_text(content)
        with pytest.raises(
            DataError, match=r"may have other ids than tokenizer.model\n.*Tokenizer"
        ):
            tokenizer_files.load(tmp_path)
        assert tokenizer_files.load(tmp_path / "tokenizer.model").encode("a b").tolist() == known
    shutil.copytree(tmp_path, copy := tmp_path.with_name("run") / "tokenizer")
    (copy.parent / "metrics.jsonl").touch()
    with pytest.raises(DataError, match=r"; an earlier version that began the run still takes it"):
        tokenizer_files.load(copy)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    for name in ("", '"tokenizer_class": "LlamaTokenizerFast"'):
        (tmp_path / "tokenizer_config.json").write_text(f"{{{name}}}")
        assert tokenizer_files.load(tmp_path).encode("a b").tolist() == known


def test_an_unused_piece_of_sentencepiece_is_refused(paths, tmp_path):
    """Only its own library cuts texts so; in six texts it may not show."""
    model = vars(sentencepiece_model_pb2)["ModelProto"]()
    model.ParseFromString((paths / "pieces.model").read_bytes())
    next(piece for piece in reversed(model.pieces) if piece.type == 1).type = 5
    (tmp_path / "a.model").write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match=r"a.model: has a piece that is unused.*\n.*of type 5"):
        tokenizer_files.load(tmp_path / "a.model")


def test_a_file_of_ranks_is_that_of_its_lines(tmp_path):
    """Whatever ends or begins them; also where the path has held others before."""
    path = tmp_path / "ranks"
    write_ranks(path)
    lines = path.read_bytes()
    right = tokenizer_files.load(path).encode("def f(x):\r\n    ").tolist()
    spellings = {
        "CRLF": lines.replace(b"\n", b"\r\n"),
        "no last newline": lines.rstrip(),
        "spaces behind": lines.replace(b"\n", b"  \n"),
        "tabs": lines.replace(b" ", b"\t"),
        "a mark": codecs.BOM_UTF8 + lines,
        "empty lines": b"\n \n" + lines.replace(b"\n", b"\n\n"),
    }
    for name, content in spellings.items():
        path.write_bytes(content)
        assert tokenizer_files.load(path).encode("def f(x):\r\n    ").tolist() == right, name
    beside_it = path.with_name(f"{path.name}.json")
    beside_it.write_text(beside(r"\w+|\s+|.", other=260))  # as two of OpenAI's o200k_harmony
    both = tokenizer_files.load(path)
    assert both.encode("def f(x):\r\n    ").tolist() == right
    path.write_bytes(lines.replace(base64.b64encode(b"de") + b" 257", b""))
    assert tokenizer_files.load(path).encode("def").tolist() == [*b"def"]


def test_a_corpus_that_is_no_text_and_a_vocabulary_without_room_are_refused(paths, tmp_path):
    folder = write_corpus(tmp_path / "corpus")
    (folder / "3.txt").write_bytes(b"caf\xe9")
    config = DataConfig(corpus=str(folder), tokenizer=str(paths / "bpe"))
    with pytest.raises(DataError, match=r"3\.txt: is no UTF-8"):
        text.read(config, 7)
    with pytest.raises(ConfigError, match="--vocab: must be from 257"):
        tokenizer_training.train(config, 256, tmp_path, print, is_shown=False)


def test_a_byte_tokenizer_needs_no_file():
    assert isinstance(text.tokenizer(DataConfig(corpus="x")), ByteTokenizer)
    assert tokenizer_files.identity("bytes") == "bytes"


def test_a_folder_with_the_name_of_the_library_is_not_taken_for_it(paths, monkeypatch):
    """Without the library, Python takes a folder `tokenizers` for a package."""
    monkeypatch.setitem(sys.modules, "tokenizers", types.ModuleType("tokenizers"))
    for needs_it in (lambda: tokenizer_files.load(paths / "bpe"), tokenizer_conversions.of_bytes):
        with pytest.raises(DataError, match="needs the package tokenizers"):
            needs_it()


def test_the_letters_of_a_word_are_those_of_tiktoken(tmp_path):
    pairs = ("\u0645\u200c", "a\u00b2", "b\u200d")
    lines = {bytes([i]): 0 for i in range(256)}
    for word in map(str.encode, pairs):
        lines |= {word[:size]: 0 for size in range(2, len(word) + 1)}
    ranks = {piece: number for number, piece in enumerate(lines)}
    rows = [f"{base64.b64encode(piece).decode()} {n}" for piece, n in ranks.items()]
    (tmp_path / "words.tiktoken").write_text("\n".join(rows))
    about = {"pattern": r"\w+|\W", "special_tokens": {"<end>": len(ranks)}, "end": "<end>"}
    (tmp_path / "words.tiktoken.json").write_text(json.dumps(about))
    own = tiktoken.Encoding(
        "words", pat_str=about["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    text = " ".join(pairs) + "\u00bd1"
    found = tokenizer_files.load(tmp_path / "words.tiktoken").encode(text)
    assert found.tolist() == own.encode_ordinary(text)
