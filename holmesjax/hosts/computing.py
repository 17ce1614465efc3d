"""Facts that decide the numbers of a process: code, packages, flags, variables, drivers. No JAX.

Two processes that differ in any of it may compute differently, and neither would notice. So each
process tells its controller (`facts`), which refuses a process that differs from the first one.
"""

import functools
import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holmesjax.errors import HolmesError, raise_if_passing
from holmesjax.files import json_text, run_folder
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts.hardware import Gpu

PACKAGES = ("holmesjax", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "numpy")
# Of processes whose collectives meet; clusters may have drivers of their own.
OF_STAGE = ("driver", "NCCL", "CUDA plugin")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# Read by NVIDIA's libraries; what they choose changes sums, or hangs where two choose otherwise.
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE")
# Flags that name places or devices of one process.
FLAG = re.compile(r"--xla_[a-z0-9_]+")
LIBRARY_BYTES = 1 << 24  # and more has the library of XLA
OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_gpu_dump")


def facts(env: Mapping[str, str], gpus: Sequence[Gpu], module: str | None) -> dict[str, str]:
    """Returns what this process computes with, by name.

    Args:
      env: its environment.
      gpus: of its host.
      module: `model.module` of the run, "module:function"; None: the model is not a user's own.
    """
    found = {"source": source_digest()}
    if module is not None:
        found["source of model.module"] = _module_digest(module)
    found |= {name: installed(name) or "not installed" for name in PACKAGES}
    if gpus:
        found["driver"] = ", ".join(sorted({gpu.driver for gpu in gpus}))
        found["NCCL"] = _first_installed(NCCL)
        found["CUDA plugin"] = _first_installed(PLUGINS)
    for flag in env.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        if not name.startswith(OWN_FLAGS):
            found[name] = value or "true"
    return found | {name: env[name] for name in VARIABLES if name in env}


def unlike(
    first: Mapping[str, str], theirs: Mapping[str, str], *, same_stage: bool, allow: Collection[str]
) -> list[str]:
    """Returns the names of the facts in which a process differs from the first one.

    Args:
      first, theirs: facts.
      same_stage: whether both are of one stage.
      allow: names that may differ.

    >>> unlike({"source": "12", "--xla_a": "1"}, {"source": "12"}, same_stage=True, allow=())
    ['--xla_a']
    """
    names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    return [n for n in names if n not in allow and (same_stage or n not in OF_STAGE)]


NAMES = ("source", "source of model.module", *PACKAGES, *OF_STAGE, *VARIABLES)  # but for flags


def is_fact(name: str) -> bool:
    """Whether facts can have this name, and `--allow` of a job can permit that they differ.

    >>> [is_fact(name) for name in ("jax", "--xla_gpu_autotune_level", "--xla_gpu_autotune_leve")]
    [True, True, False]
    """
    return name in NAMES or (FLAG.fullmatch(name) is not None and _is_known_to_xla(name[2:]))


@functools.cache
def _is_known_to_xla(flag: str) -> bool:
    """Whether the XLA that is installed here has a flag of this name; true where there is no XLA.

    Its library has the names as texts. XLA itself would end the process that asks.
    """
    found = importlib.util.find_spec("jaxlib")
    folder = Path((found and found.origin) or os.devnull).parent
    pattern = re.compile(rb"(?<![a-z0-9_])%b(?![a-z0-9_])" % flag.encode())
    libraries = [path for path in folder.glob("*.so") if path.stat().st_size > LIBRARY_BYTES]
    for path in libraries:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if pattern.search(content):
                return True
    return not libraries


def permitted(run_dir: Path, allow: Sequence[str]) -> tuple[str, ...]:
    """Returns the facts in which the processes of a run may differ, now and at earlier starts.

    A scheduler repeats a start without its options, so the run folder keeps the names.

    Args:
      run_dir: the run folder, which must be the caller's.
      allow: names that `--allow` has; those of no fact are left out.
    """
    path = run_dir / run_folder.ALLOWED_DIFFERENCES
    kept = _kept(path)
    if new := [name for name in allow if is_fact(name) and name not in kept]:
        write_whole(path, json.dumps([*kept, *new]) + "\n")
    return (*kept, *new)


def _kept(path: Path) -> list[str]:
    try:
        kept = json_text.read(path)
        if isinstance(kept, list) and all(isinstance(name, str) for name in kept):
            return kept
        found = "no list of names"
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise_if_passing(error)
        found = str(error)
    fix = f"remove {path}, and give --allow again"
    raise HolmesError(str(path), "cannot be read", found=found, fix=fix)


def installed(package: str) -> str | None:
    """Returns the version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_digest() -> str:
    """Returns 16 hex digits of a digest of the Python files that a process runs."""
    digest = hashlib.sha256()
    checkout = Path(__file__).parents[2]
    for package in ("holmesjax", "kernels", "launch"):
        for path in sorted((checkout / package).rglob("*.py")):
            name = path.relative_to(checkout).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _module_digest(module: str) -> str:
    """Returns a digest of the file of a model's module, or of all files of its package."""
    name = module.partition(":")[0].partition(".")[0]
    file = getattr(importlib.import_module(name), "__file__", None)
    if file is None:
        return "unknown"
    path = Path(file)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for each_file in files:
        digest.update(
            os.path.relpath(each_file, path.parent).encode() + b"\0" + each_file.read_bytes()
        )
    return digest.hexdigest()[:16]


def _first_installed(packages: Sequence[str]) -> str:
    return next((own for package in packages if (own := installed(package))), "unknown")
