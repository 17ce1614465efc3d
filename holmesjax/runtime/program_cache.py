"""Compiled programs, kept from run to run: JAX's persistent compilation cache, made safe to share.

JAX decides what a program's key is. Its own files are written in place, so a full disk, or a
process that is killed, leaves half of one that is read for ever. Here a file appears whole or not
at all and says its own digest, whoever else writes it at the same time, and whatever goes wrong
with one is a program that is compiled again.

    FOLDER / jax-0.10.2 / what the processor can do / KEY

XLA:CPU's programs hold machine code for the processor that compiled them, so each kind of it has a
folder of its own.
"""

import contextlib
import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from holmesjax.config import AUTO
from holmesjax.errors import ConfigError

MAX_BYTES = 16 << 30  # of all files together; those that were not used for longest go first
STALE_S = 24 * 3600.0  # a file that is being written is older only if its writer is gone
DIGEST = hashlib.sha256().digest_size


def use(setting: str | None, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Lets JAX keep what this process compiles from here on.

    Args:
      setting: of the run, `run.compilation_cache`.
      env: of this process; a JAX_COMPILATION_CACHE_DIR counts more than `auto`.
      say: takes a line where nothing can be kept.

    Raises ConfigError where the setting names something that is no folder.
    """
    if setting == AUTO and env.get("JAX_COMPILATION_CACHE_DIR"):
        return
    path = None if setting is None else _open(setting, env, say)
    cache_key._hash_accelerator_config = _hash_accelerators
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (Store(Path(path)), path)
    jax.config.update("jax_compilation_cache_dir", path and str(path))
    # A run has a few large programs and many small ones, all of which it waits for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # they write as they like


def _open(setting: str, env: Mapping[str, str], say: Callable[[str], None]) -> Path | None:
    """The folder of this JAX and this processor; None where there is none and none can be made."""
    try:
        folder = folder_of(setting, env)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(
                "run.compilation_cache",
                "is no folder",
                found=str(folder),
                fix="name a folder, which is made if there is none, or use null to keep nothing",
            )
        path = folder / f"jax-{jax.__version__}" / _machine()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tidy(folder)
        if not os.access(path, os.W_OK):
            say(f"note: newly compiled programs are not kept: {folder} is read-only")
    except (OSError, RuntimeError) as error:  # a user without a home is a RuntimeError
        say(f"note: compiled programs are not kept from run to run: {error}")
        return None
    return path


def folder_of(setting: str, env: Mapping[str, str]) -> Path:
    """The folder in which programs are kept.

    >>> folder_of("auto", {"XDG_CACHE_HOME": "/scratch/me"})
    PosixPath('/scratch/me/holmesjax/programs')
    >>> folder_of("/shared/programs", {})
    PosixPath('/shared/programs')
    """
    if setting != AUTO:
        return Path(setting).expanduser()
    home = env.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base / "holmesjax" / "programs"


def _hash_accelerators(hash_obj: Any, accelerators: np.ndarray) -> None:
    """Adds the devices of a program to its key, the same in each process of a domain.

    XLA:CPU's fingerprint of them differs from process to process. Only the first process writes, so
    the others would compile all programs again at every start.
    """
    if accelerators.flat[0].platform == "cpu":
        cache_key._hash_devices(hash_obj, accelerators)
    else:
        _hash_fingerprint(hash_obj, accelerators)


_hash_fingerprint = cache_key._hash_accelerator_config


def _machine() -> str:
    """The features of this host's processor, in few letters."""
    facts = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        facts += "".join(sorted({line for line in file if line.startswith(("flags", "Features"))}))
    return f"{platform.machine()}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _tidy(folder: Path) -> None:
    """Removes what was not used for longest, beyond MAX_BYTES, and what was never finished."""
    files = []
    for path in folder.glob("*/*/*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            about = path.stat()
            if path.name.startswith(".") and time.time() - about.st_mtime > STALE_S:
                path.unlink()
            else:
                files.append((about.st_mtime, about.st_size, path))
    num_bytes = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if num_bytes <= MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        num_bytes -= size


class Store(CacheInterface):
    """A folder of programs, for any number of processes at once. Never raises."""

    def __init__(self, path: Path):
        self._path = path

    def get(self, key: str) -> bytes | None:
        path = self._path / key
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            value = content[:-DIGEST]
            if hashlib.sha256(value).digest() == content[-DIGEST:]:
                with contextlib.suppress(OSError):
                    os.utime(path)  # for `_tidy`
                return value
        return None

    def put(self, key: str, value: bytes) -> None:
        temporary = self._path / f".{key}.{platform.node()}.{os.getpid()}.{threading.get_ident()}"
        try:
            temporary.write_bytes(value + hashlib.sha256(value).digest())
            temporary.replace(self._path / key)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
