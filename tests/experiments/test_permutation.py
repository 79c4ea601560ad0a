"""The experiment of notebook 01."""

import pytest
import torch

from sparselib.experiments import permutation


def test_constructed_layer_is_exact_and_a_damaged_one_is_seen(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    target = torch.randperm(12, generator=generator)
    for dtype in (torch.float32, torch.float64):
        assert permutation.is_exact(target, 3, dtype, generator)

    def damaged(target, n_modules, dtype):
        layer = make(target, n_modules, dtype)
        layer.E.data[0] *= 1 + 2 * torch.finfo(dtype).eps  # the smallest harm there can be
        return layer

    make = permutation.permuting_layer
    monkeypatch.setattr(permutation, "permuting_layer", damaged)
    assert not permutation.is_exact(target, 3, torch.float32, generator)


def test_check_construction_counts_every_bijection():
    frame = permutation.check_construction([(8, 2), (12, 3)], bijections=3)
    assert frame["exact in float32"].tolist() == frame["exact in float64"].tolist() == [3, 3]
    assert frame["weights"].tolist() == [8 * 8 // 2 + 8 * 2, 12 * 12 // 3 + 12 * 3]


def test_costs_shrink_in_weights_and_not_in_multiply_adds():
    frame = permutation.cost_by_modules(64, [2, 8])
    assert frame["multiply-adds"].tolist() == [64 * 64] * 3
    assert frame["weights"].tolist() == [64 * 64 + 64, 64 * 32 + 64 * 2 + 64, 64 * 8 + 64 * 8 + 64]
    assert frame["of dense"].iloc[0] == 1


def test_multiplicative_layer_learns_what_its_dense_rival_cannot():
    multiplicative, dense = permutation.learn_permutation(16, 4, steps=250, seeds=2)
    assert multiplicative.losses.shape == dense.losses.shape == (2, 250)
    assert multiplicative.losses[:, -1].max() < 1e-3
    assert multiplicative.weights == dense.weights
    assert dense.floor == pytest.approx(1 - 4 / 16)
    assert (dense.losses >= dense.floor - 1e-6).all()
    assert dense.losses[:, -1].max() < dense.floor + 0.01


def test_closed_form_error_is_the_mean_square_over_random_inputs():
    torch.manual_seed(0)
    layer, target = permutation.LowRank(6, 2), torch.randperm(6)
    x = torch.randn(200_000, 6)
    expected = torch.empty_like(x)
    expected[:, target] = x
    sampled = (x @ layer.folded() - expected).square().mean().item()
    first = permutation._learn(layer, torch.eye(6)[:, target.argsort()], 1, 0.1)[0]
    assert first == pytest.approx(sampled, rel=0.02)


def test_pictures_show_what_they_say():
    found = permutation.learn_permutation(8, 2, steps=3, seeds=2)
    axis = permutation.draw_learning(found).axes[0]
    assert axis.get_yscale() == "log"
    assert "error" in axis.get_ylabel()
    layer = permutation.permuting_layer(torch.randperm(8), 2)
    pictures = [axis.images[0].get_array() for axis in permutation.draw_weights(layer, "title").axes[:3]]
    assert (pictures[2].sum(0) == 1).all()
    assert (pictures[2].sum(1) == 1).all()
