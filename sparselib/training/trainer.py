"""A model and its optimizer on the processes that train it: one update, one validation, all that must be kept.

Without a launcher there is one process; ``accelerate launch`` starts several, each with its part of every batch, and
the losses are those of the whole batch. Mixed precision is PyTorch's autocast to bfloat16 around the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..checks import NaNInput, require
from ..memory import peak_memory
from ..tasks.objectives import Batch
from .checkpoints import GENERATORS
from .config import OptimizerConfig
from .objectives import count_targets, mean_loss, predict, total_loss_
from .optimizers import make_optimizer, rate

_WHOLE = StateDictOptions(full_state_dict=True)  # also where a weight is spread over processes
_TO_SAVE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # which only the first process gets


class Trainer:
    """``model``, moved to this process's device, under the optimizer of ``config`` for ``steps`` updates.

    ``accumulate`` is the number of parts of a batch that are worked through one after the other.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, steps: int, *, accumulate: int = 1, precision: str = "fp32"
    ):
        self.accelerator = Accelerator(mixed_precision="no")  # accelerate's own cannot be changed within a process
        started, seen = int(os.environ.get("WORLD_SIZE", 1)), self.accelerator.num_processes
        require(seen == started, "processes", seen, f"the {started} launched; on CPUs, set ACCELERATE_USE_CPU=1")
        self.config, self.steps, self.accumulate, self.precision = config, steps, accumulate, precision
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model, config))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def bare_model(self) -> nn.Module:
        """The model without what the launcher wrapped around it."""
        return self.accelerator.unwrap_model(self.model)

    def peak_memory(self) -> int:
        """Most bytes held: on a GPU since this trainer was made, else by this process since it began."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_memory()

    def update(self, batch: Batch, step: int) -> float:
        """Update number ``step`` (from 1) on the sequences of all processes; returns their mean loss before it.

        Errors: FloatingPointError, naming the step, when an activation, the loss or a gradient is NaN or infinite; the
        weights are then as before.
        """
        with _diverging(step):
            return self._update(batch, step)

    def _update(self, batch: Batch, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.config, step, self.steps)
        self.model.train()
        self.optimizer.zero_grad()
        scale = self.accelerator.num_processes / count_targets(batch)  # gradients are averaged over processes
        parts = self._parts(batch)
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else self.accelerator.no_sync(self.model):
                loss = self._total(part, scale)
                self.accelerator.backward(loss)
            total += loss.detach()
        value = finite(self.accelerator.reduce(total, "mean").item(), step, "loss")
        clip = math.inf if self.config.clip is None else self.config.clip
        finite(float(self.accelerator.clip_grad_norm_(self.model.parameters(), clip)), step, "norm of the gradients")
        self.optimizer.step()
        return value

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch], step: int) -> float:
        """Mean loss of all ``batches``, nats a token, no dropout or noise. Each process goes through all of them."""
        self.model.eval()
        with _diverging(step):
            return finite(mean_loss(self._total, batches), step, "validation loss")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights by name; and, in one dictionary, the optimizer's tensors and the generators of all processes.

        All processes must ask, the first gets the answer.
        """
        weights, optimizer = self._state(_TO_SAVE)
        tensors = {
            f"{weight}/{name}": v for weight, kept in optimizer.get("state", {}).items() for name, v in kept.items()
        }
        generators = self.accelerator.gather(_generators(self.device)[None].to(self.device)).cpu()
        return weights, tensors | {GENERATORS: generators}

    def load_state(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Undo :meth:`state`. Errors: ValueError if it is another model's or optimizer's."""
        own, optimizer = self._state(_WHOLE)
        places = {f"{weight}/{name}": (weight, name) for weight, kept in optimizer["state"].items() for name in kept}
        _require_same(own, weights)
        _require_same({key: optimizer["state"][weight][name] for key, (weight, name) in places.items()}, state)
        for key, (weight, name) in places.items():
            optimizer["state"][weight][name] = state[key]
        both: dict[str, Any] = dict(model_state_dict=weights, optim_state_dict=optimizer)
        set_state_dict(self.model, self.optimizer.optimizer, **both, options=_WHOLE)
        _set_generators(state[GENERATORS][self.accelerator.process_index], self.device)

    def _state(self, options: StateDictOptions) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights by name, and the optimizer's ``state`` by the weights' names."""
        weights, optimizer = get_state_dict(self.model, self.optimizer.optimizer, options=options)
        return cast(dict[str, Tensor], weights), cast(dict[str, Any], optimizer)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true in some process."""
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.device)).item())

    def _parts(self, batch: Batch) -> list[Batch]:
        """This process's sequences of the batch, in ``accumulate`` parts."""
        size, processes = len(next(iter(batch.values()))), self.accelerator.num_processes
        pieces = processes * self.accumulate
        allowed = f"a multiple of processes x accumulate = {processes} x {self.accumulate}"
        require(size % pieces == 0, "batch", size, allowed)
        first = self.accelerator.process_index * self.accumulate
        cut = {name: tensor.split(size // pieces) for name, tensor in batch.items()}
        return [{name: part[first + i] for name, part in cut.items()} for i in range(self.accumulate)]

    def _total(self, batch: Batch, scale: float = 1.0) -> Tensor:
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with self._autocast():
            logits, targets, mask = predict(self.model, batch)
        return total_loss_(logits, targets, mask, scale)

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def finite(loss: float, step: int, name: str) -> float:
    """``loss`` itself. Errors: FloatingPointError if it is none."""
    if not math.isfinite(loss):
        raise _diverged(f"{name} is {loss}", step)
    return loss


def _diverged(what: str, step: int) -> FloatingPointError:
    return FloatingPointError(f"{what} at step {step}: lower the learning rate or lengthen the warm-up")


@contextmanager
def _diverging(step: int) -> Iterator[None]:
    """A layer that is given NaN refuses it, before there is a loss to look at."""
    try:
        yield
    except NaNInput:
        raise _diverged("an activation is NaN", step) from None


def _require_same(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        shape = tuple(found[name].shape) if name in found else "missing"
        require(shape == tuple(tensor.shape), f"{name} in the checkpoint", shape, f"{tuple(tensor.shape)}")


def _generators(device: torch.device) -> Tensor:
    """State of the generators that training draws from: bytes, the device's after the CPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_generators(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())  # PyTorch reads from where the memory of a view begins
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:].clone(), device)
