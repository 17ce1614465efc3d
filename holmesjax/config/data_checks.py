"""Rules of corpora, mixtures and documents."""

import json
from collections.abc import Iterator, Mapping, Sequence

from holmesjax.config.data_sections import (
    BYTES,
    MIXTURE,
    OF_DIALOGUES,
    PYTHON_STDLIB,
    DataConfig,
)
from holmesjax.config.data_sources import SOURCES
from holmesjax.config.mistakes import wrong
from holmesjax.config.model_sections import ModelConfig
from holmesjax.config.training_sections import TrainConfig
from holmesjax.errors import ConfigError
from holmesjax.files import schema


def corpus_or_mixture(data: DataConfig) -> Iterator[ConfigError]:
    if data.mixture is None:
        if data.corpus == MIXTURE:
            fix = "add `corpus:` to section 'data', or `mixture:`, a list of corpora"
            yield wrong("data.corpus", "is missing", "nothing", fix)
        for name in ("mixture_changes", "mixture_by_island"):
            if (value := getattr(data, name)) is not None:
                fix = "leave it out, or name the corpora in data.mixture"
                found = f"{len(value)} changes" if name == "mixture_changes" else value
                yield wrong(f"data.{name}", "is only for a mixture", found, fix)
        return
    if data.corpus != MIXTURE:
        problem, fix = "must be left out beside data.mixture", "add it to the list of the mixture"
        yield wrong("data.corpus", problem, data.corpus, fix)
    for name, default in (("source", "text"), ("pattern", None)):
        if (value := getattr(data, name)) != default:
            fix = f"write {name}: {value} below each corpus of the mixture that has it"
            yield wrong(f"data.{name}", "must be left out beside data.mixture", value, fix)


def names_are_of_one(data: DataConfig) -> Iterator[ConfigError]:
    """No two corpora have the same name, and each corpus can be read as it is written."""
    seen = {"corpus"} if data.mixture is None else set()
    for setting, entries in (("mixture", data.mixture), ("validation", data.validation)):
        if entries == ():
            fix = "name a corpus, or leave it out"
            yield wrong(f"data.{setting}", "must not be empty", "[]", fix)
        for number, entry in enumerate(entries or ()):
            where = f"data.{setting}[{number}]"
            if entry.name in seen:
                fix = "give each corpus and each validation set a name of its own"
                yield wrong(f"{where}.name", "must be of one corpus alone", entry.name, fix)
            seen.add(entry.name)
            if entry.corpus.startswith("~"):
                problem = "must be a path without ~, which only a shell replaces"
                yield wrong(f"{where}.corpus", problem, entry.corpus, "write the whole path")
            if not SOURCES[entry.source].has_tokens:
                fix = "use files of tokens or text, or give all arrays in data.corpus"
                problem = "cannot be one of several: arrays are no sequences of tokens"
                yield wrong(f"{where}.source", problem, entry.source, fix)
            if entry.corpus == PYTHON_STDLIB and entry.pattern is not None:
                problem = f"is only for a folder: {PYTHON_STDLIB} has its own files"
                yield wrong(f"{where}.pattern", problem, entry.pattern, "remove it")


def weights_are_of_the_mixture(data: DataConfig) -> Iterator[ConfigError]:
    if not data.mixture:
        return
    names = [entry.name for entry in data.mixture]
    if not any(entry.weight for entry in data.mixture):
        problem, fix = "must have a weight above 0", "give one corpus a weight"
        yield wrong("data.mixture", problem, "all weights are 0", fix)
    before: tuple[str, int] | None = None
    for number, change in enumerate(data.mixture_changes or ()):
        where = f"data.mixture_changes[{number}]"
        points = {
            unit: n for unit in ("tokens", "steps") if (n := getattr(change, unit)) is not None
        }
        if len(points) != 1:
            fix = "use one of the two, the same for all changes"
            yield wrong(where, "must have either tokens or steps", points or "nothing", fix)
            return
        [(unit, point)] = points.items()
        last_unit, last_point = before or (unit, 0)
        if unit != last_unit:
            problem = f"must be in {last_unit}, as the change before it is"
            yield wrong(f"{where}.{unit}", problem, point, f"use {last_unit} for all changes")
            return
        if point <= last_point:
            problem = "must be after the change before it"
            fix = f"use more than {last_point:,}, and write the changes in their order"
            yield wrong(f"{where}.{unit}", problem, point, fix)
        before = unit, point
        yield from _are_weights(f"{where}.weights", change.weights, names)
    if data.mixture_by_island is not None and data.mixture_changes is not None:
        problem, fix = "cannot be set beside data.mixture_by_island", "leave one of the two out"
        found = f"{len(data.mixture_changes)} changes"
        yield wrong("data.mixture_changes", problem, found, fix)
    for island, weights in (data.mixture_by_island or {}).items():
        yield from _are_weights(f"data.mixture_by_island.{island}", weights, names)


def _are_weights(
    where: str, weights: Mapping[str, float], names: Sequence[str]
) -> Iterator[ConfigError]:
    for name in weights:
        if name not in names:
            yield wrong(where, "names no corpus of the mixture", name, schema.near(name, names))
    if not any(weights.values()):
        problem, fix = "must have a weight above 0", "give one corpus a weight"
        yield wrong(where, problem, dict(weights), fix)


def variables_are_for_templates(data: DataConfig) -> Iterator[ConfigError]:
    where, said = "data.chat_template_kwargs", data.chat_template_kwargs
    if said is None:
        return
    if data.tokenizer == BYTES:
        fix = "leave it out, or name a data.tokenizer that has a template"
        yield wrong(where, "is for a chat template, and bytes have none", said, fix)
    for name in sorted({*said} & {*OF_DIALOGUES}):
        problem = "is of each dialogue, and no variable for all"
        yield wrong(f"{where}.{name}", problem, said[name], "leave it out")
    try:
        json.dumps(said, allow_nan=False)
    except (TypeError, ValueError) as error:
        fix = "write texts, numbers, true, false, null, lists or names with values"
        yield wrong(where, "has a value that JSON does not have", error, fix)


def packs(data: DataConfig) -> bool:
    """Whether documents are packed into rows: by `data.packing`, or by the source."""
    named = [*(data.mixture or (data,)), *(data.validation or ())]
    return data.packing is not None or any(SOURCES[each.source].packs for each in named)


def packed_documents_are_apart(data: DataConfig) -> Iterator[ConfigError]:
    if packs(data) and data.documents != "mask":
        problem = "must be mask where documents are packed: the documents of a row are unrelated"
        fix = "use mask" + ("" if data.packing is None else ", or no data.packing")
        yield wrong("data.documents", problem, data.documents, fix)
    if data.packing is not None and not SOURCES[data.source].has_tokens:
        problem, fix = "is for documents of tokens, and not for arrays", "leave it out"
        yield wrong("data.packing", problem, data.packing, fix)


def own_models_read_no_documents(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    if model.module is not None and data.documents == "mask":
        problem = "must be concatenate with model.module: built-in attention alone knows documents"
        yield wrong("data.documents", problem, data.documents, "use concatenate")


def vocabulary_holds_tokens(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    named = [SOURCES[each.source] for each in data.mixture or ()] or [SOURCES[data.source]]
    source = max(named, key=lambda own: own.num_tokens(data))
    if model.vocab_size < (least := source.num_tokens(data)):
        problem = f"must be at least {least}: the tokens of the corpus are {source.tokens_are}"
        fix = f"use {least}, or a padded size"
        yield wrong("model.vocab_size", problem, model.vocab_size, fix)


def validation_has_data(train: TrainConfig, data: DataConfig) -> Iterator[ConfigError]:
    if train.eval_every and not data.validation_fraction and not data.validation:
        problem = f"must be more than 0: train.eval_every = {train.eval_every} asks for validation"
        fix = "use 0.05, or set train.eval_every to 0"
        yield wrong("data.validation_fraction", problem, data.validation_fraction, fix)


def pattern_is_for_folders(data: DataConfig) -> Iterator[ConfigError]:
    if data.corpus == PYTHON_STDLIB and data.pattern is not None:
        problem = f"is only for a folder: {PYTHON_STDLIB} has its own files"
        yield wrong("data.pattern", problem, data.pattern, "remove it, or name a data.corpus")
