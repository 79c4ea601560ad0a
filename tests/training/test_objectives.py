import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from sparselib.training import next_token_loss
from sparselib.training.objectives import ROWS, count_targets, mean_loss, predict, total_loss_

VOCAB = 11


def numbers(*shape, dtype=torch.float64, seed=0, scale=1.0):
    return scale * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def tokens(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_the_mean_negative_log_probability():
    logits, targets = numbers(2, 3, VOCAB), tokens(2, 3)
    slow = [-math.log(logits[b, t].softmax(0)[targets[b, t]]) for b in range(2) for t in range(3)]
    assert next_token_loss(logits, targets).item() == pytest.approx(sum(slow) / 6, rel=1e-12)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    assert next_token_loss(logits, targets, mask).item() == pytest.approx((slow[0] + slow[3] + slow[4]) / 3, rel=1e-12)


@given(st.integers(1, 2 * ROWS + 3), st.booleans(), st.floats(0.1, 60), st.floats(0.01, 3), st.integers(0, 2**32 - 1))
def test_the_loss_in_place_is_the_readable_one_with_its_gradient(n, masked, spread, scale, seed):
    weight, targets = numbers(4, VOCAB, seed=seed, scale=spread).requires_grad_(), tokens(1, n, seed=seed)
    x = numbers(1, n, 4, seed=seed)
    mask = tokens(1, n, seed=seed + 1) < 6 if masked else None
    counted = n if mask is None else int(mask.sum())
    slow = next_token_loss(x @ weight, targets, mask) * counted * scale if counted else 0 * weight.sum()
    (wanted,) = torch.autograd.grad(slow, weight)
    fast = total_loss_(x @ weight, targets, mask, scale)
    (got,) = torch.autograd.grad(3 * fast, weight)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(got, 3 * wanted, rtol=1e-9, atol=1e-12)


def test_gradient_against_finite_differences():
    targets, mask = tokens(2, 3), torch.tensor([[1, 1, 0], [1, 0, 1]])
    logits = numbers(2, 3, VOCAB).requires_grad_()
    assert gradcheck(lambda z: total_loss_(z.clone(), targets, mask, 0.7), logits)


def test_single_precision_is_as_close_as_pytorchs():
    logits, targets = numbers(2, 100, VOCAB, scale=30), tokens(2, 100)
    exact = next_token_loss(logits, targets).item()
    assert total_loss_(logits.float(), targets).item() / 200 == pytest.approx(exact, rel=1e-6)


def test_a_hopeless_target_costs_a_finite_loss():
    logits = torch.tensor([[[0.0, 500.0, -500.0]]])
    assert total_loss_(logits, torch.tensor([[2]])).item() == 1000


def test_not_a_number_comes_out_as_such():
    logits = numbers(1, 3, VOCAB)
    logits[0, 1, 2] = math.nan
    assert math.isnan(total_loss_(logits, tokens(1, 3)).item())


def test_who_needs_the_logits_again_is_told():
    z = numbers(1, 2, VOCAB).requires_grad_()
    logits = z.exp()  # keeps its own result for the backward pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total_loss_(logits, tokens(1, 2)).backward()


def test_half_precision_is_taken_in_single():
    logits, targets = numbers(1, 5, VOCAB).bfloat16(), tokens(1, 5)
    kept = logits.clone()
    assert total_loss_(logits, targets).item() == pytest.approx(5 * next_token_loss(kept.float(), targets).item())
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("loss", [next_token_loss, total_loss_])
def test_shapes_that_do_not_fit_are_refused(loss):
    with pytest.raises(ValueError, match="targets.shape"):
        loss(numbers(2, 3, VOCAB), tokens(3, 2))
    with pytest.raises(ValueError, match="mask.shape"):
        loss(numbers(2, 3, VOCAB), tokens(2, 3), torch.ones(2, 2))


def test_the_two_kinds_of_batches():
    causal = {"tokens": tokens(2, 5)}
    logits, targets, mask = predict(lambda x: ("decoder", x.tolist()), causal)
    assert logits == ("decoder", causal["tokens"][:, :4].tolist()) and torch.equal(targets, causal["tokens"][:, 1:])
    assert mask is None and count_targets(causal) == 8
    span = {"source": tokens(2, 4), "mask": tokens(2, 4) > 3, "target": tokens(2, 4), "target_mask": tokens(2, 3) > 5}
    logits, targets, mask = predict(lambda s, t, mask: (s, t, mask), span)
    assert logits[0] is span["source"] and logits[2] is span["mask"] and torch.equal(logits[1], span["target"][:, :3])
    assert torch.equal(targets, span["target"][:, 1:]) and mask is span["target_mask"]
    assert count_targets(span) == int(span["target_mask"].sum())


def test_the_mean_counts_every_target_alike():
    batches = [{"tokens": tokens(3, 5)}, {"tokens": tokens(1, 5)}]
    assert mean_loss(lambda batch: torch.tensor(float(len(batch["tokens"]))), batches) == 4 / 16
