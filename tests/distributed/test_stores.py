"""Stores and the hub, over real connections and without JAX: what is fetched, kept and refused."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest

from holmesjax.checkpoints import fetching, manifest, newest_whole, stores
from holmesjax.distributed import process_store, store_messages
from holmesjax.distributed.store_end import OwnStore
from holmesjax.distributed.store_hub import ALL, StoreHub
from holmesjax.distributed.store_messages import AskPiece, FilePiece, Keep, PutManifest
from holmesjax.errors import (
    CheckpointError,
    ConfigError,
    GoneError,
    HolmesError,
    LostLeaseError,
    PeerError,
)
from holmesjax.transport.records import encode
from tests.distributed import scripted_jobs
from tests.distributed.scripted_jobs import process
from tests.distributed.stores_on_loopback import (
    FILES,
    KEY,
    LARGE,
    PROCESSES,
    STEP,
    commit,
    hub_of,
    wait_until,
    write_parts,
)


def look(hub, checkpoint):
    """Lets the hub look before a start; raises the problem that it finds."""
    started = []
    hub.prepare(checkpoint, lambda: started.append(True))
    wait_until(lambda: started or hub._problem)
    hub.raise_problem()


@pytest.fixture
def sites(tmp_path):
    """The launcher's folder with part 0, another with part 1, and a third with nothing."""
    home, far, new = (tmp_path / name for name in ("home", "far", "new"))
    write_parts(home, "part_0")
    write_parts(far, "part_1")
    checkpoint = commit(home, part_0="n0", part_1="n1")
    for name in ("config.yaml", "plan.yaml"):
        (home / name).write_text(name)
    with hub_of(home) as (hub, join):
        join(far, 1)
        yield hub, join, checkpoint, {"home": home, "far": far, "new": new}


def fetch(store, parts=("part_0", "part_1"), say=lambda line: None):
    own = manifest.at(manifest.folder_of(store.folder, STEP))
    store.fetch(own, parts, lambda: None, say)


def test_a_store_fetches_what_it_lacks_and_goes_on_where_it_stopped(sites, monkeypatch):
    hub, join, checkpoint, folders = sites
    new, said = join(folders["new"], 0), []
    new.fetch_run_files()
    look(hub, checkpoint)
    begun = manifest.folder_of(folders["new"], STEP) / "part_0.fetching/d/large"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(LARGE[:1000])
    asked = []
    read = hub.read
    monkeypatch.setattr(hub, "read", lambda q: (asked.append(q), read(q))[1])
    fetch(new, say=said.append)
    for name, content in FILES.items():
        assert (manifest.folder_of(folders["new"], STEP) / name).read_bytes() == content
    assert next(q.first for q in asked if q.name.endswith("large")) == 1000
    assert said[0] == "fetching part_0, part_1: 8 MiB, 1000 B of them were here already"
    assert (folders["new"] / "plan.yaml").read_text() == "plan.yaml"
    asked.clear()
    fetch(new)  # all is here
    assert not asked
    assert not begun.exists()


def test_a_copy_that_is_not_what_was_written_is_fetched_again(sites):
    hub, join, checkpoint, folders = sites
    new = join(folders["new"])
    look(hub, checkpoint)
    begun = manifest.folder_of(folders["new"], STEP) / "part_0.fetching/_METADATA"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"zerp")  # as long as it should be
    fetch(new)
    assert (begun.parent.with_name("part_0") / "_METADATA").read_bytes() == b"zero"


@pytest.mark.parametrize("grows", [True, False])
def test_another_fetch_of_a_part_is_waited_for_while_it_grows(tmp_path, monkeypatch, grows):
    monkeypatch.setattr(fetching, "OTHER_S", 0.05)
    monkeypatch.setattr(fetching, "LOOK_S", 0.01)
    files = {"part_0/d": {"bytes": 100, "sha256": None}}
    copy = stores.Copy(folder=tmp_path, step=STEP, part="part_0", files=files)
    growing, looks = copy.growing("part_0/d"), []
    with (growing.parent.with_name("part_0.lock")).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def look():
            looks.append(True)
            if grows:
                growing.write_bytes(b"x" * len(looks))
            if grows and len(looks) == 20:
                fcntl.flock(lock, fcntl.LOCK_UN)

        refused = pytest.raises(PeerError, match="which stands still")
        with contextlib.nullcontext() if grows else refused, fetching._only_one(copy, look):
            assert len(looks) == 20


def test_bytes_that_change_on_their_way_are_not_taken(sites, monkeypatch):
    hub, join, checkpoint, folders = sites
    new = join(folders["new"])
    look(hub, checkpoint)
    monkeypatch.setattr(fetching, "RETRY_S", 0.1)

    def send(connection, content):  # one bit of it is another
        sha256 = hashlib.sha256(content).hexdigest()
        connection.send(encode(FilePiece(num_bytes=len(content), sha256=sha256)))
        connection.sock.sendall(bytes([content[0] ^ 1]) + content[1:])

    monkeypatch.setattr(store_messages, "send_piece", send)
    with pytest.raises(PeerError, match=r"part_0 .*cannot be fetched") as error:
        fetch(new)
    assert "changed on their way" in str(error.value.found)
    assert not (manifest.folder_of(folders["new"], STEP) / "part_0").exists()


def test_what_nobody_has_is_named_before_anything_starts(tmp_path):
    write_parts(home := tmp_path / "home", "part_0")
    checkpoint = commit(home, part_0="n0", part_1="n1")
    with hub_of(home) as (hub, _), pytest.raises(CheckpointError) as error:
        look(hub, checkpoint)
    assert "part_1 (written to n1:/f)" in error.value.found
    silent = {"part_1": OSError(errno.EIO, "no answer", "s3://b/x")}  # a store that may be back
    with (
        patch.object(fetching, "held_at_urls", lambda found: (set(), silent)),
        hub_of(home) as (hub, _),
        pytest.raises(PeerError, match="s3://b/x"),
    ):
        look(hub, checkpoint)
    with hub_of(home, wait_s=20) as (hub, join):  # it is waited for
        hub.prepare(checkpoint, lambda: hub.said.append("starts"))
        wait_until(lambda: hub.said)
        assert hub.said == ["stores      waiting for part_1 (written to n1:/f)"]
        write_parts(tmp_path / "far", "part_1")
        join(tmp_path / "far")
        wait_until(lambda: hub.said[1:] == ["starts"])


def test_what_the_launcher_s_own_disk_has_lost_is_gone_and_an_older_checkpoint_is_used(tmp_path):
    home, places = tmp_path / "home", {"part_0": "n0", "part_1": "n0"}
    own = stores.identifier(home)
    for step in (1, 2, 3):
        write_parts(home, "part_0", "part_1", step=step)
        commit(home, step, own, **places)
    (manifest.folder_of(home, 3) / manifest.MANIFEST).write_text("{}")  # which a start sets aside
    write_parts(home, "part_1")
    commit(home, STEP, own, **places)
    [newest, *_] = manifest.find(home)
    assert stores.lost(home, newest) == ["part_0"]
    with hub_of(home) as (hub, _), pytest.raises(GoneError) as error:
        look(hub, newest)
    assert error.value.steps == (STEP,)
    shutil.rmtree(newest.path)
    shutil.rmtree(manifest.folder_of(home, 2) / "part_0")
    write_parts(home, "part_0")
    newest = commit(home, STEP, "x", **places)  # the store of its part may only be late
    with hub_of(home) as (hub, _), pytest.raises(CheckpointError, match="lacks 1") as error:
        look(hub, newest)
    assert not isinstance(error.value, GoneError)


def test_a_look_that_fails_by_a_mistake_ends_the_start(sites, monkeypatch):
    hub, _, checkpoint, _ = sites
    monkeypatch.setattr(hub, "_check", lambda checkpoint: {}["files"])
    with pytest.raises(KeyError, match="files"):
        look(hub, checkpoint)


def test_damaged_parts_that_a_partner_may_have_are_renamed_by_the_owner(tmp_path):
    write_parts(tmp_path, "part_0", "part_1")
    commit(tmp_path, part_0="n0", part_1="n1")
    for name in ("part_0/_METADATA", "part_1/x"):
        (manifest.folder_of(tmp_path, STEP) / name).write_bytes(b"?")
    moved = []
    move = lambda path, target: (moved.append(path.name), path.rename(target))
    how = {"move": move, "fetches": True, "has_partner": True}
    found = newest_whole.find(tmp_path, print, **how)
    assert (found.step, moved) == (STEP, ["part_0", "part_1"])
    assert manifest.elsewhere(found).keys() == {"part_0", "part_1"}


def test_bytes_that_went_bad_in_memory_come_from_a_disk(sites, tmp_path):
    hub, join, checkpoint, folders = sites
    write_parts(memory := tmp_path / "memory", "part_1")
    bad = manifest.folder_of(memory, STEP) / "part_1/x"
    bad.write_bytes(b"?")
    join(memory, in_memory=True)
    new = join(folders["new"])
    look(hub, checkpoint)
    assert hub.in_memory() == ["part_1"]
    own = manifest.at(manifest.folder_of(new.folder, STEP))
    new.fetch(own, ["part_1"], lambda: None, print, in_memory=["part_1"])
    assert (own.path / "part_1/x").read_bytes() == FILES["part_1/x"]


def test_whoever_fetches_nothing_is_told_to_gather(sites):
    *_, checkpoint, folders = sites
    assert newest_whole.find(folders["home"], print, fetches=True) == checkpoint
    with pytest.raises(CheckpointError, match="launch gather") as error:
        newest_whole.find(folders["home"], print)
    assert error.value.found == "part_1 in n1:/f"


def test_a_launcher_that_has_lost_a_checkpoint_neither_begins_anew_nor_removes_it(tmp_path):
    write_parts(far := tmp_path / "far", "part_1")
    commit(far)
    with hub_of(tmp_path / "home") as (hub, join):
        join(far, 1)
        with pytest.raises(
            CheckpointError, match=f"after step {STEP}, which the launcher does not"
        ):
            look(hub, None)
    assert manifest.finished(far)


def test_processes_of_a_stage_share_a_store(tmp_path, monkeypatch):
    with hub_of(tmp_path / "home") as (hub, join):
        hub._processes = (process(0, 0), process(1, 0, 1))
        join(tmp_path / "far", 1)
        with pytest.raises(ConfigError, match="is another store than that of c0/n0"):
            look(hub, None)


def test_stores_keep_what_the_launcher_keeps(tmp_path, monkeypatch, capsys):
    home, far = tmp_path / "home", tmp_path / "far"
    old, remove = far / "checkpoints/step_00000001.0.removed", shutil.rmtree
    damaged_ones = [f"step_{step:08d}.0.damaged" for step in (1, 3, 9)]
    for name in (old.name, *damaged_ones):
        (far / "checkpoints" / name).mkdir(parents=True)

    def rmtree(path):
        if path == old:  # a reader on another node has a file of it open
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path)

    monkeypatch.setattr(stores.shutil, "rmtree", rmtree)
    for step in (2, 4, 6, 8):
        write_parts(far, "part_1", step=step)
    commit(far, 2, part_1="n1")
    commit(home, 4, part_1="n1")
    commit(home, 6, part_1="n1")
    with hub_of(home) as (hub, join):
        store, damaged = join(far, 1), []
        [first] = hub._stores
        first.connection.close()
        wait_until(lambda: hub._stores[-1] is not first)  # it has called again
        assert len(hub._stores) == 1
        hub.on_damage = damaged.append
        store.scrub(None).damaged(4)
        lost = SimpleNamespace(send=lambda data: None)  # an answer that never comes
        store._answer(lost, Keep(steps=[4, 6], last=6, dropped=[]))
        for _ in range(2):
            hub.committed(6)
            wait_until(lambda: not hub.settles())
    assert damaged == [4]
    # 2 is superseded, 8 is being written; 4 and 6 have got their manifests.
    assert [step for step, _ in manifest.folders(far)] == [4, 6, 8]
    assert [step for step, _ in manifest.finished(far)] == [4, 6]
    names = {path.name for path in (far / "checkpoints").iterdir()}
    assert {name for name in names if "." in name} == {old.name, *damaged_ones[1:]}
    assert f"tried again after the next save: {old}: Directory not empty" in capsys.readouterr().out


def test_a_process_that_wakes_up_late_changes_nothing_of_its_successor(tmp_path):
    """A request of the launcher of its own start has waited in its connection."""
    home, far = tmp_path / "home", tmp_path / "far"
    write_parts(far, "part_1", step=4)
    with hub_of(home) as (hub, join):
        store, said = join(far, 1), []
        tell = SimpleNamespace(send=said.append)
        late = lambda start: (
            Keep(steps=[2], last=ALL, dropped=[], start=start),
            PutManifest(step=4, text="{}", start=start),
        )
        name = functools.partial(stores.start_name, hub.id)
        stores.begin(far, name(7, 1))
        for question in late(name(7, 0)):
            store._answer(tell, question)
        assert [answer["kind"] for answer in said] == ["unanswered"] * 2
        assert [step for step, _ in manifest.folders(far)] == [4]
        assert manifest.finished(far) == []

        moments = iter((name(7, 1), name(8, 0)))  # it begins when the folder has been renamed

        def check():
            stores.begin(far, next(moments))
            stores.refuse_earlier("far", name(7, 1), stores.owner(far))

        with pytest.raises(LostLeaseError):
            stores.keep(far, [2], ALL, [], check)
        assert [step for step, _ in manifest.folders(far)] == [4]
        store._answer(tell, PutManifest(step=4, text="{}", start=name(8, 0)))
        store._answer(tell, PutManifest(step=4, text="{ }", start=name(8, 0)))
        assert [answer["kind"] for answer in said[2:]] == ["put", "unanswered"]


def test_a_process_that_is_not_told_asks_whose_folder_it_has(tmp_path):
    home, far = tmp_path / "home", tmp_path / "far"
    with hub_of(home) as (_, join):
        controller = join(far, serves=False)._controller
        (home / "plan.yaml").write_text("x")
        own = SimpleNamespace(number=0, controller=controller, key=KEY)
        assert process_store.join_store(home, {}, own) is None
        assert process_store.join_store(far, {}, own).folder == far
        assert (far / "plan.yaml").read_text() == "x"


NAMES = ("../x", "/etc/passwd", "checkpoints/step_00000004/../../job.key", "job.key", "owner.json")
NAMES += ("checkpoints/step_00000004/part_0/\0", "checkpoints/step_4/x", "tokenizer/../job.key")
NAMES += (f"tokenizer/{'x' * 5000}", "checkpoints/step_00000004/link/passwd", "")


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_a_run_folder(tmp_path, name):
    folder = tmp_path / "run/checkpoints/step_00000004"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to("/etc")
    (tmp_path / "run/job.key").write_text("secret")
    with pytest.raises(ValueError, match=r"is no file|leads out"):
        stores.read_piece(tmp_path / "run", name, 0, 10)
    hub = StoreHub(tmp_path / "run", PROCESSES, print)
    with pytest.raises(ValueError, match=r"is no file|leads out"):
        hub.read(AskPiece(name=name, first=0, count=10))


def test_an_earlier_start_writes_no_more(tmp_path):
    first = stores.begin(tmp_path, "x-9-2")
    first()
    for later in ("x-10-0", "y-1-0", "y-1-1"):  # of another launcher's folder, whatever its number
        stores.begin(tmp_path, later)()
    for act in (first, lambda: stores.begin(tmp_path, "y-1-0")):  # which wakes up behind the next
        with pytest.raises(LostLeaseError, match="another start"):
            act()
    assert json.loads((tmp_path / stores.OWNER).read_text()) == {"start": "y-1-1"}


def test_a_store_that_has_come_back_empty_stays_its_starts(tmp_path):
    folder, said = tmp_path / "store", []
    check = stores.begin(folder, "x-1-0", said.append)
    known = stores.known_identifier(folder)
    shutil.rmtree(folder)
    for _ in range(2):
        check()
    assert (stores.owner(folder), stores.known_identifier(folder)) == ("x-1-0", known)
    assert len(said) == 1
    assert "has come back" in said[0]
    stores.begin(folder, "x-2-0")  # a start that has begun since has it
    with pytest.raises(LostLeaseError, match="another start"):
        check()
    shutil.rmtree(folder)
    other = stores.identifier(folder)  # another run
    with pytest.raises(LostLeaseError, match=other):
        check()
    assert stores.owner(folder) is None


@pytest.mark.parametrize("name", ["store.json", "config.yaml", "checkpoints/step_00000002/x"])
def test_a_folder_of_another_run_is_no_store(tmp_path, name):
    """The launcher would take away there what it does not have."""
    home, own = stores.identifier(tmp_path / "home"), tmp_path / "own"
    first = stores.join(own, home)
    assert first != home
    assert stores.join(own, home) == first
    other = tmp_path / "other"
    if name == "store.json":
        stores.identifier(other)
    else:
        (other / name).parent.mkdir(parents=True)
        (other / name).write_text("x")
    with pytest.raises(HolmesError, match="is the folder of another run"):
        stores.join(other, home)


def test_a_folder_is_one_store_however_many_ask(tmp_path):
    found = stores.identifier(tmp_path / "run")
    assert found == stores.identifier(tmp_path / "run")
    assert not stores.is_own(tmp_path / "run", found)
    assert stores.is_own(tmp_path, found)
    assert not stores.is_own(tmp_path, None)  # whoever starts it does not say
    (tmp_path / "run/store.json").write_text(json.dumps({"id": "../x"}))
    with pytest.raises(HolmesError, match="names no store"):
        stores.identifier(tmp_path / "run")


def test_a_store_calls_again_for_as_long_as_its_job_may_be_cut_off(tmp_path, monkeypatch):
    def call(*, serves, timeout_s):
        calls_s.append(timeout_s)
        raise PeerError("the store", "nobody answers", found="", fix="")

    def lost():
        raise ConnectionResetError

    calls_s = []
    store = OwnStore(tmp_path, process=0, node="a", controller=("127.0.0.1", 1), key=KEY)
    monkeypatch.setattr(store, "_call", call)
    for store.silence_s in (0.0, 300.0):
        store._serve(SimpleNamespace(receive=lost, close=lambda: None))
    assert calls_s == [60.0, 300.0]


@pytest.mark.parametrize("number", [0, 1])
def test_each_process_waits_until_its_object_store_is_tidy(tmp_path, number):
    """The launcher may tell any of those that have one folder."""
    store = SimpleNamespace(mirror=MagicMock(), launchers="home")
    config = SimpleNamespace(distributed=SimpleNamespace(silence_s=1.0))
    found = process_store.ProcessStore(
        SimpleNamespace(run_dir=tmp_path, config=config),
        SimpleNamespace(number=number, restart=0),
        scripted_jobs.PROCESSES,
        None,
        store,
    )
    assert (found.begin_mirror(1) is store.mirror) == (number == 0)
    found.close()
    store.mirror.close.assert_called_once()
