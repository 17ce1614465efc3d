"""The sources of data that a run may name. Does not import JAX.

`data.sources` has the protocol of what their modules give.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """The facts about a source that are known before it is read."""

    module: str  # a `data.sources.SourceModule`
    # The number of different tokens, of the section `data` of a run: a `DataConfig`.
    num_tokens: Callable[[Any], int]
    tokens_are: str  # for messages
    has_tokens: bool = True  # its items are sequences of tokens, otherwise arrays by name
    reads_dtype: bool = False  # whether `data.dtype` says the type of its numbers
    packs: bool = False  # whether its documents are packed, whatever `data.packing` says


SOURCES: dict[str, DataSource] = {
    "text": DataSource(
        module="holmesjax.data.text",
        # A tokenizer's file says how many tokens there are; it is not read yet.
        num_tokens=lambda config: 256 if config.tokenizer == "bytes" else 1,
        tokens_are="bytes",
    ),
    "tokens": DataSource(
        module="holmesjax.data.tokens",
        num_tokens=lambda config: 1,  # the files say it; they are not read yet
        tokens_are="numbers",
        reads_dtype=True,
    ),
    "chat": DataSource(
        module="holmesjax.data.chat",
        num_tokens=lambda config: 256 if config.tokenizer == "bytes" else 1,
        tokens_are="bytes",
        packs=True,
    ),
    "arrays": DataSource(
        module="holmesjax.data.arrays",
        num_tokens=lambda config: 1,
        tokens_are="numbers",
        has_tokens=False,
    ),
}
