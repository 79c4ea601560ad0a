"""The short form of a run: a model and windows at hand."""

import dataclasses

import pytest
import torch
from torch import nn

from sparselib.training import evaluate, train

VOCAB = 11
SETTINGS = {"steps": 12, "batch": 4, "learning_rate": 1e-2, "warmup": 3, "seed": 5, "progress": False}


class Tiny(nn.Module):
    """tokens (B, T) -> logits (B, T, VOCAB): the token before, through one layer with dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        return self.out(self.drop(self.norm(self.embed(tokens))))


def make(dropout=0.0):
    torch.manual_seed(0)
    return Tiny(dropout)


@pytest.fixture
def windows():
    """Counting modulo VOCAB from any start: the next token follows from the one before."""
    return (torch.arange(30)[:, None] + torch.arange(7)[None]) % VOCAB


def test_training_learns_to_count(windows):
    model = make()
    before = evaluate(model, windows, 8)
    run = train(model, windows, windows, **{**SETTINGS, "steps": 300})
    assert len(run.losses) == 300 and [step for step, _ in run.validation] == [300]
    assert run.validation[0][1] == evaluate(model, windows, 4) < 0.1 < 2 < before
    assert run.losses[0] == pytest.approx(before, abs=0.5)
    assert run.seconds > 0 and run.tokens_per_second == pytest.approx(300 * 4 * 6 / run.seconds)
    assert run.seed == 5 and run.config["length"] == 6 and run.config["learning_rate"] == 1e-2
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 6


def test_a_seed_fixes_the_run_and_leaves_the_callers_generator_alone(windows):
    before = iter(range(99, 110))

    def once(seed, on_step=None):
        model = make(dropout=0.5)
        torch.manual_seed(next(before))  # whatever the caller has drawn before
        state = torch.get_rng_state()
        run = train(model, windows, windows, **{**SETTINGS, "seed": seed}, on_step=on_step)
        assert torch.equal(torch.get_rng_state(), state)
        return run

    first = once(5)
    again = once(5, on_step=lambda step, loss: torch.rand(step))  # a watcher that draws
    assert (again.losses, again.validation) == (first.losses, first.validation)
    assert once(6).losses != first.losses


def test_models_that_draw_and_models_that_do_not_see_the_same_batches(windows):
    seen = {}
    for dropout in (0.0, 0.5):
        model = make(dropout)
        seen[dropout] = []
        model.register_forward_pre_hook(lambda _, inputs, to=seen[dropout]: to.append(inputs[0].tolist()))
        train(model, windows, windows, **SETTINGS)
    assert seen[0.0] == seen[0.5]


def test_validation_points_and_on_step(windows):
    seen = []
    run = train(make(), windows, windows[:5], **SETTINGS, validate_every=5, on_step=lambda *seen_: seen.append(seen_))
    assert [step for step, _ in run.validation] == [5, 10, 12]
    assert seen == list(zip(range(1, 13), run.losses, strict=True))


def test_on_step_may_leave_the_model_in_eval_mode(windows):
    model = make(dropout=0.5)
    modes = []
    model.register_forward_pre_hook(lambda m, _: modes.append(m.training))
    train(model, windows, windows, **SETTINGS, on_step=lambda *_: model.eval())
    assert modes[:12] == [True] * 12 and not any(modes[12:])


def test_evaluate_counts_every_token_alike_and_keeps_the_mode(windows):
    model = make(dropout=0.9)
    loss = evaluate(model, windows, 7)  # 30 windows: the last part has 2
    assert model.training and evaluate(model.eval(), windows, 30) == pytest.approx(loss, rel=1e-6)
    assert not model.training


def test_a_nan_loss_stops_the_run_and_names_the_step(windows):
    model = make()

    def spoil(step, _):
        if step == 3:
            model.out.bias.data.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="loss is nan at step 4"):
        train(model, windows, windows, **SETTINGS, on_step=spoil)


def test_the_bar_shows_on_request_only(windows, capsys):
    train(make(), windows, windows, **SETTINGS)
    assert capsys.readouterr().err == ""
    train(make(), windows, windows, **{**SETTINGS, "progress": True})
    assert "tok/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"batch": 31}, "batch = 31: must be at most the 30 windows"),
        ({"batch": 0}, "batch = 0"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate = nan"),
        ({"warmup": 13}, "warmup = 13: must be at most steps = 12"),
        ({"warmup": -1}, "warmup = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"validate_every": 0}, "validate_every = 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_changes(windows, change, message):
    model = make()
    before = model.out.weight.clone()
    with pytest.raises(ValueError, match=message):
        train(model, windows, windows, **{**SETTINGS, **change})
    assert torch.equal(model.out.weight, before)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), "shape"),
        (torch.zeros(0, 4, dtype=torch.int64), "shape"),
        (torch.zeros(4, 1, dtype=torch.int64), "shape"),
        (torch.zeros(4, 3), "dtype"),
    ],
)
def test_bad_windows_are_refused(windows, bad, message):
    with pytest.raises(ValueError, match=f"validation.{message}"):
        train(make(), windows, bad, **SETTINGS)
    with pytest.raises(ValueError, match=f"windows.{message}"):
        train(make(), bad, windows, **SETTINGS)
