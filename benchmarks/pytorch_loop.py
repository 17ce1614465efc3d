"""The model of `models/gpt.py` and its training loop, as one writes them in PyTorch; one thread."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from holmesjax.config import ModelConfig, OptimizerConfig
from holmesjax.layer_specs.model_layers import EMBED, HEAD, layer_names

TABLES = ("token.weight", "position.weight", "embed_tokens.weight")  # without weight decay


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.num_heads = c.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)
        self.up = nn.Linear(c.width, c.feed_forward_width, bias=False)
        self.down = nn.Linear(c.feed_forward_width, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, L, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, L, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(B, L, D))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.width)
        self.position = nn.Embedding(c.context_length, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.width)
        self.output = nn.Linear(c.width, c.vocab_size, bias=False)

    def forward(self, token_BL: torch.Tensor, target_BL: torch.Tensor) -> torch.Tensor:
        x = self.token(token_BL) + self.position.weight[: token_BL.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), target_BL.flatten())


def weights(c: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """`layer.init_params` under PyTorch's names; its matrices are transposed."""

    def flat(array: np.ndarray) -> np.ndarray:
        return array.reshape(c.width, -1).T

    found = {
        "token.weight": params[EMBED]["token_VD"],
        "output.weight": params[HEAD]["output_DV"].T,
    }
    if c.positions == "learned":
        found["position.weight"] = params[EMBED]["position_PD"]
    norms = {"norm": params[HEAD]["norm"]}
    for i, layer in enumerate(layer_names(c.num_layers)[1:-1]):
        p, to = params[layer], f"blocks.{i}"
        names = ("query_DHK", "key_DGK", "value_DGK")
        found[f"{to}.qkv.weight"] = np.concatenate([flat(p[name]) for name in names])
        found[f"{to}.out.weight"] = p["out_HKD"].reshape(-1, c.width).T
        gates = [p[name].T for name in ("gate_DF", "up_DF") if name in p]
        found[f"{to}.up.weight"] = np.concatenate(gates)
        found[f"{to}.down.weight"] = p["down_FD"].T
        norms |= {f"{to}.{norm}": p[norm] for norm in ("attention_norm", "mlp_norm")}
    for to, norm in norms.items():
        found |= {f"{to}.weight": norm["scale_D"]}
        found |= {f"{to}.bias": norm["bias_D"]} if "bias_D" in norm else {}
    return found


def make_gpt(model: ModelConfig, params: Any) -> GPT:
    """With the parameters of `layer.init_params`."""
    gpt = GPT(model)
    arrays = weights(model, params)
    gpt.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in arrays.items()})
    return gpt


def make_optimizer(module: nn.Module, c: OptimizerConfig) -> torch.optim.Optimizer:
    """Makes AdamW for the model, or for a part of it that keeps the names of its tables."""

    def decays(name: str, x: torch.Tensor) -> bool:
        return x.ndim > 1 and not name.endswith(TABLES)

    groups = [
        {
            "params": [x for name, x in module.named_parameters() if decays(name, x) == decay],
            "weight_decay": c.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        groups,
        lr=c.learning_rate,
        betas=(c.beta1, c.beta2),
        eps=c.epsilon,
        fused=True,  # the fastest of its variants here
    )


def make_step(
    model: ModelConfig, c: OptimizerConfig, params: Any, inputs: dict[str, np.ndarray]
) -> Callable[[], tuple[torch.Tensor]]:
    torch.set_num_threads(1)
    gpt = make_gpt(model, params)
    token_BL, target_BL = (torch.from_numpy(inputs[n]).long() for n in ("token_BL", "target_BL"))
    return clipped_step(gpt, make_optimizer(gpt, c), c, lambda: gpt(token_BL, target_BL))


def clipped_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    c: OptimizerConfig,
    loss_of: Callable[[], torch.Tensor],
) -> Callable[[], tuple[torch.Tensor]]:
    """A function that takes a step with clipped gradients, and returns its loss."""

    def step() -> tuple[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        assert c.clip_norm is not None
        nn.utils.clip_grad_norm_(module.parameters(), c.clip_norm)
        optimizer.step()
        return (loss.detach(),)

    return step
