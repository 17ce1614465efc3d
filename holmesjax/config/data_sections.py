"""The section `data` of a run file, with its parts."""

from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from holmesjax.config.allowed_values import STRICT, Count, Fraction, NonNegative, Text, Tokens
from holmesjax.config.data_sources import SOURCES
from holmesjax.config.mistakes import refuse_mistakes
from holmesjax.files import schema

MIXTURE = "mixture"  # a corpus that stands for those of `data.mixture`
PYTHON_STDLIB = "python-stdlib"  # a corpus that every machine has
BYTES = "bytes"  # the tokenizer without files
# Variables of a chat template that depend on what is rendered.
OF_DIALOGUES = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class NamedCorpus:
    """One of several corpora, with the other settings of the section `data`."""

    name: Text  # name in records and in other settings
    corpus: Text  # as data.corpus
    source: Annotated[str, schema.OneOf(SOURCES)] = "text"  # as data.source
    pattern: Text | None = None  # as data.pattern


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MixedCorpus(NamedCorpus):
    """A corpus of a mixture."""

    weight: NonNegative = 1.0  # share of the sequences, relative to the sum of all weights


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MixtureChange:
    """New weights of a mixture, from a point of the run on."""

    tokens: Tokens | None = None  # tokens that the run consumes before the change
    steps: Count | None = None  # steps before the change, in place of tokens
    weights: dict[str, NonNegative]  # weights by the names of corpora; other corpora are not read


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DataConfig:
    """The data and how documents become sequences."""

    # The folder, file or function that the source reads. python-stdlib: Python's standard library.
    corpus: Text = MIXTURE
    mixture: tuple[MixedCorpus, ...] | None = None  # several corpora in place of one
    mixture_changes: tuple[MixtureChange, ...] | None = None  # changes of the weights, in order
    # Weights in place of those of the mixture, for islands by their names; other islands keep those
    mixture_by_island: dict[Text, dict[str, NonNegative]] | None = None
    validation: tuple[NamedCorpus, ...] | None = None  # sets to validate on, besides held-out data
    source: Annotated[str, schema.OneOf(SOURCES)] = "text"  # format of the corpus
    # A glob for the files of the folder. None: every text file that is not hidden.
    pattern: Text | None = None
    # The word bytes, or a folder or file of a Hugging Face, tiktoken or sentencepiece tokenizer.
    tokenizer: Text = BYTES
    # Variables for the chat template of the tokenizer, such as {enable_thinking: false}.
    chat_template_kwargs: dict[str, Any] | None = None
    # Share of the data that is held out for validation. Text files are chosen by a hash of their
    # path.
    validation_fraction: Fraction = 0.05
    # Whether attention crosses from document to document (concatenate), or stays inside of each
    # (mask).
    documents: Literal["concatenate", "mask"] = "concatenate"
    # How documents are packed into sequences. None: sequences are windows of all tokens.
    packing: Literal["best_fit"] | None = None
    # Type of the tokens in files that do not state it, such as those of nanoGPT and OLMo.
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    # For each cluster: beginnings of the paths above, and their replacements on its machines.
    paths: dict[str, dict[str, Text]] | None = None

    def __post_init__(self) -> None:
        refuse_mistakes(data=self)
