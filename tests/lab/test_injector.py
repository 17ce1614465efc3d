"""Faults are done after their steps, in a lab of nothing but words."""

import time
from types import SimpleNamespace

from holmesjax.lab.injected_faults import Fault
from launch.lab_machine.injector import Injector


def test_a_fault_is_done_after_its_step_and_not_before():
    commands = SimpleNamespace(fault=lambda fault: ([], []))  # shell lines: none
    faults = [Fault(text=f"cut {step}", kind="cut", step=step) for step in (2, 3, 9)]
    with Injector(commands, faults) as injector:
        for step, num_done in ((1, 0), (2, 1), (3, 2)):
            injector.step(step)
            deadline_s = time.monotonic() + 60  # a hang guard
            while len(injector.done) < num_done and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert [done["step"] for done in injector.done] == list(range(2, 2 + num_done))
    assert [done["fault"] for done in injector.done] == ["cut 2", "cut 3"]
