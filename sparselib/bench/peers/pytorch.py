"""PyTorch: the package's own dense Transformer, step by step in eager mode, or with blocks that torch.compile made.

The compiler wants shapes that stay, so that it gets the same step over a cache of fixed size. It compiles one block,
which serves all layers: compiling the whole step takes twice as long and saves no time a token.
Letters: H = n_heads, dh = d_model/H, T = positions of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...layers.attention import attend, split_heads
from ...models import Transformer
from .base import SOURCE_LENGTH, Decoder, Job, random_tokens, shape_of, weights_read, with_random_weights


def eager(job: Job) -> Decoder:
    """``Transformer.step``, as it is."""
    model = with_random_weights(lambda: Transformer(job.config))
    state = model.init_state(1, random_tokens(job.config, SOURCE_LENGTH))
    if job.context:
        _, state = model.prefill(random_tokens(job.config, job.context), state)

    def step(token: int) -> Tensor:
        nonlocal state
        logits, state = model.step(torch.tensor([token]), state)
        return logits

    return _decoder(job, step)


def compiled(job: Job) -> Decoder:
    """:class:`StaticDecoder` with a compiled block; the first step compiles."""
    model = with_random_weights(lambda: Transformer(job.config))
    advance = torch.compile(advance_block, fullgraph=True, dynamic=False)
    decoder = StaticDecoder(model, job.positions, random_tokens(job.config, SOURCE_LENGTH), advance)
    for token in random_tokens(job.config, job.context)[0].tolist():
        decoder.step(token)
    return _decoder(job, decoder.step)


def _decoder(job: Job, step: Callable[[int], Tensor]) -> Decoder:
    shape = shape_of(job.config, "decoder with cross-attention")
    return Decoder(step, torch.__version__, shape, 4 * weights_read(job.config))


class StaticDecoder:
    """``Transformer.step`` of a dense encoder-decoder at batch 1, over caches (1, H, T, dh) written in place.

    ``advance`` is :func:`advance_block` or what a compiler made of it. Works in inference mode only.
    """

    def __init__(self, model: Transformer, positions: int, source: Tensor, advance: Callable[..., Tensor]):
        config = model.config
        self.model, self.advance, self.position = model, advance, 0
        cache = (config.n_layers, 1, config.n_heads, positions, config.d_model // config.n_heads)
        self.keys, self.values = (model.embedding.weight.new_zeros(cache).unbind() for _ in range(2))
        self.cross = [state.cross for state in model.init_state(1, source).blocks]
        self.slots = torch.arange(positions)

    def step(self, token: int) -> Tensor:  # -> logits (1, V)
        stack, position = self.model.stack, torch.tensor([self.position])
        x = stack.positions(self.model.embedding(torch.tensor([[token]])), self.position)  # (1, 1, d_model)
        allowed = (self.slots <= position)[None, None, None]  # (1, 1, 1, T)
        for block, keys, values, cross in zip(stack.blocks, self.keys, self.values, self.cross, strict=True):
            x = self.advance(block, x, position, keys, values, cross.keys, cross.values, allowed)
        self.position += 1
        return dense(self.model.unembedding, stack.norm(x))[:, 0]


def advance_block(
    block: Any,
    x: Tensor,  # (1, 1, d_model)
    position: Tensor,  # (1,)
    keys: Tensor,
    values: Tensor,
    cross_keys: Tensor,
    cross_values: Tensor,
    allowed: Tensor,
) -> Tensor:
    """``Block.advance`` for one token; writes its key and value to ``position`` of ``keys`` and ``values``."""
    attention, heads = block.attention, keys.shape[1]
    z = block.attention_norm(x)
    keys.index_copy_(2, position, split_heads(dense(attention.k, z), heads))
    values.index_copy_(2, position, split_heads(dense(attention.v, z), heads))
    x = x + dense(attention.output, attend(split_heads(dense(attention.q, z), heads), keys, values, allowed))
    q = split_heads(dense(block.cross.query, block.cross_norm(x)), heads)
    x = x + dense(block.cross.output, attend(q, cross_keys, cross_values))
    hidden = block.feedforward.hidden(block.feedforward_norm(x)[0])
    return x + block.feedforward.output(hidden)


def dense(layer: Any, x: Tensor) -> Tensor:
    """A dense layer without its check for NaN: a compiler cannot go on past a look at a value."""
    return linear(x, layer.weight, layer.bias)
