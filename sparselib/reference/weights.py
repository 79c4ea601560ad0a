"""From the file's names and layouts of weights to ours.

Letters: X blocks of N units, D = d_model, f = X N hidden units; F and k, kernel over length and modules.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..layers import Chain, Dense, FeedForward, ModuleConv, MultiplicativeDense, SelfAttention, SparseFeedForward
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

    def model(self, model: Transformer) -> None:
        self.put("w.embed", model.embedding.weight)
        self.put("w.pos", model.stack.positions.table)
        for i, block in enumerate(model.stack.blocks):
            assert isinstance(block, Block)
            self.norm(f"w.block{i}.attn.ln.", block.attention_norm)
            self.attention(f"w.block{i}.attn.", block.attention)
            self.norm(f"w.block{i}.ffn.ln.", block.feedforward_norm)
            self.feedforward(f"w.block{i}.ffn.ff.", block.feedforward)
        self.norm("w.final_ln.", model.stack.norm)
        self.layer("w.logits.", model.unembedding)
