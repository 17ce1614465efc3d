"""Files that people write: what is read, what is refused, and that no file does anything else."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from holmesjax import config as configs
from holmesjax.config import Config
from holmesjax.errors import ConfigError, Mistakes
from holmesjax.files import yaml_files
from holmesjax.topology import loading
from holmesjax.topology.machines import Topology

ROOT = Path(__file__).parents[2]
HANG_S = 100.0  # work that grows faster than its file takes far longer

RUN = """\
topology: configs/topologies/ib_roce.yaml
run: {dir: runs/test}
train:
  steps: 100
  global_batch: 32
model:
  num_layers: 6
  width: 64
  num_heads: 4
  context_length: 128
data: {corpus: python-stdlib}
optimizer:
  learning_rate: 3e-4
  schedule: cosine
parallel:
  layers: [2, 4]
  microbatches: 4
"""


@pytest.fixture
def write(tmp_path):
    """Writes a file; returns its path."""

    def write_text(text):
        path = tmp_path / "file.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_text


def refused(path, overrides=()):
    """The mistakes that reading a file finds, and that it does not hang."""
    start = time.perf_counter()
    try:
        mistakes = yaml_files.read(path, ConfigError, overrides).mistakes
    except Mistakes as error:
        mistakes = error.mistakes
    assert time.perf_counter() - start < HANG_S
    assert mistakes, "nothing was refused"
    assert all(type(mistake) is ConfigError for mistake in mistakes)
    return mistakes


def test_values_are_those_of_pyyaml(write):
    """Texts, lists and mappings are read as PyYAML reads them; `scalar` has the differences."""
    document = yaml_files.read(write(RUN), ConfigError)
    expected = yaml.safe_load(RUN)
    expected["optimizer"]["learning_rate"] = 3e-4  # a text to PyYAML
    assert document.values == expected
    assert document.lines["train", "steps"] == 4
    assert document.lines["parallel", "layers", 1] == 16


SCALARS = [
    ("12", 12),
    ("-1_000", -1000),
    ("0x10", "0x10"),
    ("007", 7),
    ("3e-4", 3e-4),
    ("1.", 1.0),
    (".5", 0.5),
    ("1e400", float("inf")),
    ("-.inf", float("-inf")),
    ("True", True),
    ("no", "no"),
    ("~", None),
    ("12:30", "12:30"),
    ("2024-01-01", "2024-01-01"),
    ("1_", "1_"),
    ("\u0661", "\u0661"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalar(text, value):
    read = yaml_files.scalar(text)
    assert (type(read), read) == (type(value), value)


BAD_FILES = [
    ("", "", "is empty", "start from a file of configs/"),
    ("# a comment\n", "", "is empty", "start from a file of configs/"),
    ("- 1\n- 2\n", "", "must be settings, one `key: value` a line", "start from"),
    ("hello", "", "must be settings, one `key: value` a line", "start from"),
    ("a: 1\nb: {c: 1}\na: 2\n", ":3: a", "is set twice", "remove one of them"),
    ("a: 1\nb: {c: 1,\n  c: 2}\n", ":3: b.c", "is set twice", "remove one of them"),
    ("a: [1\nb: 2\n", ":2", "cannot be read as YAML", "indent with spaces"),
    ("a:\n\tb: 1\n", ":2", "cannot be read as YAML", "indent with spaces"),
    ("a: &a [1]\n", ":1: a", "tags and anchors", "remove it"),
    ("a: *b\n", ":1: a", "aliases are not read", "write the value out"),
    ("a: !!python/object/apply:os.system ['x']\n", ":1: a", "tags and anchors", "remove it"),
    ("a: 1\n---\nb: 2\n", ":2", "must hold one document", "remove the line `---`"),
    ("{[1]: 2}\n", ":1", "a key must be a word", "write `key: value`"),
    ("a: " + "[" * 50_000, ":1: a", "is nested too deep", "start from"),
    ("a: " + "x" * 2**20, "", "must be at most 1,048,576 bytes", "check the path"),
    (b"\xff\xfe\x00\x01", "", "must be text", "save it as UTF-8"),
    (b"a: \x00\x01", "", "cannot be read as YAML", "indent with spaces"),
]


@pytest.mark.parametrize(("text", "where", "problem", "fix"), BAD_FILES)
def test_a_file_that_cannot_be_read(write, text, where, problem, fix):
    path = write(text)
    mistake = refused(path)[0]
    assert mistake.where.startswith(f"{path}{where}")
    assert mistake.problem.startswith(problem)
    assert mistake.fix.startswith(fix)


def test_paths_that_are_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [absent] = refused("absent.yaml")
    assert absent.problem == "no such file"
    assert str(tmp_path) in absent.found
    assert refused(tmp_path)[0].found == "a folder"
    assert refused("/dev/zero")[0].problem == "must be a file"
    assert refused("a\0b")[0].problem == "cannot be read"
    assert refused("x" * 5000)[0].problem == "cannot be read"


def test_an_alias_bomb_is_refused_at_once_with_one_mistake(write):
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60)]
    [mistake] = refused(write("\n".join(["a0: &a0 [x]", *lines])))
    assert mistake.found == "&a0"


def test_of_many_mistakes_the_first_are_shown(write):
    path = write("\n".join(f"a{i}: 1\na{i}: 2" for i in range(99)))
    mistakes = Mistakes(refused(path))
    assert str(mistakes).count("is set twice") == 10
    assert str(mistakes).endswith("error: and 89 more mistakes")
    first = mistakes.mistakes[0].parts()
    problem = "is set twice; the first of 99 mistakes"
    assert mistakes.parts() == first | {"problem": problem}


def test_a_file_of_100_mb_is_not_read(tmp_path):
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(10**8)
    assert refused(path)[0].found == "100,000,000 bytes"


@pytest.mark.parametrize("text", ["1" * 10**6 + "x", "1" + " " * 10**5 + "x y", "'" + "x" * 10**6])
def test_a_long_value_is_read_at_once(write, text):
    start = time.perf_counter()
    with pytest.raises(Mistakes):
        loading.load(write(TOPOLOGY.replace("25 Gb/s", text)))
    assert time.perf_counter() - start < HANG_S


BAD_OVERRIDES = [
    ("train.steps", "must be key=value", "write it as train.steps=100"),
    ("=3", "must be key=value", "write it as train.steps=100"),
    ("train..steps=3", "must be key=value", "write it as train.steps=100"),
    ("train.steps=", "has no value", "write train.steps=null to set nothing"),
    ("train.steps.x=3", "train.steps is no section", "set train.steps itself"),
    ("parallel.layers=[1", "cannot be read as YAML", "indent with spaces"),
    ("run.dir='\udcff'", "cannot be read as YAML", "indent with spaces"),
    ("data={corpus: x, corpus: y}", "is set twice", "remove one of them"),
]


@pytest.mark.parametrize(("override", "problem", "fix"), BAD_OVERRIDES)
def test_a_bad_override(write, override, problem, fix):
    [mistake] = refused(write(RUN), [override])
    assert mistake.where.startswith(f"override {override}")
    assert mistake.problem.startswith(problem)
    assert mistake.fix.startswith(fix)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(deadline=None)  # the file system may be slow
@given(st.dictionaries(st.text(), VALUES, min_size=1))
def test_what_is_written_reads_back_equal(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("written") / "file.yaml"
    path.write_text(yaml_files.to_text(values), encoding="utf-8", newline="")
    assert yaml_files.read(path, ConfigError).values == values


JUNK = ["~", "-1", "0", "1e400", "true", "[]", "{}", "x", "'", '"', "*", "&a", "!b", "-", "- ", ":"]
JUNK += [": ", "#", "|", ">", "[1,{", ".nan", "?", "%", "@", "---", "\t", "\n", "\x07", "9" * 500]


def mutated(text, seed):
    """The text with one or two random edits of its lines."""
    rng = random.Random(seed)
    lines = text.splitlines()
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(lines))
        key, _, value = lines[i].partition(":")
        cut, junk = rng.randrange(len(lines[i]) + 1), rng.choice(JUNK)
        edits = [
            f"{key}: {junk}",
            f"{lines[i][:cut]}{junk}{lines[i][cut:]}",
            lines[i][:cut] + lines[i][cut + 1 :],
            f"{key[:-1]}:{value}",
            rng.choice(["", "  ", "    ", "\t"]) + lines[i].strip(),
            "",
            f"{lines[i]}\n{lines[i]}",
            f"{key}: {rng.randrange(200)}",
        ]
        lines[i] = rng.choice(edits)
    return "\n".join(lines) + "\n"


TOPOLOGY = (ROOT / "configs/topologies/ib_roce.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "load", "kind"),
    [(RUN, configs.load, Config), (TOPOLOGY, loading.load, Topology)],
    ids=["run", "topology"],
)
def test_a_mutated_file_is_valid_or_refused(write, text, load, kind):
    outcomes = Counter()
    for seed in range(500):
        try:
            assert isinstance(load(write(mutated(text, seed))), kind)
            outcomes["valid"] += 1
        except Mistakes:
            outcomes["refused"] += 1
    assert min(outcomes["valid"], outcomes["refused"]) >= 20, outcomes  # neither is rare
