"""Run folders in an object store: what is written there, and what another machine has of it."""

import argparse
import errno
import functools
import gc
import hashlib
import io
import os
import re
import shutil
import threading
from unittest import mock

import botocore.exceptions
import botocore.parsers
import pytest
import s3fs
import urllib3

from holmesjax.checkpoints import (
    committed,
    fetching,
    manifest,
    mirror,
    newest_whole,
    second_reading,
    stores,
)
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.stores import PIECE_BYTES
from holmesjax.data import object_stores
from holmesjax.distributed import foreign_errors
from holmesjax.errors import (
    ConfigError,
    DamagedError,
    HolmesError,
    LostLeaseError,
    PeerError,
    of_system,
)
from holmesjax.files import places
from holmesjax.liveness.lease import Lease
from holmesjax.trainer import Trainer
from launch import __main__ as command_line, arguments
from launch.restarts import Restarts
from launch.verbs import gather
from tests.data.object_store import object_store
from tests.jobs import HANG_S, write_run

LARGE = os.urandom(PIECE_BYTES + 7)
FILES = {"part_0/d/large": LARGE, "part_0/_METADATA": b"zero", "part_1/d/empty": b""}
SAME = {"sequences": 0, "settings": {}, "data": {}, "plan_hash": "", "arrays": {}}


@pytest.fixture(scope="module")
def server():
    with object_store("runs") as store:
        yield store


@pytest.fixture
def machine(server, tmp_path, monkeypatch, request):
    """The run folder that a URL has on a machine, by the machine's name; and the URL."""
    url = f"s3://runs/{request.node.name.replace('[', '_').rstrip(']')}"

    def run_folder(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return places.folder_of(url)

    return run_folder, url


def start(folder, url, epoch=1):
    """A start of the run: the copy of its folder."""
    with Lease(folder) as lease:
        mirror.open_run(url, lease, lambda line: None)
    found = mirror.of(folder)
    found.begin(stores.start_name(stores.identifier(folder), epoch))
    return found


def facts(content):
    digest = None if content is LARGE else hashlib.sha256(content).hexdigest()
    return {"bytes": len(content), "sha256": digest}


def facts_of_all():
    return {name: facts(content) for name, content in FILES.items()}


def save(folder, found, step, *, until="end", zero=b"zero", advance=lambda: None):
    """Saves as a run does, up to a moment at which it is killed."""
    path = manifest.begin(folder, step)
    contents = FILES | {"part_0/_METADATA": zero}
    for name, content in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    files = {name: facts(content) for name, content in contents.items()}
    if until == "upload":
        name = stores.name_at_url(step, "part_0/d/large", found.start)
        found.put_file(path / "part_0/d/large", name)
        return
    found.upload(folder, step, files, advance)
    where = {"id": "x", "node": "n", "folder": found.url, "start": found.start}
    parts = dict.fromkeys(("part_0", "part_1"), where)
    text = manifest.describe(step, files=files, stores=parts, **SAME)
    if until == "manifest":
        return
    found.commit(folder, step, text)
    if until == "end":
        manifest.commit(folder, step, text)
        committed.note(folder, step)


def test_a_store_keeps_what_the_launcher_has_and_its_own_folder_does_not_know_yet(machine):
    run_folder, url = machine
    found = start(folder := run_folder("here"), url)
    for step in (1, 2, 3):
        save(folder, found, step, until="end" if step == 1 else "manifest")
    found.follow(folder, [1, 3], 3)  # before the manifest of step 3 has come
    found.follow(folder, [], 3)
    found.close()
    starts = dict.fromkeys(("part_0", "part_1"), found.start)
    parts = [found.held(step, facts_of_all(), starts) for step in (1, 2, 3)]
    assert parts == [["part_0", "part_1"], [], ["part_0", "part_1"]]


def fetch(folder, step, say=lambda line: None, zero=b"zero"):
    found = manifest.at(manifest.folder_of(folder, step))
    parts = {manifest.part_of(name) for name in FILES}
    fetching.fetch(folder, found, parts, None, lambda: None, say)
    for name, content in (FILES | {"part_0/_METADATA": zero}).items():
        assert (found.path / name).read_bytes() == content


@pytest.mark.parametrize("until", ["upload", "manifest", "commit"])
def test_a_save_that_is_killed_leaves_the_newest_complete_one(machine, until):
    run_folder, url = machine
    here = run_folder("a")
    found = start(here, url)
    save(here, found, 1)
    save(here, found, 2, until=until)
    newest = 2 if until == "commit" else 1
    for name in ("a", "b"):  # the machine itself, and one that has nothing
        there = run_folder(name)
        again = start(there, url, epoch=2)
        assert manifest.find(there)[0].step == newest, name
        fetch(there, newest)
        assert newest_whole.find(there, print, fetches=True).step == newest
    save(there, again, 3)  # it goes on where it was cut
    if newest == 1:
        save(there, again, 2)
    assert again.steps() == [1, 2, 3]


def test_another_machine_goes_on_with_a_fetch_and_checks_it(machine, server, monkeypatch):
    run_folder, url = machine
    here = run_folder("a")
    (here / "tokenizer").mkdir(parents=True)
    names = ["skipped.json", "metrics.jsonl", "tokenizer/x.json"]
    for name in names:
        (here / name).write_text(name)
    found = start(here, url)
    save(here, found, 4)
    Restarts(here, 3, pytest.fail, found).begin(4)  # its machine is lost then
    new, said = run_folder("b"), []
    start(new, url)
    assert [entry.status for entry in Restarts(new, 3, pytest.fail).failed(4)] == [None]
    assert [(new / name).read_text() for name in names] == names
    step = manifest.folder_of(new, 4)
    begun = step / "part_0.fetching/d/large"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(LARGE[:1000])
    fetch(new, 4, said.append)
    assert said[0] == "fetching part_0, part_1: 4 MiB, 1000 B of them were here already"
    spoil(server, url, manifest.at(step), "part_0/_METADATA")
    start(third := run_folder("c"), url)
    with pytest.raises(DamagedError, match="is damaged") as error:  # and no other try
        fetch(third, 4)
    for folder in (third, new):  # a launcher hears of it from another machine
        damaged = manifest.at(manifest.folder_of(folder, 4))
        assert manifest.damaged_part(damaged, error.value) == "part_0"


def spoil(server, url, checkpoint, file):
    """Changes a byte of a file at a URL."""
    start = fetching.uploads_of(checkpoint)[manifest.part_of(file)].start
    name = f"{url.partition('://')[2]}/{stores.name_at_url(checkpoint.step, file, start)}"
    content = bytearray(server.cat_file(name))
    content[-1] ^= 1
    server.pipe_file(name, bytes(content))


def test_a_gathered_checkpoint_is_trained_on_from_its_url(machine):
    run_folder, url = machine
    here, gathered = run_folder("a"), f"{url}/gathered"
    save(here, start(here, url), 1)
    checkpoint, read = manifest.find(here)[0], functools.partial(stores.read_piece, here)
    gather._write_all(object_stores.path_of(gathered), here, checkpoint, read)
    new = places.folder_of(gathered)
    start(new, gathered)
    assert newest_whole.find(new, pytest.fail, fetches=True).step == 1
    fetch(new, 1)


def test_what_is_damaged_here_alone_is_brought_again_from_the_url(machine, monkeypatch):
    run_folder, url = machine
    here, said = run_folder("a"), []
    found = start(here, url)
    for step in (1, 2):
        save(here, found, step)
    checkpoint = manifest.at(manifest.folder_of(here, 2))
    (checkpoint.path / "part_0/_METADATA").write_bytes(b"zerp")
    confirm = functools.partial(second_reading.confirm, say=said.append)

    def is_away(*_):
        raise OSError(errno.EIO, "no answer", url)

    with monkeypatch.context() as away, Lease(here) as lease:
        away.setattr(fetching, "RETRY_S", 0.0)
        away.setattr(Mirror, "read_piece", is_away)
        with pytest.raises(PeerError, match="cannot be fetched"):
            newest_whole.find(here, said.append, move=lease.move, confirm=confirm)
    assert (checkpoint.path / "part_0/_METADATA").exists()  # it may be all that there is
    with Lease(here) as lease, pytest.raises(PeerError, match="has read it as it was written"):
        newest_whole.find(here, said.append, move=lease.move, confirm=confirm)
    manifest.verify(checkpoint)
    (checkpoint.path / manifest.MANIFEST).write_text("{}")
    start(here, url, epoch=2)
    assert newest_whole.find(here, pytest.fail).step == 2


def test_a_late_upload_of_a_stale_start_leaves_its_successors_parts_as_they_are(machine):
    run_folder, url = machine
    old = start(first := run_folder("a"), url)
    second, successors = run_folder("b"), []

    def overtake():  # while the first uploads
        if not successors:
            successors.append("is saving")
            successors[0] = start(second, url)
            save(second, successors[0], 2, zero=b"new!")

    with pytest.raises(LostLeaseError, match="another start"):
        save(first, old, 2, advance=overtake)
    last = start(third := run_folder("c"), url)
    fetch(third, 2, zero=b"new!")
    last.keep([9], last=8)
    assert last._steps() == []  # what the stale start has left goes, too


def test_a_url_without_its_owner_s_record_is_still_the_owner_s(machine):
    """A rule of a bucket removes what is old, and nothing is older."""
    run_folder, url = machine
    found = start(first := run_folder("a"), url)
    found.remove([stores.OWNER])
    save(first, found, 2)
    found.check()
    later = start(run_folder("b"), url)
    with pytest.raises(LostLeaseError, match="another start"):
        found.check()
    later.check()


def test_the_last_that_wrote_says_what_the_run_is(machine):
    run_folder, url = machine
    first = run_folder("a")
    old = start(first, url)
    (first / "skipped.json").write_text("before the save")
    save(first, old, 1)
    (first / "skipped.json").write_text("since the save")
    start(first, url, epoch=2)  # its own folder is newer than the store
    assert (first / "skipped.json").read_text() == "since the save"
    second = run_folder("b")
    new = start(second, url)
    (second / "skipped.json").write_text("of b")
    save(second, new, 2)
    run_folder("a")
    for act in (lambda: save(first, old, 2), lambda: old.commit(first, 2, "{}")):
        with pytest.raises(LostLeaseError, match="another start"):
            act()
    start(first, url, epoch=3)
    assert (first / "skipped.json").read_text() == "of b"
    with pytest.raises(LostLeaseError, match="another start"):  # one that only wakes up now
        mirror.of(first).begin(old.start)
    assert [checkpoint.step for checkpoint in manifest.find(first)] == [2, 1]


def test_what_the_run_folder_has_not_kept_goes(machine):
    run_folder, url = machine
    here = run_folder("a")
    found = start(here, url)
    for step in (1, 2, 3):
        save(here, found, step)
    save(here, found, 4, until="upload")
    save(here, found, 5, until="upload")  # this one is being written
    found.keep([2, 3], last=4)
    found.keep([2], last=3)  # the newest goes only where there is a newer one
    assert (found.steps(), found._steps()) == ([2, 3], [2, 3, 5])
    found._has = pytest.fail  # of what this start has committed, the store is not asked
    found._follow_now(here, [2, 3], 3)


def test_objects_that_only_begin_with_the_name_of_a_folder_are_not_below_it():
    """Some clients list them where the folder has no objects; part_10 is no file of part_1."""
    found = mirror.Mirror("gs://runs/a")
    found._store = mock.Mock(find=lambda path, **_: {f"{path}0/arrays": {"size": 1}})
    assert found.listed("checkpoints/step_00000009/x-1-0/part_1") == {}


def test_the_url_of_another_run_is_refused(machine):
    run_folder, url = machine
    found = start(run_folder("a"), url)
    other = run_folder("b")
    stores.identifier(other)
    with pytest.raises(HolmesError, match="is the folder of another run"):
        found.join(other)


@pytest.mark.parametrize("size", [100, 3 * mirror.BLOCK_BYTES])
def test_a_copy_that_fails_half_way_leaves_the_object_as_it_is(machine, tmp_path, size):
    """Also one that is so large that its blocks are sent before its end."""
    run_folder, url = machine
    found, path = start(run_folder("a"), url), tmp_path / "file"
    path.write_bytes(b"x" * size)

    def fail():
        raise OSError(errno.ESTALE, "Stale file handle")

    for before in (None, b"good"):
        if before:
            found.put("file", before)
        with pytest.raises(OSError, match="Stale file handle"):
            found.put_file(path, "file", fail)
        gc.collect()  # a file that is forgotten is closed, too
        assert found.read("file") == before


@pytest.mark.parametrize(
    "error", [botocore.parsers.ResponseParserError("no XML"), urllib3.exceptions.HTTPError("cut")]
)
def test_what_a_client_raises_is_of_the_store(machine, monkeypatch, error):
    """These are no OSError, and no BotoCoreError. Nothing in this process has caused them."""
    run_folder, url = machine
    found = start(run_folder("a"), url)

    def fail(*args, **settings):
        raise error

    monkeypatch.setattr(found._store, "cat_file", fail)
    with pytest.raises(OSError, match=r"no XML|cut") as raised:
        found.read("file")
    assert raised.value.filename == f"{url}/file"
    assert not foreign_errors.is_own(error)


def test_a_bucket_that_is_not_there_is_a_mistake_and_credentials_that_fail_to_come_are_none(
    machine, monkeypatch
):
    run_folder, url = machine
    with Lease(run_folder("a")) as lease, pytest.raises(ConfigError, match="has no bucket"):
        mirror.open_run("s3://no-such-bucket/run", lease, print)
    found = start(run_folder("b"), url)
    late = botocore.exceptions.CredentialRetrievalError(provider="iam-role", error_msg="timeout")
    monkeypatch.setattr(found._store, "cat_file", mock.Mock(side_effect=late))
    with pytest.raises(OSError, match="iam-role") as raised:
        found.read("file")
    assert of_system(raised.value).exit_status == 75


def test_a_store_that_is_away_fails_the_save_and_says_where(machine, monkeypatch):
    run_folder, url = machine
    here = run_folder("a")
    start(here, url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    once = {"s3": {"config_kwargs": {"retries": {"max_attempts": 0}}}}
    monkeypatch.setattr(mirror, "OPTIONS", once)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    away = Mirror(url)
    with pytest.raises(OSError, match=r"onnect") as error:
        away.begin("x")
    assert error.value.filename == f"{url}/{stores.OWNER}"
    with Lease(here) as lease, pytest.raises(PeerError, match=url):
        mirror.open_run(url, lease, print)


@pytest.fixture
def refusals(server):
    """Answers requests in the store's place; at the end no more."""
    yield server.refusals
    server.refusals.rule = lambda method, path, env: None
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    "error",
    [
        ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
        ("500 Internal Server Error", "InternalError", "Please try again."),
        ("400 Bad Request", "RequestTimeout", "The socket was idle."),
    ],
)
def test_a_store_that_is_busy_for_a_moment_fails_no_save(machine, refusals, error):
    run_folder, url = machine
    found, seen = start(here := run_folder("a"), url), set()

    def rule(method, path, env):  # the first request of each kind; HEAD has no text of an error
        is_first = method not in seen and not (method == "HEAD" and error[0].startswith("400"))
        seen.add(method)
        return error if is_first else None

    refusals.rule = rule
    save(here, found, 1)
    assert seen >= {"GET", "HEAD", "PUT"}
    assert found.steps() == [1]


def test_a_store_that_takes_calls_and_stays_silent_is_said_and_given_up(
    machine, refusals, monkeypatch
):
    """Its client alone would wait for a minute each time, ten times."""
    run_folder, url = machine
    start(here := run_folder("a"), url)
    monkeypatch.setattr(mirror, "SLOW_S", 0.0)
    monkeypatch.setattr(mirror, "ANSWER_S", 1.0)
    said, is_over = [], threading.Event()
    refusals.rule = lambda method, path, env: is_over.wait(HANG_S) and None
    try:
        with Lease(here) as lease, pytest.raises(PeerError, match="has not answered") as error:
            mirror.open_run(url, lease, said.append)
    finally:
        is_over.set()
    assert error.value.where == f"{url}/{stores.RECORD}"
    assert any(f"{url}/{stores.RECORD} has not answered" in line for line in said)


def test_a_store_that_lets_nothing_be_removed_is_told_once_and_holds_nothing_up(machine, refusals):
    run_folder, url = machine
    here, said = run_folder("a"), []
    start(here, url)
    found = Mirror(url, said.append)
    found.begin("x-1-0")
    for step in (1, 2):
        save(here, found, step)
    denied = ("403 Forbidden", "AccessDenied", "Access Denied")
    refusals.rule = lambda method, path, env: denied if method == "DELETE" else None
    (here / "metrics.jsonl").write_text("{}\n")  # whose last part has another name each time
    save(here, found, 3, until="manifest")
    (manifest.folder_of(here, 3) / manifest.MANIFEST).write_text("{}")  # of a commit that is late
    for _ in range(2):
        found.follow(here, [2, 3], 3)
    found.close()
    assert found.steps() == [1, 2, 3]
    Mirror(url, said.append).begin("x-1-1", dropped=[2])
    assert len(said) == 2
    assert all("Access Denied" in line and "manifest.json" in line for line in said)
    with pytest.raises(PermissionError, match="Access Denied"):
        found.withdraw(3)


def test_credentials_that_are_renewed_in_their_file_are_read_again(
    machine, refusals, tmp_path, monkeypatch
):
    run_folder, url = machine
    file = tmp_path / "credentials"
    write = lambda key: file.write_text(
        f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\naws_session_token=x\n"
    )
    write("FIRST")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    s3fs.S3FileSystem.clear_instance_cache()
    found = start(here := run_folder("a"), url)
    write("SECOND")
    expired = ("400 Bad Request", "ExpiredToken", "The provided token has expired.")
    refusals.rule = lambda method, path, env: (
        expired if "FIRST" in env["HTTP_AUTHORIZATION"] else None
    )
    with pytest.raises(OSError, match="token has expired") as raised:
        save(here, found, 1)
    assert isinstance(of_system(raised.value), PeerError)  # another start may find new ones
    save(here, found, 2)
    assert found.steps() == [2]


@pytest.mark.parametrize("url", ["s3://b/x", "gs://b/x"])
def test_a_url_never_becomes_a_folder_of_that_name(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for place in (url, manifest.Path(url)):
        assert places.folder_of(place) == tmp_path / "cache/holmesjax/runs" / url[:2] / "b/x"
        with pytest.raises(HolmesError, match="is a URL, and no folder"):
            stores.identifier(manifest.Path(place))
    for wrong in ("s3://b", "s3://b/../x", "ftp://b/x", "s3:///x"):
        with pytest.raises(HolmesError, match="no run folder in a store"):
            places.folder_of(wrong)
    assert not list(tmp_path.iterdir())


def test_each_verb_that_names_runs_reads_them_at_urls(monkeypatch):
    monkeypatch.setattr(mirror, "bring", lambda place, say: f"/here/{place[-1]}")
    # A process knows its own folder, and what `data` is given may be a corpus.
    verbs = arguments.VERBS.keys() - {"worker", "store", "data"}
    names = set()
    for verb in sorted(verbs):
        arguments.VERBS[verb].add_to(parser := argparse.ArgumentParser())
        for action in parser._actions:
            if action.option_strings or not re.search("run folder|folder of a run", action.help):
                continue
            given = ["s3://b/x", "s3://b/y"] if action.nargs == "+" else "s3://b/x"
            args = argparse.Namespace(verb=verb, **{action.dest: given})
            command_line._bring_runs(args, None)
            brought = getattr(args, action.dest)
            assert brought == (["/here/x", "/here/y"] if action.nargs == "+" else "/here/x"), verb
            names.add(verb)
    assert names >= {"train", "top", "report", "compare", "verify", "gather", "export", "generate"}


def test_a_run_is_in_a_store_before_it_counts_and_goes_on_without_its_folder(
    server, tmp_path, monkeypatch
):
    url, said = "s3://runs/trained", io.StringIO()
    run_file = write_run(tmp_path, {"a": (1,)})
    settings = ["model.num_layers=1", "model.width=16", "checkpoint.every=2", "train.steps=8"]
    folder = places.folder_of(url)
    undisturbed = Trainer(run_file, settings).train()
    upload = Mirror.upload

    def fail_once(self, run_dir, step, *more):
        if step == 2:
            raise OSError(errno.EIO, "no answer", url)
        upload(self, run_dir, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "upload", fail_once)
        first = Trainer(run_file, [*settings, f"run.dir={url}"], said).train()
    assert "warning: no checkpoint after step 2: no answer" in said.getvalue()
    assert "; the next is tried in " in said.getvalue()
    assert Mirror(url).steps() == [4, 6, 8]
    assert [checkpoint.step for checkpoint in manifest.find(folder)] == [8, 6, 4]
    spoil(server, url, manifest.find(folder)[1], "part_0/_METADATA")
    shutil.rmtree(folder)  # another machine
    Mirror(url).withdraw(8)  # as if killed before
    Mirror(url).put(committed.RECORD, b'{"step": 6}')
    with Lease(folder) as lease:
        mirror.open_run(url, lease, lambda line: None)
    again = Trainer(folder, [], said)
    assert again.job.config.run.dir == url
    again.train()
    assert "fetching part_0" in said.getvalue()
    assert "the checkpoint after step 4 is used instead" in said.getvalue()
    assert Mirror(url).steps() == [4, 6, 8]  # the damaged one was withdrawn, and saved again
    found = manifest.find(folder)[1]
    assert fetching.held_at_urls(found) == ({"part_0"}, {})
    fetching.fetch_again(found, "part_0", lambda: None, said.write)
    losses = lambda records: [record["loss"] for record in records]
    assert losses(again.history) == losses(first) == losses(undisturbed)
    shutil.rmtree(folder)  # a third machine, which only reads
    found = newest_whole.find(mirror.bring(url, said.write), said.write, fetches=True)
    assert manifest.elsewhere(found)
    fetching.bring_of_url(found, said.write)
    assert not manifest.elsewhere(found)
    manifest.verify(found)
    shutil.rmtree(folder)
