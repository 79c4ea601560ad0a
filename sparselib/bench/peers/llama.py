"""llama.cpp through llama-cpp-python: a decoder of the GPT-2 kind with random weights, written as a GGUF file.

Its block has no cross-attention, so its feedforward is made wider: 4 d^2 + 2 d (d_ff + d) = 6 d^2 + 2 d d_ff are as
many weights as a decoded token touches in a block with cross-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...config import ModelConfig
from .base import SCALE, Decoder, Job, build_once, random_tokens, shape_of


def equal_decoder(config: ModelConfig) -> ModelConfig:
    """The decoder without encoder whose block touches as many weights a token as an encoder-decoder's."""
    return replace(config, architecture="decoder", n_encoder_layers=0, d_ff=config.d_ff + config.d_model)


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (rows, columns) or (size,) of a GPT-2 in GGUF; the output layer is the token embedding."""
    d, f = config.d_model, config.d_ff
    yield "token_embd.weight", (config.vocab_size, d)
    yield "position_embd.weight", (config.max_len, d)
    for i in range(config.n_layers):
        matrices = {"attn_qkv": (3 * d, d), "attn_output": (d, d), "ffn_up": (f, d), "ffn_down": (d, f)}
        for name, shape in matrices.items():
            yield f"blk.{i}.{name}.weight", shape
            yield f"blk.{i}.{name}.bias", shape[:1]
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{name}.weight", (d,)
            yield f"blk.{i}.{name}.bias", (d,)
    yield "output_norm.weight", (d,)
    yield "output_norm.bias", (d,)


def _is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "position_embd.weight"


def bytes_read(config: ModelConfig, dtype: str) -> int:
    """Bytes that a decoded token touches: all but the position table, of which it reads a row."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    total = 4 * config.d_model
    for name, shape in tensors(config):
        if _is_quantized(name, shape):
            total += int(np.prod(shape)) // block * size
        elif len(shape) == 1:
            total += 4 * shape[0]
    return total


def write_gguf(config: ModelConfig, dtype: str, path: Path) -> None:
    """Random weights, quantized once from one draw and copied to every tensor's own place in the file."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    kind = GGMLQuantizationType[dtype]
    draw = SCALE * np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
    quantized = quants.quantize(draw, kind)
    writer = GGUFWriter(path, "gpt2")
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.n_layers)
    writer.add_head_count(config.n_heads)
    writer.add_layer_norm_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, shape in tensors(config):
        if _is_quantized(name, shape):
            rows, *rest = quants.quant_shape_to_byte_shape(shape, kind) if dtype != "F16" else shape
            writer.add_tensor(name, np.resize(quantized, (rows, *rest)), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.resize(draw, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama(job: Job) -> Decoder:
    import llama_cpp

    config = equal_decoder(job.config)
    path = build_once(Path(job.files) / f"{job.dtype}.gguf", lambda path: write_gguf(config, job.dtype, path))
    model = llama_cpp.Llama(
        str(path), n_ctx=job.positions, n_threads=job.threads, n_threads_batch=job.threads, verbose=False
    )
    if job.context:
        model.eval(random_tokens(config, job.context)[0].tolist())
    shape = shape_of(config, "GPT-2 decoder without cross-attention")
    return Decoder(lambda token: model.eval([token]), llama_cpp.__version__, shape, bytes_read(config, job.dtype))
