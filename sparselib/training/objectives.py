"""What is minimised."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from ..checks import require


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``-log p(target)`` in nats a token (natural logarithm; the paper's log-perplexity), a scalar.

    ``logits`` (B, T, vocab) are the predictions, ``targets`` (B, T) the tokens that came: the inputs moved by
    one.
    """
    require(
        targets.shape == logits.shape[:-1],
        "targets.shape",
        tuple(targets.shape),
        f"{tuple(logits.shape[:-1])}",
    )
    return cross_entropy(logits.flatten(0, -2), targets.flatten())
