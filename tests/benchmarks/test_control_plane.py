"""The simulated members of the benchmark say what the controller of today hears."""

import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

from benchmarks import simulated_members
from benchmarks.control_plane import serve
from benchmarks.simulated_members import STAGES, attend


def test_a_job_of_simulated_members_trains_to_its_end(monkeypatch):
    """Controller and members in two threads, in place of processes of their own."""
    monkeypatch.setattr(simulated_members, "STEPS", 2)
    monkeypatch.setattr(simulated_members, "STEP_S", 0.0)
    (controller, to_controller), (crowd, to_crowd) = Pipe(), Pipe()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(serve, STAGES, to_controller)]
        members = range(STAGES), STAGES, controller.recv(), 0.0, to_crowd
        running.append(pool.submit(attend, *members))
        assert crowd.recv() == "up"
        crowd.send(time.perf_counter())
        while not crowd.poll(0.1):
            assert not [job.exception() for job in running if job.done()]
        seen, told = crowd.recv(), controller.recv()
        for end in (controller, crowd):
            end.send("end")
    assert told["wrong"] == []
    assert [*seen["votes_s"]] == [*seen["verdicts_s"]] == [1, 2]
