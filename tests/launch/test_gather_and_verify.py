"""`launch gather` and `launch verify` on checkpoints that are written here."""

import argparse
import contextlib
import errno
import functools
import os
import shutil
import signal

import pytest

from holmesjax.checkpoints import manifest, second_reading, stores
from holmesjax.checkpoints.scrub import Scrub
from holmesjax.data import object_stores
from holmesjax.errors import CheckpointError, DamagedError
from holmesjax.files import whole_files
from holmesjax.liveness.helper_process import Ended
from launch.verbs import gather, verify
from tests.data.object_store import object_store
from tests.written_checkpoints import flip_a_byte, write


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(folder)
    (folder / "config.yaml").write_text("x: 1")
    return folder


def read_in(folder):
    return lambda name, first, count: stores.read_piece(folder, name, first, count)


def test_a_checkpoint_goes_into_an_object_store_and_never_into_a_folder(
    run_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    [found] = manifest.find(run_dir)
    with object_store("gathered") as store:
        target = object_stores.path_of("s3://gathered/llama")
        gather._write_all(target, run_dir, found, read_in(run_dir))
        for name, facts in found.manifest["files"].items():
            key = f"gathered/llama/{stores.name_in(found.step, name)}"
            assert store.cat(key) == (found.path / name).read_bytes()
            assert store.info(key)["size"] == facts["bytes"]
        assert store.cat("gathered/llama/config.yaml") == b"x: 1"
        with pytest.raises(CheckpointError, match="is there already"):
            gather._write_all(target, run_dir, found, read_in(run_dir))
    assert not os.listdir(tmp_path)


def test_a_gathering_that_was_cut_goes_on(run_dir, tmp_path, monkeypatch):
    [found] = manifest.find(run_dir)
    names, read = list(found.manifest["files"]), read_in(run_dir)

    def breaks(name, first, count):
        if name.endswith(names[-1]):
            raise OSError("cut")
        return read(name, first, count)

    with pytest.raises(OSError, match="cut"):
        gather._write_all(tmp_path, run_dir, found, breaks)
    assert not manifest.find(tmp_path)  # no checkpoint before its manifest
    with monkeypatch.context() as patched:  # which is cut, too

        def cut(temporary, path):
            if path.name == manifest.MANIFEST:
                raise OSError(errno.EIO, "cut before the rename")
            temporary.replace(path)

        patched.setattr(whole_files, "put_in_place", cut)
        with pytest.raises(OSError, match="cut before"):
            gather._write_all(tmp_path, run_dir, found, read)
    assert not manifest.find(tmp_path)
    gather._write_all(tmp_path, run_dir, found, pytest.fail)  # all files are there
    [copied] = manifest.find(tmp_path)
    manifest.verify(copied)


def test_a_flipped_byte_of_any_large_or_small_file_is_found(run_dir, capsys):
    args = argparse.Namespace(run_dir=run_dir, step=None)
    assert verify.run(args) == 0
    assert "as written" in capsys.readouterr().out
    [found] = manifest.find(run_dir)
    largest = max(found.manifest["files"], key=lambda name: found.manifest["files"][name]["bytes"])
    for name in (largest, next(iter(found.manifest["files"]))):
        path = found.path / name
        content = path.read_bytes()
        flip_a_byte(path)
        with pytest.raises(DamagedError):
            verify.run(args)
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="has no checkpoint after step 7"):
        verify.run(argparse.Namespace(run_dir=run_dir, step=7))


def test_a_part_that_was_here_is_missing_and_one_of_another_store_is_not(tmp_path, capsys):
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    where = {"node": "a-0", "folder": str(tmp_path)}
    args = argparse.Namespace(run_dir=tmp_path, step=None)
    shutil.rmtree(found.path / "part_0")
    for store, is_lost in ((stores.identifier(tmp_path), True), ("x", False)):
        content = dict(found.manifest, stores={"part_0": {"id": store, **where}})
        (found.path / manifest.MANIFEST).write_text(manifest.text_of(content))
        is_refused = (
            (DamagedError, "part_0: is missing") if is_lost else (CheckpointError, "nothing")
        )
        with pytest.raises(is_refused[0], match=is_refused[1]):
            verify.run(args)
        answer = second_reading._look(found.path, ["part_0"] if is_lost else [], 1.0)
        assert answer == (second_reading.DAMAGED if is_lost else 0)
        asked = []
        with pytest.MonkeyPatch.context() as patched:
            read = lambda asked, checkpoint, parts, **_: (asked.append(parts), Ended(0, ""))[1]
            patched.setattr(second_reading, "read_again", functools.partial(read, asked))
            Scrub(tmp_path, 1.0, pytest.fail)._read(found.step)
        assert asked == [["part_0"] if is_lost else []]
    assert "not here, in a-0:" in capsys.readouterr().out


def test_a_signal_takes_away_the_key_file_of_a_gathering(run_dir, tmp_path, monkeypatch):
    key_file, handler = tmp_path / "gather.key", signal.getsignal(signal.SIGTERM)

    @contextlib.contextmanager
    def waiting(*_):
        with contextlib.ExitStack() as stack:
            stack.callback(key_file.unlink)
            stack.callback(os.kill, os.getpid(), signal.SIGTERM)  # once more, while it is cleaned
            key_file.touch()
            os.kill(os.getpid(), signal.SIGHUP)
            yield pytest.fail

    monkeypatch.setattr(gather.jobs, "load_saved", lambda run_dir: None)
    monkeypatch.setattr(gather, "_stores", waiting)
    args = argparse.Namespace(run_dir=str(run_dir), step=None, to=str(tmp_path / "to"))
    with pytest.raises(SystemExit) as end:
        gather.run(args)
    assert end.value.code == 128 + signal.SIGHUP
    assert not key_file.exists()
    assert signal.getsignal(signal.SIGTERM) is handler
