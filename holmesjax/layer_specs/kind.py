"""The statements of a kind of layer, from which costs, memory, shardings and arrays derive.

A kind states its numbers for one model. `holmesjax.models` has the function that computes it.
Numbers per token are split into those that every device of the mesh axis `tensor` has, and those
that the devices of that axis share.
"""

import math
from dataclasses import dataclass
from typing import Literal

# Dims that `tensor` cuts: heads, feed-forward width and vocabulary (Megatron's cut: Shoeybi et al.,
# arXiv:1909.08053).
TENSOR_DIMS = "HGFV"

# The dim that `fsdp` and `context` cut: the model width. A parameter without it is whole there.
# `expert` cuts it too, but in the weights of experts.
PARTS_DIM = "D"

# The dim that `expert` cuts where a parameter begins with it and has others: those of experts.
EXPERTS_DIM = "E"


def begins_with_experts(dims: str) -> bool:
    """Whether a parameter with these dims is a weight of each expert.

    >>> [begins_with_experts(dims) for dims in ("EDF", "DE", "E")]
    [True, False, False]
    """
    return dims.startswith(EXPERTS_DIM) and len(dims) > 1


def dims(name: str) -> str:
    """The dims in a name of an array, one capital letter each.

    >>> dims("attention_norm/scale_D"), dims("query_DHK")
    ('D', 'DHK')
    """
    suffix = name.rpartition("_")[2]
    assert suffix.isalpha(), f"{name}: a parameter's name ends in its dims"
    assert suffix.isupper(), f"{name}: a parameter's name ends in its dims"
    return suffix


@dataclass(frozen=True, slots=True)
class Normal:
    """Initial values from a normal distribution around 0."""

    std: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Initial values between `-bound` and `bound`, all equally likely."""

    bound: float


@dataclass(frozen=True, slots=True)
class Constant:
    """One initial value for all elements."""

    value: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """Initial values that `Kind.draw` draws, for all parameters of a layer at once."""


# multiplied: a backward reads it. added: a backward reads it only where the forward runs again.
# looked_up: the same, and the gradient that travels is that of the rows, one for each token.
Use = Literal["multiplied", "added", "looked_up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of a layer.

    The path of the parameter in the layer's tree is its name, split at slashes.
    """

    name: str  # "attention_norm/scale_D"; the last letters are the dims unless `dims` are given
    shape: tuple[int, ...]
    initial: Normal | Uniform | Constant | Drawn
    dims: str = ""  # one letter for each dim of the shape; "": those of the name
    decays: bool = False  # whether weight decay applies
    trains: bool = True  # otherwise it has no master, no moments and no gradient
    changes: bool = False  # of those that do not train: whether `Kind.change` changes it
    # For a parameter that `Kind.change` changes: how the values of layers are joined over
    # microbatches and replicas.
    joined: Literal["sum", "max"] = "sum"
    use: Use = "multiplied"
    # The share of its numbers that one token is multiplied with: k / E, where each token goes to k
    # of E experts. Memory has all of them.
    active_share: float = 1.0
    # For a hidden matrix, which Muon orthogonalises: the number of leading dims, over which its
    # product sums. They are its rows, and the other dims its columns. 0: it is no hidden matrix.
    matrix: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.active_share <= 1, f"{self.name}: an active share of {self.active_share}"
        if not self.dims and self.shape:
            object.__setattr__(self, "dims", dims(self.name))
        assert len(self.dims) == len(self.shape), f"{self.name}: {self.dims} and {self.shape}"

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("/"))

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a weight of each expert."""
        return begins_with_experts(self.dims)

    @property
    def is_cut(self) -> bool:
        """Whether `tensor` cuts it."""
        return any(dim in TENSOR_DIMS for dim in self.dims)

    def size(self, tensor: int = 1) -> int:
        """Numbers of it on each of `tensor` devices."""
        whole = math.prod(self.shape)
        return whole // tensor if self.is_cut else whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Causal attention: each query sees its own key and those before it."""

    heads: int  # of queries
    key_heads: int
    head_width: int
    window: int | None = None  # keys that a query sees, its own included; None: all
    scale: float | None = None  # of scores; None: 1 / sqrt(head_width)
    soft_cap: float | None = None  # c: a score s becomes c tanh(s / c)
    # Numbers of a token that a cache holds in place of its keys and values; None: it holds those.
    latents: int | None = None

    def pairs(self, length: int) -> int:
        """Pairs of a query and a key that it sees, in a sequence of so many tokens.

        >>> attention = Attention(heads=1, key_heads=1, head_width=1, window=2)
        >>> attention.pairs(4), Attention(heads=1, key_heads=1, head_width=1).pairs(4)
        (7, 10)
        """
        window = min(self.window or length, length)
        return window * (window + 1) // 2 + (length - window) * window


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """A product of each token's numbers with a weight, [T, depth] [depth, columns]."""

    depth: int
    columns: int
    cut: Literal["depth", "columns", "none"]  # the dim that `tensor` cuts
    rows: float = 1  # for each token: a product that mixes the tokens of a sequence has others
    times: int = 1  # such products with weights of their own
    trains: bool = True  # whether the weight has a gradient
    # The names of the weights beside each other in the columns; (): a product of all that train.
    weights: tuple[str, ...] = ()
    # The parameter that has these weights, whose `active_share` is the share of the tokens that
    # each of them meets; "": all tokens meet all of them.
    weight: str = ""
    dtype: str = ""  # of its operands; "": the compute dtype


@dataclass(frozen=True, slots=True)
class ActivationProduct:
    """Products of activations with each other, in one sequence: [rows, depth] [depth, columns]."""

    rows: int
    columns: int
    depth: int
    times: int = 1
    is_cut: bool = False  # whether `tensor` shares them out


@dataclass(frozen=True, slots=True)
class BatchArray:
    """An array of a batch that a layer reads, as it is for one sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class PerToken:
    """Numbers per token: `whole` on each device of `tensor`, and `cut`, which they share."""

    whole: int = 0
    cut: int = 0


NONE = PerToken()


@dataclass(frozen=True, slots=True)
class PerRow(PerToken):
    """Numbers per token, and those of each row: a token is one for each device that it goes to."""

    row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Numbers per token that a backward needs of its forward, besides those of attention.

    Full checkpointing keeps `input`, that of a layer, and computes the rest again. The policy
    `dots` keeps the input, the results of products and attention's. Without checkpointing all of it
    is kept but `activation`.
    """

    input: PerToken = NONE
    products: PerToken = NONE  # the results of products
    between: PerToken = NONE  # what is computed between products
    # Results of products of which only sums with others are read: `dots` alone keeps them.
    summed: PerToken = NONE
    # The results of activation functions, which a backward computes again from their operands.
    activation: PerToken = NONE
    # Of all these, what is kept as codes of fp8, a byte each, where nothing is computed again.
    codes: PerToken = NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Changes in numbers per token where devices share the experts of a layer.

    Tokens go to the devices of their experts and back, once to each. A backward keeps none of what
    experts have computed: it sends the tokens again, and gives the gradients of all experts'
    weights at once.
    """

    moved: PerRow = PerRow()  # by a forward besides, into rows that are sent and out of them
    again: PerRow = PerRow()  # moved by a backward besides, as it computes again
    # Moved by a forward, and not when full checkpointing runs it again, whose results nobody reads.
    unread: PerRow = PerRow()
    kept: PerToken = NONE  # the part of `Kept.products` that is not kept
    # By a backward besides: rows that are sent and have come, and what experts compute again.
    needed: PerRow = PerRow()
    # Whether a backward reads the results of experts, and with full checkpointing sends tokens
    # once more to have them.
    is_read: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCollective:
    """All-reduces of one layer and microbatch, each of so many numbers per token."""

    axis: str  # of the mesh
    numbers: int  # per token, in the compute dtype
    forward: int = 0  # how many of them
    backward: int = 0  # how many, besides those of a forward that runs again


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of layer, in numbers of one model."""

    name: str
    function: str  # that computes it, as "module:function"
    parameters: tuple[Parameter, ...]
    # first: it reads tokens. last: it reads targets and gives the loss. Only layers between the two
    # are computed again by checkpointing.
    place: Literal["first", "middle", "last"] = "middle"
    borrows: tuple[str, ...] = ()  # parameters of other layers that it reads: "embed/token_VD"
    products: tuple[WeightProduct, ...] = ()  # of a forward
    mixes: tuple[ActivationProduct, ...] = ()  # of a forward, besides attention's
    attention: Attention | None = None
    moved: PerToken = NONE  # by a forward between its products: read or written
    kept: Kept = Kept()
    needed: PerToken = NONE  # by a backward besides what is kept: its temporaries
    collectives: tuple[LayerCollective, ...] = ()
    exchange: Exchange | None = None  # of a layer with experts, where devices share them
    logits: int = 0  # for each token, of which the loss is computed
    # Sums over tokens that the layer returns besides: losses, with their weight in the step's loss,
    # and metrics. Their sums over all layers are reported under these names.
    losses: tuple[tuple[str, float], ...] = ()
    metrics: tuple[str, ...] = ()
    # How a step changes parameters that do not train, as "module:function": it takes them and what
    # the layer returned for them, joined, both by name, and gives the new ones.
    change: str = ""
    draws: bool = False  # whether it reads random numbers
    scales: tuple[tuple[str, float], ...] = ()  # by which adapters count, by the weight's name
    # The arrays of a batch that it reads, in `Context.batch`. None: the first layer reads tokens,
    # the last targets, and others nothing.
    reads: tuple[BatchArray, ...] | None = None
    # The shape of the array that layers hand on for one sequence; (): [context_length, width].
    boundary: tuple[int, ...] = ()
    # Whether its function leaves the residual stream cut along sequences over `tensor`, where the
    # stage asks for it (`ops.Kernels.sequence_cut`).
    cuts_sequences: bool = False
    draw: str = ""  # that draws initial values, as "module:function", where parameters are `Drawn`

    def __hash__(self) -> int:
        """The hash of what most kinds differ in: a search looks kinds up very often."""
        return hash((self.name, self.moved.whole, self.moved.cut))

    def size(self, tensor: int = 1) -> int:
        """Numbers of all its parameters on each of `tensor` devices."""
        return sum(parameter.size(tensor) for parameter in self.parameters)

    def met_share(self, product: WeightProduct) -> float:
        """The share of the tokens that each weight of a product meets."""
        if not product.weight:
            return 1.0
        [weight] = [parameter for parameter in self.parameters if parameter.name == product.weight]
        return weight.active_share
