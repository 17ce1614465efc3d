"""A run before it starts: its config, its machines and its plan, checked. Does not import JAX."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from holmesjax import config as configs, hub_names, process_variables, xla_flags
from holmesjax.config import BYTES, Config, unread_settings
from holmesjax.costs.parameters import parameter_counts
from holmesjax.costs.stage_shape import DTYPE_BYTES
from holmesjax.data import cluster_paths, tokenizer_files
from holmesjax.data.patience import patiently
from holmesjax.errors import ConfigError, PlanError, raise_if_passing
from holmesjax.files import places, run_folder, yaml_files
from holmesjax.hosts import computing
from holmesjax.hugging_face import folder as hugging_face, peft
from holmesjax.layer_specs.model_layers import forget, layers
from holmesjax.liveness import lease
from holmesjax.plan import mfu, pins
from holmesjax.plan.device_pool import USABLE_MEMORY, DevicePool
from holmesjax.plan.plan import Plan
from holmesjax.plan.ways import ChosenWay
from holmesjax.planner.refusals import refuse_empty_groups
from holmesjax.schedules.pipeline_schedules import SCHEDULES
from holmesjax.topology import loading
from holmesjax.topology.catalogue import CPU
from holmesjax.topology.machines import Node, Topology

CONFIG, TOPOLOGY, PLAN = "config.yaml", "topology.yaml", "plan.yaml"
ENVIRONMENT = "environment.yaml"
PROFILES = "profiles"  # what JAX's profiler writes of steps

# Who reads the data on this machine: the one process of a run, or the processes of a node.
DataReader = Literal["process", "node"]

SETTINGS_OF: configs.SettingsOf = {"hf": hugging_face.settings_of, "peft": peft.settings_of}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run before it starts: `launch plan` prints it, `Trainer` runs it."""

    config: Config
    topology: Topology
    plan: Plan
    unpinned: Plan | None = None  # the best that was found without what the run sets of the plan
    pinned_at: str = ""  # where the run sets a part of the plan
    choice: ChosenWay | None = (
        None  # between a pipeline and islands, if the run left it to the planner
    )

    @property
    def run_dir(self) -> Path:
        """The folder in which the run works, on this machine."""
        return places.folder_of(self.config.run.dir)

    @property
    def generating(self) -> "Job":
        """The run with the plan that generates text: with islands, that of the first."""
        return dataclasses.replace(self, plan=self.plan.pipelines[0])

    @cached_property
    def own_sources(self) -> dict[str, str]:
        """Digests of the user's own code, as it was when they were first asked for."""
        return computing.own_sources(self.config.model, self.config.optimizer)

    def note_own_sources(self) -> None:
        """Notes the user's own code as it is now: to edit it later does not change the run."""
        _ = self.own_sources

    def about(self, restart: int) -> dict[str, Any]:
        """Returns the values that all processes of attempt number `restart` must have in common."""
        model = self.config.model
        return {
            "plan hash": self.plan.hash(),
            "settings hash": _settings_hash(self.config),
            "data.tokenizer (library and hash of its files)": tokenizer_files.identity_with_end(
                self.config.data.tokenizer
            ),
            # Each process imports a model of its user's own by itself.
            **({"model hash": _short_hash(repr(layers(model)))} if model.module else {}),
            "restart": restart,
            **versions(),
        }

    @property
    def device_kinds(self) -> Collection[str]:
        """Returns the kinds of the devices that JAX will show."""
        return _device_kinds(self.config, self.topology)

    def pool(self, env: Mapping[str, str]) -> DevicePool | None:
        """Returns the pool of the run's GPUs, as the user's environment has it; None: no GPU.

        Raises ConfigError for a share that makes no sense.
        """
        return DevicePool.of_run(env) if self._has_gpus else None

    def check_pool(self, env: Mapping[str, str], stages: Sequence[int]) -> DevicePool | None:
        """Returns the pool that JAX will take in a process with this environment; None: no GPU.

        Raises ConfigError where it cannot be, or where a stage of this process does not fit it:
        whoever started the process may have set another share than the plan counts with.
        """
        if not self._has_gpus:
            return None
        pool = DevicePool.of_process(env)
        pool.refuse_too_small([self.plan.stages[stage] for stage in stages], self.topology)
        return pool

    def refuse_other_nodes(self) -> None:
        """Raises PlanError where a plan needs more nodes than the one of a single process."""
        nodes = dict.fromkeys(node for stage in self.plan.stages for node in stage.nodes)
        if self._has_gpus and len(nodes) > 1:
            raise PlanError(
                "Trainer",
                "trains in one process, which has the devices of its own node alone",
                found=f"a plan on {len(nodes)} nodes: {', '.join([*nodes][:3])}"
                + ", ..." * (len(nodes) > 3),
                fix="start a process on each node: python -m launch train RUN.yaml --launcher ssh, "
                "slurm or kubernetes; run.rehearse=true tries the plan on virtual CPU devices",
            )

    @property
    def _has_gpus(self) -> bool:
        return set(self.device_kinds) != {CPU}

    def environment(self, user_env: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that JAX reads; `user_env` is the user's environment.

        Raises ConfigError where that has something that cannot be.
        """
        of_user, deterministic = user_env.get("XLA_FLAGS", ""), self.config.train.deterministic
        waits = self.config.distributed
        ours = xla_flags.for_devices(
            self.device_kinds,
            deterministic=deterministic,
            hang_s=waits.step_timeout_s or waits.start_timeout_s,
        )
        if ours and deterministic and xla_flags.undoes_determinism(of_user):
            problem = "turns off the flag that train.deterministic needs"
            fix = (
                f"remove {xla_flags.DETERMINISTIC} or the file from it, or set the setting to false"
            )
            raise ConfigError("XLA_FLAGS", problem, found=of_user, fix=fix)
        flags, pool = xla_flags.joined(ours, of_user), self.pool(user_env)
        found = {**({"XLA_FLAGS": flags} if flags else {}), **(pool.variables if pool else {})}
        if self._has_gpus and self.config.parallel.outer_memory == "host":
            own = user_env.get(xla_flags.HOST_MEMORY, xla_flags.ALL_HOST_MEMORY)
            found[xla_flags.HOST_MEMORY] = own
        return found

    def process_environment(
        self, user_env: Mapping[str, str], pool: DevicePool | None = None
    ) -> dict[str, str]:
        """Returns these variables, and those that a memory allocator reads as a process starts.

        Args:
          user_env: the user's environment.
          pool: of each process, if several share a GPU. None: `user_env` says it.
        """
        allocator = process_variables.allocator_for(self.device_kinds, user_env)
        return {**self.environment(user_env), **allocator, **(pool.variables if pool else {})}

    def node_to_measure(self, asked: str | None) -> Node:
        """The node that is named; without a name the first, if all have devices of one name."""
        nodes = self.topology.nodes
        first = {node.device.name: node for node in reversed(nodes)}
        if asked is None and len(first) == 1:
            return nodes[0]
        for node in nodes:
            if node.name == asked:
                return node
        raise ConfigError(
            "--node",
            f"must be a node of the topology {self.topology.name}",
            found=asked or f"nothing, and {len(first)} kinds of device",
            fix="name the one that this host is, or one like it: --node "
            + " or ".join(node.name for node in reversed(first.values())),
        )

    def compared(self, env: Mapping[str, str]) -> "Job":
        """Returns this job with the best plan without what the run sets of it, as `compares` has.

        `env` is the user's, as `load` takes it.
        """
        if self.unpinned or not pins.pins(self.config.parallel):
            return self
        from holmesjax.planner.planner import make_plans  # as in `load`

        pool = self.pool(env)
        usable_memory = pool.usable_memory if pool else USABLE_MEMORY
        say: Callable[[str], None] = lambda _: None
        _, unpinned = make_plans(self.config, self.topology, say, usable_memory, compares=True)
        return dataclasses.replace(self, unpinned=unpinned)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch * self.config.model.context_length

    @property
    def peak_step_s(self) -> float | None:
        """Returns the seconds of a step with every device of the plan at its peak (`mfu`)."""
        return mfu.peak_step_s(self.plan, self.topology, self.config)

    @property
    def measured_peak_step_s(self) -> float | None:
        """Returns `peak_step_s` for measured steps; None for a rehearsal on other devices."""
        return None if self.config.run.rehearse else self.peak_step_s

    def unfinished(self, done: int) -> list[str]:
        """Returns the line about a run that was asked to stop."""
        return [
            f"stopped after step {done} of {self.config.train.steps}; resume with",
            f"  python -m launch train {self.run_dir}",
        ]


def _settings_hash(config: Config) -> str:
    """First 12 hex digits of the SHA-256 of all settings; hosts may differ in the paths."""
    content = dataclasses.asdict(config)
    del content["topology"], content["run"]["dir"], content["data"]["tokenizer"]
    return _short_hash(json.dumps(content, sort_keys=True))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Returns the versions on which the numbers and the messages of a run depend."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = ("holmesjax", "jax", "jaxlib", "optax", "flax", "numpy")
    # A checkout of HolmesJAX can be used as it is.
    packages = {name: computing.installed(name) or "not installed" for name in names}
    return {"Python": python, **packages}


def load_saved(run_dir: str | Path) -> Job:
    """The job of a run folder with the plan that is in it: nothing is decided again."""
    folder = Path(run_dir)
    config = load_config(folder)
    _forget_own_code(config)
    return Job(
        config=dataclasses.replace(
            config,
            run=dataclasses.replace(config.run, dir=str(folder)),
            data=dataclasses.replace(config.data, tokenizer=saved_tokenizer(folder, config)),
        ),
        topology=loading.load(folder / TOPOLOGY),
        plan=Plan.load(folder / PLAN),
    )


def saved_tokenizer(run_dir: Path, config: Config) -> str:
    """The `data.tokenizer` of a run that was started before: its own copy, if there is one."""
    own = run_dir / tokenizer_files.FOLDER
    named = config.data.tokenizer
    return str(own) if named != BYTES and own.exists() else named


def has_trained(run_dir: str | Path) -> bool:
    """Whether a run has made a step; false where its folder cannot be read.

    The folder of a process apart from the launcher's has no records of steps, but has manifests:
    one of step 0 is of weights that were imported.
    """
    folder = Path(run_dir)
    with suppress(OSError):
        if (folder / run_folder.METRICS).stat().st_size > 0:
            return True
    with suppress(OSError):
        steps = (path.parent.name for path in folder.glob(run_folder.MANIFESTS))
        return any(step.removeprefix("step_").strip("0") for step in steps)
    return False


def _read(path: Path, overrides: Sequence[str], *, is_begun: bool) -> Config:
    read = lambda: configs.load(path, overrides, SETTINGS_OF)
    config = unread_settings.of_begun_run(read) if is_begun else read()
    _forget_own_code(config)
    return config


def _forget_own_code(config: Config) -> None:
    """Forgets what a module of the user's was: one that was reloaded has other functions."""
    if computing.own_modules(config.model, config.optimizer):
        forget()


def _with_machines(
    config: Config, topology_path: Path, what_if: Sequence[str]
) -> tuple[Config, Topology]:
    """The machines of a run, and its config: both of one island, where that is a job of its own."""
    topology = loading.load(topology_path)
    if what_if:
        loading.load(topology_path, what_if)
    cluster_paths.check(config, [cluster.name for cluster in topology.clusters])
    from holmesjax.planner import island_alone  # here: the processes of a job read its plan

    return island_alone.alone(config, topology)


def load_config(run_dir: str | Path) -> Config:
    """The resolved config of a run that was started before."""
    path = Path(run_dir) / CONFIG
    if not yaml_files.may_be_file(path):
        fix = "name the folder of a run, such as runs/quickstart"
        use = "make a run of it: python -m launch import {} --to RUN_DIR"
        fix = hub_names.fix(str(run_dir), fix, use=use)
        raise ConfigError(str(run_dir), "is no run folder", found=f"no {CONFIG} in it", fix=fix)
    return unread_settings.of_begun_run(lambda: configs.load(path, settings_of=SETTINGS_OF))


def load(
    target: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    reads_data: DataReader | None = None,
    waits_for_data: bool = True,
    compares: bool = False,
    say: Callable[[str], None] = lambda _: None,
    env: Mapping[str, str] = MappingProxyType({}),
    what_if: Sequence[str] = (),
    will_own: bool = False,
) -> Job:
    """The job of a run file, or of the folder of a run that was started before.

    Args:
      target: a file of `configs/runs/`, or a run folder.
      overrides: settings on top of it, `["train.steps=100"]` or `{"train.steps": 100}`.
      reads_data: who reads the data on this machine, which is looked at before anything is planned.
        One process has the paths of the first cluster; a node may be of any. None: nobody here.
      waits_for_data: whether data that the run has trained on are waited for (`patience`).
      compares: whether a plan is also looked for without what the run sets of it, to say what these
        settings cost.
      say: is called with what the planner tries.
      env: of the user: a plan for GPUs counts with the pool that JAX will take of them.
      what_if: changes of the topology that will be planned next, checked before anything is.
      will_own: whether this process takes the run folder next, so nobody else may own it.

    Raises HolmesError for what cannot be, in the files, the data or the plan.
    """
    if not isinstance(target, str | os.PathLike):
        fix = "give the path of a run file, such as configs/runs/quickstart.yaml, or a run folder"
        raise ConfigError("the run", "must be a path", found=repr(target), fix=fix)
    target, overrides = Path(target), yaml_files.as_overrides(overrides)
    is_begun = os.path.isdir(target)
    if is_begun:  # False where it may not be looked at, and then reading it says so
        overrides = _of_folder(target, overrides)
        target = target / CONFIG
    config = _read(target, overrides, is_begun=is_begun)
    refuse_empty_groups(config)
    config, topology = _with_machines(config, configs.topology_path(config, target), what_if)
    clusters = [cluster.name for cluster in topology.clusters]
    _refuse_folder(places.folder_of(config.run.dir), will_own=will_own)
    if reads_data == "process":
        _refuse_absent_devices(config, topology)
    if reads_data:
        here = clusters[:1] if reads_data == "process" else clusters
        patiently(
            lambda: cluster_paths.look(config, here),
            has_trained=waits_for_data and has_trained(places.folder_of(config.run.dir)),
        )
    # Imported here: the processes of a job read its plan.
    from holmesjax.planner.planner import choose, make_plans

    has_gpus = set(_device_kinds(config, topology)) != {CPU}
    usable_memory = USABLE_MEMORY
    if has_gpus:
        pool = DevicePool.of_run(env)
        if pool.is_own:
            pool.refuse_hopeless(_parameter_bytes(config), topology)
        usable_memory = pool.usable_memory
    choice = None
    if config.parallel.across == "auto":
        choice = choose(config, topology, say, usable_memory)
        config = choice.config
    if choice and (choice.plan.islands or not compares):
        plan, unpinned = choice.plan, None
    else:
        plan, unpinned = make_plans(config, topology, say, usable_memory, compares=compares)
    _refuse_uneven_rampup(config, plan)
    pinned = pins.pins(config.parallel)
    place = configs.where_set(target, overrides, "parallel", pinned) if pinned else ""
    return Job(
        config=config,
        topology=topology,
        plan=plan,
        unpinned=unpinned,
        pinned_at=place,
        choice=choice,
    )


def _parameter_bytes(config: Config) -> int:
    count, _ = parameter_counts(config.model)
    return count * DTYPE_BYTES[config.train.param_dtype]


def _device_kinds(config: Config, topology: Topology) -> Collection[str]:
    return {CPU} if config.run.rehearse else topology.device_kinds


def _refuse_absent_devices(config: Config, topology: Topology) -> None:
    """Raises PlanError if JAX cannot show the devices of any plan, before a plan is made.

    `build_meshes` counts the devices once there is a plan, which takes long for a large model.
    """
    is_for_cpus = config.run.rehearse or CPU in topology.device_kinds
    if is_for_cpus or topology.num_devices == 1 or "jax" in sys.modules:
        return
    if not process_variables.may_have_accelerators():
        kinds = ", ".join(sorted(topology.device_kinds))
        raise PlanError(
            "devices",
            f"JAX shows no accelerator on this machine, and the topology {topology.name!r} has "
            f"{topology.num_devices} ({kinds})",
            found="CPUs alone",
            fix="set run.rehearse=true to run on virtual CPU devices, or start processes on the "
            "machines of the topology with --launcher ssh, slurm or kubernetes",
        )


def _refuse_uneven_rampup(config: Config, plan: Plan) -> None:
    """Raises ConfigError for batches of `train.rampup` that the plan's microbatches do not fill."""
    size, order = plan.global_batch // plan.microbatches, SCHEDULES[plan.schedule]
    for number, part in enumerate(config.train.rampup):
        where, count = f"train.rampup[{number}].global_batch", part.global_batch // size
        if part.global_batch % size:
            raise ConfigError(
                where,
                f"must be a multiple of {size}, the sequences of a microbatch of the plan",
                found=part.global_batch,
                fix=f"use {max(count, 1) * size}, or more parallel.microbatches",
            )
        if not order.suits(len(plan.stages), count):
            raise ConfigError(
                where,
                f"gives {count} microbatches, and {plan.schedule} needs a multiple of the "
                f"{len(plan.stages)} stages",
                found=part.global_batch,
                fix=f"use a multiple of {size * len(plan.stages)}, or another parallel.schedule",
            )


def _refuse_folder(run_dir: Path, *, will_own: bool) -> None:
    """Refuses a run folder that cannot be one, before a plan is made.

    Raises ConfigError where a file is in its way, and LeaseError where another process of this
    machine owns it and this one `will_own` it. `Lease` finds out whether the folder can be written.
    """
    if will_own:
        lease.refuse_owned(run_dir)
    for path in (run_dir, *run_dir.parents):
        try:
            if path.is_dir():
                return
            is_there = path.exists()
        except OSError as error:
            raise_if_passing(error)
            found, fix = f"{path}: {error.strerror}", "use another run.dir"
            raise ConfigError("run.dir", "cannot be looked at", found=found, fix=fix) from None
        if is_there:
            found, fix = f"{path}, a file", "name a folder, or a new one"
            raise ConfigError("run.dir", "is no folder", found=found, fix=fix)


def _of_folder(folder: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides of a run folder, which is complete in itself, wherever it has been moved."""
    config = load_config(folder)
    own = {"topology": folder / TOPOLOGY, "data.tokenizer": saved_tokenizer(folder, config)}
    here: dict[str, object] = {"run.dir": str(places.url_of(folder) or folder)}
    for name, value in own.items():
        if not any(override.startswith(f"{name}=") for override in overrides):
            here[name] = str(value)
    return [*yaml_files.as_overrides(here), *overrides]
