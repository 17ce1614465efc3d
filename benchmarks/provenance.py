"""The origin of a result: command, commit, date, device and versions of its measurement."""

import contextlib
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from holmesjax.hosts import computing

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "optax", "numpy", "torch")
GPU_PACKAGES = ("jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc")


def provenance(name: str, device: Any = None, **more: Any) -> dict[str, Any]:
    """The five lines that stand in every result file.

    Args:
      name: of the benchmark's module.
      device: what was measured; this machine's CPU if None.
      more: facts about this machine's CPU, such as the cores that were used.
    """
    return {
        "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device or {"cpu": cpu_model(), "cores": os.cpu_count(), **more},
        "versions": versions(),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "?")


def commit() -> str:
    """The commit of this checkout, or what its source is where git does not say."""
    git = lambda *args: subprocess.run(
        ["git", *args], capture_output=True, text=True, cwd=RESULTS.parent
    ).stdout.strip()
    with contextlib.suppress(OSError):
        if found := git("rev-parse", "--short", "HEAD"):
            return found + (" dirty" if git("status", "--porcelain") else "")
    return f"not known, source {computing.source_digest()}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver())}
    for package in (*PACKAGES, *GPU_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
