"""All processes read the same data, or the job ends before its first step and says why."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from holmesjax import job as jobs, job_files
from holmesjax.data.batches import order_digest
from holmesjax.distributed import data_agreement
from holmesjax.distributed.data_agreement import DataAgreement
from holmesjax.distributed.messages import Compiled, Files
from holmesjax.errors import DataError
from holmesjax.plan.processes import Process
from holmesjax.report import metrics
from tests.jobs import HANG_S, ROOT, RunningJob, free_listen, write_run


def process(number):
    return Process(
        number=number,
        name=f"c/n{number}",
        cluster="c",
        node=f"n{number}",
        stage=number,
        rank=0,
        devices=(number,),
        local_devices=(0,),
    )


def agree(*corpora, orders=None, mute=()):
    """Plays a job whose processes have these files; the digests that are agreed on."""
    questions = []
    ask = lambda number, question: questions.append((number, question))
    agreed, agrees = None, DataAgreement([process(i) for i in range(len(corpora))], ask)
    for number, files in enumerate(corpora):
        assert agreed is None, "it did not wait for all"
        digests = {"train": str(sorted(files.items())), "validation": "", "order": "0"}
        digests |= {"order": orders[number]} if orders else {}
        told = Compiled(digests=digests, source=f"/data/{number}")
        agreed = agrees.take(number, told)
    while questions:
        number, question = questions.pop(0)
        end = question.first + question.count
        piece = [list(item) for item in sorted(corpora[number].items())[question.first : end]]
        if number not in mute:
            agrees.take(number, Files(files=piece))
    agrees.check()
    return agreed


def test_processes_that_have_read_the_same_agree():
    assert agree(*[{"a": "1"}] * 3)["train"] == "[('a', '1')]"


FILES = st.dictionaries(st.text("abcd", min_size=1, max_size=2), st.sampled_from("12"))


@given(FILES, FILES, st.integers(1, 4))
def test_the_first_file_that_differs_is_found_whatever_the_pieces(ours, theirs, piece):
    if ours == theirs:
        return
    first = min(set(ours.items()) ^ set(theirs.items()))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_agreement, "PIECE", piece)
        with pytest.raises(DataError) as error:
            agree(ours, theirs)
    says = [
        f"{f'SHA-256 {files[first]}' if first in files else 'missing'} on c/n{number}"
        for number, files in enumerate((ours, theirs))
    ]
    assert f"first file that differs is {first!r}: {says[0]} (process 0)" in error.value.found
    assert says[1] in error.value.found


def test_the_minority_is_named_with_what_each_has_read():
    with pytest.raises(DataError) as error:
        agree({"a": "1"}, {"a": "2"}, {"a": "2"}, {"a": "3"}, {"a": "2"})
    assert error.value.where == "c/n0 (process 0), c/n3 (process 3)"
    assert "than c/n1 (process 1) (train)" in error.value.problem
    for text in ("/data/0", "/data/1", "/data/3", "[('a', '1')]", "[('a', '2')]", "[('a', '3')]"):
        assert text in error.value.found


def test_another_order_is_refused_without_asking_for_files():
    with pytest.raises(DataError, match="read in another order"):
        agree({"a": "1"}, {"a": "1"}, orders=["0", "1"])


def test_who_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(data_agreement, "ANSWER_S", -1.0)
    with pytest.raises(DataError, match=r"not known: c/n1 \(process 1\) did not answer"):
        agree({"a": "1"}, {"a": "2"}, mute=[1])


def test_the_order_of_the_data_does_not_change():
    """A run that resumes with another order would read some windows twice and others never."""
    assert order_digest()[:12] == "a0b62212e091"


def test_a_process_with_other_settings_does_not_belong(tmp_path):
    """Its run folder is a copy that somebody has edited, or an old one; the plan is the same."""
    job = jobs.load(write_run(tmp_path, {"a": (1,), "b": (1,)}))
    job_files.save(job, 0)
    copy = shutil.copytree(job.run_dir, tmp_path / "copy")
    assert jobs.load_saved(copy).about(0) == job.about(0)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("beta2: 0.95", "beta2: 0.9"))
    changed = jobs.load_saved(copy).about(0)
    assert [name for name in changed if changed[name] != job.about(0)[name]] == ["settings hash"]


def test_a_job_whose_processes_have_unlike_corpora_ends_before_its_first_step(tmp_path):
    """Each process starts in the folder of its own corpus; one corpus has eight more bytes.

    The cluster of the second one has another name for it.
    """
    texts = {f"{name}.txt": f"{name} " * 4000 for name in "abcd"}
    for place in ("0/corpus", "1/texts"):
        corpus = tmp_path / place
        corpus.mkdir(parents=True)
        for name, text in texts.items():
            (corpus / name).write_text(text)
    (tmp_path / "1/texts/c.txt").write_text(texts["c.txt"] + "eight mb")
    settings = ["data.corpus=corpus", "data.pattern=*.txt", "data.validation_fraction=0"]
    settings += ["model.num_layers=2", "model.width=16", "data.paths={b: {corpus: texts}}"]
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    with (
        contextlib.ExitStack() as stack,
        RunningJob(run_file, "--launcher", "external", "--listen", free_listen(), *settings) as job,
    ):
        printed = [job.until(f"  {name}=") for name in ("HOLMES_CONTROLLER", "HOLMES_KEY_FILE")]
        variables = dict(line.strip().split("=", 1) for line in printed)
        workers = []
        for number in range(2):
            fabrics = ("infiniband", "roce", "ethernet")
            addresses = {fabric: [f"127.0.9.{number + 1}"] for fabric in fabrics}
            own = {
                "HOLMES_PROCESS": str(number),
                "HOLMES_ADDRESSES": json.dumps(addresses),
                "PYTHONPATH": str(ROOT),
            }
            worker = subprocess.Popen(
                [sys.executable, "-m", "launch", "worker", tmp_path / "run"],
                cwd=tmp_path / str(number),
                env={**os.environ, **variables, **own},
                stdout=subprocess.DEVNULL,
            )
            workers.append(worker)
            stack.callback(worker.wait, 30)
            stack.callback(worker.kill)
        assert job.end() == 2, job.output
        assert [worker.wait(HANG_S) for worker in workers] == [2, 2]
    for text in (
        *("b/b-0 (process 1): has other data than a/a-0 (process 0) (train)", "c.txt"),
        *(str(tmp_path / "0/corpus"), str(tmp_path / "1/texts")),
    ):
        assert text in job.output
    assert not metrics.read(tmp_path / "run")
