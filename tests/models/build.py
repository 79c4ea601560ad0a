"""Small models of every kind, and inputs that suit their architecture."""

import torch

from sparselib.config import TRANSFORMERS, ModelConfig, preset
from sparselib.models import Transformer

from ..helpers import ids, randomized

VOCAB, SOURCE, KERNEL = 12, 4, 3
DECODING = tuple(a for a in TRANSFORMERS if a != "encoder")


def make(architecture="decoder", attention="dense", feedforward="dense", seed=0, **fields):
    encoder = architecture == "encoder_decoder"
    config = dict(
        vocab_size=VOCAB,
        d_model=8,
        d_ff=12,
        n_heads=2,
        n_layers=2,
        n_encoder_layers=int(encoder),
        architecture=architecture,
        max_len=10,
        feedforward=feedforward,
        ff_sparsity=3,
        d_lowrank=4,
        attention=attention,
        cross_attention="dense" if attention == "dense" else "sparse",
        n_modules=2,
        kernel_size=KERNEL,
    )
    return randomized(Transformer(ModelConfig(**config | fields)), seed)


def make_preset(variant, architecture):
    layers = dict(n_encoder_layers=1) if architecture == "encoder_decoder" else {}
    return randomized(Transformer(preset("smoke", variant, n_layers=1, architecture=architecture, **layers)), scale=0.3)


class Inputs:
    """Tokens of a batch and what else the architecture takes: a source, a prefix."""

    def __init__(self, model, batch, length, seed=0):
        config = model.config
        self.model, self.batch = model, batch
        self.tokens = ids(batch, length, high=config.vocab_size, seed=seed)
        self.source = None
        self.prefix = None
        if config.is_encoder_decoder:
            self.source = ids(batch, SOURCE, high=config.vocab_size, seed=seed + 1)
            self.mask = torch.arange(SOURCE) < torch.arange(SOURCE, SOURCE - batch, -1).clamp(1)[:, None]

    def forward(self, tokens=None):
        tokens = self.tokens if tokens is None else tokens
        if self.source is not None:
            return self.model(self.source, tokens, mask=self.mask)
        return self.model(tokens, prefix_length=self.prefix)

    def state(self):
        if self.source is None:
            return self.model.init_state(self.batch)
        return self.model.init_state(self.batch, source=self.source, mask=self.mask)
