"""The records of steps at a URL: what another machine reads, and how much is sent."""

import os

import pytest

from holmesjax.checkpoints import record_parts
from holmesjax.checkpoints.record_parts import LIST, RecordParts


class Objects(dict):
    """An object store in memory, which counts what it is sent."""

    sent = 0

    def put(self, name, content):
        self[name], self.sent = content, self.sent + len(content)

    def listed(self, name):
        return {key: len(self[key]) for key in self if key == name or key.startswith(name + "/")}

    def remove(self, names):
        for name in names:
            del self[name]

    read = dict.get


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A store, the file of a run, and what another machine reads of it."""
    monkeypatch.setattr(record_parts, "PART_BYTES", 100)
    objects, path, other = Objects(), tmp_path / "metrics.jsonl", tmp_path / "other"

    def brought():
        assert RecordParts(objects).bring(other, pytest.fail)
        return other.read_bytes()

    return objects, path, brought


def publish(parts, path):
    parts.publish(path)
    parts.tidy(lambda: None)


def records(first, last):
    return b"".join(b'{"step": %03d}\n' % step for step in range(first, last))


def test_a_commit_sends_what_is_new(run):
    """And the list: not all of the file again, with each of hundreds of checkpoints."""
    objects, path, brought = run
    with pytest.raises(FileNotFoundError):
        RecordParts(objects).publish(path)
    assert not RecordParts(objects).bring(path, pytest.fail)
    parts, sizes = RecordParts(objects), []
    for step in range(0, 200, 2):
        with path.open("ab") as file:
            file.write(records(step, step + 2))
        before, objects.sent = objects.sent, 0
        publish(parts, path)
        sizes.append(objects.sent - len(objects[LIST]))
        assert brought() == path.read_bytes()
        objects.sent += before
    assert max(sizes) <= 2 * 100  # one that is full now, and the next
    assert len(objects) == 1 + -(-path.stat().st_size // 100)
    objects.sent = 0
    publish(parts, path)
    publish(RecordParts(objects), path)  # the next start of the run
    assert objects.sent == len(objects[LIST])


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_that_goes_back_and_on_has_its_new_records_there(run, is_new):
    """In the same start or the next; a reader has parts of the records before."""
    objects, path, brought = run
    path.write_bytes(records(0, 50))
    objects["metrics.jsonl"] = b"of an earlier version"
    parts = RecordParts(objects)
    publish(parts, path)
    brought()
    assert "metrics.jsonl" not in objects
    os.truncate(path, len(records(0, 20)))
    if is_new:
        parts = RecordParts(objects)
    else:
        publish(parts, path)
    with path.open("ab") as file:
        file.write(records(70, 120))
    publish(parts, path)
    assert brought() == path.read_bytes() == records(0, 20) + records(70, 120)
    assert len(objects) == 1 + -(-path.stat().st_size // 100)


def test_a_start_that_is_none_any_more_takes_nothing_from_its_successor(run):
    objects, path, _ = run
    path.write_bytes(records(0, 50))
    publish(RecordParts(objects), path)
    stale = path.with_name("stale")
    stale.write_bytes(records(0, 10))

    def check():
        raise RuntimeError("lost")

    before = set(objects)
    late = RecordParts(objects)
    late.publish(stale)
    with pytest.raises(RuntimeError, match="lost"):
        late.tidy(check)
    assert before <= set(objects)


def test_parts_that_a_writer_replaces_meanwhile_are_read_again(run):
    objects, path, brought = run
    path.write_bytes(records(0, 51))
    parts = RecordParts(objects)
    publish(parts, path)

    def read_late(name):
        content = dict.get(objects, name)
        if name == LIST:
            with path.open("ab") as file:
                file.write(records(51, 60))
            del objects.read
            publish(parts, path)
        return content

    objects.read = read_late
    assert brought() == records(0, 60)


def test_records_that_come_while_a_part_is_sent_are_sent_later(run):
    """Each once: a read that met the end would have given a part that is not full."""
    objects, path, brought = run
    path.write_bytes(records(0, 5))
    parts, step = RecordParts(objects), 5

    def put(name, content):
        nonlocal step
        Objects.put(objects, name, content)
        with path.open("ab") as file:
            file.write(records(step, step + 3) if step < 100 else b"")
        step += 3

    objects.put = put
    parts.publish(path)
    assert brought() == records(0, 5)
    for _ in range(4):
        before = path.read_bytes()
        parts.publish(path)
        assert brought() == before


def test_parts_that_are_gone_are_said(run):
    objects, path, _ = run
    path.write_bytes(records(0, 50))
    publish(RecordParts(objects), path)
    del objects[min(name for name in objects if name != LIST)]
    said = []
    assert RecordParts(objects).bring(path.with_name("other"), said.append)
    assert ["are gone from the store" in line for line in said] == [True]
