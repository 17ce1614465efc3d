"""Attention whose keys and values come from few numbers of a token, its latents (MLA).

DeepSeek-V2, arXiv:2405.04434. Dims besides those of `transformer`:

C  latents of keys and values   J  C and the numbers of keys that turn   Q  latents of queries
X  width of a head's keys that do not turn, and of its values
"""

from collections.abc import Callable
from dataclasses import replace

from holmesjax.config import LatentAttentionConfig, ModelConfig
from holmesjax.layer_specs.kind import PARTS_DIM, Attention, Constant, Parameter, WeightProduct

Matrix = Callable[..., Parameter]


def settings_of(model: ModelConfig) -> LatentAttentionConfig:
    """The settings of a model that has latents."""
    assert model.latent_attention is not None, "the model has latents"
    return model.latent_attention


def value_width(model: ModelConfig) -> int:
    """Width of a head's values: that of its numbers that do not turn, unless it is set."""
    own = settings_of(model)
    return own.value_width or model.head_width - own.rotary_width


def attention(model: ModelConfig) -> Attention:
    """Attention as it is computed in training: values are as wide as keys, with zeros behind."""
    own, width = settings_of(model), model.head_width
    return Attention(
        heads=model.num_heads,
        key_heads=model.num_heads,
        head_width=width,
        scale=model.attention_scale or width**-0.5,
        soft_cap=model.attention_soft_cap,
        latents=own.rank + own.rotary_width,
    )


def parameters(model: ModelConfig, matrix: Matrix, added_std: float) -> tuple[Parameter, ...]:
    """The matrices of attention and the norms of latents.

    Args:
      model: the model's settings.
      matrix: makes a parameter of a name and a shape.
      added_std: of the initial values of the last one.
    """
    own, d, h, k = settings_of(model), model.width, model.num_heads, model.head_width
    x = k - own.rotary_width + value_width(model)
    one = Constant(0.0 if model.zero_centered_norms else 1.0)
    # Without the model width, the latents are cut in its place.
    cut = lambda own: replace(own, dims=PARTS_DIM + own.dims[1:])
    norm = lambda name, size: cut(Parameter(name=name, shape=(size,), initial=one))
    queries = [matrix("query_DHK", d, h, k)]
    if own.query_rank is not None:
        queries = [
            matrix("query_DQ", d, own.query_rank),
            norm("query_norm/scale_Q", own.query_rank),
            cut(matrix("query_QHK", own.query_rank, h, k)),
        ]
    return (
        *queries,
        matrix("latent_DJ", d, own.rank + own.rotary_width),
        norm("latent_norm/scale_C", own.rank),
        cut(matrix("key_value_CHX", own.rank, h, x)),
        matrix("out_HKD", h, value_width(model), d, std=added_std),
    )


def products(model: ModelConfig) -> tuple[WeightProduct, ...]:
    own, d, h, k = settings_of(model), model.width, model.num_heads, model.head_width
    x = k - own.rotary_width + value_width(model)
    queries = [WeightProduct(d, h * k, "columns", weights=("query_DHK",))]
    if (rank := own.query_rank) is not None:
        queries = [
            WeightProduct(d, rank, "none", weights=("query_DQ",)),
            WeightProduct(rank, h * k, "columns", weights=("query_QHK",)),
        ]
    return (
        *queries,
        WeightProduct(d, own.rank + own.rotary_width, "none", weights=("latent_DJ",)),
        WeightProduct(own.rank, h * x, "columns", weights=("key_value_CHX",)),
        WeightProduct(h * value_width(model), d, "depth", weights=("out_HKD",)),
    )


def num_latents(model: ModelConfig) -> int:
    """Numbers of a token that every device of `tensor` has between products of attention."""
    own = settings_of(model)
    return own.rank + own.rotary_width + (own.query_rank or 0)
