"""The experiment of notebook 02."""

import math

import pytest
import torch

from sparselib.config import count_parameters, preset
from sparselib.experiments import sparse_layers
from sparselib.experiments.text import Text
from sparselib.models import Transformer

CONFIG = preset("smoke", "ff", vocab_size=32)


class Words:
    """A tokenizer of one word a token."""

    def decode(self, ids):
        return " ".join(f" w{i}" for i in ids)


@pytest.fixture(scope="module")
def text():
    windows = torch.randint(32, (40, 9), generator=torch.Generator().manual_seed(0))
    return Text(Words(), windows[:30], windows[30:])


def test_entropy_in_bits():
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert sparse_layers.entropy(p).tolist() == pytest.approx([2, 0])


def test_controller_inputs_are_what_the_layers_get(text):
    model = Transformer(CONFIG).train()
    tokens = text.train[:4, :-1]
    inputs = sparse_layers.controller_inputs(model, tokens)
    assert model.training
    assert [tuple(x.shape) for x in inputs] == [(4, 8, CONFIG.d_model)] * CONFIG.n_layers
    assert not any(layer._forward_pre_hooks for layer in sparse_layers.sparse_layers(model))
    block = model.eval().stack.blocks[0]
    x = model.stack.positions(model.embedding(tokens))
    x = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(inputs[0], block.feedforward_norm(x))


def test_trace_follows_the_training_and_does_not_disturb_it(text):
    settings = dict(steps=6, batch=4, learning_rate=1e-3)
    trace = sparse_layers.trace_controller(CONFIG, text, every=2, **settings)
    rarely = sparse_layers.trace_controller(CONFIG, text, every=100, **settings)
    assert trace.steps == [1, 2, 4, 6]
    assert trace.decision.shape == trace.usage.shape == (4, CONFIG.n_layers)
    assert ((trace.decision >= 0) & (trace.decision <= 1)).all()
    assert ((trace.usage >= 0) & (trace.usage <= 1)).all()
    assert trace.run.losses == rarely.run.losses
    assert len(sparse_layers.draw_trace(trace).axes[1].lines) == CONFIG.n_layers


def test_entropies_of_a_decided_and_an_undecided_controller():
    alike = torch.zeros(10, 3, 8)
    assert sparse_layers.entropies(alike) == pytest.approx((1, 0))  # the first is always taken
    assert sparse_layers.entropies(100 * torch.eye(8)[:, None]) == pytest.approx((0, 1), abs=1e-6)  # each in turn


def test_unit_counts_count_every_token_once_a_block(text):
    model = Transformer(CONFIG)
    counts = sparse_layers.unit_counts(model, text.train)[1]
    assert counts.shape == (CONFIG.d_ff // CONFIG.ff_sparsity, 32, CONFIG.ff_sparsity)
    seen = torch.bincount(text.train[:, :-1].flatten(), minlength=32)
    assert (counts.sum(-1) == seen).all()


def test_token_information_of_known_tables():
    dependent, independent = torch.zeros(4, 4), torch.full((4, 4), 10)
    dependent.fill_diagonal_(40)
    rare = dependent.clone()
    rare[0, 0] = 5  # seen too rarely to count: three equal classes are left
    information = sparse_layers.token_information(torch.stack([dependent, independent]).long())
    assert information.tolist() == pytest.approx([2, 0], abs=1e-9)
    assert sparse_layers.token_information(rare[None].long()).item() == pytest.approx(math.log2(3))


def test_words_of_units_names_the_words():
    counts = torch.zeros(32, 2, dtype=torch.int64)
    counts[:, 0] = 30
    counts[7] = torch.tensor([0, 30])
    frame = sparse_layers.words_of_units(counts, Words())
    assert frame["unit"].tolist() == [0, 1]
    assert frame["tokens (%)"].tolist() == pytest.approx([100 * 31 / 32, 100 / 32])
    assert frame["fires most above average at"].iloc[1] == "w7"


def test_count_variants_agrees_with_the_models():
    frame = sparse_layers.count_variants(["smoke"], ["dense", "ff_qkv"])
    built = [sum(p.numel() for p in Transformer(preset("smoke", v)).parameters()) for v in ("dense", "ff_qkv")]
    assert (frame["weights (millions)"] * 1e6).round().tolist() == built
    assert frame["of dense"].iloc[0] == 1
    assert (frame["read a token (millions)"] < frame["decoder block (millions)"]).tolist() == [False, True]


def test_reference_layout_has_the_reference_codes_number_of_weights():
    assert count_parameters(sparse_layers.reference_layout()) == pytest.approx(910e6, rel=1e-3)


def test_sparse_block_reads_d_to_the_three_halves():
    frame = sparse_layers.scaling_of_reads([16, 32, 64, 96])
    assert sparse_layers.exponent(frame["d_model"], frame["dense"]) == pytest.approx(2, abs=0.01)
    assert sparse_layers.exponent(frame["d_model"], frame["sparse"]) == pytest.approx(1.5, abs=0.1)
    assert sparse_layers.exponent([1, 2, 4], [5, 40, 320]) == pytest.approx(3)
    labels = [line.get_label() for line in sparse_layers.draw_scaling(frame).axes[0].lines]
    assert len(labels) == 4
