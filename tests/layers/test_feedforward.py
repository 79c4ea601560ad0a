import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import FeedForward, Selector, SparseFeedForward
from sparselib.layers.selector import gumbel_like, one_hot_of_best

from .. import slow
from ..helpers import by_steps, close, generator, randomized, seeds, vectors

both_readings = pytest.mark.parametrize("reading", ["paper", "reference"])


def uniform_like(x, blocks, ff_sparsity, seed=0):
    """Numbers in (0, 1) for the noise of every token's controller."""
    u = torch.rand((*x.shape[:2], blocks, ff_sparsity), generator=generator(seed), dtype=torch.float64)
    return u.clamp(1e-6, 1 - 1e-6)


@st.composite
def sparse_layers(draw, **fixed):
    """(layer, input, uniform numbers, seed)."""
    blocks, n, r, d = (draw(st.integers(1, high)) for high in (3, 4, 3, 4))
    options = dict(
        controller=draw(st.sampled_from(["paper", "reference"])),
        hidden_bias=draw(st.booleans()),
        controller_bias=draw(st.booleans()),
        temperature=draw(st.sampled_from([0.1, 0.5, 1.0])),
    )
    seed = draw(seeds)
    layer = randomized(SparseFeedForward(d, blocks * n, n, r, **options | fixed), seed, scale=1.0)
    x = vectors(draw(st.integers(1, 3)), draw(st.integers(1, 3)), d, seed=seed)
    return layer, x, uniform_like(x, blocks, n, seed), seed


# --- values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=seeds, d=st.integers(1, 4), f=st.integers(1, 6), bias=st.booleans(), length=st.integers(1, 3))
def test_dense_equals_the_slow_reference(seed, d, f, bias, length):
    layer, x = randomized(FeedForward(d, f, bias), seed), vectors(2, length, d, seed=seed)
    close(layer(x), slow.feedforward(x.numpy(), slow.weights_of(layer)))


@settings(max_examples=40)
@given(case=sparse_layers())
def test_inference_equals_the_slow_reference(case):
    layer, x, _, _ = case
    y = slow.sparse_feedforward(x.numpy(), slow.weights_of(layer), layer.ff_sparsity)
    close(layer(x), y)
    close(by_steps(layer, x, None)[0], y)
    chosen = [[slow.chosen_units(v, slow.weights_of(layer), layer.ff_sparsity) for v in row] for row in x.numpy()]
    assert layer.units(x).tolist() == chosen


@settings(max_examples=40)
@given(case=sparse_layers(hard_share=0.5))
def test_fused_training_equals_the_plain_one_in_values_and_gradients(case):
    layer, x, uniform, seed = case
    layer.train()
    results = []
    for path in (layer.fused, layer.plain):
        tokens = x.flatten(0, 1).clone().requires_grad_()
        torch.manual_seed(seed)  # the same rows are hard
        y = path(tokens, uniform.flatten(0, 1))
        grads = torch.autograd.grad((y * y.detach().cos()).sum(), [tokens, *layer.parameters()])
        results.append([y, *grads])
    for fused, plain in zip(*results, strict=True):
        close(fused, plain)


def test_fused_training_leaves_its_inputs_and_weights_alone():
    layer, x = SparseFeedForward(6, 12, 4, 2), torch.randn(2, 5, 6, requires_grad=True)
    before = [p.detach().clone() for p in (x, *layer.parameters())]
    layer(x).square().sum().backward()
    for now, then in zip((x, *layer.parameters()), before, strict=True):
        assert torch.equal(now, then)


@settings(max_examples=40)
@given(case=sparse_layers(), hard=st.booleans())
def test_training_equals_the_slow_reference_when_all_rows_are_soft_or_all_hard(case, hard):
    layer, x, uniform, _ = case
    layer.train()
    layer.select.hard_share = float(hard)
    w, s = slow.weights_of(layer), layer.select
    sizes = (layer.ff_sparsity, uniform.numpy(), s.temperature, s.reading)
    close(layer(x, uniform), slow.sparse_feedforward_training(x.numpy(), w, *sizes, hard))


# --- gradients ------------------------------------------------------------------------------------------------------


@both_readings
@pytest.mark.parametrize("options", [{}, {"hidden_bias": False, "controller_bias": True}])
def test_gradcheck_of_the_soft_path(reading, options):
    layer = SparseFeedForward(3, 6, 3, 2, controller=reading, hard_share=0, temperature=0.7, **options)
    layer = randomized(layer, seed=2).train()
    x = vectors(2, 2, 3, seed=4).requires_grad_()
    uniform = uniform_like(x, 2, 3)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def function(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, uniform))

    assert torch.autograd.gradcheck(function, (x, *weights))
    grads = torch.autograd.grad(function(x, *weights).sum(), [x, *weights])
    assert all(g.abs().max() > 1e-6 for g in grads)


@settings(max_examples=40)
@given(case=sparse_layers(hard_share=1.0))
def test_gradient_of_hard_rows_is_the_straight_through_formula(case):
    layer, x, uniform, seed = case
    layer.train()
    x.requires_grad_()
    y = layer(x, uniform)
    cotangent = vectors(*y.shape, seed=seed + 1)
    names, weights = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad((y * cotangent).sum(), [x, *weights])
    s = layer.select
    slow_grads = slow.straight_through_gradients(
        x.detach().numpy(),
        slow.weights_of(layer),
        layer.ff_sparsity,
        uniform.numpy(),
        s.temperature,
        s.reading,
        cotangent.numpy(),
    )
    for name, grad in zip(["x", *names], grads, strict=True):
        close(grad, slow_grads[name])


def test_the_readings_differ_in_the_gradient_of_the_unselected_units():
    """Mask outside the ReLU: an open unit that was not chosen still teaches the controller; inside: it does not."""
    grads = {}
    for reading in ("paper", "reference"):
        layer = SparseFeedForward(1, 2, 2, 1, controller=reading, hard_share=1, temperature=1.0).double().train()
        with torch.no_grad():
            layer.w1.copy_(torch.tensor([[-1.0], [1.0]]))  # the chosen unit is closed, the other open
            layer.w2.fill_(1.0)
            layer.c1.fill_(1.0)
            layer.c2.copy_(torch.tensor([[2.0, -2.0]]))
        even = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64)
        layer(torch.ones(1, 1, 1, dtype=torch.float64), even).sum().backward()
        grads[reading] = layer.c2.grad.flatten().tolist()
    p = 1 / (1 + math.exp(-4))
    assert grads["reference"] == [0, 0]
    assert grads["paper"] == pytest.approx([-p * (1 - p), p * (1 - p)])


@both_readings
@pytest.mark.parametrize("hard_share", [0.0, 0.3, 1.0])
def test_training_is_finite_and_gradients_reach_every_weight(reading, hard_share):
    torch.manual_seed(0)
    layer = SparseFeedForward(8, 32, 4, 3, controller=reading, hard_share=hard_share).train()
    y = layer(torch.randn(4, 50, 8))
    assert y.isfinite().all()
    (y**2).mean().backward()
    for name, p in layer.named_parameters():
        assert p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@both_readings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_train_finitely(reading, dtype):
    layer = SparseFeedForward(4, 8, 4, 2, controller=reading, hard_share=0.5).to(dtype).train()
    x = (1e4 * torch.randn(2, 20, 4)).to(dtype).requires_grad_()
    layer(x).float().sum().backward()
    assert x.grad.isfinite().all() and layer.c1.grad.isfinite().all()


# --- hard share, noise ----------------------------------------------------------------------------------------------


def is_one_hot(mask):
    return ((mask == 0) | (mask == 1)).all(-1).all(-1)


@pytest.mark.parametrize("hard_share", [0.0, 0.3, 0.8, 1.0])
def test_paper_draws_hard_rows_token_by_token(hard_share):
    torch.manual_seed(1)
    select = Selector(temperature=1.0, hard_share=hard_share).train()
    hard = is_one_hot(select(torch.randn(20, 1000, 2, 3)))
    assert hard.float().mean().item() == pytest.approx(hard_share, abs=0.015)
    if 0 < hard_share < 1:
        by_row = hard.float().mean(1)
        assert by_row.min() > hard_share - 0.08 and by_row.max() < hard_share + 0.08
        together = (hard[:, 1:] & hard[:, :-1]).float().mean().item()
        assert together == pytest.approx(hard_share**2, abs=0.02)  # neighbours are drawn independently


def test_reference_draws_hard_or_soft_for_the_whole_call():
    torch.manual_seed(2)
    select = Selector(temperature=0.1, hard_share=0.3, reading="reference").train()
    calls = []
    for _ in range(600):
        hard = is_one_hot(select(torch.randn(2, 5, 2, 3)))
        assert hard.all() or not hard.any()
        calls.append(bool(hard.all()))
    assert np.mean(calls) == pytest.approx(0.3, abs=0.07)


@pytest.mark.parametrize(("reading", "temperature", "sharpness"), [("paper", 0.1, 1.0), ("reference", 0.5, 2.0)])
def test_units_are_drawn_from_the_softmax_of_the_logits(reading, temperature, sharpness):
    """Gumbel-max: arg-max(z + g) follows softmax(z), arg-max(z + tau g) softmax(z / tau)."""
    torch.manual_seed(3)
    z = torch.tensor([0.3, -0.4, 1.1, 0.0])
    select = Selector(temperature, 1.0, reading).train()
    share = select(z.expand(1, 40000, 1, 4)).mean(dim=(0, 1, 2))
    torch.testing.assert_close(share, (sharpness * z).softmax(0), rtol=0, atol=0.015)


def test_soft_rows_of_the_reference_carry_neither_noise_nor_temperature():
    torch.manual_seed(4)
    z = torch.randn(2, 5, 3, 4)
    assert torch.equal(Selector(0.1, 0.0, "reference").train()(z), z.softmax(-1))
    noisy = Selector(1.0, 0.0).train()(z)
    assert not torch.allclose(noisy, z.softmax(-1), atol=0.1)
    torch.testing.assert_close(noisy.sum(-1), torch.ones(2, 5, 3))


def test_noise_follows_the_gumbel_distribution():
    torch.manual_seed(5)
    g = gumbel_like(torch.empty(1 << 20, dtype=torch.float64))
    assert g.mean().item() == pytest.approx(np.euler_gamma, abs=0.006)
    assert g.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    levels = np.array([0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999])
    close(np.quantile(g.numpy(), levels), -np.log(-np.log(levels)), atol=0.08)
    rank = torch.arange(1, len(g) + 1) / len(g)
    distance = ((-(-g.sort().values).exp()).exp() - rank).abs().max().item()
    assert distance < 1.95 / math.sqrt(len(g))  # Kolmogorov-Smirnov at 0.1%
    for lag in (1, 2, 3, 4):  # four numbers share one draw
        assert abs(np.corrcoef(g[lag:], g[:-lag])[0, 1]) < 0.005


def test_noise_uses_every_level_about_equally():
    torch.manual_seed(6)
    n_levels, per_level = 65536, 64
    g = gumbel_like(torch.empty(n_levels * per_level, dtype=torch.float64))
    u = (-(-g).exp()).exp()  # the distribution function: back to (0, 1)
    counts = torch.bincount((u * n_levels).long(), minlength=n_levels)
    assert len(counts) == n_levels and counts.min() > 20 and counts.max() < 120
    assert len(g.unique()) == n_levels


@pytest.mark.parametrize("shape", [(0, 2), (1,), (3, 5, 7), (2, 2), (1, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_has_shape_and_type_of_its_argument(shape, dtype):
    g = gumbel_like(torch.empty(shape, dtype=dtype))
    assert g.shape == shape and g.dtype == dtype and g.isfinite().all()


def test_training_is_repeatable_by_seed():
    layer, x = SparseFeedForward(4, 8, 2, 2).train(), vectors(2, 6, 4, dtype=torch.float32)

    def run(seed):
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


@both_readings
def test_inference_uses_no_randomness(reading):
    layer, x = SparseFeedForward(4, 8, 2, 2, controller=reading, hard_share=0.5).eval(), torch.randn(2, 6, 4)
    before = torch.get_rng_state()
    y = layer(x)
    assert torch.equal(layer(x), y)
    layer.step(x[:, 0])
    assert torch.equal(torch.get_rng_state(), before)


def test_one_hot_of_best_picks_the_first_of_equals():
    assert one_hot_of_best(torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, -1.0]])).tolist() == [[0, 1, 0], [1, 0, 0]]


# --- what inference reads, bad input ----------------------------------------------------------------------------------


def test_a_step_reads_one_unit_in_n_only():
    layer, x_t = randomized(SparseFeedForward(4, 12, 3, 2)), vectors(2, 4)
    y, _ = layer.step(x_t)
    chosen = set(layer.units(x_t).flatten().tolist())
    others = [u for u in range(12) if u not in chosen]
    assert others
    with torch.no_grad():
        for p in (layer.w1, layer.w2, layer.b1):
            p[others] = float("nan")
    assert torch.equal(layer.step(x_t)[0], y)


BAD_SIZES = [
    ((4, 10, 4, 2), {}, r"d_ff = 10: must be a multiple of ff_sparsity = 4"),
    ((4, 8, 0, 2), {}, r"ff_sparsity = 0: must be an int of at least 1"),
    ((4, 8, 2, 0), {}, r"d_lowrank = 0: must be an int of at least 1"),
    ((0, 8, 2, 2), {}, r"d_model = 0: must be an int of at least 1"),
    ((4, 0, 2, 2), {}, r"d_ff = 0: must be an int of at least 1"),
    ((4, 8, 2, 2), {"temperature": 0.0}, r"temperature = 0.0: must be above 0"),
    ((4, 8, 2, 2), {"temperature": -1.0, "controller": "reference"}, r"temperature = -1.0: must be 0 or more"),
    ((4, 8, 2, 2), {"hard_share": 1.5}, r"hard_share = 1.5: must be in \[0, 1\]"),
    ((4, 8, 2, 2), {"hard_share": math.nan}, r"hard_share = nan: must be in \[0, 1\]"),
    ((4, 8, 2, 2), {"controller": "trax"}, r"controller = 'trax': must be one of 'paper', 'reference'"),
]


@pytest.mark.parametrize(("sizes", "options", "message"), BAD_SIZES)
def test_bad_sizes_are_refused(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        SparseFeedForward(*sizes, **options)


def test_temperature_zero_of_the_reference_is_the_plain_arg_max():
    torch.manual_seed(0)
    z = torch.randn(2, 5, 3, 4)
    assert torch.equal(Selector(0.0, 1.0, "reference").train()(z), one_hot_of_best(z))
