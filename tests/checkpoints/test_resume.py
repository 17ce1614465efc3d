"""A run goes on as if it had never stopped, is refused, or says what is otherwise."""

import io
import json
import shlex
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from holmesjax import job as jobs, job_files
from holmesjax.checkpoints import changed_settings, committing, manifest, newest_whole, resume
from holmesjax.errors import REQUEUE, CheckpointError, ConfigError, LostDataError
from holmesjax.hosts import computing
from holmesjax.optimizers.learning_rates import learning_rate
from holmesjax.runtime.prefetch import Placer
from holmesjax.trainer import Trainer
from launch.__main__ import main
from launch.arguments import parse
from tests.jobs import write_run

DATA = {"train": "1" * 64, "validation": "2" * 64, "order": "3" * 64}
DATA |= {"order of a mixture": "4" * 64}


def load(folder, *settings):
    run_file = write_run(folder, {"a": (1,), "b": (1,)})
    return jobs.load(run_file, ["data.corpus=/data", *settings])


def train(folder, clusters, *settings, name="run", **options):
    """Trains a small model, goes on from what there is; the trainer, and what it has printed."""
    run_file, out = write_run(folder, clusters, name=name), io.StringIO()
    small = ["model.num_layers=2", "model.width=16", "parallel.tensor=4"]
    trainer = Trainer(run_file, [*small, *settings], out, **options)
    trainer.train()
    return trainer, out.getvalue()


def checkpoint(job, *, steps):
    """Goes on from what there is to a checkpoint without arrays."""
    start = resume.find(job, (), print)
    job_files.save(job, start.step)
    manifest.begin(job.run_dir, steps)
    committing.commit(start, steps, {}, {}, data=DATA)
    return start


@pytest.fixture
def folder(tmp_path):
    """The folder of a run with a checkpoint after 10 steps of 8 sequences."""
    checkpoint(load(tmp_path), steps=10)
    return tmp_path


BREAKING = {
    "train.seed=1": "train.seed: 0 -> 1",
    "train.global_batch=16": "train.global_batch: 8 -> 16",
    "data.corpus=/elsewhere": "data.corpus: /data -> /elsewhere",
    "data.pattern=*.txt": "data.pattern: null -> *.txt",
    "data.validation_fraction=0.1": "data.validation_fraction: 0.05 -> 0.1",
    "data.documents=mask": "data.documents: concatenate -> mask",
    "model.rotary_base=500000.0": "model.rotary_base: 10000.0 -> 500000.0",
    "model.context_length=64": "model.context_length: 32 -> 64",
    "model.rotary_scaling={type: linear, factor: 2.0}": (
        'model.rotary_scaling: null -> {"type": "linear", "factor": 2.0}'
    ),
}


@pytest.mark.parametrize("setting, said", BREAKING.items())
def test_what_breaks_the_run_is_refused_unless_it_is_allowed_by_name(folder, setting, said):
    job, name = load(folder, setting), setting.partition("=")[0]
    with pytest.raises(CheckpointError) as error:
        resume.find(job, (), print)
    assert error.value.found == said
    assert error.value.fix.endswith(f"--allow {name}")
    start = resume.find(job, [name], print)
    assert f"  {said}" in start.describe()


@pytest.mark.parametrize(
    "settings, said",
    [
        (("train.steps=20",), ["resuming after step 10", "train.steps: 10 -> 20"]),
        (
            ("train.steps=20", "parallel.microbatches=4", "parallel.schedule=gpipe"),
            ["parallel.microbatches 2 -> 4, parallel.schedule 1f1b -> gpipe)"],
        ),
        (("train.seed=1",), ["refused by train:", "train.seed: 0 -> 1", "--allow train.seed"]),
        ((), ["finished: 10 of 10 steps are done"]),
    ],
)
def test_the_plan_of_a_begun_run_says_how_it_resumes(folder, capsys, settings, said):
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["plan", str(folder / "run"), *settings]) == 0
    printed = capsys.readouterr().out
    told = printed[printed.index("resume      ") :]
    assert [text for text in said if text not in told] == [], told
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files
    assert ("plan:" in told) == ("parallel.microbatches=4" in settings)


def test_settings_with_lists_inside_are_read_back_equal(tmp_path):
    scaling = "model.rotary_scaling={type: longrope, factor: 4.0, short_factor: [1.0, 1.5], "
    scaling += "long_factor: [2.0, 3.0], original_max_position_embeddings: 16}"
    job = load(tmp_path, scaling, "model.head_dim=4")
    checkpoint(job, steps=10)
    assert resume.find(jobs.load(job.run_dir), (), print).changes == ()


def test_another_tokenizer_is_refused_and_the_folder_keeps_its_own(tmp_path):
    """Wherever the files of the first one are, and where they are gone."""
    paths = [tmp_path / name for name in ("one.model", "two.model")]
    for path in paths:
        path.write_text(path.name)  # of which the digest is all that counts here
    checkpoint(load(tmp_path, f"data.tokenizer={paths[0]}"), steps=10)
    own = tmp_path / "run" / "tokenizer"
    assert (own / "tokenizer.model").read_text() == "one.model"
    paths[0].unlink()
    job = jobs.load(tmp_path / "run")
    assert job.config.data.tokenizer == str(own)
    assert resume.find(job, (), print).changes == ()
    with pytest.raises(CheckpointError) as error:
        resume.find(jobs.load(tmp_path / "run", [f"data.tokenizer={paths[1]}"]), (), print)
    named = f"data.tokenizer: {own} -> {paths[1]}, whose files differ"
    assert error.value.found.startswith(named)
    assert error.value.fix.endswith("--allow data.tokenizer")
    start = checkpoint(load(tmp_path, f"data.tokenizer={own}"), steps=20)
    assert start.step == 10
    start = resume.find(load(tmp_path, f"data.tokenizer={paths[1]}"), "data.tokenizer", print)
    job_files.save(start.job, start.step)
    assert (own / "tokenizer.model").read_text() == "two.model"
    assert (own.with_name("tokenizer.000020") / "tokenizer.model").read_text() == "one.model"


def test_a_setting_that_a_checkpoint_does_not_know_had_its_default(tmp_path, monkeypatch):
    islands = ("parallel.clusters=null", "parallel.across=local_updates")
    job, known = load(tmp_path, *islands), changed_settings.settings

    def before(job):
        found = known(job)
        del found["model"]["pattern"], found["model"]["window"], found["optimizer"]["name"]
        for name in ("fragments", "delay", "blend"):
            del found["parallel"][name]
        return found

    monkeypatch.setattr(committing, "settings", before)
    checkpoint(job, steps=10)
    monkeypatch.undo()
    assert not resume.find(job, (), print).changes
    told = resume.find(load(tmp_path, *islands, "parallel.blend=0.5"), (), print).describe()
    assert "  parallel.blend: null -> 0.5" in told
    with pytest.raises(CheckpointError, match="is of another model"):
        resume.find(load(tmp_path, "model.pattern=[window_block]", "model.window=4"), (), print)


def test_blocks_that_fp8_excludes_are_of_the_model(tmp_path):
    """Earlier versions excluded none."""
    job = load(tmp_path, "model.fp8={}")
    assert changed_settings.settings(job)["model"]["fp8"] == {"scaling": "delayed", "history": 16}
    checkpoint(job, steps=10)
    assert not resume.find(job, (), print).changes
    with pytest.raises(CheckpointError, match="is of another model"):
        resume.find(load(tmp_path, "model.fp8.exclude_down=true"), (), print)


MODEL = ("width=64", "num_layers=3", "num_kv_heads=2", "activation=swiglu", "norm=rms_norm")


@pytest.mark.parametrize("setting", [f"model.{setting}" for setting in MODEL])
def test_another_model_is_refused_and_not_offered(folder, setting):
    name = setting.partition("=")[0]
    with pytest.raises(CheckpointError) as error:
        resume.find(load(folder, setting), [name], print)
    assert f"{name}: " in str(error.value)
    assert "--allow" not in str(error.value)


def test_a_table_of_positions_has_a_length(tmp_path):
    checkpoint(load(tmp_path, "model.positions=learned"), steps=10)
    job = load(tmp_path, "model.positions=learned", "model.context_length=16")
    with pytest.raises(CheckpointError, match="is of another model"):
        resume.find(job, ["model.context_length"], print)


TOLD = {
    "optimizer.beta2=0.99": "optimizer.beta2: 0.95 -> 0.99",
    "optimizer.clip_norm=null": "optimizer.clip_norm: 1.0 -> null",
    "train.compute_dtype=bfloat16": "train.compute_dtype: float32 -> bfloat16",
    "train.steps=20": "train.steps: 10 -> 20",
    "kernels.deterministic_attention=true": "kernels.deterministic_attention: false -> true",
    "parallel.microbatches=4": "plan: ",
}


def test_where_experts_lay_is_told_where_it_changes(tmp_path):
    model = "model.experts={}", "model.pattern=[block, expert_block]"
    checkpoint(load(tmp_path, *model), steps=10)
    assert "experts" not in newest_whole.find(tmp_path / "run", print).settings
    by_load = *model, "parallel.expert_placement=load"
    told = resume.find(load(tmp_path, *by_load), (), print).describe()
    assert "  parallel.expert_placement: number -> load" in told
    checkpoint(load(tmp_path, *by_load), steps=20)
    assert not resume.find(load(tmp_path, *by_load), (), print).changes
    again = load(tmp_path, *model, "parallel.expert_chunks=2")
    told = [str(change) for change in resume.find(again, (), print).changes]
    assert told[0] == "parallel.expert_placement: load -> number"
    assert [change.partition(":")[0] for change in told[1:]] == ["plan"]  # which has the chunks
    # A manifest of an earlier version has them itself.
    found = newest_whole.find(tmp_path / "run", print)
    found.settings["experts"] = {"expert_placement": "number", "expert_chunks": 4}
    told = [str(change) for change in changed_settings.changes_since(found, load(tmp_path, *model))]
    assert told == ["parallel.expert_chunks: 4 -> 1"]


@pytest.mark.parametrize("setting, said", TOLD.items())
def test_other_changes_are_told(folder, setting, said):
    told = resume.find(load(folder, setting), (), print).describe()
    assert told[0] == "resuming after step 10"
    assert [line for line in told if line.startswith(f"  {said}")]


def test_another_file_of_ones_own_code_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "import optax\ndef f(config):\n    return optax.scale(1.0)\n"
    settings = ["optimizer.name=optax", "optimizer.function=alien_rule:f"]
    told = []
    for text in (code, code, code.replace("1.0", "2.0")):
        (tmp_path / "alien_rule.py").write_text(text)
        if not told:
            checkpoint(load(tmp_path, *settings), steps=10)
        told.append(resume.find(load(tmp_path, *settings), (), print).describe())
    assert told[:2] == [["resuming after step 10"]] * 2
    assert told[2][1].startswith("  versions.source of optimizer.function: ")


@pytest.mark.parametrize(
    "settings", [(), ("train.log_every_s=9",), ("checkpoint.keep=5",), ("distributed.streams=1",)]
)
def test_what_shapes_nothing_needs_no_word(folder, settings):
    assert resume.find(load(folder, *settings), (), print).describe() == ["resuming after step 10"]


def test_all_that_is_refused_is_listed_at_once_and_one_name_does_not_allow_another(folder):
    job = load(folder, "train.seed=1", "data.documents=mask", "optimizer.beta2=0.9")
    for allow, missing in (((), "train.seed,data.documents"), ("train.seed", "data.documents")):
        with pytest.raises(CheckpointError) as error:
            resume.find(job, allow, print)
        assert error.value.fix.endswith(f"--allow {missing}")
        assert "beta2" not in str(error.value)
    for allow in (["train.seed,data.documents"], ["train.seed", "data.documents"]):
        assert resume.find(job, allow, print).step == 10


@pytest.mark.parametrize("name", ["train.sed", "train.global_batch", "optimizer.beta2", "seed"])
def test_a_name_that_allows_nothing_is_refused(folder, name):
    job = load(folder, "train.seed=1", "optimizer.beta2=0.9")
    with pytest.raises(ConfigError) as error:
        resume.find(job, [f"train.seed,{name}"], print)
    assert error.value.found == name
    assert "write --allow train.seed" in error.value.fix


def test_there_is_nothing_to_allow_in_a_new_run(tmp_path):
    with pytest.raises(ConfigError, match=r"leave it out$"):
        resume.find(load(tmp_path), ["train.seed"], print)


def test_what_was_allowed_needs_no_permission_when_the_start_is_repeated(folder):
    """A scheduler starts again, before and after the next checkpoint, with the option or not."""
    job = load(folder, "train.seed=1")
    resume.find(job, ["train.seed"], print)
    for allow in ((), ["train.seed"]):
        assert resume.find(job, allow, print).step == 10
    checkpoint(job, steps=15)
    for allow in ((), ["train.seed"]):
        assert resume.find(job, allow, print).changes == ()
    for seed in (0, 2):  # what was allowed is this change, here
        with pytest.raises(CheckpointError):
            resume.find(load(folder, f"train.seed={seed}"), (), print)
    resume.find(load(folder, "train.seed=0"), ["train.seed"], print)
    checkpoint(load(folder, "train.seed=0"), steps=20)
    with pytest.raises(CheckpointError):  # and not once more, from a later step
        resume.find(job, (), print)


# ---- data ----------------------------------------------------------------------------------------


def test_the_same_data_needs_no_word(folder):
    assert resume.find(load(folder), (), print).check_data(DATA) == []


def test_a_new_run_takes_any_data(tmp_path):
    assert resume.find(load(tmp_path), (), print).check_data(DATA) == []


@pytest.mark.parametrize("name", DATA)
def test_other_data_is_refused_unless_it_is_allowed_by_name(folder, name):
    other = {**DATA, name: "f" * 64}
    of_code = name.startswith("order")
    kind = CheckpointError if of_code else LostDataError
    with pytest.raises(kind) as error:
        resume.find(load(folder), (), print).check_data(other)
    assert error.value.exit_status == (2 if of_code else REQUEUE)  # a file may come back
    said = f"data.corpus: {name} {DATA[name][:12]} -> {name} ffffffffffff"
    assert error.value.found == said
    assert error.value.fix.endswith("--allow data.corpus")
    allowed = resume.find(load(folder), ["data.corpus"], print)
    assert allowed.check_data(other) == [f"  {said}"]
    assert resume.find(load(folder), (), print).check_data(other) == [f"  {said}"]  # a restart
    with pytest.raises(kind):
        resume.find(load(folder), (), print).check_data({**DATA, name: "e" * 64})


def test_whoever_may_take_other_files_need_not_say_so_twice(folder):
    start = resume.find(load(folder, "data.pattern=*.txt"), ["data.pattern"], print)
    files = {**DATA, "train": "f" * 64, "order of islands": "f" * 64}  # which there were not before
    assert start.check_data(files) == []
    for name in ("order", "order of a mixture"):
        with pytest.raises(CheckpointError, match=rf"{name} [34]{{12}} -> {name} f"):
            start.check_data({**files, name: "f" * 64})


@pytest.mark.one_version
def test_a_corpus_that_has_changed_since_the_checkpoint_ends_the_session(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text("x = 1\n" * 500)
    (corpus / "b.py").write_text("y = 2\n" * 500)
    settings = [f"data.corpus={corpus}", "data.validation_fraction=0.0"]
    settings += ["optimizer.schedule=constant"]
    go_on = lambda steps, **options: train(  # on as many devices as all tests of this process
        tmp_path, {"a": (8,)}, *settings, f"train.steps={steps}", **options
    )
    go_on(1)
    (corpus / "b.py").write_text("y = 3\n" * 500)
    written = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.yaml")}
    with pytest.raises(LostDataError, match=r"data.corpus: train \w{12} -> train \w{12}"):
        go_on(2)
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.yaml")} == written
    trainer, _ = go_on(2, allow="data.corpus")
    assert trainer.finished


def test_sequences_are_counted_over_changes_of_the_batch(folder):
    job = load(folder, "train.global_batch=16")
    resume.find(job, ["train.global_batch"], print)
    assert checkpoint(job, steps=13).sequences == 80
    assert resume.find(job, (), print).sequences == 80 + 3 * 16


def files(folder):
    return sorted(path.name for path in (folder / "run").glob("*.yaml"))


def test_earlier_files_stay_where_they_say_something_else(folder):
    kept = (folder / "run/config.yaml").read_text()
    own = ["config.yaml", "plan.yaml", "topology.yaml"]
    job_files.save(jobs.load(folder / "run"), 10)  # by way of the run folder, as most resume
    assert files(folder) == own
    job_files.save(load(folder, "optimizer.beta2=0.9"), 10)
    assert files(folder) == sorted([*own, "config.000010.yaml"])
    assert (folder / "run/config.000010.yaml").read_text() != kept  # it names another folder
    assert jobs.load(folder / "run/config.000010.yaml").config.optimizer.beta2 == 0.95
    job_files.save(
        load(folder, "optimizer.beta2=0.8"), 10
    )  # no step was kept that was made with 0.9
    assert jobs.load(folder / "run/config.000010.yaml").config.optimizer.beta2 == 0.95
    undo = job_files.save(load(folder, "parallel.microbatches=4"), 12)
    undo()  # the start was refused
    assert files(folder) == sorted([*own, "config.000010.yaml"])
    assert jobs.load(folder / "run").config.optimizer.beta2 == 0.8
    job_files.save(load(folder, "parallel.microbatches=4"), 12)
    added = ["config.000010.yaml", "config.000012.yaml", "plan.000012.yaml"]
    assert files(folder) == sorted([*own, *added])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_advice_to_train_longer_says_what_the_rate_will_be(tmp_path, schedule):
    settings = [f"optimizer.schedule={schedule}", "optimizer.learning_rate=0.004"]
    settings += ["optimizer.decay_steps=4"] if schedule == "wsd" else []
    checkpoint(load(tmp_path, *settings), steps=10)
    advice = resume.find(load(tmp_path, *settings), (), print).finished()
    command = shlex.split(advice[1].partition("python -m launch ")[2])
    args = parse(command)
    longer = jobs.load(args.target, args.overrides)
    told = resume.find(longer, (), print).describe()
    rates = [float(learning_rate(longer.config.optimizer, n, 10)) for n in (10, 20)]
    if schedule == "constant":
        assert len(advice) == 2
        assert not [line for line in told if "learning rate of" in line]
        return
    shown = f"learning rate of step 11 is 4.0e-04 -> {rates[1]:.1e}"
    assert shown in advice[2]
    why = f"(train.steps 10 -> 20 stretches the {schedule} schedule)"
    assert f"  {shown.replace(' is', ':')} {why}" in told
    [added] = [line.partition(", add ")[2] for line in advice if ", add " in line]
    steady = jobs.load(args.target, [*args.overrides, *shlex.split(added)])
    assert learning_rate(steady.config.optimizer, 20, 15) == pytest.approx(0.0004)
    assert "learning rate" not in "".join(resume.find(steady, (), print).describe()[-1:])


def test_by_tokens_the_rate_is_told_where_another_batch_changes_it(tmp_path):
    by = ["optimizer.schedule=linear", "optimizer.schedule_by=tokens", "optimizer.warmup_steps=0"]
    checkpoint(load(tmp_path, *by, "train.steps=20"), steps=10)
    # Ten steps have a half of the batch of the others: five whole steps are before step 11.
    ramped = load(tmp_path, *by, "train.steps=20", "train.rampup=[{steps: 10, global_batch: 4}]")
    told = resume.find(ramped, "train.rampup", print).describe()
    was, now = (3e-3 * (1 - 0.9 * fallen) for fallen in (10 / 19, 5 / 14))
    [line] = [line for line in told if "learning rate of" in line]
    assert f"step 11: {was:.1e} -> {now:.1e} (train.rampup [] -> " in line
    (other := tmp_path / "other").mkdir()
    [added] = [
        line.partition(", add ")[2] for line in finished_by_tokens(other) if ", add " in line
    ]
    assert added == (
        "optimizer.schedule=constant optimizer.learning_rate=0.0003 optimizer.decay_tokens=null"
    )


def finished_by_tokens(folder):
    own = ["optimizer.schedule=wsd", "optimizer.schedule_by=tokens", "optimizer.warmup_steps=0"]
    job = load(folder, *own, "optimizer.decay_tokens=512")
    checkpoint(job, steps=10)
    return resume.find(job, (), print).finished()


@pytest.mark.one_version
def test_another_batch_takes_the_sequences_that_follow(tmp_path, monkeypatch):
    """4 steps with 8 and 4 with 4 sequences: the first 48 in order, none twice, none left out."""
    seen = []
    place = Placer.place

    def note(self, host, *args, **options):
        seen.append(host["token_BL"])
        return place(self, host, *args, **options)

    monkeypatch.setattr(Placer, "place", note)

    clusters = {"a": (8,)}  # as many devices as there are
    train(tmp_path, clusters, "train.steps=4")
    settings = ["train.steps=8", "train.global_batch=4"]
    trainer, told = train(tmp_path, clusters, *settings, allow="train.global_batch")
    assert [record["step"] for record in trainer.history] == list(range(1, 9))
    again, _ = train(tmp_path, clusters, *settings)
    assert again.finished
    assert again.history == trainer.history
    assert "  train.global_batch: 8 -> 4\n" in told
    got = np.concatenate(seen)
    assert got.shape[0] == 4 * 8 + 4 * 4
    seen.clear()
    train(tmp_path, clusters, "train.steps=6", name="whole")
    np.testing.assert_array_equal(got, np.concatenate(seen))
    content = json.loads((tmp_path / "run/checkpoints/step_00000008/manifest.json").read_text())
    assert content["sequences"] == 48


def test_a_checkout_need_not_be_installed(monkeypatch):
    def version_of(package):
        if package == "holmesjax":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(computing, "version", version_of)
    assert jobs.versions()["holmesjax"] == "not installed"
