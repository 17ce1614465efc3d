"""The verdict on this machine's attention kernels: do they compute what plain JAX does? No JAX.

The check (`kernels.attention.check`) is a process of its own with a limit of time, since a kernel
may hang, or leave the device of its process unusable. Each of its cases has the limit, and so has
the start of JAX: one case took up to 34 s on an H200 that had nothing else to do. The check has to
end before this process uses the device. Its verdict is kept for everything that it depends on:
device, driver, jaxlib, NVIDIA's assembler ptxas, the source of the kernels, and the needs of the
run. The processes of a node check one after the other, so that all but the first find a verdict.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from holmesjax import xla_flags
from holmesjax.config import Config
from holmesjax.files import json_text
from holmesjax.files.whole_files import write_whole
from holmesjax.hosts.computing import installed
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.experts import expert_width, sent_width
from kernels.attention.choice import CHECKED, Device, Needs, to_check

if TYPE_CHECKING:  # a launcher looks at no hardware
    from holmesjax.hosts.hardware import Gpu

CHECK = "kernels.attention.check"
LIMIT_S = 120.0  # for a case, and for the start of JAX before the first
CASES_OF_UPDATE = 7  # of `kernels.adamw_check`
CASES_OF_EXPERTS = 5  # of `kernels.experts_check`
KILLED_S = 5.0  # for a check that was killed to be gone; what hangs in a driver is left to it
# A check that did not come to its end is repeated by a start so much later: the machine may have
# been busy, or the GPU's memory another job's. All processes of one start find the same verdict.
RETRY_S = 3600.0
PAUSE_S = 0.1  # between two looks whether another process has ended its check
# ptxas that miscompiles Hopper kernels: the first such version and the first that does not. JAX's
# own kernels refuse CUDA 12.8.0 to 12.9.0; 13.0.88 is reported for sm_90a.
MISCOMPILING = (((12, 8, 0), (12, 9, 86)), ((13, 0, 88), (13, 0, 89)))
SOUND = "nvidia-cuda-nvcc 13.1 or newer, and put its ptxas first on PATH"

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CheckVerdict:
    """The outcome of a check."""

    problem: str | None  # None: the kernels have passed
    versions: dict[str, str]  # of what was checked
    has_ended: bool = True  # False: the check did not come to its end, by any fault

    @property
    def lack(self) -> str | None:
        """Returns what the kernels lack to be used; None: nothing."""
        if self.problem is None:
            return None
        return f"{'passed' if self.has_ended else 'finished'} check: {self.problem}"

    def __str__(self) -> str:
        bad = "failed" if self.has_ended else "not finished"
        outcome = "passed" if self.problem is None else f"{bad}: {self.problem}"
        return f"{outcome} ({', '.join(f'{k} {v}' for k, v in self.versions.items())})"


def asked_of(config: Config, *, is_cut: bool) -> dict[str, Any]:
    """The needs of a run, with each rule once; `checks` says what of them a GPU has to check.

    `is_cut` says whether devices share sequences.
    """
    attention = [kind.attention for kind in kinds(config.model).blocks]
    names = ("head_width", "window", "soft_cap", "scale")
    layers = [
        {name: getattr(layer_attention, name) for name in names}
        for layer_attention in attention
        if layer_attention is not None
    ]
    asked: dict[str, Any] = {
        "attention": config.kernels.attention,
        "dtype": config.train.compute_dtype,
        "has_documents": config.data.documents == "mask",
        "deterministic": config.kernels.deterministic_attention,
        "is_cut": is_cut,
        "layers": [layer for i, layer in enumerate(layers) if layer not in layers[:i]],
    }
    if config.kernels.optimizer == "pallas":
        asked["moments"] = config.optimizer.moments
    return asked


def asked_of_update(config: Config) -> dict[str, Any]:
    """The needs of a run whose optimizer may have the kernel of AdamW's step, and no others."""
    return {"kernels": "pallas", "layers": [], "moments": config.optimizer.moments}


def asked_of_experts(config: Config, tensor: int) -> dict[str, Any]:
    """The needs of a run with kernels for its experts, on a stage with such a `tensor`."""
    model = config.model
    widths = {"width": sent_width(model), "inner": expert_width(model) // tensor}
    own = {**widths, "dtype": config.train.compute_dtype}
    return {"kernels": "pallas", "layers": [], "experts": own}


def longest_s(asked: Mapping[str, Any], limit_s: float = LIMIT_S) -> float:
    """Seconds in which a check has ended: its start, two cases for each layer, and a large one.

    The kernels of AdamW's step and of experts have some more.
    """
    of_update = CASES_OF_UPDATE if "moments" in asked else 0
    of_experts = CASES_OF_EXPERTS if "experts" in asked else 0
    return (1 + 2 * len(asked["layers"]) + 1 + of_update + of_experts) * limit_s


def checks(asked: Mapping[str, Any], gpus: "Sequence[Gpu]") -> list[dict[str, Any]]:
    """The checks that decide what computes a run on such GPUs, as `verdict` takes them.

    Each has the layers whose attention the same `kernels` would compute. There are none without
    GPUs, and for layers that cuDNN or plain JAX computes in any case. The check of the Pallas
    kernels has the moments of AdamW's step, if that is asked for.
    """
    layers: dict[str, list[dict[str, Any]]] = {}
    for layer in asked["layers"] if gpus else ():
        device = Device("gpu", gpus[0].name, gpus[0].compute_capability)
        needs = Needs(
            dtype=asked["dtype"],
            head_width=layer["head_width"],
            length=2,
            window=layer["window"],
            soft_cap=layer["soft_cap"],
            has_documents=asked["has_documents"],
            is_cut=asked["is_cut"],
            deterministic=asked["deterministic"],
        )
        if asked["attention"] in CHECKED:
            layers.setdefault(asked["attention"], []).append(layer)
        elif asked["attention"] == "auto" and (kernels := to_check(device, needs)):
            layers.setdefault(kernels, []).append(layer)
    if gpus and "moments" in asked:
        layers.setdefault("pallas", [])
    others = {name: value for name, value in asked.items() if name != "moments"}
    return [
        {**(asked if kernels == "pallas" else others), "kernels": kernels, "layers": checked}
        for kernels, checked in layers.items()
    ]


def verdict(
    asked: Mapping[str, Any],
    gpus: "Sequence[Gpu]",
    env: Mapping[str, str],
    say: Callable[[str], None],
    *,
    check: Sequence[str] = (),
    limit_s: float = LIMIT_S,
    advance: Callable[[], None] = lambda: None,
) -> CheckVerdict:
    """Returns what a check has found, now or before.

    A verdict is kept for good, but an hour only if the check did not come to its end.

    Args:
      asked: one of `checks`.
      gpus: of this host.
      env: of this process.
      say: takes a line before a check begins, and one if it fails.
      check: arguments of the check, besides what is asked.
      limit_s: for each case of the check, and for its start.
      advance: is called when a case begins or has ended: a check may take minutes.
    """
    assembler = find_assembler()
    versions = {
        "devices": ", ".join(sorted({gpu.name for gpu in gpus})) or "none",
        "driver": ", ".join(sorted({gpu.driver for gpu in gpus})) or "none",
        "jaxlib": installed("jaxlib") or "unknown",
        "ptxas": ".".join(map(str, assembler)) if assembler else "unknown",
    }
    if asked["kernels"] == "pallas" and (reason := miscompiles(assembler)):
        return CheckVerdict(problem=reason, versions=versions)
    key = {**versions, "source": source_digest(), "asked": dict(asked)}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    what = "kernels of experts" if "experts" in asked else "attention kernels"
    # Another process holds the lock for one check; where none can be kept, several hold it in turn.
    with _alone(_folder(env), name, patience_s=2 * longest_s(asked, limit_s)) as path:
        if (kept := _read(path)) is not None:
            outcome = {name: kept[name] for name in ("problem", "has_ended")}
            return CheckVerdict(versions=versions, **outcome)
        say(f"checking the {what} on this machine, once: at most {limit_s:g} s for each case")
        has_ended = True
        try:
            problem = _run([json.dumps(asked), *check], limit_s, advance)
        except NotEndedError as error:
            has_ended, problem = False, str(error)
        found = CheckVerdict(problem=problem, versions=versions, has_ended=has_ended)
        text = json.dumps({"problem": problem, "has_ended": has_ended, **key}, indent=1) + "\n"
        with suppress(OSError):  # then the next process checks again
            write_whole(path, text)
    if found.problem is not None:
        again = "" if has_ended else f"; a start after {RETRY_S / 60:g} minutes checks again"
        say(f"warning: the {what} are not used: {found}{again}")
    return found


class NotEndedError(Exception):
    """A check said nothing for as long as a case may take, or ended without its last result."""


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        kept = json_text.read(path)
        if isinstance(kept, dict) and {"problem", "has_ended"} <= kept.keys():
            age_s = abs(time.time() - path.stat().st_mtime)  # a clock may have been set back
            return kept if kept["has_ended"] or age_s < RETRY_S else None
    return None


def _run(arguments: Sequence[str], limit_s: float, advance: Callable[[], None]) -> str | None:
    """Why the check has failed; None if it has passed. Raises NotEndedError without its results."""
    command = [sys.executable, "-m", CHECK, *arguments]
    # Its own limit is for the case that this process is killed meanwhile.
    command += ["--limit-s", str(limit_s + KILLED_S)]
    env = os.environ | {
        "JAX_TRACEBACK_FILTERING": "off",  # an error's last line is the error
        "XLA_FLAGS": xla_flags.joined(xla_flags.NO_AUTOTUNING, os.environ.get("XLA_FLAGS", "")),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # others may have the rest of the device
    }
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as words,
    ):
        # A session of its own: what it has started ends with it.
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=words, start_new_session=True
        )
        try:
            status = _wait(process, out, limit_s, advance)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
        words.seek(0)
        last = words.read().strip().splitlines()[-1:]
        begun, found = _said(out)
    if problems := [case["problem"] for case in found if case["problem"]]:
        return str(problems[0])
    if status:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        where = _where(begun, found)
        raise NotEndedError(f"{where}: the check ended with {how}: {' '.join(last)}")
    if not found or found[-1]["left"]:
        raise NotEndedError("the check ended early")
    return None


def _wait(
    process: "subprocess.Popen[bytes]", out: TextIO, limit_s: float, advance: Callable[[], None]
) -> int:
    """Waits for the end of a check; raises NotEndedError once it has been silent for too long."""
    heard_bytes, deadline_s = 0, time.monotonic() + limit_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(PAUSE_S)
        if (said_bytes := os.fstat(out.fileno()).st_size) > heard_bytes:
            heard_bytes, deadline_s = said_bytes, time.monotonic() + limit_s
            advance()
        elif time.monotonic() > deadline_s:
            raise NotEndedError(f"{_where(*_said(out))}: no end within {limit_s:g} s")


def _said(out: TextIO) -> tuple[list[str], list[dict[str, Any]]]:
    """Reads what a check has printed: the cases that it began, and the results of the ended."""
    # It shares its place in the file, and may write on.
    text = os.pread(out.fileno(), os.fstat(out.fileno()).st_size, 0).decode(errors="replace")
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    begun = [json_text.value_of(line)["begins"] for line in lines if line.startswith('{"begins"')]
    return begun, [json_text.value_of(line) for line in lines if line.startswith('{"what"')]


def _where(begun: Sequence[str], found: Sequence[dict[str, Any]]) -> str:
    """The case that was running."""
    return begun[-1] if len(begun) > len(found) else "its end" if begun else "the start of JAX"


@contextmanager
def _alone(folder: Path, name: str, patience_s: float) -> Iterator[Path]:
    """The file of a verdict, while no other process of this host looks for it.

    Each process checks for itself if there can be no lock, or none within so many seconds.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / f".{name}", "w"))
            _wait_for(lock, patience_s)
        yield folder / f"{name}.json"


def _wait_for(lock: TextIO, patience_s: float) -> None:
    """Locks a file; raises OSError if that is impossible, or not in time."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(PAUSE_S)


def _folder(env: Mapping[str, str]) -> Path:
    home = env.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base / "holmesjax" / "kernel_checks"


# ---- what a verdict depends on -------------------------------------------------------------------


def source_digest() -> str:
    """16 hex digits of the source of the kernels that are checked."""
    found = importlib.util.find_spec("kernels")
    assert found is not None
    assert found.submodule_search_locations
    digest = hashlib.sha256()
    folder = Path(found.submodule_search_locations[0])
    paths = [*folder.glob("attention/*.py"), *folder.glob("adamw*.py"), folder / "moments.py"]
    paths += folder.glob("experts_*.py")
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_assembler() -> Version | None:
    """The version of NVIDIA's assembler that compiles the kernels.

    Mosaic takes the first ptxas on PATH, even if JAX's packages have one. Without one on PATH it
    takes the ptxas of the packages, and then that of the machine.
    """
    places = [shutil.which("ptxas")]
    if (spec := importlib.util.find_spec("nvidia")) and spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            places += [f"{folder}/{part}/bin/ptxas" for part in ("cu13", "cuda_nvcc")]
    for place in filter(None, [*places, "/usr/local/cuda/bin/ptxas"]):
        with suppress(OSError, subprocess.SubprocessError):
            command = [place, "--version"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            if found := read_version(done.stdout):
                return found
    return None


def read_version(said: str) -> Version | None:
    """
    >>> read_version("Cuda compilation tools, release 13.0, V13.0.88")
    (13, 0, 88)
    """
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else None


def miscompiles(assembler: Version | None) -> str | None:
    """Why an assembler is refused, and what to install.

    >>> miscompiles((12, 9, 86)) is None
    True
    >>> miscompiles((13, 0, 88)).partition(":")[0]
    'ptxas 13.0.88 miscompiles Hopper kernels'
    """
    for first, sound in MISCOMPILING:
        if assembler is not None and first <= assembler < sound:
            found = ".".join(map(str, assembler))
            return f"ptxas {found} miscompiles Hopper kernels: install {SOUND}"
    return None
