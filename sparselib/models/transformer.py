"""The dense baseline and the Scaling Transformer: one class, the config says which layers it is made of.

Pre-norm blocks (section 1): x += attention(LN(x)); x += cross(LN(x), memory) in the decoder of an encoder-decoder;
x += feedforward(LN(x)), with ``sru_units`` + a recurrent branch of x; a last LN and the unembedding. x starts as
embedding + position.
Letters: B batch, T length, V = vocab_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checks import check_mask, check_prefix, check_tokens, require, require_choice, require_size
from ..config import TRANSFORMERS, ModelConfig
from ..layers import (
    BlockFeedForward,
    CrossAttention,
    DenseAttention,
    DenseLSHAttention,
    DenseUnembedding,
    FeedForward,
    LearnedPositions,
    RecurrentBranch,
    SelfAttention,
    ShiftedPositions,
    SinusoidalPositions,
    SparseAttention,
    SparseCrossAttention,
    SparseFeedForward,
    SparseLSHAttention,
    SparseUnembedding,
    SwitchFeedForward,
)
from ..layers.base import Advance, prefill_with, step_with

POSITIONS = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions, "shifted": ShiftedPositions}


def make_attention(config: ModelConfig, kind: str, causal: bool) -> SelfAttention:
    """The self-attention that ``kind`` names, at the config's sizes; by hashing if it says so."""
    d_model, n_heads, hashing = config.d_model, config.n_heads, {} if config.lsh is None else asdict(config.lsh)
    if kind == "dense":
        return (DenseLSHAttention if hashing else DenseAttention)(d_model, n_heads, causal, **hashing)
    if hashing:
        sizes = (d_model, n_heads, config.n_modules, config.kernel_size)
        return SparseLSHAttention(*sizes, value_kernel_size=config.v_kernel, causal=causal, **hashing)
    return SparseAttention(
        config.d_model,
        config.n_heads,
        config.n_modules,
        config.kernel_size,
        kind,
        value_kernel_size=config.v_kernel,
        causal=causal,
    )


def make_cross_attention(config: ModelConfig) -> CrossAttention:
    if config.cross_attention == "dense":
        return CrossAttention(config.d_model, config.n_heads)
    return SparseCrossAttention(config.d_model, config.n_heads, config.n_modules, config.kernel_size)


def make_feedforward(config: ModelConfig) -> FeedForward:
    d_model, d_ff, n, bias = config.d_model, config.d_ff, config.ff_sparsity, config.hidden_bias
    gumbel = dict(temperature=config.temperature, hard_share=config.hard_share)
    if config.feedforward == "dense":
        return FeedForward(d_model, d_ff, bias)
    if config.feedforward == "switch":
        return SwitchFeedForward(d_model, d_ff, n, bias)
    if config.feedforward == "block":
        return BlockFeedForward(d_model, d_ff, n, bias, reading=config.controller, **gumbel)
    controller = dict(controller=config.controller, controller_bias=config.controller_bias, hidden_bias=bias)
    return SparseFeedForward(d_model, d_ff, n, config.d_lowrank, **controller, **gumbel)  # type: ignore[arg-type]


def make_unembedding(config: ModelConfig) -> DenseUnembedding | SparseUnembedding:
    if config.loss_sparsity == 1:
        return DenseUnembedding(config.d_model, config.vocab_size)
    return SparseUnembedding(config.d_model, config.vocab_size, config.loss_sparsity)


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=1e-6)


@dataclass(frozen=True)
class BlockState:
    """States of a block's layers."""

    attention: Any
    cross: Any
    feedforward: Any
    recurrence: Any


class Block(nn.Module):
    """One pre-norm block, of an encoder (not causal) or a decoder, with cross-attention if ``cross``."""

    def __init__(self, config: ModelConfig, kind: str, causal: bool, cross: bool):
        super().__init__()
        self.attention_norm, self.attention = layer_norm(config), make_attention(config, kind, causal)
        if cross:
            self.cross_norm, self.cross = layer_norm(config), make_cross_attention(config)
        self.has_cross = cross
        self.feedforward_norm, self.feedforward = layer_norm(config), make_feedforward(config)
        self.recurrent = config.sru_units > 0
        if self.recurrent:
            self.recurrence_norm = layer_norm(config)
            self.recurrence = RecurrentBranch(config.d_model, config.sru_units, config.sru_layers)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,  # (B, T, d_model)
        mask: Tensor | None = None,
        prefix_length: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, prefix_length))
        if self.has_cross:
            x = x + self.dropout(self.cross(self.cross_norm(x), memory, memory_mask))
        y = self.feedforward(self.feedforward_norm(x))
        return x + self.dropout(y + self.recurrence(self.recurrence_norm(x)) if self.recurrent else y)

    def init_state(self, batch: int, memory: Tensor | None, memory_mask: Tensor | None) -> BlockState:
        cross = None if memory is None else self.cross.init_state_from(memory, memory_mask)
        recurrence = self.recurrence.init_state(batch) if self.recurrent else None
        return BlockState(self.attention.init_state(batch), cross, self.feedforward.init_state(batch), recurrence)

    def advance(
        self, x: Tensor, state: BlockState, how: Advance, prefix_length: Tensor | None = None
    ) -> tuple[Tensor, BlockState]:
        """The next positions (B, L, d_model), by ``prefill_with`` or, one at a time, ``step_with``."""
        z = self.attention_norm(x)
        if prefix_length is None:
            y, attention = how(self.attention, z, state.attention)
        else:
            y, attention = self.attention.prefill(z, state.attention, prefix_length)
        x, cross, recurrence = x + y, None, None
        if self.has_cross:
            y, cross = how(self.cross, self.cross_norm(x), state.cross)
            x = x + y
        y, feedforward = how(self.feedforward, self.feedforward_norm(x), state.feedforward)
        if self.recurrent:
            z, recurrence = how(self.recurrence, self.recurrence_norm(x), state.recurrence)
            y = y + z
        return x + y, BlockState(attention, cross, feedforward, recurrence)


class Stack(nn.Module):
    """Positions, blocks and the last layer norm: an encoder or a decoder."""

    def __init__(self, config: ModelConfig, n_layers: int, kind: str, causal: bool, cross: bool):
        super().__init__()
        self.positions = POSITIONS[config.positions](config.max_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, kind, causal, cross) for _ in range(n_layers))
        self.norm = layer_norm(config)

    def forward(self, x: Tensor, *arguments: Tensor | None, starts: int | Tensor = 0) -> Tensor:
        x = self.dropout(self.positions(x, starts))
        for block in self.blocks:
            x = block(x, *arguments)
        return self.norm(x)


@dataclass(frozen=True)
class TransformerState:
    """What decoding remembers: positions so far and a state for each block. A value: old states stay valid."""

    position: int
    batch: int
    blocks: tuple[BlockState, ...]


class Transformer(nn.Module):
    """Dense baseline or Scaling Transformer; decoder, encoder, encoder-decoder or prefix-LM, as the config says.

    Nothing is shifted inside: logits at t are the prediction for position t + 1 from tokens 0..t. Weights of the token
    embedding ~ N(0, 1), shared by source and target, not tied to the unembedding.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        require_choice("architecture", config.architecture, TRANSFORMERS)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.is_encoder_decoder:
            self.encoder = Stack(
                config, config.n_encoder_layers, config.attention_of_encoder, causal=False, cross=False
            )
        self.stack = Stack(config, config.n_layers, config.attention, config.has_decoder, config.is_encoder_decoder)
        self.unembedding = make_unembedding(config)

    def forward(
        self,
        tokens: Tensor,
        target: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        prefix_length: int | Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V) for ``tokens`` (B, T); for an encoder-decoder, ``model(source, target)``, for the target.

        ``mask`` (B, length of tokens): 1 = real, 0 = padding; an encoder-decoder's is its source's. ``prefix_length``,
        an int or (B,), for a prefix-LM: so many tokens are seen from everywhere. Errors: ValueError naming the input.
        """
        x = self.embed(tokens, "source" if self.config.is_encoder_decoder else "tokens")
        mask = None if mask is None else check_mask(mask, *tokens.shape)
        prefix = self._prefix(prefix_length, tokens)
        self._require_source("target", target)
        if target is None:
            starts = self.stack.positions.starts(*tokens.shape)
            return self.unembedding(self.stack(x, mask, prefix, starts=starts))
        y = self.embed(target, "target")
        require(len(target) == len(tokens), "target.shape", tuple(target.shape), f"of batch {len(tokens)}")
        starts = self.stack.positions.starts(len(tokens), max(tokens.shape[1], target.shape[1]))
        memory = self.encoder(x, mask, starts=starts)
        return self.unembedding(self.stack(y, None, None, memory, mask, starts=starts))

    def embed(self, tokens: Tensor, name: str = "tokens") -> Tensor:  # (B, T) -> (B, T, d_model)
        check_tokens(tokens, self.config.vocab_size, 2, name)
        return self.embedding(tokens)

    def init_state(self, batch: int, source: Tensor | None = None, mask: Tensor | None = None) -> TransformerState:
        """State before the first token of ``batch`` sequences; an encoder-decoder needs its source (B, T)."""
        require(self.config.has_decoder, "architecture", self.config.architecture, "one with a decoder to decode")
        require_size("batch", batch, minimum=0)
        self._require_source("source", source)
        require(source is not None or mask is None, "mask", "given", "given with a source only")
        memory = None
        if source is not None:
            require(len(source) == batch, "source.shape", tuple(source.shape), f"of batch {batch}")
            mask = None if mask is None else check_mask(mask, *source.shape)
            memory = self.encoder(self.embed(source, "source"), mask)
        return TransformerState(0, batch, tuple(block.init_state(batch, memory, mask) for block in self._blocks()))

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """The next token of every sequence: (B,) -> logits (B, V) and the new state."""
        check_tokens(tokens, self.config.vocab_size, 1)
        logits, state = self._advance(tokens[:, None], state, step_with)
        return logits[:, 0], state

    def prefill(
        self, tokens: Tensor, state: TransformerState, prefix_length: int | Tensor | None = None
    ) -> tuple[Tensor, TransformerState]:
        """The next L tokens at once: (B, L) -> logits (B, L, V) and the new state.

        A prefix-LM's first chunk may carry ``prefix_length`` (int or (B,)) and must then hold the whole prefix.
        """
        check_tokens(tokens, self.config.vocab_size, 2)
        prefix = self._prefix(prefix_length, tokens)
        require(
            prefix is None or state.position == 0,
            "prefix_length",
            prefix_length,
            "given with the first chunk only",
        )
        return self._advance(tokens, state, prefill_with, prefix)

    def _advance(
        self, tokens: Tensor, state: TransformerState, how: Advance, prefix: Tensor | None = None
    ) -> tuple[Tensor, TransformerState]:
        require(
            len(tokens) == state.batch,
            "tokens.shape",
            tuple(tokens.shape),
            f"of the state's batch {state.batch}",
        )
        x = self.stack.positions(self.embedding(tokens), state.position)
        blocks = []
        for block, part in zip(self._blocks(), state.blocks, strict=True):
            x, part = block.advance(x, part, how, prefix)
            blocks.append(part)
        logits, _ = how(self.unembedding, self.stack.norm(x), None)
        return logits, TransformerState(state.position + tokens.shape[1], state.batch, tuple(blocks))

    def _blocks(self) -> Iterator[Block]:
        return iter(cast("Iterable[Block]", self.stack.blocks))

    def _require_source(self, name: str, second: Tensor | None) -> None:
        """Encoder-decoders take two sequences, the others one."""
        allowed = f"given to an encoder_decoder and to no other, this is a {self.config.architecture}"
        value = None if second is None else tuple(second.shape)
        require((second is not None) == self.config.is_encoder_decoder, name, value, allowed)

    def _prefix(self, prefix_length: int | Tensor | None, tokens: Tensor) -> Tensor | None:
        if prefix_length is None:
            return None
        architecture = self.config.architecture
        require(
            architecture == "prefix_lm",
            "prefix_length",
            prefix_length,
            f"given to a prefix_lm, this is a {architecture}",
        )
        prefix = torch.as_tensor(prefix_length, device=tokens.device)
        prefix = prefix.expand(len(tokens)) if prefix.ndim == 0 else prefix
        check_prefix(prefix, len(tokens))
        inside = bool(((prefix >= 0) & (prefix <= tokens.shape[1])).all())
        require(inside, "prefix_length", prefix.tolist(), f"in 0 .. {tokens.shape[1]}")
        return prefix
