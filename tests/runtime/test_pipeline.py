"""How a pipeline runs its tasks, what it keeps and counts, and where nothing can be summed.

Whole steps are compared with one device in `tests/runtime/test_whole_steps.py`. With beta1 = 0 and
no clipping, AdamW's first moment is the gradient, so the state after a step shows every gradient.
"""

import dataclasses
import functools
import itertools
import random

import jax
import numpy as np
import pytest

from holmesjax.plan.plan import Plan
from holmesjax.planner.planner import make_plan
from holmesjax.runtime import compilation, microbatch, pipeline, whole_step
from holmesjax.runtime.compilation import compile_chunks, compile_whole_step
from holmesjax.runtime.in_flight import MOST, TasksAhead
from holmesjax.runtime.pipeline import Pipeline, in_one_process, make_runner
from holmesjax.runtime.stage_crossings import local_targets
from holmesjax.runtime.whole_step import WholeStep
from holmesjax.transport.local import LocalTransport
from tests.clusters import make_cluster, make_config, make_topology
from tests.hand_made_plans import (
    PLAIN,
    SMOOTH,
    first_step,
    hand_made_plan,
    make_chunks,
    make_model,
    put,
    train_step,
)
from tests.one_device import MICROBATCH, SEED, check, check_gradient, pairs, step_inputs, steps

# One worker runs them all: they share what is made once.
pytestmark = pytest.mark.xdist_group("pipeline")


def random_plan(seed, model) -> Plan:
    """Plans of random machines with up to eight devices, all left to the planner."""
    generator = random.Random(seed)
    clusters, left = [], 8
    for name in ("a", "b", "c")[: generator.randint(1, 3)]:
        counts = tuple(generator.choice((1, 2)) for _ in range(generator.randint(1, 2)))
        if sum(counts) <= left:
            left -= sum(counts)
            speed = generator.choice((1.0, 0.5, 0.3)) * 1e-6  # so slow that all devices pay
            fabric = generator.choice(("infiniband", "roce"))
            clusters.append(make_cluster(name, fabric, counts, speed=speed))
    sizes = dataclasses.asdict(model)
    batch = generator.choice((4, 8, 16))
    config = make_config(
        model=sizes, parallel={}, train={"global_batch": batch, "compute_dtype": "float32"}
    )
    topology = make_topology(*clusters, ethernet_bytes_per_s=generator.choice((1e6, 3e9)))
    return make_plan(config, topology)


SEEDS = [0, 5, 6, 7]  # one stage, three, two equal and two unequal ones


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.exhaustive) if n != 7 else n for n in SEEDS]
)
def test_what_the_planner_makes_is_read_back_and_equals_one_device(seed):
    model = make_model()
    plan = random_plan(seed, model)
    assert Plan.from_json(plan.to_json()) == plan
    runner = in_one_process(plan, compile_chunks(make_chunks(model, plan)))
    check(runner, plan, steps(model, SMOOTH, plan.global_batch))


def test_random_plans_differ():
    plans = [random_plan(seed, make_model()) for seed in SEEDS]
    assert len({len(plan.stages) for plan in plans}) > 1
    assert max(sum(len(stage.devices) for stage in plan.stages) for plan in plans) > 2


def saved_bytes(checkpointing, dtype="float32"):
    [chunk] = make_chunks(
        make_model(), hand_made_plan((4,), 1, 1, checkpointing=checkpointing), dtype=dtype
    )
    batch = {name: x for name, x in step_inputs(MICROBATCH, 0).items() if name in chunk.inputs}
    replicas = jax.eval_shape(chunk.gather, chunk.state_shapes.params)
    run = lambda r, b: microbatch.forward(chunk, chunk.state_shapes.fixed, r, None, b)
    *_, saved = jax.eval_shape(run, replicas, batch)
    return sum(x.size * x.dtype.itemsize for x in saved.arrays), saved, replicas


def test_checkpointing_keeps_less_and_never_the_parameters():
    none, dots, full = (saved_bytes(checkpointing)[0] for checkpointing in ("none", "dots", "full"))
    assert full < dots < none
    for checkpointing, dtype in itertools.product(
        ("none", "dots", "full"), ("float32", "bfloat16")
    ):
        _, saved, replicas = saved_bytes(checkpointing, dtype)
        shapes = {x.shape[1:] for x in jax.tree.leaves(replicas) if len(x.shape) > 2}
        assert shapes.isdisjoint(x.shape for x in saved.arrays)
        num_parameters = sum(number is not None for number in saved.parameter_of)
        assert num_parameters >= 4 * 6  # six matrices a block


def test_bfloat16_computes_near_and_accumulates_in_float32():
    """bfloat16 has 8 bits: a product of depth 4 layers may be off by a few of its roundings."""
    model = make_model(num_layers=2)
    plan = hand_made_plan((1, 1), 2, 2, microbatches=4)
    programs = compile_chunks(make_chunks(model, plan, dtype="bfloat16"))
    runner = in_one_process(plan, programs)
    [want, *_] = steps(model, SMOOTH, plan.global_batch)
    loss, states = first_step(runner, plan)
    assert abs(loss - want.loss) < 2**-8 * want.loss
    check_gradient(states, want.gradient, 2**-4)
    for state in states:
        kept = state.params, state.opt_state.mu
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(kept))


UNROUNDED = {
    "one stage": {"split": (2,)},
    "checkpoints": {"split": (1, 1), "checkpointing": "full"},
    "split backward": {"split": (1, 1), "schedule": "zero_bubble"},
    "fsdp": {"split": (2,), "fsdp": 2, "checkpointing": "dots"},
}
ORDINARY = {  # their marks
    ("checkpoints", "chunked"): [pytest.mark.one_version],
    ("split backward", "reference"): [pytest.mark.one_version],
    ("fsdp", "chunked"): [],
}


@pytest.mark.parametrize(
    "name, cross_entropy",
    [
        pytest.param(*case, marks=ORDINARY.get(case, [pytest.mark.exhaustive]))
        for case in itertools.product(UNROUNDED, ["reference", "chunked"])
    ],
)
def test_gradients_of_weights_are_never_rounded_to_bfloat16(name, cross_entropy):
    """Those of one microbatch, before any sum: rounded, all of their numbers would be bfloat16."""
    plan = hand_made_plan(**{"data": 1, "tensor": 1} | UNROUNDED[name])
    tied = cross_entropy == "chunked"
    model = make_model(num_layers=2, tied_embeddings=tied, positions="learned")
    kernels = dataclasses.replace(PLAIN, cross_entropy=cross_entropy)
    runner = make_runner(plan, make_chunks(model, plan, dtype="bfloat16", kernels=kernels))
    _, states = first_step(runner, plan)
    for state in states:
        for path, moment in jax.tree_util.tree_leaves_with_path(state.opt_state.mu):
            gradient = np.asarray(moment)
            gradient = gradient[gradient != 0]  # rows of tokens that did not come have none
            rounded = gradient.astype("bfloat16").astype(np.float32)
            # Rows of tokens that came once are bfloat16, and some sums of a few such numbers.
            assert np.mean(gradient == rounded) < 0.97, path


@functools.cache
def two_stages(schedule="1f1b"):
    """The plan and the programs of two stages, for tests that watch them run."""
    data, microbatches = (1, 4) if schedule == "zero_bubble" else (2, 2)
    plan = hand_made_plan((1, 1), data, 1, microbatches=microbatches, schedule=schedule)
    return plan, compile_chunks(make_chunks(make_model(num_layers=2), plan))


def test_later_stages_send_over_data_while_there_is_nothing_else_to_do():
    """They gather before a microbatch can come, and reduce when the last gradient has left."""
    plan, (first, last) = two_stages()
    order = []

    def noted(programs, *functions):
        note = lambda name, run: lambda *args: (order.append(name), run(*args))[1]
        table = {
            key: note(key.function, run) if key.function in functions else run
            for key, run in programs.table.items()
        }
        return dataclasses.replace(programs, table=table)

    class Noting(LocalTransport):
        def offer(self, key, array):
            order.append(f"offer {key}")
            super().offer(key, array)

    first, last = noted(first, "forward"), noted(last, "gather", "backward", "reduce")
    transport = Noting(local_targets([first.chunk, last.chunk]))
    runner = Pipeline(plan, [first, last], transport)
    train_step(runner, runner.init(SEED), step_inputs(plan.global_batch, 0))
    assert order[:2] == ["gather", "forward"]
    tasks = [what for what in order if not what.startswith("offer norms")]
    assert tasks[-3:] == ["backward", "offer B1 of microbatch 1", "reduce"]
    assert order.count("reduce") == 1
    assert order[-2:] == ["offer norms to 0 of microbatch 0", "offer norms from 1 of microbatch 0"]


class Late(LocalTransport):
    """Arrays that are offered are absent for the first few looks."""

    def __init__(self, *args):
        super().__init__(*args)
        self.generator, self.looks = random.Random(SEED), {}

    def arrived(self, key):
        self.looks.setdefault(key, self.generator.randrange(8))
        self.looks[key] -= super().arrived(key)
        return self.looks[key] < 0

    def wait(self, keys):
        while not any(self.arrived(key) for key in keys):
            pass


@pytest.mark.parametrize("shared", [True, False])
def test_stages_of_several_processes_run_their_tasks_in_the_order_of_the_schedule(
    shared, monkeypatch
):
    """In one process a W may come early; what a task gives is the same."""
    plan, programs = two_stages("zero_bubble")
    transport = Late(local_targets([p.chunk for p in programs]))
    with monkeypatch.context() as patch:
        for mesh in {p.chunk.mesh for p in programs}:  # where a mesh of an earlier test keeps it
            patch.setitem(vars(mesh), "is_multi_process", shared)
        runner = Pipeline(plan, programs, transport)
    watched = Watched()
    runner.train_step(runner.init(SEED), put(runner, step_inputs(plan.global_batch, 0)), watched)
    ran = [[(k, m) for s, k, m in watched.tasks if s == stage and k != "U"] for stage in (0, 1)]
    planned = [[(task.kind, task.microbatch) for task in tasks] for tasks in plan.tasks()]
    assert (ran == planned) == shared
    assert list(map(sorted, ran)) == list(map(sorted, planned))


def test_a_step_that_is_not_finite_changes_nothing_on_any_stage():
    plan, programs = two_stages()
    runner = in_one_process(plan, programs)
    states = runner.init(SEED)
    down = states[0].params["block_000"]["down_FD"]  # poison one stage; both must skip
    poisoned = jax.device_put(np.full(down.shape, np.nan, np.float32), down.sharding)
    states[0].params["block_000"]["down_FD"] = poisoned
    before = jax.tree.map(np.asarray, states)
    states, metrics = train_step(runner, states, step_inputs(plan.global_batch, 0))
    assert bool(metrics["skipped"])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(states), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def test_every_plan_starts_from_the_same_parameters():
    model = make_model(tied_embeddings=True)
    [whole] = make_chunks(model, hand_made_plan((4,), 1, 1))
    want = whole.init(SEED).params
    plan = hand_made_plan((1, 2, 1), 1, 2)
    for chunk in make_chunks(model, plan):
        for path, got, wanted in pairs(chunk.init(SEED).params, want):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted), str(path))


@pytest.mark.parametrize("split", [(1,), (1, 1)])
def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient(split):
    if len(split) == 1:
        plan = hand_made_plan(split, 2, 1, microbatches=2)
        runner = make_runner(plan, make_chunks(make_model(num_layers=1), plan))
    else:
        plan, programs = two_stages()
        runner = in_one_process(plan, programs)
    inputs = step_inputs(plan.global_batch, 0)
    inputs["target_BL"] = np.full_like(inputs["target_BL"], -1)
    states = runner.init(SEED)
    assert float(runner.evaluate(states, put(runner, inputs, trains=False))) == 0
    _, metrics = train_step(runner, states, inputs)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert not bool(metrics["skipped"])


class Watched:
    """In place of a timeline: what its clock would wait for, some time after it was dispatched."""

    def __init__(self):
        self.arrays, self.tasks = [], []

    def begin(self, stage, arrived=None):
        return [] if arrived is None else [arrived]

    def watch(self, stage, kind, microbatch, ready, done):
        self.tasks.append((stage, kind, microbatch))
        self.arrays += [(kind, x) for x in (*ready, done)]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_a_clock_waits_for_is_not_donated(schedule):
    plan, programs = two_stages(schedule)
    runner, watched = in_one_process(plan, programs), Watched()
    states = runner.init(SEED)
    for step in range(2):
        states, _ = runner.train_step(
            states, put(runner, step_inputs(plan.global_batch, step)), watched
        )
    assert {kind for kind, x in watched.arrays if x.is_deleted()} == set()
    assert {kind for kind, _ in watched.arrays} >= set(plan.tasks()[0][0].kind) | {"B", "U"}


class Slow(TasksAhead):
    """No task has ended before somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def is_full(self):
        return len(self._results) >= MOST

    def wait(self):
        super().wait()
        self._results.popleft()

    def add(self, result):
        super().add(result)
        self.most = max(self.most, len(self._results))


class EndingBetweenLooks(Slow):
    """All tasks end right after a look that has found the stage full."""

    def is_full(self):
        if super().is_full() and self.was_full:
            self._results.clear()
        self.was_full = super().is_full()
        return self.was_full

    was_full = False


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", None])
def test_no_stage_has_more_tasks_than_the_limit(schedule, monkeypatch):
    """In steps and validations; results are what they are without a limit. None: one stage."""
    split = (1,) if schedule is None else (1, 1)
    plan = hand_made_plan(split, 1, 1, microbatches=MOST + 2, schedule=schedule or "1f1b")
    chunks = make_chunks(make_model(num_layers=len(split)), plan)
    if schedule is None:
        make = functools.partial(WholeStep, compile_whole_step(chunks[0]))
    else:
        make = functools.partial(in_one_process, plan, compile_chunks(chunks))
    runners, made = [make()], []
    for kind in (Slow, EndingBetweenLooks):
        slow = lambda kind=kind: made.append(kind()) or made[-1]
        monkeypatch.setattr(pipeline, "TasksAhead", slow)
        monkeypatch.setattr(whole_step, "TasksAhead", slow)
        runners.append(make())
    results = []
    for runner in runners:
        loss, states = first_step(runner, plan)
        inputs = put(runner, step_inputs(plan.global_batch, 1), trains=False)
        sums = [float(runner.evaluate(states, inputs)) for _ in range(2)]
        results.append((loss, *sums))
    assert results[0] == results[1] == results[2]
    assert [tasks.most for tasks in made] == [MOST] * len(split) * 2


def test_what_crosses_the_link_is_counted():
    plan, programs = two_stages()
    runner, model = in_one_process(plan, programs), programs[0].chunk.model
    train_step(runner, runner.init(SEED), step_inputs(plan.global_batch, 0))
    activations = plan.global_batch * model.context_length * model.width * 4
    assert runner.take_link_bytes() == {"c0 -> c1": activations, "c1 -> c0": activations}


@pytest.mark.parametrize("recomputed, equal", [((2, 0), False), ((3, 0), True)])
def test_chunks_share_programs_only_where_the_same_layers_compute_again(recomputed, equal):
    sizes = {"schedule": "interleaved_1f1b", "chunks": 3, "microbatches": 2}
    plan = hand_made_plan((3, 3), 1, 1, checkpointing="full", recomputed=recomputed, **sizes)
    chunks = make_chunks(make_model(num_layers=6), plan)
    # The second and the third chunk of the first stage; the ends of the model have their own.
    second, third = (compilation._form(chunks[index]) for index in (2, 4))
    assert (second == third) == equal
