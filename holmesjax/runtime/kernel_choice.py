"""The attention kernels that stages may take, and the header's lines that say which they take."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from holmesjax.errors import ConfigError
from holmesjax.hosts import kernel_check
from holmesjax.hosts.nics import Host
from holmesjax.job import Job
from holmesjax.layers import distinct_kinds
from holmesjax.models import ops
from holmesjax.plan.plan import Axis
from holmesjax.runtime.stage import Stage


def find_unproven(
    job: Job,
    stages: Sequence[int],
    find_host: Callable[[], Host],
    env: Mapping[str, str],
    say: Callable[[str], None],
    advance: Callable[[], None] = lambda: None,
) -> str | None:
    """Returns what the Pallas kernels lack on this host to be taken by `auto`; None: nothing.

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
      ConfigError: the run asks for the Pallas kernels, which this machine would miscompile.
    """
    config = job.config
    if config.run.rehearse or job.topology.device_kinds == {"cpu"}:
        return ops.UNCHECKED
    if config.kernels.attention == "pallas":
        if reason := kernel_check.miscompiles(kernel_check.find_assembler()):
            problem, fix = (
                "asks for kernels that this machine would miscompile",
                f"install {kernel_check.SOUND}",
            )
            raise ConfigError("kernels.attention", problem, found=reason, fix=fix)
        return ops.UNCHECKED
    if config.kernels.attention != "auto" or not (gpus := find_host().gpus):
        return ops.UNCHECKED
    is_cut = any(job.plan.stages[stage].mesh.get(Axis.CONTEXT, 1) > 1 for stage in stages)
    asked = kernel_check.asked_of(config, is_cut=is_cut)
    device = SimpleNamespace(
        platform="gpu",
        device_kind=f"NVIDIA {gpus[0].name}",
        compute_capability=gpus[0].compute_capability,
    )
    kinds = (kind.attention for kind in distinct_kinds.kinds(config.model).blocks)
    if not any(
        ops.attention_depends_on_check(
            config.kernels, device, asked["dtype"], attention, asked["has_documents"], is_cut
        )
        for attention in kinds
        if attention is not None
    ):
        return ops.UNCHECKED
    return kernel_check.verdict(asked, gpus, env, say, advance=advance).lack


def attention_lines(stages: Sequence[Stage]) -> list[str]:
    """The lines of the header that say what computes attention in each stage, and why.

    There are none for stages on CPUs, which have plain JAX and nothing else.
    """
    by_choice: dict[str, dict[int, None]] = {}
    for stage in stages:
        if stage.mesh.devices.flat[0].platform != "cpu":
            number = stage.plan.chunks[stage.index][0]
            for choice in stage.choose_attention():
                by_choice.setdefault(str(choice), {})[number] = None
    return [
        f"attention   stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {choice}"
        for choice, numbers in by_choice.items()
    ]
