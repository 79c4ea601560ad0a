"""Refusals: every bad input ends in a ValueError that names the field, its value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class NaNInput(ValueError):
    """Vectors that hold a NaN came to a layer: bad input, or a training that has diverged."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``ValueError("<field> = <value>: must be <allowed>")`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{field} = {value!r}: must be {allowed}")


def require_size(field: str, value: object, minimum: int = 1) -> None:
    """``value`` must be an int (no bool) of at least ``minimum``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and value >= minimum, field, value, f"an int of at least {minimum}")  # type: ignore[operator]


def require_number(field: str, value: object) -> None:
    """``value`` must be an int or a float."""
    require(isinstance(value, int | float) and not isinstance(value, bool), field, value, "a number")


def require_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """``value`` must be one of ``choices``."""
    require(value in choices, field, value, "one of " + ", ".join(map(repr, choices)))


def require_multiple(field: str, value: int, divisor: int, meaning: str) -> None:
    """``value`` must be a multiple of ``divisor``, which ``meaning`` names."""
    require(value % divisor == 0, field, value, f"a multiple of {meaning} = {divisor}")


def check_sequence(x: Tensor, width: int, name: str = "x") -> None:
    """Vectors entering a layer: (B, L, width) with L >= 1, floating, not float16 on a CPU, no NaN."""
    require(x.ndim == 3, f"{name}.shape", tuple(x.shape), f"(batch, length, {width})")
    require(x.shape[1] > 0, f"{name}.shape", tuple(x.shape), "a sequence of at least one position")
    _check_vectors(x, width, name)


def check_token_vector(x: Tensor, width: int, name: str = "x_t") -> None:
    """Vectors of one position entering ``step``: (B, width), else as :func:`check_sequence`."""
    require(x.ndim == 2, f"{name}.shape", tuple(x.shape), f"(batch, {width})")
    _check_vectors(x, width, name)


def _check_vectors(x: Tensor, width: int, name: str) -> None:
    require(x.shape[-1] == width, f"{name}.shape", tuple(x.shape), f"a last axis of d_model = {width}")
    require(x.is_floating_point(), f"{name}.dtype", x.dtype, "a floating-point type")
    if x.device.type == "cpu":  # on an accelerator reading a value back would stall it
        require(
            str(x.dtype).removeprefix("torch.") != "float16",
            f"{name}.dtype",
            x.dtype,
            "float32, float64 or bfloat16 on a CPU",
        )
        if x.isnan().any():
            raise NaNInput(f"{name} = 'NaN': must be free of NaN")


def check_tokens(tokens: Tensor, vocab_size: int, ndim: int, name: str = "tokens") -> None:
    """Token ids: integers of (B,) or (B, T) with T >= 1, each in 0 .. vocab_size - 1."""
    shape = "(batch,)" if ndim == 1 else "(batch, length)"
    require(tokens.ndim == ndim, f"{name}.shape", tuple(tokens.shape), shape)
    require(
        str(tokens.dtype) in ("torch.int32", "torch.int64"),
        f"{name}.dtype",
        tokens.dtype,
        "int32 or int64",
    )
    require(
        ndim == 1 or tokens.shape[1] > 0,
        f"{name}.shape",
        tuple(tokens.shape),
        "a sequence of at least one token",
    )
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = int(tokens.min()), int(tokens.max())
        worst = low if low < 0 else high
        require(low >= 0 and high < vocab_size, name, worst, f"ids in 0 .. vocab_size - 1 = {vocab_size - 1}")


def check_batch(x: Tensor, batch: int, name: str = "x") -> None:
    """Inputs that continue a state must be of its batch."""
    require(len(x) == batch, f"{name}.shape", tuple(x.shape), f"of the state's batch {batch}")


def check_prefix(prefix_length: Tensor, batch: int) -> None:
    """Prefix lengths: one whole number for each row, (B,)."""
    require(prefix_length.shape == (batch,), "prefix_length.shape", tuple(prefix_length.shape), f"{(batch,)}")
    require(not prefix_length.is_floating_point(), "prefix_length.dtype", prefix_length.dtype, "a whole number")


def check_mask(mask: Tensor, batch: int, length: int, name: str = "mask") -> Tensor:
    """Padding mask (B, L), bool or 0/1 with 1 = real, no row without a real position; returns it as bool."""
    require(tuple(mask.shape) == (batch, length), f"{name}.shape", tuple(mask.shape), f"{(batch, length)}")
    real = mask.bool()
    require(bool(((mask == 0) | (mask == 1)).all()), name, "another number", "made of bool or 0 and 1")
    empty = (~real.any(dim=1)).nonzero().flatten().tolist()
    require(not empty, name, f"all false in row {empty[:1]}", "true somewhere in every row")
    return real
