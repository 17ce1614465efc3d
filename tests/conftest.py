"""Eight simulated devices, or with --gpu the real ones, and no silent conversions."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest

from holmesjax import xla_flags
from holmesjax.config import AUTO
from holmesjax.runtime import program_cache

GOLDEN = Path(__file__).parent / "golden"

# The same examples each time, however long a busy machine takes for one.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


def pytest_configure(config):
    """Before any backend starts."""
    gc.disable()  # until all modules are here
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist inherit the folder
        # Compiled programs are kept for this session alone, by all of its processes.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="holmesjax-tests-")
    # The threads of a small product of NumPy's spin longer than it takes. Processes of pytest-xdist
    # and of tests read the variable; this process has imported NumPy already.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    hypothesis.settings.load_profile("steady")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Where each operation stands in the code costs a twelfth of a program's compilation.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # for processes of tests
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if config.getoption("--gpu"):
        jax.config.update("jax_default_matmul_precision", "highest")  # of float32, not rounded
        # A machine with a GPU has the JAX that it has: what that deprecates is no failure.
        config.addinivalue_line("filterwarnings", "default::DeprecationWarning")
    else:
        # XLA reads them when a device is asked for: here, and in the processes that tests start.
        os.environ.setdefault("XLA_FLAGS", xla_flags.for_tiny_programs())
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        program_cache.use(AUTO, os.environ, print)


def pytest_collection_modifyitems(config, items):
    """Lets one process of pytest-xdist have all tests of a group, which its scheduler reads here.

    Pytest-xdist 3.8 writes the group into a name that pytest 9.2 does not read any more.
    """
    if getattr(config.option, "loadgroup", False):
        for item in items:
            for mark in item.iter_markers("xdist_group"):
                item._id = type(item._id).parse(f"{item.nodeid}@{mark.args[0]}")


def pytest_collection_finish(session):
    """Starts the devices before a run of fewer does, in whatever order the tests come.

    A tenth of the time was spent on looking for garbage, most of it where there is none.
    """
    if not session.config.getoption("--gpu"):
        assert len(jax.devices()) == 8
    gc.enable()
    gc.collect()
    gc.freeze()  # modules and the list of tests stay
    gc.set_threshold(700, 10, 100)


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
