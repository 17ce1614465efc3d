"""Run files for the tests of settings."""

import pytest

from tests.run_files import RUN


@pytest.fixture
def run_file(tmp_path):
    """Writes a run file; returns its path."""

    def write(text=RUN):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
