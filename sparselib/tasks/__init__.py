"""What the models are trained on: text, tokenizers, objectives, batches."""

from .sources import Source, Splits, load_splits

__all__ = ["Source", "Splits", "load_splits"]
