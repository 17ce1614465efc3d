"""Plans made by hand, the chunks of a small model in them, and their first step."""

import itertools
import math

import jax

from holmesjax.config import KernelsConfig, ModelConfig, OptimizerConfig
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name
from holmesjax.models.layer import statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.parallel.mesh import build_meshes
from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.planner.layer_ranges import split_chunks
from holmesjax.planner.stage_layouts import MeshShape
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.timeline import Clock
from tests.one_device import MICROBATCH, SEED, step_inputs

NUM_LAYERS = 4


# A large epsilon: dividing by the root of a second moment near zero would magnify roundings.
SMOOTH = OptimizerConfig(learning_rate=1e-2, beta1=0.0, epsilon=1e-3, clip_norm=None)


PLAIN = KernelsConfig(attention="reference", cross_entropy="reference")


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
    expert=1,
    schedule="1f1b",
    microbatches=1,
    checkpointing="none",
    recomputed=(),
    chunks=1,
    in_flight=(),
    sequence_parallel=False,
) -> Plan:
    """Stages on consecutive devices; `data` to `expert` are one number, or one for each stage."""
    blocks = iter(block_name(i) for i in range(sum(split)))
    shares = [split_chunks(count, chunks) for count in split]
    names = [[[] for _ in range(chunks)] for _ in split]
    for c, s in itertools.product(range(chunks), range(len(split))):
        names[s][c] = [next(blocks) for _ in range(shares[s][c])]
    names[0][0].insert(0, EMBED)
    names[-1][-1].append(HEAD)
    of_each = lambda size: [size] * len(split) if isinstance(size, int) else size
    sizes = zip(*map(of_each, (data, fsdp, tensor, context, expert)), strict=True)
    stages, start = [], 0
    for i, (of_chunks, size) in enumerate(zip(names, sizes, strict=True)):
        *cuts, of_experts = size
        mesh = MeshShape(*cuts, expert=of_experts).sizes
        stop = start + math.prod(mesh.values())
        stages.append(
            StagePlan(
                cluster=f"c{i}",
                nodes=(f"c{i}-0",),
                chunks=tuple(map(tuple, of_chunks)),
                devices=tuple(range(start, stop)),
                mesh=mesh,
                fabrics={},
                memory_bytes={},
                seconds={},
                sequence_parallel=sequence_parallel and mesh[Axis.TENSOR] > 1,
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
        activation_checkpointing=checkpointing,
        recomputed_layers=recomputed,
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )


def make_chunks(
    model, plan, *, config=SMOOTH, dtype="float32", mask=False, kernels=PLAIN
) -> list[Chunk]:
    meshes = build_meshes(plan, jax.devices())
    return [
        Chunk(
            model=model,
            plan=plan,
            index=i,
            mesh=meshes[s],
            optimizer=make_optimizer(config, 100, statements(model)),
            compute_dtype=dtype,
            clip_norm=config.clip_norm,
            ema_decay=config.ema_decay,
            mask_documents=mask,
            kernels=kernels,
        )
        for i, (s, _) in enumerate(plan.chunks)
    ]


def put(runner, inputs, **options):
    return runner.placer.place_all(inputs, **options)


def train_step(runner, states, inputs, **options):
    """The states after a step, and what it reports.

    Args:
      inputs: of all sequences, on the host.
      options: of the placer.
    """
    with Clock(len(states)) as clock:
        return runner.train_step(states, put(runner, inputs, **options), clock.timeline())


def first_step(runner, plan):
    """The loss, and the states after it."""
    states, metrics = train_step(runner, runner.init(SEED), step_inputs(plan.global_batch, 0))
    return float(metrics["loss"]), states


VARIANTS = {
    "gpt2": {"positions": "learned", "activation": "gelu", "norm": "layer_norm"},
    "llama": {"num_kv_heads": 2, "activation": "swiglu", "norm": "rms_norm"},
    "wide heads": {"head_dim": 16, "mlp_width": 40, "num_kv_heads": 2},
}
