"""Schedules keep their promises; brute force finds none better; a clock that ticks agrees."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.schedules.pipeline_schedules import (
    PLAIN,
    SCHEDULES,
    TaskOrder,
    gpipe,
    leanest,
    schedule,
    validate,
)
from holmesjax.schedules.simulation import picture, simulate
from holmesjax.schedules.tasks import Task, max_in_flight, max_waiting, receiver, sender
from tests.clock import finish_times


def step_s(schedules, forward, backward, transfer, weight=()):
    return simulate(schedules, forward, backward, transfer, weight_s=weight).step_time_s


def even_step_s(name, num_stages, num_microbatches, seconds, *, transfer=(0, 0), **more):
    """Equal stages: `seconds` of an F, a B and, when split, a W; `transfer` there and back."""
    schedules = schedule(name, num_stages, num_microbatches, **more)
    num_chunks = more.get("num_chunks", 1)
    per_virtual_stage = [[s] * (num_stages * num_chunks) for s in (*seconds, 0)[:3]]
    transfers = [transfer] * (num_stages - (num_chunks == 1))
    return step_s(schedules, *per_virtual_stage[:2], transfers, per_virtual_stage[2])


def bounds_of(name, num_stages, num_microbatches, num_chunks=1, in_flight=()):
    order = TaskOrder(name, num_stages, num_microbatches, num_chunks, tuple(in_flight))
    return [order.bound(stage) for stage in range(num_stages)]


# ---- the promises --------------------------------------------------------------------------------


@st.composite
def sizes(draw, most_microbatches=12):
    """A name of the table, and the arguments of `schedule`."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    own, num_stages = SCHEDULES[name], draw(st.integers(1, 5))
    num_stages = max(num_stages, own.least_stages)
    num_microbatches = draw(st.integers(1, most_microbatches))
    more = {}
    if own.is_in_groups:
        num_microbatches = num_stages * draw(st.integers(1, most_microbatches // num_stages))
    if own.is_chunked:
        more = {"num_chunks": draw(st.sampled_from(own.chunks[:2]))}
    if own.chooses_in_flight:
        depths = st.lists(st.integers(1, 8), min_size=num_stages, max_size=num_stages)
        more = {"in_flight": sorted(draw(depths), reverse=True)}
    return name, num_stages, num_microbatches, more


@settings(max_examples=300, deadline=None)
@given(sizes())
def test_schedules_keep_their_promises_and_use_what_they_promise(case):
    name, num_stages, num_microbatches, more = case
    schedules = schedule(name, num_stages, num_microbatches, **more)
    validate(name, schedules, num_microbatches, **more)
    last, num_kinds = ("W", 3) if SCHEDULES[name].splits_backward else ("B", 2)
    for stage, tasks in enumerate(schedules):
        total = num_kinds * num_microbatches * more.get("num_chunks", 1)
        assert len(set(tasks)) == len(tasks) == total
        now = most = between = most_between = 0
        for task in tasks:
            now += (task.kind == "F") - (task.kind == last)
            most = max(most, now)
            between += (task.kind == "B") - (task.kind == last)
            most_between = max(most_between, between)
        own = TaskOrder(name, num_stages, num_microbatches)
        assert max_waiting(tasks) == most_between == own.waiting_bound(stage)
        assert (
            max_in_flight(tasks)
            == most
            == bounds_of(name, num_stages, num_microbatches, **more)[stage]
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_leaner_schedule_holds_no_more_and_all_that_are_tried_lead_to_1f1b(name):
    own = SCHEDULES[name]
    assert leanest(name) == PLAIN or not own.is_tried
    for p, m, v in itertools.product(range(1, 5), range(1, 9), own.chunks):
        if own.leaner and own.suits(p, m):
            depths = range(p, 0, -1) if own.chooses_in_flight else ()
            held, less = bounds_of(name, p, m, v, depths), bounds_of(own.leaner, p, m)
            assert all(a >= b * v for a, b in zip(held, less, strict=True)), (p, m, v)


def test_the_bounds_are_those_of_the_papers():
    for p, m in itertools.product((1, 2, 4, 8), (1, 3, 8, 16)):
        bounds = lambda name, p=p, m=m, **more: bounds_of(name, p, m, **more)
        assert bounds("gpipe") == [m] * p
        assert bounds("1f1b") == [min(m, p - s) for s in range(p)]
        # Qi et al., table 2: no stage holds more than p, which is what 1F1B holds on its first.
        assert max(bounds("zero_bubble")) == max(bounds("1f1b"))
        # Narayanan et al.: p (1 + (p - 1) / (p v)) microbatches on the first, in chunks of 1 / v.
        first = bounds("interleaved_1f1b", num_chunks=2)[0]
        assert first == min(2 * m, 2 * p * (1 + (p - 1) / (2 * p))), (p, m)


def test_tasks_print_as_text_with_their_chunk_if_it_is_not_the_first():
    assert " ".join(map(str, gpipe(2))) == "F0 F1 B0 B1"
    assert f"{Task('F', 12)} {Task('W', 3, 0)} {Task('B', 3, 2)}" == "F12 W3 B3.2"


def test_results_go_through_the_virtual_stages_in_model_order():
    """Three stages of two chunks: forwards visit 0 1 2 0 1 2, backwards the same way back."""
    for kind, way in (("F", [0, 1, 2, 0, 1, 2]), ("B", [2, 1, 0, 2, 1, 0])):
        chunk = 0 if kind == "F" else 1
        here = way[0], Task(kind, 7, chunk)
        assert sender(*here, num_stages=3, num_chunks=2) is None
        visited = [here]
        while after := receiver(*here, num_stages=3, num_chunks=2):
            assert sender(*after, num_stages=3, num_chunks=2) == here
            visited.append(here := after)
        assert [stage for stage, _ in visited] == way
        chunks = [0, 0, 0, 1, 1, 1] if kind == "F" else [1, 1, 1, 0, 0, 0]
        assert [task.chunk for _, task in visited] == chunks
    weight = Task("W", 7)
    assert sender(1, weight, 3) is receiver(1, weight, 3) is None


def swap(tasks, i, j):
    tasks = list(tasks)
    tasks[i], tasks[j] = tasks[j], tasks[i]
    return tuple(tasks)


BROKEN = {
    "a task twice": ("1f1b", lambda s: (s[0] + s[0][:1], s[1]), "every task once"),
    "a task missing": ("1f1b", lambda s: (s[0][:-1], s[1]), "every task once"),
    "a W too many": ("1f1b", lambda s: ((*s[0], Task("W", 0)), s[1]), "every task once"),
    "B before F": ("1f1b", lambda s: (s[0], swap(s[1], 0, 1)), "stage 1: B0 before F0"),
    "W before B": ("zero_bubble", lambda s: (swap(s[0], 2, 3), s[1]), "stage 0: W0 before B0"),
    "too many in flight": ("1f1b", lambda s: (gpipe(4), s[1]), "stage 0: 4 in flight"),
    "in flight until W": (
        "zero_bubble",
        lambda s: (swap(s[0], 3, 4), s[1]),
        "stage 0: 3 in flight, zero_bubble promises 2",
    ),
    "waits forever": ("1f1b", lambda s: (s[0], swap(swap(s[1], 0, 6), 1, 7)), "deadlock"),
    "chunks in the wrong order": (
        "interleaved_1f1b",
        lambda s: (tuple(t._replace(chunk=1 - t.chunk) for t in s[0]), s[1]),
        "deadlock",
    ),
}


def test_validate_refuses_broken_schedules():
    for name, breaks, message in BROKEN.values():
        more = {"num_chunks": 2} if name == "interleaved_1f1b" else {}
        with pytest.raises(AssertionError, match=message):
            validate(name, breaks(schedule(name, 2, 4, **more)), 4, **more)


def test_validate_names_the_stages_that_wait_forever():
    # Each order is right by itself; together, stage 0 needs B0 before F1, and stage 1 F1 before B0.
    schedules = [
        (Task("F", 0), Task("B", 0), Task("F", 1), Task("B", 1)),
        (Task("F", 1), Task("B", 1), Task("F", 0), Task("B", 0)),
    ]
    with pytest.raises(AssertionError, match="deadlock: stage 0 for B0, stage 1 for F1"):
        validate("1f1b", schedules, 2)


def test_fewer_in_flight_than_on_the_next_stage_would_wait_forever():
    depths = (1, 2)
    with pytest.raises(AssertionError, match="deadlock: stage 0 for B0, stage 1 for F1"):
        validate("eager_1f1b", schedule("eager_1f1b", 2, 4, in_flight=depths), 4, in_flight=depths)


@pytest.mark.parametrize(
    "name, more",
    [
        ("1f1b", {"num_chunks": 2}),
        ("interleaved_1f1b", {"num_chunks": 1}),
        ("gpipe", {"in_flight": (2, 1)}),
        ("eager_1f1b", {}),
        ("eager_1f1b", {"in_flight": (2, 0)}),
        ("interleaved_1f1b", {"num_chunks": 3}),  # 7 microbatches are no groups of 2
    ],
)
def test_arguments_that_no_plan_has_are_our_mistake(name, more):
    with pytest.raises(AssertionError):
        schedule(name, 2, 7, **more)


# ---- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_equal_stages_is_the_closed_form(name):
    """(p - 1) / (m + p - 1): Huang et al., arXiv:1811.06965; 1F1B only needs less memory."""
    for p, m in itertools.product((1, 2, 3, 6), (1, 2, 6, 13)):
        simulation = simulate(schedule(name, p, m), [1.0] * p, [2.0] * p, [(0.0, 0.0)] * (p - 1))
        assert simulation.step_time_s == 3.0 * (m + p - 1), (p, m)
        # Sums of a few integers are exact; the one division rounds.
        assert simulation.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p, abs=1e-15)


def test_interleaving_divides_the_bubble_by_the_chunks():
    """(p - 1) / (v m) of the work: Narayanan et al., arXiv:2104.04473, section 2.2."""
    for p, v, num_groups in itertools.product((2, 3, 4), (2, 3), (1, 2, 5)):
        m = p * num_groups
        took_s = even_step_s("interleaved_1f1b", p, m, (1, 2), num_chunks=v)
        bubble = took_s / (3 * v * m) - 1
        assert bubble == pytest.approx((p - 1) / (v * m), abs=1e-15), (p, v, m)
        assert took_s < even_step_s("1f1b", p, m, (v, 2 * v)), (p, v, m)


def test_split_backwards_leave_the_bubble_of_zb_h1():
    """(p - 1) (F + B - W), for W no longer than F and B: Qi et al., arXiv:2401.10241, table 2."""
    short = [(1, 1, 1), (2, 2, 1), (2, 3, 2), (3, 2, 2), (2, 5, 2)]
    for p, (f, b, w) in itertools.product((1, 2, 3, 5), short):
        for m in (p, p + 1, 2 * p, 4 * p):
            work_s = m * (f + b + w)
            bubble_s = even_step_s("zero_bubble", p, m, (f, b, w)) - work_s
            assert bubble_s == (p - 1) * (f + b - w), (p, m, f, b, w)
            assert even_step_s("1f1b", p, m, (f, b + w)) - work_s == (p - 1) * (f + b + w)


def test_a_w_longer_than_f_or_b_does_not_fill_the_bubble():
    """Then (p - 1) (F + B - min(F, B, W)), which is outside the paper's formula."""
    long = [(2, 2, 3), (1, 3, 2), (3, 1, 2), (1, 1, 3)]
    for (p, m), (f, b, w) in itertools.product([(2, 4), (3, 8), (4, 4)], long):
        bubble_s = even_step_s("zero_bubble", p, m, (f, b, w)) - m * (f + b + w)
        assert bubble_s == (p - 1) * (f + b - min(f, b, w)), (p, m, f, b, w)


def test_fewer_microbatches_than_stages_leave_a_bubble_for_each_that_is_missing():
    """F = B = W: the step of ZB-H1 is 3 m + p - 1 from m = p on, and one more for each less."""
    for p in (2, 3, 4, 6):
        for m in range(1, 2 * p):
            took_s = even_step_s("zero_bubble", p, m, (1, 1, 1))
            assert took_s == 3 * m + p - 1 + max(p - m, 0), (p, m)


# ---- brute force ---------------------------------------------------------------------------------


def orders(num_microbatches, bound, *, kinds="FB", num_chunks=1, in_turn=True):
    """All orders of a stage's tasks: F before B before W, and at most `bound` in flight.

    Microbatches are alike, so those that go `in_turn` through each kind and chunk lose nothing.
    """

    def extend(done, left, in_flight):
        if not left:
            yield done
        tried = set()
        for task in left:
            before = kinds[kinds.index(task.kind) - 1]
            ready = task.kind == "F" or task._replace(kind=before) in done
            now = in_flight + (task.kind == "F") - (task.kind == kinds[-1])
            if ready and now <= bound and not (in_turn and (task.kind, task.chunk) in tried):
                yield from extend((*done, task), [t for t in left if t != task], now)
            tried.add((task.kind, task.chunk))

    numbers = range(num_microbatches)
    passes = [Task(kind, m, c) for kind in kinds for c in range(num_chunks) for m in numbers]
    return list(extend((), passes, 0))


def shortest_step_s(num_microbatches, bounds, forward, backward, transfer, weight=(), **more):
    """Over every order of every stage."""
    kinds = "FBW" if weight else "FB"
    each = [orders(num_microbatches, bound, kinds=kinds, **more) for bound in bounds]
    at_once = [0.0] * len(bounds)
    return min(
        max(finish_times(schedules, forward, backward, weight, transfer, at_once))
        for schedules in itertools.product(*each)
    )


SMALL = [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3)]


def one_f_one_b_bounds(num_stages, num_microbatches):
    return bounds_of("1f1b", num_stages, num_microbatches)


def test_taking_microbatches_in_turn_loses_nothing():
    sizes = (2, [2, 2]), (3, [2, 1]), (3, [3, 2])
    for (m, bounds), transfer in itertools.product(sizes, [(0, 0), (1, 1), (3, 1)]):
        args = m, bounds, [1, 2], [3, 2], [transfer]
        assert shortest_step_s(*args) == shortest_step_s(*args, in_turn=False), args


def test_1f1b_is_optimal_within_its_memory_for_equal_stages():
    for (p, m), transfer in itertools.product(SMALL, (0, 1, 2)):
        args = [1] * p, [2] * p, [(transfer, transfer)] * (p - 1)
        least_s = shortest_step_s(m, one_f_one_b_bounds(p, m), *args)
        assert step_s(schedule("1f1b", p, m), *args) == least_s, (p, m, transfer)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_1f1b_is_optimal_within_its_memory_for_two_stages(data):
    """Whatever the stages and the link cost."""
    times = lambda low: data.draw(st.tuples(st.integers(low, 6), st.integers(low, 6)))
    args = times(1), times(1), [times(0)]
    for m in (2, 3, 4):
        assert step_s(schedule("1f1b", 2, m), *args) == shortest_step_s(m, [2, 1], *args)


def test_1f1b_can_be_beaten_by_a_twentieth_on_three_unequal_stages():
    args = [4, 1, 1], [6, 5, 1], [(0, 0)] * 2
    assert step_s(schedule("1f1b", 3, 4), *args) == 42
    assert shortest_step_s(4, [3, 2, 1], *args) == 40


def test_zero_bubble_is_optimal_within_its_memory_for_equal_passes():
    for (p, m), transfer in itertools.product([(2, 2), (2, 3), (2, 4), (3, 2)], (0, 1)):
        args = [1] * p, [1] * p, [(transfer, transfer)] * (p - 1), [1] * p
        least_s = shortest_step_s(m, [min(p, m)] * p, *args)
        assert step_s(schedule("zero_bubble", p, m), *args) == least_s, (p, m, transfer)


def test_zero_bubble_is_optimal_on_two_equal_stages_whatever_a_pass_costs():
    for f, b, w in [(1, 2, 1), (2, 2, 3), (1, 3, 2), (3, 1, 2), (1, 1, 3)]:
        for m, transfer in itertools.product((2, 3), (0, 1, 2)):
            args = [f] * 2, [b] * 2, [(transfer, transfer)], [w] * 2
            least_s = shortest_step_s(m, [2, 2], *args)
            assert step_s(schedule("zero_bubble", 2, m), *args) == least_s, (m, *args)


def test_interleaving_is_optimal_within_its_memory():
    for transfer in (0, 2):
        args = [1] * 4, [2] * 4, [(transfer, transfer)] * 2
        bounds = bounds_of("interleaved_1f1b", 2, 2, num_chunks=2)
        took_s = step_s(schedule("interleaved_1f1b", 2, 2, num_chunks=2), *args)
        assert took_s == shortest_step_s(2, bounds, *args, num_chunks=2), transfer


# Two equal stages, F = 1 and B = 2, four microbatches: seconds of a step for each depth.
EAGER_S = {0: [24, 15, 15, 15], 1: [32, 19, 17, 17], 2: [40, 23, 20, 19], 3: [48, 27, 24, 21]}


def test_eager_1f1b_is_optimal_for_every_depth_and_at_last_without_a_bound():
    for transfer, expected in EAGER_S.items():
        args = [1, 1], [2, 2], [(transfer, transfer)]
        found = []
        for depth in (1, 2, 3, 4):
            found.append(step_s(schedule("eager_1f1b", 2, 4, in_flight=(depth, 1)), *args))
            assert found[-1] == shortest_step_s(4, [depth, 1], *args), transfer
        assert found == expected
        assert found[-1] == shortest_step_s(4, [4, 4], *args), transfer


def test_eager_1f1b_must_not_be_eager_on_the_last_stage():
    """Its first backward would wait for a forward that it does not need: 64 s, not 45 s."""
    args = [4, 4], [3, 2], [(3, 3)]
    eager_s = lambda depths: step_s(schedule("eager_1f1b", 2, 4, in_flight=depths), *args)
    assert eager_s((2, 2)) == 64
    assert eager_s((2, 1)) == shortest_step_s(4, [2, 2], *args) == 45


def test_1f1b_and_gpipe_are_eager_1f1b_of_their_depths():
    for p, m in itertools.product((1, 2, 4), (1, 3, 8)):
        eager = lambda depths, p=p, m=m: schedule("eager_1f1b", p, m, in_flight=depths)
        assert eager(range(p, 0, -1)) == schedule("1f1b", p, m)
        assert eager([m] * p) == schedule("gpipe", p, m)


# ---- the clock -----------------------------------------------------------------------------------


def tick(schedules, seconds, transfer):
    """End of every task, from a clock that ticks: whole numbers of ticks, no event queue.

    `seconds` of each kind, for each virtual stage. What a task waits for is looked up by place in
    the model, not by `sender` and `receiver`.
    """
    p = len(schedules)
    last = max(task.chunk for task in schedules[0]) * p + p - 1
    done: dict[tuple[int, Task], int] = {}
    arrived: dict[tuple[str, int, int], int] = {}  # kind, microbatch, virtual stage
    queues = {(a, b): [] for a in range(p) for b in ((a + 1) % p, (a - 1) % p)}
    on_link: dict[tuple[int, int], tuple] = {}
    position, running = [0] * p, [None] * p
    for now in itertools.count():
        changed = True
        while changed:  # tasks and transfers of no duration end in the tick in which they start
            changed = False
            for s, tasks in enumerate(schedules):
                if running[s] and running[s][1] == now:
                    task, running[s] = running[s][0], None
                    done[s, task] = now
                    here = task.chunk * p + s
                    to = {"F": here + 1, "B": here - 1, "W": -1}[task.kind]
                    if 0 <= to <= last:
                        queues[s, to % p].append((task.kind, task.microbatch, to))
                    changed = True
                if not running[s] and position[s] < len(tasks):
                    task = tasks[position[s]]
                    here = task.chunk * p + s
                    free = task.kind == "W" or here == {"F": 0, "B": last}[task.kind]
                    if free or arrived.get((task.kind, task.microbatch, here), now + 1) <= now:
                        running[s] = task, now + seconds[task.kind][here]
                        position[s] += 1
                        changed = True
            for (a, b), queue in queues.items():
                if (a, b) in on_link and on_link[a, b][1] == now:
                    arrived[on_link.pop((a, b))[0]] = now
                    changed = True
                if (a, b) not in on_link and queue:
                    way = transfer[a][0] if queue[0][0] == "F" else transfer[b][1]
                    on_link[a, b] = queue.pop(0), now + way
                    changed = True
        if len(done) == sum(map(len, schedules)):
            return done


@settings(max_examples=250, deadline=None)
@given(case=sizes(most_microbatches=6), data=st.data())
def test_simulation_agrees_with_a_ticking_clock(case, data):
    name, p, num_microbatches, more = case
    schedules = schedule(name, p, num_microbatches, **more)
    num_chunks = more.get("num_chunks", 1)
    ticks = lambda low, count: data.draw(
        st.lists(st.integers(low, 5), min_size=count, max_size=count)
    )
    seconds = {kind: ticks(1, p * num_chunks) for kind in "FBW"}
    num_links = p - (num_chunks == 1)
    transfer = list(zip(ticks(0, num_links), ticks(0, num_links), strict=True))
    simulation = simulate(schedules, seconds["F"], seconds["B"], transfer, weight_s=seconds["W"])
    expected = tick(schedules, seconds, transfer)
    assert {(e.stage, e.task): e.end_s for e in simulation.events} == expected
    assert simulation.step_time_s == max(expected.values())
    for s in range(p):
        busy = sum(seconds[t.kind][t.chunk * p + s] for t in schedules[s])
        assert simulation.bubbles[s] == pytest.approx(1 - busy / simulation.step_time_s)
        assert simulation.finish_s(s) == max(end for (i, _), end in expected.items() if i == s)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_tasks_agrees_with_a_ticking_clock(data):
    """Also one that no schedule of ours has."""
    pick = lambda: data.draw(st.sampled_from(ORDERS))
    schedules = [pick(), pick()]
    seconds = {kind: data.draw(st.tuples(*[st.integers(1, 4)] * 2)) for kind in "FBW"}
    transfer = [data.draw(st.tuples(*[st.integers(0, 3)] * 2))]
    try:
        simulation = simulate(
            schedules, seconds["F"], seconds["B"], transfer, weight_s=seconds["W"]
        )
    except AssertionError:
        return  # waits forever
    expected = tick(schedules, seconds, transfer)
    assert {(e.stage, e.task): e.end_s for e in simulation.events} == expected


ORDERS = orders(3, 3, kinds="FBW")


def test_a_link_carries_one_transfer_at_a_time():
    # Three forwards end at 1, 2, 3; transfers of 4 end at 5, 9, 13, not at 5, 6, 7.
    simulation = simulate(schedule("gpipe", 2, 3), [1.0, 1.0], [1.0, 1.0], [(4.0, 0.0)])
    starts = [e.start_s for e in simulation.events if e.stage == 1 and e.task.kind == "F"]
    assert starts == [5.0, 9.0, 13.0]


def test_both_directions_of_a_link_are_independent():
    schedules = schedule("1f1b", 2, 8)
    one_way = simulate(schedules, [1.0, 1.0], [1.0, 1.0], [(2.0, 0.0)])
    both = simulate(schedules, [1.0, 1.0], [1.0, 1.0], [(2.0, 2.0)])
    assert both.step_time_s < one_way.step_time_s + 8 * 2.0


def test_1f1b_hides_transfers_only_behind_more_microbatches():
    """With one microbatch nothing overlaps: a step is all work plus all transfers."""
    simulation = simulate(schedule("1f1b", 3, 1), [1.0] * 3, [2.0] * 3, [(5.0, 7.0)] * 2)
    assert simulation.step_time_s == 3 * 3 + 2 * (5 + 7)


def test_picture_of_unequal_stages():
    simulation = simulate(schedule("1f1b", 2, 2), [1, 2], [2, 4], [(1, 1)])
    assert picture(simulation).splitlines() == [
        "0 |F0F1..............B0--........B1--|",
        "1 |....F0--B0------F1--B1------......|",
    ]


def test_two_stages_of_two_chunks_share_one_link_each_way():
    """Stage 1 sends results of its first chunk on to stage 0, and gradients back to it."""
    schedules = schedule("interleaved_1f1b", 2, 2, num_chunks=2)
    simulation = simulate(schedules, [1] * 4, [1] * 4, [(0, 0), (5, 0)])
    start_s = {(e.stage, str(e.task)): e.start_s for e in simulation.events}
    # F0 and F1 leave stage 1 at 2 and 3; the second transfer waits for the first.
    assert (start_s[0, "F0.1"], start_s[0, "F1.1"]) == (7, 12)


def test_picture_of_chunks_and_weights():
    simulation = simulate(
        schedule("interleaved_1f1b", 2, 2, num_chunks=2), [1] * 4, [1] * 4, [(0, 0)] * 2
    )
    assert picture(simulation).splitlines() == [
        "0 |F0--F1--F0.1F1.1....B0.1....B1.1B0--B1--|",
        "1 |....F0--F1--F0.1B0.1F1.1B1.1B0--B1--....|",
    ]
