"""The file has one valid JSON object a step, whatever a run, a crash or a resume did to it."""

import importlib.util
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax.config import LogConfig
from holmesjax.errors import ConfigError, DataError
from holmesjax.report.metric_sinks import check_installed, end_of_events
from holmesjax.report.metrics import FILE, Metrics, read, read_last, read_tail
from tests.cases import cases
from tests.disks import disk, files_of_at_most

NO_LOG = LogConfig(tensorboard=False)


def write(run_dir: Path, steps: list[int], *, done_steps: int = 0, loss: float = 1.0) -> None:
    with Metrics(run_dir, NO_LOG, done_steps=done_steps) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": loss})


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_what_is_written_is_read(tmp_path):
    record = {"step": 1, "loss": 0.1 + 0.2, "skipped": False, "link_bytes": {"a -> b": 2**53 + 1}}
    with Metrics(tmp_path / "new" / "run", NO_LOG) as metrics:
        metrics.write(record)
    assert read(tmp_path / "new" / "run") == [record]


def test_a_run_without_a_file_has_no_records(tmp_path):
    assert read(tmp_path) == []


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    with Metrics(tmp_path, NO_LOG) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 1.0})
            assert len(read(tmp_path)) == step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_valid_json(value, tmp_path):
    with Metrics(tmp_path, NO_LOG) as metrics:
        metrics.write({"step": 1, "loss": value, "link_bytes": {"a -> b": value}})
    raw = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse_constant)
    assert raw == {"step": 1, "loss": None, "link_bytes": {"a -> b": None}}
    [record] = read(tmp_path)
    assert math.isnan(record["loss"])
    assert math.isnan(record["link_bytes"]["a -> b"])


def test_every_cut_of_the_last_line_loses_only_that_line(tmp_path):
    write(tmp_path, [1, 2, 3])
    whole = (tmp_path / FILE).read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last) + 1):
        (tmp_path / FILE).write_bytes(whole[:-cut])
        complete = [1, 2, 3] if cut == 1 else [1, 2]  # cut 1 takes the newline only
        assert [record["step"] for record in read(tmp_path)] == complete
        write(tmp_path, [4], done_steps=3)
        assert [record["step"] for record in read(tmp_path)] == [*complete, 4]


def test_a_tail_that_is_not_text_is_dropped(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"step": 1}\n{"ste\xff\x00')
    assert read(tmp_path) == [{"step": 1}]


def test_more_is_read_where_the_last_record_is_longer_than_a_tail(tmp_path):
    records = [{"step": step, "expert_loads": [step] * 1000} for step in (1, 2, 3)]
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (tmp_path / FILE).write_text(text + '{"step": 4')
    assert read_tail(tmp_path, 100)[-1] == records[-1]
    (tmp_path / FILE).write_text('{"step": 1, "expert_loads": [' + 1000 * "1, ")
    assert read_tail(tmp_path, 100) == []


def test_damage_before_the_last_line_is_reported(tmp_path):
    (tmp_path / FILE).write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    words = r"line 2: is not the record of a step\n  found: '{\"step\"'\n"
    with pytest.raises(DataError, match=words):
        read(tmp_path)


@cases("done_steps", [0, 1, 2, 3, 9])
def test_resume_cuts_off_the_steps_that_will_run_again(done_steps, tmp_path):
    write(tmp_path, [1, 2, 3], loss=1.0)
    write(tmp_path, [done_steps + 1], done_steps=done_steps, loss=2.0)
    raw = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    kept = [{"step": step, "loss": 1.0} for step in (1, 2, 3) if step <= done_steps]
    assert raw == [*kept, {"step": done_steps + 1, "loss": 2.0}]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("block_bytes", [1, 7, 24, 1 << 20])
def test_a_session_begins_with_the_end_of_the_file_alone(block_bytes, tmp_path, monkeypatch):
    """Whatever block of it is read at once. A damaged first line shows that nobody reads it."""
    monkeypatch.setattr("holmesjax.report.metrics.BLOCK_BYTES", block_bytes)
    write(tmp_path, [2, 3, 4, 5])
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text("not JSON\n" + "".join(lines) + '{"torn')
    record = lambda step: {"step": step, "loss": 1.0}
    assert read_last(tmp_path, 9) == (record(5), record(5))
    assert read_last(tmp_path, 3) == (record(5), record(3))
    with pytest.raises(DataError, match="the line at byte 0: is not the record of a step"):
        read_last(tmp_path, 1)
    assert read_last(tmp_path / "nothing", 1) == (None, None)
    write(tmp_path, [], done_steps=3)
    assert (tmp_path / FILE).read_text() == "not JSON\n" + "".join(lines[:2])


def test_of_two_records_of_one_step_the_later_wins(tmp_path):
    lines = ['{"step": 3, "loss": 1}', '{"step": 2, "loss": 1}', '{"step": 2, "loss": 7}']
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    assert read(tmp_path) == [{"step": 2, "loss": 7}, {"step": 3, "loss": 1}]


@pytest.mark.parametrize(
    "log, field, fix",
    [
        (LogConfig(tensorboard=True), "log.tensorboard", "-e '.[tb]', or set"),
        (LogConfig(wandb=True), "log.wandb", "-e '.[wandb]', or set"),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_is_refused_before_a_file_changes(log, field, fix, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(NO_LOG)
    for act in (lambda: check_installed(log), lambda: Metrics(tmp_path / "run", log)):
        with pytest.raises(ConfigError) as caught:
            act()
        assert caught.value.where == field
        assert fix in caught.value.fix
    assert not (tmp_path / "run").exists()


def tensorboard_events(run_dir):
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    [path] = (run_dir / "tensorboard").iterdir()
    content, events = path.read_bytes(), []
    while content:  # a record: 8 bytes of length, 4 of checksum, the event, 4 of checksum
        size = int.from_bytes(content[:8], "little")
        assert len(content) >= 16 + size
        events.append(proto.Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return events


def numbers_of(events):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]


def test_tensorboard_gets_every_number(tmp_path):
    with Metrics(tmp_path, LogConfig(tensorboard=True), done_steps=6) as metrics:
        metrics.write({"step": 7, "loss": 0.5, "link_bytes": {"stage 0 -> stage 1": 3}})
    events = tensorboard_events(tmp_path)
    begun = [event.step for event in events if event.session_log.status == event.session_log.START]
    assert begun == [7]  # hides those of earlier attempts
    assert numbers_of(events) == [(7, "loss", 0.5), (7, "link_bytes/stage_0_to_stage_1", 3.0)]


def pretend_wandb(monkeypatch: pytest.MonkeyPatch, init: Callable[..., object]) -> None:
    spec = importlib.util.spec_from_loader("wandb", loader=None)
    package = SimpleNamespace(init=init, Error=RuntimeError, __spec__=spec)
    monkeypatch.setitem(sys.modules, "wandb", package)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("No API key configured."),
        ConnectionError("no network"),
        ValueError("project nowhere not found"),
        SystemExit("wandb wants to leave"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_wandb_that_does_not_start_is_said_and_holds_nothing_up(tmp_path, monkeypatch, error):
    def init(**arguments: object) -> None:
        raise error

    pretend_wandb(monkeypatch, init)
    said: list[str] = []
    with Metrics(tmp_path, LogConfig(wandb=True, tensorboard=False), warn=said.append) as metrics:
        for step in (1, 2):
            metrics.write({"step": step, "loss": 1.0})
    assert len(read(tmp_path)) == 2
    [told] = said
    assert told.startswith("Weights & Biases has failed, and gets no more numbers: ")
    assert str(error) in told
    if not isinstance(error, SystemExit):
        assert "fix: wandb login, or WANDB_MODE=offline" in told


def test_wandb_gets_the_numbers_that_tensorboard_gets(tmp_path, monkeypatch):
    """Those of the time and the memory of a run, too."""
    logged = []
    nothing = lambda *args, **kwargs: None
    run = SimpleNamespace(id="a", define_metric=nothing, log=logged.append, finish=nothing)
    pretend_wandb(monkeypatch, lambda **_: run)
    record = {"step": 7, "loss": 0.5, "wall_s": {"step": 3.0}, "memory_bytes": {"device 1": 5}}
    with Metrics(tmp_path, LogConfig(tensorboard=True, wandb=True)) as metrics:
        metrics.write(record)
    numbers = numbers_of(tensorboard_events(tmp_path))
    [written] = logged
    assert numbers == [(7, name, value) for name, value in written.items() if name != "step"]
    assert written == {"step": 7, "loss": 0.5, "wall_s/step": 3.0, "memory_bytes/device_1": 5.0}


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path, monkeypatch):
    asked, logged, finished = [], [], []

    def init(**arguments: object) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(
            id="abc",
            define_metric=lambda *args, **kwargs: None,
            log=logged.append,
            finish=lambda: finished.append(True),
        )

    pretend_wandb(monkeypatch, init)
    for done_steps in (0, 1):
        with Metrics(tmp_path, LogConfig(wandb=True), done_steps=done_steps) as metrics:
            metrics.write({"step": done_steps + 1, "loss": 2.0, "skipped": True})
    assert [arguments["id"] for arguments in asked] == [None, "abc"]
    assert logged == [{"step": step, "loss": 2.0, "skipped": 1.0} for step in (1, 2)]
    assert len(finished) == 2


@pytest.mark.parametrize("damage", [b"", b"\0\0\0", b"\xff", None], ids=repr)
def test_a_damaged_id_of_a_wandb_run_costs_its_continuation_alone(tmp_path, monkeypatch, damage):
    """A disk that was full has left an empty file; None: a folder, which no file can replace."""
    asked, logged = [], []
    nothing = lambda *args, **kwargs: None

    def init(**arguments: object) -> SimpleNamespace:
        asked.append(arguments["id"])
        return SimpleNamespace(id="new", define_metric=nothing, log=logged.append, finish=nothing)

    pretend_wandb(monkeypatch, init)
    if damage is None:
        (tmp_path / "wandb_id").mkdir()
    else:
        (tmp_path / "wandb_id").write_bytes(damage)
    said: list[str] = []
    for step in (1, 2):
        log = LogConfig(wandb=True, tensorboard=False)
        with Metrics(tmp_path, log, done_steps=step - 1, warn=said.append) as metrics:
            metrics.write({"step": step, "loss": 2.0})
    assert asked == [None, None if damage is None else "new"]
    assert logged == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}]
    assert len(said) == (4 if damage is None else 1)
    assert all(str(tmp_path / "wandb_id") in told for told in said)
    assert not list(tmp_path.glob("*.tmp"))


def test_lines_that_find_no_room_are_written_when_there_is_room(tmp_path):
    warnings = []
    with Metrics(tmp_path, NO_LOG, warn=warnings.append) as metrics:
        metrics.write({"step": 1, "loss": 5.0})
        whole = (tmp_path / FILE).read_bytes()
        with files_of_at_most(len(whole) + 10):  # a part of the next line would fit
            for step in (2, 3):
                metrics.write({"step": step, "loss": 5.0})
            assert (tmp_path / FILE).read_bytes() == whole
        assert len(warnings) == 1
        assert "cannot be written" in warnings[0]
        metrics.write({"step": 4, "loss": 5.0})
        assert [record["step"] for record in read(tmp_path)] == [1, 2, 3, 4]
        assert "is written again" in warnings[1]
        with files_of_at_most(10):
            metrics.write({"step": 5, "loss": 5.0})
            metrics.close()
        assert "lacks the records of 1 steps" in warnings[-1]


def test_a_file_of_records_that_is_removed_comes_back_whole(tmp_path):
    warnings: list[str] = []
    path = tmp_path / FILE
    with Metrics(tmp_path, NO_LOG, warn=warnings.append) as metrics:
        metrics.write({"step": 1, "loss": 5.0})
        whole = path.read_bytes()
        path.unlink()
        with files_of_at_most(len(whole) // 2):
            metrics.write({"step": 2, "loss": 5.0})
            assert list(tmp_path.iterdir()) == []
        path.unlink(missing_ok=True)
        metrics.write({"step": 3, "loss": 5.0})
        assert [record["step"] for record in read(tmp_path)] == [1, 2, 3]
        assert "was removed, and is there again" in warnings[1]
        path.unlink()
        path.write_bytes(whole)
        for step in (4, 5):
            metrics.write({"step": step, "loss": 5.0})
    assert path.read_bytes() == whole
    [told] = [text for text in warnings if "is another file now" in text]
    assert str(path) in told


@pytest.mark.parametrize(
    "change, left, said",
    [
        (lambda path: os.truncate(path, 40), [1, 4], "was cut from 75 to 40 bytes"),
        (lambda path: os.truncate(path, 5), [4], "was cut from 75 to 5 bytes"),
        (lambda path: os.truncate(path, 80), [1, 2, 3, 4], "had 5 bytes behind its last record"),
    ],
)
def test_a_file_of_records_that_others_change_goes_on_with_whole_records(
    tmp_path, change, left, said
):
    warnings: list[str] = []
    with Metrics(tmp_path, NO_LOG, warn=warnings.append) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 5.0})
        assert (tmp_path / FILE).stat().st_size == 75
        change(tmp_path / FILE)
        metrics.write({"step": 4, "loss": 5.0})
    assert [record["step"] for record in read(tmp_path)] == left
    [told] = warnings
    assert said in told


def test_a_file_of_events_that_others_cut_ends_with_a_whole_event(tmp_path):
    package = pytest.importorskip("tensorboardX.record_writer")
    path, sizes = tmp_path / "events", []
    writer = package.RecordWriter(str(path))
    for content in (b"", b"a\nb", b"\n" * 300):
        writer.write(content)
        writer.flush()
        sizes.append(path.stat().st_size)
    writer.close()
    for size in range(sizes[-1], -1, -1):
        os.truncate(path, size)
        with path.open("rb") as file:
            assert end_of_events(file) == max((end for end in sizes if end <= size), default=0)


def test_tensorboard_goes_on_when_a_full_disk_has_room_again(tmp_path):
    pytest.importorskip("tensorboardX")
    warnings = []
    long = {f"norm_{number}": 1.0 for number in range(20)}
    with disk(tmp_path / "disk", "4m"):
        run_dir = tmp_path / "disk"
        with Metrics(run_dir, LogConfig(tensorboard=True), warn=warnings.append) as metrics:
            (run_dir / "ballast").write_bytes(bytes(4_150_000))
            for step in range(1, 1_000):
                metrics.write({"step": step, **long})
                if any("tfevents" in text for text in warnings):
                    break
            (run_dir / "ballast").unlink()
            metrics.write({"step": step + 1, **long})
        found = [event.step for event in tensorboard_events(run_dir) if event.summary.value]
    assert found == list(range(1, step + 2))
    assert "written again" in warnings[-1]


class OddSink:
    """A sink whose first `write` waits for ever, or fails."""

    def __init__(self, fails):
        self.fails, self.left, self.steps = fails, threading.Event(), []

    def write(self, step, scalars):
        self.steps.append(step)
        if self.fails:
            raise RuntimeError("no space left")
        self.left.wait(60.0)

    def close(self):
        self.steps.append("closed")


@pytest.mark.parametrize("fails", [True, False])
def test_a_sink_that_fails_or_hangs_holds_no_step_up(fails, tmp_path, monkeypatch):
    warnings, sink = [], OddSink(fails)
    monkeypatch.setattr("holmesjax.report.metric_sinks._TensorBoard", lambda *_: sink)
    monkeypatch.setattr("holmesjax.report.metric_sinks.MOST_WAITING", 20)
    monkeypatch.setattr("holmesjax.report.metric_sinks.CLOSE_S", 60.0 if fails else 0.2)
    log = LogConfig(tensorboard=True)
    with Metrics(tmp_path, log, warn=warnings.append) as metrics:
        metrics.write({"step": 1, "loss": 5.0})
        while not sink.steps:
            time.sleep(0.01)
        for step in range(2, 101):
            metrics.write({"step": step, "loss": 5.0})
    assert len(read(tmp_path)) == 100
    assert sink.steps == [1]
    text = " ".join(warnings)
    if fails:
        assert "TensorBoard has failed, and gets no more numbers: no space left" in text
    else:
        assert "TensorBoard did not end within 0.2 s" in text
        assert "it has not got 79 records" in text
    sink.left.set()
