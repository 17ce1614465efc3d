"""The needs of tests that build a lab on this machine."""

import subprocess

import pytest

from holmesjax.errors import HolmesError
from launch.lab_machine import namespaces


def _missing() -> str | None:
    try:
        namespaces.refuse_without_means()
    except HolmesError as error:
        return f"{error.problem}: {error.found}"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "no network namespaces here" if trial.returncode else None


needs_lab = pytest.mark.skipif(bool(missing := _missing()), reason=missing or "")
