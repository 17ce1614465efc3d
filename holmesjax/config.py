"""Settings of a run, as frozen dataclasses. Does not import JAX.

The dataclasses are the schema of `configs/runs/*.yaml`: a section of the file is a field of
`Config`. Validation never changes a value, reads the environment or starts anything. The
type of a setting stands beside it; the rules between settings are in `CHECKS`, below.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from holmesjax import schema, yaml_files
from holmesjax.errors import ConfigError, HolmesError, Mistakes

CHECKOUT = Path(__file__).parent.parent
STRICT = ConfigDict(extra="forbid")
PYTHON_STDLIB = "python-stdlib"  # a corpus that every machine has

# Strict: a text is no number, and true is not 1. A list may stand for a tuple.
# Sizes have an end far beyond any model or machine, so that a slip is told as one, and what is
# computed with them stays within 64 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Natural = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
NumLayers = Annotated[int, Field(ge=1, le=2**14, strict=True)]
Width = Annotated[int, Field(ge=1, le=2**20, strict=True)]
Wide = Annotated[int, Field(ge=1, le=2**24, strict=True)]
Length = Annotated[int, Field(ge=1, le=2**27, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
HeartbeatTimeout = Annotated[float, Field(ge=0.1, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]
AUTO = "auto"
Flag = Annotated[bool, Field(strict=True)]
Streams = Annotated[int, Field(ge=1, le=64, strict=True)]  # each is a socket and two threads
Port = Annotated[int, Field(ge=0, le=65535, strict=True)]
Moments = Literal["float32", "bfloat16", "int8"]
Schedule = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble"]
ClusterOfEachStage = Annotated[tuple[Text, ...], Field(min_length=1)]
LayersPerStage = Annotated[tuple[Count, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RunConfig:
    """The folders of a run."""

    dir: Text  # the run folder; made by the run
    rehearse: Flag = False  # one virtual CPU device for every device of the topology
    # The folder of compiled programs, kept from run to run; auto: holmesjax/programs in the user's
    # cache folder ($XDG_CACHE_HOME or ~/.cache); null: nowhere.
    compilation_cache: Text | None = AUTO

    def __post_init__(self) -> None:
        _refuse_mistakes(run=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TrainConfig:
    """The length of a run, its batches, and its number formats."""

    steps: Count  # optimizer steps of the whole run
    global_batch: Count  # sequences per step, over all replicas and microbatches
    seed: Seed = 0  # of the initial parameters and of the order of the data
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # parameters stay float32
    log_every_s: NonNegative = 2.0  # seconds between step lines on the console
    eval_every: Natural = 0  # steps between validations, and one at the end; 0: none
    eval_batches: Count = 4  # global batches per validation
    max_skipped: Count = 20  # steps in a row whose gradient is not finite, before the run ends


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModelConfig:
    """A decoder-only Transformer."""

    num_layers: NumLayers
    width: Width  # of the residual stream
    num_heads: Width  # query heads
    context_length: Length  # tokens in a sequence
    vocab_size: Wide = 256  # bytes
    num_kv_heads: Width | None = None  # key and value heads; None: as many as num_heads
    head_dim: Width | None = None  # None: width / num_heads
    mlp_width: Wide | None = None  # None: 4 * width
    positions: Literal["learned", "rotary"] = "rotary"
    rotary_base: Positive = 10_000.0
    activation: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    tied_embeddings: Flag = False  # the output projection is the token table

    def __post_init__(self) -> None:
        _refuse_mistakes(model=self)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.num_heads

    @property
    def feed_forward_width(self) -> int:
        return self.mlp_width or 4 * self.width


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DataConfig:
    """The corpus and how documents become sequences."""

    corpus: Text  # PYTHON_STDLIB, or a folder
    pattern: Text | None = None  # files, as a glob; None: every text file that is not hidden
    validation_fraction: Fraction = 0.05  # of the files, chosen by a hash of their path
    documents: Literal["concatenate", "mask"] = "concatenate"  # mask: attention stays inside each

    def __post_init__(self) -> None:
        _refuse_mistakes(data=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class OptimizerConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

    learning_rate: Positive  # the peak
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"  # after the warm-up
    warmup_steps: Natural = 0
    decay_steps: Count | None = None  # wsd only: steps of the final decay
    final_fraction: Fraction = 0.1  # of the peak, at the last step
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.1  # not on norms, biases and embeddings
    clip_norm: Positive | None = 1.0  # global norm over all stages; None: no clipping
    # How both are kept: 4, 2, or 17/16 bytes a number (kernels/moments.py).
    moments: Moments = "float32"

    def __post_init__(self) -> None:
        _refuse_mistakes(optimizer=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class KernelsConfig:
    """Who computes an array function; auto takes the best that the devices and the shapes allow."""

    attention: Literal["auto", "reference", "pallas", "cudnn"] = "auto"
    # The same gradients from the same inputs, to the bit; slower on Hopper, and never cuDNN.
    deterministic_attention: Flag = False
    # chunked: not all logits at once
    cross_entropy: Literal["auto", "reference", "chunked"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ParallelConfig:
    """The cut of a step over devices. The planner chooses each setting that is None."""

    stages: Count | None = None
    clusters: ClusterOfEachStage | None = None  # in the order of the pipeline
    layers: LayersPerStage | None = None  # Transformer layers of each stage
    data: Count | None = None  # replicas inside a stage
    fsdp: Count | None = None  # parts of each replica's parameters, gathered by layer (ZeRO-3)
    context: Count | None = None  # devices that share each sequence, and fsdp's parts
    tensor: Count | None = None  # devices that share each matrix product
    microbatches: Count | None = None  # per step, through each pipeline
    schedule: Schedule | None = None
    chunks: Count | None = None  # interleaved_1f1b only: runs of consecutive layers of a stage
    activation_checkpointing: Literal["none", "dots", "full"] | None = None

    def __post_init__(self) -> None:
        _refuse_mistakes(parallel=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PlanConfig:
    """The measure by which plans are compared; the topology has the prices."""

    objective: Literal["step_time", "tokens_per_dollar"] = "step_time"
    budget_dollars: Positive | None = None  # for all steps of the run


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DistributedConfig:
    """The processes of a run with a launcher, and how long they wait for each other."""

    processes: Literal["node", "device"] = "node"  # one of every stage's processes for each
    streams: Streams = 4  # connections between two processes, or more, so that all NICs have some
    port: Port = 0  # of the first stage's coordinator, then one for each stage; 0: free ones
    heartbeat_timeout_s: HeartbeatTimeout = (
        60.0  # until the end of a job that has lost a process or link
    )
    # Until the next sign of progress of a job that starts: a process comes, a program is compiled,
    # a layer is drawn.
    start_timeout_s: Positive = 600.0
    # For a step; None: 10 times the median so far, and at least 60 s. The first step has
    # start_timeout_s, and so has a checkpoint.
    step_timeout_s: Positive | None = None
    # For the step and the checkpoint of a run that is asked to stop. A little less than the 120 s
    # that the files for Slurm and Kubernetes give; both give 30 s where nobody says otherwise.
    stop_timeout_s: Positive = 100.0
    pull_timeout_s: Positive = 1800.0  # for one boundary of a process that lives, but is slow

    @property
    def silence_s(self) -> float:
        """After which a process or link is lost; the rest of the timeout is for saying so."""
        return 0.8 * self.heartbeat_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class CheckpointConfig:
    """When the state is written, besides at the end, and how much of it is kept."""

    every: Count | None = None  # steps between checkpoints; None: by the clock
    every_minutes: Positive | None = None  # between checkpoints; None: 10, where every is not set
    keep: Count = 2  # newest checkpoints

    def __post_init__(self) -> None:
        _refuse_mistakes(checkpoint=self)

    @property
    def minutes(self) -> float:
        """Between checkpoints, where steps do not say when."""
        return self.every_minutes or 10.0


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LogConfig:
    """Places for metrics besides the console and metrics.jsonl."""

    tensorboard: Flag | None = None  # needs the extra `tb`; None: if that is installed
    wandb: Flag = False  # needs the extra `wandb`


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Config:
    """One run."""

    topology: Text  # a file of configs/topologies/
    run: RunConfig
    train: TrainConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    kernels: KernelsConfig = dataclasses.field(default_factory=KernelsConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _refuse_mistakes(**{name: getattr(self, name) for name in SECTIONS})


SECTIONS = tuple(field.name for field in dataclasses.fields(Config) if field.name != "topology")
GONE = {"distributed.transport": "delete it: boundaries always travel over TCP"}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a run from a YAML file, with `"a.b=value"` overrides on top of it.

    Raises `Mistakes` with every mistake of the file and of the overrides at once.
    """
    document = yaml_files.read(path, ConfigError, overrides)
    if "clusters" in document.values and "model" not in document.values:
        problem, fix = "is a topology, not a run", "name a file of configs/runs/"
        raise ConfigError(str(path), problem, found="the key `clusters`", fix=fix)
    known, mistakes = schema.read(Config, document, GONE)
    for mistake in _mistakes(schema.known_values(known)):
        keys = tuple(mistake.where.split("."))
        mistakes.append(
            document.mistake(keys, mistake.problem, found=mistake.found, fix=mistake.fix)
        )
    if mistakes:
        raise Mistakes(mistakes)
    config: Config = schema.build(known)
    return config


def topology_path(config: Config, run_file: str | Path) -> Path:
    """The topology file of a run: from the current folder, the checkout, or beside the run file."""
    folders = [Path.cwd(), CHECKOUT, Path(run_file).parent]
    candidates = [folder / config.topology for folder in folders]  # an absolute path stays as it is
    for candidate in candidates:
        if yaml_files.may_be_file(candidate):
            return candidate
    known = {path.stem: path for path in sorted(CHECKOUT.glob("configs/topologies/*.yaml"))}
    near = schema.near(Path(config.topology).stem, list(known))
    found = f"{config.topology}, looked for in {', '.join(map(str, dict.fromkeys(folders)))}"
    fix = f"{near} (in configs/topologies/)"
    raise ConfigError("topology", "no such file", found=found, fix=fix)


def to_yaml(config: Config) -> str:
    """The file of a run with every default written out; `load` reads it back as equal."""
    return yaml_files.to_text(dataclasses.asdict(config))


def save(config: Config, path: str | Path) -> None:
    """Writes the resolved run."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")


# What must hold between settings. A check yields a mistake for each rule that is broken; `where` is
# the dotted path of the setting to blame. `load` runs it on files with other mistakes too.


def _wrong(where: str, problem: str, found: object, fix: str) -> ConfigError:
    return ConfigError(where, problem, found=found, fix=fix)


def _multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`: "60 or 66"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _cache_is_a_place(run: RunConfig) -> Iterator[ConfigError]:
    folder = run.compilation_cache
    if folder not in (None, AUTO) and not str(folder).startswith(("/", "~/")):
        problem = "must be auto, null, or a path from / or ~ on: processes start in other folders"
        fix = "write the whole path, or null to keep nothing"
        yield _wrong("run.compilation_cache", problem, folder, fix)


def _heads_share_width(model: ModelConfig) -> Iterator[ConfigError]:
    if model.head_dim is None and model.width % model.num_heads:
        problem = f"must be a multiple of model.num_heads = {model.num_heads}"
        fix = f"use {_multiples(model.width, model.num_heads)}, or set model.head_dim"
        yield _wrong("model.width", problem, model.width, fix)


def _heads_share_keys(model: ModelConfig) -> Iterator[ConfigError]:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if kv_heads is not None and heads % kv_heads:
        problem = f"must divide model.num_heads = {heads}: {heads} / {kv_heads} is not whole"
        fix = f"use {math.gcd(heads, kv_heads)}, or change model.num_heads"
        yield _wrong("model.num_kv_heads", problem, kv_heads, fix)


def _rotary_turns_pairs(model: ModelConfig) -> Iterator[ConfigError]:
    problem = "must be even for rotary positions, which turn pairs of numbers"
    if model.positions != "rotary":
        return
    if model.head_dim is not None:
        if model.head_dim % 2:
            yield _wrong("model.head_dim", problem, model.head_dim, f"use {model.head_dim + 1}")
    elif (head_width := model.width // model.num_heads) % 2 and not model.width % model.num_heads:
        found = f"width / num_heads = {model.width} / {model.num_heads} = {head_width}"
        fix = f"use model.width = {(head_width + 1) * model.num_heads}, or positions: learned"
        yield _wrong("model.width", f"the width of a head {problem}", found, fix)


def _vocabulary_holds_bytes(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    if model.vocab_size < 256:
        problem = "must be at least 256: the tokens of the corpus are bytes"
        yield _wrong("model.vocab_size", problem, model.vocab_size, "use 256, or a padded size")


def _one_value_per_stage(parallel: ParallelConfig) -> Iterator[ConfigError]:
    stages = parallel.stages
    for name, what in (("layers", "numbers"), ("clusters", "names")):
        values = getattr(parallel, name)
        if values is not None and stages is not None and len(values) != stages:
            problem = f"must have one for each of parallel.stages = {stages} stages"
            fix = f"give {stages} {what}, or set parallel.stages to {len(values)}"
            found = f"{list(values)}: {len(values)} {what}"
            yield _wrong(f"parallel.{name}", problem, found, fix)
    layers, clusters = parallel.layers, parallel.clusters
    if layers is not None and clusters is not None and len(layers) != len(clusters):
        problem = f"must have one for each of parallel.layers = {list(layers)}"
        fix = f"give {len(layers)} names, or leave one of the two out"
        yield _wrong("parallel.clusters", problem, list(clusters), fix)


def _stages_of_a_cluster_are_neighbours(parallel: ParallelConfig) -> Iterator[ConfigError]:
    runs = [name for name, _ in itertools.groupby(parallel.clusters or ())]
    if len(set(runs)) < len(runs):
        twice = next(name for name in runs if runs.count(name) > 1)
        problem = "stages of a cluster must be neighbours in the pipeline"
        fix = f"put those of {twice!r} beside each other"
        yield _wrong("parallel.clusters", problem, list(parallel.clusters or ()), fix)


def _every_layer_is_placed(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    if parallel.layers is not None and sum(parallel.layers) != model.num_layers:
        problem = f"must sum to model.num_layers = {model.num_layers}"
        found = f"{' + '.join(map(str, parallel.layers))} = {sum(parallel.layers)}"
        fix = f"give numbers with sum {model.num_layers}, or leave the key out: the planner chooses"
        yield _wrong("parallel.layers", problem, found, fix)


def _every_stage_has_a_layer(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    num_layers, chunks, stages = model.num_layers, parallel.chunks or 1, parallel.stages
    if stages is not None and stages > num_layers:
        problem = f"must be at most model.num_layers = {num_layers}: a layer for each stage"
        fix = f"use {num_layers} or less, or more layers"
        yield _wrong("parallel.stages", problem, stages, fix)
    elif stages is not None and stages * chunks > num_layers:
        problem = f"chunks * stages must be at most model.num_layers = {num_layers}"
        most = num_layers // stages
        fix = f"use {most} or less, or more layers" if most > 1 else "use fewer stages"
        yield _wrong("parallel.chunks", problem, f"{chunks} * {stages} = {chunks * stages}", fix)


def _every_chunk_has_a_layer(parallel: ParallelConfig) -> Iterator[ConfigError]:
    layers, chunks = parallel.layers, parallel.chunks or 1
    if layers is not None and min(layers) < chunks:
        problem = f"must each be at least parallel.chunks = {chunks}: a layer for each chunk"
        fix = f"give each stage {chunks} layers or more, or use fewer chunks"
        yield _wrong("parallel.layers", problem, list(layers), fix)


def _chunks_are_for_interleaving(parallel: ParallelConfig) -> Iterator[ConfigError]:
    is_interleaved, where = parallel.schedule == "interleaved_1f1b", "parallel.chunks"
    if is_interleaved and parallel.chunks == 1:
        problem = "must be at least 2 for schedule interleaved_1f1b"
        yield _wrong(where, problem, 1, "use 2, or set parallel.schedule to 1f1b")
    if not is_interleaved and (parallel.chunks or 1) > 1:
        other = f"not for {parallel.schedule}" if parallel.schedule else "which must be set"
        problem = f"is only for schedule interleaved_1f1b, {other}"
        fix = "remove it, or set parallel.schedule to interleaved_1f1b"
        yield _wrong(where, problem, parallel.chunks, fix)


def _split_backwards_compute_nothing_again(parallel: ParallelConfig) -> Iterator[ConfigError]:
    policy = parallel.activation_checkpointing
    if parallel.schedule == "zero_bubble" and policy not in (None, "none"):
        problem = (
            "must be none for schedule zero_bubble: "
            "computing layers again would tie the gradients of their weights back to B"
        )
        fix = "use none, or set parallel.schedule to 1f1b"
        yield _wrong("parallel.activation_checkpointing", problem, policy, fix)


def _tensor_cuts_evenly(
    name: str, model: ModelConfig, parallel: ParallelConfig
) -> Iterator[ConfigError]:
    size = getattr(model, name)
    if size is not None and parallel.tensor is not None and size % parallel.tensor:
        problem = f"must be a multiple of parallel.tensor = {parallel.tensor}"
        fix = f"use {_multiples(size, parallel.tensor)}, or change parallel.tensor"
        yield _wrong(f"model.{name}", problem, size, fix)


def _width_cuts_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    sizes = {"fsdp": parallel.fsdp or 1, "context": parallel.context or 1}
    cuts = {name: size for name, size in sizes.items() if size > 1}
    parts, product = _product(cuts)
    if model.width % parts:
        names = " or ".join(f"parallel.{name}" for name in cuts)
        fix = f"use {_multiples(model.width, parts)}, or change {names}"
        yield _wrong("model.width", f"must be a multiple of {product}", model.width, fix)


def _context_cuts_evenly(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    context, length = parallel.context or 1, model.context_length
    runs = 2 * context  # of tokens: each part has two
    if context > 1 and length % runs:
        fix = f"use {_multiples(length, runs)}, or change parallel.context"
        problem = f"must be a multiple of 2 * parallel.context = 2 * {context} = {runs}"
        yield _wrong("model.context_length", problem, length, fix)


def _microbatches_are_equal(train: TrainConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    sizes = {"data": parallel.data, "fsdp": parallel.fsdp, "microbatches": parallel.microbatches}
    cuts = {name: size for name, size in sizes.items() if size is not None}
    if parallel.fsdp == 1:
        del cuts["fsdp"]
    if not cuts:
        return
    parts, arithmetic = _product(cuts)
    if train.global_batch % parts:
        left = train.global_batch % parts
        found = f"{train.global_batch} = {train.global_batch // parts} * {parts} + {left}"
        fix = f"use {_multiples(train.global_batch, parts)}, or change the number of parts"
        yield _wrong("train.global_batch", f"must be a multiple of {arithmetic}", found, fix)


def _product(cuts: Mapping[str, int]) -> tuple[int, str]:
    """Returns the product of settings of `parallel`, and its arithmetic as text."""
    parts = math.prod(cuts.values())
    arithmetic = " * ".join(f"parallel.{name}" for name in cuts)
    if len(cuts) > 1:
        arithmetic += f" = {' * '.join(map(str, cuts.values()))}"
    return parts, f"{arithmetic} = {parts}"


def _decay_is_for_wsd(optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    is_wsd, where = optimizer.schedule == "wsd", "optimizer.decay_steps"
    if is_wsd and optimizer.decay_steps is None:
        fix = "add the number of steps at the end in which the learning rate falls"
        yield _wrong(where, "is missing: schedule wsd needs it", "nothing", fix)
    if not is_wsd and optimizer.decay_steps is not None:
        fix = "remove it, or set optimizer.schedule to wsd"
        problem = f"is only for schedule wsd, not for {optimizer.schedule}"
        yield _wrong(where, problem, optimizer.decay_steps, fix)


def _schedule_fits_run(train: TrainConfig, optimizer: OptimizerConfig) -> Iterator[ConfigError]:
    """A warm-up may outlast a short run, but stable steps and a decay have to fit behind it."""
    warmup, decay, steps = optimizer.warmup_steps, optimizer.decay_steps, train.steps
    if optimizer.schedule == "wsd" and decay is not None and warmup + decay > steps:
        problem = f"warmup_steps + decay_steps must be at most train.steps = {steps}"
        found = f"{warmup} + {decay} = {warmup + decay}"
        fix = f"use {steps - warmup} or less, or more steps" if warmup < steps else "use more steps"
        yield _wrong("optimizer.decay_steps", problem, found, fix)


def _validation_has_data(train: TrainConfig, data: DataConfig) -> Iterator[ConfigError]:
    if train.eval_every and not data.validation_fraction:
        problem = f"must be more than 0: train.eval_every = {train.eval_every} asks for validation"
        fix = "use 0.05, or set train.eval_every to 0"
        yield _wrong("data.validation_fraction", problem, data.validation_fraction, fix)


def _pattern_is_for_folders(data: DataConfig) -> Iterator[ConfigError]:
    if data.corpus == PYTHON_STDLIB and data.pattern is not None:
        problem = f"is only for a folder: {PYTHON_STDLIB} has its own files"
        yield _wrong("data.pattern", problem, data.pattern, "remove it, or name a data.corpus")


def _home_is_written_out(name: str, section: RunConfig | DataConfig) -> Iterator[ConfigError]:
    if (path := getattr(section, name.partition(".")[2])).startswith("~"):
        problem = (
            "must be a path as it is: only a shell knows what ~ is, and at the start of a word"
        )
        yield _wrong(name, problem, path, f"write it out, as /home/NAME{path[1:]}")


def _steps_or_minutes(checkpoint: CheckpointConfig) -> Iterator[ConfigError]:
    if checkpoint.every is not None and checkpoint.every_minutes is not None:
        problem = f"cannot be set beside checkpoint.every = {checkpoint.every}"
        fix = "leave one of the two out, or set it to null"
        yield _wrong("checkpoint.every_minutes", problem, checkpoint.every_minutes, fix)


CUT_BY_TENSOR = ("num_heads", "num_kv_heads", "mlp_width", "vocab_size")
CHECKS: dict[tuple[str, ...], tuple[Callable[..., Iterator[ConfigError]], ...]] = {
    ("run",): (_cache_is_a_place, partial(_home_is_written_out, "run.dir")),
    ("model",): (_heads_share_width, _heads_share_keys, _rotary_turns_pairs),
    ("parallel",): (
        _one_value_per_stage,
        _stages_of_a_cluster_are_neighbours,
        _every_chunk_has_a_layer,
        _chunks_are_for_interleaving,
        _split_backwards_compute_nothing_again,
    ),
    ("optimizer",): (_decay_is_for_wsd,),
    ("data",): (_pattern_is_for_folders, partial(_home_is_written_out, "data.corpus")),
    ("checkpoint",): (_steps_or_minutes,),
    ("model", "data"): (_vocabulary_holds_bytes,),
    ("model", "parallel"): (
        _every_layer_is_placed,
        _every_stage_has_a_layer,
        *(partial(_tensor_cuts_evenly, name) for name in CUT_BY_TENSOR),
        _width_cuts_evenly,
        _context_cuts_evenly,
    ),
    ("train", "parallel"): (_microbatches_are_equal,),
    ("train", "optimizer"): (_schedule_fits_run,),
    ("train", "data"): (_validation_has_data,),
}


def _mistakes(sections: Mapping[str, Any]) -> Iterator[HolmesError]:
    """Yields the mistakes found by the checks that read only these sections."""
    for names, checks in CHECKS.items():
        if sections.keys() >= set(names):
            for check in checks:
                yield from schema.findings(check, *(sections[name] for name in names))


def _refuse_mistakes(**sections: Any) -> None:
    if mistakes := list(_mistakes(sections)):
        raise Mistakes(mistakes)
