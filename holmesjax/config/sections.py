"""A run file as frozen dataclasses, one for each section.

A field's type, its constraint and its default stand beside it. The rules between settings are in
`checks`; every section runs those that read it alone, and `Config` runs all of them.
"""

import dataclasses
import math
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holmesjax.config.allowed_values import (
    MOST_S,
    STRICT,
    Count,
    Flag,
    Natural,
    NonNegative,
    NoSeconds,
    NumChunks,
    Positive,
    Rate,
    Seconds,
    Share,
    Text,
)
from holmesjax.config.data_sections import DataConfig
from holmesjax.config.mistakes import refuse_mistakes
from holmesjax.config.model_sections import ModelConfig
from holmesjax.config.training_sections import OptimizerConfig, TrainConfig
from holmesjax.files import schema
from holmesjax.schedules.pipeline_schedules import SCHEDULES

AUTO = "auto"
GRACE_S = 30.0  # for islands that have not sent to a round
MEETS_EVERY = 50  # steps from one meeting of islands to the next, if a run does not say
HeartbeatTimeout = Annotated[float, Field(ge=0.1, le=MOST_S, allow_inf_nan=False, strict=True)]
Streams = Annotated[int, Field(ge=1, le=64, strict=True)]  # each is a socket and two threads
Port = Annotated[int, Field(ge=0, le=65535, strict=True)]
PortRange = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65535, strict=True)], ...], Field(min_length=2)
]
Encrypt = Literal["auto", "always", "never"]
Checkpointing = Literal["none", "dots", "full"]
Schedule = Annotated[str, schema.OneOf(SCHEDULES)]
ClusterOfEachStage = Annotated[tuple[Text, ...], Field(min_length=1)]
Momentum = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Rule = Literal["nesterov", "noloco", "co2", "eager"]
Codec = Literal["float32", "bfloat16"]
Islands = Annotated[
    tuple[Annotated[tuple[Text, ...], Field(min_length=1)], ...], Field(min_length=1)
]
SPEED = "speed"
Shares = Literal["speed"] | Annotated[tuple[Count, ...], Field(min_length=1)]
LayersPerStage = Annotated[tuple[Count, ...], Field(min_length=1)]
SomeLayersPerStage = Annotated[tuple[Natural, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RunConfig:
    """The folders of a run."""

    # The run folder, which the run makes; or s3://BUCKET/NAME or gs://BUCKET/NAME. Each machine
    # then works in holmesjax/runs in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).
    dir: Text
    rehearse: Flag = False  # whether virtual CPU devices stand for those of the topology
    # The folder of compiled programs, kept from run to run. auto: holmesjax/programs in the user's
    # cache folder ($XDG_CACHE_HOME or ~/.cache). None: programs are not kept.
    compilation_cache: Text | None = AUTO

    def __post_init__(self) -> None:
        refuse_mistakes(run=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class KernelsConfig:
    """Implementations of array functions; auto takes the best for the devices and the shapes."""

    # The implementation of attention. auto: on NVIDIA GPUs cuDNN if it can compute the arrays, else
    # the Pallas kernels on Hopper, or JAX's Triton kernels, if a check of them has passed, else
    # plain JAX. reference: plain JAX.
    attention: Literal["auto", "reference", "pallas", "triton", "cudnn"] = "auto"
    # The implementation of products of experts without a capacity. xla: plain JAX, one block of
    # rows after the other. pallas: JAX's kernels for Hopper, where a check of them has passed.
    # auto: xla, until the kernels have been measured as faster.
    experts: Literal["auto", "pallas", "xla"] = "auto"
    # Whether attention gives the same gradients from the same inputs, to the bit. cuDNN is then not
    # used, and attention is slower on Hopper.
    deterministic_attention: Flag = False
    # The implementation of the loss. chunked: some logits at a time. auto: chunked for a large
    # vocabulary, where this saves memory.
    cross_entropy: Literal["auto", "reference", "chunked"] = "auto"
    # MiB of float32 logits that a device computes at a time where the loss is chunked. None: 512,
    # or 1024 or 2048 where the plan leaves the memory for it.
    loss_chunk_mib: Count | None = None
    # The implementation of AdamW's step, also of what Muon leaves to AdamW. pallas: a kernel for
    # NVIDIA Hopper GPUs. auto: XLA, until the kernel has been measured as faster on the devices.
    optimizer: Literal["auto", "pallas", "xla"] = "auto"
    # Whether `tensor` also cuts the tokens of each sequence between products, so that norms and
    # sums are computed once, and less is kept. auto: in stages where the planner finds a faster
    # plan so, and only then. on: in each stage where they divide. off: nowhere.
    sequence_parallel: Literal["auto", "on", "off"] = "off"


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class OuterConfig:
    """The step that islands take when they meet: by which rule, and from what crosses."""

    # nesterov: all take one step together. noloco: pairs take one, and stay apart. co2: all take it
    # one round late. eager: each takes its own part at once, and that of the others a round late.
    rule: Rule = "nesterov"
    rate: Rate = 0.7  # by which weights follow the islands; 1: all the way, without momentum
    # The share of the steps before that a step goes on with. None: 0.9, and 0.5 of noloco and co2
    momentum: Momentum | None = None
    nesterov: Flag = True  # whether the momentum is Nesterov's, of nesterov and eager
    pull: Positive | None = None  # of noloco: by which a pair draws its slow weights. None: 1
    # Of co2: the largest number of the momentum. None: 0.1
    clip: Positive | None = None
    # Of co2: by which the last step, in units of the largest, shortens the next one. None: 1
    penalty: NonNegative | None = None
    codec: Codec = "float32"  # the form in which numbers cross between islands

    @property
    def decay(self) -> float:
        """The share of the steps before that a step goes on with."""
        if self.momentum is None:
            return 0.5 if self.rule in ("noloco", "co2") else 0.9
        return self.momentum

    @property
    def pulls(self) -> float:
        """By which a pair draws its slow weights to each other."""
        return 1.0 if self.pull is None else self.pull

    @property
    def largest(self) -> float:
        """The largest number of the momentum."""
        return 0.1 if self.clip is None else self.clip

    @property
    def shortens(self) -> float:
        """By which the last step shortens the next one."""
        return 1.0 if self.penalty is None else self.penalty

    @property
    def is_late(self) -> bool:
        """Whether what islands send in a meeting comes in the next one."""
        return self.rule in ("co2", "eager")

    @property
    def has_pairs(self) -> bool:
        """Whether islands meet in pairs, and have weights of their own after a meeting."""
        return self.rule == "noloco"


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PlaceConfig:
    """The place of an island among those of a run, where each is a job of its own."""

    names: Annotated[tuple[Text, ...], Field(min_length=1)]  # of all islands, by their numbers
    number: Natural  # of the island
    steps: Count  # of the run: train.steps has the most steps that an island can take

    @property
    def name(self) -> str:
        """The name of the island."""
        return self.names[self.number]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ParallelConfig:
    """The division of a step over devices. The planner chooses each setting that is None."""

    stages: Count | None = None  # stages of the pipeline
    clusters: ClusterOfEachStage | None = None  # cluster of each stage, in the pipeline's order
    layers: LayersPerStage | None = None  # Transformer layers of each stage
    data: Count | None = None  # replicas inside a stage
    fsdp: Count | None = None  # parts of each replica's parameters, gathered by layer (ZeRO-3)
    # Devices that share each sequence by ring attention; they also cut parameters, as fsdp does.
    context: Count | None = None
    # Devices that share the experts of a layer, and exchange tokens; they also cut sequences and
    # other parameters, as fsdp does.
    expert: Count | None = None
    # The order in which devices that share experts have them. load: at the begin and after each
    # checkpoint, so that the loads of the last step are as even as they can be, which is not for
    # train.deterministic. number: by number.
    expert_placement: Literal["number", "load"] = "number"
    # Chunks of an exchange of tokens, of which one travels while another one's experts compute.
    expert_chunks: NumChunks | None = None
    tensor: Count | None = None  # devices that share each matrix product
    microbatches: Count | None = None  # microbatches of a step
    schedule: Schedule | None = None  # order of forwards and backwards on each stage
    chunks: Count | None = None  # runs of consecutive layers of a stage, in schedules with several
    # The part of a forward that its backward computes again. none: nothing. dots: all but matrix
    # products. full: all.
    activation_checkpointing: Checkpointing | None = None
    # The first k layers of each stage that activation_checkpointing is for; the others compute
    # nothing again. None: all where activation_checkpointing is set; else as few as memory allows.
    recomputed_layers: SomeLayersPerStage | None = None
    # What clusters do together. pipeline: one replica of the model, or several, that meet in every
    # step. local_updates: islands, which train replicas on their own and meet every few steps.
    # auto: the planner compares both, if plan.allow has local_updates. Else it is a pipeline.
    across: Literal["pipeline", "local_updates", "auto"] = "pipeline"
    # The clusters of each island, as [[a, b], [c]]. None: each cluster is an island.
    islands: Islands | None = None
    # The share of the batch that each island takes, as [3, 1]: three quarters, and one. speed: the
    # planner chooses by their speeds. None: equal ones.
    shares: Shares | None = None
    every: Count | None = None  # steps from one meeting of islands to the next. None: 50
    outer: OuterConfig | None = None  # the step of a meeting. None: its defaults
    # Parts of the model that meet one after the other, each of every so many-th layer. None: 1
    fragments: Count | None = None
    # Steps that go on while a fragment is on its way between islands. None: 0, all wait
    delay: Natural | None = None
    # The share of the global weights in those that an island goes on with; the rest are its own.
    # None: 1
    blend: Share | None = None
    # Where an island has the global weights and momenta of meetings between them. host: in memory
    # of the host, and on devices for a meeting alone. None: device
    outer_memory: Literal["device", "host"] | None = None
    # How islands meet. direct: in one job, in which all wait for each other. mailbox: each is a job
    # of its own, which waits for nobody.
    meet: Literal["direct", "mailbox"] = "direct"
    # The mailbox: a folder that all islands see, s3://BUCKET/NAME or gs://BUCKET/NAME. None:
    # `mailbox` in the run folder.
    mailbox: Text | None = None
    quorum: Count | None = None  # islands that a round needs. None: half of them
    # Seconds for the other islands, once a quorum has sent its weights. None: 30
    grace_s: NoSeconds | None = None
    island: Text | None = None  # which island a job trains, by a cluster of it
    # The place of the island in the run. launch writes it into the island's run folder.
    place: PlaceConfig | None = None

    def __post_init__(self) -> None:
        refuse_mistakes(parallel=self)

    @property
    def has_islands(self) -> bool:
        """Whether clusters are islands; false as long as the planner has not chosen."""
        return self.across == "local_updates"

    @property
    def meets_every(self) -> int:
        """Steps from one meeting of islands to the next."""
        return self.every or MEETS_EVERY

    @property
    def is_mailbox(self) -> bool:
        """Whether islands meet through a mailbox."""
        return self.meet == "mailbox"

    @property
    def grace(self) -> float:
        """Seconds for the other islands, once a quorum has sent its weights."""
        return GRACE_S if self.grace_s is None else self.grace_s

    def quorum_of(self, num_islands: int) -> int:
        """The islands that a round needs, of so many."""
        return self.quorum or -(-num_islands // 2)

    @property
    def outer_rule(self) -> OuterConfig:
        """The step of a meeting of islands."""
        return self.outer or OuterConfig()

    @property
    def global_share(self) -> float:
        """The share of the global weights in those that an island goes on with."""
        return 1.0 if self.blend is None else self.blend


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PlanConfig:
    """The measure by which plans are compared; the topology has the prices."""

    # The best plan has the shortest step (step_time), or trains most tokens for a dollar.
    objective: Literal["step_time", "tokens_per_dollar"] = "step_time"
    budget_dollars: Positive | None = None  # dollars for all steps of the run. None: no limit
    # Other ways to train that the planner may choose, and not only other layouts. local_updates:
    # islands, where parallel.across is auto.
    allow: tuple[Literal["local_updates"], ...] = ()
    # More tokens that islands are taken to need for the same loss, as a share: for each island
    # after the first, and each 100 steps from one meeting to the next.
    islands_more_tokens: NonNegative = 0.1

    @property
    def is_by_time(self) -> bool:
        """Whether plans are compared by their times alone."""
        return self.objective == "step_time" and self.budget_dollars is None


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DistributedConfig:
    """The processes of a run with a launcher, and how long they wait for each other."""

    processes: Literal["node", "device"] = "node"  # a process for each node, or for each device
    # Connections between two processes; more if that many do not reach all NICs, or do not fill a
    # long link with buffers of 4 MiB.
    streams: Streams = 4
    # Which connections of boundaries are encrypted, with TLS 1.3. auto: those between clusters,
    # except on one machine. What processes tell the launcher is encrypted always.
    encrypt: Encrypt = "auto"
    # Port of the first stage's coordinator; each further stage has the next port. 0: free ports.
    port: Port = 0
    # The first and the last port on which processes listen for each other, for firewalls. A process
    # takes one for each NIC and network of its node. None: any free port.
    ports: PortRange | None = None
    # Clusters into which nobody outside can call. Their processes call the others.
    calls_out: tuple[Text, ...] = ()
    # HOST:PORT of a `launch relay`, through which two clusters of `calls_out` meet. Processes that
    # cannot call the launcher reach it there, too. None: there is none.
    relay: Text | None = None
    # Seconds after which a silent process or link counts as lost, and the job ends.
    heartbeat_timeout_s: HeartbeatTimeout = 60.0
    # Seconds for the next sign of progress while a job starts: a process connects, a program is
    # compiled, or a layer is initialised.
    start_timeout_s: Seconds = 600.0
    # Seconds for a step. None: 10 times the median so far, and at least 60 s. The first step and a
    # checkpoint have start_timeout_s. On a GPU it also limits each program, of the first step too.
    step_timeout_s: Seconds | None = None
    # Seconds in which a run that is asked to stop ends its step and writes a checkpoint. The
    # default is a little less than the 120 s in the files that --launcher slurm and kubernetes
    # write. Both schedulers give 30 s by default.
    stop_timeout_s: Seconds = 100.0
    # Seconds for one boundary array from a process that is alive and slow.
    pull_timeout_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        refuse_mistakes(distributed=self)

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a process or link is lost; reports take the rest."""
        return 0.8 * self.heartbeat_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class CheckpointConfig:
    """The times of checkpoints besides the one at the end, and which are kept."""

    every: Count | None = None  # steps between checkpoints. None: every_minutes counts
    every_minutes: Positive | None = None  # minutes between them. None: 10, where every is not set
    keep: Count = 3  # newest checkpoints that are kept
    # Hours of which one checkpoint is kept besides, the first of each. None: no other is kept.
    keep_every_hours: Positive | None = 12.0
    # Minutes for which saves may fail, one after the other, until the run ends with 75. A save that
    # fails is tried again after 30 s, and then after pauses that grow to 10 min.
    failing_minutes: NonNegative = 60.0
    # Intervals without a committed checkpoint until an alarm says so, while steps go on.
    alarm_intervals: Count = 3
    # MB/s at which each store reads its newest checkpoint again from the disk, while the run goes
    # on, and compares it with what was written. None: nothing is read before a start does.
    scrub: Positive | None = None
    # Whether nodes of another cluster keep a copy of the newest checkpoint in their memory, from
    # which a start takes what the disks have lost. It is made after each save.
    partner: Flag = False

    def __post_init__(self) -> None:
        refuse_mistakes(checkpoint=self)

    @property
    def minutes(self) -> float:
        """Minutes between checkpoints, if no number of steps is set."""
        return self.every_minutes or 10.0

    def most_on_disk(self, run_s: float) -> int:
        """The most checkpoints at once in a run of so many seconds, with the one being written.

        >>> CheckpointConfig().most_on_disk(60.0), CheckpointConfig().most_on_disk(86400.0)
        (5, 6)
        """
        periods = math.ceil(run_s / 3600 / self.keep_every_hours) if self.keep_every_hours else 0
        return self.keep + periods + 1


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LogConfig:
    """Outputs of a run besides the console and metrics.jsonl."""

    # Whether report.html and trace.json are written at the end, which takes a second.
    report: Flag = True
    # Whether TensorBoard's events are written (extra tb). None: if tb is installed.
    tensorboard: Flag | None = None
    wandb: Flag = False  # whether Weights & Biases gets the records (extra wandb)
    # Whether records have statistics by kind of layer: norms of gradients and parameters, and root
    # mean squares of the outputs of layers.
    statistics: Flag = False
    # Steps after which a record has the choices of each expert since the record before that had
    # them, and each expert without a choice, or with too many, raises an alarm. 0: never.
    expert_loads_every: Natural = 100
    # The load of an expert, over the mean load of its layer, above which there is an alarm.
    expert_load_alarm: Positive = 4.0


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

    def tokens_after(self, step: int) -> int:
        """The tokens of the first so many steps."""
        return self.train.sequences_after(step) * self.model.context_length

    def data_by_tokens(self) -> DataConfig:
        """The section `data`, whose mixture changes at tokens and not at steps."""
        if not self.data.mixture_changes:
            return self.data
        changes = tuple(
            dataclasses.replace(change, steps=None, tokens=self.tokens_after(change.steps))
            if change.steps is not None
            else change
            for change in self.data.mixture_changes
        )
        return dataclasses.replace(self.data, mixture_changes=changes)


SECTIONS = tuple(field.name for field in dataclasses.fields(Config) if field.name != "topology")
