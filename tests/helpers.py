"""What several test files need: random weights and inputs, ways to decode, random configs."""

import dataclasses

import torch
from hypothesis import strategies as st

from sparselib.config import ATTENTIONS, CROSS_ATTENTIONS, FEEDFORWARDS, POSITIONS, TRANSFORMERS, ModelConfig

seeds = st.integers(0, 2**32 - 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randomized(module, seed=0, scale=0.5):
    """The module in float64 and evaluation mode, every weight (biases too, which start at 0) drawn anew."""
    module.double().eval()
    draws = generator(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=draws, dtype=p.dtype))
    return module


def vectors(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def ids(*shape, high, seed=0):
    return torch.randint(high, shape, generator=generator(seed))


def non_contiguous(x):
    """The same values with gaps between them in memory."""
    wide = torch.stack([x, x], dim=-1)[..., 0]
    assert torch.equal(wide, x) and (not wide.is_contiguous() or x.numel() < 2)
    return wide


def chunk_sizes(length):
    """Strategy: the sizes of chunks that make up ``length``."""
    cuts = st.sets(st.integers(1, length - 1)) if length > 1 else st.just(set())
    return cuts.map(lambda c: [b - a for a, b in zip([0, *sorted(c)], [*sorted(c), length], strict=True)])


def by_steps(layer, x, state):
    """All positions of x, one ``step`` each: y and the last state."""
    ys = []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state)
        ys.append(y)
    return torch.stack(ys, dim=1), state


def by_chunks(layer, x, state, sizes, **first):
    """All positions of x in ``prefill`` calls of these sizes; ``first`` are keywords of the first call."""
    ys = []
    for chunk in x.split(sizes, dim=1):
        y, state = layer.prefill(chunk, state, **first)
        ys.append(y)
        first = {}
    return torch.cat(ys, dim=1), state


def leaves(state):
    """Everything a state holds that is no container."""
    if isinstance(state, dict):
        state = list(state.values())
    elif dataclasses.is_dataclass(state):
        state = [getattr(state, field.name) for field in dataclasses.fields(state)]
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, list | tuple) else [state]


def snapshot(state):
    """A copy to compare a state with later."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(state)]


def unchanged(state, before):
    after = leaves(state)
    same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(after, before, strict=True)]
    return all(same)


def close(a, b, atol=1e-9):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-9, atol=atol)


@st.composite
def configs(draw, **fixed):
    """Small configs of every architecture, layer and option."""
    n_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads_are_modules = draw(st.booleans())
    n_modules = n_heads if heads_are_modules else draw(st.sampled_from([1, 2, 3, 4]))
    architecture = fixed.get("architecture") or draw(st.sampled_from(TRANSFORMERS))
    ff_sparsity, loss_sparsity = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2, 4]))
    encoder = architecture == "encoder_decoder"
    fields = dict(
        vocab_size=loss_sparsity * draw(st.integers(3, 6)),
        d_model=n_heads * n_modules * draw(st.integers(1, 2)),
        d_ff=ff_sparsity * draw(st.integers(1, 4)),
        n_heads=n_heads,
        n_layers=draw(st.integers(1, 2)),
        n_encoder_layers=draw(st.integers(1, 2)) if encoder else 0,
        architecture=architecture,
        max_len=draw(st.integers(8, 10)),
        positions=draw(st.sampled_from(POSITIONS)),
        feedforward=draw(st.sampled_from(FEEDFORWARDS)),
        ff_sparsity=ff_sparsity,
        d_lowrank=draw(st.integers(1, 3)),
        controller=draw(st.sampled_from(["paper", "reference"])),
        hidden_bias=draw(st.booleans()),
        controller_bias=draw(st.booleans()),
        attention=draw(st.sampled_from(ATTENTIONS)),
        encoder_attention=draw(st.sampled_from([None, *ATTENTIONS])),
        cross_attention=draw(st.sampled_from(CROSS_ATTENTIONS)),
        n_modules=n_modules,
        kernel_size=draw(st.sampled_from([1, 3, 5])),
        value_kernel_size=draw(st.sampled_from([None, 1, 3])),
        modules_are_heads=heads_are_modules,
        loss_sparsity=loss_sparsity,
        sru_units=draw(st.sampled_from([0, 0, 3])),
        sru_layers=draw(st.integers(1, 2)),
    )
    return ModelConfig(**fields | fixed)
