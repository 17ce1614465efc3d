"""Models whose parameters and products are counted."""

from holmesjax.config import ModelConfig

SMALL = {"num_layers": 3, "width": 64, "num_heads": 4, "context_length": 24, "vocab_size": 96}


MODELS = {
    "gpt2": ModelConfig(**SMALL, positions="learned"),
    "llama": ModelConfig(
        **SMALL, num_kv_heads=2, mlp_width=160, activation="swiglu", norm="rms_norm"
    ),
    "odd heads": ModelConfig(**SMALL, num_kv_heads=2, head_dim=32, norm="rms_norm"),
    "tied": ModelConfig(**SMALL, tied_embeddings=True),
}
