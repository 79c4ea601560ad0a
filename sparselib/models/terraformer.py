"""Terraformer (section 4): reversible, recurrent, no cross-attention: the decoder reads the encoder's vectors as text.

Letters: B batch; T1, T2 lengths of source and target; n_b real tokens of row b's source; x1, x2 the two streams.
A row of the decoder's input is its n_b source vectors, then its T2 target vectors, then what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checks import check_batch, check_mask, check_tokens, require, require_size
from ..config import ModelConfig
from ..layers import Dense, Layer, RecurrentBranch, ReversibleStack, in_chunks
from ..layers.base import Advance, join_states, prefill_with, step_with
from .transformer import POSITIONS, layer_norm, make_attention, make_feedforward, make_unembedding


class AttentionHalf(Layer):
    """x -> dropout(attention(LN(x)))."""

    def __init__(self, config: ModelConfig, kind: str, causal: bool):
        super().__init__()
        self.norm, self.attention = layer_norm(config), make_attention(config, kind, causal)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, L, d_model) -> the same
        return self.dropout(self.attention(self.norm(x), mask))

    def init_state(self, batch: int) -> Any:
        return self.attention.init_state(batch)

    def prefill(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.attention.prefill(self.norm(x), state)

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.attention.step(self.norm(x_t), state)


class FeedForwardHalf(Layer):
    """x -> dropout(FF(LN(x)) + branch(LN'(x))), the recurrent branch only with ``sru_units``.

    Its padding, at the end, is seen by no real position: the mask that an attention needs is of no use here.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm, self.feedforward = layer_norm(config), make_feedforward(config)
        self.recurrent = config.sru_units > 0
        if self.recurrent:
            self.recurrence_norm = layer_norm(config)
            self.recurrence = RecurrentBranch(config.d_model, config.sru_units, config.sru_layers)
        self.chunk, self.dropout = config.ff_chunk, nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, L, d_model) -> the same
        z = self.norm(x)
        y = in_chunks(self.feedforward, z, self.chunk) if self.chunk else self.feedforward(z)
        return self.dropout(y + self.recurrence(self.recurrence_norm(x)) if self.recurrent else y)

    def init_state(self, batch: int) -> tuple[Any, Any]:
        return self.feedforward.init_state(batch), self.recurrence.init_state(batch) if self.recurrent else None

    def prefill(self, x: Tensor, state: tuple[Any, Any]) -> tuple[Tensor, tuple[Any, Any]]:
        return self._advance(x, state, prefill_with)

    def step(self, x_t: Tensor, state: tuple[Any, Any]) -> tuple[Tensor, tuple[Any, Any]]:
        y, state = self._advance(x_t[:, None], state, step_with)
        return y[:, 0], state

    def _advance(self, x: Tensor, state: tuple[Any, Any], how: Advance) -> tuple[Tensor, tuple[Any, Any]]:
        y, feedforward = self._in_parts(self.norm(x), state[0], how)
        if not self.recurrent:
            return y, (feedforward, None)
        z, recurrence = how(self.recurrence, self.recurrence_norm(x), state[1])
        return y + z, (feedforward, recurrence)

    def _in_parts(self, x: Tensor, state: Any, how: Advance) -> tuple[Tensor, Any]:
        """The feedforward on ``ff_chunk`` positions after the other: a long prompt needs the memory of one chunk."""
        parts = []
        for part in x.split(self.chunk or x.shape[1], dim=1):
            y, state = how(self.feedforward, part, state)
            parts.append(y)
        return torch.cat(parts, dim=1), state


def _places(lengths: Tensor, n_target: int) -> Tensor:
    """Where in its row each target vector stands: (B, T2)."""
    return lengths[:, None] + torch.arange(n_target, device=lengths.device)


def concatenate(source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    """(B, T1, d), (B, T2, d), n_b (B,) -> (B, T1 + T2, d): target vectors right after the last real source vector.

    Padding of the source that they do not cover stays where it is, behind them; the rest is zeros.
    """
    room = nn.functional.pad(source, (0, 0, 0, target.shape[1]))
    places = _places(lengths, target.shape[1])[..., None].expand_as(target)
    return room.scatter(1, places, target.to(room.dtype))


def strip(x: Tensor, lengths: Tensor, n_target: int) -> Tensor:
    """The target's part of what :func:`concatenate` gave: (B, T1 + T2, d) -> (B, T2, d)."""
    places = _places(lengths, n_target)[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, places)


@dataclass(frozen=True)
class TerraformerState:
    """What decoding remembers: positions of the target so far and a state for each half. A value."""

    position: int
    batch: int
    halves: tuple[Any, ...]


class Terraformer(nn.Module):
    """Reversible encoder-decoder; sizes and layers as ``config`` says, ``architecture="terraformer"``.

    Encoder blocks: x1 += attention(x2), swap, x1 += feedforward(x2), swap, without the second swap if not
    ``two_swaps``. Decoder blocks: ``n_attentions`` times attention and swap, then feedforward and swap, causal over
    source and target together. At the end the mean of both streams, LN, the target's positions, the unembedding. One
    embedding for both sides, a position table for each. Nothing is shifted inside: logits at t are the prediction for
    target position t + 1. ``remember``: what the backward pass has from the forward pass, see :class:`ReversibleStack`.
    """

    def __init__(self, config: ModelConfig, *, remember: str = "choices"):
        super().__init__()
        require(config.architecture == "terraformer", "architecture", config.architecture, "'terraformer'")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        make_positions = POSITIONS[config.positions]
        self.source_positions, self.positions = (make_positions(config.max_len, config.d_model) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        encoder: list[nn.Module] = []
        decoder: list[nn.Module] = []
        for _ in range(config.n_encoder_layers):
            encoder += [AttentionHalf(config, config.attention_of_encoder, causal=False), FeedForwardHalf(config)]
        for _ in range(config.n_layers):
            decoder += [AttentionHalf(config, config.attention, causal=True) for _ in range(config.n_attentions)]
            decoder.append(FeedForwardHalf(config))
        swaps = [True, config.two_swaps] * config.n_encoder_layers
        self.encoder = ReversibleStack(encoder, swaps, remember if config.reversible_encoder else "everything")
        if not config.reversible_encoder:
            self.encoder_output, self.encoder_norm = Dense(config.d_model, config.d_model), layer_norm(config)
        self.decoder = ReversibleStack(decoder, remember=remember)
        self.norm, self.unembedding = layer_norm(config), make_unembedding(config)

    def forward(self, source: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Logits (B, T2, V) for ``target`` (B, T2), given ``source`` (B, T1) and its ``mask``: 1 = real, then 0.

        With hashing, padding leaves a row's buckets as they are; but a row's first chunk has the batch's last one as
        its neighbour, as in the reference code, so what it sees depends on how wide the batch is. Errors:
        ValueError naming the input, also for padding that is not at the end of its row.
        """
        for tokens, name in ((source, "source"), (target, "target")):
            check_tokens(tokens, self.config.vocab_size, 2, name)
        require(len(target) == len(source), "target.shape", tuple(target.shape), f"of batch {len(source)}")
        starts = self.positions.starts(len(source), max(source.shape[1], target.shape[1]))
        x1, x2, lengths = self._encode(source, mask, starts)
        d = self.dropout(self.positions(self.embedding(target), starts))
        streams = concatenate(x1, d, lengths), concatenate(x2, d, lengths)
        real = None  # what is left behind a row is seen by nobody; but hashing would give it places among the others
        if mask is not None and self.config.lsh is not None:
            real = torch.arange(streams[0].shape[1], device=d.device) < lengths[:, None] + d.shape[1]
        y1, y2 = self.decoder(*streams, mask=real)
        return self._logits(strip(y1, lengths, d.shape[1]), strip(y2, lengths, d.shape[1]))

    def init_state(self, batch: int, source: Tensor, mask: Tensor | None = None) -> TerraformerState:
        """State before the first target token, the sources (B, T1) read; rows may differ in length."""
        require_size("batch", batch, minimum=0)
        check_tokens(source, self.config.vocab_size, 2, "source")
        require(len(source) == batch, "source.shape", tuple(source.shape), f"of batch {batch}")
        x1, x2, lengths = self._encode(source, mask)
        empty = TerraformerState(0, batch, tuple(half.init_state(batch) for half in self._halves()))
        if not batch or bool((lengths == lengths[0]).all()):
            n = int(lengths[0]) if batch else x1.shape[1]
            return self._advance(x1[:, :n], x2[:, :n], empty, prefill_with)[1]
        rows = []
        for row, n in enumerate(lengths.tolist()):
            state = TerraformerState(0, 1, tuple(half.init_state(1) for half in self._halves()))
            rows.append(self._advance(x1[row : row + 1, :n], x2[row : row + 1, :n], state, prefill_with)[1])
        halves = zip(*(row.halves for row in rows), strict=True)
        return replace(empty, halves=tuple(join_states(states) for states in halves))

    def step(self, tokens: Tensor, state: TerraformerState) -> tuple[Tensor, TerraformerState]:
        """The next token of every sequence: (B,) -> logits (B, V) and the new state."""
        check_tokens(tokens, self.config.vocab_size, 1)
        logits, state = self._decode(tokens[:, None], state, step_with)
        return logits[:, 0], state

    def prefill(self, tokens: Tensor, state: TerraformerState) -> tuple[Tensor, TerraformerState]:
        """The next L target tokens at once: (B, L) -> logits (B, L, V) and the new state."""
        check_tokens(tokens, self.config.vocab_size, 2)
        return self._decode(tokens, state, prefill_with)

    def _encode(self, source: Tensor, mask: Tensor | None, starts: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The source's vectors in both streams (B, T1, d_model), and how many of each row are real."""
        lengths = torch.full((len(source),), source.shape[1], device=source.device)
        if mask is not None:
            mask = check_mask(mask, *source.shape)
            require(bool((mask[:, 1:] <= mask[:, :-1]).all()), "mask", "padding in front", "padded at the end only")
            lengths = mask.sum(1)
        e = self.dropout(self.source_positions(self.embedding(source), starts))
        x1, x2 = self.encoder(e, e, mask=mask)
        if not self.config.reversible_encoder:
            x1 = x2 = self.encoder_norm(self.encoder_output((x1 + x2) / 2))
        return x1, x2, lengths

    def _decode(self, tokens: Tensor, state: TerraformerState, how: Advance) -> tuple[Tensor, TerraformerState]:
        check_batch(tokens, state.batch, "tokens")
        d = self.positions(self.embedding(tokens), state.position)
        (y1, y2), state = self._advance(d, d, state, how)
        return self._logits(y1, y2), replace(state, position=state.position + tokens.shape[1])

    def _advance(
        self, x1: Tensor, x2: Tensor, state: TerraformerState, how: Advance
    ) -> tuple[tuple[Tensor, Tensor], TerraformerState]:
        """The next positions of both streams through the decoder, which swaps after every half."""
        states = []
        for half, part in zip(self._halves(), state.halves, strict=True):
            y, part = how(half, x2, part)
            x1, x2 = x2, x1 + y
            states.append(part)
        return (x1, x2), replace(state, halves=tuple(states))

    def _logits(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.unembedding(self.norm((y1 + y2) / 2))

    def _halves(self) -> Iterator[Layer]:
        return iter(cast("Iterable[Layer]", self.decoder.halves))
