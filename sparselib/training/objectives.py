"""What is minimised: the cross-entropy of the tokens that came, in nats.

Letters: V = vocabulary; z logits; p = softmax(z). The logits are by far a small model's largest tensor, so on a CPU
the loss works in their memory: PyTorch's own takes three more tensors of that size and twelve times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..checks import require
from ..tasks.objectives import Batch

ROWS = 64  # at 4,096 words 1 MB, which the second-level cache holds


def next_token_loss(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of ``-log p(target)`` in nats a token (natural logarithm; the paper's log-perplexity), a scalar.

    ``logits`` (B, T, V) are the predictions, ``targets`` (B, T) the tokens that came: the inputs moved by one.
    ``mask`` (B, T): 1 = counts. Written to be read; :func:`total_loss_` is held to it.
    """
    _check(logits, targets, mask)
    losses = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.mean() if mask is None else losses[mask.flatten().bool()].mean()


def total_loss_(logits: Tensor, targets: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """``scale`` times the sum of what :func:`next_token_loss` takes the mean of; on a CPU, ``logits`` are written over.

    Who still needs them must copy them first. The sum is exact: logits are not cut and nothing is drawn.
    """
    _check(logits, targets, mask)
    z, t = logits.flatten(0, -2), targets.flatten()
    weights = torch.full(t.shape, scale, dtype=z.dtype, device=z.device)
    weights = weights if mask is None else weights * mask.flatten()
    if z.device.type == "cpu" and z.dtype in (torch.float32, torch.float64):
        return _InPlace.apply(z, t, weights)
    return cross_entropy(z.float(), t, reduction="none") @ weights.float()


class _InPlace(torch.autograd.Function):
    """sum_i w_i (log sum_v exp z_iv - z_i,target): z (n, V) becomes its own gradient w_i (p_iv - [v = target])."""

    @staticmethod
    def forward(ctx, z: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        total = z.new_zeros(())
        gradient = z.detach()  # shares z's version, so that autograd notices if somebody needs the old values
        for part, t, w in zip(*(x.split(ROWS) for x in (gradient, targets[:, None], weights[:, None])), strict=True):
            largest, chosen = part.amax(-1, keepdim=True), part.gather(1, t)
            torch.softmax(part, -1, out=part)
            log_sum = largest - part.amax(-1, keepdim=True).log()  # p of the largest is 1/V or more: no underflow
            total += ((log_sum - chosen) * w).sum()
            part.mul_(w).scatter_add_(1, t, -w)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient if grads[0] == 1 else gradient * grads[0], None, None


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits (B, T, V) of ``model`` for a batch, the tokens (B, T) that came, and which of these count (None: all).

    Batches are those of :mod:`~sparselib.tasks.objectives`, for a decoder or for an encoder-decoder.
    """
    if "tokens" in batch:
        tokens = batch["tokens"]
        return model(tokens[:, :-1]), tokens[:, 1:], None
    target = batch["target"]
    return model(batch["source"], target[:, :-1], mask=batch["mask"]), target[:, 1:], batch["target_mask"]


def count_targets(batch: Batch) -> int:
    """How many tokens of a batch are to be predicted."""
    return batch["tokens"][:, 1:].numel() if "tokens" in batch else int(batch["target_mask"].sum())


def mean_loss(total: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> float:
    """Mean over all targets of ``batches``, each alike; ``total`` gives the sum of the losses of one."""
    losses, targets = 0.0, 0
    for batch in batches:
        losses += total(batch).item()
        targets += count_targets(batch)
    return losses / targets


def _check(logits: Tensor, targets: Tensor, mask: Tensor | None) -> None:
    shape = tuple(logits.shape[:-1])
    require(tuple(targets.shape) == shape, "targets.shape", tuple(targets.shape), f"{shape}")
    if mask is not None:
        require(tuple(mask.shape) == shape, "mask.shape", tuple(mask.shape), f"{shape}")
