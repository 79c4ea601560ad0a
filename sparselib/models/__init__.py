"""The models: dense baseline and Scaling Transformer are one class with different configs, Terraformer is the other."""

from ..config import ModelConfig
from .terraformer import Terraformer, TerraformerState
from .transformer import Transformer, TransformerState

__all__ = ["Terraformer", "TerraformerState", "Transformer", "TransformerState", "make_model"]


def make_model(config: ModelConfig) -> Transformer | Terraformer:
    """The model that ``config.architecture`` names."""
    return Terraformer(config) if config.architecture == "terraformer" else Transformer(config)
