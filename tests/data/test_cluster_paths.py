"""The same data at other paths in other clusters."""

from pathlib import Path

import pytest

from holmesjax import job as jobs
from holmesjax.config import DataConfig, MixedCorpus, NamedCorpus
from holmesjax.data import cluster_paths
from holmesjax.errors import DataError, HolmesError
from tests.jobs import write_run


def test_each_path_of_the_section_has_the_beginning_that_it_has_in_the_cluster():
    data = DataConfig(
        mixture=(
            MixedCorpus(name="web", corpus="/data/web", source="tokens"),
            MixedCorpus(name="books", corpus="s3://books/tokens", source="tokens"),
        ),
        validation=(NamedCorpus(name="wiki", corpus="/data/wiki/a.bin", source="tokens"),),
        tokenizer="/data/bpe",
        paths={"b": {"/data/": "/mnt/b", "s3://books": "/data/books"}},
    )
    assert cluster_paths.here(data, "a") == data
    found = cluster_paths.here(data, "b")
    assert [entry.corpus for entry in found.mixture] == ["/mnt/b/web", "/data/books/tokens"]
    assert (found.validation[0].corpus, found.tokenizer) == ("/mnt/b/wiki/a.bin", "/mnt/b/bpe")


@pytest.mark.parametrize(
    "paths, message",
    [
        ("{c: {corpus: x}}", r"data.paths: names no cluster of the topology\n  found: c\n.*: a, b"),
        ("{b: {corpora: x}}", r"data.paths: begins no path .* cluster b\n  found: corpora"),
        ("{b: {corpus: 3}}", r"data.paths.*: must be"),
        ("[b]", r"data.paths.*: must be names with values"),
    ],
)
def test_paths_of_no_cluster_and_of_no_path_are_refused(tmp_path: Path, paths, message):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    with pytest.raises(HolmesError, match=message):
        jobs.load(run_file, ["data.corpus=corpus/x", f"data.paths={paths}"])


def test_a_node_has_the_data_of_one_of_the_clusters_and_one_process_that_of_the_first(tmp_path):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    there = tmp_path / "there"
    there.mkdir()
    (there / "a.txt").write_text("text " * 20_000)
    settings = ["data.corpus=/nothing/here", "data.validation_fraction=0", "train.eval_every=0"]
    first, second = (f"data.paths={{{name}: {{/nothing/here: {there}}}}}" for name in "ab")
    for paths, reader in ((first, "node"), (first, "process"), (second, "node")):
        jobs.load(run_file, [*settings, paths], reads_data=reader)
    for paths, reader in (([], "node"), ([second], "process")):
        with pytest.raises(DataError, match=r"data.corpus: is not there\n  found: /nothing/here"):
            jobs.load(run_file, [*settings, *paths], reads_data=reader)
