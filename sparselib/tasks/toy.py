"""Copying and adding decimal digits: tasks of any length, to see what a model makes of lengths it never saw.

Sources: digits ("copy"), or two numbers with a plus between them ("addition"), the lowest digit first. Targets: the
same digits, or the sum's, the lowest first; then the end. The number of digits, of both numbers together, is uniform in
``shortest`` .. ``longest``, and so is how many of them the first number has. Tasks and lengths: the paper's table 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import require, require_choice, require_size
from ..config import ModelConfig
from .objectives import Batch
from .tokenizers import PAD, Vocabulary

TASKS = ("copy", "addition")
SYMBOLS = "0123456789+"
END, ZERO, PLUS, VOCAB_SIZE = 1, 2, 12, 16  # digit d is ZERO + d
EXAMPLES = 256  # of validation
ROWS = 16  # of a batch whose accuracy is counted
FIRST = 4  # digits, the longest when lengths begin to grow
RECIPE = "4"  # raised by hand when the same seed would give other examples


class Digits(Vocabulary):
    """Digits and the plus sign, one token a character, in the order in which they stand."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, 0, END, hashlib.sha256(f"toy {RECIPE}".encode()).hexdigest())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Errors: ValueError for a text with anything else in it."""
        for text in texts:
            require(set(text) <= set(SYMBOLS), "text", text, f"made of {SYMBOLS}")
        return [[ZERO + SYMBOLS.index(symbol) for symbol in text] for text in texts]

    def _decode_pieces(self, ids: list[int]) -> str:
        return "".join(SYMBOLS[token - ZERO] for token in ids if ZERO <= token <= PLUS)


@dataclass(frozen=True)
class ToySource:
    """Batches as :class:`~sparselib.tasks.objectives.SpanCorruption` gives them, made as they are asked for.

    All sources of a batch are of one length, so that training computes on little padding; those of :meth:`in_order`
    differ. During the first ``growing`` batches the longest grows from ``FIRST`` to ``longest``, by the same factor in
    every batch: what works for few digits takes most steps to find, and is then stretched.
    Errors: ValueError for an unknown task, no digits, fewer than 2 for an addition, ``longest`` below ``shortest``.
    """

    task: str
    shortest: int
    longest: int
    growing: int = 0
    windows: None = None

    def __post_init__(self) -> None:
        require_choice("task", self.task, TASKS)
        require_size("shortest", self.shortest, 1 + (self.task == "addition"))
        require_size("longest", self.longest)
        require(self.longest >= self.shortest, "longest", self.longest, f"at least shortest = {self.shortest}")
        require_size("growing", self.growing, 0)

    def batches(self, batch: int, seed: int, skip: int = 0) -> Iterator[Batch]:
        """As :class:`~sparselib.tasks.sources.Source` says; skipping is free."""
        require_size("batch", batch)
        require_size("seed", seed, 0)
        require_size("skip", skip, 0)
        return self._batches(batch, seed, skip)

    def _batches(self, batch: int, seed: int, skip: int) -> Iterator[Batch]:
        while True:
            rng = np.random.default_rng([seed, skip])
            length = int(rng.integers(self.shortest, self.longest_at(skip) + 1))
            yield self._make([length] * batch, rng)
            skip += 1

    def longest_at(self, index: int) -> int:
        """Digits of the longest row that batch ``index`` may have."""
        first = min(max(FIRST, self.shortest), self.longest)
        if index >= self.growing:
            return self.longest
        return round(first * (self.longest / first) ** (index / self.growing))

    def in_order(self, batch: int) -> Iterator[Batch]:
        """The same ``EXAMPLES`` examples at every call, ``batch`` at a time."""
        require_size("batch", batch)
        rng = np.random.default_rng(0)
        whole = self._make(rng.integers(self.shortest, self.longest + 1, EXAMPLES).tolist(), rng)
        for start in range(0, EXAMPLES, batch):
            yield {name: rows[start : start + batch] for name, rows in whole.items()}

    def _make(self, lengths: Sequence[int], rng: np.random.Generator) -> Batch:
        examples = [example(self.task, n, rng) for n in lengths]
        source, mask = _filled([source for source, _ in examples])
        target, target_mask = _filled([[*target, END] for _, target in examples])
        start = torch.full((len(lengths), 1), PAD)
        return {"source": source, "mask": mask, "target": torch.cat([start, target], 1), "target_mask": target_mask}


def example(task: str, n: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Tokens of a source with ``n`` digits, and of its target without the end."""
    if task == "copy":
        digits = (ZERO + rng.integers(10, size=n)).tolist()
        return digits, digits
    length = int(rng.integers(1, n))
    first, second = _number(length, rng), _number(n - length, rng)
    return [*_digits(first), PLUS, *_digits(second)], _digits(first + second)


def _number(length: int, rng: np.random.Generator) -> int:
    """A number of ``length`` digits, the highest not 0 if there are several."""
    digits = rng.integers(10, size=length)
    if length > 1:
        digits[0] = rng.integers(1, 10)
    return int("".join(map(str, digits)))


def _digits(number: int) -> list[int]:
    """Tokens of a number, the lowest digit first."""
    return [ZERO + int(digit) for digit in reversed(str(number))]


def _filled(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows as int64 (B, longest) with ``PAD`` behind, and where they are real."""
    lengths = torch.tensor([len(row) for row in rows])
    filled = torch.full((len(rows), int(lengths.max())), PAD)
    for row, tokens in zip(filled, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return filled, torch.arange(filled.shape[1]) < lengths[:, None]


@torch.no_grad()
def accuracy(model: nn.Module, source: ToySource, batch: int) -> dict[str, float]:
    """Share of tokens predicted right, each from the true ones before it, and of sequences without a fault.

    A sequence without a fault is what greedy decoding gives, too. The end counts as a token.
    """
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    right = tokens = whole = rows = 0
    for part in source.in_order(batch):
        moved = {name: tensor.to(device) for name, tensor in part.items()}
        logits = model(moved["source"], moved["target"][:, :-1], mask=moved["mask"])
        hits = (logits.argmax(-1) == moved["target"][:, 1:]) | ~moved["target_mask"]
        right += int((hits & moved["target_mask"]).sum())
        tokens += int(moved["target_mask"].sum())
        whole += int(hits.all(1).sum())
        rows += len(hits)
    model.train(was_training)
    return {"tokens": right / tokens, "sequences": whole / rows}


def ranges(longest: int) -> dict[str, tuple[int, int]]:
    """Shortest and longest number of digits that accuracies are of, if training had up to ``longest``.

    ``within``: the longest quarter of these; ``beyond``: more than twice as many, 256 to 300 for the paper's 128.
    """
    return {"within": (3 * longest // 4, longest), "beyond": (2 * longest, 300 * longest // 128)}


def accuracies(model: nn.Module, task: str, longest: int) -> dict[str, float]:
    """Both numbers of :func:`accuracy` in both :func:`ranges`, ``beyond.tokens`` and so on.

    A range with more positions than the model has is left out.
    """
    found: dict[str, float] = {}
    for name, (shortest, most) in ranges(longest).items():
        if most < cast(ModelConfig, model.config).max_len:  # the end, or the plus, is one more
            measured = accuracy(model, ToySource(task, shortest, most), ROWS)
            found |= {f"{name}.{measure}": value for measure, value in measured.items()}
    return found
