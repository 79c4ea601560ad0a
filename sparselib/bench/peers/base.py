"""What the peers share: the job a child process is given, the decoder it times, and fast random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config import ModelConfig, model_parts

SOURCE_LENGTH = 16  # tokens given to the encoder, as in the paper's protocol
SCALE = 0.02  # standard deviation of the random weights
DRAW = 1_048_573  # weights drawn: a prime, so that no layer's size is a multiple and layers differ


@dataclass(frozen=True)
class Job:
    """One peer to time: ``tokens`` steps counted, after ``context`` tokens in the cache and ``warmup`` steps."""

    peer: str
    dtype: str
    threads: int
    config: ModelConfig
    tokens: int
    context: int
    warmup: int
    files: str  # folder for converted weights, shared by the jobs of one comparison

    @property
    def positions(self) -> int:
        return self.context + self.warmup + self.tokens

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**fields | {"config": ModelConfig(**fields["config"])})


@dataclass(frozen=True)
class Decoder:
    """A peer's model with ``context`` tokens in its cache: ``step(token id)`` decodes one token at batch 1.

    ``bytes`` are those of the weights that one step touches; ``shape`` says what they are the weights of.
    """

    step: Callable[[int], Any]
    version: str
    shape: str
    bytes: int


def weights_read(config: ModelConfig) -> int:
    """Weights of a :class:`~sparselib.models.Transformer` that a decoded token touches."""
    return sum(part.reads for part in model_parts(config).values())


def shape_of(config: ModelConfig, kind: str) -> str:
    return f"{kind}, {config.n_layers} layers, d_model {config.d_model}, d_ff {config.d_ff}"


def with_random_weights(make: Callable[[], Any]) -> Any:
    """The module ``make()`` returns, in evaluation mode, its weights taken from one random draw.

    Initialising 450M weights would take longer than timing them. Every weight starts elsewhere in the draw, because
    CTranslate2 stores equal ones once, and layers that share memory would be decoded from the CPU's cache.
    """
    with torch.device("meta"):
        module: nn.Module = make()
    module.to_empty(device="cpu").eval()
    draw, start = SCALE * torch.randn(DRAW), 0
    with torch.no_grad():
        for weight in module.parameters():
            size = weight.numel()
            weight.copy_(draw.repeat(2 + size // DRAW)[start : start + size].view_as(weight))
            start = (start + size) % DRAW
    return module


def random_tokens(config: ModelConfig, length: int) -> Tensor:
    """Token ids (1, length)."""
    return torch.randint(config.vocab_size, (1, length))


def build_once(path: Path, build: Callable[[Path], Any]) -> Path:
    """``path``, made by ``build(path)`` unless it is there; a build that was cut short leaves nothing there."""
    if not path.exists():
        unfinished = path.with_name("unfinished_" + path.name)
        build(unfinished)
        unfinished.rename(path)
    return path
