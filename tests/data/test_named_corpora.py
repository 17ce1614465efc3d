"""A mixture reads what its corpora have, and each validation set is one of its own."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from holmesjax import config as configs
from holmesjax.data import named_corpora, sources
from holmesjax.data.batches import Batches
from holmesjax.data.mixing import Schedule, WeightsFrom
from holmesjax.data.sources import HELD_OUT, ONE_HELD_OUT, WHOLE_SET
from holmesjax.errors import DataError, HolmesError
from holmesjax.training_loop import TrainingLoop
from launch.__main__ import main
from tests.cases import cases
from tests.jobs import write_run

LENGTH = 8
WORDS = {
    "web": "the quick brown fox jumps ",
    "code": "def f(x): return x + 1\n",
    "own": "0123456789",
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Gives the settings of a run that may name three folders of text."""
    for name, words in WORDS.items():
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(f"{i} {words}" * 8)
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path, {"a": (1,), "b": (1,)})
    path.write_text(path.read_text().replace("corpus: python-stdlib", "validation_fraction: 0.3"))
    return lambda *words: configs.load(
        path, [f"model.context_length={LENGTH}", "train.global_batch=4", *words]
    )


MIXED = "{name: web, corpus: web, weight: 0.75}", "{name: code, corpus: code, weight: 0.25}"
MIXTURE = f"data.mixture=[{', '.join(MIXED)}]"
OWN_SET = "data.validation=[{name: own, corpus: own}]"


def read(config, num_validation=2):
    module = sources.module_of(config.data)
    module.look(config)
    data = module.read(config.data, LENGTH)
    return Batches(data=data, seed=3, global_batch=4, length=LENGTH, num_validation=num_validation)


def texts(rows):
    return ["".join(map(chr, row)) for row in rows.token_NL.tolist()]


def test_a_mixture_takes_windows_of_each_corpus_by_weight(load):
    change = "data.mixture_changes=[{tokens: 3200, weights: {code: 1}}]"
    mixed = read(load(MIXTURE, change))
    alone = {
        name: {"".join(map(chr, item.tokens)) for item in map(train.__getitem__, range(len(train)))}
        for name in ("web", "code")
        for train in [read(load(f"data.corpus={name}")).data.train]
    }
    seen = [texts(mixed.train(first)) for first in range(0, 480, 4)]
    assert all(text in alone["web"] | alone["code"] for batch in seen for text in batch)
    of_code = np.array([[text in alone["code"] for text in batch] for batch in seen])
    assert of_code[:100].sum() == 100
    assert of_code[100:].all()  # 400 sequences of 8 tokens are before
    grows = "train.rampup=[{steps: 20, global_batch: 2}]", "train.global_batch=4"
    by_steps = load(MIXTURE, *grows, "data.mixture_changes=[{steps: 110, weights: {code: 1}}]")
    same = by_steps.data_by_tokens()  # 20 steps of 2 sequences and 90 of 4
    assert same == load(MIXTURE, change).data


BY_ISLAND = "data.mixture_by_island={b: {web: 1, code: 3}, c: {code: 1}}"
ISLANDS = "parallel.across=local_updates", "parallel.clusters=null"


def test_an_island_reads_its_own_mixture_and_nothing_of_the_others(load):
    """However far each is; b's items of web, say, are those with odd places in web's order."""
    mixed, names = read(load(MIXTURE, BY_ISLAND, *ISLANDS)), ("a", "b", "c")
    parts = {id(part): name for name, part in mixed.data.train.parts.items()}
    orders = {
        name: [one_by_one(mixed, name)._picked(place)[0][1] for place in range(2 * len(part))]
        for name, part in mixed.data.train.parts.items()
    }
    readers = {"web": "ab", "code": "abc"}
    shares = {"a": (0.75, 0.25), "b": (0.25, 0.75), "c": (0.0, 1.0)}
    for k, steps in enumerate((10, 7, 3)):
        taken = [
            (parts[id(source)], item)
            for first in range(0, 4 * steps, 4)
            for source, item in mixed.of_island(k, names)._picked(first)
        ]
        for name, share in zip(("web", "code"), shares[names[k]], strict=True):
            own = [item for source, item in taken if source == name]
            assert abs(len(own) - share * 4 * steps) <= 1
            rank, count = readers[name].find(names[k]), len(readers[name])
            assert sorted(own) == sorted(orders[name][rank::count][: len(own)])
    assert mixed.digests().keys() - read(load(MIXTURE)).digests().keys() == {"order of islands"}


def one_by_one(batches, name):
    """The sequences of one corpus of a mixture, in its order."""
    own = batches.data.train
    schedule = Schedule(list(own.parts), [WeightsFrom(0, {name: 1.0})])
    train = dataclasses.replace(own, schedule=schedule, by_island={})
    data = dataclasses.replace(batches.data, train=train)
    return dataclasses.replace(batches, data=data, global_batch=1)


def test_each_validation_set_is_what_its_corpus_holds_out_or_is_named(load):
    grows = "train.rampup=[{steps: 1, global_batch: 2}]", "optimizer.schedule_by=tokens"
    grows += "optimizer.warmup_steps=0", "optimizer.warmup_tokens=64", "optimizer.ema_decay=0.9"
    grows += ("train.eval_ema=true",)
    sets = MIXTURE, OWN_SET, "train.eval_every=5", "train.eval_batches=2"
    batches = read(load(*sets, *grows, "train.steps=4"))
    assert list(batches.data.validation_sets()) == ["web", "code", "own"]
    whole = read(load("data.corpus=own", "data.validation_fraction=0"), num_validation=0).data.train
    for number, name in enumerate(["web", "code"]):
        alone = read(load(f"data.corpus={name}"))
        for index in range(2):
            got = texts(batches.validation(2 * number + index))
            assert got == texts(alone.validation(index))
    own = dataclasses.replace(batches, data=dataclasses.replace(batches.data, sets={"x": whole}))
    assert [texts(batches.validation(4 + i)) for i in (0, 1)] == [
        texts(own.validation(i)) for i in (0, 1)
    ]
    single = read(load("data.corpus=web", OWN_SET))
    assert list(single.data.validation_sets()) == ["corpus", "own"]
    assert texts(single.train(8)) == texts(read(load("data.corpus=web")).train(8))
    only = read(load("data.corpus=web", OWN_SET, "data.validation_fraction=0"))
    assert list(only.data.validation_sets()) == ["own"]


def test_the_loss_of_each_set_is_a_mean_over_its_targets(load):
    config = load(MIXTURE, "train.eval_every=1", "train.eval_batches=2")
    losses, counts = iter([2.0, 4.0, 9.0, 3.0]), iter([2, 1, 3, 3])
    loop = TrainingLoop(
        config=config,
        runner=SimpleNamespace(evaluate=lambda states, inputs: next(losses)),
        batches=read(config),
        **dict.fromkeys(["clock", "writer", "tell", "is_stopping", "is_saving", "profiles"]),
        begins=lambda work, step: None,
    )
    feed = SimpleNamespace(take=lambda: SimpleNamespace(num_targets=next(counts)))
    found = loop._evaluate(feed, [], 1)
    assert found == {"val_loss": 18 / 9, "val_losses": {"web": 6 / 3, "code": 12 / 6}}


def test_digests_name_the_corpus_and_do_not_move_with_another(load, tmp_path):
    before = read(load(MIXTURE, OWN_SET)).digests()
    assert set(before) == {
        *("train of web", "validation of web", "train of code", "validation of code"),
        *("validation set own", "order", "order of a mixture"),
    }
    (tmp_path / "code/more.txt").write_text("x" * 99)
    after = read(load(MIXTURE, OWN_SET)).digests()
    assert {n for n in before if before[n] != after[n]} <= {"train of code", "validation of code"}
    assert before != after


@cases(
    "words, where, problem, found",
    [
        (["data.corpus=web"], "data.corpus", "left out beside data.mixture", "web"),
        (["data.source=tokens"], "data.source", "left out beside data.mixture", "tokens"),
        (["data.mixture=null"], "data.corpus", "is missing", "nothing"),
        (["data.mixture=[]"], "data.mixture", "must not be empty", "[]"),
        (["data.mixture=3"], "data.mixture", "a list of sections", "3"),
        (
            ["data.mixture=[{name: web, corpus: web, source: arrays}]"],
            "data.mixture[0].source",
            "arrays are no sequences of tokens",
            "arrays",
        ),
        (
            ["data.mixture=[{name: web, corpus: web, weight: 0}]"],
            "data.mixture",
            "a weight above 0",
            "all weights are 0",
        ),
        (
            ["data.mixture=[{name: a, corpus: absent}]"],
            "data.mixture, a: corpus",
            "is not there",
            "absent",
        ),
        (
            ["data.validation=[{name: web, corpus: own}]"],
            "data.validation[0].name",
            "of one corpus alone",
            "web",
        ),
        (
            ["data.validation=[{name: x, corpus: own, pattern: '*.md'}]"],
            "data.validation, x: pattern",
            "no file in",
            "*.md",
        ),
        (
            ["data.mixture_changes=[{tokens: 9, weights: {cod: 1}}]"],
            "data.mixture_changes[0].weights",
            "no corpus of the mixture",
            "cod",
        ),
        (
            ["data.mixture_changes=[{tokens: 9, weights: {code: 0}}]"],
            "data.mixture_changes[0].weights",
            "a weight above 0",
            "code",
        ),
        (
            [
                "data.mixture_changes=[{tokens: 9, weights: {web: 1}}, "
                "{tokens: 9, weights: {code: 1}}]"
            ],
            "data.mixture_changes[1].tokens",
            "after the change before it",
            "9",
        ),
        (
            ["data.mixture_changes=[{weights: {web: 1}}]"],
            "data.mixture_changes[0]",
            "either tokens or steps",
            "nothing",
        ),
        (
            [
                "data.mixture_changes=[{tokens: 9, weights: {web: 1}}, "
                "{steps: 9, weights: {code: 1}}]"
            ],
            "data.mixture_changes[1].steps",
            "must be in tokens",
            "use tokens for all changes",
        ),
        ([BY_ISLAND], "data.mixture_by_island", "only for parallel.across: local_updates", "web"),
        (
            [BY_ISLAND.replace("c: {code", "c: {cod"), *ISLANDS],
            "data.mixture_by_island.c",
            "names no corpus of the mixture",
            "cod",
        ),
        (
            ["data.mixture_by_island={a: {web: 0}}", *ISLANDS],
            "data.mixture_by_island.a",
            "a weight above 0",
            "0",
        ),
        (
            [BY_ISLAND, "data.mixture_changes=[{tokens: 9, weights: {web: 1}}]", *ISLANDS],
            "data.mixture_changes",
            "beside data.mixture_by_island",
            "1 changes",
        ),
        (
            [BY_ISLAND, "data.mixture=null", "data.corpus=web", *ISLANDS],
            "data.mixture_by_island",
            "is only for a mixture",
            "web",
        ),
        (
            ["train.eval_every=1", "train.eval_batches=999"],
            "data.mixture, web: corpus",
            "the validation split of one corpus is too small: 3,996 sequences of 8 tokens need",
            "bytes\n  fix: use more files, fewer train.eval_batches, a smaller train.global_batch, "
            "or data.validation_fraction=0 and the sets of data.validation",
        ),
        (
            ["data.validation_fraction=0.999"],
            "data.mixture, web: corpus",
            "the train split of one corpus is too small: a sequence of 8 tokens needs 9 bytes",
            "0 bytes\n  fix: use more files, a smaller data.validation_fraction, or a smaller",
        ),
        (
            ["train.eval_every=1", "train.eval_batches=200", OWN_SET, "data.validation_fraction=0"],
            "data.validation, own: corpus",
            "the validation set is too small: 800 sequences of 8 tokens need 6,401 bytes",
            "bytes\n  fix: use more files, fewer train.eval_batches, a smaller train.global_batch",
        ),
    ],
)
def test_mistakes_are_named(load, words, where, problem, found):
    with pytest.raises(HolmesError) as error:
        read(load(MIXTURE, *words))
    for part in (where, problem, found):
        assert part in str(error.value)


def test_the_fraction_that_is_named_is_enough_in_each_corpus(load, tmp_path):
    for i in range(40):
        (tmp_path / f"web/more{i}.txt").write_text(f"{i} {WORDS['web']}" * 8)
    settings = MIXTURE, "train.eval_every=1", "train.eval_batches=20"
    look = lambda fraction: named_corpora.look(
        load(*settings, f"data.validation_fraction={fraction}")
    )
    with pytest.raises(DataError, match=r"data.mixture, web: corpus: the validation") as error:
        look(0.01)
    [named] = re.findall(r"validation_fraction=([\d.]+), which every corpus", error.value.fix)
    look(named)


@cases(
    "words, where, of, fix",
    [
        (["data.corpus=web"], "data.corpus", HELD_OUT, "a larger data.validation_fraction, more"),
        ([MIXTURE], "data.mixture, web: corpus", ONE_HELD_OUT, "a larger data.validation_fraction"),
        ([MIXTURE, OWN_SET], "data.mixture, web: corpus", ONE_HELD_OUT, "a larger data."),
        (
            [MIXTURE, OWN_SET, "data.validation_fraction=0"],
            "data.validation, own: corpus",
            WHOLE_SET,
            "use more files, fewer train.eval_batches",
        ),
    ],
)
def test_a_set_that_is_too_small_once_it_is_tokens_is_named(load, words, where, of, fix):
    with pytest.raises(DataError) as error:
        read(load(*words), num_validation=200)
    assert error.value.where == where
    assert f"the {of} is too small: 200 batches of 4 sequences" in error.value.problem
    assert fix in error.value.fix


def test_the_command_shows_each_corpus_and_how_often_a_run_reads_it(load, tmp_path, capsys):
    words = [f"model.context_length={LENGTH}", "train.global_batch=4", MIXTURE, OWN_SET]
    assert main(["data", str(tmp_path / "run.yaml"), *words]) == 0
    out = capsys.readouterr().out
    assert "train of web documents: " in out
    assert "validation set own documents: 12, " in out
    assert "run         30 of 40 sequences are of web: " in out


def test_a_dtype_is_for_the_tokens_of_a_mixture_alone(load, tmp_path):
    """The corpora of text are looked for, and read, without it."""
    (np.arange(400, dtype="<u2") % 256).tofile(tmp_path / "ids.bin")
    tokens = "{name: ids, corpus: ids.bin, source: tokens}"
    config = load(f"data.mixture=[{MIXED[0]}, {tokens}]", "data.dtype=uint16")
    assert len(read(config).data.train) > 0
    config = load("data.corpus=web", f"data.validation=[{tokens}]", "data.dtype=uint16")
    assert len(read(config).data.validation) > 0
