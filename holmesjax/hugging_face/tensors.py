"""The place of each parameter of a model in the tensors of Hugging Face's format. No JAX.

A tensor of that format merges dims of ours, puts them in another order, and may hold several of our
parameters one after the other. Both directions are views of NumPy: a reshape and a transpose.

    query_DHK  <->  model.layers.7.self_attn.q_proj.weight  [H K, D]
    key_DGK    <->  model.layers.7.self_attn.qkv_proj.weight  rows H K to (H + G) K of [.., D]
    up_EDF     <->  model.layers.7.mlp.experts.0.up_proj.weight [F, D], one tensor for each of E

The tables are in the order in which `transformers` has the tensors.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from holmesjax.config import EXPERT_BLOCK, ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import Parameter
from holmesjax.layer_specs.lora import adapters
from holmesjax.layer_specs.model_layers import EMBED, HEAD, layers

# Our name -> the end of the tensor's name, and our dims in each of its dims, the outermost first.
# A name with {} is that of the tensors of single experts, without our first dim, E.
Table = Mapping[str, tuple[str, tuple[str, ...]]]

LLAMA: Table = {
    "query_DHK": ("self_attn.q_proj.weight", ("HK", "D")),
    "query_HK": ("self_attn.q_proj.bias", ("HK",)),
    "key_DGK": ("self_attn.k_proj.weight", ("GK", "D")),
    "key_GK": ("self_attn.k_proj.bias", ("GK",)),
    "value_DGK": ("self_attn.v_proj.weight", ("GK", "D")),
    "value_GK": ("self_attn.v_proj.bias", ("GK",)),
    "out_HKD": ("self_attn.o_proj.weight", ("D", "HK")),
    "query_norm/scale_K": ("self_attn.q_norm.weight", ("K",)),
    "key_norm/scale_K": ("self_attn.k_norm.weight", ("K",)),
    "query_norm/scale_HK": ("self_attn.q_norm.weight", ("HK",)),
    "key_norm/scale_GK": ("self_attn.k_norm.weight", ("GK",)),
    "gate_DF": ("mlp.gate_proj.weight", ("F", "D")),
    "up_DF": ("mlp.up_proj.weight", ("F", "D")),
    "down_FD": ("mlp.down_proj.weight", ("D", "F")),
    "attention_norm/scale_D": ("input_layernorm.weight", ("D",)),
    "mlp_norm/scale_D": ("post_attention_layernorm.weight", ("D",)),
}
# `post_attention_layernorm` is the norm before the feed-forward above, and the one behind attention
# where there are norms behind both.
POST_NORMS: Table = {
    "attention_post_norm/scale_D": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm/scale_D": ("pre_feedforward_layernorm.weight", ("D",)),
    "mlp_post_norm/scale_D": ("post_feedforward_layernorm.weight", ("D",)),
}
PHI3: Table = {
    "query_DHK": ("self_attn.qkv_proj.weight", ("HK", "D")),
    "key_DGK": ("self_attn.qkv_proj.weight", ("GK", "D")),
    "value_DGK": ("self_attn.qkv_proj.weight", ("GK", "D")),
    "gate_DF": ("mlp.gate_up_proj.weight", ("F", "D")),
    "up_DF": ("mlp.gate_up_proj.weight", ("F", "D")),
}
MIXTRAL: Table = {
    "router/weight_DE": ("block_sparse_moe.gate.weight", ("E", "D")),
    "gate_EDF": ("block_sparse_moe.experts.{}.w1.weight", ("F", "D")),
    "down_EFD": ("block_sparse_moe.experts.{}.w2.weight", ("D", "F")),
    "up_EDF": ("block_sparse_moe.experts.{}.w3.weight", ("F", "D")),
}
QWEN3_MOE: Table = {
    "router/weight_DE": ("mlp.gate.weight", ("E", "D")),
    "gate_EDF": ("mlp.experts.{}.gate_proj.weight", ("F", "D")),
    "up_EDF": ("mlp.experts.{}.up_proj.weight", ("F", "D")),
    "down_EFD": ("mlp.experts.{}.down_proj.weight", ("D", "F")),
}
# Latents are cut in the place of the model width, whose letter they have (`latent_attention`).
DEEPSEEK: Table = {
    "query_DQ": ("self_attn.q_a_proj.weight", ("Q", "D")),
    "query_norm/scale_Q": ("self_attn.q_a_layernorm.weight", ("D",)),
    "query_QHK": ("self_attn.q_b_proj.weight", ("HK", "D")),
    "latent_DJ": ("self_attn.kv_a_proj_with_mqa.weight", ("J", "D")),
    "latent_norm/scale_C": ("self_attn.kv_a_layernorm.weight", ("D",)),
    "key_value_CHX": ("self_attn.kv_b_proj.weight", ("HX", "D")),
}
# Ends of names of tensors that are in float32 in every folder, as in those that are published.
WIDE = ("e_score_correction_bias",)
# Of layers with experts. The feed-forward is the one that all tokens pass there.
DEEPSEEK_EXPERTS: Table = {
    "router/bias_E": ("mlp.gate.e_score_correction_bias", ("E",)),
    "gate_DF": ("mlp.shared_experts.gate_proj.weight", ("F", "D")),
    "up_DF": ("mlp.shared_experts.up_proj.weight", ("F", "D")),
    "down_FD": ("mlp.shared_experts.down_proj.weight", ("D", "F")),
}
GPT2: Table = {
    "attention_norm/scale_D": ("ln_1.weight", ("D",)),
    "attention_norm/bias_D": ("ln_1.bias", ("D",)),
    "query_DHK": ("attn.c_attn.weight", ("D", "HK")),
    "key_DGK": ("attn.c_attn.weight", ("D", "GK")),
    "value_DGK": ("attn.c_attn.weight", ("D", "GK")),
    "query_HK": ("attn.c_attn.bias", ("HK",)),
    "key_GK": ("attn.c_attn.bias", ("GK",)),
    "value_GK": ("attn.c_attn.bias", ("GK",)),
    "out_HKD": ("attn.c_proj.weight", ("HK", "D")),
    "out_D": ("attn.c_proj.bias", ("D",)),
    "mlp_norm/scale_D": ("ln_2.weight", ("D",)),
    "mlp_norm/bias_D": ("ln_2.bias", ("D",)),
    "up_DF": ("mlp.c_fc.weight", ("D", "F")),
    "up_F": ("mlp.c_fc.bias", ("F",)),
    "down_FD": ("mlp.c_proj.weight", ("F", "D")),
    "down_D": ("mlp.c_proj.bias", ("D",)),
}
# The first and the last layer, with whole names.
ENDS: Table = {
    "token_VD": ("model.embed_tokens.weight", ("V", "D")),
    "norm/scale_D": ("model.norm.weight", ("D",)),
    "output_DV": ("lm_head.weight", ("V", "D")),
}
GPT2_ENDS: Table = {
    "token_VD": ("transformer.wte.weight", ("V", "D")),
    "position_PD": ("transformer.wpe.weight", ("P", "D")),
    "norm/scale_D": ("transformer.ln_f.weight", ("D",)),
    "norm/bias_D": ("transformer.ln_f.bias", ("D",)),
    "output_DV": ("lm_head.weight", ("V", "D")),
}


class Names(NamedTuple):
    """The names of one family."""

    blocks: Table  # without what precedes them
    ends: Table = ENDS
    layers: str = "model.layers"  # precedes a block's number
    experts: Table = MappingProxyType({})  # of blocks with experts, in place of others' names


FAMILIES = {
    "gpt2": Names(GPT2, GPT2_ENDS, "transformer.h"),
    "llama": Names(LLAMA),
    "qwen2": Names(LLAMA),
    "qwen3": Names(LLAMA),
    "mistral": Names(LLAMA),
    "gemma2": Names({**LLAMA, **POST_NORMS}),
    "gemma3_text": Names({**LLAMA, **POST_NORMS}),
    "olmo2": Names({**LLAMA, **POST_NORMS}),
    "phi3": Names({**LLAMA, **PHI3}),
    "mixtral": Names({**LLAMA, **MIXTRAL}),
    "qwen3_moe": Names({**LLAMA, **QWEN3_MOE}),
    "deepseek_v3": Names({**LLAMA, **QWEN3_MOE, **DEEPSEEK}, experts=DEEPSEEK_EXPERTS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The box of a tensor that one parameter is, or one expert of a parameter."""

    parameter: Parameter  # of an expert without its dim E
    tensor: str  # its name
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # of the box
    groups: tuple[str, ...]  # in each dim of the box, the parameter's dims, the outermost first
    expert: int | None = None  # its number, where each expert has a tensor

    def values(self, layer: Mapping[str, np.ndarray]) -> np.ndarray:
        """Its values, of the parameters of a layer by name."""
        whole = layer[self.parameter.name]
        return whole if self.expert is None else whole[self.expert]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim of the parameter."""
        return dict(zip(self.parameter.dims, self.parameter.shape, strict=True))

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[dim] for dim in group) for group in self.groups)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the box in the tensor."""
        both = zip(self.start, self.box_shape, strict=True)
        return tuple(slice(start, start + size) for start, size in both)

    def to_parameter(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter in a whole tensor, as a view.

        >>> from holmesjax.layer_specs.kind import Constant
        >>> q = Parameter(name="query_DHK", shape=(5, 2, 3), initial=Constant(0.0))
        >>> place = Place(parameter=q, tensor="q", shape=(6, 5), start=(0, 0), groups=("HK", "D"))
        >>> place.to_parameter(np.arange(30).reshape(6, 5))[4].tolist()
        [[4, 9, 14], [19, 24, 29]]
        """
        return self.from_box(tensor[self.index], self.parameter.shape)

    def from_box(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Turns a part of the box into that part of the parameter, which has this shape."""
        sizes = dict(zip(self.parameter.dims, shape, strict=True))
        order = "".join(self.groups)
        split = part.reshape([sizes[dim] for dim in order])
        return split.transpose([order.index(dim) for dim in self.parameter.dims])

    def to_box(self, parameter: np.ndarray) -> np.ndarray:
        """Turns the parameter into the box: the inverse of `to_parameter`."""
        dims = self.parameter.dims
        order = [dims.index(dim) for dim in "".join(self.groups)]
        return parameter.transpose(order).reshape(self.box_shape)


@functools.lru_cache(maxsize=64)
def places(model: ModelConfig, family: str) -> dict[str, dict[str, tuple[Place, ...]]]:
    """The places of each parameter by layer and name, in the order of the tensors.

    Every parameter of the model has one: `config_json` refuses models that a family cannot hold.
    A parameter of experts has a place for each of them in order, if each has a tensor. Parameters
    that a step changes without training them belong to a run, and have none, but for biases of
    experts.

    >>> model = ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4, norm="rms_norm")
    >>> [place] = places(model, "llama")["block_000"]["out_HKD"]
    >>> place.tensor
    'model.layers.0.self_attn.o_proj.weight'
    """
    names = FAMILIES[family]
    found = {}
    for number, (layer, kind) in enumerate(layers(model).items()):
        is_end = layer in (EMBED, HEAD)
        prefix = "" if is_end else f"{names.layers}.{number - 1}."
        table = names.ends if is_end else names.blocks
        if kind.name == EXPERT_BLOCK:
            table = {**table, **names.experts}
        stated = [x for x in kind.parameters if not x.changes or x.name in table]
        found[layer] = _places({x.name: x for x in stated}, table, prefix)
    return found


def shapes_of(
    places: Mapping[str, Mapping[str, tuple[Place, ...]]],
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by name, in order."""
    layers = places.values()
    return {
        place.tensor: place.shape for layer in layers for some in layer.values() for place in some
    }


def adapter_places(model: ModelConfig, family: str) -> dict[str, list[Place]]:
    """Returns the places of each layer's adapters in PEFT's tensors, tensor by tensor.

    An A that several maps of the family share is in several tensors.

    Raises:
      ConfigError: weights that are one map of the family have several A, or not all of them one.

    >>> from holmesjax.config import LoraConfig
    >>> model = ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4, norm="rms_norm",
    ...                     lora=LoraConfig(targets=("q_proj",)))
    >>> a, b = adapter_places(model, "llama")["block_000"]
    >>> a.tensor, b.box_shape
    ('model.layers.0.self_attn.q_proj.lora_A.weight', (8, 8))
    """
    base, found = places(replace(model, lora=None), family), {}
    for layer, kind in layers(model).items():
        tensors: dict[str, list[Place]] = {}
        for weight, a, b in adapters(kind):
            [own] = base[layer][weight.name]  # no expert has adapters
            for place in _adapter_of(own, a, b):
                together = tensors.setdefault(place.tensor, [])
                if place.parameter not in [other.parameter for other in together]:
                    together.append(place)
        for tensor, together in tensors.items():
            _refuse_parts(tensor, together, family)
        found[layer] = [place for together in tensors.values() for place in together]
    return found


def _adapter_of(weight: Place, a: Parameter, b: Parameter) -> tuple[Place, Place]:
    """The places of A, [R, in], and of B, rows of [out, R]."""
    module = weight.tensor.removesuffix(".weight")
    into, out = a.dims[:-1], b.dims[1:]
    at, rank = weight.groups.index(out), a.shape[-1]
    depth = math.prod(a.shape[:-1])
    return (
        Place(
            parameter=a,
            tensor=f"{module}.lora_A.weight",
            shape=(rank, depth),
            start=(0, 0),
            groups=("R", into),
        ),
        Place(
            parameter=b,
            tensor=f"{module}.lora_B.weight",
            shape=(weight.shape[at], rank),
            start=(weight.start[at], 0),
            groups=(out, "R"),
        ),
    )


def _refuse_parts(tensor: str, together: list[Place], family: str) -> None:
    """Raises ConfigError unless the places are all of a tensor, and none is on another."""
    rows = sum(place.box_shape[0] for place in together)
    if rows != together[0].shape[0]:
        module = tensor.split(".")[-3]
        names = ", ".join(place.parameter.name.partition("_")[0] for place in together)
        raise ConfigError(
            "model.lora.targets",
            f"cannot be adapters of a {family}: its {module} is one map with one A",
            found=f"adapters of {names}, apart",
            fix=f"train with the target {module}, or export the whole model with --merge",
        )


def _places(
    parameters: Mapping[str, Parameter], table: Table, prefix: str
) -> dict[str, tuple[Place, ...]]:
    """Returns the places of a layer's parameters; some follow each other in one tensor."""
    missing = sorted(parameters.keys() - table.keys())
    assert not missing, f"no tensor for {missing}"
    ends: dict[str, int] = {}  # of what is placed so far in a tensor, along the dim that grows
    rows = []
    for name, (suffix, groups) in table.items():
        if name not in parameters:
            continue
        for expert, of_expert in _experts(parameters[name], suffix):
            tensor = suffix.format(expert)
            sizes = dict(zip(of_expert.dims, of_expert.shape, strict=True))
            box = [math.prod(sizes[dim] for dim in group) for group in groups]
            grows = _growing_dim(groups)
            start = [0] * len(groups)
            start[grows] = ends.get(tensor, 0)
            ends[tensor] = start[grows] + box[grows]
            rows.append((of_expert, tensor, groups, box, tuple(start), expert))
    found: dict[str, list[Place]] = {}
    for parameter, tensor, groups, box, start_of, expert in rows:
        box[_growing_dim(groups)] = ends[tensor]
        place = Place(
            parameter=parameter,
            tensor=prefix + tensor,
            shape=tuple(box),
            start=start_of,
            groups=groups,
            expert=expert,
        )
        found.setdefault(parameter.name, []).append(place)
    return {name: tuple(its_places) for name, its_places in found.items()}


def _experts(parameter: Parameter, suffix: str) -> Iterator[tuple[int | None, Parameter]]:
    """The parameter, or each expert of it, if each has a tensor."""
    if "{}" not in suffix:
        yield None, parameter
        return
    assert parameter.dims[0] == "E", f"{parameter.name} is not of experts"
    own = replace(parameter, shape=parameter.shape[1:], dims=parameter.dims[1:])
    for number in range(parameter.shape[0]):
        yield number, own


def _growing_dim(groups: tuple[str, ...]) -> int:
    """The dim along which parameters follow each other in one tensor: the one that is not D."""
    return next((i for i, group in enumerate(groups) if group != "D"), 0)
