"""Several corpora as one data source: those of `data.mixture`, and the sets of `data.validation`.

Each corpus is read by the module of its own source, with the other settings of the section `data`.
A mixture takes whole sequences by weight. The validation sets are what each corpus of the mixture
holds out, by the name of the corpus, and those of `data.validation`, which are read whole.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from holmesjax.config import Config, DataConfig, NamedCorpus, OptimizerConfig, ParallelConfig
from holmesjax.config.data_sources import SOURCES
from holmesjax.data import sources
from holmesjax.data.mixing import Schedule, WeightsFrom
from holmesjax.data.sources import (
    HELD_OUT,
    ONE_HELD_OUT,
    ONE_TRAIN,
    ONLY,
    TRAIN,
    WHOLE_SET,
    Mixed,
    Sequences,
    Splits,
    Tokenizer,
    TooSmallError,
    need,
    too_small,
)
from holmesjax.errors import ConfigError, DataError, HolmesError


def tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of all corpora."""
    alone = _alone(config, config.mixture[0]) if config.mixture else _plain(config)
    return sources.module_of(alone).tokenizer(alone)


def read(config: DataConfig, length: int) -> Splits:
    """Reads all corpora. Raises DataError, which names the corpus."""
    found: dict[str, Splits] = {}
    if not config.mixture:
        found[ONLY] = _read(_plain(config), length)
    for entry in config.mixture or ():
        with _naming("mixture", entry):
            found[entry.name] = own = _read(_alone(config, entry), length)
            if not len(own.train):
                raise too_small(ONE_TRAIN, need(1, 1, length, "1 sequence"), found="0 sequences")
    trained = dict(found)
    digests = {
        split if name == ONLY else f"{split} of {name}": digest
        for name, corpus in found.items()
        for split, digest in corpus.digests.items()
    }
    sets = {n: corpus.validation for n, corpus in found.items() if config.validation_fraction}
    for each in config.validation or ():
        with _naming("validation", each):
            found[each.name] = own = _read(_whole(config, each), length)
            sets[each.name] = _sequences(own)
            digests[f"validation set {each.name}"] = own.digests["train"]
    files = {
        f"{name}: {path}": d for name, corpus in found.items() for path, d in corpus.files.items()
    }
    return Splits(
        train=_train(
            config, length, {name: _sequences(corpus) for name, corpus in trained.items()}
        ),
        validation=next(iter(trained.values())).validation,
        place=", ".join(f"{name}: {corpus.place}" for name, corpus in found.items()),
        digests=digests,
        files=dict(sorted(files.items())),
        left_out="; ".join(
            f"{n}: {corpus.left_out}" for n, corpus in found.items() if corpus.left_out
        ),
        sets=sets,
    )


def _train(config: DataConfig, length: int, parts: dict[str, Sequences]) -> Sequences | Mixed:
    if not config.mixture:
        return parts[ONLY]
    first = WeightsFrom(0, {entry.name: entry.weight for entry in config.mixture})
    later = []
    for change in config.mixture_changes or ():
        assert change.tokens is not None, "changes at steps are those of Config.data_by_tokens"
        # A sequence counts with the weights of its first token.
        later.append(WeightsFrom(-(-change.tokens // length), change.weights))
    by_island = {
        island: Schedule(list(parts), [WeightsFrom(0, weights)])
        for island, weights in (config.mixture_by_island or {}).items()
    }
    schedule = Schedule(list(parts), [first, *later])
    return Mixed(parts=parts, schedule=schedule, by_island=by_island)


def look(config: Config) -> None:
    """Looks at each corpus. Raises HolmesError, which names the corpus."""
    data, train = config.data, config.train
    num_batches = train.eval_batches if train.eval_every else 0
    if not data.mixture:
        held_out = num_batches if data.validation_fraction else 0
        _look(config, _plain(data), train.global_batch, held_out)
    for entry in data.mixture or ():
        with _naming("mixture", entry):
            _look_at_part(config, entry, num_batches * train.global_batch)
    for each in data.validation or ():
        with _naming("validation", each):
            try:
                _look(config, _whole(data, each), max(num_batches * train.global_batch, 1), 0)
            except TooSmallError as error:
                raise too_small(WHOLE_SET, error.needs, found=error.found) from None


def _look_at_part(config: Config, entry: NamedCorpus, num_validation: int) -> None:
    """Looks at a corpus of the mixture: it trains if it has a sequence."""
    num_validation = num_validation if config.data.validation_fraction else 0
    try:
        _look(config, _alone(config.data, entry), 1, num_validation)
    except TooSmallError as error:
        of = {TRAIN: ONE_TRAIN, HELD_OUT: ONE_HELD_OUT}[error.of]
        fraction = _enough_for_all(config, error.fraction, num_validation)
        raise too_small(of, error.needs, found=error.found, fraction=fraction) from None


def _enough_for_all(config: Config, fraction: float | None, num_validation: int) -> float | None:
    """Returns a validation_fraction, this or a larger one, that is enough in each corpus."""
    while fraction is not None:
        data = dataclasses.replace(config.data, validation_fraction=fraction)
        try:
            for entry in data.mixture or ():
                _look(config, _alone(data, entry), 1, num_validation)
            return fraction
        except TooSmallError as error:
            larger = error.fraction
            fraction = larger if larger is not None and larger > fraction else None
        except HolmesError:
            return None
    return None


def _look(config: Config, data: DataConfig, global_batch: int, num_validation: int) -> None:
    """Looks whether a corpus has a batch to train on, and so many for validation.

    Settings that must fit the batches of the run are left out, since the batch here is another.
    """
    sizes: dict[str, Any] = {"global_batch": global_batch, "eval_every": min(num_validation, 1)}
    if num_validation:
        sizes["eval_batches"] = num_validation
    alone = dataclasses.replace(
        config,
        data=data,
        train=dataclasses.replace(config.train, rampup=(), eval_ema=False, **sizes),
        optimizer=OptimizerConfig(learning_rate=1.0),
        parallel=ParallelConfig(),
    )
    sources.module_of(data).look(alone)


def _plain(data: DataConfig) -> DataConfig:
    """The settings of `data.corpus` alone."""
    return _of_one(data, source=data.source)


def _alone(data: DataConfig, entry: NamedCorpus) -> DataConfig:
    """The settings of one corpus, whose last part is held out."""
    own: dict[str, Any] = {name: getattr(entry, name) for name in ("corpus", "source", "pattern")}
    return _of_one(data, **own)


def _of_one(data: DataConfig, *, source: str, **own: Any) -> DataConfig:
    """The settings of one corpus of several, with a dtype only where its source reads one."""
    of_several = ("mixture", "mixture_changes", "mixture_by_island", "validation")
    none: dict[str, Any] = dict.fromkeys(of_several)
    if not SOURCES[source].reads_dtype:
        none["dtype"] = None
    return dataclasses.replace(data, source=source, **own, **none)


def _whole(data: DataConfig, entry: NamedCorpus) -> DataConfig:
    """The settings of one corpus of which nothing is held out."""
    return dataclasses.replace(_alone(data, entry), validation_fraction=0.0)


def _read(config: DataConfig, length: int) -> Splits:
    return sources.module_of(config).read(config, length)


def _sequences(splits: Splits) -> Sequences:
    assert not isinstance(splits.train, Mixed), "a mixture has no mixtures"
    return splits.train


@contextlib.contextmanager
def _naming(setting: str, entry: NamedCorpus) -> Iterator[None]:
    """Says which of several corpora a mistake inside is of."""
    try:
        yield
    except (ConfigError, DataError) as error:
        parts = error.parts()
        own = f"data.{setting}, {entry.name}"
        name = parts["where"].removeprefix("data.")
        parts["where"] = f"{own}: {name}" if name != parts["where"] else f"{own}: {error.where}"
        raise type(error)(**parts) from None
