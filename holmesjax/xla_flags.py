"""The flags with which XLA overlaps a step's collectives with computation. Does not import JAX.

XLA reads the variable XLA_FLAGS once, when a process first asks for a device, and aborts the
process for a flag it does not know. A test gives the whole table to the JAX that is installed.
"""

from collections.abc import Collection

# From JAX-Toolbox, docs/GPU_performance.md, less what is for loops over layers, which a stage does
# not have. How much each brings is not measured here.
GPU = {
    # Orders a program so that a collective starts early and what needs its result comes late.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # Small collectives may be joined whatever dims their arrays are cut along: those of `fsdp`.
    "xla_gpu_enable_all_gather_combine_by_dim": "false",
    "xla_gpu_enable_reduce_scatter_combine_by_dim": "false",
    # A process whose program is in its cache has no part in tuning it: others would wait for that.
    "xla_gpu_shard_autotuning": "false",
}


def for_devices(kinds: Collection[str]) -> str:
    """XLA_FLAGS for processes with devices of these kinds.

    >>> for_devices({"cpu"})
    ''
    """
    if set(kinds) <= {"cpu"}:
        return ""
    return " ".join(f"--{name}={value}" for name, value in GPU.items())


def joined(flags: str, own: str) -> str:
    """XLA_FLAGS of `flags` and of the user's `own`, which win: XLA takes a flag's last value.

    >>> joined("--xla_a=1 --xla_b=1", "--xla_b=2")
    '--xla_a=1 --xla_b=1 --xla_b=2'
    >>> joined("--xla_a=1", "flags.txt")  # a file of flags: XLA reads it only where it stands alone
    'flags.txt'
    """
    if own.strip() and not own.lstrip().startswith("-"):
        return own
    return f"{flags} {own}".strip()
