"""Run files: what they load as, and how every mistake in one is reported."""

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax import config as configs
from holmesjax.config import ModelConfig, OptimizerConfig, ParallelConfig
from holmesjax.errors import ConfigError, Mistakes
from tests.cases import cases

RUN = """\
topology: configs/topologies/ib_roce.yaml
run:
  dir: runs/test
train:
  steps: 100
  global_batch: 32
model:
  num_layers: 6
  width: 64
  num_heads: 4
  context_length: 128
data:
  corpus: python-stdlib
optimizer:
  learning_rate: 3e-4
parallel:
  microbatches: 4
"""


@pytest.fixture
def run_file(tmp_path):
    """Writes a run file; returns its path."""

    def write(text=RUN):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refused(path, overrides=()):
    """The mistakes that `load` reports, as (where, problem, found, fix)."""
    with pytest.raises(Mistakes) as error:
        configs.load(path, overrides)
    mistakes = error.value.mistakes
    assert all(type(mistake) is ConfigError for mistake in mistakes)
    for mistake in mistakes:
        text = str(mistake)
        assert text in str(error.value)
        assert not any(
            jargon in text for jargon in ("pydantic", "Input should", "<class", "[type=")
        )
    return [(m.where, m.problem, str(m.found), m.fix) for m in mistakes]


def test_load_reads_values_and_defaults(run_file):
    config = configs.load(run_file())
    assert config.topology == "configs/topologies/ib_roce.yaml"
    assert config.optimizer.learning_rate == 3e-4
    assert config.model == ModelConfig(num_layers=6, width=64, num_heads=4, context_length=128)
    assert config.parallel == ParallelConfig(microbatches=4)
    assert config.checkpoint.keep == 2


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
    ("distributed.heartbeat_timeout_s=1e-9", "must be at least 0.1", "1e-09", "use 0.1 or more"),
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


# Overrides, then what is printed, less the line.
BAD_COMBINATIONS = """\
model.width=66
model.width: must be a multiple of model.num_heads = 4
  found: 66
  fix: use 64 or 68, or set model.head_dim

model.num_kv_heads=3
model.num_kv_heads: must divide model.num_heads = 4: 4 / 3 is not whole
  found: 3
  fix: use 1, or change model.num_heads

model.width=12
model.width: the width of a head must be even for rotary positions, which turn pairs of numbers
  found: width / num_heads = 12 / 4 = 3
  fix: use model.width = 16, or positions: learned

model.head_dim=7
model.head_dim: must be even for rotary positions, which turn pairs of numbers
  found: 7
  fix: use 8

model.rotary_scaling.type=linear
model.rotary_scaling.factor: is missing: type linear needs it
  found: nothing
  fix: copy it from config.json

model.rotary_scaling.type=linear model.rotary_scaling.factor=2.0 model.rotary_scaling.beta_fast=3.0
model.rotary_scaling.beta_fast: is only for type yarn, not for linear
  found: 3.0
  fix: remove it

model.rotary_scaling.type=dynamic
model.rotary_scaling.type: changes frequencies with the length of each text, so keys that are \
cached would turn otherwise than new ones
  found: dynamic
  fix: use one of linear, llama3, yarn, longrope

model.rotary_scaling.type=llama3 model.rotary_scaling.factor=8.0 \
model.rotary_scaling.low_freq_factor=4.0 model.rotary_scaling.high_freq_factor=1.0 \
model.rotary_scaling.original_max_position_embeddings=64
model.rotary_scaling.high_freq_factor: must be more than low_freq_factor = 4.0
  found: 1.0
  fix: use 1.0 and 4.0, as Llama 3.1

model.rotary_scaling.type=yarn model.rotary_scaling.factor=2.0 \
model.rotary_scaling.original_max_position_embeddings=64 model.rotary_scaling.beta_slow=40.0
model.rotary_scaling.beta_fast: must be more than beta_slow = 40.0
  found: 32.0
  fix: use 32.0 and 1.0, or leave both out

model.rotary_scaling.type=yarn model.rotary_scaling.factor=2.0 \
model.rotary_scaling.original_max_position_embeddings=64 model.rotary_scaling.mscale=1.0
model.rotary_scaling.mscale: counts only beside mscale_all_dim
  found: 1.0
  fix: add mscale_all_dim, or remove mscale

model.rotary_scaling.type=longrope model.rotary_scaling.factor=2.0 \
model.rotary_scaling.original_max_position_embeddings=64 model.rotary_scaling.short_factor=[1.0] \
model.rotary_scaling.long_factor=[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0]
model.rotary_scaling.short_factor: must have one number for each of the 8 pairs of a head that turn
  found: 1 numbers
  fix: give 8 numbers

model.rotary_fraction=0.2
model.rotary_fraction: must leave an even number of a head's 16 numbers to turn
  found: 0.2: 3 of 16
  fix: use 0.25

model.positions=learned model.rotary_fraction=0.5
model.rotary_fraction: is only for rotary positions, not for learned ones
  found: 0.5
  fix: remove it, or set model.positions to rotary

model.window_rotary_base=10.0
model.window_rotary_base: is only for layers of the kind window_block
  found: 10.0
  fix: remove it, or add window_block to model.pattern

model.lora.targets=[c_attn,query]
model.lora.targets: must name each weight once: query would have two adapters
  found: ['c_attn', 'query']
  fix: leave one of the two names out

model.lora.targets=[gate_up_proj]
model.lora.targets: must be weights of the model: a gelu has no gate
  found: ['gate_up_proj']
  fix: leave the gate out, or use swiglu or geglu

train.steps=9 train.profile_steps=[2,10]
train.profile_steps: must each be at most train.steps = 9
  found: [2, 10]
  fix: use earlier steps, or more train.steps

train.profile_steps=[a]
train.profile_steps[0]: must be a whole number
  found: the text 'a'
  fix: write a number such as 8

model.module=m:f model.fp8={}
model.fp8: is for the built-in layers, not for the layers of model.module = m:f
  found: a section
  fix: leave it out

model.fp8={} model.lora={}
model.fp8: cannot be set beside model.lora: frozen weights have no products in fp8
  found: both
  fix: leave one of the two out

model.fp8.scaling=current model.fp8.history=4
model.fp8.history: is only for scaling delayed: a current scale reads no earlier step
  found: 4
  fix: remove it, or set model.fp8.scaling to delayed

model.preset=qwen3_06b
model.preset: no such model
  found: the text 'qwen3_06b'
  fix: did you mean 'qwen3_0b6'? (in configs/models/)

model.vocab_size=255
model.vocab_size: must be at least 256: the tokens of the corpus are bytes
  found: 255
  fix: use 256, or a padded size

run.dir=~/runs/a
run.dir: must be a path as it is: only a shell knows what ~ is, and at the start of a word
  found: ~/runs/a
  fix: write it out, as /home/NAME/runs/a

data.corpus=~/text
data.corpus: must be a path as it is: only a shell knows what ~ is, and at the start of a word
  found: ~/text
  fix: write it out, as /home/NAME/text

parallel.layers=[4,3]
parallel.layers: must sum to model.num_layers = 6
  found: 4 + 3 = 7
  fix: give numbers with sum 6, or leave the key out: the planner chooses

parallel.layers=[4,2] parallel.stages=3
parallel.layers: must have one for each of parallel.stages = 3 stages
  found: [4, 2]: 2 numbers
  fix: give 3 numbers, or set parallel.stages to 2

parallel.clusters=[a,b] parallel.stages=3
parallel.clusters: must have one for each of parallel.stages = 3 stages
  found: ['a', 'b']: 2 names
  fix: give 3 names, or set parallel.stages to 2

parallel.clusters=[a,b] parallel.layers=[2,2,2]
parallel.clusters: must have one for each of parallel.layers = [2, 2, 2]
  found: ['a', 'b']
  fix: give 3 names, or leave one of the two out

parallel.clusters=[a,b,a]
parallel.clusters: stages of a cluster must be neighbours in the pipeline
  found: ['a', 'b', 'a']
  fix: put those of 'a' beside each other

parallel.stages=7
parallel.stages: must be at most model.num_layers = 6: a layer for each stage
  found: 7
  fix: use 6 or less, or more layers

parallel.schedule=interleaved_1f1b parallel.chunks=1
parallel.chunks: must be at least 2 for schedule interleaved_1f1b
  found: 1
  fix: use 2, or set parallel.schedule to 1f1b

parallel.chunks=2
parallel.chunks: is only for schedule interleaved_1f1b, which must be set
  found: 2
  fix: remove it, or set parallel.schedule to interleaved_1f1b

parallel.schedule=interleaved_1f1b parallel.chunks=4 parallel.stages=2
parallel.chunks: chunks * stages must be at most model.num_layers = 6
  found: 4 * 2 = 8
  fix: use 3 or less, or more layers

parallel.schedule=interleaved_1f1b parallel.chunks=2 parallel.stages=4
parallel.chunks: chunks * stages must be at most model.num_layers = 6
  found: 2 * 4 = 8
  fix: use fewer stages

parallel.schedule=interleaved_1f1b parallel.chunks=2 parallel.layers=[5,1]
parallel.layers: must each be at least parallel.chunks = 2: a layer for each chunk
  found: [5, 1]
  fix: give each stage 2 layers or more, or use fewer chunks

parallel.schedule=zero_bubble parallel.activation_checkpointing=dots
parallel.activation_checkpointing: must be none for schedule zero_bubble: computing layers again \
would tie the gradients of their weights back to B
  found: dots
  fix: use none, or set parallel.schedule to 1f1b

parallel.tensor=8
model.num_heads: must be a multiple of parallel.tensor = 8
  found: 4
  fix: use 8, or change parallel.tensor

parallel.tensor=4 model.num_kv_heads=2
model.num_kv_heads: must be a multiple of parallel.tensor = 4
  found: 2
  fix: use 4, or change parallel.tensor

parallel.tensor=4 model.mlp_width=130
model.mlp_width: must be a multiple of parallel.tensor = 4
  found: 130
  fix: use 128 or 132, or change parallel.tensor

parallel.tensor=4 model.vocab_size=257
model.vocab_size: must be a multiple of parallel.tensor = 4
  found: 257
  fix: use 256 or 260, or change parallel.tensor

train.global_batch=30
train.global_batch: must be a multiple of parallel.microbatches = 4
  found: 30 = 7 * 4 + 2
  fix: use 28 or 32, or change the number of parts

train.global_batch=3
train.global_batch: must be a multiple of parallel.microbatches = 4
  found: 3 = 0 * 4 + 3
  fix: use 4, or change the number of parts

train.global_batch=36 parallel.data=2
train.global_batch: must be a multiple of parallel.data * parallel.microbatches = 2 * 4 = 8
  found: 36 = 4 * 8 + 4
  fix: use 32 or 40, or change the number of parts

train.global_batch=36 parallel.data=2 parallel.fsdp=2
train.global_batch: must be a multiple of parallel.data * parallel.fsdp * parallel.microbatches = \
2 * 2 * 4 = 16
  found: 36 = 2 * 16 + 4
  fix: use 32 or 48, or change the number of parts

train.global_batch=36 parallel.fsdp=2
train.global_batch: must be a multiple of parallel.fsdp * parallel.microbatches = 2 * 4 = 8
  found: 36 = 4 * 8 + 4
  fix: use 32 or 40, or change the number of parts

parallel.fsdp=3 train.global_batch=36
model.width: must be a multiple of parallel.fsdp = 3
  found: 64
  fix: use 63 or 66, or change parallel.fsdp

parallel.fsdp=4 parallel.context=32
model.width: must be a multiple of parallel.fsdp * parallel.context = 4 * 32 = 128
  found: 64
  fix: use 128, or change parallel.fsdp or parallel.context

parallel.context=64 model.context_length=96
model.context_length: must be a multiple of 2 * parallel.context = 2 * 64 = 128
  found: 96
  fix: use 128, or change parallel.context

optimizer.schedule=wsd
optimizer.decay_steps: is missing: schedule wsd needs it
  found: nothing
  fix: add the number of steps at the end in which the learning rate falls

train.deterministic=true
kernels.deterministic_attention: must be true for train.deterministic: without it two runs differ
  found: False
  fix: set it to true, or train.deterministic to false

train.rampup=[{"steps":5,"global_batch":32}]
train.rampup[0].global_batch: must be below the next batch, of 32
  found: 32
  fix: use 31 or less

train.eval_ema=true
train.eval_ema: needs optimizer.ema_decay: without it there is no average of the weights
  found: True
  fix: set optimizer.ema_decay, such as 0.999

optimizer.muon_consistent_rms=0.1
optimizer.muon_consistent_rms: is only for optimizer muon, not for adamw
  found: 0.1
  fix: leave it out, or set optimizer.name to muon

optimizer.decay_steps=9
optimizer.decay_steps: is only for schedule wsd, not for cosine
  found: 9
  fix: remove it, or set optimizer.schedule to wsd

optimizer.schedule=wsd optimizer.decay_steps=91 optimizer.warmup_steps=10
optimizer.decay_steps: warmup_steps + decay_steps must be at most train.steps = 100
  found: 10 + 91 = 101
  fix: use 90 or less, or more steps

optimizer.schedule_by=tokens optimizer.warmup_steps=10
optimizer.warmup_steps: is only for a schedule by steps
  found: 10
  fix: give optimizer.warmup_tokens, or set optimizer.schedule_by to steps

optimizer.warmup_tokens=1000
optimizer.warmup_tokens: is only for a schedule by tokens
  found: 1000
  fix: give optimizer.warmup_steps, or set optimizer.schedule_by to tokens

optimizer.schedule=wsd optimizer.schedule_by=tokens
optimizer.decay_tokens: is missing: schedule wsd needs it
  found: nothing
  fix: add the number of tokens at the end in which the learning rate falls

optimizer.schedule=wsd optimizer.schedule_by=tokens optimizer.warmup_tokens=9 \
optimizer.decay_tokens=307192 train.rampup=[{"steps":50,"global_batch":16}]
optimizer.decay_tokens: warmup_tokens + decay_tokens must be at most the tokens of the run = 307200
  found: 9 + 307192 = 307201
  fix: use 307191 or less, or more steps

train.eval_every=5 data.validation_fraction=0
data.validation_fraction: must be more than 0: train.eval_every = 5 asks for validation
  found: 0.0
  fix: use 0.05, or set train.eval_every to 0
"""


@cases("case", BAD_COMBINATIONS.strip().split("\n\n"))
def test_settings_that_do_not_fit_each_other(run_file, case):
    overrides, message = case.split("\n", maxsplit=1)
    key = message.split(":")[0]
    by_override = [f"override {o}" for o in overrides.split() if o.startswith(f"{key}=")]
    [(where, problem, found, fix)] = refused(run_file(), overrides.split())
    assert where in by_override or where.endswith(f": {key}")
    assert f"{key}: {problem}\n  found: {found}\n  fix: {fix}" == message


AT_THE_LIMIT = [
    ["model.head_dim=6", "model.width=66"],
    ["model.width=12", "model.positions=learned"],
    ["parallel.layers=[1,2,3]", "parallel.stages=3"],
    ["parallel.stages=6"],
    ["parallel.schedule=interleaved_1f1b", "parallel.chunks=3", "parallel.stages=2"],
    ["parallel.schedule=interleaved_1f1b", "parallel.chunks=2", "parallel.layers=[4,2]"],
    ["parallel.schedule=zero_bubble", "parallel.activation_checkpointing=none"],
    ["parallel.schedule=eager_1f1b", "parallel.activation_checkpointing=full"],
    ["parallel.tensor=4"],
    ["train.global_batch=8", "parallel.data=2"],
    ["train.global_batch=16", "parallel.data=2", "parallel.fsdp=2"],
    ["optimizer.warmup_steps=101"],
    ["model.rotary_fraction=0.5", "model.rotary_scaling={type: linear, factor: 2.0}"],
    ["optimizer.schedule=wsd", "optimizer.warmup_steps=10", "optimizer.decay_steps=90"],
    [
        "optimizer.schedule=wsd",
        "optimizer.schedule_by=tokens",
        "optimizer.warmup_tokens=9",
        "optimizer.decay_tokens=307191",
        "train.rampup=[{steps: 50, global_batch: 16}]",
    ],
    ["data.validation_fraction=0"],
]


@pytest.mark.parametrize("overrides", AT_THE_LIMIT)
def test_settings_that_just_fit(run_file, overrides):
    configs.load(run_file(), overrides)


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
    for found in ("7", "[gpt2]", "../models/gpt2"):
        assert [where for where, *_ in refused(path, [f"model.preset={found}"])]


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
@given(st.text(min_size=1), st.floats(min_value=1e-300, max_value=1e300))
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
