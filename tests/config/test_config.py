"""Run files: what they load as, and how every mistake in one is reported."""

import dataclasses
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax import config as configs, job as jobs, job_files
from holmesjax.config import ModelConfig, OptimizerConfig, ParallelConfig, unread_settings
from holmesjax.errors import ConfigError, Mistakes
from holmesjax.files import yaml_files
from tests.config.settings_at_the_limit import AT_THE_LIMIT
from tests.jobs import write_run
from tests.run_files import RUN, refused


def test_load_reads_values_and_defaults(run_file):
    config = configs.load(run_file())
    assert config.topology == "configs/topologies/ib_roce.yaml"
    assert config.optimizer.learning_rate == 3e-4
    assert config.model == ModelConfig(num_layers=6, width=64, num_heads=4, context_length=128)
    assert config.parallel == ParallelConfig(microbatches=4)
    assert config.checkpoint.keep == 3


def test_a_run_folder_may_have_a_name_that_yaml_takes_for_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = jobs.load(write_run(tmp_path, {"a": (1,)}), {"run.dir": "42"})
    job_files.save(job, 0)
    assert jobs.load("42").run_dir.samefile("42")


def test_resolved_sizes():
    model = ModelConfig(num_layers=1, width=64, num_heads=4, context_length=8)
    assert (model.kv_heads, model.head_width, model.feed_forward_width) == (4, 16, 256)
    model = dataclasses.replace(model, num_kv_heads=2, head_dim=8, mlp_width=96)
    assert (model.kv_heads, model.head_width, model.feed_forward_width) == (2, 8, 96)


OVERRIDES = [
    ("train.steps=7", lambda c: c.train.steps, 7),
    ("optimizer.learning_rate=1e-3", lambda c: c.optimizer.learning_rate, 1e-3),
    ("optimizer.clip_norm=null", lambda c: c.optimizer.clip_norm, None),
    ("parallel.layers=[4, 2]", lambda c: c.parallel.layers, (4, 2)),
    ("run.dir=**/*.md", lambda c: c.run.dir, "**/*.md"),  # in YAML, an alias
    ("run.dir='007'", lambda c: c.run.dir, "007"),
    ("run.rehearse=true", lambda c: c.run.rehearse, True),
    ("checkpoint.every=10", lambda c: c.checkpoint.every, 10),  # a section that is not in the file
    ("log={tensorboard: true}", lambda c: c.log.tensorboard, True),
]


@pytest.mark.parametrize(("override", "get", "value"), OVERRIDES)
def test_overrides(run_file, override, get, value):
    assert get(configs.load(run_file(), [override])) == value


def test_the_last_override_wins(run_file):
    assert configs.load(run_file(), ["train.steps=1", "train.steps=2"]).train.steps == 2


# A change to the run file or an override; then where, what, found and how to repair it.
BAD_VALUES = [
    ("train.stepz=3", "no such setting", "stepz", "did you mean 'steps'?"),
    ("parallell.data=3", "no such setting", "parallell", "did you mean 'parallel'?"),
    ("tensor=2", "no such setting", "tensor", "write it in section 'parallel'"),
    ("train.learning_rate=1", "no such setting", "learning_rate", "in section 'optimizer'"),
    ("optimizer.steps=1", "no such setting", "steps", "write it in section 'train'"),
    ("train.learning_rat=1", "no such setting", "learning_rat", "choose from: steps, global_ba"),
    ("log.zzz=1", "no such setting", "zzz", "choose from: report, tensorboard, "),
    ("distributed.transport=tcp", "no longer a setting", "tcp", "delete it: boundaries always"),
    ("train.steps='12'", "must be a whole number", "the text '12'", "write 12 without quotes"),
    ("train.steps=1e3", "must be a whole number", "1000.0", "write 1000"),
    ("train.steps=1e30", "must be at most 2147483647", "1e+30", "use 2147483647 or less"),
    ("train.steps=-2.0", "must be at least 1", "-2.0", "use 1 or more"),
    ("model.width=1000000000", "must be at most 1048576", "1000000000", "use 1048576 or less"),
    ("run.dir=a\nb", "must be one line of readable", "'\\n'", "leave the character out"),
    ("distributed.heartbeat_timeout_s=1e-9", "must be at least 0.1", "1e-09", "use 0.1 or more"),
    ("optimizer.name=sophia", "must not be sophia: it estimates", "sophia", "use adamw, or lion"),
    ("train.compute_dtype=float16", "must not be float16: its least", "float16", "use bfloat16"),
    ("train.param_dtype=float16", "must not be float16: a parameter", "float16", "use bfloat16"),
    ("train.seed=1e20", "must be at most 9223372036854775807", "1e+20", "or less"),
    ("train.steps=2.5", "must be a whole number", "2.5", "write a number such as 8"),
    ("train.steps=true", "must be a whole number", "true", "write a number such as 8"),
    ("train.steps=null", "must be a whole number", "nothing (null)", "write a number such as 8"),
    ("train.steps=[1]", "must be a whole number", "a list of 1", "write a number such as 8"),
    ("train.steps=0", "must be at least 1", "0", "use 1 or more"),
    ("train.seed=-1", "must be at least 0", "-1", "use 0 or more"),
    ("train.steps=" + "9" * 500, "must be a whole number", "inf", "write a number such as 8"),
    ("optimizer.learning_rate=fast", "must be a number", "the text 'fast'", "such as 0.1"),
    ("optimizer.beta2='3e-4'", "must be a number", "the text '3e-4'", "0.0003 without quotes"),
    ("optimizer.learning_rate=0", "must be more than 0", "0", "use a number above 0"),
    ("optimizer.learning_rate=.inf", "must be a finite number", "inf", "such as 0.1"),
    ("optimizer.learning_rate=" + "9" * 390, "must be a finite number", "inf", "such as 0.1"),
    ("optimizer.learning_rate=3e4", "must be at most 1000.0", "30000.0", "use 1000.0 or"),
    ("optimizer.epsilon=1e-46", "must be at least 1.2e-38", "1e-46", "use 1.2e-38 or more"),
    ("optimizer.beta2=0.99999999", "must be at most 0.9999999", "0.99999999", "or less"),
    ("model.rotary_base=0.5", "must be at least 1.0", "0.5", "use 1.0 or more"),
    ("optimizer.beta1=.nan", "must be a finite number", "nan", "such as 0.9"),
    ("optimizer.beta1=1", "must be less than 1", "1", "use a number below 1"),
    ("model.lora.targets=all-linear", "must be a list", "'all-linear'", "write it as ["),
    ("optimizer.schedule=cosin", "must be one of constant,", "'cosin'", "did you mean 'cosine'?"),
    ("model.norm=3", "must be one of layer_norm, rms_norm", "3", "choose from: layer_norm, rms"),
    ("run.rehearse=yes", "must be true or false", "the text 'yes'", "write true or false"),
    ("run.rehearse=1", "must be true or false", "1", "write true or false"),
    ("kernels.deterministic_attention=yes", "must be true or false", "'yes'", "write true or"),
    ("run.dir=7", "must be a text", "7", "in quotes"),
    ("run.dir=''", "must not be empty", "the text ''", "write a text"),
    ("parallel.layers=3", "must be a list", "3", "write it as [1, 2]"),
    ("parallel.layers=[]", "must not be empty", "an empty list", "leave the key out"),
    ("train=5", "must be a section of keys", "5", "write keys below it: steps, global_batch"),
]


@pytest.mark.parametrize(("override", "problem", "found", "fix"), BAD_VALUES)
def test_a_bad_value_is_refused(run_file, override, problem, found, fix):
    [mistake, *rest] = refused(run_file(), [override])
    assert mistake[0] == f"override {override}"
    assert mistake[1].startswith(problem)
    assert found in mistake[2]
    assert mistake[3].endswith(fix) or fix in mistake[3]
    assert not rest


def _floats(hint, name=""):
    """The dotted names of the settings that are numbers, but for those in lists."""
    for setting, inner in get_type_hints(hint, include_extras=True).items():
        kinds = [kind for kind in (inner, *get_args(inner)) if get_origin(kind) is Annotated]
        if any(kind.__origin__ is float for kind in kinds):
            yield f"{name}{setting}"
        for section in () if get_origin(inner) is tuple else (inner, *get_args(inner)):
            if isinstance(section, type) and dataclasses.is_dataclass(section):
                yield from _floats(section, f"{name}{setting}.")


FLOATS = list(_floats(configs.Config))
NEEDED = {  # settings without which those of a section are mistakes
    "model.experts": "model.pattern=[expert_block]",
    "parallel.outer": "parallel.across=local_updates",
}


@pytest.mark.parametrize("value", ["1e300", "4e38", ".inf", ".nan", "-1"])
def test_a_number_that_no_training_and_no_clock_survives_is_refused(run_file, value):
    assert len(FLOATS) >= 38
    for name in FLOATS:
        needed = [text for start, text in NEEDED.items() if name.startswith(start)]
        found = refused(run_file(), [f"{name}={value}", *needed])
        [problem] = [
            problem_there
            for where, problem_there, *_ in found
            if where == f"override {name}={value}"
        ]
        words = ("must be at ", "must be more than 0", "must be a finite number", "must be less")
        assert problem.startswith(words), name


def test_a_clock_waits_for_eleven_days(run_file):
    names = [name for name in FLOATS if name.endswith("_s")]
    assert len(names) >= 6
    mailbox = ["parallel.across=local_updates", "parallel.meet=mailbox"]
    assert configs.load(run_file(), [*mailbox, *(f"{name}=1000000" for name in names)])


SETTINGS = [
    f"{section.name}.{setting.name}"
    for section in dataclasses.fields(configs.Config)
    if dataclasses.is_dataclass(section.type)
    for setting in dataclasses.fields(section.type)
]


@pytest.mark.parametrize("value", ["'?'", "maybe", "-1", "0.5", "true", "null", "[1]", "{a: 1}"])
def test_no_value_ends_in_a_traceback(run_file, value):
    """It is a value, or a mistake that is explained; a text is never a number or a yes."""
    path = run_file()
    for setting in SETTINGS:
        try:
            config = configs.load(path, [f"{setting}={value}"])
        except (ConfigError, Mistakes):
            continue
        section, name = setting.split(".")
        kept = getattr(getattr(config, section), name)
        assert isinstance(kept, bool) == (value == "true"), setting
        assert isinstance(kept, str) or value not in ("'?'", "maybe"), setting


def test_all_mistakes_of_a_file_are_reported_with_their_lines(run_file):
    text = RUN.replace("steps: 100", "steps: -1").replace("width: 64", "widht: 64")
    text = text.replace("num_heads: 4", "num_heads: 4\n  num_kv_heads: 3")
    text = text.replace("global_batch: 32", "global_batch: 30").replace("3e-4", "high")
    text = text.replace("  num_layers: 6\n", "")
    path = run_file(text)
    wheres = {where for where, *_ in refused(path, ["log.tensorbord=true"])}
    assert wheres == {
        f"{path}:8: model.widht",  # which is not also missing
        "override log.tensorbord=true",
        f"{path}:5: train.steps",
        f"{path}:7: model.num_layers",  # missing: the line of its section
        f"{path}:15: optimizer.learning_rate",
        f"{path}:10: model.num_kv_heads",  # found although model.width is unknown
        f"{path}:6: train.global_batch",
    }


def test_a_preset_stands_below_what_the_section_says(run_file):
    """On a command line, the settings that stand beside a preset in the file stay on top of it.

    A model that the file writes out has none, so that the preset stands for all of the section.
    """
    start, end = RUN.index("model:"), RUN.index("data:")
    scaling = "rotary_scaling: {type: linear, factor: 2.0}"
    section = f"model:\n  preset: llama3_1_8b\n  context_length: 512\n  {scaling}\n"
    path = run_file(RUN[:start] + section + RUN[end:])
    one = ["parallel=null", "train.global_batch=1"]
    model = configs.load(path, one).model
    assert (model.width, model.context_length, model.rotary_scaling.type) == (4096, 512, "linear")
    model = configs.load(path, [*one, "model.rotary_scaling.factor=4.0"]).model
    assert model.rotary_scaling.factor == 4.0
    changes = ["model.rotary_scaling.factor=16.0", "model.preset=llama3_2_1b"]
    model = configs.load(path, [*one, *changes]).model
    wanted = ModelConfig(**configs.preset("llama3_2_1b"))
    assert (model.rotary_scaling.type, model.rotary_scaling.factor) == ("linear", 16.0)
    beside = {"context_length": 512, "rotary_scaling": model.rotary_scaling}
    assert model == dataclasses.replace(wanted, **beside)
    plain = run_file()  # as the fixture writes it, with all of its model
    model = configs.load(plain, [*one, *changes]).model
    scaling = dataclasses.replace(wanted.rotary_scaling, factor=16.0)
    assert model == dataclasses.replace(wanted, rotary_scaling=scaling)
    assert configs.load(run_file(), ["model.preset=null"]) == configs.load(run_file())
    for preset in ("7", "[gpt2]", "../models/gpt2"):
        assert [where for where, *_ in refused(path, [f"model.preset={preset}"])]


def test_an_override_of_a_section_replaces_it(run_file):
    wheres = [where for where, *_ in refused(run_file(), ["model={num_layers: 6}"])]
    override = "override model={num_layers: 6}"
    assert wheres == [f"{override}: model.{k}" for k in ("width", "num_heads", "context_length")]


def test_a_section_with_nothing_in_it_is_one_of_defaults(run_file):
    assert configs.load(run_file(RUN + "log:\n")).log == configs.LogConfig()


SECTIONS = [
    (lambda: ModelConfig(num_layers=1, width=65, num_heads=4, context_length=8), "model.width"),
    (lambda: ParallelConfig(stages=2, layers=(1, 1, 1)), "parallel.layers"),
    (lambda: OptimizerConfig(learning_rate=1.0, schedule="wsd"), "optimizer.decay_steps"),
]


@pytest.mark.parametrize(("make", "where"), SECTIONS)
def test_a_section_made_in_python_checks_itself(make, where):
    with pytest.raises(Mistakes) as error:
        make()
    assert [mistake.where for mistake in error.value.mistakes] == [where]


def test_a_config_made_in_python_checks_itself(run_file):
    config = configs.load(run_file())
    with pytest.raises(Mistakes) as error:
        dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=30))
    assert [mistake.where for mistake in error.value.mistakes] == ["train.global_batch"]


@pytest.mark.parametrize("overrides", [[o] for o, *_ in OVERRIDES] + AT_THE_LIMIT)
def test_the_resolved_file_reads_back_equal(run_file, tmp_path, overrides):
    config = configs.load(run_file(), overrides)
    configs.save(config, tmp_path / "config.yaml")
    assert configs.load(tmp_path / "config.yaml") == config


@settings(deadline=None)  # the first load is slower
@given(
    st.text(min_size=1).filter(lambda text: not yaml_files.CONTROL.search(text)),
    st.floats(min_value=1e-300, max_value=10),
)
def test_any_text_and_number_read_back_equal(tmp_path_factory, text, rate):
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(RUN)
    config = configs.load(path)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate)
    data = dataclasses.replace(config.data, corpus="folder", pattern=text)
    config = dataclasses.replace(config, data=data, optimizer=optimizer)
    configs.save(config, path)
    assert configs.load(path) == config


def test_topology_path_is_found_from_three_places(run_file, tmp_path, monkeypatch):
    path = run_file(RUN.replace("configs/topologies/ib_roce.yaml", "mine.yaml"))
    config = configs.load(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError) as error:
        configs.topology_path(config, path)
    assert error.value.where == "topology"
    assert str(tmp_path) in error.value.found
    assert "ib_roce" in error.value.fix
    (tmp_path / "mine.yaml").touch()  # beside the run file
    assert configs.topology_path(config, path) == tmp_path / "mine.yaml"
    (elsewhere / "mine.yaml").touch()  # the current folder comes first
    assert configs.topology_path(config, path) == elsewhere / "mine.yaml"
    checkout = configs.load(run_file(RUN))  # nowhere near: from the checkout
    assert configs.topology_path(checkout, path).samefile(
        configs.CHECKOUT / "configs/topologies/ib_roce.yaml"
    )


def test_a_run_that_an_earlier_version_began_may_have_settings_that_nothing_reads(run_file):
    """A new run may not: they are defaults, as is what it reads in their place."""
    path = run_file()
    beside = ("optimizer.name=lion", "optimizer.epsilon=0.1", "optimizer.beta1=0.5")
    with pytest.raises(Mistakes, match=r"optimizer\.epsilon"):
        configs.load(path, beside)
    begun = unread_settings.of_begun_run(lambda: configs.load(path, beside))
    assert (begun.optimizer.name, begun.optimizer.beta1) == ("lion", 0.5)
    assert begun.optimizer.epsilon == configs.load(path).optimizer.epsilon
    assert dataclasses.replace(begun, run=begun.run) == begun  # it is checked as any other now
    saved = {"learning_rate": 1e-3, "name": "lion", "epsilon": 0.1, "beta1": 0.5}
    section = unread_settings.section_of_begun_run("optimizer", saved)
    assert section == OptimizerConfig(learning_rate=1e-3, name="lion", beta1=0.5)
    with pytest.raises(Mistakes):
        OptimizerConfig(**saved)
