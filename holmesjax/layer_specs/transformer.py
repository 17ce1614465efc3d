"""The kinds of a decoder-only Transformer.

D  model width   H  query heads   G  key-value heads   K  width of a head
F  feed-forward width   V  vocabulary size   P  positions
"""

from dataclasses import replace

from holmesjax.config import ModelConfig
from holmesjax.layer_specs import latent_attention
from holmesjax.layer_specs.kind import (
    Attention,
    Constant,
    Kept,
    Kind,
    LayerCollective,
    Normal,
    Parameter,
    PerToken,
    WeightProduct,
)

# Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: weights that add to
# the residual stream start smaller, by the root of the number of additions.
INIT_STD = 0.02


def embed_spec(model: ModelConfig) -> Kind:
    """The embedding: a vector for each token, and for each position where those are learned."""
    d, initial = model.width, Normal(INIT_STD)
    parameters = [
        Parameter(name="token_VD", shape=(model.vocab_size, d), initial=initial, use="looked_up")
    ]
    if model.positions == "learned":
        shape = model.context_length, d
        parameters.append(Parameter(name="position_PD", shape=shape, initial=initial, use="added"))
    return Kind(
        name="embed",
        function="holmesjax.models.transformer:embed",
        cuts_sequences=True,
        parameters=tuple(parameters),
        place="first",
        collectives=(_all_reduces(model, forward=1),),
    )


def block_spec(model: ModelConfig) -> Kind:
    """Attention, then a feed-forward, each with its norms and added to the residual stream.

    Each statement counts `tensor`'s whole numbers first. A forward moves the input of each norm,
    twice read and once written, and both additions: 3 D each. The cut numbers are those of the
    rotations of queries and keys, of attention, and of the activation function. It reads and writes
    F; with a gate it reads 2 F and writes F. A norm of queries and keys moves 3 numbers for each of
    their numbers. A bias is added where a product's result is read next.
    """
    d, f, has_latents = model.width, model.feed_forward_width, model.latent_attention is not None
    heads, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    latents = latent_attention.num_latents(model) if has_latents else 0
    gates = 2 if model.is_gated else 1
    before, after = (model.norms in (place, "both") for place in ("before", "after"))
    normed = heads + keys if model.qk_norm != "none" else 0
    return Kind(
        name="block",
        function="holmesjax.models.transformer:block",
        cuts_sequences=not has_latents,
        parameters=_block_parameters(model),
        products=(
            *(latent_attention.products(model) if has_latents else _products(model)),
            WeightProduct(
                d, gates * f, "columns", weights=("gate_DF", "up_DF") if gates > 1 else ("up_DF",)
            ),
            WeightProduct(f, d, "depth", weights=("down_FD",)),
        ),
        attention=latent_attention.attention(model) if has_latents else _attention(model),
        # Latents are read and written by their norms, and by the rotation of what turns.
        moved=PerToken(
            6 * d * (1 + before + after) + 3 * latents,
            4 * (heads + keys) + (gates + 1) * f + 3 * normed,
        ),
        # A norm behind a product into the residual stream reads the product's result. Without such
        # a norm the stream after attention stands for the result of attention's output projection.
        kept=Kept(
            input=PerToken(d),
            products=PerToken((2 * d if after else d) + latents, heads + 2 * keys + gates * f),
            between=PerToken(d * (2 * before + after) + latents, normed),
            activation=PerToken(0, f),
        ),
        needed=PerToken(4 * d, (gates + 1) * f),
        collectives=(_all_reduces(model, forward=2, backward=2), *_qk_all_reduces(model)),
    )


def _attention(model: ModelConfig) -> Attention:
    return Attention(
        heads=model.num_heads,
        key_heads=model.kv_heads,
        head_width=model.head_width,
        scale=model.attention_scale,
        soft_cap=model.attention_soft_cap,
    )


def _products(model: ModelConfig) -> tuple[WeightProduct, ...]:
    """The products of attention with its weights."""
    heads, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    into = ("query_DHK", "key_DGK", "value_DGK")
    return (
        WeightProduct(model.width, heads + 2 * keys, "columns", weights=into),
        WeightProduct(heads, model.width, "depth", weights=("out_HKD",)),
    )


def window_block(model: ModelConfig) -> Kind:
    """A block whose queries see the last `model.window` keys."""
    whole = block_spec(model)
    assert whole.attention is not None, "a block has attention"
    attention = replace(whole.attention, window=model.window)
    return replace(whole, name="window_block", attention=attention)


def head_spec(model: ModelConfig) -> Kind:
    """The last norm, the output projection and the loss. A tied one reads the token table."""
    d, v = model.width, model.vocab_size
    output = Parameter(name="output_DV", shape=(d, v), initial=Normal(INIT_STD), decays=True)
    return Kind(
        name="head",
        function="holmesjax.models.transformer:head",
        cuts_sequences=True,
        parameters=(*_norm(model, "norm"), *(() if model.tied_embeddings else (output,))),
        place="last",
        borrows=("embed/token_VD",) if model.tied_embeddings else (),
        products=(
            WeightProduct(
                d,
                v,
                "columns",
                weights=("embed/token_VD" if model.tied_embeddings else "output_DV",),
            ),
        ),
        kept=Kept(input=PerToken(d), between=PerToken(d)),
        collectives=(_all_reduces(model, backward=1),),
        logits=v,
        metrics=("z_loss",) if model.z_loss_multiplier else (),
    )


def _norm(model: ModelConfig, name: str) -> tuple[Parameter, ...]:
    shape = (model.width,)
    bias = Parameter(name=f"{name}/bias_D", shape=shape, initial=Constant(0.0), use="added")
    scale = _scale(model, f"{name}/scale_D", *shape)
    return (scale, bias) if model.norm == "layer_norm" else (scale,)


def _scale(model: ModelConfig, name: str, *shape: int) -> Parameter:
    one = Constant(0.0 if model.zero_centered_norms else 1.0)
    return Parameter(name=name, shape=shape, initial=one)


def _block_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    d, f, k = model.width, model.feed_forward_width, model.head_width
    h, g = model.num_heads, model.kv_heads
    added_std = INIT_STD * (2 * model.num_layers) ** -0.5

    def matrix(name: str, *shape: int, std: float = INIT_STD) -> Parameter:
        rows = 2 if name == "out_HKD" else 1
        initial = Normal(std)
        return Parameter(name=name, shape=shape, initial=initial, decays=True, matrix=rows)

    def norms(place: str, *names: str) -> list[Parameter]:
        has = model.norms in (place, "both")
        return [parameter for name in names if has for parameter in _norm(model, name)]

    qk_norms: dict[str, dict[str, tuple[int, ...]]] = {
        "none": {},
        "head": {"query_norm/scale_K": (k,), "key_norm/scale_K": (k,)},
        "all_heads": {"query_norm/scale_HK": (h, k), "key_norm/scale_GK": (g, k)},
    }
    of_attention = (
        latent_attention.parameters(model, matrix, added_std)
        if model.latent_attention is not None
        else (
            matrix("query_DHK", d, h, k),
            matrix("key_DGK", d, g, k),
            matrix("value_DGK", d, g, k),
            matrix("out_HKD", h, k, d, std=added_std),
        )
    )
    return (
        *norms("before", "attention_norm", "mlp_norm"),
        *of_attention,
        matrix("up_DF", d, f),
        *((matrix("gate_DF", d, f),) if model.is_gated else ()),
        matrix("down_FD", f, d, std=added_std),
        *norms("after", "attention_post_norm", "mlp_post_norm"),
        *(_scale(model, name, *shape) for name, shape in qk_norms[model.qk_norm].items()),
        *_biases(model),
    )


def _biases(model: ModelConfig) -> list[Parameter]:
    d, f, k = model.width, model.feed_forward_width, model.head_width
    shapes: dict[str, tuple[int, ...]] = {}
    if model.biases != "none":
        keys = model.kv_heads, k
        shapes |= {"query_HK": (model.num_heads, k), "key_GK": keys, "value_GK": keys}
    if model.biases == "all":
        shapes |= {"out_D": (d,), "up_F": (f,), "down_D": (d,)}
        shapes |= {"gate_F": (f,)} if model.is_gated else {}
    return [
        Parameter(name=name, shape=shape, initial=Constant(0.0), use="added")
        for name, shape in shapes.items()
    ]


def _qk_all_reduces(model: ModelConfig) -> list[LayerCollective]:
    """The all-reduces of mean squares of a token's queries and keys, and of their gradients."""
    if model.qk_norm != "all_heads":
        return []
    return [LayerCollective(axis="tensor", numbers=1, forward=2, backward=2)]


def _all_reduces(model: ModelConfig, *, forward: int = 0, backward: int = 0) -> LayerCollective:
    """All-reduces of the residual stream over `tensor`.

    A Transformer layer has one after attention and one after the feed-forward, in each direction
    (Shoeybi et al., arXiv:1909.08053, section 3).
    """
    return LayerCollective(
        axis="tensor",
        numbers=model.width,
        forward=forward,
        backward=backward,
    )
