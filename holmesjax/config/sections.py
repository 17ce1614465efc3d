"""A run file as frozen dataclasses, one for each section.

A field's type, its constraint and its default stand beside it. The rules between settings are in
`checks`; every section runs those that read it alone, and `Config` runs all of them.
"""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holmesjax import schema
from holmesjax.config.allowed_values import STRICT, Count, Flag, Positive, Text
from holmesjax.config.data_sections import DataConfig
from holmesjax.config.mistakes import refuse_mistakes
from holmesjax.config.model_sections import ModelConfig
from holmesjax.config.training_sections import OptimizerConfig, TrainConfig
from holmesjax.schedules.pipeline_schedules import SCHEDULES

AUTO = "auto"
HeartbeatTimeout = Annotated[float, Field(ge=0.1, allow_inf_nan=False, strict=True)]
Streams = Annotated[int, Field(ge=1, le=64, strict=True)]  # each is a socket and two threads
Port = Annotated[int, Field(ge=0, le=65535, strict=True)]
Checkpointing = Literal["none", "dots", "full"]
Schedule = Annotated[str, schema.OneOf(SCHEDULES)]
ClusterOfEachStage = Annotated[tuple[Text, ...], Field(min_length=1)]
LayersPerStage = Annotated[tuple[Count, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RunConfig:
    """The folders of a run."""

    dir: Text  # the run folder, which the run makes
    rehearse: Flag = False  # whether virtual CPU devices stand for those of the topology
    # The folder of compiled programs, kept from run to run. auto: holmesjax/programs in the user's
    # cache folder ($XDG_CACHE_HOME or ~/.cache). None: programs are not kept.
    compilation_cache: Text | None = AUTO

    def __post_init__(self) -> None:
        refuse_mistakes(run=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class KernelsConfig:
    """Who computes an array function; auto takes the best that the devices and the shapes allow."""

    # What computes attention. auto: on NVIDIA GPUs cuDNN where it can, else plain JAX, or our own
    # kernels where a check of them has passed. reference: plain JAX.
    attention: Literal["auto", "reference", "pallas", "cudnn"] = "auto"
    # Whether attention gives the same gradients from the same inputs, to the bit. It is slower on
    # Hopper, and never cuDNN.
    deterministic_attention: Flag = False
    # How the loss is computed from the logits. chunked: not all of them at once. auto: chunked for
    # a large vocabulary, where this saves memory.
    cross_entropy: Literal["auto", "reference", "chunked"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ParallelConfig:
    """The cut of a step over devices. The planner chooses each setting that is None."""

    stages: Count | None = None  # stages of the pipeline
    clusters: ClusterOfEachStage | None = None  # cluster of each stage, in the pipeline's order
    layers: LayersPerStage | None = None  # Transformer layers of each stage
    data: Count | None = None  # replicas inside a stage
    fsdp: Count | None = None  # parts of each replica's parameters, gathered by layer (ZeRO-3)
    # Devices that share each sequence by ring attention; they also cut parameters, as fsdp does.
    context: Count | None = None
    tensor: Count | None = None  # devices that share each matrix product
    microbatches: Count | None = None  # microbatches of a step
    schedule: Schedule | None = None  # order of forwards and backwards on each stage
    chunks: Count | None = None  # runs of consecutive layers of a stage, in schedules with several
    # What is computed again in a backward: nothing, all but matrix products (dots), or all (full).
    activation_checkpointing: Checkpointing | None = None

    def __post_init__(self) -> None:
        refuse_mistakes(parallel=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PlanConfig:
    """The measure by which plans are compared; the topology has the prices."""

    # Whether the shortest step makes the best plan, or the most tokens for a dollar.
    objective: Literal["step_time", "tokens_per_dollar"] = "step_time"
    budget_dollars: Positive | None = None  # dollars for all steps of the run. None: without limit


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DistributedConfig:
    """The processes of a run with a launcher, and how long they wait for each other."""

    processes: Literal["node", "device"] = "node"  # whether each node or each device has a process
    streams: Streams = 4  # connections between two processes, or more, so that all NICs have some
    # Port of the first stage's coordinator, with the next one for each further stage; 0: free ones.
    port: Port = 0
    # Seconds until the end of a job that has lost a process or a link.
    heartbeat_timeout_s: HeartbeatTimeout = 60.0
    # Seconds until the next sign of progress of a job that starts: a process comes, a program is
    # compiled, a layer is drawn.
    start_timeout_s: Positive = 600.0
    # Seconds for a step. None: 10 times the median so far, and at least 60 s. The first step has
    # start_timeout_s, and so has a checkpoint.
    step_timeout_s: Positive | None = None
    # Seconds for the step and the checkpoint of a run that is asked to stop. This is a little less
    # than the 120 s of our files for Slurm and Kubernetes; both give 30 s where nothing is said.
    stop_timeout_s: Positive = 100.0
    # Seconds for one boundary of a process that lives, but is slow.
    pull_timeout_s: Positive = 1800.0

    @property
    def silence_s(self) -> float:
        """After which a process or link is lost; the rest of the timeout is for saying so."""
        return 0.8 * self.heartbeat_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class CheckpointConfig:
    """When the state is written, besides at the end, and how much of it is kept."""

    every: Count | None = None  # steps between checkpoints. None: every_minutes counts
    every_minutes: Positive | None = None  # minutes between them. None: 10, where every is not set
    keep: Count = 2  # newest checkpoints that are kept

    def __post_init__(self) -> None:
        refuse_mistakes(checkpoint=self)

    @property
    def minutes(self) -> float:
        """Between checkpoints, where steps do not say when."""
        return self.every_minutes or 10.0


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LogConfig:
    """Outputs of a run besides the console and metrics.jsonl."""

    # Whether report.html and trace.json are drawn at the end, which takes a second.
    report: Flag = True
    # Whether TensorBoard's events are written, with the extra tb. None: if it is installed.
    tensorboard: Flag | None = None
    wandb: Flag = False  # whether Weights & Biases gets the records, with the extra wandb
    # Whether records have norms by kind of layer: of gradients and parameters, and root mean
    # squares of what layers hand on.
    statistics: Flag = False


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
        refuse_mistakes(**{name: getattr(self, name) for name in SECTIONS})


SECTIONS = tuple(field.name for field in dataclasses.fields(Config) if field.name != "topology")
