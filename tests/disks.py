"""Disks that are full, for tests."""

import contextlib
import resource
import subprocess
from pathlib import Path

import pytest


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """A write beyond fails with EFBIG, as one to a full disk does with ENOSPC."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextlib.contextmanager
def disk(folder: Path, size: str):
    """A file system of its own."""
    mount = ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    folder.mkdir(parents=True)
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root, for a file system")
    try:
        yield
    finally:
        subprocess.run(("umount", folder), check=True)
