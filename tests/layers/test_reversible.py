"""Reversible stacks and chunked layers give the gradients of ordinary differentiation, and keep less."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparselib.layers import DenseAttention, FeedForward, ReversibleStack, SparseFeedForward, in_chunks
from sparselib.layers.decisions import choose

from ..helpers import randomized, vectors

D = 4
CHANGED = "a weight, a buffer or an input changed between the forward and the backward pass"


class Half(nn.Module):
    """Norm, layer, dropout; optionally a vector to add."""

    def __init__(self, layer, chunk=None):
        super().__init__()
        self.norm, self.layer, self.dropout, self.chunk = nn.LayerNorm(D), layer, nn.Dropout(0.3), chunk

    def forward(self, x, shift=0.0):
        x = self.norm(x)
        y = self.layer(x) if self.chunk is None else in_chunks(self.layer, x, self.chunk)
        return self.dropout(y) + shift


def halves(depth=1, chunk=None):
    made = []
    for reading in ("paper", "reference") * depth:
        sparse = SparseFeedForward(D, 6, 3, 2, controller=reading, hard_share=0.5)
        made += [Half(DenseAttention(D, 2)), Half(sparse, chunk)]
    return made


def stack(swaps=None, depth=1, chunk=None, **options):
    made = ReversibleStack(halves(depth, chunk), swaps, **options)
    return randomized(made, seed=3).train()


def gradients(model, x1, x2, seed=0, **context):
    """Both outputs and all gradients; the same draws for the same seed."""
    x1, x2 = x1.clone().requires_grad_(), x2.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    y1, y2 = model(x1, x2, **context)
    after = torch.get_rng_state()
    ((y1 * vectors(*y1.shape, seed=8).to(y1)).sum() + (y2 * vectors(*y2.shape, seed=9).to(y2)).sum()).backward()
    kept = getattr(model, "remember", "choices") != "nothing"
    assert torch.equal(torch.get_rng_state(), after) == kept  # the second calls leave no trace
    return [y1, y2, x1.grad, x2.grad, *(p.grad for p in model.parameters())]


def same(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def streams(batch=2, length=5, dtype=torch.float64):
    return vectors(batch, length, D, seed=1, dtype=dtype), vectors(batch, length, D, seed=2, dtype=dtype)


def plain(model):
    other = copy.deepcopy(model)
    other.remember = "everything"
    return other


@settings(max_examples=15)
@given(swaps=st.lists(st.booleans(), min_size=4, max_size=4), length=st.integers(1, 5), training=st.booleans())
def test_gradients_are_those_of_ordinary_differentiation(swaps, length, training):
    model = stack(swaps).train(training)
    same(gradients(model, *streams(length=length)), gradients(plain(model), *streams(length=length)), 1e-10)


def test_gradients_in_float32():
    model = stack(depth=3).float()
    x = streams(dtype=torch.float32)
    same(gradients(model, *x), gradients(plain(model), *x), 1e-5)


def test_what_all_halves_are_given_reaches_them():
    model, shift = stack(), vectors(2, 5, D, seed=4)
    found = gradients(model, *streams(), shift=shift)
    same(found, gradients(plain(model), *streams(), shift=shift), 1e-10)
    assert not torch.allclose(found[0], gradients(model, *streams())[0])


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_chunks_within_a_reversible_stack(chunk):
    model = stack(chunk=chunk)
    same(gradients(model, *streams()), gradients(plain(model), *streams()), 1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_a_chunked_layer_is_the_layer(chunk):
    layer, (x, _) = randomized(FeedForward(D, 6), 1), streams()
    found = []
    for apply in (layer, lambda x: in_chunks(layer, x, chunk)):
        layer.zero_grad()
        x.requires_grad_().grad = None
        y = apply(x)
        (y * vectors(*y.shape, seed=8)).sum().backward()
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    same(*found, 1e-12)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(layer, x, chunk), layer(x))


class Rare(nn.Module):
    """Uses its weight in chunks that begin above 0 alone."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.w if x[0, 0, 0] > 0 else x


@pytest.mark.parametrize(("x", "gradient"), [([1, 2, -3], 3), ([-1, 2, 4], 6), ([1, -2, 4], 5), ([-1, -2, -3], None)])
def test_a_weight_that_some_chunks_do_not_use(x, gradient):
    layer = Rare()
    in_chunks(layer, torch.tensor(x).float().view(1, -1, 1), 1).sum().backward()
    assert layer.w.grad == gradient


def test_frozen_weights_get_no_gradient_and_change_no_other():
    model = stack()
    for name, p in model.named_parameters():
        p.requires_grad_("w1" not in name and "halves.0" not in name)
    found = gradients(model, *streams())
    same(found, gradients(plain(model), *streams()), 1e-10)
    assert any(g is None for g in found[4:]) and any(g is not None for g in found[4:])


def test_only_what_is_kept_of_choices_and_draws_gives_the_right_gradients():
    right = gradients(plain(stack()), *streams())
    for remember, good in (("choices", True), ("draws", True), ("nothing", False)):  # in float64 no choice flips
        found = gradients(stack(remember=remember), *streams())
        same(found[:2], right[:2], 1e-12)
        equal = all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found[2:], right[2:], strict=True))
        assert equal == good, remember


class Edge(nn.Module):
    """Chooses by the sign of x, and adds so much that the last digits of the other stream are rounded away."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return 1e5 + choose(lambda: (x > 0).long(), 2) * self.w


@pytest.mark.parametrize(("remember", "chosen"), [("choices", 1.0), ("draws", 0.0)])
def test_choices_made_again_from_rebuilt_inputs_would_flip(remember, chosen):
    model = ReversibleStack([Edge(), Edge()], remember=remember)
    y1, _ = model(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 1e-9))
    y1.sum().backward()  # y1 is what the first half gave
    assert model.halves[0].w.grad == chosen


def saved_bytes(model, x1, x2):
    """Bytes that the graph keeps besides weights and inputs."""
    own = {p.data_ptr() for p in model.parameters()} | {x1.data_ptr(), x2.data_ptr()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x1, x2)
    assert all(part.requires_grad for part in y)
    return sum(kept.values())


def test_a_deeper_stack_keeps_no_more():
    x = streams(4, 64)
    kept = [saved_bytes(stack(depth=depth), *x) for depth in (1, 6)]
    assert kept[0] == kept[1] == 2 * x[0].nbytes
    assert saved_bytes(plain(stack(depth=6)), *x) > 20 * kept[0]


def test_bfloat16_under_autocast():
    model = stack().float()
    x = streams(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, *x)
        expected = gradients(plain(model), *x)
    same(found, expected, 0.02)
    assert (found[0] - gradients(model, *x)[0]).abs().max() > 1e-4


def stream_sum(model, shift=0.0):
    return sum(y.sum() for y in model(*streams(), shift=shift))


@pytest.mark.parametrize("trains", [True, False])
def test_a_weight_that_changed_since_the_forward_pass_is_an_error(trains):
    model = stack()
    model.halves[1].layer.w1.requires_grad_(trains)
    loss = stream_sum(model)
    with torch.no_grad():
        model.halves[1].layer.w1.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_a_buffer_or_what_halves_are_given_that_changed_is_an_error():
    model, shift = stack(), vectors(2, 5, D, seed=4)
    model.halves[2].layer.register_buffer("table", torch.zeros(3))
    for changed in (model.halves[2].layer.table, shift):
        loss = stream_sum(model, shift)
        changed.add_(1)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_an_output_that_changed_is_an_error():
    model = stack(swaps=[False] * 4)
    y1, y2 = model(*(x.requires_grad_() for x in streams()))
    with torch.no_grad():
        y1.detach().add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        (y1 + y2).sum().backward()


@pytest.mark.parametrize("change", [nn.Module.eval, lambda layer: layer.requires_grad_(False)])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_part_switched_since_the_forward_pass_is_an_error(change, chunked):
    model = stack()
    loss = in_chunks(model.halves[1].layer, streams()[0], 2).sum() if chunked else stream_sum(model)
    change(model.halves[1].layer)
    with pytest.raises(RuntimeError, match=r"train\(\), eval\(\) or requires_grad_\(\) was called between"):
        loss.backward()


def test_a_frozen_weight_of_a_chunked_layer_that_changed_is_an_error():
    layer = randomized(FeedForward(D, 6))
    layer.w1.requires_grad_(False)
    loss = in_chunks(layer, streams()[0], 2).sum()
    with torch.no_grad():
        layer.w1.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_a_second_backward_pass_is_told_apart_from_a_change():
    model = stack()
    loss = stream_sum(model)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    same([p.grad for p in model.parameters()], [2 * g for g in first], 1e-12)
    with pytest.raises(RuntimeError, match="^Trying to backward through the graph a second time"):
        loss.backward()


def test_the_gradients_of_a_half_are_handed_over_when_it_is_done():
    model, calls, order = stack(), [], []
    for index, half in enumerate(model.halves):
        half.register_forward_hook(lambda *_: calls.append(1))
        for p in half.parameters():
            p.register_post_accumulate_grad_hook(lambda _, index=index: order.append((index, len(calls) - 4)))
    stream_sum(model).backward()
    assert set(order) == {(3, 1), (2, 2), (1, 3), (0, 4)}  # the last half's after one second call, and so on


def test_refusals():
    with pytest.raises(
        ValueError, match="remember = 'all': must be one of 'everything', 'choices', 'draws', 'nothing'"
    ):
        stack(remember="all")
    with pytest.raises(ValueError, match="swaps = 3: must be one for each of 4 halves"):
        stack([True] * 3)
    with pytest.raises(ValueError, match=r"x2 = \(\(2, 4, 4\)"):
        stack()(torch.zeros(2, 5, D), torch.zeros(2, 4, D))
    with pytest.raises(ValueError, match="chunk = 0: must be an int of at least 1"):
        in_chunks(nn.Identity(), torch.zeros(1, 2, 3), 0)
    for n in (1, 3):
        with pytest.raises(ValueError, match=f"streams = {n}: must be 2, x1 and x2"):
            stack()(*[torch.zeros(2, 5, D)] * n)
