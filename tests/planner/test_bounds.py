"""No step is shorter than a bound says: random stages, against a clock that ticks."""

import bisect
import dataclasses
import itertools
import types

import numpy as np
import pytest

from holmesjax.config import ExpertsConfig
from holmesjax.costs import memory
from holmesjax.planner import layer_split, shortlist
from holmesjax.planner.candidates import Around, ScheduleKind
from holmesjax.planner.layer_ranges import split_chunks
from holmesjax.planner.offers import make_offers
from holmesjax.planner.problem import roles
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_costs import ALONE
from holmesjax.planner.stage_layouts import InFlight, Role
from holmesjax.schedules.pipeline_schedules import SCHEDULES, leanest, schedule
from holmesjax.schedules.simulation import Simulator
from tests.clock import finish_times
from tests.clusters import make_config
from tests.random_cases import random_case

ORDERS = [
    ("gpipe", 3, 4, 1, ()),
    ("1f1b", 4, 6, 1, ()),
    ("eager_1f1b", 3, 6, 1, (5, 3, 1)),
    ("interleaved_1f1b", 2, 4, 3, ()),
    ("zero_bubble", 3, 5, 1, ()),
    ("1f1b", 1, 3, 1, ()),
]


def test_no_stage_takes_less_memory_than_a_bound_says():
    """A stage has one microbatch in flight; the only stage has all layers."""
    topology, config, _ = random_case(6)
    problem = make_problem(config, topology)
    whole = problem.num_layers
    for settings in shortlist.step_settings(config):
        meshes = problem.meshes(0, settings)
        if not meshes:
            continue
        room = make_offers(problem, settings)[0].alone.room
        for role in (*roles(1), *roles(3)):
            for number in [whole] if role == Role(True, True) else range(1, whole):
                for place, mesh in enumerate(meshes):
                    memory_bytes = problem.stage_costs.memory_bytes(
                        mesh, settings, role, (number,), ALONE
                    )
                    load = room.load(1, memory_bytes / room.usable_bytes * (1 + 1e-9))[place]
                    assert load >= number * (1 - 1e-6), (mesh, settings, role, number)


def test_memory_of_many_in_flight_is_to_the_digit_that_of_each():
    topology, config, _ = random_case(6)
    of_experts = {"experts": ExpertsConfig(count=4, active=2), "pattern": ("block", "expert_block")}
    unlike = make_config(model={**of_experts, "num_layers": 4}, parallel={"fsdp": 2})
    for problem in (make_problem(config, topology), make_problem(unlike, topology)):
        costs, layers = problem.stage_costs, problem.ranges.counts(0, 3)
        settings = list(shortlist.step_settings(problem.config))[-1]
        for mesh, role in itertools.product(problem.meshes(0, settings), (*roles(1), *roles(3))):
            for number in (33, 1, 2, 31, 32, 64):
                held = InFlight(all=number, head=number)
                shape = costs.shape(mesh, settings, role, layers, held)
                items = memory.stage_memory_bytes(problem.config.model, shape)
                found = costs.memory_bytes(mesh, settings, role, layers, held)
                assert found == float(sum(items.values())), (mesh, role, number)


def test_the_clock_says_of_many_assignments_when_each_ends():
    rng, count = np.random.default_rng(0), 7
    for name, p, m, v, in_flight in ORDERS:
        tasks = schedule(name, p, m, num_chunks=v, in_flight=in_flight)
        forward, backward, weight = rng.uniform(0.1, 1.0, (3, p * v, count))
        transfer = rng.uniform(0.0, 1.0, (p - (v == 1), 2, count))
        simulator = Simulator(tasks, v)
        ready = rng.uniform(0.0, 3.0, (p, count))
        found = simulator.finish_s(forward, backward, transfer, weight, ready)
        for k in range(count):
            own = (x[..., k] for x in (forward, backward, weight, transfer, ready))
            assert found[:, k] == pytest.approx(finish_times(tasks, *own), rel=1e-12), name


def problem_of(forward_s, inputs_s, weight_s, gather_s, reduce_s, update_s):
    """A problem of stages that take so long, for a layer or once a step; seats are numbers."""

    def seconds(seat, settings, role, blocks, is_split):
        [n] = blocks
        return types.SimpleNamespace(
            forward=n * forward_s[seat],
            backward=n * (inputs_s[seat] + weight_s[seat] * (not is_split)),
            weight=n * weight_s[seat],
            gather=gather_s[seat],
            reduce=reduce_s[seat],
            update=update_s[seat],
        )

    def microbatch_s(*stage):
        times = seconds(*stage, is_split=False)
        return times.forward + times.backward

    return types.SimpleNamespace(seconds=seconds, microbatch_s=microbatch_s)


def least_of(kind, problem, m, layers, ways_s):
    """Seconds that the rule for a kind says no step takes less than."""
    settings, around, least_s = None, Around(), []
    stages = zip(roles(len(layers)), layers, [*ways_s, (0.0, 0.0)], strict=True)
    for seat, (role, n, own_s) in enumerate(stages):
        chunks = [(size,) for size in split_chunks(n, kind.chunks)]
        work = kind.work(problem, seat, settings, role, chunks)
        found_s, around = kind.with_stage(work, m, around, own_s)
        least_s.append(found_s)
    return max(least_s)


@pytest.mark.parametrize("slow", ["stages", "links", "once"])
def test_a_stage_has_the_time_in_which_no_other_must_work(slow):
    """Plans that the search leaves out for taking too long could not have been faster."""
    for order in ORDERS:
        shares, is_over, is_plain = least_shares(*order, slow)
        assert max(shares) <= 1 + 1e-9, order
        assert np.median(shares) > 0.5, order  # it says something
        if not is_plain and slow == "stages":
            assert any(is_over), order  # what is true of 1F1B is not of the others


def least_shares(name, p, m, v, in_flight, slow):
    """Bounds as shares of the true step, of random stages; whether 1F1B's are above it."""
    tasks = schedule(name, p, m, num_chunks=v, in_flight=in_flight)
    kind, whole = ScheduleKind(leanest(name, of_its_kind=True), v), ScheduleKind("1f1b")
    rng, shares, is_over = np.random.default_rng(0), [], []
    for _ in range(200):
        layers = rng.integers(v, 4 * v, p)
        forward_s, inputs_s, weight_s = rng.uniform(0.0, 1.0, (3, p))
        ready_s, reduce_s, update_s = rng.uniform(0.0, 20.0 if slow == "once" else 0.1, (3, p))
        num_links = p - (v == 1)
        ways_s = rng.uniform(0.0, 10.0 if slow == "links" else 0.1, (num_links, 2))
        once_s = ready_s, reduce_s, update_s
        problem = problem_of(forward_s, inputs_s, weight_s, *once_s)
        virtual = [(s, split_chunks(layers[s], v)[c]) for c in range(v) for s in range(p)]
        first_s = inputs_s if kind.splits_backward else inputs_s + weight_s
        finish_s = finish_times(
            tasks,
            [n * forward_s[s] for s, n in virtual],
            [n * first_s[s] for s, n in virtual],
            [n * weight_s[s] for s, n in virtual],
            ways_s,
            ready_s,
        )
        step_s = max(finish_s[s] + reduce_s[s] for s in range(p)) + max(update_s)
        shares.append(least_of(kind, problem, m, layers, ways_s[: p - 1]) / step_s)
        is_over.append(least_of(whole, problem, m, layers, ways_s[: p - 1]) > step_s * (1 + 1e-9))
    return shares, is_over, kind.is_plain


@pytest.mark.parametrize("slow", ["stages", "links", "once"])
def test_chunks_with_split_backwards_have_a_bound(slow, monkeypatch):
    """No schedule of ours has both: interleaving, and a W behind each B."""
    chunked = SCHEDULES["interleaved_1f1b"]

    def tasks(stage, order):
        for task in chunked.tasks(stage, order):
            yield task
            if task.kind == "B":
                yield task._replace(kind="W")

    both = dataclasses.replace(
        chunked, tasks=lambda *args: tuple(tasks(*args)), splits_backward=True, leaner=None
    )
    monkeypatch.setitem(SCHEDULES, "both", both)
    shares, _, _ = least_shares("both", 2, 4, 2, (), slow)
    assert max(shares) <= 1 + 1e-9
    assert np.median(shares) > 0.3  # it says something


def test_a_limit_is_found_wherever_it_is_looked_for_first():
    for size, above, near in itertools.product(range(10), range(11), range(-2, 15)):
        stops, asked = range(3, 3 + size), list[int]()

        def is_above(stop, first=3 + above, asked=asked):
            asked.append(stop)
            return stop >= first

        found = layer_split._first(stops, near, is_above)
        assert found == bisect.bisect_left(stops, 3 + above)
        assert set(asked) <= set(stops)
        assert len(asked) <= 2 or near != 3 + above
