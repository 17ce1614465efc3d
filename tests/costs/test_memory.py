"""The memory of a stage against the arrays that JAX really keeps, and worked by hand."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from holmesjax.config import ExpertsConfig, Fp8Config, ModelConfig
from holmesjax.costs import memory
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.fp8 import weights_by_input
from holmesjax.layer_specs.model_layers import block_name
from holmesjax.models import ops
from holmesjax.models.activation_checkpointing import POLICIES
from holmesjax.models.layer import apply, param_shapes
from holmesjax.parallel import sharding
from holmesjax.runtime import microbatch
from holmesjax.runtime.compilation import compile_chunks, compile_whole_step
from holmesjax.runtime.microbatch import Residuals
from holmesjax.runtime.program_shapes import batch_shapes, replica_shapes
from holmesjax.runtime.programs import ProgramKey
from holmesjax.runtime.split_backward import split_backward
from tests.hand_made_plans import SMOOTH, VARIANTS, hand_made_plan, make_chunks, make_model
from tests.shapes import shape_of

SMALL = {"num_layers": 2, "width": 64, "num_heads": 4, "context_length": 48, "vocab_size": 96}
MODELS = {
    "gpt2": ModelConfig(**SMALL, positions="learned"),
    "llama": ModelConfig(
        **SMALL, num_kv_heads=2, mlp_width=160, activation="swiglu", norm="rms_norm"
    ),
    "norms on both sides": ModelConfig(
        **SMALL, num_kv_heads=2, activation="geglu", norm="rms_norm", norms="both", qk_norm="head"
    ),
    "norms after": ModelConfig(
        **SMALL, activation="swiglu", norm="rms_norm", norms="after", qk_norm="all_heads"
    ),
    "fp8": ModelConfig(
        **SMALL,
        num_kv_heads=2,
        mlp_width=160,
        activation="swiglu",
        norm="rms_norm",
        fp8=Fp8Config(),
    ),
    "fp8, norms after": ModelConfig(
        **SMALL, norm="rms_norm", norms="after", fp8=Fp8Config(scaling="current", exclude_down=True)
    ),
    "biases": ModelConfig(**SMALL, positions="learned", biases="all", attention_soft_cap=5.0),
}
SHAPE = shape_of(sequences=3)


@pytest.mark.parametrize("policy", ["none", "dots", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_residuals_are_those_that_jax_keeps(model, dtype, policy):
    sequences = 3
    layer = block_name(0)
    x_BLD = jnp.zeros((sequences, model.context_length, model.width), dtype)

    def run(params, x_BLD):
        return apply(layer, model, params, x_BLD, position_L=jnp.arange(model.context_length))[0]

    if policy in POLICIES:
        run = jax.checkpoint(run, policy=POLICIES[policy])

    def kept(params, x_BLD):
        return Residuals.of(jax.vjp(run, params, x_BLD)[1], params).arrays

    params = param_shapes(layer, model)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(dtype)), params)
    [kind] = kinds(model).blocks
    if names := [name for weights in weights_by_input(kind).values() for name in weights]:
        rows = {name: 2 if name == "out_HKD" else 1 for name in names}
        code = lambda name: jax.eval_shape(partial(ops.coded, num_in=rows[name]), params[name])
        codes = {name: code(name) for name in names}
        params["fp8"] = {**params.get("fp8", {}), "codes": codes}
    arrays = jax.tree.leaves(jax.eval_shape(kept, params, x_BLD))
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    stage = dataclasses.replace(SHAPE, dtype=dtype, checkpointing=policy)
    num_tokens = sequences * model.context_length
    # Statistics of norms and tables of angles are left out: 4% at this size, in bfloat16.
    predicted = num_tokens * memory.residual_bytes(model, kind, stage)
    assert predicted == pytest.approx(num_bytes, rel=0.04)


@pytest.mark.parametrize("policy", ["none", "dots", "full"])
@pytest.mark.parametrize("norms", ["before", "both"])
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("latent_width", [None, 32])
def test_residuals_of_experts_are_those_that_jax_keeps(latent_width, expert, factor, norms, policy):
    """Devices that share experts keep nothing of what experts have computed."""
    sizes = {"width": 96, "capacity_factor": factor, "latent_width": latent_width}
    experts = ExpertsConfig(count=8, active=2, **sizes)
    sizes = SMALL | {"activation": "swiglu", "norm": "rms_norm", "norms": norms}
    model = ModelConfig(**sizes, pattern=("expert_block",), experts=experts)
    cuts = {"fsdp": 2 // expert, "expert": expert}
    plan = hand_made_plan((1, 1), 1, 1, **cuts, checkpointing=policy)
    chunk, _ = make_chunks(model, plan, dtype="bfloat16")
    run = lambda fixed, params, batch: microbatch.forward(chunk, fixed, params, None, batch)[-1]
    of_stage = chunk.state_shapes.fixed, replica_shapes(chunk), batch_shapes(chunk)
    arrays = jax.eval_shape(run, *of_stage).arrays
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    [kind] = kinds(model).blocks
    stage = dataclasses.replace(SHAPE, **cuts, dtype="bfloat16", checkpointing=policy)
    num_tokens = chunk.microbatch_size * model.context_length
    # A block of experts has 8 rows here: slots are 29% more than choices.
    predicted = num_tokens * memory.residual_bytes(model, kind, stage)
    assert predicted == pytest.approx(num_bytes, rel=0.04)


def test_whole_gradients_of_shared_experts_wait_between_the_parts_of_a_backward():
    """They are cut over `expert`, and not over `fsdp`."""
    experts = ExpertsConfig(count=8, active=2, width=96)
    model = ModelConfig(
        **SMALL, activation="swiglu", norm="rms_norm", pattern=("expert_block",), experts=experts
    )
    cuts = {"fsdp": 2, "expert": 2}
    plan = hand_made_plan((1, 1), 1, 1, **cuts, schedule="zero_bubble", microbatches=2)
    chunk, _ = make_chunks(model, plan)
    run = lambda fixed, params, batch: microbatch.forward(chunk, fixed, params, None, batch)
    of_stage = chunk.state_shapes.fixed, replica_shapes(chunk), batch_shapes(chunk)
    x_BLD, _, saved = jax.eval_shape(run, *of_stage)

    def first(*own):
        halves = split_backward(partial(microbatch.replica_gradients, chunk), *own)
        return microbatch.stack(chunk, halves.first(*jax.tree.leaves(own))[1])

    cotangents = x_BLD, None  # no auxiliary losses
    given = *of_stage[:2], saved, *cotangents
    passed = jax.eval_shape(microbatch.on_replicas(chunk, first), *given)
    of_experts = [x for x in passed if x.shape[-3:] in {(8, 64, 96), (8, 96, 64)}]
    num_bytes = sum(x.size * x.dtype.itemsize for x in of_experts) / 4  # on a device
    stage = shape_of(1, **cuts, is_last=False, in_flight=4, waiting=3)
    waiting = memory.stage_memory_bytes(model, stage)["waiting"]
    assert 0 < 3 * num_bytes <= waiting
    # JAX 0.12 adds them up over `fsdp` in the first part already.
    assert 3 * num_bytes == waiting or jax.__version_info__ >= (0, 11)
    whole = dataclasses.replace(stage, expert=1)
    assert memory.stage_memory_bytes(model, whole).get("waiting", 0) == 0


def test_a_stage_worked_by_hand():
    model = MODELS["llama"]
    stage = dataclasses.replace(SHAPE, blocks=(1,), data=2, tensor=2, dtype="bfloat16")
    # 64 * (2 * 4 + 2 * 2) * 16 in attention and 3 * 64 * 160 in the feed-forward, halved; two norms
    # of 64; two tables of 96 * 64, halved; one norm of 64.
    parameters = (64 * 12 * 16 + 3 * 64 * 160) // 2 + 2 * 64 + 2 * 96 * 64 // 2 + 64
    tokens = 3 * 48
    residuals = 4 * 2 * 64 + (2 * (2 * 64 + 2 * 32 + 2 * 160) + 4 * 4) / 2
    assert memory.stage_memory_bytes(model, stage) == {
        "parameters": 4 * parameters / 2,
        "optimizer": 8 * parameters / 2,
        "replicas": 2 * parameters,
        "gradients": 4 * parameters,
        "activations": tokens * (residuals + 2 * 2 * 64),
        "logits": 4 * tokens * 96 / 2,
        # Three arrays of the feed-forward, halved, and eight of the residual stream.
        "temporaries": 2 * tokens * (3 * 160 / 2 + 8 * 64),
        "boundaries": 0,
        # A copy of the gradients and half of their sums are less than the activations were.
        "reduction": 0,
    }


def test_only_the_last_stage_has_logits_and_the_middle_has_most_buffers():
    bytes_of = lambda **ends: memory.stage_memory_bytes(
        MODELS["gpt2"], dataclasses.replace(SHAPE, **ends)
    )
    first, middle = bytes_of(is_last=False), bytes_of(is_first=False, is_last=False)
    last = bytes_of(is_first=False)
    assert first["logits"] == middle["logits"] == 0 < last["logits"]
    # Each neighbour: an array in and one out, of 3 * 48 * 64 float32, each twice.
    assert first["boundaries"] == last["boundaries"] == 2 * 2 * 3 * 48 * 64 * 4
    assert middle["boundaries"] == 2 * first["boundaries"]


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_activations_grow_with_microbatches_in_flight_and_nothing_of_the_parameters(in_flight):
    one = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    stage = dataclasses.replace(SHAPE, in_flight=in_flight, head_in_flight=in_flight)
    more = memory.stage_memory_bytes(MODELS["gpt2"], stage)
    assert more["activations"] == in_flight * one["activations"]
    assert more["logits"] == one["logits"] * in_flight
    for name in one.keys() & set(memory.PER_PARAMETER):
        assert more[name] == one[name]


def test_many_logits_are_there_in_chunks():
    """Worked by hand: 3 * 2048 tokens and half of 100,000 make 1.2 GB of float32, in 3 chunks."""
    model = ModelConfig(**{**SMALL, "context_length": 2048, "vocab_size": 100_000})
    stage = dataclasses.replace(SHAPE, tensor=2, dtype="bfloat16", head_in_flight=2)
    tokens, vocab_size = 3 * 2048, 50_000
    found = memory.stage_memory_bytes(model, stage)
    assert found["logits"] == 2 * (2 * 64 * vocab_size + 2 * tokens * 64)
    at_once = (4 + 2) * tokens / 3 * vocab_size + 4 * 64 * vocab_size
    assert found["temporaries"] == pytest.approx(at_once)
    cut = memory.stage_memory_bytes(model, dataclasses.replace(stage, fsdp=2))
    assert cut["logits"] == 2 * (4 * 64 * vocab_size / 2 + 2 * tokens * 64)
    assert cut["temporaries"] == found["temporaries"]
    whole = memory.stage_memory_bytes(model, dataclasses.replace(stage, cross_entropy="reference"))
    assert whole["logits"] == 2 * 4 * tokens * vocab_size
    assert whole["temporaries"] == 2 * (tokens + 64) * vocab_size
    few = dataclasses.replace(SHAPE, cross_entropy="chunked")  # 144 tokens in two chunks
    num_words = MODELS["gpt2"].vocab_size
    kept = memory.stage_memory_bytes(MODELS["gpt2"], few)["logits"]
    assert kept == 4 * 64 * num_words + 4 * 144 * 64


def test_what_a_backward_needs_besides():
    """Worked by hand, of 144 tokens and width 64: of a layer, with all of it again, or the head."""
    bytes_of = lambda model=MODELS["gpt2"], **changes: memory.stage_memory_bytes(
        model, dataclasses.replace(SHAPE, **changes)
    )["temporaries"]
    layer = 4 * 144 * (2 * 256 + 4 * 64)
    assert bytes_of() == bytes_of(is_last=False) == layer
    kept = 144 * 4 * (3 * 64 + 64 * 3 + 64 + 256 + 4)  # of that, all but the input of the layer
    assert bytes_of(checkpointing="full") == layer + kept
    assert bytes_of(tensor=2) == 4 * 144 * (2 * 128 + 8 * 64)
    many = dataclasses.replace(MODELS["gpt2"], vocab_size=4096)
    assert bytes_of(many) == 4 * 4096 * (144 + 64)
    assert bytes_of(many, is_last=False) == layer


def test_gradients_are_reduced_where_activations_were():
    """All of them are gone then, but in the first stage, which reduces in its last backward.

    A later stage does it in a program of its own, when no backward's temporaries are there, except
    in the last part of a divided backward.
    """
    bytes_of = lambda **changes: memory.stage_memory_bytes(
        MODELS["gpt2"], dataclasses.replace(SHAPE, data=2, is_last=False, **changes)
    )
    first = bytes_of(in_flight=2, sequences=1)
    later, divided, cut = (
        bytes_of(in_flight=1, sequences=1, is_first=False, **changes)
        for changes in ({}, {"waiting": 1}, {"fsdp": 2})
    )
    assert first["reduction"] == 1.5 * first["gradients"] - first["activations"] / 2 > 0
    left = 1.5 * later["gradients"] - later["activations"]
    assert later["reduction"] == left - later["temporaries"] > 0
    assert divided["reduction"] == left
    left = 1.5 * cut["gradients"] - cut["activations"] - cut["temporaries"]
    assert cut["reduction"] == max(0.0, left - cut["gathered"])
    assert bytes_of(in_flight=50)["reduction"] == 0


def test_gradients_of_a_whole_step_in_one_program_come_where_activations_were():
    """They take room from the matrices of Muon and from sums, and count if there is none."""
    bytes_of = lambda **changes: memory.stage_memory_bytes(
        MODELS["gpt2"], dataclasses.replace(SHAPE, **changes)
    )
    apart, whole = bytes_of(), bytes_of(is_whole_step=True)
    assert whole == apart | {"gradients": 0.0}
    few = {"sequences": 1, "data": 2, "kept": ("float32", "others")}
    apart, whole = bytes_of(**few), bytes_of(**few, is_whole_step=True)
    room = apart["activations"] + apart["logits"]
    assert whole["gradients"] == apart["gradients"] - room > 0
    assert whole["orthogonalized"] == apart["orthogonalized"] + room
    assert (whole["reduction"], apart["reduction"]) == (1.5 * apart["gradients"], 0)


def test_a_compiled_step_of_one_microbatch_has_no_room_for_gradients_of_its_own():
    """A step of two, each as large, holds the sums of the first beside the second."""
    model = dataclasses.replace(MODELS["llama"], context_length=128, width=256)
    temporaries = []
    for microbatches in (1, 2):
        plan = hand_made_plan((2,), 1, 1, microbatches=microbatches)
        [chunk] = make_chunks(model, plan)
        program = compile_whole_step(chunk, evaluates=False)["step"]
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    shape = dataclasses.replace(SHAPE, sequences=plan.global_batch // 2)
    gradients = memory.stage_memory_bytes(model, shape)["gradients"]
    assert temporaries[1] - temporaries[0] == pytest.approx(gradients, rel=0.1)


def test_only_microbatches_that_went_through_the_head_hold_logits():
    """Interleaved: three quarters of the layers for two microbatches, the head for one of them."""
    one = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    stage = dataclasses.replace(SHAPE, chunks=2, in_flight=1.5, head_in_flight=1)
    more = memory.stage_memory_bytes(MODELS["gpt2"], stage)
    assert more["logits"] == one["logits"]
    last_norm = 3 * 48 * 2 * 4 * 64
    assert more["activations"] - last_norm == 1.5 * (one["activations"] - last_norm)
    # The ends of the pipeline are neighbours too.
    assert (one["boundaries"], more["boundaries"]) == (0, 2 * 2 * 2 * 3 * 48 * 64 * 4)


@pytest.mark.parametrize("fsdp", [1, 2, 16])
@pytest.mark.parametrize("data", [2, 3, 8])
def test_data_cuts_masters_where_their_sharding_does(data, fsdp):
    one = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    cut = memory.stage_memory_bytes(
        MODELS["gpt2"], dataclasses.replace(SHAPE, data=data, fsdp=fsdp)
    )
    is_cut = sharding.data_dim("D", (SMALL["width"],), {"data": data, "fsdp": fsdp}) is not None
    for name in ("parameters", "optimizer"):
        assert cut[name] == one[name] / fsdp / (data if is_cut else 1)


def test_data_cuts_what_zero_1_cuts_and_only_where_the_width_divides():
    one = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    # A loop over microbatches is over when gradients are reduced: room is where all it read was.
    room = one["activations"] + one["logits"] + one["replicas"]
    four = memory.stage_memory_bytes(MODELS["gpt2"], dataclasses.replace(SHAPE, data=4))
    cut = {"parameters": one["parameters"] / 4, "optimizer": one["optimizer"] / 4}
    assert four == one | cut | {"reduction": max(0, one["gradients"] * 5 / 4 - room)}
    three = memory.stage_memory_bytes(MODELS["gpt2"], dataclasses.replace(SHAPE, data=3))
    assert three == one | {"reduction": max(0, one["gradients"] * 2 - room)}


def test_fsdp_cuts_all_that_is_kept_of_parameters_and_gathers_the_largest_layer():
    one = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    cut = memory.stage_memory_bytes(MODELS["gpt2"], dataclasses.replace(SHAPE, fsdp=4, data=2))
    zero_1 = ("parameters", "optimizer")
    kept = {name: one[name] / 4 for name in ("parameters", "optimizer", "replicas", "gradients")}
    kept |= {name: kept[name] / 2 for name in zero_1}
    # 12 * 64 * 64 in the matrices of a layer, and two norms with a bias; in float32, three times:
    # its parameters, its gradients, and those of the layer behind it. The logits are gone.
    kept["gathered"] = 3 * 4 * (12 * 64 * 64 + 4 * 64) - one["logits"]
    assert cut == one | kept | {"reduction": 0}
    # In a pipeline the logits of a microbatch are an argument of its backward.
    last = dataclasses.replace(SHAPE, fsdp=4, is_first=False)
    found = memory.stage_memory_bytes(MODELS["gpt2"], last)
    assert found["gathered"] == kept["gathered"] + one["logits"]


def test_context_cuts_parameters_and_tokens():
    one = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    fsdp = memory.stage_memory_bytes(MODELS["gpt2"], dataclasses.replace(SHAPE, fsdp=2))
    cut = memory.stage_memory_bytes(MODELS["gpt2"], dataclasses.replace(SHAPE, context=2))
    per_token = one.keys() - set(memory.PER_PARAMETER)
    half = {name: one[name] / 2 for name in per_token}
    # Logits are gone in a layer's backward: half of them leave room for less.
    assert cut == fsdp | half | {"gathered": fsdp["gathered"] + half["logits"]}


def test_a_tied_head_apart_from_the_embedding_holds_a_copy_of_the_table():
    tied = dataclasses.replace(MODELS["gpt2"], tied_embeddings=True)
    last = dataclasses.replace(SHAPE, is_first=False)
    assert memory.stage_memory_bytes(tied, last) == memory.stage_memory_bytes(MODELS["gpt2"], last)
    saved = 96 * 64
    whole = memory.stage_memory_bytes(MODELS["gpt2"], SHAPE)
    assert memory.stage_memory_bytes(tied, SHAPE)["parameters"] == whole["parameters"] - 4 * saved


@pytest.mark.parametrize("variant", ["gpt2", "llama", "wide heads"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_moments_take_the_bytes_of_what_keeps_them(kept, variant):
    """int8 only where there are blocks of 64, and without scales that devices would share."""
    config = dataclasses.replace(SMOOTH, moments=kept)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "num_layers": 2}
    for vocab_size, width, tied in ((96, 128, True), (128, 96, False), (128, 128, True)):
        sizes |= {"width": width, "vocab_size": vocab_size, "tied_embeddings": tied}
        model = make_model(**VARIANTS[variant] | sizes)
        for split in ((2,), (1, 1)):
            for chunk in make_chunks(model, hand_made_plan(split, 1, 1), config=config):
                _, *both = chunk.state_shapes.opt_state
                num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(both))
                shape = shape_of(
                    num_blocks=split[0],
                    is_first=chunk.is_first,
                    is_last=chunk.is_last,
                    kept=(kept, kept),
                )
                assert memory.stage_memory_bytes(model, shape)["optimizer"] == num_bytes


@pytest.mark.parametrize(
    "data, fsdp, tensor",
    [(1, 8, 1), (8, 1, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8)],
)
def test_scales_that_devices_share_count_on_each_of_them(data, fsdp, tensor):
    """A width of 256 has four blocks, a vocabulary of 128 two, and 320 of a feed-forward five."""
    sizes = {"num_heads": 8, "num_kv_heads": 8, "width": 256, "vocab_size": 128, "mlp_width": 320}
    model = make_model(**VARIANTS["llama"] | sizes | {"num_layers": 2, "tied_embeddings": False})
    config = dataclasses.replace(SMOOTH, moments="int8")
    for split in ((2,), (1, 1)):
        if data * fsdp * tensor * len(split) > 8:
            continue
        plan = hand_made_plan(split, data, tensor, fsdp=fsdp)
        for chunk in make_chunks(model, plan, config=config):
            _, *both = chunk.state_shapes.opt_state
            num_bytes = sum(
                math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x in jax.tree.leaves(both)
            )
            shape = shape_of(
                num_blocks=split[0],
                is_first=chunk.is_first,
                is_last=chunk.is_last,
                data=data,
                fsdp=fsdp,
                tensor=tensor,
                kept=("int8", "int8"),
            )
            assert memory.stage_memory_bytes(model, shape)["optimizer"] == num_bytes


@pytest.mark.parametrize(
    "variant, checkpointing, data, recomputed",
    [
        ("gpt2", "none", 2, ()),
        pytest.param("llama", "dots", 1, (), marks=pytest.mark.exhaustive),
        ("llama", "full", 1, (1, 1)),  # of two layers and of one
    ],
)
def test_compiled_programs_take_and_give_what_the_memory_says(
    variant, checkpointing, data, recomputed
):
    """And work in place. What they need besides is XLA's own matter on a CPU."""
    model = dataclasses.replace(MODELS[variant], context_length=256)
    split = (2, 1) if recomputed else (1, 1)
    plan = hand_made_plan(
        split, data, 1, microbatches=2, checkpointing=checkpointing, recomputed=recomputed
    )
    model = dataclasses.replace(model, num_layers=sum(split))
    sequences = plan.global_batch // 2 // data
    for i, programs in enumerate(compile_chunks(make_chunks(model, plan))):
        stage = dataclasses.replace(
            SHAPE,
            blocks=(split[i],),
            is_first=i == 0,
            is_last=i == 1,
            data=data,
            sequences=sequences,
            checkpointing=checkpointing,
            recomputed=(recomputed[i],) if recomputed else None,
        )
        items = memory.stage_memory_bytes(model, stage)
        ways = {name: items[name] for name in ("replicas", "gradients", "parameters", "optimizer")}
        boundary = items["boundaries"] / 4  # to or from the one neighbour, twice each
        forward, backward, update = (
            programs.table[ProgramKey(name, False)].memory_analysis()
            for name in ("forward", "backward", "update")
        )
        kept = items["activations"] + items["logits"]
        assert forward.argument_size_in_bytes == pytest.approx(
            ways["replicas"] + (i == 1) * boundary, rel=0.03
        )
        # Tables of angles and statistics of norms are left out, and logits have their sums.
        assert forward.output_size_in_bytes == pytest.approx(kept + (i == 0) * boundary, rel=0.05)
        assert backward.alias_size_in_bytes == ways["gradients"]
        state = ways["parameters"] + ways["optimizer"]
        assert update.alias_size_in_bytes == pytest.approx(state, rel=1e-3)
        assert update.temp_size_in_bytes < 0.01 * state
