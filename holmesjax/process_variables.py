"""The variables that a process is started with, and whether JAX may find an accelerator. No JAX."""

import os
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

NVIDIA_FILES = ("/dev/nvidiactl", "/dev/dxg")  # made by the driver; the second is that of WSL
# glibc's allocator with one heap that is never given back. XLA:CPU asks for its temporaries anew on
# each call of a program; by default their pages go back to the kernel, and each is a fault when it
# is touched again (docs/measurements.md).
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}


def allocator_for(kinds: Collection[str], user_env: Mapping[str, str]) -> dict[str, str]:
    """Returns the allocator's variables for these kinds of devices; none if the user has set some.

    >>> allocator_for({"h100"}, {})
    {}
    >>> allocator_for({"cpu"}, {"MALLOC_ARENA_MAX": "4"})
    {}
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in user_env)
    return {} if chosen or set(kinds) != {"cpu"} else dict(ALLOCATOR)


def may_have_accelerators() -> bool:
    """Whether JAX may show an accelerator on this machine; JAX alone knows for certain.

    JAX shows CPUs alone without a plugin for another platform, and CUDA's plugin needs a driver.
    """
    plugins = [entry.name for entry in entry_points(group="jax_plugins")]
    if not plugins or find_spec("libtpu"):
        return find_spec("jax_plugins") is not None or find_spec("libtpu") is not None
    is_cuda = all("cuda" in name for name in plugins)
    return not is_cuda or any(map(os.path.exists, NVIDIA_FILES))
