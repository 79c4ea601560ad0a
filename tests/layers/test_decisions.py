"""Choices that are remembered are taken again, in order, whatever would be chosen now."""

import pytest
import torch

from sparselib.layers import SparseFeedForward, SwitchFeedForward
from sparselib.layers.decisions import choose, remembered, repeated

from ..helpers import randomized, vectors


def test_choices_come_back_in_order():
    with remembered() as choices:
        first, second = (choose(lambda n=n: torch.tensor([n, n]), 10) for n in (3, 5))
    with repeated(choices):
        assert choose(lambda: torch.tensor([9]), 10).tolist() == first.tolist() == [3, 3]
        assert choose(lambda: torch.tensor([9]), 10).tolist() == second.tolist() == [5, 5]
    assert choose(lambda: torch.tensor([9]), 10).tolist() == [9]


def test_what_is_repeated_can_be_remembered_again():
    with repeated([torch.tensor([3])]), remembered() as inner:
        choose(lambda: torch.tensor([9]), 10)
    assert [choice.tolist() for choice in inner] == [[3]]


@pytest.mark.parametrize(("made", "message"), [(1, "fewer than the 2"), (3, "more than the 2")])
def test_another_number_of_choices_is_an_error(made, message):
    choices = [torch.zeros(1), torch.zeros(1)]
    with pytest.raises(RuntimeError, match=message), repeated(choices):
        for _ in range(made):
            choose(lambda: torch.zeros(1), 2)
    assert choose(lambda: torch.tensor([9]), 10).tolist() == [9]


@pytest.mark.parametrize(("options", "size"), [(2, 1), (256, 1), (257, 2), (2**15, 2), (2**15 + 1, 4)])
def test_a_choice_is_kept_in_as_few_bytes_as_hold_it(options, size):
    with remembered() as choices:
        choose(lambda: torch.tensor([options - 1]), options)
    assert choices[0].element_size() == size
    with repeated(choices):
        assert choose(lambda: torch.tensor([0]), options).tolist() == [options - 1]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        SparseFeedForward(4, 6, 3, 2, hard_share=1.0),
        SparseFeedForward(4, 6, 3, 2, hard_share=1.0, controller="reference"),
        SwitchFeedForward(4, 6, 2),
    ],
)
def test_a_layer_takes_the_units_that_were_chosen_for_another_input(layer, training):
    layer = randomized(layer, seed=5).train(training)
    x, other = vectors(2, 3, 4, seed=1), vectors(2, 3, 4, seed=2)
    torch.manual_seed(0)
    with remembered() as choices:
        y = layer(x)
    torch.manual_seed(0)
    with repeated(choices):
        assert torch.equal(layer(x), y)
    torch.manual_seed(0)
    with remembered() as own:
        chosen = layer(other)
    torch.manual_seed(0)
    with repeated(choices):
        taken = layer(other)
    assert not torch.equal(own[0], choices[0]) and not torch.equal(chosen, taken)
