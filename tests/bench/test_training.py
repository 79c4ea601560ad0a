import pytest

from sparselib.bench import training
from sparselib.config import CONTROLLERS, count_parameters, preset


@pytest.mark.parametrize("reading", CONTROLLERS)
def test_ratio_is_of_sparse_over_dense(reading):
    assert 0 < training.step_ratio(8, 16, reading, tokens=4, repeat=3, warmup=1) < float("inf")


def test_the_models_weigh_the_same():
    weights = [count_parameters(config) for config in training.models().values()]
    assert len(weights) == 5 and max(weights) < 1.01 * min(weights)


def test_whole_steps_of_every_model_and_of_the_data(monkeypatch, capsys):
    small = {"dense": preset("smoke"), "ff": preset("smoke", "ff")}
    monkeypatch.setattr(training, "models", lambda: small)
    monkeypatch.setattr(training, "DATA", training.DataConfig(corpus="lm_ci", vocab_size=512, length=32))
    seconds = training.whole_steps(small, repeat=2)
    assert {name: len(times) for name, times in seconds.items()} == {"data": 2, "dense": 2, "ff": 2}
    training.tell_whole_steps(repeat=1)
    told = capsys.readouterr().out
    assert "dense: " in told and ", 1.00 times dense, " in told and "ms a batch" in told
