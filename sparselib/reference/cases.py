"""The cases of the golden files: each builds our layer or model at the file's sizes, and compares what it gives.

Sections are those of tests/golden/README.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..checks import require, require_choice
from ..config import ModelConfig
from ..layers import (
    BlockFeedForward,
    DenseAttention,
    ModuleConv,
    MultiplicativeDense,
    Selector,
    SparseAttention,
    SparseFeedForward,
    SparseUnembedding,
    SwitchFeedForward,
)
from ..models.transformer import layer_norm, make_feedforward
from .golden import Comparison, GoldenFile
from .weights import Weights


def faces(compare: Comparison, layer: Any, x: Tensor, name: str = "y", stepped: str = "predict") -> tuple[Any, Any]:
    """Compare the whole sequence at once, two chunks, and one position per call with the state carried over.

    ``layer`` may also be a model and ``x`` its tokens. Returns the states after the chunks and after the steps.
    """
    compare.value(f"out.{name}", layer(x))
    half = x.shape[1] // 2
    chunked, y = layer.init_state(len(x)), []
    for chunk in (x[:, :half], x[:, half:]) if half else (x,):
        part, chunked = layer.prefill(chunk, chunked)
        y.append(part)
    compare.value(f"out.{name}", torch.cat(y, dim=1), "prefill")
    state, y = layer.init_state(len(x)), []
    for x_t in x.unbind(1):
        part, state = layer.step(x_t, state)
        y.append(part)
    compare.value(f"{stepped}.{name}", torch.stack(y, dim=1), "step")
    return chunked, state


# --- sections 1, 2, 7 -------------------------------------------------------------------------------------------------


def factored_dense(file: GoldenFile, compare: Comparison) -> None:
    layer = MultiplicativeDense(file.arg("d_in"), file.arg("d_out"), file.arg("n_modules"))
    _compare_mult(file, compare, layer)


def sparse_loss(file: GoldenFile, compare: Comparison) -> None:
    layer = SparseUnembedding(file.arg("d_in"), file.arg("d_out"), file.arg("n_modules"))
    _compare_mult(file, compare, layer)


def _compare_mult(file: GoldenFile, compare: Comparison, layer: MultiplicativeDense) -> None:
    weights = Weights(file, layer)
    weights.layer("w.", layer)
    weights.finish()
    faces(compare, layer, file["in.x"], stepped="out")


def local_conv(file: GoldenFile, compare: Comparison) -> None:
    x, n_modules, width = file["in.x"], file.arg("n_modules"), file.arg("kernel_size")
    d_out = n_modules * file.arg("n_units")
    layer = ModuleConv(x.shape[-1], n_modules, file.arg("length_kernel_size"), width, d_out)
    weights = Weights(file, layer)
    weights.layer("w.", layer)
    weights.finish()
    states = faces(compare, layer, x)
    for state, face in zip(states, ("prefill", "step"), strict=True):
        padded = nn.functional.pad(state, (0, 0, width // 2, width // 2))  # zero modules on both sides
        compare.value("predict.final_state", padded, face)


# --- sections 3, 9: attention -----------------------------------------------------------------------------------------


def with_length_kernel(module: nn.Module, kernel_size: int) -> None:
    """Give all convolutions ``kernel_size`` taps along length: the reference's 3 over modules do not change with it."""
    for parent in list(module.modules()):
        for name, conv in parent.named_children():
            if isinstance(conv, ModuleConv) and conv.kernel_size != kernel_size:
                d_out = conv.n_modules * len(conv.bias)
                new = ModuleConv(conv.d_in, conv.n_modules, kernel_size, conv.module_kernel, d_out)
                setattr(parent, name, new)


def _sparse_attention(args: dict[str, Any]) -> SparseAttention:
    """The layer of section 3 with the options of `mult_conv_attention_full`."""
    output, concat = args.get("output_layer_type", "none"), args.get("v_concat_type", "none")
    require_choice("output_layer_type", output, ("none", "mult", "conv", "multconv"))
    require_choice("v_concat_type", concat, ("none", "fixed"))
    d_model, n_modules = args["d_feature"], args["sparsity"]
    layer = SparseAttention(
        d_model,
        args["n_heads"],
        n_modules,
        kind="mult_conv_output" if output == "multconv" else "mult_conv",
        value_kernel_size=1,
        share_qk=bool(args.get("share_qk")),
        v_sees_input=concat == "fixed",
    )
    if output in ("mult", "conv"):
        mult = output == "mult"
        layer.output = MultiplicativeDense(d_model, d_model, n_modules) if mult else ModuleConv(d_model, n_modules)
    with_length_kernel(layer, args["length_kernel_size"])
    return layer


def mult_conv_attention(file: GoldenFile, compare: Comparison) -> None:
    for name in ("d_feature", "n_heads", "sparsity", "length_kernel_size"):
        file.arg(name)
    layer, x = _sparse_attention(file.args), file["in.x"]
    weights = Weights(file, layer)
    weights.attention("w.", layer)
    weights.finish()
    faces(compare, layer, x)
    middle: dict[str, Tensor] = {}  # what the layers inside give while the whole runs
    for name, part in layer.named_children():
        part.register_forward_hook(lambda _, inputs, y, name=name: middle.update({name: y}))
    layer(x)
    middle |= {"h": middle["shared"], "k": middle.get("k", middle["q"])}
    for name in ("h", "q", "k", "v"):
        if file.case == "mult_conv_attention" or f"mid.{name}" in file:
            compare.value(f"mid.{name}", middle[name])


def causal_attention(file: GoldenFile, compare: Comparison) -> None:
    layer = DenseAttention(file.arg("d_feature"), file.arg("n_heads"))
    weights = Weights(file, layer)
    weights.attention("w.", layer)
    weights.finish()
    faces(compare, layer, file["in.x"])


def attention(file: GoldenFile, compare: Comparison) -> None:
    layer = DenseAttention(file.arg("d_feature"), file.arg("n_heads"), causal=False)
    weights = Weights(file, layer)
    weights.attention("w.", layer)
    weights.finish()
    compare.value("out.y", layer(file["in.x"], file["in.mask"]))


# --- sections 4, 5, 9: feedforward, layer norm ------------------------------------------------------------------------


def sparse_ff(file: GoldenFile, compare: Comparison) -> None:
    x, block = file["in.x"], file.arg("n_elements_in_block")
    sizes = (x.shape[-1], file.arg("d_ff"), block, file.arg("d_lowrank"))
    layer = SparseFeedForward(*sizes, controller="reference", hidden_bias=False, controller_bias=True).eval()
    weights = Weights(file, layer)
    weights.sparse_feedforward("w.", layer)
    weights.finish()
    faces(compare, layer, x)
    logits = layer.logits(x).flatten(0, 1)  # (B L, X, N)
    compare.value("mid.logits", logits)
    compare.value("mid.probs", logits.softmax(-1))
    compare.value("mid.index", layer.units(x).flatten(0, 1) % block)
    _compare_training(file, compare, layer, weights)


def _compare_training(file: GoldenFile, compare: Comparison, layer: SparseFeedForward, weights: Weights) -> None:
    parameters = ("w1", "w2", "b2", "m1", "m2", "mb")
    layer.train()
    for mode, hard_share in (("train_hard", 1.0), ("train_soft", 0.0)):
        layer.select = Selector(temperature=0.0, hard_share=hard_share, reading="reference")
        _compare_gradients(compare, layer, weights, mode, parameters)
    layer.select = Selector(file.arg("noisy_temperature"), hard_share=1.0, reading="reference")
    x = file["in.x"]
    uniform = file["noisy.u"].view_as(layer.logits(x))
    stored = [name for name in parameters if name == "mb" or f"noisy.grad.{name}" in file]
    _compare_gradients(compare, layer, weights, "noisy", stored, uniform)
    mask = layer.select(layer.logits(x), uniform)
    compare.value("noisy.index", mask.flatten(0, 1).argmax(-1))


def _compare_gradients(
    compare: Comparison, layer: nn.Module, weights: Weights, mode: str, parameters: Any, *inputs: Tensor
) -> None:
    """Compare value and gradients of sum(cotangent * y) in the layer's present mode."""
    file = compare.file
    x = file["in.x"].clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, *inputs)
    y.backward(file["in.cotangent"])
    compare.value(f"{mode}.y", y)
    assert x.grad is not None
    compare.gradient(f"{mode}.grad.x", x.grad)
    for name in parameters:
        compare.gradient(f"{mode}.grad.{name}", weights.gradient(f"w.{name}"))


def experts(file: GoldenFile, compare: Comparison) -> None:
    x, kinds = file["in.x"], {"block_sparse_ff": BlockFeedForward, "switch_sparse_ff": SwitchFeedForward}
    layer = kinds[file.case](x.shape[-1], file.arg("d_ff"), file.arg("n_experts"), hidden_bias=False).eval()
    weights = Weights(file, layer)
    weights.put("w.m1", layer.c)
    weights.put("w.w1", layer.w1, lambda w: w.T)
    weights.put("w.w2", layer.w2)
    weights.put("w.b2", layer.b2)
    weights.finish()
    faces(compare, layer, x)
    compare.value("mid.expert", (x @ layer.c).argmax(-1))


def feedforward_fields(args: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config for `ff_sparsity` null or [N, r]."""
    if args.get("ff_sparsity") is None:
        return dict(feedforward="dense", hidden_bias=True)
    is_pair = isinstance(args["ff_sparsity"], list) and len(args["ff_sparsity"]) == 2
    require(is_pair, "ff_sparsity", args["ff_sparsity"], "null or [N, r]")
    block, rank = args["ff_sparsity"]
    reading = dict(controller="reference", controller_bias=True, hidden_bias=False)
    return dict(feedforward="sparse", ff_sparsity=block, d_lowrank=rank, **reading)


def small_config(d_model: int, **fields: Any) -> ModelConfig:
    """For a part of a model: what the part does not need is 1."""
    return ModelConfig(**{**dict(vocab_size=1, d_model=d_model, d_ff=1, n_heads=1, n_layers=1), **fields})


def feed_forward(file: GoldenFile, compare: Comparison) -> None:
    config = small_config(file.arg("d_model"), d_ff=file.arg("d_ff"), **feedforward_fields(file.args))
    norm, layer = layer_norm(config), make_feedforward(config).eval()
    weights = Weights(file, nn.ModuleList([norm, layer]))
    weights.norm("w.ln.", norm)
    weights.feedforward("w.ff.", layer)
    weights.finish()
    faces(compare, layer, norm(file["in.x"]), stepped="out")


def layer_norm_alone(file: GoldenFile, compare: Comparison) -> None:
    x = file["in.x"]
    norm = layer_norm(small_config(x.shape[-1]))
    require(file.arg("epsilon") == norm.eps, "epsilon", file.arg("epsilon"), f"{norm.eps}")
    weights = Weights(file, norm)
    weights.norm("w.", norm)
    weights.finish()
    compare.value("out.centered", norm(x))
    compare.value("out.rms", nn.functional.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps))
