"""Clocks of the tests: a slow one for pipelines, to compare with, and one for callers."""

import math
from types import SimpleNamespace

from holmesjax.transport import connections


def stop_callers_clock(monkeypatch):
    """Time passes for callers only in the pauses between calls; after a stranger it is up."""
    now_s = 0.0

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds

    times = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(connections, "time", times)
    monkeypatch.setattr(connections, "STRANGER_PAUSE_S", 60.0)


def finish_times(tasks, forward, backward, weight, transfer, ready):
    """When every stage ends, one task after the other: each as soon as its stage and input are.

    Infinite where stages wait for each other forever.

    Args:
      tasks: of every stage, in order.
      forward, backward, weight: seconds of a task, for each virtual stage.
      transfer: for each stage, seconds to the next stage and back.
      ready: when each stage can start its first task.
    """
    p = len(tasks)
    num_virtual, ends, sent, free, link_free = len(forward), {}, {}, [*ready], {}
    left = [list(own) for own in tasks]
    while waiting := sum(map(len, left)):
        for stage, own in enumerate(left):
            while own:
                kind, microbatch, chunk = own[0]
                virtual, way = chunk * p + stage, {"F": 1, "B": -1, "W": 0}[kind]
                source, reader = virtual - way, virtual + way
                has_source = way and 0 <= source < num_virtual
                if has_source and (kind, microbatch, source) not in sent:
                    break
                start = max(free[stage], sent[kind, microbatch, source] if has_source else 0.0)
                seconds = {"F": forward, "B": backward, "W": weight}[kind][virtual]
                free[stage] = ends[stage] = start + seconds
                if way and 0 <= reader < num_virtual:
                    to = reader % p
                    way_s = transfer[stage][0] if kind == "F" else transfer[to][1]
                    begin = max(free[stage], link_free.get((stage, to), 0.0))
                    link_free[stage, to] = sent[kind, microbatch, virtual] = begin + way_s
                own.pop(0)
        if sum(map(len, left)) == waiting:
            return [math.inf] * p
    return [ends[stage] for stage in range(p)]
