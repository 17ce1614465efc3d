"""The bytes that layers hand over."""

from holmesjax.config import ModelConfig
from holmesjax.costs import work

MODEL = ModelConfig(num_layers=3, width=64, num_heads=4, context_length=24, vocab_size=96)


def test_bfloat16_halves_a_boundary():
    sent = lambda dtype: work.boundary_bytes(MODEL, 7, dtype)
    assert sent("float32") == 2 * sent("bfloat16")
