"""A run before it starts: its config, its machines and its plan, checked. Does not import JAX."""

import bisect
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from holmesjax import config as configs, hub_names, process_variables, units, xla_flags
from holmesjax.config import BYTES, Config, PlanConfig, update_rules
from holmesjax.costs.parameters import parameter_counts
from holmesjax.costs.stage_shape import DTYPE_BYTES
from holmesjax.data import cluster_paths, tokenizer_files, tokenizer_paths
from holmesjax.data.patience import patiently
from holmesjax.errors import ConfigError, PlanError, raise_if_passing
from holmesjax.files import places, run_folder, yaml_files
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts import computing
from holmesjax.hugging_face import folder as hugging_face, peft
from holmesjax.layer_specs.distinct_kinds import kind_names
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan import mfu, pins, plan as plans, save_costs
from holmesjax.plan.device_pool import USABLE_MEMORY, DevicePool
from holmesjax.plan.plan import Axis, Plan
from holmesjax.plan.ways import ChosenWay
from holmesjax.planner.refusals import refuse_empty_groups
from holmesjax.schedules.pipeline_schedules import SCHEDULES
from holmesjax.topology import description, loading, saving
from holmesjax.topology.catalogue import CPU
from holmesjax.topology.machines import Node, Topology

CONFIG, TOPOLOGY, PLAN = "config.yaml", "topology.yaml", "plan.yaml"
ENVIRONMENT = "environment.yaml"
PARTS = (Axis.FSDP, Axis.CONTEXT, Axis.EXPERT)  # the axes that cut a replica's parameters
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

    def about(self, restart: int) -> dict[str, Any]:
        """Returns the values that all processes of attempt number `restart` must have in common."""
        model = self.config.model
        return {
            "plan hash": self.plan.hash(),
            "settings hash": _settings_hash(self.config),
            "data.tokenizer (library and hash of its files)": tokenizer_files.identity(
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
        return {**({"XLA_FLAGS": flags} if flags else {}), **(pool.variables if pool else {})}

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

    def describe(self, pool: DevicePool | None = None) -> list[str]:
        """The machines, the plan and the run folder, for the console.

        `pool` is that of the GPUs; None: there are none, or it is not known here.
        """
        pinned, kind_of = pins.pins(self.config.parallel), kind_names(self.config.model)
        by_dollars = self.config.plan.objective == "tokens_per_dollar"
        return [
            *description.describe(self.topology),
            *plans.describe(self.plan, kind_of, is_pinned=bool(pinned)),
            *pins.describe(
                self.plan, pinned, self.unpinned, by_dollars=by_dollars, place=self.pinned_at
            ),
            *([self.choice.describe()] if self.choice else self._unused()),
            *self._active(),
            *([f"memory      {pool.describe(self.plan.stages, self.topology)}"] if pool else []),
            self._rate(),
            *self._schedule(),
            *self._numbers(),
            *self._price(),
            *save_costs.describe(self.config, self.topology, self.plan),
            f"run folder  {self._places()}",
        ]

    def _unused(self) -> list[str]:
        """A line about settings of the planner's choice of islands, where it has none."""
        own, across = self.config.plan, self.config.parallel.across
        is_set = {
            "plan.allow": bool(own.allow),
            "plan.islands_more_tokens": across == "pipeline"
            and own.islands_more_tokens != PlanConfig().islands_more_tokens,
        }
        names = " and ".join(name for name, value in is_set.items() if value)
        why = f"not used, since parallel.across is {across} and not auto"
        return [f"choice      {names}: {why}"] if names else []

    def _places(self) -> str:
        own = self.config.run.dir
        return f"{own}, and {self.run_dir} here" if places.is_url(own) else own

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

    def _rate(self) -> str:
        """Returns the text of the predicted rate and the predicted time of the run."""
        step_s, steps = self.plan.step_time_s, self.config.train.steps
        if utilisation := mfu.shown(self.peak_step_s, step_s):
            utilisation += " (attention counted whole, not half as its causal mask)"
        whose = " of these machines, which are rehearsed" if self.config.run.rehearse else ""
        return (
            f"rate        {self.step_tokens / step_s:,.0f} tokens/s{utilisation} predicted{whose}; "
            f"{_count(steps, 'step')} in {units.duration(steps * step_s)}"
        )

    def _schedule(self) -> list[str]:
        """Returns the text of a learning rate that follows tokens, with its steps."""
        optimizer, train = self.config.optimizer, self.config.train
        if optimizer.schedule_by == "steps":
            return []
        total, name, parts = self.config.tokens_after(train.steps), optimizer.schedule, []
        if warmup := optimizer.warmup_tokens:
            steps = bisect.bisect_left(range(train.steps), warmup, key=self.config.tokens_after)
            parts.append(f"warm-up {warmup:,} ({_count(steps, 'step')})")
        if decay := optimizer.decay_tokens:
            parts.append(f"decay the last {decay:,}")
        return [f"schedule    {name} by tokens: {', '.join([*parts, f'{total:,} in all'])}"]

    def _active(self) -> list[str]:
        """Returns the text of the model's size, where a token uses a part of the parameters."""
        everything, active = parameter_counts(self.config.model)
        lines = []
        if active < everything:
            lines.append(f"model       {everything:,} parameters, {active:,} active")
        shares = any(stage.mesh.get(Axis.EXPERT, 1) > 1 for stage in self.plan.stages)
        if shares and self.config.parallel.expert_placement == "load":
            lines.append("experts     placed by their loads at the begin and after each checkpoint")
        return lines

    def _numbers(self) -> list[str]:
        """Returns the lines of the number formats; gradients are float32 on every plan."""
        train, optimizer = self.config.train, self.config.optimizer
        return [
            f"numbers     products in {train.compute_dtype}, gradients summed in float32, "
            f"{self._sent()}"
            f"{'' if train.param_dtype == 'float32' else f'parameters in {train.param_dtype}, '}"
            f"{update_rules.describe(optimizer)}",
            *self._fp8(),
        ]

    def _sent(self) -> str:
        """Returns the words about gradients that are to be rounded before they are sent."""
        if (dtype := self.config.train.reduction_dtype) == "float32":
            return ""
        of_data = lambda mesh: mesh.get(Axis.DATA, 1)
        meshes = [stage.mesh for stage in self.plan.stages if of_data(stage.mesh) > 1]
        if not meshes:
            return "none sent between replicas, "
        parts = lambda mesh: math.prod(mesh.get(axis, 1) for axis in PARTS)  # of a replica
        if all(self.config.model.width // parts(mesh) % of_data(mesh) for mesh in meshes):
            return "sent between replicas in float32 (`data` does not divide the model width), "
        if set(self.device_kinds) == {CPU}:
            return f"rounded to {dtype} and sent between replicas in float32 (by CPUs), "
        return f"sent between replicas in {dtype}, "

    def _fp8(self) -> list[str]:
        """Returns the lines about products in fp8, if there are any."""
        if (fp8 := self.config.model.fp8) is None:
            return []
        scales = f"{fp8.scaling} scales of activations"
        scales += f" over {_count(fp8.history, 'step')}" if fp8.scaling == "delayed" else ""
        lines = [f"fp8         products of blocks in e4m3, their gradients in e5m2, {scales}"]
        ends = {"start": fp8.exclude_first, "end": fp8.exclude_last}
        excluded = [f"{_count(n, 'block')} at the {name}" for name, n in ends.items() if n]
        if excluded := excluded + ["down"] * fp8.exclude_down:
            lines.append(f"  in {self.config.train.compute_dtype}: {', '.join(excluded)}")
        if CPU in self.device_kinds:
            lines.append("  emulated on CPUs: the numbers are those of fp8, and no step is faster")
        if self.topology.device_kinds - {CPU}:
            lines.append("  predicted from the data sheet and one model that an H200 has trained")
        return lines

    def _price(self) -> list[str]:
        """Returns the text of the cost of the run, where the topology has prices."""
        train, items = self.config.train, self.plan.step_dollars
        if not (dollars := sum(items.values())):
            return []
        tokens = self.step_tokens
        parts = ", ".join(f"{name} {part:.3g}" for name, part in items.items())
        return [
            f"price       {dollars:.3g} dollars a step ({parts}), {tokens / dollars:,.0f} tokens a "
            f"dollar; {dollars * train.steps:,.2f} for {_count(train.steps, 'step')}"
        ]

    def unfinished(self, done: int) -> list[str]:
        """Returns the line about a run that was asked to stop."""
        return [
            f"stopped after step {done} of {self.config.train.steps}; resume with",
            f"  python -m launch train {self.run_dir}",
        ]

    def save_environment(self, variables: Mapping[str, str]) -> None:
        """Writes what the processes have besides the files of `save`: variables and versions."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({**variables, **versions()}, sort_keys=False, width=1000)
        write_whole(self.run_dir / ENVIRONMENT, text)

    def save(self, done: int = 0) -> Callable[[], None]:
        """Writes the three files that describe the run into its folder, and its tokenizer.

        Earlier files that differ are kept, as `config.000120.yaml` where 120 steps were `done`.
        Before the first step they are not kept, since nothing was made with them. The function
        that is returned puts the earlier files back, for a start that is refused after all.
        """
        self._save_tokenizer(done)
        before: dict[Path, bytes] = {}
        copies = []
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self.config.model.hf is not None:
            hugging_face.keep(Path(self.config.model.hf), self.run_dir)
        texts = {
            CONFIG: yaml_files.whole(configs.to_yaml(self.config)),
            TOPOLOGY: saving.to_yaml(self.topology),
            PLAN: self.plan.to_yaml(),
        }
        for name, text in texts.items():
            path = self.run_dir / name
            if path.is_file():
                before[path] = path.read_bytes()
                if done and _differ(name, before[path], text.encode()):
                    earlier = path.with_suffix(f".{done:06d}.yaml")
                    if not earlier.exists():  # else no step was kept that was made with this one
                        shutil.copyfile(path, earlier)
                        copies.append(earlier)
            write_whole(path, text)

        def undo() -> None:
            with contextlib.suppress(OSError):  # what refused the start is worth more
                for path, content in before.items():
                    write_whole(path, content)
                for copy in copies:
                    copy.unlink(missing_ok=True)

        return undo

    def _save_tokenizer(self, done: int) -> None:
        """Copies the files of the tokenizer, unless the run folder has them.

        The machine of a launcher may lack them, as it may lack the data. A process that reads data
        refuses a run without them.
        """
        path, own = Path(self.config.data.tokenizer), self.run_dir / tokenizer_files.FOLDER
        if self.config.data.tokenizer == BYTES or not path.exists():
            return
        if own.exists():
            before, now = tokenizer_paths.find(own), tokenizer_paths.find(path)
            if before.contents() == now.contents():
                return
            is_other = before.identity != now.identity
            if (
                is_other
                and done
                and not (earlier := own.with_name(f"{own.name}.{done:06d}")).exists()
            ):
                own.replace(earlier)
        tokenizer_paths.copy(path, own)


def _differ(name: str, before: bytes, now: bytes) -> bool:
    """Tells whether two contents of a file describe different runs, wherever the run folder is."""
    if name != CONFIG or before == now:
        return before != now
    try:
        contents = [yaml.safe_load(content) for content in (before, now)]
        for content in contents:
            # The run folder has its own copies of these files.
            del content["run"]["dir"], content["topology"]
            content["data"].pop("tokenizer", None)
    except (yaml.YAMLError, ValueError, RecursionError, KeyError, TypeError):
        return True
    return bool(contents[0] != contents[1])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


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
    names = ("holmesjax", "jax", "jaxlib", "numpy")
    # A checkout of HolmesJAX can be used as it is.
    packages = {name: computing.installed(name) or "not installed" for name in names}
    return {"Python": python, **packages}


def load_saved(run_dir: str | Path) -> Job:
    """The job of a run folder with the plan that is in it: nothing is decided again."""
    folder = Path(run_dir)
    config = load_config(folder)
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
    """Whether a run has made a step; false where its folder cannot be read."""
    try:
        return (Path(run_dir) / run_folder.METRICS).stat().st_size > 0
    except OSError:
        return False


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
    return configs.load(path, settings_of=SETTINGS_OF)


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

    Raises HolmesError for what cannot be, in the files, the data or the plan.
    """
    if not isinstance(target, str | os.PathLike):
        fix = "give the path of a run file, such as configs/runs/quickstart.yaml, or a run folder"
        raise ConfigError("the run", "must be a path", found=repr(target), fix=fix)
    target, overrides = Path(target), yaml_files.as_overrides(overrides)
    if os.path.isdir(target):  # False where it may not be looked at, and then reading it says so
        overrides = _of_folder(target, overrides)
        target = target / CONFIG
    config = configs.load(target, overrides, SETTINGS_OF)
    refuse_empty_groups(config)
    config, topology = _with_machines(config, configs.topology_path(config, target), what_if)
    clusters = [cluster.name for cluster in topology.clusters]
    _refuse_no_folder(places.folder_of(config.run.dir))
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


def _refuse_no_folder(run_dir: Path) -> None:
    """Raises ConfigError where a file is in the way of the run folder, before a plan is made.

    `lease` finds out whether the folder can be written.
    """
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
    here = [f"run.dir={places.url_of(folder) or folder}"]
    for name, value in own.items():
        if not any(override.startswith(f"{name}=") for override in overrides):
            here.append(f"{name}={value}")
    return [*here, *overrides]
