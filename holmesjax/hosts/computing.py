"""Facts that decide the numbers of a process: code, packages, flags, variables, drivers. No JAX.

Two processes that differ in any of it may compute differently, and neither would notice. So each
process tells its controller (`facts`), which refuses a process that differs from the first one.
"""

import functools
import hashlib
import importlib.util
import json
import mmap
import os
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holmesjax.config import ModelConfig, OptimizerConfig
from holmesjax.errors import HolmesError, raise_if_passing
from holmesjax.files import json_text, run_folder
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts.hardware import Gpu

PACKAGES = ("holmesjax", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "numpy")
# Of processes whose collectives meet; clusters may have drivers of their own.
OF_STAGE = ("driver", "NCCL", "cuDNN", "cuBLAS", "CUDA plugin")
CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# Read by NVIDIA's libraries; what they choose changes sums, or hangs where two choose otherwise.
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE")
# The facts about a user's own code, by the setting that names it.
OWN_SOURCES = {
    name: f"source of {name}" for name in ("model.module", "model.pattern", "optimizer.function")
}
# Flags that name places or devices of one process.
FLAG = re.compile(r"--xla_[a-z0-9_]+")
LIBRARY_BYTES = 1 << 24  # and more has the library of XLA
NAME_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_")
OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_gpu_dump")


def facts(
    env: Mapping[str, str], gpus: Sequence[Gpu], sources: Mapping[str, str]
) -> dict[str, str]:
    """Returns what this process computes with, by name.

    Args:
      env: its environment.
      gpus: of its host.
      sources: `own_sources` of the run.
    """
    found = {"source": source_digest(), **sources}
    found |= {name: installed(name) or "not installed" for name in PACKAGES}
    if gpus:
        found["driver"] = ", ".join(sorted({gpu.driver for gpu in gpus}))
        found["NCCL"] = _first_installed(NCCL)
        found["cuDNN"] = _first_installed(CUDNN)
        found["cuBLAS"] = _first_installed(CUBLAS)
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


NAMES = ("source", *OWN_SOURCES.values(), *PACKAGES, *OF_STAGE, *VARIABLES)  # but for flags


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
    libraries = [path for path in folder.glob("*.so") if path.stat().st_size > LIBRARY_BYTES]
    for path in libraries:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if _has_word(content, flag.encode()):
                return True
    return not libraries


def _has_word(content: mmap.mmap, word: bytes) -> bool:
    """Whether a text is there, and not as a part of a longer name.

    A regular expression that looks behind takes seconds for a library, where `find` takes tenths.
    """
    at = content.find(word)
    while at >= 0:
        neighbours = content[max(at - 1, 0) : at] + content[at + len(word) : at + len(word) + 1]
        if not NAME_BYTES.intersection(neighbours):
            return True
        at = content.find(word, at + 1)
    return False


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


def own_sources(model: ModelConfig, optimizer: OptimizerConfig) -> dict[str, str]:
    """Returns digests of the files of a user's own code that a run names, by fact.

    They are the file of a module, or all Python files of its package.
    """
    found = {}
    for setting, modules in own_modules(model, optimizer).items():
        digest = hashlib.sha256()
        for module in modules:
            _add_files(digest, module.partition(".")[0])
        found[OWN_SOURCES[setting]] = digest.hexdigest()[:16]
    return found


def own_modules(model: ModelConfig, optimizer: OptimizerConfig) -> dict[str, list[str]]:
    """Returns the modules of a user's own code that a run names, by setting."""
    named = {
        "model.module": [model.module or ""],
        "model.pattern": model.pattern,
        "optimizer.function": [optimizer.function or ""],
    }
    modules = {
        setting: sorted({name.partition(":")[0] for name in names if ":" in name})
        for setting, names in named.items()
    }
    return {setting: found for setting, found in modules.items() if found}


def _add_files(digest: "hashlib._Hash", package: str) -> None:
    """Adds the names and contents of the Python files of a module or package, without importing it.

    Nothing is added where it has no file: whoever imports it says what is wrong.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # of a module that is in memory alone
        spec = None
    if spec is None:
        return
    files = [Path(spec.origin or os.devnull)]
    if folders := spec.submodule_search_locations:
        files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    for path in filter(Path.is_file, files):
        name = os.path.relpath(path, folders[0] if folders else path.parent)
        digest.update(name.encode() + b"\0" + path.read_bytes())


def _first_installed(packages: Sequence[str]) -> str:
    return next((own for package in packages if (own := installed(package))), "unknown")
