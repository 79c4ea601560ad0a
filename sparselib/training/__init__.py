"""Training: the objective and a small loop."""

from .loop import TrainingRun, evaluate, train
from .objectives import next_token_loss

__all__ = ["TrainingRun", "evaluate", "next_token_loss", "train"]
