"""The cases of whole models, recurrence and reversible blocks (sections 6, 10 and 11 of tests/golden/README.md)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checks import require_choice
from ..config import ModelConfig
from ..layers import SRU, ReversibleStack, SparseUnembedding
from ..models.terraformer import AttentionHalf, FeedForwardHalf, Terraformer, concatenate, strip
from ..models.transformer import Transformer
from .cases import faces, feedforward_fields, small_config, with_length_kernel
from .golden import Comparison, GoldenFile
from .weights import Weights

# --- section 10 -------------------------------------------------------------------------------------------------------


def _model_config(file: GoldenFile, **fields: Any) -> ModelConfig:
    sizes = {name: file.arg(name) for name in ("vocab_size", "d_model", "d_ff", "n_heads", "max_len")}
    fields |= feedforward_fields(file.args) | _recurrent_fields(file.args)
    require_choice("attention", file.arg("attention"), ("dense", "mult_conv"))
    if file.args["attention"] == "mult_conv":
        fields |= dict(attention="mult_conv", n_modules=file.arg("qkv_sparsity"), modules_are_heads=False)
        fields |= dict(kernel_size=3, value_kernel_size=1)
    return ModelConfig(**sizes, **fields, loss_sparsity=file.arg("loss_sparsity") or 1)


def _recurrent_fields(args: dict[str, Any]) -> dict[str, Any]:
    return dict(sru_units=args["sru_units"], sru_layers=args["sru_layers"]) if args.get("sru_units") else {}


def _adapt(file: GoldenFile, model: Transformer | Terraformer) -> None:
    """What a file can say and a config cannot."""
    if file.args["loss_sparsity"] == 1:  # a config's 1 is the dense layer, a file's 1 is one module
        model.unembedding = SparseUnembedding(model.config.d_model, model.config.vocab_size, 1)
    if file.args["attention"] == "mult_conv":
        with_length_kernel(model, file.arg("length_kernel_size"))


def _shifted(tokens: Tensor) -> Tensor:
    return nn.functional.pad(tokens[:, :-1], (1, 0))  # token 0 in front


def lm(file: GoldenFile, compare: Comparison) -> None:
    model = Transformer(_model_config(file, n_layers=file.arg("n_layers"))).eval()
    _adapt(file, model)
    weights = Weights(file, model)
    weights.model(model)
    weights.finish()
    faces(compare, model, _shifted(file["in.tokens"]), "logits")


# --- section 6: recurrence --------------------------------------------------------------------------------------------


def sru(file: GoldenFile, compare: Comparison) -> None:
    layer = SRU(file.arg("n_units"))
    weights = Weights(file, layer)
    weights.layer("w.", layer.gates)
    weights.finish()
    for state, face in zip(faces(compare, layer, file["in.x"]), ("prefill", "step"), strict=True):
        compare.value("predict.final_state", state, face)


def ff_sru_block(file: GoldenFile, compare: Comparison) -> None:
    config = small_config(file.arg("d_model"), d_ff=file.arg("d_ff"), **_recurrent_fields(file.args))
    layer, x = FeedForwardHalf(config).eval(), file["in.x"]
    weights = Weights(file, layer)
    weights.half("w.", layer)
    weights.finish()
    faces(compare, layer, x)
    compare.value("out.ff_branch", layer.feedforward(layer.norm(x)))
    compare.value("out.sru_branch", layer.recurrence(layer.recurrence_norm(x)))


# --- section 11: Terraformer ------------------------------------------------------------------------------------------


def concat_strip(file: GoldenFile, compare: Comparison) -> None:
    real, target = file["in.tok_enc"] != 0, file["in.vec_dec"]
    lengths, (n_source, n_target) = real.sum(1), (real.shape[1], file["in.tok_dec"].shape[1])
    for i in (1, 2):
        joined = concatenate(file[f"in.vec_enc{i}"], target, lengths)
        compare.value(f"out.concat{i}", joined)
        compare.value(f"out.reverse_enc{i}", joined[:, :n_source] * real[..., None])
        compare.value("out.strip1" if i == 1 else "out.reverse_dec", strip(joined, lengths, n_target))


def rev_decoder_block(file: GoldenFile, compare: Comparison) -> None:
    """Values and gradients, with the inputs rebuilt from the outputs and without."""
    config = small_config(
        file.arg("d_model"), d_ff=file.arg("d_ff"), n_heads=file.arg("n_heads"), **_recurrent_fields(file.args)
    )
    attentions = [AttentionHalf(config, "dense", causal=True) for _ in range(file.arg("n_decoder_attention_layers"))]
    stack = ReversibleStack([*attentions, FeedForwardHalf(config)])
    weights = Weights(file, stack)
    names = [*(f"attn{j}" for j in range(len(attentions))), "ffn"]
    for name, half in zip(names, stack.halves, strict=True):
        weights.half(f"w.{name}.", half)
    weights.finish()
    for stack.remember in ("choices", "everything"):
        x1, x2 = (file[f"in.x{i}"].clone().requires_grad_() for i in (1, 2))
        stack.zero_grad()
        outputs = stack(x1, x2)
        for i, y in enumerate(outputs, start=1):
            compare.value(f"out.y{i}", y, stack.remember)
        torch.autograd.backward(outputs, [file["in.cotangent1"], file["in.cotangent2"]])
        compare.gradient("grad.in.x1", cast(Tensor, x1.grad))
        compare.gradient("grad.in.x2", cast(Tensor, x2.grad))
        for key in weights.names:
            compare.gradient(f"grad.{key}", weights.gradient(key))


def terraformer(file: GoldenFile, compare: Comparison) -> None:
    """The whole batch at once, then decoded: the batch together, and by chunks."""
    sizes = dict(n_layers=file.arg("n_decoder_layers"), n_encoder_layers=file.arg("n_encoder_layers"))
    sizes |= dict(n_attentions=file.arg("n_decoder_attention_layers"), encoder_attention="dense")
    sizes |= dict(reversible_encoder=file.arg("reversible_encoder"))
    sizes |= dict(two_swaps=file.arg("use_two_swaps_per_encoder_block"))
    model = Terraformer(_model_config(file, architecture="terraformer", **sizes)).eval()
    _adapt(file, model)
    weights = Weights(file, model)
    weights.terraformer(model)
    weights.finish()
    source, target = file["in.tok_enc"], _shifted(file["in.tok_dec"])
    compare.value("out.logits", model(source, target, mask=source != 0))
    states = [model.init_state(len(source), source, source != 0)] * 2
    logits, state = [], states[0]
    for tokens in target.unbind(1):
        one, state = model.step(tokens, state)
        logits.append(one)
    compare.value("predict.logits", torch.stack(logits, dim=1), "step")
    compare.value("predict.logits", model.prefill(target, states[1])[0], "prefill")
