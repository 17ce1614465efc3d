"""`AutoTokenizer` on folders; run by a Python that has some version of `transformers`.

It reads a list from standard input, [{"folder", "texts", "dialogues"}, ...], and writes another.
"""

import importlib
import json
import sys
from typing import Any


def answer(folder: str, texts: list[str], dialogues: list[list[dict[str, str]]]) -> dict[str, Any]:
    """The tokens of texts and dialogues, and what else an export has to keep."""
    transformers = importlib.import_module("transformers")  # pytest looks for doctests here
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    has_template = tokenizer.chat_template is not None
    whole: list[dict[str, Any]] = []
    for dialogue in dialogues if has_template else ():
        template = str(tokenizer.chat_template)
        mask = {"return_assistant_tokens_mask": "generation %}" in template}
        found = tokenizer.apply_chat_template(dialogue, return_dict=True, tokenize=True, **mask)
        whole.append(
            {
                "text": tokenizer.apply_chat_template(dialogue, tokenize=False),
                "prompt": tokenizer.apply_chat_template(
                    dialogue[:1], tokenize=False, add_generation_prompt=True
                ),
                "tokens": list(found["input_ids"]),
                "counts": found.get("assistant_masks"),
            }
        )
    encoded = tokenizer(texts)
    return {
        "class": type(tokenizer).__name__,
        "names": sorted(encoded.keys()),
        "tokens": encoded["input_ids"],
        "decoded": [
            tokenizer.decode(tokens, skip_special_tokens=True) for tokens in encoded["input_ids"]
        ],
        "eos_token_id": tokenizer.eos_token_id,
        "dialogues": whole,
        "ends": transformers.GenerationConfig.from_pretrained(folder).eos_token_id,
    }


if __name__ == "__main__":
    json.dump([answer(**question) for question in json.load(sys.stdin)], sys.stdout)
