"""From the file's names and layouts of weights to ours.

Letters: X blocks of N units, D = d_model, f = X N hidden units; F and k, kernel over length and modules.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..layers import (
    SRU,
    Chain,
    Dense,
    FeedForward,
    ModuleConv,
    MultiplicativeDense,
    RecurrentBranch,
    SelfAttention,
    SparseFeedForward,
)
from ..models.terraformer import AttentionHalf, FeedForwardHalf, Terraformer
from ..models.transformer import Block, Transformer
from .golden import GoldenFile

View = Callable[[Tensor], Tensor]  # of a parameter, or its gradient, in the layout of the file


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.T


class Weights:
    """Puts the weights of ``file`` into ``module``, made float64, and brings gradients back into the file's layout.

    Errors: ValueError for a missing key, a shape that does not fit, a parameter set twice or (``finish``) not at all.
    """

    def __init__(self, file: GoldenFile, module: nn.Module):
        self.file, self.module = file, module.double()
        self._placed: dict[str, tuple[Tensor, View]] = {}

    def put(self, key: str, parameter: Tensor | None, view: View = _same) -> None:
        stored = self.file[key]
        if parameter is None:
            raise ValueError(f"{key}: our layer has no such parameter")
        if any(parameter is placed for placed, _ in self._placed.values()):
            raise ValueError(f"{key}: its parameter is set already")
        target = view(parameter.detach())
        if target.shape != stored.shape:
            raise ValueError(f"{key} has shape {tuple(stored.shape)}, by the args it must be {tuple(target.shape)}")
        target.copy_(stored)
        self._placed[key] = (parameter, view)

    def gradient(self, key: str) -> Tensor:
        """Gradient of the weight stored as ``key``, in the layout of the file."""
        parameter, view = self._placed[key]
        if parameter.grad is None:
            raise ValueError(f"{key}: our layer has no gradient for it")
        return view(parameter.grad)

    @property
    def names(self) -> list[str]:
        """The weights that were put, by their names in the file."""
        return list(self._placed)

    def finish(self) -> None:
        """All parameters of the module must have been set."""
        placed = {id(parameter) for parameter, _ in self._placed.values()}
        unset = [name for name, parameter in self.module.named_parameters() if id(parameter) not in placed]
        if unset:
            raise ValueError(f"nothing in the file for our {', '.join(unset)}")

    # --- layers; ``prefix`` ends in a dot -----------------------------------------------------------------------------

    def layer(self, prefix: str, layer: nn.Module | None) -> None:
        """A dense, multiplicative or convolutional layer."""
        if isinstance(layer, MultiplicativeDense):
            self.put(prefix + "G", layer.D, _transposed)
            self.put(prefix + "P", layer.E)
        elif isinstance(layer, ModuleConv):
            self.put(prefix + "W", layer.weight, lambda w: w.permute(2, 3, 1, 0))  # (O, M, F, k) -> [F, k, M, O]
        elif isinstance(layer, Dense):
            self.put(prefix + "W", layer.weight, _transposed)
        else:
            raise TypeError(f"{prefix} has no layout for {type(layer).__name__}")
        self.put(prefix + "b", layer.bias)

    def norm(self, prefix: str, layer: nn.LayerNorm) -> None:
        self.put(prefix + "scale", layer.weight)
        self.put(prefix + "bias", layer.bias)

    def feedforward(self, prefix: str, layer: FeedForward) -> None:
        if isinstance(layer, SparseFeedForward):
            self.sparse_feedforward(prefix, layer)
            return
        self.put(prefix + "W1", layer.w1, _transposed)
        self.put(prefix + "b1", layer.b1)
        self.put(prefix + "W2", layer.w2)
        self.put(prefix + "b2", layer.b2)

    def sparse_feedforward(self, prefix: str, layer: SparseFeedForward) -> None:
        blocks = (-1, layer.ff_sparsity)  # f -> X, N
        self.put(prefix + "m1", layer.c1)
        self.put(prefix + "m2", layer.c2, lambda w: w.unflatten(1, blocks))
        self.put(prefix + "mb", layer.bc, lambda w: w.unflatten(0, blocks))
        self.put(prefix + "w1", layer.w1, lambda w: w.unflatten(0, blocks).permute(2, 0, 1))  # (X, N, D) -> [D, X, N]
        self.put(prefix + "w2", layer.w2, lambda w: w.unflatten(0, blocks).transpose(0, 1))  # (X, N, D) -> [N, X, D]
        self.put(prefix + "b2", layer.b2)

    def attention(self, prefix: str, layer: SelfAttention) -> None:
        """Dense attention (q, k, v, o), or the sparse one with any of its options."""
        output = layer.output
        parts: dict[str, nn.Module | None]
        if layer.shared is None:
            parts = {"q": layer.q, "k": layer.k, "v": layer.v, "o": output}
        else:
            queries = {"conv_qk": layer.q} if layer.k is None else {"conv_q": layer.q, "conv_k": layer.k}
            parts = {"mult": layer.shared, **queries, "conv_v": layer.v}
            for part in output.layers if isinstance(output, Chain) else filter(None, [output]):
                parts["out_conv" if isinstance(part, ModuleConv) else "out_mult"] = part
        for name, projection in parts.items():
            self.layer(f"{prefix}{name}.", projection)

    def recurrence(self, prefix: str, norm: nn.LayerNorm, branch: RecurrentBranch) -> None:
        """A recurrent branch and its norm."""
        down, *cells, up = branch.layers
        self.norm(prefix + "ln.", norm)
        self.layer(prefix + "down.", down)
        for i, cell in enumerate(cells):
            assert isinstance(cell, SRU)
            self.layer(f"{prefix}cell{i}.", cell.gates)
        self.layer(prefix + "up.", up)

    def model(self, model: Transformer) -> None:
        self.put("w.embed", model.embedding.weight)
        self.put("w.pos", model.stack.positions.table)
        for i, block in enumerate(model.stack.blocks):
            assert isinstance(block, Block)
            self.norm(f"w.block{i}.attn.ln.", block.attention_norm)
            self.attention(f"w.block{i}.attn.", block.attention)
            self.norm(f"w.block{i}.ffn.ln.", block.feedforward_norm)
            self.feedforward(f"w.block{i}.ffn.ff.", block.feedforward)
            if block.recurrent:
                self.recurrence(f"w.block{i}.ffn.sru.", block.recurrence_norm, block.recurrence)
        self.norm("w.final_ln.", model.stack.norm)
        self.layer("w.logits.", model.unembedding)

    # --- Terraformer --------------------------------------------------------------------------------------------------

    def half(self, prefix: str, half: nn.Module) -> None:
        """A half of a reversible block, with its norm."""
        assert isinstance(half, AttentionHalf | FeedForwardHalf)
        self.norm(prefix + "ln.", half.norm)
        if isinstance(half, AttentionHalf):
            self.attention(prefix, half.attention)
            return
        self.feedforward(prefix + "ff.", half.feedforward)
        if half.recurrent:
            self.recurrence(prefix + "sru.", half.recurrence_norm, half.recurrence)

    def terraformer(self, model: Terraformer) -> None:
        config = model.config
        self.put("w.embed", model.embedding.weight)
        self.put("w.pos_enc", model.source_positions.table)
        self.put("w.pos_dec", model.positions.table)
        encoder, decoder = iter(model.encoder.halves), iter(model.decoder.halves)
        for i in range(config.n_encoder_layers):
            for name in ("attn", "ffn"):
                self.half(f"w.enc{i}.{name}.", next(encoder))
        if not config.reversible_encoder:
            self.layer("w.enc_out.", model.encoder_output)
            self.norm("w.enc_ln.", model.encoder_norm)
        for i in range(config.n_layers):
            for name in (*(f"attn{j}" for j in range(config.n_attentions)), "ffn"):
                self.half(f"w.dec{i}.{name}.", next(decoder))
        self.norm("w.final_ln.", model.norm)
        self.layer("w.logits.", model.unembedding)
