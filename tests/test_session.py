"""The loop of steps, with a runner that writes down when it is asked and what is waited for."""

from types import SimpleNamespace

from holmesjax.session import Session
from tests.clusters import make_config


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

    interval = SimpleNamespace(end_s=0.0)
    session = Session(
        config=make_config(train={"steps": 3}),
        runner=Runner(),
        batches=None,
        clock=SimpleNamespace(timeline=lambda: SimpleNamespace(intervals=lambda: [interval])),
        writer=SimpleNamespace(save=lambda step, states: events.append(f"save {step}")),
        tell=lambda part: None,
        is_stopping=lambda: False,
        is_saving=lambda step: False,
        begins=lambda work, step: None,
    )
    assert session._run(SimpleNamespace(take=lambda: None), [], 0) == 3
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
