"""Eight simulated devices, or with --gpu the real ones, and no silent conversions."""

import os
import shutil
import tempfile
from pathlib import Path

# LLVM's optimizations are half of the time that a tiny program takes to compile; XLA's own stay on.
# Set for the processes that tests start, too.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

from holmesjax.config import AUTO
from holmesjax.runtime import program_cache

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config):
    """Before any backend starts."""
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist inherit the folder
        # Compiled programs are kept for this session alone, by all of its processes.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="holmesjax-tests-")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if config.getoption("--gpu"):
        jax.config.update("jax_default_matmul_precision", "highest")  # of float32, not rounded
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        program_cache.use(AUTO, os.environ, print)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture
def float64():
    """The formulas to compare with run in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def assert_golden(request):
    """Compares a text with a file of tests/golden; --update-golden writes the file before."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.read_text() == text

    return compare


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden"
    )
    parser.addoption("--gpu", action="store_true", help="tests of kernels, on the GPU that is here")
