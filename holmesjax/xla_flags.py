"""The flags of XLA: for the collectives of a step, and for tiny programs. Does not import JAX.

XLA reads the variable XLA_FLAGS once, when a process first asks for a device, and aborts the
process for a flag it does not know. A test gives the whole table to the JAX that is installed.
"""

from collections.abc import Collection, Mapping
from importlib.metadata import version

# From JAX-Toolbox, docs/GPU_performance.md, less what is for loops over layers, which a stage does
# not have. `docs/distributed.md` says what each changes in a compiled step.
GPU = {
    # Orders a program so that a collective starts early and what needs its result comes late. XLA
    # of JAX 0.10.2 has that order anyway; later ones choose where the flag is unset.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # A process whose program is in its cache has no part in tuning it: others would wait for that.
    "xla_gpu_shard_autotuning": "false",
}


def for_tiny_programs() -> str:
    """XLA_FLAGS with which a CPU compiles tiny programs soonest: for tests and rehearsals.

    Most of that time is LLVM's, and before JAX 0.11 that of newer emitters of fused loops. XLA's
    own passes stay on. JAX 0.12 has those emitters alone: a program of two layers takes four times
    as long as with 0.10 (1.3 against 0.33 CPU seconds, 2026-11-25), and no flag was found to help.
    """
    flags = {
        "xla_backend_optimization_level": "0",
        "xla_llvm_disable_expensive_passes": "true",
        "xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_COMPILE",
        "xla_cpu_parallel_codegen_split_count": "1",
    }
    if _jax_version() < (0, 11):
        flags["xla_cpu_use_fusion_emitters"] = "false"
    return _joined(flags)


def _jax_version() -> tuple[int, ...]:
    return tuple(map(int, version("jax").split(".")[:2]))


def _joined(flags: Mapping[str, str]) -> str:
    return " ".join(f"--{name}={value}" for name, value in flags.items())


# Trying out the algorithms of a product takes seconds, and has no part in what is right.
NO_AUTOTUNING = "--xla_gpu_autotune_level=0"

# The same bits each time: no sum has an order of its own, and nothing is chosen by its time.
DETERMINISTIC = "xla_gpu_deterministic_ops"

# A variable of XLA: the GB of pinned memory that a process may take, as it needs them. They are 64
# where nobody sets it, whatever the host has; here the host's own memory is the limit.
HOST_MEMORY = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
ALL_HOST_MEMORY = "65536"


def for_devices(
    kinds: Collection[str], *, deterministic: bool = False, hang_s: float | None = None
) -> str:
    """XLA_FLAGS for processes with devices of these kinds.

    Args:
      kinds: of devices.
      deterministic: whether the same input gives the same bits each time.
      hang_s: within how many seconds a process has to end whose program does not. None: never.

    >>> for_devices({"cpu"})
    ''
    >>> for_devices({"h100"}, deterministic=True).split()[-1]
    '--xla_gpu_deterministic_ops=true'
    """
    if set(kinds) <= {"cpu"}:
        return ""
    flags = GPU | (_for_hangs(hang_s) if hang_s else {})
    return _joined(flags | ({DETERMINISTIC: "true"} if deterministic else {}))


# XLA looks at a program every 5 s, and ends its process 10 s after it has said what hangs.
ENDING_S = 15
LEAST_HANG_S = 10  # that a program may always take


def _for_hangs(within_s: float) -> dict[str, str]:
    """The flags with which XLA ends a process in time, and says what it hung in.

    A program has the time from when it is given to its device, where it may wait behind others. A
    limit so short that a healthy program could pass it has no flags.

    >>> _for_hangs(600.0)["xla_gpu_execution_terminate_timeout"], _for_hangs(30.0)
    ('465s', {})
    """
    limit_s = round(0.8 * within_s) - ENDING_S
    if limit_s < LEAST_HANG_S:
        return {}
    flags = {
        "xla_gpu_execution_terminate_timeout": f"{limit_s}s",
        # Of each kind: the thunks that have ended last, and those that have begun and not ended.
        "xla_gpu_execution_progress_tracking": "4",
    }
    if _jax_version() >= (0, 12):
        # There the flag above is for the host's part, which gives the kernels to the device.
        flags["xla_gpu_device_execution_terminate_timeout"] = f"{limit_s}s"
    return flags


def undoes_determinism(user_flags: str) -> bool:
    """Whether the user's own XLA_FLAGS take the flag of determinism back.

    >>> undoes_determinism("--xla_gpu_deterministic_ops=false"), undoes_determinism("--xla_a=1")
    (True, False)
    >>> undoes_determinism("flags.txt")  # a file of flags stands alone
    True
    """
    last = [flag for flag in user_flags.split() if flag.startswith(f"--{DETERMINISTIC}")][-1:]
    is_file = bool(user_flags.strip()) and not user_flags.lstrip().startswith("-")
    return is_file or any(flag.partition("=")[2].lower() in ("false", "0") for flag in last)


def joined(flags: str, user_flags: str) -> str:
    """XLA_FLAGS of `flags` and `user_flags`, which win: XLA takes a flag's last value.

    >>> joined("--xla_a=1 --xla_b=1", "--xla_b=2")
    '--xla_a=1 --xla_b=1 --xla_b=2'
    >>> joined("--xla_a=1 --xla_b=1", "--xla_a=1")  # a parent process has joined them
    '--xla_b=1 --xla_a=1'
    >>> joined("--xla_a=1", "flags.txt")  # a file of flags: XLA reads it only where it stands alone
    'flags.txt'
    """
    if user_flags.strip() and not user_flags.lstrip().startswith("-"):
        return user_flags
    known = user_flags.split()
    missing = " ".join(flag for flag in flags.split() if flag not in known)
    return f"{missing} {user_flags}".strip()
