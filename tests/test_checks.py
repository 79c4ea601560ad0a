import math

import pytest
import torch

from sparselib.checks import (
    check_mask,
    check_sequence,
    check_token_vector,
    check_tokens,
    require,
    require_choice,
    require_multiple,
    require_size,
)


def test_a_refusal_names_field_value_and_what_is_allowed():
    require(True, "field", 3, "anything")
    with pytest.raises(ValueError, match=r"^d_ff = 'x': must be even$"):
        require(False, "d_ff", "x", "even")


def test_sizes_are_whole_numbers_from_a_minimum_on():
    require_size("n", 1)
    require_size("n", 0, minimum=0)
    for bad in (0, -1, 1.0, "1", None, True, math.nan):
        with pytest.raises(ValueError, match=r"^n = .*: must be an int of at least 1$"):
            require_size("n", bad)


def test_choices_and_multiples():
    require_choice("kind", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^kind = 'c': must be one of 'a', 'b'$"):
        require_choice("kind", "c", ("a", "b"))
    require_multiple("d", 8, 4, "n_heads")
    with pytest.raises(ValueError, match=r"^d = 9: must be a multiple of n_heads = 4$"):
        require_multiple("d", 9, 4, "n_heads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_good_vectors_pass(dtype):
    check_sequence(torch.zeros(2, 3, 4, dtype=dtype), 4)
    check_sequence(torch.zeros(0, 3, 4, dtype=dtype), 4)
    check_token_vector(torch.zeros(2, 4, dtype=dtype), 4)
    check_token_vector(torch.zeros(0, 4, dtype=dtype), 4)
    check_sequence(torch.full((1, 1, 4), math.inf, dtype=dtype), 4)


NAN = torch.tensor([[[0.0, math.nan]]])
BAD_SEQUENCES = [
    (torch.zeros(3, 4), r"^h.shape = \(3, 4\): must be \(batch, length, 4\)$"),
    (torch.zeros(2, 0, 4), r"^h.shape = \(2, 0, 4\): must be a sequence of at least one position$"),
    (torch.zeros(2, 3, 5), r"^h.shape = \(2, 3, 5\): must be a last axis of d_model = 4$"),
    (torch.zeros(2, 3, 4, dtype=torch.int64), r"^h.dtype = torch.int64: must be a floating-point type$"),
    (torch.zeros(2, 3, 4).half(), r"^h.dtype = torch.float16: must be float32, float64 or bfloat16 on a CPU$"),
    (NAN.expand(2, 3, 2).repeat(1, 1, 2), r"^h = 'NaN': must be free of NaN$"),
]


@pytest.mark.parametrize(("x", "message"), BAD_SEQUENCES)
def test_bad_sequences_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        check_sequence(x, 4, "h")


def test_bad_token_vectors_are_refused():
    with pytest.raises(ValueError, match=r"^x_t.shape = \(2, 3, 4\): must be \(batch, 4\)$"):
        check_token_vector(torch.zeros(2, 3, 4), 4)
    with pytest.raises(ValueError, match=r"^x_t.shape = \(2, 5\): must be a last axis of d_model = 4$"):
        check_token_vector(torch.zeros(2, 5), 4)
    with pytest.raises(ValueError, match=r"^x_t = 'NaN': must be free of NaN$"):
        check_token_vector(NAN[0], 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_good_tokens_pass(dtype):
    check_tokens(torch.tensor([[0, 9]], dtype=dtype), 10, 2)
    check_tokens(torch.tensor([0, 9], dtype=dtype), 10, 1)
    check_tokens(torch.zeros(0, 3, dtype=dtype), 10, 2)
    check_tokens(torch.zeros(0, dtype=dtype), 10, 1)


BAD_TOKENS = [
    (torch.tensor([0, 1]), 2, r"^ids.shape = \(2,\): must be \(batch, length\)$"),
    (torch.tensor([[0, 1]]), 1, r"^ids.shape = \(1, 2\): must be \(batch,\)$"),
    (torch.zeros(2, 0, dtype=torch.int64), 2, r"^ids.shape = \(2, 0\): must be a sequence of at least one token$"),
    (torch.tensor([[0, 10]]), 2, r"^ids = 10: must be ids in 0 .. vocab_size - 1 = 9$"),
    (torch.tensor([[0, -1]]), 2, r"^ids = -1: must be ids in 0 .. vocab_size - 1 = 9$"),
    (torch.tensor([[12, -3]]), 2, r"^ids = -3: must be ids in 0 .. vocab_size - 1 = 9$"),
]
NOT_TOKENS = [torch.float32, torch.bool, torch.uint8, torch.int8, torch.int16, torch.complex64]


@pytest.mark.parametrize(("tokens", "ndim", "message"), BAD_TOKENS)
def test_bad_tokens_are_refused(tokens, ndim, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(tokens, 10, ndim, "ids")


@pytest.mark.parametrize("dtype", NOT_TOKENS)
def test_tokens_of_another_type_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"^tokens.dtype = {dtype}: must be int32 or int64$"):
        check_tokens(torch.zeros(1, 2).to(dtype), 10, 2)


def test_good_masks_come_back_as_bool():
    expected = torch.tensor([[True, False], [True, True]])
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float32):
        real = check_mask(expected.to(dtype), 2, 2)
        assert real.dtype == torch.bool and torch.equal(real, expected)
    assert check_mask(torch.ones(0, 3), 0, 3).shape == (0, 3)


BAD_MASKS = [
    (torch.ones(2, 4), r"^mask.shape = \(2, 4\): must be \(2, 3\)$"),
    (torch.ones(6), r"^mask.shape = \(6,\): must be \(2, 3\)$"),
    (torch.tensor([[1, 0, 0], [0, 0, 0]]), r"^mask = 'all false in row \[1\]': must be true somewhere in every row$"),
    (torch.tensor([[1, 0, 2], [1, 1, 1]]), r"^mask = .*: must be made of bool or 0 and 1$"),
    (torch.tensor([[1, 0, -1], [1, 1, 1]]), r"^mask = .*: must be made of bool or 0 and 1$"),
    (torch.full((2, 3), math.nan), r"^mask = .*: must be made of bool or 0 and 1$"),
    (torch.full((2, 3), -math.inf), r"^mask = .*: must be made of bool or 0 and 1$"),
]


@pytest.mark.parametrize(("mask", "message"), BAD_MASKS)
def test_bad_masks_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        check_mask(mask, 2, 3)
