"""The models: dense baseline and Scaling Transformer are one class with different configs."""

from .transformer import Transformer, TransformerState

__all__ = ["Transformer", "TransformerState"]
