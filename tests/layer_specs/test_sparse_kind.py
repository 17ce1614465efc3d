"""A sparse layer states its active share once: FLOP and the header have it, and memory has not.

The toy has four experts, each a feed-forward. The token at position p goes to expert p modulo 4.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from holmesjax.costs import memory
from holmesjax.costs.parameters import parameter_counts
from holmesjax.costs.products import layer_forward_flop, train_flop
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import (
    Constant,
    Kept,
    Kind,
    LayerCollective,
    Normal,
    Parameter,
    PerToken,
    WeightProduct,
)
from holmesjax.models import ops
from holmesjax.models.layer import Auxiliary, apply, init_params, param_shapes
from holmesjax.runtime.compilation import compile_chunks
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.jobs import run_launch_here, write_run
from tests.shapes import shape_of

SPARSE = f"{__name__}:sparse"
EXPERTS = 4


def sparse(model, share=1 / EXPERTS):
    """A norm and four feed-forwards, of which each token has one."""
    d, f = model.width, model.feed_forward_width
    return Kind(
        name="sparse",
        function=f"{__name__}:apply_sparse",
        parameters=(
            Parameter(name="norm/scale_D", shape=(d,), initial=Constant(1.0)),
            *(
                Parameter(
                    name=name,
                    shape=(EXPERTS, *shape),
                    initial=Normal(0.1),
                    decays=True,
                    active_share=share,
                )
                for name, shape in (("up_EDF", (d, f)), ("down_EFD", (f, d)))
            ),
        ),
        products=(
            WeightProduct(d, f, "columns", times=EXPERTS, weight="up_EDF"),
            WeightProduct(f, d, "depth", times=EXPERTS, weight="down_EFD"),
        ),
        moved=PerToken(6 * d, 2 * f),
        kept=Kept(
            input=PerToken(d),
            products=PerToken(0, f),
            between=PerToken(d),
            activation=PerToken(0, f),
        ),
        needed=PerToken(2 * d, 2 * f),
        collectives=(LayerCollective(axis="tensor", numbers=d, forward=1, backward=1),),
    )


def dense(model):
    """The same layer, in which each token would meet all experts."""
    return sparse(model, share=1.0)


def apply_sparse(params, x_BLD, context):
    x_BLD = ops.separate(x_BLD)
    h_BLD = ops.rms_norm(x_BLD, params["norm"]["scale_D"])
    h_BlED = h_BLD.reshape(h_BLD.shape[0], -1, EXPERTS, h_BLD.shape[-1])
    up_BlEF = jax.nn.gelu(jnp.einsum("bled,edf->blef", h_BlED, params["up_EDF"]))
    out_BlED = jnp.einsum("blef,efd->bled", up_BlEF, params["down_EFD"])
    return x_BLD + out_BlED.reshape(x_BLD.shape), Auxiliary()


MODEL = make_model(num_layers=4, pattern=("block", SPARSE))


def flop_of_products(jaxpr):
    """FLOP of all products of a program, by the shapes of their arrays."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
            found += 2 * math.prod(equation.outvars[0].aval.shape) * depth
        for inner in jaxprs_in_params(equation.params):
            found += flop_of_products(inner)
    return found


def test_flop_are_those_of_the_products_that_are_computed():
    model, layer, sequences = MODEL, "block_001", 3
    x_BLD = jnp.zeros((sequences, model.context_length, model.width))
    position_L = jnp.arange(model.context_length)
    forward = lambda params, x: apply(layer, model, params, x, position_L=position_L)[0]

    def both_ways(params, x):
        out, pullback = jax.vjp(forward, params, x)
        return pullback(out)

    [_, kind] = kinds(model).blocks
    flop = layer_forward_flop(kind, model.context_length, x_BLD.size / model.width)
    shapes = param_shapes(layer, model)
    assert flop_of_products(jax.make_jaxpr(forward)(shapes, x_BLD).jaxpr) == flop
    assert flop_of_products(jax.make_jaxpr(both_ways)(shapes, x_BLD).jaxpr) == 3 * flop


def test_the_share_of_a_weight_is_in_flop_and_not_in_memory():
    whole = dataclasses.replace(MODEL, pattern=("block", f"{__name__}:dense"))
    per_layer = 2 * EXPERTS * MODEL.width * MODEL.feed_forward_width
    # Two layers of it; three products of two FLOP for a weight and token; one expert of four.
    saved = 2 * 3 * 2 * per_layer * (1 - 1 / EXPERTS)
    assert train_flop(whole, 10) - train_flop(MODEL, 10) == pytest.approx(10 * saved)
    stage = shape_of(blocks=(2, 2), fsdp=2, tensor=2)
    items = memory.stage_memory_bytes(MODEL, stage)
    assert items == memory.stage_memory_bytes(whole, stage)
    [made] = make_chunks(MODEL, hand_made_plan((4,), 1, 2, fsdp=2))
    state = made.state_shapes
    num_bytes = lambda tree: sum(
        math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(tree)
    )
    assert items["parameters"] == num_bytes(state.params)
    assert items["optimizer"] == num_bytes([state.opt_state.mu, state.opt_state.nu])
    everything, active = parameter_counts(MODEL)
    assert everything - active == 2 * per_layer * (1 - 1 / EXPERTS)
    assert everything == sum(x.size for x in jax.tree.leaves(init_params(MODEL, 0)))
    assert parameter_counts(whole) == (everything, everything)


def test_experts_are_no_copies_for_each_microbatch():
    compile_chunks(make_chunks(MODEL, hand_made_plan((4,), 1, 1, microbatches=2)))


def test_the_plan_says_how_many_parameters_a_token_uses(tmp_path, capsys):
    run_file = write_run(tmp_path, {"a": (1,)})
    settings = ("model.num_layers=2", f"model.pattern=[block,'{SPARSE}']")
    done = run_launch_here(capsys, "plan", run_file, *settings, "--explain")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("model "))
    everything, active = (int(line.split()[i].replace(",", "")) for i in (1, 3))
    assert everything > active
    assert line == f"model       {everything:,} parameters, {active:,} active"
    done = run_launch_here(capsys, "plan", run_file, "model.num_layers=2")
    assert not [line for line in done.stdout.splitlines() if line.startswith("model ")]
