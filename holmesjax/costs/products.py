"""The matrix products of layers, and their FLOP; dims as in `work`.

FLOP count a multiplication and an addition as two, of matrix products only: norms, activations and
softmax are left out, as in published model FLOP utilisations.
"""

from collections.abc import Sequence
from dataclasses import replace

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.costs.optimizer_state import Matrix
from holmesjax.layer_specs.distinct_kinds import block_counts, kinds
from holmesjax.layer_specs.kind import Kind, WeightProduct
from holmesjax.topology.calibration import Product, flop


def layer_products(
    kind: Kind, num_tokens: float, tensor: int = 1, expert: int = 1, rows: float = 1.0
) -> list[Product]:
    """The products of one layer's activations with its weights in a forward, on each device.

    The dim that `tensor` cuts is shorter on each of its devices. A Transformer layer has, for T
    tokens and with that dim in brackets,

        [T, D] [D, (H K + 2 G K)]      [T, (H K)] [(H K), D]
        [T, D] [D, (m F)]              [T, (F)] [(F), D],     m = 2 for SwiGLU, else 1

    If a token meets k of E weights, each weight has k / E of the tokens. The FLOP are those of the
    active share, and all weights are read. A device of `expert` has fewer experts, each with tokens
    of all these devices.

    Args:
      kind: of the layer.
      num_tokens: on each device.
      tensor, expert: sizes of these mesh axes.
      rows: of products of experts on the device with most, over those of an even load.
    """
    of_experts = {parameter.name for parameter in kind.parameters if parameter.is_of_experts}

    def of(product: WeightProduct) -> Product:
        is_shared = product.weight in of_experts
        return Product(
            num_tokens
            * product.rows
            * kind.met_share(product)
            * (expert * rows if is_shared else 1),
            product.columns / tensor if product.cut == "columns" else product.columns,
            product.depth / tensor if product.cut == "depth" else product.depth,
            product.times / expert if is_shared else product.times,
            product.dtype,
        )

    return [of(product) for product in kind.products]


def experts_products(
    kind: Kind, products: Sequence[Product], *, trained: bool = False
) -> list[Product]:
    """Returns those of a layer's products whose weights are of experts, in their order.

    Args:
      kind: of the layer.
      products: its `layer_products`.
      trained: whether to leave out those whose weights are frozen.
    """
    of_experts = {parameter.name for parameter in kind.parameters if parameter.is_of_experts}
    pairs = zip(products, kind.products, strict=True)
    return [
        product
        for product, stated in pairs
        if stated.weight in of_experts and (stated.trains or not trained)
    ]


def trained_products(
    kind: Kind,
    num_tokens: float,
    tensor: int = 1,
    expert: int = 1,
    rows: float = 1.0,
    *,
    trains: bool = True,
) -> list[Product]:
    """Returns the `layer_products` whose weights train, or whose weights do not.

    Args:
      kind, num_tokens, tensor, expert, rows: those of `layer_products`.
      trains: which of the two.
    """
    products = layer_products(kind, num_tokens, tensor, expert, rows)
    pairs = zip(products, kind.products, strict=True)
    return [product for product, weight in pairs if weight.trains == trains]


def mixed_products(kind: Kind, length: int, num_tokens: float, tensor: int = 1) -> list[Product]:
    """The products of one layer's activations with each other in a forward, on each device.

    Args:
      kind: of the layer; its attention is not among them.
      length: tokens of a sequence.
      num_tokens: on each device.
      tensor: size of this mesh axis.
    """
    sequences = num_tokens / length
    return [
        Product(
            mix.rows, mix.columns, mix.depth, mix.times * sequences / (tensor if mix.is_cut else 1)
        )
        for mix in kind.mixes
    ]


def attention_products(
    kind: Kind, length: int, num_tokens: float, tensor: int = 1, context: int = 1
) -> list[Product]:
    """Scores and weighted values of one layer's forward; none without attention.

    A device's tokens meet one part of their sequences after the other, of S / context tokens. The
    products are those of all S x S pairs. A window reduces them by the share of pairs that it takes
    out of a causal mask.

    Args:
      kind: of the layer.
      length: tokens of a sequence, S.
      num_tokens: on each device.
      tensor, context: sizes of these mesh axes.
    """
    if (attention := kind.attention) is None:
        return []
    s, k = length // context, attention.head_width
    share = attention.pairs(length) / replace(attention, window=None).pairs(length)
    times = num_tokens / s * context * attention.heads / tensor * share
    return [Product(s, s, k, times), Product(s, k, s, times)]


def head_product(model: ModelConfig, num_tokens: float, tensor: int = 1) -> Product:
    """The output projection of our own head: [T, D] [D, V]."""
    [product] = layer_products(kinds(model).head, num_tokens, tensor)
    return product


def layer_weight_flop(kind: Kind, num_tokens: float) -> float:
    """FLOP of the products of one layer's activations with its weights. For a Transformer layer

        2 T (2 D H K + 2 D G K + m D F),   m = 3 for SwiGLU, else 2

    The gradients of the weights take as many again, and those of the activations, too.
    """
    return flop(layer_products(kind, num_tokens))


def layer_forward_flop(kind: Kind, length: int, num_tokens: float) -> float:
    """FLOP of one layer's forward, over all devices that share it. For a Transformer layer

        2 T (2 D H K + 2 D G K + m D F) + 4 T S H K,   m = 3 for SwiGLU, else 2

    The last term is attention over all S x S pairs: causality does not halve it, because published
    utilisations do not. A window does make it smaller.

    A layer of 8 h^2 + 16 h^2 + 4 s h FLOP a token, for width h and s tokens:
      >>> model = ModelConfig(num_layers=1, width=64, num_heads=4, context_length=32)
      >>> [block] = kinds(model).blocks
      >>> layer_forward_flop(block, 32, num_tokens=1) == 24 * 64**2 + 4 * 32 * 64
      True

    Reference: Narayanan et al., arXiv:2104.04473, appendix.
    """
    attention = attention_products(kind, length, num_tokens)
    mixed = mixed_products(kind, length, num_tokens)
    return layer_weight_flop(kind, num_tokens) + flop([*attention, *mixed])


def blocks_forward_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of the forward of all Transformer layers, over all devices that share them."""
    return sum(
        count * layer_forward_flop(kind, model.context_length, num_tokens)
        for count, kind in zip(block_counts(model), kinds(model).blocks, strict=True)
    )


def head_forward_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of the forward of the layers at both ends; of ours the output projection: 2 T D V.

    >>> head_forward_flop(ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16), num_tokens=3)
    768.0
    """
    return sum(
        layer_forward_flop(kind, model.context_length, num_tokens)
        for kind in (kinds(model).embed, kinds(model).head)
    )


def train_flop(model: ModelConfig, num_tokens: float) -> float:
    """Model FLOP of training on T tokens, over all devices: a forward and two backwards' products.

    Recomputation that saves memory does not count: utilisation is a share of this number. A weight
    that does not train has one product less.

        3 (L (2 T (2 D H K + 2 D G K + m D F) + 4 T S H K) + 2 T D V),   m = 3 for SwiGLU, else 2

    GPT-3 175B in Megatron-LM, its table 1: 96 T l h^2 (1 + s / 6h + V / 16lh) with activations
    computed again, that is 72 T l h^2 (1 + s / 6h + V / 12lh) without:
      >>> gpt = ModelConfig(num_layers=96, width=12288, num_heads=96, context_length=2048,
      ...                   vocab_size=51200)
      >>> l, h, s, v = 96, 12288, 2048, 51200
      >>> published = 72 * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
      >>> round(train_flop(gpt, 1) / published, 9)
      1.0

    Reference: Narayanan et al., arXiv:2104.04473, appendix.
    """
    forward_flop = blocks_forward_flop(model, num_tokens) + head_forward_flop(model, num_tokens)
    counts = (1, *block_counts(model), 1)
    frozen = sum(
        count * flop(trained_products(kind, num_tokens, trains=False))
        for count, kind in zip(counts, kinds(model).in_order, strict=True)
    )
    return 3.0 * forward_flop - frozen


def orthogonalizing_products(matrix: Matrix) -> list[Product]:
    """The products of Muon's five Newton-Schulz steps on one matrix of a x b, a <= b numbers.

    They have 5 (4 a^2 b + 2 a^3) FLOP:
      >>> flop(orthogonalizing_products(Matrix(4096, 4096))) / 1e12
      2.06158430208
    """
    a, b = matrix
    return [Product(a, b, a, 5), Product(a, a, a, 5), Product(a, a, b, 5)]


def backward_flop(forward_flop: float, checkpointing: Checkpointing) -> float:
    """FLOP of a backward: two products for each of the forward's, plus what is computed again.

    `full` checkpointing runs the whole forward again; `dots` keeps the matrix products. Attention
    scores that a kernel computes again to save memory are not counted.

    >>> [backward_flop(1.0, policy) for policy in ("none", "dots", "full")]
    [2.0, 2.0, 3.0]

    Reference: Korthikanti et al., arXiv:2205.05198, appendix A.
    """
    return (3.0 if checkpointing == "full" else 2.0) * forward_flop
