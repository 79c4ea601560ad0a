"""A T5 with random weights, decoded by Hugging Face transformers, and by CTranslate2 after conversion.

T5 has no biases, norms without shift and a table of relative positions: some 0.1% fewer weights than the package's
own Transformer of the same sizes. Its ReLU feedforward and its untied output layer (T5 1.0 ties it) are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...config import ModelConfig
from .base import SOURCE_LENGTH, Decoder, Job, build_once, random_tokens, shape_of, with_random_weights

BUCKETS = 32  # relative positions
SPECIAL = ("<pad>", "</s>", "<unk>")


def _model(config: ModelConfig) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    fields: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        d_kv=config.d_model // config.n_heads,
        d_ff=config.d_ff,
        num_layers=config.n_encoder_layers,
        num_decoder_layers=config.n_layers,
        num_heads=config.n_heads,
        relative_attention_num_buckets=BUCKETS,
        feed_forward_proj="relu",
        tie_word_embeddings=False,
    )
    return with_random_weights(lambda: T5ForConditionalGeneration(T5Config(**fields)))


def weights_read(config: ModelConfig) -> tuple[int, int, int]:
    """What a decoded token touches: weights of matrices, rows of these matrices, weights of all else.

    Keys and values of the cross-attention are cached; one row of the embedding is read.
    """
    d, f, v = config.d_model, config.d_ff, config.vocab_size
    matrices = config.n_layers * (6 * d * d + 2 * d * f) + d * v + d
    rows = config.n_layers * (7 * d + f) + v + 1
    return matrices, rows, config.n_layers * 3 * d + d + BUCKETS * config.n_heads


def _shape(config: ModelConfig) -> str:
    return shape_of(config, "T5 decoder with cross-attention")


def huggingface(job: Job) -> Decoder:
    """The model's forward with its cache, and argmax: what greedy ``generate`` does for every token."""
    import transformers
    from transformers import DynamicCache, EncoderDecoderCache

    model = _model(job.config)
    memory = model.encoder(input_ids=random_tokens(job.config, SOURCE_LENGTH))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def advance(tokens: torch.Tensor) -> torch.Tensor:
        output = model(encoder_outputs=memory, decoder_input_ids=tokens, past_key_values=cache, use_cache=True)
        return output.logits[:, -1].argmax(-1)

    if job.context:
        advance(random_tokens(job.config, job.context))
    matrices, _, rest = weights_read(job.config)
    return Decoder(
        lambda token: advance(torch.tensor([[token]])),
        transformers.__version__,
        _shape(job.config),
        4 * (matrices + rest),
    )


def ctranslate2(job: Job) -> Decoder:
    """Greedy generation of a fixed length, a token a step through the library's step callback.

    It feeds itself, so that ``step`` does not look at the token it is given.
    """
    import ctranslate2 as library

    folder = build_once(Path(job.files) / "ctranslate2", lambda path: _convert(job.config, path))
    compute_type = {"fp32": "float32", "int8": "int8"}[job.dtype]
    translator = library.Translator(str(folder), compute_type=compute_type, inter_threads=1, intra_threads=job.threads)
    source = [_vocabulary(job.config)[token] for token in random_tokens(job.config, SOURCE_LENGTH)[0].tolist()]
    length = job.positions
    stream = translator.generate_tokens(source, min_decoding_length=length, max_decoding_length=length)
    for _ in range(job.context):
        next(stream)
    matrices, rows, rest = weights_read(job.config)
    size = 4 * matrices if job.dtype == "fp32" else matrices + 4 * rows
    return Decoder(lambda _: next(stream), library.__version__, _shape(job.config), size + 4 * rest)


def _vocabulary(config: ModelConfig) -> list[str]:
    return [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), config.vocab_size))]


def _convert(config: ModelConfig, folder: Path) -> None:
    """The model in CTranslate2's format, in half the bytes of fp32: the types timed are made as it is loaded."""
    from ctranslate2.converters import Converter
    from ctranslate2.converters.transformers import T5Loader

    class RandomT5(Converter):
        def _load(self) -> Any:
            spec = T5Loader().get_model_spec(_model(config))
            spec.register_source_vocabulary(_vocabulary(config))
            spec.register_target_vocabulary(_vocabulary(config))
            pad, end, unknown = SPECIAL
            spec.config.bos_token = spec.config.decoder_start_token = pad
            spec.config.eos_token, spec.config.unk_token = end, unknown
            return spec

    RandomT5().convert(str(folder), quantization="float16", force=True)
