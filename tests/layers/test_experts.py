import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import BlockFeedForward, SwitchFeedForward

from .. import slow
from ..helpers import by_steps, close, randomized, seeds, vectors

KINDS = {"block": BlockFeedForward, "switch": SwitchFeedForward}
both = pytest.mark.parametrize("kind", KINDS)


@both
@settings(max_examples=30)
@given(seed=seeds, d=st.integers(1, 4), n=st.integers(1, 4), width=st.integers(1, 3), bias=st.booleans())
def test_inference_equals_the_slow_reference(kind, seed, d, n, width, bias):
    layer = randomized(KINDS[kind](d, n * width, n, hidden_bias=bias), seed, scale=1.0)
    x = vectors(2, 3, d, seed=seed)
    y = slow.expert_feedforward(x.numpy(), slow.weights_of(layer), n, kind == "switch")
    close(layer(x), y)
    close(by_steps(layer, x, None)[0], y)


def test_switch_is_the_same_in_training():
    layer, x = randomized(SwitchFeedForward(3, 6, 2)), vectors(2, 4, 3)
    y = layer(x)
    assert torch.equal(layer.train()(x), y)


def slow_soft_block(x, w, n_experts):
    """Every expert scaled by softmax(x C), inside the ReLU."""
    return slow.each_position(
        lambda v: slow.masked_feedforward(v, w, np.repeat(slow.softmax(v @ w["c"]), len(w["w1"]) // n_experts)), x
    )


def test_block_trains_softly_with_all_experts_and_a_gradient_for_the_router():
    layer = randomized(BlockFeedForward(3, 6, 3, hard_share=0.0, reading="reference")).train()
    x = vectors(2, 2, 3).requires_grad_()
    close(layer(x), slow_soft_block(x.detach().numpy(), slow.weights_of(layer), 3))
    names, weights = zip(*layer.named_parameters(), strict=True)

    def function(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *weights))


def test_hard_block_gives_the_value_of_inference_and_the_router_a_straight_through_gradient():
    layer = randomized(BlockFeedForward(3, 6, 3, hard_share=1.0, reading="reference", temperature=0.0))
    x = vectors(2, 4, 3)
    y = layer(x)
    trained = layer.train()(x)
    close(trained, y)
    cotangent = vectors(*y.shape, seed=1)
    (trained * cotangent).sum().backward()
    w, grad = slow.weights_of(layer), np.zeros((3, 3))
    for v, g in zip(x.numpy().reshape(-1, 3), cotangent.numpy().reshape(-1, 3), strict=True):
        z = v @ w["c"]
        p, e = slow.softmax(z), int(np.argmax(z))
        grad_gate = np.zeros(3)  # only the chosen expert's units are open
        for u in range(2 * e, 2 * e + 2):
            a = slow.preactivation(v, w, u)
            grad_gate[e] += (a > 0) * a * (w["w2"][u] @ g)
        grad += np.outer(v, p * (grad_gate - p @ grad_gate))
    close(layer.c.grad, grad)


@pytest.mark.parametrize("reading", ["paper", "reference"])
@both
def test_training_is_finite_and_gradients_reach_every_weight(kind, reading):
    torch.manual_seed(0)
    layer = KINDS[kind](8, 32, 4, **({"reading": reading} if kind == "block" else {})).train()
    y = layer(torch.randn(4, 50, 8))
    assert y.isfinite().all()
    (y**2).mean().backward()
    for name, p in layer.named_parameters():
        assert p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@both
def test_a_step_reads_one_expert_only(kind):
    layer, x_t = randomized(KINDS[kind](4, 12, 3)), vectors(1, 4)
    y, _ = layer.step(x_t)
    e = int((x_t @ layer.c).argmax())
    others = [u for u in range(12) if u // 4 != e]
    with torch.no_grad():
        for p in (layer.w1, layer.w2, layer.b1):
            p[others] = float("nan")
    assert torch.equal(layer.step(x_t)[0], y)


@both
def test_inference_uses_no_randomness(kind):
    layer, x = KINDS[kind](4, 8, 2).eval(), torch.randn(2, 6, 4)
    before = torch.get_rng_state()
    assert torch.equal(layer(x), layer(x))
    layer.step(x[:, 0])
    assert torch.equal(torch.get_rng_state(), before)


@both
def test_bad_sizes_are_refused(kind):
    with pytest.raises(ValueError, match=r"d_ff = 10: must be a multiple of n_experts = 4"):
        KINDS[kind](4, 10, 4)
    with pytest.raises(ValueError, match=r"n_experts = 0: must be an int of at least 1"):
        KINDS[kind](4, 8, 0)
