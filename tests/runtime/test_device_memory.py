"""Memory in use is told by the plan's numbers of devices, and only where it has risen."""

from types import SimpleNamespace

import jax

from holmesjax.runtime.device_memory import AGAIN, PeakMemory, devices_of
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model


def test_each_device_has_its_number_in_the_plan():
    plan = hand_made_plan((2, 1), (2, 1), 1)
    chunks = make_chunks(make_model(num_layers=3), plan)
    found = devices_of(chunks)
    assert found == {f"device {i}": device for i, device in enumerate(jax.devices()[:3])}
    assert PeakMemory(found).risen() == {}  # CPUs keep no statistics


def test_a_peak_is_told_once():
    peaks = {"device 4": 10, "device 5": 20, "cpu": None}
    stats = lambda name: peaks[name] and {"peak_bytes_in_use": peaks[name], "bytes_in_use": 1}
    devices = {n: SimpleNamespace(memory_stats=lambda n=n: stats(n)) for n in peaks}
    memory = PeakMemory(devices)
    assert memory.risen() == {"device 4": 10, "device 5": 20}
    assert memory.risen() == {}
    peaks["device 5"] = 30
    assert memory.risen() == {"device 5": 30}
    later = [memory.risen() for _ in range(3 * AGAIN)]
    assert [risen for risen in later if risen] == 3 * [{"device 4": 10, "device 5": 30}]
