"""The needs of tests that build a lab on this machine."""

import contextlib
import re
import socket
import subprocess
from pathlib import Path

import pytest

from holmesjax.errors import HolmesError
from launch.lab_machine import namespaces


def _missing() -> str | None:
    try:
        namespaces.refuse_without_means(delays=True)
    except HolmesError as error:
        return f"{error.problem}: {error.found}"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "no network namespaces here" if trial.returncode else None


needs_lab = pytest.mark.skipif(bool(missing := _missing()), reason=missing or "")


def left_behind(id: str) -> list[str]:
    """The traces of a lab of this name on this machine."""
    lab = f"holmes-{id}"
    names = Path("/var/run/netns").glob("*")  # no namespace was ever made: no such folder
    found = [str(p) for p in names if p.name.partition(".")[0] == lab]
    found += [str(p) for root in ("cpu", "") for p in Path("/sys/fs/cgroup", root).glob(lab)]
    found += [str(p) for p in Path("/run/holmesjax").glob(id)]
    made = re.compile(r"n\d+-(eth|fast)|br-(eth|\d)|(in|out|late)\d+")
    found += [name for _, name in socket.if_nameindex() if made.fullmatch(name)]
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            found += [str(path)] * (f"/{lab}/" in path.read_text())
    return found


CLUSTERS = {"a": (1, 1), "b": (1,)}
