"""The loop of steps, with a runner that writes down when it is asked and what is waited for."""

import dataclasses
import fnmatch
import gzip
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from holmesjax import training_loop
from holmesjax.callbacks import Callback, CallbackError, Callbacks
from holmesjax.errors import FatalError
from holmesjax.runtime import timeline
from holmesjax.training_loop import TrainingLoop
from tests.cases import cases
from tests.clusters import make_config


def make_timeline(*, has_ended=False):
    interval = SimpleNamespace(end_s=0.0)
    return SimpleNamespace(intervals=lambda: [interval], has_ended=lambda since_s: has_ended)


def make_loop(runner, events, **train):
    """A session that trains nothing; `events` takes what it saves."""
    return TrainingLoop(
        config=make_config(train=train),
        runner=runner,
        batches=None,
        clock=SimpleNamespace(timeline=make_timeline),
        writer=SimpleNamespace(save=lambda step, states: events.append(f"save {step}")),
        tell=lambda part: None,
        is_stopping=lambda: False,
        is_saving=lambda step: False,
        begins=lambda work, step: None,
        profiles=Path("unused"),
    )


def test_the_last_round_of_an_island_has_the_time_of_a_checkpoint(monkeypatch):
    """It is sent, merged and fetched before the checkpoint of the last step."""
    events = []
    settled, parked = lambda states: events.append("settled") or states, lambda states: states
    island = SimpleNamespace(settled=settled, parked=parked)
    monkeypatch.setattr(training_loop, "IslandApart", SimpleNamespace)
    monkeypatch.setattr(training_loop, "IslandsRunner", SimpleNamespace)
    loop = make_loop(island, events)
    loop.states, loop.begins = [], lambda work, step: events.append(f"{work} {step}")
    loop._save(7)
    assert events == ["checkpoint 7", "settled", "checkpoint 7", "save 7"]


def test_a_step_is_dispatched_before_anything_of_the_one_before_is_waited_for():
    events = []

    class Number:
        """A metric that is still being computed: whoever converts it waits for its step."""

        def __init__(self, step):
            self.step = step

        def __float__(self):
            events.append(f"wait {self.step}")
            return 1.0

        __bool__ = __float__

    class Runner:
        def __init__(self):
            self.step = 0

        def train_step(self, states, batch, timeline, meanwhile):
            self.step += 1
            events.append(f"dispatch {self.step}")
            meanwhile.nearly()
            meanwhile.idle()
            names = ("grad_norm", "learning_rate", "loss")
            metrics = {name: Number(self.step) for name in names}
            return states, metrics | {"skipped": False}

        def take_link_bytes(self):
            return {}

    training_loop = make_loop(Runner(), events, steps=3)
    assert list(training_loop._run(SimpleNamespace(take=lambda: None), 0)) == [1, 2, 3]
    in_order = [event for i, event in enumerate(events) if event not in events[:i]]
    assert in_order == [
        "dispatch 1",
        "dispatch 2",
        "wait 1",
        "dispatch 3",
        "wait 2",
        "wait 3",
        "save 3",
    ]


def test_experts_move_before_a_step_and_the_record_of_that_step_says_so():
    """A checkpoint after steps 2 and 3, the last: nothing moves behind it."""
    events, told, seen = [], [], []

    class Runner:
        def train_step(self, states, batch, timeline, meanwhile):
            events.append("step")
            meanwhile.idle()
            numbers = dict.fromkeys(("grad_norm", "learning_rate", "loss"), np.float32(1))
            arrays = {"choices/block_001": np.ones(4), "square_norms": np.ones(2)}
            return states, {**numbers, **arrays, "skipped": np.bool_(False)}

        def take_link_bytes(self):
            return {}

    class Placement:
        def by_load(self, states):
            events.append("by load")
            return states, {"block_001": (1.5, 1.0 + events.count("by load"))}

        def by_number(self, states):
            events.append("by number")
            return states

    class Seeing(Callback):
        def after_step(self, trainer, step, numbers):
            seen.append({name: float(value) for name, value in numbers.items()})

    loop = make_loop(Runner(), events, steps=3)
    loop.placement, loop.callbacks = Placement(), Callbacks(None, [Seeing()])
    loop.is_saving, loop.tell = lambda step: step == 2, told.append
    assert list(loop._run(SimpleNamespace(take=lambda: None), 0)) == [1, 2, 3]
    assert events == [
        *("by load", "step", "step", "by number", "save 2"),
        *("by load", "step", "by number", "save 3"),
    ]
    peaks = {report["step"]: report.get("expert_peaks") for report in told}
    assert peaks == {1: {"block_001": (1.5, 2.0)}, 2: None, 3: {"block_001": (1.5, 3.0)}}
    assert [set(numbers) for numbers in seen] == [
        {"grad_norm", "learning_rate", "loss", "skipped"}
    ] * 3


class Result:
    """Stands for a result of a step, which is ready once it is told to be."""

    def __init__(self):
        self._ready = threading.Event()
        self.is_ready, self.set = self._ready.is_set, self._ready.set

    def block_until_ready(self):
        assert self._ready.wait(60)


def test_steps_whose_ends_are_seen_at_once_share_their_time(monkeypatch):
    """Steps of 10 s on a clock of the test; the end of the second is seen 10 s late."""
    now_s, told = 0.0, []
    for module in (timeline, training_loop):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    results = [Result() for _ in range(5)]
    # When a step is told of in the step after: the time, and how many steps have ended.
    moments = {2: (10.0, 1), 3: (30.0, 3), 4: (30.0, 3), 5: (40.0, 4)}

    class Runner:
        def __init__(self):
            self.step = 0

        def train_step(self, states, batch, timeline, meanwhile):
            nonlocal now_s
            timeline.watch(0, "S", None, timeline.begin(0), results[self.step])
            self.step += 1
            now_s, num_ended = moments.get(self.step, (now_s, 0))
            for result in results[:num_ended]:
                result.set()
            meanwhile.idle()
            if self.step == 5:
                now_s = 50.0
                results[4].set()
            numbers = {"grad_norm": 1.0, "learning_rate": 1.0, "loss": 1.0, "skipped": False}
            return states, numbers

        def take_link_bytes(self):
            return {}

    with timeline.Clock(1) as clock:
        own = make_loop(Runner(), [], steps=5)
        own = dataclasses.replace(own, clock=clock, tell=told.append)
        list(own._run(SimpleNamespace(take=lambda: None), 0))
    assert [(part["step"], part["step_time_s"]) for part in told] == [
        (step, 10.0) for step in range(1, 6)
    ]


def test_steps_that_always_end_at_once_are_told_while_the_run_goes_on():
    told, num_told = [], []

    class Runner:
        def train_step(self, states, batch, timeline, meanwhile):
            meanwhile.idle()
            num_told.append(len(told))
            return states, {"grad_norm": 1.0, "learning_rate": 1.0, "loss": 1.0, "skipped": False}

        def take_link_bytes(self):
            return {}

    late = make_timeline(has_ended=True)
    clock = SimpleNamespace(timeline=lambda: late)
    own = make_loop(Runner(), [], steps=20)
    own = dataclasses.replace(own, clock=clock, tell=told.append)
    list(own._run(SimpleNamespace(take=lambda: None), 0))
    assert [part["step"] for part in told] == list(range(1, 21))
    assert max(step - number for step, number in enumerate(num_told)) == training_loop.MAX_HELD - 1


def test_gradients_that_stay_infinite_end_the_run_and_a_finite_one_counts_anew():
    skipped = [True, True, False, *[True] * 6]

    class Runner:
        def train_step(self, states, batch, timeline, meanwhile):
            meanwhile.idle()  # the step before is read
            is_skipped = skipped.pop(0)
            norms = np.array([1.0, np.inf if is_skipped else 1.0])
            names = {"grad_norm": norms.sum(), "learning_rate": 1.0, "loss": 1.0}
            return states, names | {"skipped": is_skipped, "square_norms": norms}

        def take_link_bytes(self):
            return {}

    training_loop = make_loop(Runner(), [], steps=9, max_skipped=3)
    training_loop.stage_names = "stage 0 (island 0)", "stage 1 (island 1)"
    with pytest.raises(FatalError, match="not finite, for 3 steps in a row") as error:
        list(training_loop._run(SimpleNamespace(take=lambda: None), 0))
    assert error.value.where == "step 6, stage 1 (island 1)"
    assert error.value.exit_status == 1


def test_the_steps_that_are_asked_for_are_profiled(tmp_path):
    """Alone: what was dispatched before is waited for, and the step itself."""
    double = jax.jit(lambda x: x @ x)

    class Runner:
        def train_step(self, states, *_):
            numbers = {"grad_norm": 1.0, "learning_rate": 1.0, "skipped": False}
            return [double(states[0])], numbers

        def take_link_bytes(self):
            return {}

    training_loop = make_loop(Runner(), [], steps=4, profile_steps=(2, 4))
    training_loop = dataclasses.replace(training_loop, profiles=tmp_path)
    feed = SimpleNamespace(take=lambda: None)
    training_loop.states = [jax.numpy.eye(8)]
    list(training_loop._run(feed, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000004"]
    for path in tmp_path.rglob("perfetto_trace.json.gz"):
        with gzip.open(path) as file:
            assert json.load(file)["traceEvents"]
    assert len(list(tmp_path.rglob("perfetto_trace.json.gz"))) == 2
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 2


class Failing(Callback):
    def before_step(self, trainer, step):
        raise self.error

    def after_step(self, trainer, step, numbers):
        return self.returned


@cases(
    "field, value, where, found",
    [
        ("error", ValueError("no"), "Failing.before_step", "ValueError: no (*, line *)"),
        ("returned", [1.0], "Failing.after_step", "[1.0]"),
        ("returned", {"x": [1.0, 2.0]}, "Failing.after_step", "list [2] of float64"),
    ],
)
def test_a_callback_that_fails_ends_the_run_and_is_named(field, value, where, found):
    class Runner:
        def train_step(self, states, *_):
            return states, {"grad_norm": 1.0, "learning_rate": 1.0, "skipped": False}

        def take_link_bytes(self):
            return {}

    own, events = Failing(), []
    own.error, own.returned = None, None
    setattr(own, field, value)
    if field == "returned":
        own.before_step = lambda trainer, step: None
    training_loop = make_loop(Runner(), events, steps=3)
    training_loop = dataclasses.replace(training_loop, callbacks=Callbacks(None, [own]))
    with pytest.raises(CallbackError) as error:
        list(training_loop._run(SimpleNamespace(take=lambda: None), 0))
    assert error.value.where == where
    assert fnmatch.fnmatch(error.value.found, found.replace("[", "[[]"))
    assert not events  # no checkpoint
