"""The kernels that stages may take, and the header's lines that say which they take."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from holmesjax.config import Config
from holmesjax.config.update_rules import RULES
from holmesjax.errors import ConfigError
from holmesjax.hosts import kernel_check
from holmesjax.hosts.hardware import Gpu
from holmesjax.hosts.nics import Host
from holmesjax.job import Job
from holmesjax.models import ops
from holmesjax.optimizers import update_ops
from holmesjax.plan.plan import Axis
from holmesjax.runtime.chunk import Chunk


def find_unproven(
    job: Job,
    stages: Sequence[int],
    find_host: Callable[[], Host],
    env: Mapping[str, str],
    say: Callable[[str], None],
    advance: Callable[[], None] = lambda: None,
) -> str | None:
    """Returns what checked kernels lack on this host to be taken by `auto`; None: nothing.

    Runs their check where it decides and no verdict is kept. Starts no device in this process, and
    must come before anything does: the check needs the memory of the device.

    Args:
      job: what is trained.
      stages: the numbers of the stages that are here.
      find_host: tells the GPUs.
      env: of this process.
      say: takes lines.
      advance: is called as a check goes on.

    Raises:
      ConfigError: the run asks for the Pallas kernels, which this machine would miscompile, or for
        those of experts, which have not passed their check here.
    """
    config = job.config
    if config.run.rehearse or job.topology.device_kinds == {"cpu"}:
        return ops.UNCHECKED
    asking = [
        name
        for name in ("attention", "optimizer", "experts")
        if getattr(config.kernels, name) == "pallas"
    ]
    if asking and (reason := kernel_check.miscompiles(kernel_check.find_assembler())):
        problem = "asks for kernels that this machine would miscompile"
        fix = f"install {kernel_check.SOUND}"
        raise ConfigError(f"kernels.{asking[0]}", problem, found=reason, fix=fix)
    if "experts" in asking:
        gpus = find_host().gpus
        for asked in _of_experts(job, stages):
            own, fix = asked["experts"], "use auto or xla"
            for gpu in gpus:
                widths = own["width"], own["inner"]
                if reason := ops.unsupported_experts(_device(gpu), own["dtype"], *widths):
                    problem = "asks for kernels that cannot multiply here"
                    raise ConfigError("kernels.experts", problem, found=reason, fix=fix)
            found = kernel_check.verdict(asked, gpus, env, say, advance=advance)
            if found.lack is not None:
                problem = "asks for kernels that have not passed their check on this machine"
                raise ConfigError("kernels.experts", problem, found=f"no {found.lack}", fix=fix)
    if "auto" not in (config.kernels.attention, config.kernels.optimizer):
        return ops.UNCHECKED
    if not (gpus := find_host().gpus):
        return ops.UNCHECKED
    is_cut = any(job.plan.stages[stage].mesh.get(Axis.CONTEXT, 1) > 1 for stage in stages)
    checks = [*_of_attention(config, gpus, is_cut), *_of_update(config, gpus)]
    for asked in checks:
        if (lack := kernel_check.verdict(asked, gpus, env, say, advance=advance).lack) is not None:
            return lack
    return None if checks else ops.UNCHECKED


def _of_experts(job: Job, stages: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields what checks of the kernels of experts are asked, for stages that multiply with them.

    With a capacity only devices that share experts do. Raises ConfigError if no stage does.
    """
    experts = job.config.model.experts
    if experts is None:
        return
    has_capacity = experts.capacity_factor is not None
    uses = lambda mesh: not has_capacity or mesh.get(Axis.EXPERT, 1) > 1
    if not any(uses(stage.mesh) for stage in job.plan.stages):
        problem = "asks for kernels that no stage takes: with a capacity, products are batched"
        fix = "use auto or xla, or leave model.experts.capacity_factor out"
        raise ConfigError("kernels.experts", problem, found="pallas", fix=fix)
    meshes = [job.plan.stages[stage].mesh for stage in stages]
    for tensor in sorted({mesh.get(Axis.TENSOR, 1) for mesh in meshes if uses(mesh)}):
        yield kernel_check.asked_of_experts(job.config, tensor)


def _device(gpu: Gpu) -> SimpleNamespace:
    """A GPU as JAX would show it."""
    return SimpleNamespace(
        platform="gpu",
        device_kind=gpu.name,  # NVIDIA's name, as in JAX
        compute_capability=gpu.compute_capability,
    )


def _of_attention(config: Config, gpus: Sequence[Gpu], is_cut: bool) -> list[dict[str, Any]]:
    """Returns the checks of attention that decide: nothing where a run names its kernels."""
    if config.kernels.attention != "auto":
        return []
    asked = kernel_check.asked_of(config, is_cut=is_cut)
    asked.pop("moments", None)  # which are asked for by name
    return kernel_check.checks(asked, gpus)


def _of_update(config: Config, gpus: Sequence[Gpu]) -> Iterator[dict[str, Any]]:
    """Yields what a check of the kernel of AdamW's step is asked, if it decides."""
    has_kernel = RULES[config.optimizer.name].has_adamw and config.train.param_dtype == "float32"
    is_free = has_kernel and config.kernels.optimizer == "auto"
    if is_free and update_ops.update_depends_on_check(_device(gpus[0]), config.optimizer.moments):
        yield kernel_check.asked_of_update(config)


def attention_lines(chunks: Sequence[Chunk]) -> list[str]:
    """The lines of the header that say what computes attention in each stage, and why.

    There are none for stages on CPUs, which have plain JAX and nothing else.
    """
    by_choice: dict[str, dict[int, None]] = {}
    for chunk in chunks:
        if chunk.mesh.devices.flat[0].platform != "cpu":
            number = chunk.plan.chunks[chunk.index][0]
            for choice in chunk.choose_attention():
                by_choice.setdefault(str(choice), {})[number] = None
    return [
        f"attention   stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {choice}"
        for choice, numbers in by_choice.items()
    ]


def optimizer_lines(chunks: Sequence[Chunk]) -> list[str]:
    """The line of the header that says what computes AdamW's step, and why.

    There is none for stages on CPUs, nor for an optimizer in which no parameter has that step.

    Raises:
      ConfigError: the devices cannot run what the run asks for.
    """
    choices: dict[str, None] = {}
    for chunk in chunks:
        choice = chunk.optimizer.choose_kernel(chunk.update_functions)
        if choice is not None and chunk.mesh.devices.flat[0].platform != "cpu":
            choices[str(choice)] = None
    return [f"update      {choice}" for choice in choices]
