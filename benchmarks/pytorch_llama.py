"""The Llama of `models/gpt.py` and its training loop, as one writes them in PyTorch for one GPU."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.pytorch_loop import make_optimizer, weights
from holmesjax.config import Config, ModelConfig
from holmesjax.models.layer import init_params

EPSILON = 1e-5


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config = c
        self.attention_norm = nn.RMSNorm(c.width, EPSILON)
        self.mlp_norm = nn.RMSNorm(c.width, EPSILON)
        linear = lambda ins, outs: nn.Linear(ins, outs, bias=False)
        heads, kv_heads = c.num_heads * c.head_width, c.kv_heads * c.head_width
        self.qkv = linear(c.width, heads + 2 * kv_heads)
        self.out = linear(heads, c.width)
        self.up = linear(c.width, 2 * c.feed_forward_width)
        self.down = linear(c.feed_forward_width, c.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, (B, L, _) = self.config, x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, L, -1, c.head_width).transpose(1, 2)
        q, k, v = qkv.split([c.num_heads, c.kv_heads, c.kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attention.transpose(1, 2).reshape(B, L, -1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.width, EPSILON)
        self.output = nn.Linear(c.width, c.vocab_size, bias=False)
        self.recomputes = False
        half = c.head_width // 2
        frequency = c.rotary_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(c.context_length)[:, None] * frequency[None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, token_BL: torch.Tensor, target_BL: torch.Tensor) -> torch.Tensor:
        x = self.token(token_BL)
        for block in self.blocks:
            args = x, self.cos, self.sin
            x = checkpoint(block, *args, use_reentrant=False) if self.recomputes else block(*args)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), target_BL.flatten())


def train(
    config: Config, inputs: Callable[[int], dict[str, np.ndarray]], *, on_gpu: bool
) -> Iterator[dict[str, Any]]:
    """How it trains, then the seconds and the loss of each step, then the peak of its memory."""
    device = torch.device("cuda" if on_gpu else "cpu")
    model = Llama(config.model)
    arrays = weights(config.model, init_params(config.model, config.train.seed))
    model.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in arrays.items()})
    del arrays
    model.to(device)
    largest = config.train.global_batch
    for model.recomputes in (False, True):
        sequences = largest
        while sequences:
            try:
                yield from _steps(model, config, inputs, sequences, device)
                return
            except torch.OutOfMemoryError:
                # Nothing was told yet, or it would not have fitted before.
                sequences //= 2
                torch.cuda.empty_cache()
    raise SystemExit("PyTorch ran out of memory with one sequence at a time")


def _steps(
    model: Llama,
    config: Config,
    inputs: Callable[[int], dict[str, np.ndarray]],
    sequences: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    on_gpu = device.type == "cuda"
    optimizer = make_optimizer(model, config.optimizer)
    compiled = model
    if on_gpu:
        torch.compiler.reset()  # else another number of sequences makes it compile for any number
        compiled = torch.compile(model)
    num_microbatches = config.train.global_batch // sequences

    def step(number: int) -> float:
        batch = {name: torch.from_numpy(x).long().to(device) for name, x in inputs(number).items()}
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for n in range(num_microbatches):
            here = slice(n * sequences, (n + 1) * sequences)
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = compiled(batch["token_BL"][here], batch["target_BL"][here])
            (loss / num_microbatches).backward()
            total += loss.detach() / num_microbatches
        assert config.optimizer.clip_norm is not None
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        return float(total)  # waits

    kept = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    step(0)  # whether it fits
    model.load_state_dict(kept)
    optimizer = make_optimizer(model, config.optimizer)
    recompute = "full" if model.recomputes else "none"
    yield {"how": f"{num_microbatches} microbatches, activation checkpointing {recompute}"}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for number in range(config.train.steps):
        begin = time.perf_counter()
        loss = step(number)
        yield {"s": time.perf_counter() - begin, "loss": loss}
    yield {"peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}
