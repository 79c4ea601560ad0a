"""Training: the objective, the optimizers, the loop and its checkpoints."""

from .config import DataConfig, OptimizerConfig, TrainConfig
from .loop import TrainingResult, TrainingRun, evaluate, train, train_run
from .objectives import next_token_loss

__all__ = [
    "DataConfig",
    "OptimizerConfig",
    "TrainConfig",
    "TrainingResult",
    "TrainingRun",
    "evaluate",
    "next_token_loss",
    "train",
    "train_run",
]
