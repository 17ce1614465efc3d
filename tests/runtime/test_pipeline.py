"""A step equals one plain `jax.grad` step on one device, however it is cut over devices.

With beta1 = 0 and no clipping, AdamW's first moment is the gradient, so the state after a step
shows every gradient of it.
"""

import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from holmesjax.config import KernelsConfig, ModelConfig, OptimizerConfig
from holmesjax.models import transformer
from holmesjax.optimizers.adamw import make_optimizer
from holmesjax.parallel.mesh import build_meshes
from holmesjax.plan.plan import EMBED, HEAD, Plan, StagePlan, block_name
from holmesjax.planner.planner import make_plan
from holmesjax.planner.problem import split_chunks
from holmesjax.planner.stage_layouts import Mesh
from holmesjax.runtime import microbatch
from holmesjax.runtime.pipeline import (
    OneStage,
    Pipeline,
    in_one_process,
    local_targets,
    make_runner,
)
from holmesjax.runtime.programs import (
    Compiler,
    compile_stages,
    compile_whole_step,
    submit_total_loss,
)
from holmesjax.runtime.stage import Stage
from holmesjax.runtime.timeline import Clock
from holmesjax.transport.local import LocalTransport
from tests.clusters import make_cluster, make_config, make_topology

NUM_LAYERS, MICROBATCH, SEED, NUM_STEPS = 4, 4, 3, 3
SPLITS = [(4,), (3, 1), (2, 1, 1), (1, 1, 1, 1)]  # equal splits are in the tests below
# A large epsilon: dividing by the root of a second moment near zero would magnify roundings.
SMOOTH = OptimizerConfig(learning_rate=1e-2, beta1=0.0, epsilon=1e-3, clip_norm=None)
PLAIN = KernelsConfig(attention="reference", cross_entropy="reference")
RTOL = 1e-5  # of the norm of each array: sums in another order, in float32

# Every split with data and tensor, one of them or both; some with tied embeddings, some without.
CASES = [
    pytest.param(split, data, tensor, (i + data + tensor) % 2 == 0, id=f"{split}-d{data}-t{tensor}")
    for (i, split), (data, tensor) in itertools.product(enumerate(SPLITS), ((1, 2), (2, 1), (2, 2)))
    if len(split) * data * tensor <= 8
]


def make_model(**changes) -> ModelConfig:
    sizes = {"num_layers": NUM_LAYERS, "width": 32, "num_heads": 4, "context_length": 16}
    return ModelConfig(**{**sizes, **changes})


def hand_made_plan(
    split,
    data,
    tensor,
    *,
    fsdp=1,
    context=1,
    schedule="1f1b",
    microbatches=1,
    remat="none",
    chunks=1,
    in_flight=(),
) -> Plan:
    """Stages on consecutive devices; `data` to `context` are one number, or one for each stage."""
    blocks = iter(block_name(i) for i in range(sum(split)))
    shares = [split_chunks(count, chunks) for count in split]
    names = [[[] for _ in range(chunks)] for _ in split]
    for c, s in itertools.product(range(chunks), range(len(split))):
        names[s][c] = [next(blocks) for _ in range(shares[s][c])]
    names[0][0].insert(0, EMBED)
    names[-1][-1].append(HEAD)
    of_each = lambda size: [size] * len(split) if isinstance(size, int) else size
    sizes = zip(*map(of_each, (data, fsdp, tensor, context)), strict=True)
    stages, start = [], 0
    for i, (layers, size) in enumerate(zip(names, sizes, strict=True)):
        mesh = Mesh(*size).sizes
        stop = start + math.prod(mesh.values())
        stages.append(
            StagePlan(
                cluster=f"c{i}",
                nodes=(f"c{i}-0",),
                chunks=tuple(map(tuple, layers)),
                devices=tuple(range(start, stop)),
                mesh=mesh,
                fabrics={},
                memory_bytes={},
                seconds={},
            )
        )
        start = stop
    return Plan(
        topology="test",
        topology_hash="",
        stages=tuple(stages),
        global_batch=MICROBATCH * microbatches,
        microbatches=microbatches,
        schedule=schedule,
        in_flight=in_flight,
        activation_checkpointing=remat,
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )


def make_stages(
    model, plan, *, config=SMOOTH, dtype="float32", mask=False, kernels=PLAIN
) -> list[Stage]:
    meshes = build_meshes(plan, jax.devices())
    return [
        Stage(
            model=model,
            plan=plan,
            index=i,
            mesh=meshes[s],
            optimizer=make_optimizer(config, 100),
            compute_dtype=dtype,
            clip_norm=config.clip_norm,
            mask_documents=mask,
            kernels=kernels,
        )
        for i, (s, _) in enumerate(plan.chunks)
    ]


@functools.cache
def compiled_pipeline(split, data, tensor, tied):
    """Those for several microbatches, which run any number of them in any of two schedules."""
    model = make_model(tied_embeddings=tied)
    return compile_stages(make_stages(model, hand_made_plan(split, data, tensor, microbatches=2)))


def with_microbatches(programs, plan):
    """A pipeline of programs that were compiled for another number of microbatches.

    Only the sum of the losses knows that number.
    """
    with Compiler() as compiler:
        other = dataclasses.replace(programs[-1].stage, plan=plan)
        total_loss = submit_total_loss(other, compiler).result()
    last = dataclasses.replace(programs[-1], total_loss=total_loss)
    return in_one_process(plan, [*programs[:-1], last])


def random_inputs(num_sequences, step, ignored=False) -> dict[str, np.ndarray]:
    """With `ignored`, no target of the first microbatch counts, and few of some sequences."""
    rows = np.random.default_rng([SEED, step]).integers(
        256, size=(num_sequences, 17), dtype=np.int32
    )
    segment = np.repeat([[0, 1]], 8, axis=1) + np.zeros((num_sequences, 1), np.int32)
    target = rows[:, 1:].copy()
    if ignored:
        count_B = np.arange(num_sequences) * 7 % 16
        count_B[:MICROBATCH] = 0
        target[np.arange(16) >= count_B[:, None]] = -1
    return {"token_BL": rows[:, :-1], "target_BL": target, "segment_BL": np.int32(segment)}


def plain_loss(params, model, inputs, mask=False):
    """The whole model, one layer after the other, and the textbook cross-entropy."""
    position_L = jnp.arange(model.context_length)
    segment_BL = inputs["segment_BL"] if mask else None
    x = transformer.Embed(model).apply({"params": params[EMBED]}, inputs["token_BL"], position_L)
    for i in range(model.num_layers):
        x = transformer.Block(model).apply(
            {"params": params[block_name(i)]}, x, position_L, segment_BL
        )
    logits = transformer.Head(model).apply({"params": params[HEAD]}, x, params[EMBED]["token_VD"])
    log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(log_p, inputs["target_BL"][..., None], axis=-1)[..., 0]
    return -picked.mean(where=inputs["target_BL"] >= 0)


@functools.cache
def plain_steps(model, num_sequences, config=SMOOTH, mask=False, ignored=False, seed=SEED):
    """Losses, gradients and final parameters of NUM_STEPS steps on one device."""
    [stage] = make_stages(model, hand_made_plan((model.num_layers,), 1, 1), config=config)
    params = jax.tree.map(np.asarray, stage.init(seed).params)
    optimizer = make_optimizer(config, 100)
    opt_state = optimizer.init(params)
    losses, gradients = [], []
    loss_and_gradient = jax.jit(jax.value_and_grad(plain_loss), static_argnums=(1, 3))
    for step in range(NUM_STEPS):
        inputs = random_inputs(num_sequences, step, ignored)
        loss, gradient = loss_and_gradient(params, model, inputs, mask)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        gradients.append(jax.tree.map(np.asarray, gradient))
    return losses, gradients, params


def assert_near(got, want, rtol=RTOL, where=""):
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error <= rtol, f"{where}: relative error {error:.1e}"


def put(runner, inputs, **options):
    return runner.placer.place_all(inputs, **options)


def run_steps(runner, states, num_sequences, num_stages, ignored=False):
    """Yields the loss and the states after each step."""
    clock = Clock(num_stages)
    for step in range(NUM_STEPS):
        states, metrics = runner.train_step(
            states, put(runner, random_inputs(num_sequences, step, ignored)), clock.timeline()
        )
        yield float(metrics["loss"]), states
    clock.close()


def check_against_plain(
    runner, model, plan, config=SMOOTH, mask=False, rtol=RTOL, ignored=False, seed=SEED
):
    losses, gradients, params = plain_steps(model, plan.global_batch, config, mask, ignored, seed)
    steps = run_steps(runner, runner.init(seed), plan.global_batch, len(plan.stages), ignored)
    for step, (loss, states) in enumerate(steps):
        assert abs(loss - losses[step]) <= rtol * losses[step]
        for state in states:
            for layer, moments in state.opt_state.mu.items():
                for path, got in jax.tree_util.tree_leaves_with_path(moments):
                    want = functools.reduce(lambda t, k: t[k.key], path, gradients[step][layer])
                    assert_near(got, want, rtol, f"step {step} {layer} {path}")
    for state in states:
        for layer, arrays in state.params.items():
            for path, got in jax.tree_util.tree_leaves_with_path(arrays):
                want = functools.reduce(lambda t, k: t[k.key], path, params[layer])
                assert_near(got, want, rtol, f"{layer} {path}")


@pytest.mark.parametrize("split, data, tensor, tied", CASES)
def test_every_cut_equals_one_device(split, data, tensor, tied):
    model = make_model(tied_embeddings=tied)
    programs = compiled_pipeline(split, data, tensor, tied)
    for schedule, microbatches in itertools.product(("gpipe", "1f1b"), (1, 2, 4)):
        plan = hand_made_plan(split, data, tensor, schedule=schedule, microbatches=microbatches)
        check_against_plain(with_microbatches(programs, plan), model, plan)


SCHEDULES = {
    "eager": ((2, 1, 1), 2, 1, True, {"schedule": "eager_1f1b", "in_flight": (4, 3, 1)}),
    "interleaved": ((2, 2), 2, 1, True, {"schedule": "interleaved_1f1b", "chunks": 2}),
    "interleaved, uneven": ((3, 2), 1, 2, False, {"schedule": "interleaved_1f1b", "chunks": 2}),
    "zero bubble": ((3, 1), 2, 2, True, {"schedule": "zero_bubble"}),
    "zero bubble, deep": ((1, 2, 1), 1, 1, False, {"schedule": "zero_bubble"}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_one_device(name):
    split, data, tensor, tied, changes = SCHEDULES[name]
    model = make_model(tied_embeddings=tied, num_layers=sum(split))
    plan = hand_made_plan(split, data, tensor, microbatches=4, **changes)
    programs = compile_stages(make_stages(model, plan))
    check_against_plain(in_one_process(plan, programs), model, plan)


def random_plan(seed, model) -> Plan:
    """What the planner makes of random machines with up to eight devices, all left to it."""
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


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_planner_makes_is_read_back_and_equals_one_device(seed):
    model = make_model()
    plan = random_plan(seed, model)
    assert Plan.from_json(plan.to_json()) == plan
    runner = in_one_process(plan, compile_stages(make_stages(model, plan)))
    check_against_plain(runner, model, plan)


def test_random_plans_differ():
    plans = [random_plan(seed, make_model()) for seed in SEEDS]
    assert len({len(plan.stages) for plan in plans}) > 1
    assert max(sum(len(stage.devices) for stage in plan.stages) for plan in plans) > 2


def test_a_single_microbatch_needs_no_other_programs():
    model, plan = make_model(), hand_made_plan((3, 1), 2, 1, microbatches=1)
    first, last = compile_stages(make_stages(model, plan))
    assert first.forward is first.backward is first.gather is first.reduce is None
    assert last.first_forward is last.last_backward is None
    check_against_plain(in_one_process(plan, [first, last]), model, plan)


VARIANTS = {
    "gpt2": {"positions": "learned", "activation": "gelu", "norm": "layer_norm"},
    "llama": {"num_kv_heads": 2, "activation": "swiglu", "norm": "rms_norm"},
    "wide heads": {"head_dim": 16, "mlp_width": 40, "num_kv_heads": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model(variant):
    model = make_model(**VARIANTS[variant], tied_embeddings=True)
    plan = hand_made_plan((1, 3), 2, 2, microbatches=2)
    programs = compile_stages(make_stages(model, plan))
    check_against_plain(in_one_process(plan, programs), model, plan)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_moments_in_fewer_bits_are_rounded_alike_on_any_plan(kept):
    """Heads of one block; the table's rows and `down_FD` are blocks that devices share."""
    config = dataclasses.replace(SMOOTH, beta1=0.9, moments=kept)
    model = make_model(width=128, num_heads=2, tied_embeddings=True)
    plan = hand_made_plan((3, 1), 2, 1, fsdp=2, microbatches=1)
    programs = compile_stages(make_stages(model, plan, config=config))
    runner = in_one_process(plan, programs)
    *_, (_, states) = run_steps(runner, runner.init(SEED), plan.global_batch, len(plan.stages))
    _, _, params = plain_steps(model, plan.global_batch, config)
    for state in states:
        for layer, arrays in state.params.items():
            for path, got in jax.tree_util.tree_leaves_with_path(arrays):
                want = functools.reduce(lambda t, k: t[k.key], path, params[layer])
                # A gradient summed in another order rounds one number in ten thousand otherwise,
                # by 1 in 128 of it, or in int8 by some percent. Other noise: 2e-3; 6e-4.
                rtol = {"bfloat16": 1e-4, "int8": 3e-4}[kept]
                assert_near(got, want, rtol, f"{layer} {path}")


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_activation_checkpointing_changes_memory_only(remat):
    model, plan = make_model(), hand_made_plan((3, 1), 2, 1, microbatches=2, remat=remat)
    programs = compile_stages(make_stages(model, plan))
    check_against_plain(in_one_process(plan, programs), model, plan)


def saved_bytes(remat, dtype="float32"):
    [stage] = make_stages(make_model(), hand_made_plan((4,), 1, 1, remat=remat), dtype=dtype)
    batch = {name: x for name, x in random_inputs(MICROBATCH, 0).items() if name in stage.inputs}
    replicas = jax.eval_shape(stage.gather, stage.state_shapes.params)
    _, saved = jax.eval_shape(lambda r, b: microbatch.forward(stage, r, None, b), replicas, batch)
    return sum(x.size * x.dtype.itemsize for x in saved.arrays), saved, replicas


def test_checkpointing_keeps_less_and_never_the_parameters():
    none, dots, full = (saved_bytes(remat)[0] for remat in ("none", "dots", "full"))
    assert full < dots < none
    for remat, dtype in itertools.product(("none", "dots", "full"), ("float32", "bfloat16")):
        _, saved, replicas = saved_bytes(remat, dtype)
        shapes = {x.shape[1:] for x in jax.tree.leaves(replicas) if len(x.shape) > 2}
        assert shapes.isdisjoint(x.shape for x in saved.arrays)
        num_parameters = sum(number is not None for number in saved.parameter_of)
        assert num_parameters >= 4 * 6  # six matrices a block


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (4, 2), (1, 4)])
def test_stages_with_unequal_replicas(replicas):
    plan = hand_made_plan((2, 2), replicas, 1, microbatches=2)
    model = make_model(tied_embeddings=True)
    programs = compile_stages(make_stages(model, plan))
    check_against_plain(in_one_process(plan, programs), model, plan)


@pytest.mark.parametrize("data, tensor, microbatches", [(1, 1, 1), (2, 2, 2), (2, 1, 4), (1, 4, 1)])
def test_one_stage_in_one_program(data, tensor, microbatches):
    model = make_model(tied_embeddings=True)
    plan = hand_made_plan((4,), data, tensor, microbatches=microbatches)
    [stage] = make_stages(model, plan)
    check_against_plain(OneStage(compile_whole_step(stage)), model, plan)


def test_documents_are_masked_on_every_stage():
    model, plan = make_model(), hand_made_plan((2, 2), 2, 1, microbatches=2)
    programs = compile_stages(make_stages(model, plan, mask=True))
    check_against_plain(in_one_process(plan, programs), model, plan, mask=True)
    masked, open_ = (plain_steps(model, plan.global_batch, mask=mask)[0] for mask in (True, False))
    assert abs(masked[0] - open_[0]) > 1e-4  # the mask does something


@pytest.mark.parametrize(
    "fsdp, context, remat, tied", [(1, 2, "dots", True), (2, 1, "none", False)]
)
def test_a_loss_from_a_few_logits_at_a_time_is_the_same(fsdp, context, remat, tied):
    model = make_model(num_layers=2, width=64, num_kv_heads=2, tied_embeddings=tied)
    plan = hand_made_plan((2,), 2, 2, fsdp=fsdp, context=context, remat=remat)
    kernels = KernelsConfig(cross_entropy="chunked")
    [stage] = make_stages(model, plan, mask=True, kernels=kernels)
    # Of other initial values one gradient is a small difference of large numbers: off by 1.5e-5.
    check_against_plain(OneStage(compile_whole_step(stage)), model, plan, mask=True, seed=4)


def test_bfloat16_computes_near_and_accumulates_in_float32():
    """bfloat16 has 8 bits: a product of depth 4 layers may be off by a few of its roundings."""
    model, plan = make_model(), hand_made_plan((2, 2), 2, 2, microbatches=4)
    programs = compile_stages(make_stages(model, plan, dtype="bfloat16"))
    runner = in_one_process(plan, programs)
    [loss, *_], [gradient, *_], _ = plain_steps(model, plan.global_batch)
    got, states = next(run_steps(runner, runner.init(SEED), plan.global_batch, 2))
    assert abs(got - loss) < 2**-8 * loss
    for state in states:
        leaves = jax.tree_util.tree_leaves_with_path(state.opt_state.mu)
        for path, moment in leaves:
            assert moment.dtype == np.float32
            want = functools.reduce(lambda tree, k: tree[k.key], path, gradient)
            assert_near(moment, want, 2**-4, str(path))
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.params))


UNROUNDED = {
    "one stage": {"split": (4,)},
    "checkpoints": {"split": (3, 1), "remat": "full"},
    "split backward": {"split": (3, 1), "schedule": "zero_bubble"},
    "fsdp": {"split": (4,), "fsdp": 2, "remat": "dots"},
}


@pytest.mark.parametrize("name", UNROUNDED)
@pytest.mark.parametrize("cross_entropy", ["reference", "chunked"])
def test_gradients_of_weights_are_never_rounded_to_bfloat16(name, cross_entropy):
    """Those of one microbatch, before any sum: rounded, all of their numbers would be bfloat16."""
    plan = hand_made_plan(**{"data": 1, "tensor": 1} | UNROUNDED[name])
    model = make_model(tied_embeddings=cross_entropy == "chunked", positions="learned")
    kernels = dataclasses.replace(PLAIN, cross_entropy=cross_entropy)
    runner = make_runner(plan, make_stages(model, plan, dtype="bfloat16", kernels=kernels))
    _, states = next(run_steps(runner, runner.init(SEED), plan.global_batch, len(plan.stages)))
    for state in states:
        for path, moment in jax.tree_util.tree_leaves_with_path(state.opt_state.mu):
            gradient = np.asarray(moment)
            gradient = gradient[gradient != 0]  # rows of tokens that did not come have none
            rounded = gradient.astype("bfloat16").astype(np.float32)
            # Rows of tokens that came once are bfloat16, and some sums of a few such numbers.
            assert np.mean(gradient == rounded) < 0.97, path


@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_clipping_by_the_norm_over_all_stages(clip_norm):
    """Against optax's own clipping of the whole tree."""
    config = OptimizerConfig(learning_rate=1e-2, beta1=0.0, epsilon=1e-3, clip_norm=clip_norm)
    model, plan = make_model(tied_embeddings=True), hand_made_plan((3, 1), 2, 1, microbatches=2)
    _, [gradient, *_], _ = plain_steps(model, plan.global_batch)
    norm = float(optax.tree_utils.tree_norm(gradient))
    clipped, _ = optax.clip_by_global_norm(clip_norm).update(gradient, optax.EmptyState())
    runner = in_one_process(plan, compile_stages(make_stages(model, plan, config=config)))
    clock = Clock(2)
    states, metrics = runner.train_step(
        runner.init(SEED), put(runner, random_inputs(plan.global_batch, 0)), clock.timeline()
    )
    clock.close()
    assert abs(float(metrics["grad_norm"]) - norm) < RTOL * norm
    for state in states:
        for path, moment in jax.tree_util.tree_leaves_with_path(state.opt_state.mu):
            want = functools.reduce(lambda tree, k: tree[k.key], path, clipped)
            assert_near(moment, want, RTOL, str(path))


def test_later_stages_send_over_data_while_there_is_nothing_else_to_do():
    """They gather before a microbatch can come, and reduce when the last gradient has left."""
    model, plan = make_model(), hand_made_plan((3, 1), 2, 1, microbatches=2)
    first, last = compile_stages(make_stages(model, plan))
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
    transport = Noting(local_targets([first.stage, last.stage]))
    runner = Pipeline(plan, [first, last], transport)
    clock = Clock(2)
    runner.train_step(
        runner.init(SEED), put(runner, random_inputs(plan.global_batch, 0)), clock.timeline()
    )
    clock.close()
    assert order[:2] == ["gather", "forward"]
    tasks = [what for what in order if not what.startswith("offer norms")]
    assert tasks[-3:] == ["backward", "offer B1 of microbatch 1", "reduce"]
    assert order.count("reduce") == 1
    assert order[-2:] == ["offer norms to 0 of microbatch 0", "offer norms from 1 of microbatch 0"]


class Late(LocalTransport):
    """What is offered is not there for the first few times that somebody looks."""

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
    model = make_model()
    plan = hand_made_plan((3, 1), 1, 1, microbatches=4, schedule="zero_bubble")
    programs = compile_stages(make_stages(model, plan))
    transport = Late(local_targets([p.stage for p in programs]))
    with monkeypatch.context() as patch:
        for mesh in {p.stage.mesh for p in programs}:  # where a mesh of an earlier test keeps it
            patch.setitem(vars(mesh), "is_multi_process", shared)
        runner = Pipeline(plan, programs, transport)
    watched = Watched()
    runner.train_step(runner.init(SEED), put(runner, random_inputs(plan.global_batch, 0)), watched)
    ran = [[(k, m) for s, k, m in watched.tasks if s == stage and k != "U"] for stage in (0, 1)]
    planned = [[(task.kind, task.microbatch) for task in tasks] for tasks in plan.tasks()]
    assert (ran == planned) == shared
    assert list(map(sorted, ran)) == list(map(sorted, planned))


def test_a_step_that_is_not_finite_changes_nothing_on_any_stage():
    model, plan = make_model(), hand_made_plan((3, 1), 2, 1)
    runner = in_one_process(plan, compile_stages(make_stages(model, plan)))
    states = runner.init(SEED)
    down = states[0].params["block_001"]["down_FD"]  # poison one stage; both must skip
    poisoned = jax.device_put(np.full(down.shape, np.nan, np.float32), down.sharding)
    states[0].params["block_001"]["down_FD"] = poisoned
    before = jax.tree.map(np.asarray, states)
    clock = Clock(2)
    states, metrics = runner.train_step(
        states, put(runner, random_inputs(plan.global_batch, 0)), clock.timeline()
    )
    clock.close()
    assert bool(metrics["skipped"])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(states), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def test_every_plan_starts_from_the_same_parameters():
    model = make_model(tied_embeddings=True)
    [whole] = make_stages(model, hand_made_plan((4,), 1, 1))
    want = whole.init(SEED).params
    plan = hand_made_plan((1, 2, 1), 1, 2)
    for state in in_one_process(plan, compile_stages(make_stages(model, plan))).init(SEED):
        for path, got in jax.tree_util.tree_leaves_with_path(state.params):
            wanted = functools.reduce(lambda tree, k: tree[k.key], path, want)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_evaluation_is_the_loss_and_changes_nothing():
    model, plan = make_model(), hand_made_plan((3, 1), 2, 2, microbatches=2)
    runner = in_one_process(plan, compile_stages(make_stages(model, plan)))
    states = runner.init(SEED)
    [want, *_], _, _ = plain_steps(model, plan.global_batch)
    for _ in range(2):
        inputs = random_inputs(plan.global_batch, 0)
        got = (
            float(runner.evaluate(states, put(runner, inputs, trains=False)))
            / inputs["target_BL"].size
        )
        assert abs(got - want) < RTOL * want


CHUNKED = dataclasses.replace(PLAIN, cross_entropy="chunked")
# One program, several, a split backward, and sequences that devices share; some in chunks.
UNEQUAL = {
    "one stage": (hand_made_plan((4,), 2, 1, microbatches=3), PLAIN),
    "one stage, in chunks": (hand_made_plan((4,), 2, 1, microbatches=3), CHUNKED),
    "1f1b": (hand_made_plan((3, 1), (1, 2), 1, microbatches=3), PLAIN),
    "zero bubble": (hand_made_plan((3, 1), 2, 2, microbatches=3, schedule="zero_bubble"), CHUNKED),
    "fsdp": (hand_made_plan((3, 1), 1, 1, fsdp=2, context=2, microbatches=3), PLAIN),
    "fsdp, in chunks": (hand_made_plan((4,), 2, 1, fsdp=2, context=2, microbatches=3), CHUNKED),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_every_token_that_counts_weighs_the_same(name):
    """Microbatches and replicas have unequal numbers of them, one microbatch none."""
    plan, kernels = UNEQUAL[name]
    model = make_model(tied_embeddings="chunks" not in name)
    runner = make_runner(plan, make_stages(model, plan, kernels=kernels))
    check_against_plain(runner, model, plan, ignored=True)
    inputs = random_inputs(plan.global_batch, 0, ignored=True)
    [want, *_], _, _ = plain_steps(model, plan.global_batch, ignored=True)
    got = float(
        runner.evaluate(runner.init(SEED), put(runner, inputs, trains=False))
    ) / np.count_nonzero(inputs["target_BL"] >= 0)
    assert abs(got - want) < RTOL * want


@pytest.mark.parametrize("split", [(4,), (3, 1)])
def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient(split):
    model, plan = make_model(), hand_made_plan(split, 2, 1, microbatches=2)
    runner = make_runner(plan, make_stages(model, plan))
    inputs = random_inputs(plan.global_batch, 0)
    inputs["target_BL"] = np.full_like(inputs["target_BL"], -1)
    states, clock = runner.init(SEED), Clock(len(split))
    assert float(runner.evaluate(states, put(runner, inputs, trains=False))) == 0
    _, metrics = runner.train_step(states, put(runner, inputs), clock.timeline())
    clock.close()
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert not bool(metrics["skipped"])


class Watched:
    """In place of a timeline: what its clock would wait for, some time after it was dispatched."""

    def __init__(self):
        self.arrays, self.tasks = [], []

    def watch(self, stage, kind, microbatch, arrived, done):
        self.tasks.append((stage, kind, microbatch))
        self.arrays += [(kind, x) for x in (arrived, done) if x is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_a_clock_waits_for_is_not_donated(schedule):
    model, plan = make_model(), hand_made_plan((3, 1), 1, 1, microbatches=3, schedule=schedule)
    runner, watched = in_one_process(plan, compile_stages(make_stages(model, plan))), Watched()
    states = runner.init(SEED)
    for step in range(2):
        states, _ = runner.train_step(
            states, put(runner, random_inputs(plan.global_batch, step)), watched
        )
    assert {kind for kind, x in watched.arrays if x.is_deleted()} == set()
    assert {kind for kind, _ in watched.arrays} >= set(plan.tasks()[0][0].kind) | {"B", "U"}


def test_what_crosses_the_link_is_counted():
    model, plan = make_model(), hand_made_plan((3, 1), 2, 2, microbatches=2)
    runner = in_one_process(plan, compile_stages(make_stages(model, plan)))
    clock = Clock(2)
    runner.train_step(
        runner.init(SEED), put(runner, random_inputs(plan.global_batch, 0)), clock.timeline()
    )
    clock.close()
    activations = plan.global_batch * model.context_length * model.width * 4
    assert runner.take_link_bytes() == {"c0 -> c1": activations, "c1 -> c0": activations}
