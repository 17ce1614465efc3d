"""A block whose feed-forward is experts, of which each token passes some (mixture of experts).

E  experts of a layer; other dims are those of `transformer`
"""

from dataclasses import replace

from holmesjax.config import EXPERT_BLOCK, ExpertsConfig, ModelConfig
from holmesjax.layer_specs import transformer
from holmesjax.layer_specs.kind import (
    NONE,
    Constant,
    Exchange,
    Kept,
    Kind,
    LayerCollective,
    Normal,
    Parameter,
    PerToken,
    WeightProduct,
)

ROUTER = "router/weight_DE"
COUNT = "router/count_E"  # choices of each expert in the step before, of the whole global batch
STEPS = "router/steps_E"  # by which biases have gone up, less those by which they have gone down
BIAS = "router/bias_E"  # that an imported model has, which no step changes
# Slots of a token's choices over the choices, where none is left out (`kernels.experts`).
SLOTS_PER_CHOICE = 1.25


def expert_width(model: ModelConfig) -> int:
    """Width inside an expert."""
    assert model.experts is not None, "the model has experts"
    return model.experts.width or model.feed_forward_width


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
    rows = experts.active * SLOTS_PER_CHOICE  # that an exchange sends
    slots = experts.active * (experts.capacity_factor or SLOTS_PER_CHOICE)
    ds, fs, dr = round(d * slots), round(f * slots), round(d * rows)
    fr = round(f * rows * SLOTS_PER_CHOICE)  # in the slots of the rows that come
    parameters = [stated for stated in whole.parameters if shared or not _is_of_mlp(stated)]
    products = whole.products if shared else whole.products[:-2]
    kept, share = whole.kept, experts.active / experts.count
    is_normed = model.norms in ("after", "both")
    return replace(
        whole,
        name=EXPERT_BLOCK,
        function="holmesjax.models.experts:expert_block",
        parameters=(*parameters, *_parameters(model, share)),
        products=(
            *products,
            WeightProduct(d, experts.count, "none", weights=(ROUTER,), dtype="float32"),
            *(
                WeightProduct(d, f, "columns", times=experts.count, weight=name)
                for name in _names_in(model)
            ),
            WeightProduct(f, d, "depth", times=experts.count, weight="down_EFD"),
        ),
        moved=PerToken(
            whole.moved.whole + 4 * ds + 12 * experts.count,
            whole.moved.cut + (gates + 1) * fs,
        ),
        kept=Kept(
            input=PerToken(kept.input.whole + 2 * experts.active),
            products=PerToken(kept.products.whole, kept.products.cut + gates * fs),
            between=PerToken(kept.between.whole + 8 * experts.count, kept.between.cut),
            activation=PerToken(0, kept.activation.cut + fs),
            summed=PerToken(d if shared and is_normed else 0),
        ),
        needed=PerToken(whole.needed.whole + 2 * ds, whole.needed.cut + (gates + 1) * fs),
        collectives=(*whole.collectives, *_collectives(model)),
        exchange=Exchange(
            moved=PerToken(4 * dr),
            again=PerToken(2 * (dr + ds), (gates + 1) * fs),
            unread=NONE if is_normed else PerToken(4 * (ds + dr), (gates + 1) * fs),
            kept=PerToken(0, gates * fs),
            needed=PerToken(3 * dr + 2 * d, (2 * gates + 1) * fr - (gates + 1) * fs),
            is_read=is_normed,
        ),
        losses=_losses(experts),
        metrics=("expert_peak_load", "idle_experts"),
        change="holmesjax.models.experts:changed",
        cuts_sequences=False,
    )


def _is_of_mlp(parameter: Parameter) -> bool:
    """Whether it is a weight of a block's feed-forward."""
    return parameter.name in ("gate_DF", "up_DF", "down_FD")


def _names_in(model: ModelConfig) -> tuple[str, ...]:
    return ("gate_EDF", "up_EDF") if model.is_gated else ("up_EDF",)


def _parameters(model: ModelConfig, share: float) -> list[Parameter]:
    experts = model.experts
    assert experts is not None
    d, f, e = model.width, expert_width(model), experts.count
    added_std = transformer.INIT_STD * (2 * model.num_layers) ** -0.5

    def matrix(name: str, *shape: int, std: float = transformer.INIT_STD) -> Parameter:
        own = share if name != ROUTER else 1.0
        return Parameter(name=name, shape=shape, initial=Normal(std), decays=True, active_share=own)

    def changing(name: str) -> Parameter:
        return Parameter(name=name, shape=(e,), initial=Constant(0.0), trains=False, changes=True)

    return [
        matrix(ROUTER, d, e),
        *(matrix(name, e, d, f) for name in _names_in(model)),
        matrix("down_EFD", e, f, d, std=added_std),
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
