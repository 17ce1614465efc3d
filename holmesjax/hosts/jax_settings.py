"""The settings of JAX that a shell may have: those that change numbers are taken away. No JAX.

JAX reads a variable JAX_NAME for each of its settings when it is imported. Many change what a run
computes, or break it, and what a run computes follows from its run file alone.
"""

import re
from collections.abc import Mapping, MutableMapping

from holmesjax.errors import ConfigError

REFUSED = re.compile(r"for (?:JAX flag|environment) '?(jax_\w+)", re.IGNORECASE)
# Devices, caches and logs: no number depends on them. All others are taken away.
KEPT = (
    "JAX_COMPILATION_CACHE",
    "JAX_CUDA_VISIBLE_DEVICES",
    "JAX_DEBUG_LOG_MODULES",
    "JAX_DUMP_IR",
    "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_EXPLAIN_CACHE_MISSES",
    "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS",
    "JAX_LOG",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PERSISTENT_CACHE",
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "JAX_RAISE_PERSISTENT_CACHE_ERRORS",
    "JAX_ROCM_VISIBLE_DEVICES",
    "JAX_SHARE_BINARY_BETWEEN_HOSTS",
    "JAX_TRACEBACK_FILTERING",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT",
)


def take_away(env: MutableMapping[str, str]) -> dict[str, str]:
    """Removes the variables of JAX that change numbers; returns them. Call it before JAX's import.

    >>> env = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "HOME": "/root"}
    >>> take_away(env), sorted(env)
    ({'JAX_ENABLE_X64': '1'}, ['HOME', 'JAX_PLATFORMS'])
    """
    taken = {
        name: value
        for name, value in env.items()
        if name.startswith("JAX_") and not name.startswith(KEPT)
    }
    for name in taken:
        del env[name]
    return taken


def refusal(error: ValueError, env: Mapping[str, str]) -> ConfigError | None:
    """Returns what to say where JAX's import has failed for a variable; None for another failure.

    >>> error = ValueError('Invalid value "x" for JAX flag jax_num_cpu_devices')
    >>> print(refusal(error, {"JAX_NUM_CPU_DEVICES": "x"}))
    JAX_NUM_CPU_DEVICES: has a value that JAX does not take
      found: x
      fix: correct this variable of the environment, or unset it
    """
    found = REFUSED.search(str(error))
    if not found or (name := found[1].upper()) not in env:
        return None
    problem, fix = "has a value that JAX does not take", "correct this variable of the environment"
    return ConfigError(name, problem, found=env[name], fix=f"{fix}, or unset it")
