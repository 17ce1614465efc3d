"""Train one large language model over clusters whose networks do not match, in JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holmesjax.trainer import Callback, Trainer

__all__ = ["Callback", "Trainer"]


def __getattr__(name: str) -> Any:
    """`holmesjax.Trainer`, imported when it is asked for: a plan can be made without JAX."""
    if name in __all__:
        from holmesjax import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'holmesjax' has no attribute {name!r}")
