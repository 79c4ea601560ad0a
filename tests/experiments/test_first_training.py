"""The experiment of notebook 03, and the text all experiments take."""

import pytest
import torch

from sparselib.config import count_parameters, preset
from sparselib.experiments import first_training
from sparselib.experiments.text import Text, load_text

CONFIGS = {variant: preset("smoke", variant, vocab_size=32) for variant in ("dense", "ff_qkv")}
SETTINGS = dict(steps=6, batch=4, learning_rate=1e-3, validate_every=3, progress=False)


@pytest.fixture(scope="module")
def text():
    windows = torch.randint(32, (40, 9), generator=torch.Generator().manual_seed(0))
    return Text(None, windows[:30], windows[30:])


@pytest.fixture(scope="module")
def trained(text):
    return first_training.train_variants(CONFIGS, text, seed=0, **SETTINGS)


def test_training_depends_on_the_seed_and_nothing_else(text, trained):
    again = first_training.train_variants(dict(reversed(CONFIGS.items())), text, seed=0, **SETTINGS)
    other = first_training.train_variants(CONFIGS, text, seed=1, **SETTINGS)
    for variant in CONFIGS:
        assert trained[variant].run.losses == again[variant].run.losses != other[variant].run.losses
        assert not trained[variant].model.training


def test_training_table(trained):
    frame = first_training.training_table(trained)
    assert frame["weights"].tolist() == [count_parameters(config) for config in CONFIGS.values()]
    assert frame["validation loss (nats)"].tolist() == [t.run.validation[-1][1] for t in trained.values()]
    assert frame["step, times dense"].iloc[0] == 1
    axis = first_training.draw_losses(trained).axes[0]
    assert list(axis.lines[1].get_xdata()) == pytest.approx([3 * 4 * 8 / 1e3, 6 * 4 * 8 / 1e3])


def test_decoding_times_carry_their_floor(trained):
    models = {name: t.model for name, t in trained.items()}
    frame = first_training.time_variants(models, 10.0, tokens=3, context=2, size="small")
    assert frame["floor (ms)"].tolist() == pytest.approx((frame["MB touched"] / 10).tolist())
    assert frame["speed-up"].iloc[1] == pytest.approx(frame["ms a token"].iloc[0] / frame["ms a token"].iloc[1])
    shares = 100 * frame["floor (ms)"] / frame["ms a token"]
    assert frame["% of limit"].tolist() == pytest.approx(shares.tolist())
    assert len(first_training.draw_decoding([frame, frame]).axes) == 2


def test_load_text_gives_windows_of_the_right_vocabulary():
    text = load_text("lm_ci", 300, 16)
    assert text.train.shape[1] == text.validation.shape[1] == 17
    assert int(text.train.max()) < 300
    assert len(text.tokenizer.decode(text.train[0].tolist())) > 0
