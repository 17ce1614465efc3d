"""The launcher of processes that generate text: what it sends and hears, and how they may end."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

from holmesjax import job as jobs
from holmesjax.distributed.member import Member
from holmesjax.distributed.messages import (
    AllDone,
    Continued,
    Done,
    Exit,
    Failed,
    JobStart,
    Output,
    ProcessEvent,
    Ready,
    TextPiece,
    Texts,
    Up,
)
from holmesjax.errors import ConfigError, HolmesError, PeerError
from holmesjax.transport import key_files
from launch.generation_job import GenerationJob
from tests.jobs import write_run

TEXTS = Texts(
    prompts=[[1, 2]], max_tokens=3, sampling={"seed": 4}, stop=["x"], ends=None, ema=False
)
HANG = "E1126 99 hang_watchdog.cc:68] [0] XLA GPU execution `jit_step` failed to finish in 1m5s."
READY = Ready(addresses={"data": {}, "coordinator": None}, unproven=None)


class Talkers:
    """A launcher whose processes are threads that only talk."""

    address, port, sees_exits, is_here, files_each = "127.0.0.1", 0, True, True, 1

    def __init__(self, job, talk):
        self.job, self.talk, self.threads, self.heard = job, talk, [], {}
        self.over = threading.Event()

    def start(self, start, events):
        assert start.command[-1] == "--generates"
        thread = threading.Thread(target=self.try_run, args=(start, events), daemon=True)
        self.threads.append(thread)
        thread.start()

    def try_run(self, start, events):
        with contextlib.suppress(OSError, HolmesError):  # the job is over
            self.run(start, events)

    def run(self, start, events):
        address, port = start.env["HOLMES_CONTROLLER"].split(":")
        number = start.process.number
        member = Member(
            process=start.process,
            address=address,
            port=int(port),
            key=key_files.read_key_file(start.env["HOLMES_KEY_FILE"]),
            about=self.job.about(0),
            computing={},
            timeout_s=10.0,
            start_timeout_s=60.0,
            on_loss=lambda error: None,
        )
        member.send(READY)
        member.wait_for(JobStart, 60.0)
        member.send(Up())
        self.heard[number] = member.wait_for(Texts, 60.0)
        self.talk(number, member, lambda record: events.put(ProcessEvent(number, record)))
        self.over.wait(60.0)  # a connection that closes is news, too
        member.close()

    def end(self):
        self.over.set()


def run(tmp_path, talk):
    """The outcome of two processes, each of which does `talk(number, member, event)`."""
    (tmp_path / "run").mkdir()
    job = jobs.load(write_run(tmp_path, {"a": (1,), "b": (1,)}), ["train.steps=1"])
    launcher, said, shown = Talkers(job, talk), [], []
    generation = GenerationJob(job, launcher, said.append)
    show = lambda row, text: shown.append((row, text))
    try:
        return generation.run(SimpleNamespace(step=7), TEXTS, show), launcher, shown
    finally:
        assert not list((tmp_path / "run").iterdir())  # no key stays
        for thread in launcher.threads:
            thread.join(10.0)
        run.said = said


def test_all_processes_get_the_texts_and_one_tells_what_comes_of_them(tmp_path):
    rows = [{"text": "ab", "tokens": [3, 4], "ended_by": "end"}]

    def talk(number, member, event):
        if number == 1:
            member.send(TextPiece(row=0, text="ab"))
            member.send(Continued(rows=rows, rate="fast"))
        member.send(Done(step=0))
        member.wait_for(AllDone, 60.0)
        event(Exit(status=0))

    continued, launcher, shown = run(tmp_path, talk)
    assert (continued.rows, continued.rate, shown) == (rows, "fast", [(0, "ab")])
    assert launcher.heard == {0: TEXTS, 1: TEXTS}


def test_a_process_that_is_lost_ends_it_with_its_name_and_its_last_lines(tmp_path):
    def talk(number, member, event):
        if number == 1:
            member.status("was generating")
            member.advance()
            event(Output(line=HANG))
            event(Exit(status=-9))

    words = (
        r"b/b-0 \(stage 1, process 1\): was killed by signal 9(.|\n)*and hung for 1m5s in XLA GPU"
    )
    with pytest.raises(PeerError, match=words):
        run(tmp_path, talk)
    assert run.said == [f"b/b-0 | {HANG}"]


def test_a_mistake_that_a_process_finds_is_told_in_its_words(tmp_path):
    failed = Failed(exit_status=2, where="model", problem="is odd", found="7", fix="use 8")

    def talk(number, member, event):
        if number == 0:
            member.send(failed)
            event(Exit(status=failed.exit_status))

    with pytest.raises(HolmesError, match=r"a/a-0 .*: model: is odd\n  found: 7\n  fix: use 8"):
        run(tmp_path, talk)


def test_one_that_ends_before_the_end_is_no_success(tmp_path):
    with pytest.raises(PeerError, match="ended with status 0"):
        run(tmp_path, lambda number, member, event: event(Exit(status=0)))


def test_a_mistake_of_the_launcher_leaves_no_key(tmp_path):
    def refuse(*_):
        raise ConfigError("--hosts", "is odd", found="x", fix="y")

    class Refuses(Talkers):
        start = refuse

    (tmp_path / "run").mkdir()
    job = jobs.load(write_run(tmp_path, {"a": (1,), "b": (1,)}), ["train.steps=1"])
    generation = GenerationJob(job, Refuses(job, None), print)
    with pytest.raises(ConfigError, match="is odd"):
        generation.run(SimpleNamespace(step=7), TEXTS, print)
    assert not list((tmp_path / "run").iterdir())
