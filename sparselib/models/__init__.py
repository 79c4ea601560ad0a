"""The models: dense baseline and Scaling Transformer are one class with different configs, Terraformer is the other."""

from ..config import ModelConfig
from .terraformer import Terraformer, TerraformerState
from .transformer import Transformer, TransformerState

__all__ = ["Terraformer", "TerraformerState", "Transformer", "TransformerState", "make_model"]


def make_model(config: ModelConfig, remember: str = "choices") -> Transformer | Terraformer:
    """The model that ``config.architecture`` names; ``remember`` is for a Terraformer."""
    return Terraformer(config, remember=remember) if config.architecture == "terraformer" else Transformer(config)
