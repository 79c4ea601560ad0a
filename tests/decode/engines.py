"""Engines beside the models they were packed from, and models made of packed weights."""

import contextlib
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from sparselib.config import ATTENTIONS, CROSS_ATTENTIONS, FEEDFORWARDS, POSITIONS, ModelConfig
from sparselib.decode import Engine, pack
from sparselib.decode.layout import TAPS, TRANSPOSED
from sparselib.layers import lsh_attention
from sparselib.models import make_model

from ..models.build import DECODING

TOLERANCE = 1e-4


def engine_of(model, inputs=None, dtype="fp32", **options):
    """An engine that has read the inputs' source, if they have one."""
    options = dict(batch=1 if inputs is None else inputs.batch, threads=1) | options
    engine = Engine(pack(model, dtype), **options)
    if inputs is not None and inputs.source is not None:
        engine.start(inputs.source.numpy(), inputs.mask.numpy())
    return engine


def near(logits, expected, atol=TOLERANCE):
    """Logits of an engine and of a model; the bound grows with the largest logit where that is above 10."""
    expected = expected.detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol * max(1, np.abs(expected).max() / 10))


def by_engine(engine, tokens, sizes, **first):
    """Logits (B, V) after each ``prefill`` of these sizes, or ``step`` where a size is 0: (calls, B, V)."""
    ys, start = [], 0
    for size in sizes:
        chunk = tokens[:, start : start + max(size, 1)].numpy()
        ys.append((engine.prefill(chunk, **first) if size else engine.step(chunk[:, 0])).copy())
        start, first = start + max(size, 1), {}
    return np.stack(ys)


def ends(sizes):
    """The last position of each call of :func:`by_engine`."""
    return np.cumsum([max(size, 1) for size in sizes]) - 1


@contextlib.contextmanager
def smallest_gap(model):
    """Collects how far the best of what is chosen from lay above the second: a choice by a hair may differ.

    A controller's logits, and, times 100, what attention hashes by: a hash chooses far more often, out of short sums.
    """
    gaps, hash_buckets = [1.0], lsh_attention.hash_buckets

    def note(z, times=1.0):
        best = z.detach().topk(2, dim=-1).values
        gaps.append(times * float((best[..., 0] - best[..., 1]).min()))

    def note_logits(layer, arguments):
        x = arguments[0].detach()
        note((x @ layer.c).unsqueeze(-2) if hasattr(layer, "c") else layer.logits(x))

    def note_hash(qk, rotations, sizes, mask=None):
        for u in (qk[:, :, None] @ rotations).split([n // 2 for n in sizes.factors], dim=-1):
            note(torch.cat([u, -u], dim=-1), times=100)
        return hash_buckets(qk, rotations, sizes, mask)

    hooks = [m.register_forward_pre_hook(note_logits) for m in model.modules() if hasattr(m, "c") or hasattr(m, "c1")]
    with mock.patch.object(lsh_attention, "hash_buckets", note_hash):
        yield lambda: min(gaps)
    for hook in hooks:
        hook.remove()


def unpacked(packed, model):
    """What the packed arrays say each entry of the model's ``state_dict`` is, in float64."""
    shapes, entries = model.state_dict(), {}
    for matrix in packed.layout.matrices.values():
        stored = torch.from_numpy(packed.w[matrix.offset : matrix.offset + matrix.size].copy())
        if packed.dtype == "bf16":
            stored = stored.view(torch.bfloat16)
        rows = stored.double().view(-1, matrix.columns, matrix.side).transpose(1, 2).flatten(0, 1)[: matrix.rows]
        if packed.dtype == "int8":
            rows = rows * torch.from_numpy(packed.p[matrix.scale : matrix.scale + matrix.rows].copy())[:, None]
        shape = shapes[matrix.name].shape
        if matrix.source == TAPS:  # (O, F k M) -> (O, M, F, k)
            rows = rows.unflatten(1, (*shape[2:], shape[1])).permute(0, 3, 1, 2)
        entries[matrix.name] = rows.T if matrix.source == TRANSPOSED else rows
    for vector in packed.layout.named():
        entries[vector.name] = torch.from_numpy(packed.p[vector.offset : vector.offset + vector.size].copy()).double()
    return {name: entry.reshape(shapes[name].shape) for name, entry in entries.items()}


def dequantized(model, dtype):
    """A model whose weights are those that an engine of this dtype works with."""
    rounded = make_model(model.config).double().eval()
    rounded.load_state_dict(unpacked(pack(model, dtype), model))
    return rounded


@st.composite
def odd_configs(draw, **fixed):
    """Models whose sizes are no multiples of 8 or 16, with more modules than a tile holds."""
    n_modules, width = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    d_model = n_modules * width
    n_heads = draw(st.sampled_from([n for n in range(1, 21) if d_model % n == 0]))
    architecture = fixed.get("architecture") or draw(st.sampled_from(DECODING))
    encoder = architecture in ("encoder_decoder", "terraformer")
    ff_sparsity, loss_sparsity = draw(st.integers(2, 5)), draw(st.sampled_from([1, 2, 3, 9, 17]))
    fields = dict(
        vocab_size=loss_sparsity * draw(st.integers(2, 19)),
        d_model=d_model,
        d_ff=ff_sparsity * draw(st.integers(1, 9)),
        n_heads=n_heads,
        n_layers=draw(st.integers(1, 2)),
        n_encoder_layers=draw(st.integers(1, 2)) if encoder else 0,
        architecture=architecture,
        max_len=80,
        positions=draw(st.sampled_from(POSITIONS)),
        feedforward=draw(st.sampled_from(FEEDFORWARDS)),
        ff_sparsity=ff_sparsity,
        d_lowrank=draw(st.integers(1, 20)),
        hidden_bias=draw(st.booleans()),
        controller_bias=draw(st.booleans()),
        attention=draw(st.sampled_from(ATTENTIONS)),
        encoder_attention=draw(st.sampled_from([None, *ATTENTIONS])),
        cross_attention=draw(st.sampled_from(CROSS_ATTENTIONS)),
        n_modules=n_modules,
        kernel_size=draw(st.sampled_from([1, 3, 5])),
        value_kernel_size=draw(st.sampled_from([None, 1, 3, 5])),
        modules_are_heads=False,
        loss_sparsity=loss_sparsity,
        sru_units=draw(st.sampled_from([0, 0, 1, 5, 17])),
        sru_layers=draw(st.integers(1, 3)),
    )
    return ModelConfig(**fields | fixed)
