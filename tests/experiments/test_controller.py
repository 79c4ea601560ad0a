"""Statistics of the controllers, and the figures of notebook 12."""

import pytest
import torch

from sparselib.config import preset
from sparselib.experiments import controller
from sparselib.layers.selector import Selector
from sparselib.models import Transformer

CONFIG = preset("smoke", "ff", vocab_size=32)


@pytest.fixture(scope="module")
def windows():
    return torch.randint(32, (6, 9), generator=torch.Generator().manual_seed(0))


def test_statistics_are_shares_and_leave_the_model_and_the_generator_alone(windows):
    torch.manual_seed(1)
    model = Transformer(CONFIG).train()
    state = torch.get_rng_state()
    values = controller.controller_statistics(model, windows)
    assert list(values) == [f"{name}.{block}" for block in (1, 2) for name in controller.STATISTICS]
    assert all(0 <= value <= 1 for value in values.values())
    assert values == controller.controller_statistics(model, windows)
    assert model.training and torch.equal(state, torch.get_rng_state())


def test_a_controller_that_always_takes_the_same_unit(windows):
    model = Transformer(preset("smoke", "ff", vocab_size=32, controller_bias=True, n_layers=1))
    layer = model.stack.blocks[0].feedforward
    with torch.no_grad():
        layer.c2.zero_()
        layer.bc.view(-1, CONFIG.ff_sparsity)[:, 3] = 50
    values = controller.controller_statistics(model, windows)
    assert values == pytest.approx(
        {"decision.1": 0, "usage.1": 0, "dead.1": 7 / 8, "agreement.1": 1, "soft_mass.1": 1}, abs=1e-6
    )


def test_an_undecided_controller_follows_the_noise(windows):
    model = Transformer(preset("smoke", "ff", vocab_size=32, n_layers=1, temperature=1e3))
    with torch.no_grad():
        model.stack.blocks[0].feedforward.c2.zero_()
    values = controller.controller_statistics(model, windows)
    assert values["decision.1"] == pytest.approx(1)
    assert values["agreement.1"] == pytest.approx(1 / 8, abs=0.05)
    assert values["soft_mass.1"] == pytest.approx(1 / 8, abs=0.01)  # so hot that the soft mask is uniform


def test_there_is_nothing_to_say_of_a_dense_model(windows):
    assert controller.controller_statistics(Transformer(preset("smoke", vocab_size=32)), windows) == {}


@pytest.mark.parametrize("reading", ["paper", "reference"])
def test_masks_are_those_of_training(reading):
    z = torch.randn(40, 3, 8)
    torch.manual_seed(1)
    soft, hard = controller.training_masks(Selector(0.5, 0.3, reading), z)
    torch.manual_seed(2)
    assert torch.equal(hard, controller.training_masks(Selector(0.5, 0.3, reading), z)[1])  # whatever was drawn before
    assert (hard.sum(-1) == 1).all() and ((hard == 0) | (hard == 1)).all()
    assert soft.sum(-1).allclose(torch.ones(40, 3))
    if reading == "paper":
        assert torch.equal(soft.argmax(-1), hard.argmax(-1))
    else:
        assert soft.allclose(z.softmax(-1)) and not torch.equal(soft.argmax(-1), hard.argmax(-1))
