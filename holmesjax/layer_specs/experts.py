"""A block whose feed-forward is experts, of which each token passes some (mixture of experts).

E  experts of a layer   C  width of what goes to them; other dims are those of `transformer`. In
the weights of experts and in all that cuts them, the latents of `latent_width` have the letter D.
"""

from dataclasses import replace

from holmesjax.config import EXPERT_BLOCK, ExpertsConfig, ModelConfig
from holmesjax.layer_specs import transformer
from holmesjax.layer_specs.kind import (
    Constant,
    Exchange,
    Kept,
    Kind,
    LayerCollective,
    Normal,
    Parameter,
    PerRow,
    PerToken,
    WeightProduct,
)

ROUTER = "router/weight_DE"
COUNT = "router/count_E"  # choices of each expert in the step before, of the whole global batch
STEPS = "router/steps_E"  # by which biases have gone up, less those by which they have gone down
BIAS = "router/bias_E"  # that an imported model has, which no step changes
PLACE = "router/place_E"  # the slot of each expert, in a run that places them by their loads
# Slots of a token's choices over the choices, where none is left out (`kernels.experts`).
SLOTS_PER_CHOICE = 1.25


def expert_width(model: ModelConfig) -> int:
    """Width inside an expert."""
    assert model.experts is not None, "the model has experts"
    return model.experts.width or model.feed_forward_width


def sent_width(model: ModelConfig) -> int:
    """Numbers of a token that go to an expert, and come back."""
    assert model.experts is not None, "the model has experts"
    return model.experts.latent_width or model.width


def place_parameter(model: ModelConfig) -> Parameter:
    """The table of slots, which a run has and no checkpoint; float32, as all that steps change."""
    assert model.experts is not None, "the model has experts"
    shape = (model.experts.count,)
    return Parameter(name=PLACE, shape=shape, initial=Constant(0.0), trains=False, changes=True)


def num_expert_blocks(model: ModelConfig) -> int:
    """Layers of the model that have experts."""
    turns = len(model.pattern)
    return sum(model.pattern[i % turns] == EXPERT_BLOCK for i in range(model.num_layers))


def expert_block(model: ModelConfig) -> Kind:
    """Attention as in a block; then a router, experts, and a feed-forward for all tokens, if any.

    A token's numbers are copied into a slot for each of its experts, and the results are read
    again: 4 D for each choice. The slots that stay empty are counted as if they were full. Logits
    and scores of the router are in float32 and choices in int32, two numbers of a 16-bit dtype
    each. With any checkpointing the choices are kept.
    """
    experts = model.experts
    assert experts is not None, "the checks of settings hold this"
    shared = experts.shared_width
    whole = transformer.block_spec(replace(model, mlp_width=shared or 1))
    d, f, gates = model.width, expert_width(model), 2 if model.is_gated else 1
    c, has_latents = sent_width(model), experts.latent_width is not None
    slots = experts.active * (experts.capacity_factor or SLOTS_PER_CHOICE)
    cs, fs = round(c * slots), round(f * slots)
    # In the slots of choices that come: those of an even load and a quarter.
    fr = round(f * experts.active * SLOTS_PER_CHOICE**2)
    parameters = [stated for stated in whole.parameters if shared or not _is_of_mlp(stated)]
    products = whole.products if shared else whole.products[:-2]
    kept, share = whole.kept, experts.active / experts.count
    is_read = model.norms in ("after", "both") or has_latents  # the results of experts
    return replace(
        whole,
        name=EXPERT_BLOCK,
        function="holmesjax.models.experts:expert_block",
        parameters=(*parameters, *_parameters(model, share)),
        products=(
            *products,
            WeightProduct(d, experts.count, "none", weights=(ROUTER,), dtype="float32"),
            *([WeightProduct(d, c, "none", weights=("narrow_DC",))] if has_latents else []),
            *(
                WeightProduct(c, f, "columns", times=experts.count, weight=name)
                for name in _names_in(model)
            ),
            WeightProduct(f, c, "depth", times=experts.count, weight="down_EFD"),
            *([WeightProduct(c, d, "none", weights=("widen_CD",))] if has_latents else []),
        ),
        moved=PerToken(
            whole.moved.whole + 4 * cs + 12 * experts.count,
            whole.moved.cut + (gates + 1) * fs,
        ),
        kept=Kept(
            input=PerToken(kept.input.whole + 2 * experts.active),
            # Latents, and the sum of a token's experts: two products' gradients read them.
            products=PerToken(
                kept.products.whole + 2 * c * has_latents, kept.products.cut + gates * fs
            ),
            between=PerToken(kept.between.whole + 8 * experts.count, kept.between.cut),
            activation=PerToken(0, kept.activation.cut + fs),
            summed=PerToken(d if shared and model.norms in ("after", "both") else 0),
        ),
        needed=PerToken(whole.needed.whole + 2 * cs, whole.needed.cut + (gates + 1) * fs),
        collectives=(*_of_width(whole.collectives, c), *_collectives(model)),
        exchange=Exchange(
            moved=PerRow(row=4 * c),
            again=PerRow(2 * cs, (gates + 1) * fs, row=2 * c),
            unread=PerRow() if is_read else PerRow(4 * cs, (gates + 1) * fs, row=4 * c),
            kept=PerToken(0, gates * fs),
            needed=PerRow(2 * c, (2 * gates + 1) * fr - (gates + 1) * fs, row=3 * c),
            is_read=is_read,
        ),
        losses=_losses(experts),
        metrics=("expert_peak_load", "idle_experts"),
        change="holmesjax.models.experts:changed",
        cuts_sequences=False,
    )


def _of_width(collectives: tuple[LayerCollective, ...], c: int) -> list[LayerCollective]:
    """Those of a block, where the sums of the feed-forward have the width of what experts get."""
    both, *others = collectives
    if c == both.numbers:
        return [both, *others]
    once = replace(both, forward=1, backward=1)
    return [once, replace(once, numbers=c), *others]


def _is_of_mlp(parameter: Parameter) -> bool:
    """Whether it is a weight of a block's feed-forward."""
    return parameter.name in ("gate_DF", "up_DF", "down_FD")


def _names_in(model: ModelConfig) -> tuple[str, ...]:
    return ("gate_EDF", "up_EDF") if model.is_gated else ("up_EDF",)


def _parameters(model: ModelConfig, share: float) -> list[Parameter]:
    experts = model.experts
    assert experts is not None
    d, f, e, c = model.width, expert_width(model), experts.count, sent_width(model)
    added_std = transformer.INIT_STD * (2 * model.num_layers) ** -0.5

    def matrix(name: str, *shape: int, std: float = transformer.INIT_STD) -> Parameter:
        own = share if len(shape) == 3 else 1.0
        return Parameter(name=name, shape=shape, initial=Normal(std), decays=True, active_share=own)

    has_latents = experts.latent_width is not None
    # The last matrix of a layer adds to the residual stream.
    stds = (transformer.INIT_STD, added_std) if has_latents else (added_std,)

    def changing(name: str) -> Parameter:
        return Parameter(name=name, shape=(e,), initial=Constant(0.0), trains=False, changes=True)

    return [
        matrix(ROUTER, d, e),
        *([replace(matrix("narrow_DC", d, c), matrix=1)] if has_latents else []),
        *(matrix(name, e, c, f) for name in _names_in(model)),
        matrix("down_EFD", e, f, c, std=stds[0]),
        *([replace(matrix("widen_CD", c, d, std=added_std), matrix=1)] if has_latents else []),
        *([changing(STEPS)] if experts.bias_rate else []),
        *([changing(BIAS)] if experts.biased else []),
        changing(COUNT),
    ]


def _losses(experts: ExpertsConfig) -> tuple[tuple[str, float], ...]:
    losses = ("expert_balance", experts.balance_loss), ("router_z", experts.router_z_loss)
    return tuple((name, weight) for name, weight in losses if weight)


def _collectives(model: ModelConfig) -> list[LayerCollective]:
    """Sums over `tensor`, besides those of a block, whose second ones are those of the experts.

    The gradients of the weights of choices are summed too. A feed-forward for all tokens has sums
    of its own.
    """
    assert model.experts is not None
    own = [LayerCollective(axis="tensor", numbers=model.experts.active, backward=1)]
    if model.experts.shared_width:
        own.append(LayerCollective(axis="tensor", numbers=model.width, forward=1, backward=1))
    return own
