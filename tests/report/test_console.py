"""Printed lines and their times: a stream and a clock made by hand, so nothing waits."""

import io
import math
import re

import pytest

from holmesjax.report.console import Console, step_line

CONTROL = re.compile(r"[^\n -~]")  # all but printable ASCII and the newline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass only when a test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def record(step: int, **values: object) -> dict[str, object]:
    links = {"stage 0 -> stage 1": 3 * 2**20, "stage 1 -> stage 0": 2**20}
    return {
        "step": step,
        "loss": 3.41234,
        "grad_norm": 1.234,
        "learning_rate": 3e-4,
        "tokens_per_s": 12_432.0,
        "step_time_s": 0.33,
        "bubble_share": 0.214,
        "skipped": False,
        "link_bytes": links,
    } | values


def run(
    *, steps: range, step_s: float, every_s: float, total: int, stream: io.StringIO | None = None
) -> list[str]:
    stream = io.StringIO() if stream is None else stream
    clock = Clock()
    console = Console(every_s=every_s, stream=stream, clock=clock)
    console.start(total, steps.start - 1)
    for step in steps:
        clock.now_s += step_s
        console.step(record(step))
    console.close()
    return stream.getvalue().splitlines()


def printed_steps(lines: list[str]) -> list[int]:
    return [int(re.match(r"step +(\d+)/", line)[1]) for line in lines]


def test_the_line():
    assert step_line(record(20), 400) == (
        "step  20/400  loss 3.412  12.4k tok/s  |g| 1.23  lr 3.0e-04  0.33 s/step  bubble 21%"
        "  links 4 MiB"
    )


def test_one_stage_has_no_bubble_and_no_links():
    line = step_line(record(1, link_bytes={}, bubble_share=0.0), 1)
    assert line.endswith("0.33 s/step")


def test_use_of_the_devices_and_the_time_to_the_end():
    line = step_line(record(1, mfu=0.414, time_left_s=7384.0, link_bytes={}), 9)
    assert "  12.4k tok/s  MFU 41%  " in line
    assert line.endswith("  left 2 h 3 min")
    assert "left" not in step_line(record(9, time_left_s=0.0), 9)  # it is done


def test_traffic_has_one_form_in_lines_of_every_width():
    """The time left comes behind it, and is left out where it does not fit."""
    wide = {"mfu": 0.414, "skipped": True, "spike": True, "time_left_s": 7384.0}
    for values in ({}, {"time_left_s": 7384.0}, wide):
        line = step_line(record(1, **values), 1)
        assert re.findall(r"bubble 21%.*?  links (.*?)(?:  left .*)?$", line) == ["4 MiB"]
    assert "left" not in line


@pytest.mark.parametrize("skipped", [True, False])
def test_a_skipped_step_says_so(skipped):
    line = step_line(record(1, skipped=skipped, grad_norm=math.inf, loss=math.nan), 1)
    assert ("SKIPPED" in line) is skipped
    assert "loss nan" in line
    assert "|g| inf" in line


@pytest.mark.parametrize("skipped, grad_norm", [(True, math.nan), (False, 1.2345e-10)])
def test_the_longest_line_has_less_than_120_columns(skipped, grad_norm):
    links = {"stage 0 -> stage 1": 1023.4 * 2**30, "stage 1 -> stage 0": 1023.3 * 2**30}
    worst = record(
        999_999,
        loss=12.3456,
        tokens_per_s=12_345_678.0,
        grad_norm=grad_norm,
        step_time_s=0.012345,
        bubble_share=1.0,
        link_bytes=links,
        skipped=skipped,
    )
    line = step_line(worst, 999_999)
    assert len(line) < 120
    assert line.endswith("  links 2 TiB")
    assert len(step_line(worst | {"mfu": 1.0, "time_left_s": 3e7}, 999_999)) < 120


def test_lines_come_at_a_steady_interval_and_at_both_ends():
    lines = run(steps=range(1, 21), step_s=0.9, every_s=2.0, total=20)
    # First at 0.9 s; then the first step at or after 2.9, 4.9, ... s: no drift from step times.
    due_s = [0.9 + 2 * i for i in range(9)]
    expected = [math.ceil(round(at / 0.9, 6)) for at in due_s]
    assert expected[:4] == [1, 4, 6, 8]
    assert printed_steps(lines) == [*expected, 20]


def test_a_long_pause_is_not_made_up_for():
    stream, clock = io.StringIO(), Clock()
    console = Console(every_s=2.0, stream=stream, clock=clock)
    console.start(100)
    for step, at_s in enumerate([0.0, 60.0, 60.5, 61.0, 62.1], start=1):
        clock.now_s = 1000 + at_s
        console.step(record(step))
    assert printed_steps(stream.getvalue().splitlines()) == [1, 2, 5]


def test_zero_seconds_print_every_step():
    lines = run(steps=range(1, 6), step_s=0.0, every_s=0.0, total=9)
    assert printed_steps(lines) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("total", [5, 400], ids=["finished", "stopped early"])
def test_the_last_step_is_printed_once(total):
    lines = run(steps=range(3, 6), step_s=0.1, every_s=60.0, total=total)
    assert printed_steps(lines) == [3, 5]


def test_a_run_without_steps_prints_nothing():
    assert run(steps=range(1, 1), step_s=0.1, every_s=1.0, total=5) == []


def test_validation_is_printed_at_once():
    stream, clock = io.StringIO(), Clock()
    console = Console(every_s=60.0, stream=stream, clock=clock)
    console.start(400)
    console.step(record(1))
    console.step(record(2, val_loss=3.5))
    assert stream.getvalue().splitlines()[1:] == ["step   2/400  val loss 3.500"]


def test_the_last_step_comes_before_its_validation():
    stream, clock = io.StringIO(), Clock()
    console = Console(every_s=60.0, stream=stream, clock=clock)
    console.start(2)
    console.step(record(1))
    console.step(record(2, val_loss=3.5))
    assert stream.getvalue().splitlines()[1:] == [
        step_line(record(2), 2),
        "step 2/2  val loss 3.500",
    ]


def test_piped_output_has_no_control_characters(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what would make rich write them
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    run(steps=range(1, 9), step_s=1.0, every_s=1.0, total=8, stream=stream)
    assert len(stream.getvalue().splitlines()) == 8
    assert not CONTROL.search(stream.getvalue())


def test_a_terminal_gets_the_same_lines_and_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    piped = run(steps=range(1, 9), step_s=1.0, every_s=2.0, total=8)
    run(steps=range(1, 9), step_s=1.0, every_s=2.0, total=8, stream=stream)
    for line in piped:
        assert line in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    assert "time left" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the line of the bar is cleared
