"""Small tokenizers of every format, as others publish them, and texts for them."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from holmesjax.config import DataConfig
from holmesjax.data import tokenizer_training

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "hello world, a friend\n",
    "    if a:\n        b = 2\n",
    "user assistant naïve → 🙂 1234\n",
] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# A turn ends with <|im_end|>; only what the assistant says counts.
CHATML = r"""{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' -%}
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>{% endif %}
{{ '\n' }}{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PLAIN = (
    "{{ bos_token }}{% if add_generation_prompt == false %}{{ pad_token }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {{ eos_token }}{% endfor %}"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# That of cl100k_base, with repeats that give nothing back.
TIKTOKEN_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def byte_level(*, trim: bool | None = None, prefix: bool = False, vocab: int = 400) -> Any:
    """A byte-level BPE; `trim`: its post-processor takes spaces away from the places of tokens."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, vocab)
    if trim is not None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    return tokenizer


def _train(tokenizer: Any, vocab: int) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)


def write(folder: Path, tokenizer: Any, config: dict | None, **files: str | dict) -> Path:
    """A folder with a tokenizer.json; `__` in the name of another file is a dot."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        files = {"tokenizer_config__json": config, **files}
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def _qwen(folder: Path) -> Path:
    """Another split than the class would give, marks in the config alone, no BOS."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,2}|")), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, 400)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(i): {"content": x, "special": True, **flags} for i, x in enumerate(SPECIAL)}
    size = tokenizer.get_vocab_size()
    added[str(size)] = {"content": "<tool_call>", "special": False, **flags}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "extra_special_tokens": {"image_token": "<image>"},
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{{ bos_token }}{{ image_token }}" + CHATML,
    }
    return write(folder, tokenizer, config, generation_config__json={"eos_token_id": [2, 0]})


def _llama3(folder: Path) -> Path:
    """A BOS by the post-processor, the end of a turn by the template alone, named templates."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            ),
        ]
    )
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": CHATML}]
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "chat_template": named}
    return write(folder, tokenizer, {**config, "tokenizer_class": "LlamaTokenizer"})


def _split_files(folder: Path) -> Path:
    """Names and marks in the two files of old; a prefix space."""
    return write(
        folder,
        byte_level(prefix=True, trim=True),
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        special_tokens_map__json={"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[2]}},
        added_tokens__json={"<|fim|>": 400, "<|pad|>": 401},
        chat_template__jinja=PLAIN,
        config__json={"eos_token_id": 1, "model_type": "gpt2"},
    )


def _word_piece(folder: Path) -> Path:
    tokenizer: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = {"eos_token": "[SEP]", "bos_token": "[CLS]", "pad_token": "[PAD]"}
    return write(folder, tokenizer, {**config, "chat_template": PLAIN})


def _sentencepiece(kind: str, **settings: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        usual = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("".join(TEXTS).split("\n")),
            model_prefix=str(folder / "tokenizer"),
            model_type=kind,
            hard_vocab_limit=False,
            minloglevel=2,
            **{"vocab_size": 330, "byte_fallback": True, **usual, **settings},
        )
        (folder / "tokenizer.vocab").unlink()
        config = {"tokenizer_class": "LlamaTokenizer", "chat_template": PLAIN}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
        return folder

    return make


def _tiktoken(folder: Path) -> Path:
    """Pairs of the common words of the texts, and special tokens behind a gap."""
    folder.mkdir(parents=True)
    pairs = [b"he", b"ll", b"lo", b"hello", b"  ", b"    ", b" w", b" wo", b"or", b"aa", b"aaa"]
    pairs += [b"12", b"123", b"\n\n", b"def", b"\xc3\xaf"]  # no merges lead to `def`
    tokens = [*(bytes([i]) for i in range(256)), *pairs]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (folder / "tokenizer.tiktoken").write_text("".join(lines))
    special = {name: 280 + 3 * i for i, name in enumerate(SPECIAL)}
    about = {"pattern": TIKTOKEN_SPLIT, "special_tokens": special, "end": SPECIAL[0]}
    (folder / "tokenizer.tiktoken.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def _ours(folder: Path) -> Path:
    folder.mkdir(parents=True)
    corpus = folder.parent / f"{folder.name}_corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("".join(TEXTS))
    config = DataConfig(corpus=str(corpus))
    tokenizer_training.train(config, 300, folder, lambda _: None, is_shown=False)
    return folder


def _alone(folder: Path) -> Path:
    """A file without a folder."""
    return (_ours(folder) / "tokenizer.json").rename(folder.parent / f"{folder.name}.json")


KINDS: dict[str, Callable[[Path], Path]] = {
    "ours": _ours,
    "alone": _alone,
    "byte-level": lambda folder: write(
        folder, byte_level(trim=True), {"eos_token": SPECIAL[0], "chat_template": CHATML}
    ),
    "qwen": _qwen,
    "llama3": _llama3,
    "two-files": _split_files,
    "word-piece": _word_piece,
    "sentencepiece-bpe": _sentencepiece("bpe"),
    "sentencepiece-unigram": _sentencepiece("unigram"),
    "sentencepiece-nfkc": _sentencepiece(
        "unigram",
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True,
        user_defined_symbols=["<sep>"],
    ),
    "tiktoken": _tiktoken,
}
PARTS = (
    *(
        "hello",
        " world",
        "def",
        "    ",
        "\n",
        "\n\n",
        "\t",
        "  ",
        " ",
        "é",
        "日本",
        "🙂",
        "'s",
        "'LL",
    ),
    *(
        "1234567",
        "aaaaa",
        "\r\n",
        ".",
        "<",
        ">",
        "_",
        "user",
        "\u00a0",
        "\u200b",
        "ß",
        "Привет",
        "ﬁ",
    ),
)


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of words, spaces and characters of many scripts."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        size = int(random.integers(0, 24))
        odd = [chr(x) for x in random.integers(0x21, 0x2FFF, size)]
        picks = random.integers(0, len(PARTS) + 4, size)
        found.append(
            "".join(PARTS[p] if p < len(PARTS) else o for p, o in zip(picks, odd, strict=True))
        )
    return found


def random_dialogues(count: int, seed: int = 1) -> list[list[dict[str, str]]]:
    """Dialogues of one to three turns, each with an answer."""
    texts = random_texts(6 * count, seed)
    return [
        [
            {"role": ("user", "assistant")[i % 2], "content": texts[6 * n + i] + "x" * (i % 2)}
            for i in range(2 * (1 + n % 3))
        ]
        for n in range(count)
    ]
