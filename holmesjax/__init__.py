"""Train one large language model over clusters whose networks do not match, in JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holmesjax.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """`holmesjax.Trainer`, imported when it is asked for: a plan can be made without JAX."""
    if name == "Trainer":
        from holmesjax.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'holmesjax' has no attribute {name!r}")
