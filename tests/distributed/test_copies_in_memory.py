"""Copies that a node keeps for another cluster, over real connections and without JAX."""

import os
import shutil
from types import SimpleNamespace

import pytest

from holmesjax.checkpoints import manifest, stores
from holmesjax.distributed import partner_memory, worker
from holmesjax.errors import ConfigError
from holmesjax.plan import partners
from holmesjax.plan.partners import Partner
from tests.distributed.stores_on_loopback import (
    KEY,
    PROCESSES,
    commit,
    hub_of,
    wait_until,
    write_parts,
)

COPY = Partner(part=0, layers=(), writer=PROCESSES[1], holder=PROCESSES[0])


@pytest.fixture
def memory_of(tmp_path, monkeypatch):
    """Makes the memory of the first node, with parts and a rate for copies."""
    folder_of = lambda home, node: tmp_path / "memory" / node
    monkeypatch.setattr(partner_memory, "folder_of", folder_of)

    def make(hub, join, found=(COPY,), bytes_per_s=1e12):
        monkeypatch.setattr(partners, "copy_bytes_per_s", lambda *_: bytes_per_s)
        before = len(hub._stores)
        memory = partner_memory.opened(
            hub.id,
            me=PROCESSES[0],
            found=found,
            topology=None,
            controller=join(tmp_path / "far", serves=False)._controller,
            key=KEY,
        )
        if memory:
            wait_until(lambda: len(hub._stores) > before)
        return memory

    return make


def save(hub, home, step, memory):
    """A checkpoint; waits for its copy, or for a warning that there is none."""
    write_parts(home, "part_0", "part_1", step=step)
    commit(home, step, part_0="n0", part_1="n1")
    hub.committed(step)
    wait_until(lambda: not hub.settles())
    wait_until(lambda: not memory.is_copying)


def steps(memory):
    return [step for step, _ in manifest.folders(memory.folder)]


def test_the_newest_step_that_all_have_stays_and_no_other(tmp_path, monkeypatch, capsys, memory_of):
    with hub_of(home := tmp_path / "home") as (hub, join):
        memory = memory_of(hub, join)
        other = join(tmp_path / "other", in_memory=True)  # has step 4, and copies no later one
        monkeypatch.setattr(type(other), "copied", property(lambda self: [4]))
        save(hub, home, 4, memory)
        assert memory.copied == [4]
        with monkeypatch.context() as patched:
            full = SimpleNamespace(f_blocks=100, f_frsize=1 << 20, f_bavail=17)  # 8 MiB come
            patched.setattr(os, "statvfs", lambda path: full)
            save(hub, home, 6, memory)
            patched.setattr(memory, "_refuse_full", lambda *_: {}["a mistake"])
            save(hub, home, 7, memory)
        said = capsys.readouterr().out
        assert "no copy in memory after step 6: OSError: " in said
        assert "no copy in memory after step 7: KeyError: " in said
        assert memory.copied == [4]
        for step in (8, 10):  # the other has not copied them
            save(hub, home, step, memory)
            assert memory.copied == steps(memory) == [4, step]
        memory._told.put(None)
    with hub_of(home) as (hub, join):
        memory = memory_of(hub, join, found=())  # a plan in which it keeps nothing
        for step in (12, 14):
            save(hub, home, step, memory)
        assert steps(memory) == [12, 14]
        assert not list(memory.folder.rglob("part_0"))
        memory.end()
        assert not memory.folder.exists()


def test_a_disk_that_is_full_keeps_nothing_that_is_begun(tmp_path, monkeypatch, memory_of):
    with hub_of(home := tmp_path / "home") as (hub, join):
        memory = memory_of(hub, join)

        def full(self, file):
            self.path.with_name(self.part + stores.FETCHING).mkdir(exist_ok=True)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(stores.Copy, "growing", full)
        monkeypatch.setattr(stores.Copy, "missing", lambda self, file: 0)
        save(hub, home, 4, memory)
        assert sorted(os.listdir(manifest.folder_of(memory.folder, 4))) == [
            "manifest.json",
            "part_0.lock",
        ]
        memory.end()


def test_the_end_of_a_run_ends_a_copy_and_nothing_comes_back(tmp_path, memory_of):
    with hub_of(home := tmp_path / "home") as (hub, join):
        memory = memory_of(hub, join, bytes_per_s=1e3)  # hours
        write_parts(home, "part_0", "part_1")
        commit(home, part_0="n0", part_1="n1")
        hub.committed(4)
        wait_until(lambda: list(memory.folder.rglob("large")))
        end = lambda is_whole: worker.Worker._end_memory(SimpleNamespace(), memory, is_whole)
        end(is_whole=False)  # it was stopped, and goes on from its copies
        assert memory.folder.exists()
        assert memory.is_copying
        end(is_whole=True)
        assert not memory._thread.is_alive()
        assert not memory.folder.exists()


def test_a_run_goes_on_without_copies_unless_a_folder_is_another_s(tmp_path, capsys, memory_of):
    with hub_of(tmp_path / "home") as (hub, join):
        memory = tmp_path / "memory"
        memory.mkdir(0o755)
        with pytest.raises(ConfigError, match="cannot have copies"):
            memory_of(hub, join)
        shutil.rmtree(memory)
        memory.mkdir(0o700)
        (memory / "n0").write_text("no folder")
        assert memory_of(hub, join) is None
        assert "warning: n0 keeps no copies in memory: " in capsys.readouterr().out
