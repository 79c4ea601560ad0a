import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparselib.bench import protocol
from sparselib.bench.protocol import Timing, time_call, time_decode


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand: ``clock.ms += 3``."""
    hand = SimpleNamespace(ms=0.0)
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: hand.ms / 1e3)
    return hand


def test_median_and_quartiles_of_the_calls_after_the_warm_up(clock):
    durations = iter([100, 50, 1, 2, 3, 4, 9])

    def call():
        clock.ms += next(durations)

    timing = time_call(call, 5, 2, bytes=6_000_000, limit_ms=1.5)
    assert (timing.ms_q1, timing.ms_median, timing.ms_q3, timing.ms_min) == pytest.approx((2, 3, 4, 1))
    assert timing.n == 5 and timing.threads == torch.get_num_threads()
    assert timing.gb_s == pytest.approx(2.0)  # 6 MB in 3 ms
    assert timing.limit_fraction == pytest.approx(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        timing.n = 1


def test_setup_is_made_anew_for_every_call_and_not_timed(clock):
    made, got = [], []

    def setup():
        clock.ms += 1000
        made.append(object())
        return made[-1]

    def call(thing):
        clock.ms += 2
        got.append(thing)

    timing = time_call(call, 3, 1, setup)
    assert got == made and len(made) == 4 and timing.ms_median == pytest.approx(2)
    assert timing.gb_s is None and timing.limit_fraction is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeat": 0}, "repeat = 0"),
        ({"repeat": 2.0}, "repeat = 2.0"),
        ({"warmup": -1}, "warmup = -1"),
        ({"bytes": 0}, "bytes = 0"),
        ({"limit_ms": -1.0}, "limit_ms = -1.0"),
    ],
)
def test_bad_counts_are_refused_before_any_call(settings, message):
    with pytest.raises(ValueError, match=message):
        time_call(lambda: pytest.fail("called"), **{"repeat": 1, "warmup": 0, **settings})


class Recorder(nn.Module):
    """The decoding face of a model; its state is the tokens that it has seen."""

    def __init__(self, max_len=64):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=1000, max_len=max_len)
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls = []

    def init_state(self, batch):
        assert batch == 1
        return ()

    def prefill(self, tokens, state):
        assert not self.training and not torch.is_grad_enabled()
        assert tokens.dtype == torch.int64 and tokens.shape[0] == 1
        return None, (*state, *tokens[0].tolist())

    def step(self, tokens, state):
        assert not self.training and not torch.is_grad_enabled() and tokens.shape == (1,)
        self.calls.append((tokens.item(), state))
        return None, (*state, tokens.item())


@pytest.mark.parametrize("context", [0, 1, 20])
def test_every_step_gets_a_fresh_token_and_the_state_before(context):
    model = Recorder()
    timing = time_decode(model, 10, context, warmup=3, bytes=8, limit_ms=1e-9)
    assert isinstance(timing, Timing) and timing.n == 10 and timing.bytes == 8 and timing.limit_fraction > 0
    assert model.training
    tokens, states = zip(*model.calls, strict=True)
    assert len(tokens) == 13 and len(set(tokens)) > 10
    assert [len(state) for state in states] == list(range(context, context + 13))
    assert states[-1][context:] == tokens[:-1]
    assert all(0 <= token < 1000 for token in tokens)


def test_the_seed_fixes_the_tokens():
    def tokens(seed):
        model = Recorder()
        time_decode(model, 5, 2, seed=seed)
        return [token for token, _ in model.calls]

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("tokens", "context", "warmup", "message"),
    [
        (0, 1, 1, "tokens = 0"),
        (1, -1, 1, "context = -1"),
        (1, 1, -1, "warmup = -1"),
        (1, 1.5, 1, "context = 1.5"),
        (50, 11, 4, "tokens = 65: must be at most max_len = 64"),
    ],
)
def test_bad_decode_counts_are_refused(tokens, context, warmup, message):
    model = Recorder()
    with pytest.raises(ValueError, match=message):
        time_decode(model, tokens, context, warmup=warmup)
    assert not model.calls


def test_a_model_elsewhere_is_refused():
    with pytest.raises(ValueError, match="device = 'meta'"):
        time_decode(Recorder().to("meta"), 1, 1)
