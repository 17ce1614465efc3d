"""A file has its old content or the new one, whatever ends the process that writes it."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holmesjax.files import regular_files, whole_files
from holmesjax.files.whole_files import write_whole

KILLED_BEFORE = """
import os, signal, sys
from pathlib import Path
from holmesjax.files import whole_files

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

owner, name = {"fsync": (whole_files.os, "fsync"), "replace": (Path, "replace")}[sys.argv[1]]
setattr(owner, name, die)
whole_files.write_whole(Path(sys.argv[2]), "new")
"""


def test_the_file_has_the_new_content(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    write_whole(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_process_that_is_killed_leaves_the_old_content(tmp_path, call):
    path = tmp_path / "a.json"
    path.write_text("old")
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", KILLED_BEFORE, call, str(path)]
    env = os.environ | {"PYTHONPATH": str(root)}
    assert subprocess.run(words, env=env, timeout=240).returncode == -signal.SIGKILL
    assert path.read_text() == "old"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "a.json"
    with socket.socket(socket.AF_UNIX) as bound:
        {
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "socket": lambda: bound.bind(str(path)),
            "folder": path.mkdir,
        }[kind]()
        number = errno.EISDIR if kind == "folder" else errno.ESPIPE
        for mode in ("rb", "ab", "r+b"):
            with pytest.raises(OSError, match=r"directory|and no file") as refused:
                regular_files.open_file(path, mode)
            assert (refused.value.errno, refused.value.filename) == (number, str(path)), mode


def test_errors_of_open_files_name_them(tmp_path, monkeypatch):
    """The system names only what it opens."""
    with pytest.raises(OSError, match="Input/output") as error:
        regular_files.read_bytes("/proc/self/mem")
    assert error.value.filename == "/proc/self/mem"

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") as error:
        whole_files.sync(tmp_path)
    assert error.value.filename == str(tmp_path)
