"""The plan: everything decided before the first step, as data that can be printed and saved.

`planner` makes it from a topology and a config; every other module only reads it. Layers have
names, in model order: `embed`, `block_000`, `block_001`, ..., `head`.
"""

import hashlib
import itertools
import json
import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from holmesjax.config import Schedule
from holmesjax.errors import PlanError, raise_if_passing
from holmesjax.files import json_text, regular_files
from holmesjax.layer_specs.model_layers import EMBED, HEAD, layer_names
from holmesjax.plan.mailbox_cost import MailboxCost
from holmesjax.schedules.pipeline_schedules import SCHEDULES, TaskOrder, chunked
from holmesjax.schedules.simulation import Queue, Simulation, simulate
from holmesjax.schedules.tasks import Task
from holmesjax.units import counted


class Axis(StrEnum):
    """Mesh axes, slowest link first: neighbours along the last axis share the fastest link."""

    DATA = "data"
    FSDP = "fsdp"
    CONTEXT = "context"
    EXPERT = "expert"
    TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSeconds:
    """Predicted seconds of each task of a stage."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    forward_s: tuple[float, ...]  # of each chunk
    backward_s: tuple[float, ...]  # without the weights' gradients, where those are split off
    weight_s: tuple[float, ...]  # 0 where they are not
    transfer_s: tuple[float, ...]  # a boundary to the next stage, and back; none: to no stage
    gather_s: float  # before the first task: gathering parameters
    reduce_s: float  # after the last task: summing gradients
    update_s: float  # when all stages have done that: the optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: layers on the devices of a cluster, or of several where nothing else fits."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    cluster: str  # "ib"; of a stage that lies in several "ib+roce"
    nodes: tuple[str, ...]
    chunks: tuple[tuple[str, ...], ...]  # names of layers, consecutive in each
    devices: tuple[int, ...]  # numbers of the topology, in row-major order of `mesh`
    mesh: dict[Axis, int]  # axis -> size, slowest link first
    fabrics: dict[Axis, str]  # axis -> the slowest fabric that its neighbours use
    memory_bytes: dict[str, float]  # per device, itemised
    # Predicted, per step: compute, tensor, fsdp, context and expert if used, data, boundary.
    seconds: dict[str, float]
    task_seconds: TaskSeconds | None = None  # predicted; None where nothing was
    sequence_parallel: bool = False  # whether `tensor` cuts sequences between products
    expert_chunks: int = 1  # of an exchange of tokens between devices that share experts
    logit_bytes: int | None = None  # of float32 logits of a chunk of the loss; None: the least

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all its layers; with one chunk they are consecutive."""
        return tuple(itertools.chain(*self.chunks))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of its Transformer layers."""
        return tuple(layer for layer in self.layers if layer not in (EMBED, HEAD))

    @property
    def num_blocks(self) -> int:
        """The number of its Transformer layers."""
        return len(self.blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingCost:
    """The exchange of islands every few steps."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    every: int  # steps from one meeting to the next
    bytes: tuple[float, ...]  # that each island sends in a meeting, and receives
    seconds: float  # predicted, of its transfers
    hidden_s: float = 0.0  # of these, while steps go on; all islands wait in the rest
    fragments: int = 1  # that meet in turn
    delay: int = 0  # steps from the begin of a fragment's meeting to its end
    rule: str = "nesterov"  # `parallel.outer.rule`
    codec: str = "float32"  # of what crosses
    mailbox: MailboxCost | None = None  # where islands meet through one, and wait for nobody

    @property
    def exposed_s(self) -> float:
        """Seconds of a meeting in which all islands wait."""
        return self.seconds - self.hidden_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How one model trains on one topology.

    With islands, `stages` has those of all islands, one island after the other, and the numbers of
    the whole are those of the slowest island.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    topology: str  # its name
    topology_hash: str
    stages: tuple[StagePlan, ...]
    global_batch: int  # sequences per step
    microbatches: int
    schedule: Schedule
    activation_checkpointing: str
    boundary_bytes: float  # per microbatch and direction, from one stage to the next
    step_time_s: float  # predicted
    # No plan's predicted step takes less, of plans in which all layers compute again, or none.
    bound_s: float
    shares: dict[str, float]  # of the predicted step time: `seconds` of the stages, and bubble
    idle: dict[str, int] = field(default_factory=dict)  # node -> devices that no stage uses
    idle_because: dict[str, str] = field(default_factory=dict)  # cluster that is idle -> why
    in_flight: tuple[int, ...] = ()  # microbatches of each stage, if the schedule lets us choose
    step_dollars: dict[str, float] = field(default_factory=dict)  # empty where prices lack
    pipes: dict[str, float] = field(default_factory=dict)  # "ib -> roce" -> share of its capacity
    queues: tuple[Queue, ...] = ()  # of boundaries that may want more of a pipe than it has
    # The first k layers of each stage that `activation_checkpointing` is for; the others compute
    # nothing again. Empty: it is for all layers.
    recomputed_layers: tuple[int, ...] = ()
    exception: str = ""  # which stages lie in several clusters, and why, where any do
    islands: tuple["Plan", ...] = ()  # the plan of each island; none: the plan is one pipeline
    meeting: MeetingCost | None = None  # of the islands

    @property
    def pipelines(self) -> tuple["Plan", ...]:
        """The plans of the islands, or this plan where it has none."""
        return self.islands or (self,)

    @property
    def island_of(self) -> tuple[int, ...]:
        """The island of each stage; 0 where the plan has none."""
        return tuple(k for k, pipeline in enumerate(self.pipelines) for _ in pipeline.stages)

    @property
    def batch_shares(self) -> tuple[int, ...]:
        """The share of the batch of each island, in whole numbers without a common divisor."""
        sizes = [island.global_batch for island in self.islands]
        return tuple(size // math.gcd(*sizes) for size in sizes)

    @property
    def num_chunks(self) -> int:
        """Runs of consecutive layers that each stage holds."""
        return len(self.stages[0].chunks)

    @property
    def chunks(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The virtual stages in model order: the stage that holds each, and its layers."""
        stages = list(enumerate(self.stages))
        return tuple((s, stage.chunks[c]) for c in range(self.num_chunks) for s, stage in stages)

    def policy_of(self, layer: str) -> str:
        """The activation checkpointing of a layer, by its name; none at the ends of the model."""
        if layer in (EMBED, HEAD):
            return "none"
        if not self.recomputed_layers:
            return self.activation_checkpointing
        numbers = zip(self.stages, self.recomputed_layers, strict=True)
        is_first = any(layer in stage.blocks[:number] for stage, number in numbers)
        return self.activation_checkpointing if is_first else "none"

    @property
    def order(self) -> TaskOrder:
        """The schedule with its numbers."""
        sizes = len(self.stages), self.microbatches, self.num_chunks
        return TaskOrder(self.schedule, *sizes, self.in_flight)

    def tasks(self, microbatches: int | None = None) -> tuple[tuple[Task, ...], ...]:
        """Tasks of every stage in a step, in order; of a step with fewer microbatches, if given."""
        if microbatches is None:
            return self.order.tasks()
        in_flight = tuple(min(depth, microbatches) for depth in self.in_flight)
        return self.order._replace(microbatches=microbatches, in_flight=in_flight).tasks()

    @property
    def num_layers(self) -> int:
        """Transformer layers of the model."""
        return sum(stage.num_blocks for stage in self.stages)

    def simulate(self) -> Simulation | None:
        """The tasks of a step as they are predicted to run; None where nothing was predicted.

        None, too, where the plan has islands, each of which has tasks of its own.

        It has the tasks before a stage's first task, and no other task that comes once in a step.
        """
        stages = [s.task_seconds for s in self.stages if s.task_seconds is not None]
        if len(stages) < len(self.stages) or self.islands:
            return None
        in_order = lambda name: [
            getattr(stage, name)[chunk] for chunk in range(self.num_chunks) for stage in stages
        ]
        ways = [stage.transfer_s for stage in stages if stage.transfer_s]
        return simulate(
            self.tasks(),
            in_order("forward_s"),
            in_order("backward_s"),
            [(there_s, back_s) for there_s, back_s in ways],
            weight_s=in_order("weight_s"),
            ready_s=[stage.gather_s for stage in stages],
            queues=self.queues,
        )

    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the plan as JSON. The order of axes counts."""
        text = json.dumps(_to_dict(self), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return json.dumps(self._content(), indent=2) + "\n"

    def to_yaml(self) -> str:
        return yaml.safe_dump(self._content(), sort_keys=False, default_flow_style=None, width=100)

    def _content(self) -> dict[str, Any]:
        return {"hash": self.hash(), **_to_dict(self)}

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> "Plan":
        """The plan of `to_json`; `where` names the text in errors.

        Raises:
          PlanError: the text is no plan, contradicts itself, or differs from the hash it carries.
        """
        try:
            content = json_text.value_of(text)
        except ValueError as error:
            raise _damaged(where, "is not JSON", error) from None
        return _from_content(content, where)

    @classmethod
    def from_yaml(cls, text: str, where: str = "plan") -> "Plan":
        """The plan of `to_yaml`; otherwise like `from_json`."""
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise _damaged(where, "is not YAML", str(error).splitlines()[0]) from None
        except ValueError as error:  # the 45th of May is no date
            raise _damaged(where, "is not YAML", error) from None
        except RecursionError:
            raise _damaged(where, "is not YAML", "it is nested too deep") from None
        return _from_content(content, where)

    def save(self, path: str | Path) -> None:
        """Writes JSON or YAML, by the file's suffix."""
        Path(path).write_text(self.to_json() if Path(path).suffix == ".json" else self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads what `save` wrote. Raises PlanError for a missing or damaged file."""
        try:
            text = regular_files.read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise_if_passing(error)
            raise _damaged(str(path), "cannot be read", error) from None
        parse = cls.from_json if Path(path).suffix == ".json" else cls.from_yaml
        return parse(text, str(path))


def _to_dict(plan: Plan) -> dict[str, Any]:
    values: dict[str, Any] = TypeAdapter(Plan).dump_python(plan, mode="json")
    return _without_empty(values)


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    values["islands"] = [_without_empty(island) for island in values["islands"]]
    for name in ("pipes", "queues", "idle_because", "recomputed_layers", "islands", "meeting"):
        if not values[name]:
            del values[name]  # so a plan without any has the hash that it always had
    of_meeting = values.get("meeting", {})
    for one in fields(MeetingCost):
        if one.name in of_meeting and of_meeting[one.name] == one.default:
            del of_meeting[one.name]
    for stage in values["stages"]:
        if not stage["sequence_parallel"]:
            del stage["sequence_parallel"]
        if stage["expert_chunks"] == 1:
            del stage["expert_chunks"]
        if stage["logit_bytes"] is None:
            del stage["logit_bytes"]
    return values


def _from_content(content: object, where: str) -> Plan:
    if not isinstance(content, dict):
        raise _damaged(where, "holds no plan", type(content).__name__)
    expected = content.pop("hash", None)
    try:
        plan = TypeAdapter(Plan).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        field_path = ".".join(map(str, first["loc"]))
        raise _damaged(where, f"{field_path}: {first['msg']}", first["input"]) from None
    _refuse_contradictions(plan, where)
    if expected not in (None, plan.hash()):
        problem = f"is not the plan with the hash {expected} that it carries"
        raise _damaged(where, problem, f"hash {plan.hash()}")
    return plan


def _damaged(where: str, problem: str, found: object) -> PlanError:
    fix = "make the plan again with `python -m launch plan`; to accept an edit, delete its hash"
    return PlanError(where, problem, found=found, fix=fix)


def _refuse_contradictions(plan: Plan, where: str) -> None:
    devices = [device for stage in plan.stages for device in stage.devices]
    if len(set(devices)) < len(devices):
        raise _damaged(where, "every device belongs to one stage only", devices)
    if plan.islands:
        for i, island in enumerate(plan.islands):
            if island.islands:
                raise _damaged(where, f"islands.{i} must be one pipeline", "islands in it")
            _refuse_contradictions(island, f"{where}: islands.{i}")
        if plan.stages != tuple(stage for island in plan.islands for stage in island.stages):
            raise _damaged(where, "its stages must be those of its islands", "others")
        if plan.meeting is None or len(plan.meeting.bytes) != len(plan.islands):
            raise _damaged(where, "meeting must have the bytes of each island", plan.meeting)
        batches = [island.global_batch for island in plan.islands]
        if sum(batches) != plan.global_batch:
            raise _damaged(where, f"islands must share its batch of {plan.global_batch}", batches)
        return
    _refuse_impossible_schedule(plan, where)
    _refuse_missing_seconds(plan, where)
    _refuse_impossible_queues(plan, where)
    _refuse_impossible_recomputation(plan, where)
    layers = tuple(layer for _, chunk in plan.chunks for layer in chunk)
    if layers != layer_names(len(layers) - 2):
        raise _damaged(where, "the stages must hold every layer once, in model order", layers)
    for i, stage in enumerate(plan.stages):
        if math.prod(stage.mesh.values()) != len(stage.devices):
            sizes = " * ".join(map(str, stage.mesh.values()))
            problem = f"stages.{i}: its mesh of {sizes} devices must hold its devices"
            raise _damaged(where, problem, f"{len(stage.devices)} devices")


def _refuse_impossible_queues(plan: Plan, where: str) -> None:
    stages = range(len(plan.stages))
    for i, queue in enumerate(plan.queues):
        if queue.source not in stages or queue.target not in stages:
            raise _damaged(where, f"queues.{i} must be between two stages of the plan", queue)
        if not min(queue.hold_s, queue.latency_s) >= 0:
            raise _damaged(where, f"queues.{i}: its seconds must not be negative", queue)


def _refuse_impossible_recomputation(plan: Plan, where: str) -> None:
    numbers, layers = plan.recomputed_layers, [stage.num_blocks for stage in plan.stages]
    if numbers and (
        len(numbers) != len(layers)
        or not all(0 <= number <= most for number, most in zip(numbers, layers, strict=True))
    ):
        problem = f"recomputed_layers must have a number for each stage, at most {layers}"
        raise _damaged(where, problem, numbers)


def _refuse_missing_seconds(plan: Plan, where: str) -> None:
    for i, stage in enumerate(plan.stages):
        if (seconds := stage.task_seconds) is None:
            continue
        of_chunks = seconds.forward_s, seconds.backward_s, seconds.weight_s
        goes_on = i < len(plan.stages) - (plan.num_chunks == 1)
        if {len(times_s) for times_s in of_chunks} != {plan.num_chunks} or len(
            seconds.transfer_s
        ) != (2 * goes_on):
            problem = f"stages.{i}.task_seconds must have a number for each chunk, and both ways"
            raise _damaged(where, problem, seconds)


def _refuse_impossible_schedule(plan: Plan, where: str) -> None:
    own = SCHEDULES[plan.schedule]
    num_stages, num_chunks = len(plan.stages), [len(stage.chunks) for stage in plan.stages]
    if len(set(num_chunks)) != 1 or not all(all(stage.chunks) for stage in plan.stages):
        raise _damaged(where, "stages must hold equally many chunks, none empty", num_chunks)
    if own.is_chunked != (plan.num_chunks > 1):
        problem = f"a stage holds several chunks in {' and '.join(chunked())} alone"
        raise _damaged(where, problem, f"{plan.schedule}, {counted(plan.num_chunks, 'chunk')}")
    if not own.suits(num_stages, plan.microbatches):
        groups = ", and microbatches that are a multiple of them" * own.is_in_groups
        problem = f"{plan.schedule} needs {own.least_stages} stages or more{groups}"
        found = f"{counted(plan.microbatches, 'microbatch', 'es')}, {counted(num_stages, 'stage')}"
        raise _damaged(where, problem, found)
    depths = plan.in_flight
    if len(depths) != num_stages * own.chooses_in_flight:
        names = " and ".join(name for name, s in SCHEDULES.items() if s.chooses_in_flight)
        problem = f"in_flight must have a number for each stage of {names}, and else none"
        raise _damaged(where, problem, depths)
    if not all(1 <= depth <= plan.microbatches for depth in depths):
        raise _damaged(where, f"in_flight must be from 1 to {plan.microbatches}", depths)
    if list(depths) != sorted(depths, reverse=True):
        raise _damaged(where, "in_flight must not grow from stage to stage: deadlock", depths)
