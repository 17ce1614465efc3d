"""Clocks of the tests: a slow one for pipelines, to compare with, and one for callers."""

import functools
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
    left = [list(queue) for queue in tasks]
    while waiting := sum(map(len, left)):
        for stage, queue in enumerate(left):
            while queue:
                kind, microbatch, chunk = queue[0]
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
                queue.pop(0)
        if sum(map(len, left)) == waiting:
            return [math.inf] * p
    return [ends[stage] for stage in range(p)]


def queued_finish_times(tasks, forward, backward, weight, transfer, ready, pipes):
    """When every stage ends, where arrays queue at pipes: each time from its definition.

    At a pipe arrays are let through in the order in which they would be made if sending took no
    time. From one stage to another they leave one by one, and arrive when all pipes have let them
    through and their own link has sent them.

    Args:
      tasks, forward, backward, weight, transfer, ready: as `finish_times` takes them.
      pipes: by source and target, the name, the seconds of one array and the latency of each pipe.
    """
    p, num_virtual = len(tasks), len(forward)
    place = {
        (kind, microbatch, chunk * p + stage): (stage, i)
        for stage, queue in enumerate(tasks)
        for i, (kind, microbatch, chunk) in enumerate(queue)
    }
    at = {where: task for task, where in place.items()}
    step = {"F": 1, "B": -1, "W": 0}
    seconds = {"F": forward, "B": backward, "W": weight}

    def reader(stage, i):
        kind, _, virtual = at[stage, i]
        to = virtual + step[kind]
        return to % p if step[kind] and 0 <= to < num_virtual else None

    def ends(sends, queues):
        @functools.cache
        def end_s(stage, i):
            kind, microbatch, virtual = at[stage, i]
            source = virtual - step[kind]
            begins_s = end_s(stage, i - 1) if i else ready[stage]
            if step[kind] and 0 <= source < num_virtual:
                begins_s = max(begins_s, sent_s(*place[kind, microbatch, source]))
            return begins_s + seconds[kind][virtual]

        @functools.cache
        def leaves_s(stage, i):
            before = [j for j in range(i) if reader(stage, j) == reader(stage, i)]
            return max(end_s(stage, i), sent_s(stage, before[-1]) if before else 0.0)

        @functools.cache
        def through_s(pipe, number):
            stage, i = queues[pipe][number]
            free_s = through_s(pipe, number - 1) if number else 0.0
            [hold_s] = [
                hold_s for name, hold_s, _ in pipes[stage, reader(stage, i)] if name == pipe
            ]
            return max(leaves_s(stage, i), free_s) + hold_s

        @functools.cache
        def sent_s(stage, i):
            if not sends:
                return end_s(stage, i)
            to = reader(stage, i)
            way_s = transfer[stage][0] if at[stage, i][0] == "F" else transfer[to][1]
            arrivals = [leaves_s(stage, i) + way_s]
            for pipe, _, latency_s in pipes.get((stage, to), ()):
                arrivals.append(through_s(pipe, queues[pipe].index((stage, i))) + latency_s)
            return max(arrivals)

        return end_s

    made_s = ends(sends=False, queues={})
    queues = {}
    for stage, i in sorted(at, key=lambda where: made_s(*where)):
        for pipe, _, _ in pipes.get((stage, reader(stage, i)), ()):
            queues.setdefault(pipe, []).append((stage, i))
    end_s = ends(sends=True, queues=queues)
    return [end_s(stage, len(queue) - 1) for stage, queue in enumerate(tasks)]
