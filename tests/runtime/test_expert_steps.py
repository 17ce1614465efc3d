"""Layers with experts: routing against NumPy, and whole steps that no plan changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.config import ExpertsConfig, LatentAttentionConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.activation_checkpointing import checkpointed
from holmesjax.models.experts import changed, experts
from holmesjax.models.layer import (
    Context,
    apply,
    init_params,
    merged,
    param_shapes,
    split_by,
    statements,
)
from holmesjax.runtime.compilation import compile_chunks
from holmesjax.runtime.expert_loads import PREFIX, ExpertLoads
from holmesjax.runtime.pipeline import make_runner
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.one_device import RTOL, SEED, check_gradient, step_inputs

BALANCE, Z_LOSS = 0.05, 0.01
MIXTRAL = ExpertsConfig(count=4, active=2, width=24, balance_loss=BALANCE, router_z_loss=Z_LOSS)
DEEPSEEK = ExpertsConfig(
    count=8,
    active=3,
    width=16,
    shared_width=24,
    scores="sigmoid",
    scale=2.5,
    groups=4,
    active_groups=2,
    bias_rate=0.05,
    capacity_factor=1.0,
)


def model_of(settings, **changes):
    pattern = ("expert_block", "block")
    own = {
        "num_layers": 3,
        "activation": "swiglu",
        "norm": "rms_norm",
        "mlp_width": 48,
        "pattern": pattern,
    }
    return make_model(**{**own, **changes}, experts=settings)


# ---- routing -------------------------------------------------------------------------------------


def published_weights(logits_E, bias_E, settings):
    """The weight of each expert for one token, by the published rules, in float64."""
    if settings.scores == "softmax":
        scores = np.exp(logits_E - logits_E.max())
        scores /= scores.sum()
    else:
        scores = 1 / (1 + np.exp(-logits_E))
    for_choice = scores + bias_E
    if settings.groups > 1:
        groups = for_choice.reshape(settings.groups, -1)
        best = np.sort(groups, -1)[:, -2:].sum(-1)
        kept = np.argsort(-best, kind="stable")[: settings.active_groups]
        left_out = np.setdiff1d(np.arange(settings.groups), kept)
        groups = groups.copy()
        groups[left_out] = -np.inf
        for_choice = groups.reshape(-1)
    chosen = np.argsort(-for_choice, kind="stable")[: settings.active]
    weights = np.zeros_like(scores)
    weights[chosen] = scores[chosen]
    if settings.normalized and settings.active > 1:
        weights /= weights.sum()
    return settings.scale * weights


ROUTINGS = {
    "Mixtral": MIXTRAL,
    "not normalized": dataclasses.replace(MIXTRAL, normalized=False),
    "DeepSeek": dataclasses.replace(DEEPSEEK, capacity_factor=None),
    "latents": dataclasses.replace(MIXTRAL, latent_width=12),
    "every expert": dataclasses.replace(MIXTRAL, active=4, scores="sigmoid"),
    "a single expert": dataclasses.replace(MIXTRAL, count=1, active=1, scores="sigmoid"),
}


OF_ONE_VERSION = "every expert", "a single expert"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.one_version] * (name in OF_ONE_VERSION))
        for name, settings in ROUTINGS.items()
    ],
)
def test_routing_is_the_published_one(settings):
    """Some tokens have equal scores of all experts: the first ones are chosen."""
    rng, model = np.random.default_rng(1), model_of(settings)
    kind = layers(model)["block_000"]
    E, D, F = settings.count, model.width, settings.width
    C = settings.latent_width or D
    x = rng.standard_normal((2, 16, D)).astype(np.float32)
    x[0, :3] = 0
    down = rng.standard_normal((E, F, C)).astype(np.float32)
    gate, up = rng.standard_normal((2, E, C, F)).astype(np.float32)
    router = rng.standard_normal((D, E)).astype(np.float32)
    steps = np.float32(np.arange(E) % 3)
    params = {"gate_EDF": gate, "up_EDF": up, "down_EFD": down}
    narrow, widen = np.eye(D), np.eye(D)
    if settings.latent_width:
        narrow, widen = (0.2 * rng.standard_normal(shape) for shape in ((D, C), (C, D)))
        params |= {"narrow_DC": np.float32(narrow), "widen_CD": np.float32(widen)}
    params["router"] = {"weight_DE": router, "count_E": np.ones(E, np.float32)}
    if settings.bias_rate:
        params["router"]["steps_E"] = steps
    context = Context(model=model, kind=kind, position_L=np.arange(16))
    y, auxiliary = jax.jit(experts)(params, x, context)
    counts, squares = np.zeros(E), 0.0
    for b, t in np.ndindex(2, 16):
        token = np.float64(x[b, t])
        logits = token @ router
        weights = published_weights(logits, settings.bias_rate * steps, settings)
        counts += weights > 0
        squares += np.log(np.exp(logits).sum()) ** 2
        wanted, latent = np.zeros(C), token @ narrow
        for e in np.flatnonzero(weights):
            inner = latent @ gate[e]
            wanted += weights[e] * (inner / (1 + np.exp(-inner)) * (latent @ up[e])) @ down[e]
        np.testing.assert_allclose(y[b, t], wanted @ widen, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(auxiliary["sums"]["router/count_E"], counts)
    if settings.router_z_loss:
        assert float(auxiliary["losses"]["router_z"]) == pytest.approx(squares, rel=1e-5)


def test_a_balanced_load_has_the_loss_1_and_biases_go_towards_it():
    """The hand-made case of four tokens: loads of all four together are even."""
    share = np.float32(
        [
            [[0.4, 0.3, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1]],
            [[0.1, 0.2, 0.3, 0.4], [0.1, 0.1, 0.4, 0.4]],
        ]
    )
    settings = dataclasses.replace(MIXTRAL, bias_rate=1e-3)
    model = model_of(settings, width=4, num_heads=1, head_dim=4)
    kind = layers(model)["block_000"]
    zeros = np.zeros((4, 4, 24), np.float32)
    params = {"gate_EDF": zeros, "up_EDF": zeros, "down_EFD": zeros.swapaxes(1, 2)}
    for load, wanted in ((np.ones(4), 4.0), (np.float32([2, 2, 0, 0]), 3.8), (np.zeros(4), 0.0)):
        router = {"weight_DE": np.eye(4, dtype=np.float32), "count_E": np.float32(load)}
        params["router"] = router | {"steps_E": np.zeros(4, np.float32)}
        context = Context(model=model, kind=kind, position_L=np.arange(2))
        _, found = experts(params, jnp.log(share), context)
        assert float(found["losses"]["expert_balance"]) == pytest.approx(wanted, rel=1e-6)
        np.testing.assert_array_equal(found["sums"]["router/count_E"], 2)
    old = {"router/count_E": jnp.zeros(4), "router/steps_E": jnp.zeros(4)}
    new = changed(old, dict.fromkeys(old, jnp.array([8.0, 0.0, 4.0, 4.0])))
    np.testing.assert_array_equal(new["router/steps_E"], [-1, 1, 0, 0])
    np.testing.assert_array_equal(new["router/count_E"], [8, 0, 4, 4])


@pytest.mark.one_version
def test_scores_that_are_all_zero_send_a_token_to_experts_that_change_nothing():
    """A sigmoid of -1000 is 0 in float32: the first experts of the first groups are chosen."""
    settings = dataclasses.replace(DEEPSEEK, balance_loss=BALANCE, capacity_factor=None)
    model = model_of(settings, width=8, num_heads=1, head_dim=8)
    params = init_params(model, SEED)["block_000"]
    params["router"]["weight_DE"] = np.eye(8, dtype=np.float32)
    params["router"]["count_E"] = np.ones(8, np.float32)
    kind, x_BLD = layers(model)["block_000"], np.full((1, 1, 8), -1000, np.float32)
    context = Context(model=model, kind=kind, position_L=np.arange(1))

    def run(params, x_BLD):
        y_BLD, auxiliary = experts(params, x_BLD, context)
        return y_BLD.sum() + auxiliary["losses"]["expert_balance"], (y_BLD, auxiliary)

    way = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
    (loss, (y_BLD, auxiliary)), gradients = jax.jit(way)(params, x_BLD)
    assert float(loss) == 0
    assert not np.any(y_BLD)
    np.testing.assert_array_equal(auxiliary["sums"]["router/count_E"], [1, 1, 1, 0, 0, 0, 0, 0])
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_a_backward_that_computes_again_leaves_each_token_with_its_experts(policy):
    """In bfloat16 a score that is computed again may be another, and lead elsewhere."""
    model = model_of(MIXTRAL)
    params = param_shapes("block_000", model)
    x_BLD = jax.ShapeDtypeStruct((2, 16, model.width), jnp.bfloat16)
    forward = lambda params, x: apply("block_000", model, params, x, position_L=jnp.arange(16))[0]

    def both_ways(params, x):
        y, pullback = jax.vjp(checkpointed(forward, policy), params, x)
        return pullback(y)

    text = str(jax.make_jaxpr(both_ways)(params, x_BLD))
    assert text.count("top_k[") == 1


def test_loads_are_told_for_all_steps_since_they_were_told_last():
    """The third step was skipped: its choices count nowhere."""
    loads, told = ExpertLoads(every=3, last=7), {}
    for step in range(1, 8):
        own = {PREFIX + "block_001": np.float32([step, 0]), "loss": 1.0}
        told[step] = loads.after_step(step, own, skipped=step == 3)
    found = {step: (x["expert_load_steps"], x["expert_loads"]) for step, x in told.items() if x}
    of = lambda count: {"block_001": [count, 0]}
    assert found == {3: (2, of(1 + 2)), 6: (3, of(4 + 5 + 6)), 7: (1, of(7))}
    assert ExpertLoads(every=0, last=1).after_step(1, own, skipped=False) == {}


# ---- whole steps ---------------------------------------------------------------------------------


def plain_loss(trained, fixed, model, inputs):
    """The loss that a step lowers; what it reports; what changes without a gradient."""
    num_targets = jnp.sum(inputs["target_BL"] >= 0)
    x, sums, after = None, {}, {}
    arrays = {"position_L": jnp.arange(model.context_length)}
    arrays |= {name: inputs[name] for name in ("token_BL", "target_BL")}
    for layer in layers(model):
        own = fixed.get(layer, {})
        x, auxiliary = apply(layer, model, merged(trained[layer], own), x, **arrays)
        for name, value in {**auxiliary.losses, **auxiliary.metrics}.items():
            sums[name] = sums.get(name, 0.0) + value
        if own:
            old = {f"router/{name}": array for name, array in own["router"].items()}
            new = changed(old, auxiliary.sums)
            after[layer] = {"router": {name[len("router/") :]: x for name, x in new.items()}}
    found = {name: value / num_targets for name, value in {"loss": x, **sums}.items()}
    weights = {name: weight for kind in layers(model).values() for name, weight in kind.losses}
    total = found["loss"] + sum(weight * found[name] for name, weight in weights.items())
    return total, (found, after)


@functools.cache
def plain_steps(model):
    """Two steps by gradient descent, so that the second has the loads of the first."""
    whole = init_params(model, SEED)
    both = {layer: split_by(statements(model)[layer], whole[layer]) for layer in whole}
    trained = {layer: part for layer, (part, _) in both.items()}
    fixed = {layer: part for layer, (_, part) in both.items() if part}
    run = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)
    found = []
    for _ in range(2):
        (_, (values, fixed)), gradient = run(trained, fixed, model, step_inputs(8, 0))
        found.append((values, gradient, fixed))
    return found


LATENTS = {
    "num_kv_heads": None,
    "head_dim": 12,
    "positions": "rotary",
    "latent_attention": LatentAttentionConfig(
        rank=12, query_rank=16, rotary_width=4, value_width=6
    ),
}
BIASED = dataclasses.replace(DEEPSEEK, biased=True)
MODELS = {
    "Mixtral": model_of(MIXTRAL),
    "DeepSeek": model_of(BIASED, **LATENTS),
    "dropless": model_of(dataclasses.replace(BIASED, capacity_factor=None), **LATENTS),
    "latent experts": model_of(dataclasses.replace(MIXTRAL, latent_width=16, shared_width=24)),
}
PLANS = {
    "one program": hand_made_plan((3,), 2, 2, fsdp=2, microbatches=2, checkpointing="full"),
    "two stages": hand_made_plan((2, 1), (2, 1), (1, 2), fsdp=(1, 2), microbatches=2),
    "split backward": hand_made_plan(
        (2, 1), (1, 2), (2, 1), fsdp=(2, 1), microbatches=2, schedule="zero_bubble"
    ),
    "experts cut": hand_made_plan((3,), 1, 2, expert=4, microbatches=2, checkpointing="full"),
    "experts beside others": hand_made_plan(
        (2, 1), (2, 1), 1, fsdp=(1, 2), expert=2, microbatches=2, schedule="zero_bubble"
    ),
    "experts and context": hand_made_plan((3,), 2, 1, context=2, expert=2, microbatches=2),
    "context": hand_made_plan((3,), 1, 2, context=2, microbatches=2, checkpointing="dots"),
}


OFTEN = {  # their marks
    ("one program", "Mixtral"): [pytest.mark.one_version],
    ("experts cut", "Mixtral"): [],
    ("experts beside others", "DeepSeek"): [pytest.mark.one_version],
    ("context", "DeepSeek"): [],
    ("experts cut", "latent experts"): [pytest.mark.one_version],
}
EVERY = [
    pytest.param(
        *(plan, name),
        marks=OFTEN.get((plan, name), [pytest.mark.exhaustive]),
        id=f"{plan}, {name}",
    )
    for plan in PLANS
    for name in MODELS
]


@pytest.mark.parametrize("plan_name, name", EVERY)
def test_no_plan_changes_a_step(plan_name, name):
    """Parameters stay as they are: the first moment is the gradient, and loads change alone."""
    model, plan = MODELS[name], PLANS[plan_name]
    if "context" in plan_name and model.experts.capacity_factor is not None:
        with pytest.raises(ConfigError, match="capacity_factor"):
            compile_chunks(make_chunks(model, plan))
        return
    made = make_chunks(model, plan)
    still = dataclasses.replace(made[0].optimizer.config, learning_rate=1e-30)
    made = make_chunks(model, plan, config=still)
    runner = make_runner(plan, made, evaluates=False)
    states = runner.init(SEED)
    for step, (wanted, gradient, after) in enumerate(plain_steps(model)):
        states, found = train_step(runner, states, step_inputs(8, 0))
        for what, value in wanted.items():
            assert float(found[what]) == pytest.approx(float(value), rel=RTOL), (step, what)
        check_gradient(states, gradient)
        for layer, frozen in after.items():
            np.testing.assert_array_equal(found[PREFIX + layer], frozen["router"]["count_E"])
        for state in states:
            for layer, frozen in state.fixed.items():
                for what, array in frozen["router"].items():
                    np.testing.assert_array_equal(array, after[layer]["router"][what], what)
