"""A trained model, or random weights of any size, as the engine wants them: flat, neuron-major, fp32, bf16 or int8."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..checks import require, require_choice, require_size
from ..config import ModelConfig
from ..layers.positions import sinusoids
from .kernels import fill
from .layout import TAPS, TRANSPOSED, Layout, Matrix
from .memory import allocate, require_memory

if TYPE_CHECKING:
    from ..models import Terraformer, Transformer

DTYPES: dict[str, np.dtype] = {"fp32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}
FORMAT = 1  # raised whenever a packed file of before could be misread
CHUNK = 1 << 24  # random weights made at a time by one thread


@dataclass(frozen=True)
class Packed:
    """The weights of a model: ``w`` (matrices, in the packed dtype; bf16 as uint16) and ``p`` (the rest, fp32)."""

    layout: Layout
    w: np.ndarray
    p: np.ndarray

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        return self.w.nbytes + self.p.nbytes

    def save(self, path: Path) -> None:
        """Write a safetensors file that :meth:`load` reads; the whole file or nothing."""
        from safetensors.numpy import save_file

        from ..files import replacing

        about = {"config": asdict(self.config), "dtype": self.dtype, "encoder": self.layout.encoder}
        metadata = {"format": str(FORMAT), "sparselib": __version__, "about": json.dumps(about)}
        metadata["checksum"] = _checksum(metadata["about"], self.w, self.p)
        with replacing(path) as temporary:
            save_file({"w": self.w, "p": self.p}, temporary, metadata)

    @classmethod
    def load(cls, path: Path) -> Packed:
        """Read a packed file. Errors: ValueError for one of another format, truncated or altered; MemoryError, with
        the numbers, for one that does not fit."""
        from safetensors import SafetensorError, safe_open

        require(path.is_file(), "packed file", str(path), "a file")
        require_memory(path.stat().st_size, f"loading {path.name}")
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                require("about" in metadata, "packed file", path.name, "written by Packed.save")
                written = metadata.get("format")
                require(written == str(FORMAT), "packed file's format", written, f"{FORMAT}: pack the model again")
                w, p = file.get_tensor("w"), file.get_tensor("p")
        except SafetensorError as error:
            raise ValueError(f"packed file = {path.name!r}: must be whole, this one is damaged ({error})") from None
        intact = metadata.get("checksum") == _checksum(metadata["about"], w, p)
        require(intact, "packed file", path.name, "as it was written, its checksum differs")
        about = json.loads(metadata["about"])
        return cls(Layout(ModelConfig(**about["config"]), about["dtype"], about["encoder"]), w, p)


def pack(model: Transformer | Terraformer, dtype: str = "fp32") -> Packed:
    """A model's weights in ``dtype``: fp32, bf16 (rounded to the nearest) or int8 (one scale a row, absmax / 127).

    Errors: ValueError for an unknown dtype, an encoder-only model, a Terraformer without ``two_swaps`` or weights that
    are not finite; MemoryError, with the numbers, if the copy does not fit.
    """
    packed = _empty(model.config, dtype, encoder=True)
    weights = model.state_dict()
    with torch.no_grad():
        for matrix in packed.layout.matrices.values():
            rows = _rows(matrix, weights[matrix.name].float().cpu())
            require(bool(rows.isfinite().all()), matrix.name, "NaN or infinite", "finite")
            _put(packed, matrix, rows)
        for vector in packed.layout.named():
            packed.p[vector.offset : vector.offset + vector.size] = weights[vector.name].float().flatten().cpu().numpy()
    return packed


def pack_random(
    config: ModelConfig,
    dtype: str = "fp32",
    seed: int = 0,
    *,
    encoder: bool = True,
    progress: Callable[[int], Any] = lambda entries: None,
) -> Packed:
    """Random weights, made in ``dtype`` at once: uniform, with the deviations of an untrained model's.

    ``encoder`` False leaves the encoder out. ``progress`` is told how many weights are done.
    """
    require_size("seed", seed, 0)
    packed = _empty(config, dtype, encoder)
    layout = packed.layout
    chunks: list[tuple[int, int, np.float32]] = []
    for matrix in layout.matrices.values():
        bound = np.float32(matrix.deviation * np.sqrt(3))
        if dtype == "int8":
            packed.p[matrix.scale : matrix.scale + matrix.rows] = bound / np.float32(127)
            bound = np.float32(127.99)
        end = matrix.offset + matrix.size
        chunks += [(first, min(CHUNK, end - first), bound) for first in range(matrix.offset, end, CHUNK)]
    with ThreadPoolExecutor() as pool:  # the kernel runs without the GIL
        for size in pool.map(lambda chunk: _fill(packed.w, chunk, seed), chunks):
            progress(size)
    for vector in layout.named():
        values = sinusoids(config.max_len, config.d_model).numpy() if vector.initial is None else vector.initial
        if vector.deviation:
            draws = np.random.default_rng((seed, vector.offset))
            values = draws.normal(values, vector.deviation, vector.size)
        packed.p[vector.offset : vector.offset + vector.size] = np.ravel(values)
    return packed


def _fill(w: np.ndarray, chunk: tuple[int, int, np.float32], seed: int) -> int:
    first, size, bound = chunk
    fill(w, first, size, bound, np.uint64((seed + 1) * 0x5851F42D4C957F2D % 2**64))
    return size


def _empty(config: ModelConfig, dtype: str, encoder: bool) -> Packed:
    require_choice("dtype", dtype, tuple(DTYPES))
    require(config.has_decoder, "architecture", config.architecture, "one with a decoder")
    require(config.two_swaps, "two_swaps", config.two_swaps, "True: the engine's streams swap after every half")
    if config.lsh is not None:
        few = config.lsh.padding_bucket < 2**31
        require(few, "lsh.n_buckets", config.lsh.n_buckets, "fewer than 2^31 in all: a bucket is kept in 32 bits")
    layout = Layout(config, dtype, encoder)
    bytes = layout.w_size * DTYPES[dtype].itemsize + 4 * layout.p_size
    require_memory(bytes, f"packing {layout.w_size / 1e9:.2f} billion weights as {dtype}")
    return Packed(layout, allocate(layout.w_size, DTYPES[dtype]), allocate(layout.p_size, np.float32))


def _rows(matrix: Matrix, weight: Tensor) -> Tensor:
    """The model's tensor as (rows, columns)."""
    if matrix.source == TRANSPOSED:
        return weight.T
    if matrix.source == TAPS:  # (O, M, F, k) -> (O, F k M)
        return weight.permute(0, 2, 3, 1).flatten(1)
    return weight


def _put(packed: Packed, matrix: Matrix, rows: Tensor) -> None:
    """Quantize and store (rows, columns) as (rows / side, columns, side)."""
    if packed.dtype == "int8":
        scale = rows.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        packed.p[matrix.scale : matrix.scale + matrix.rows] = scale.numpy()
        rows = (rows / scale[:, None]).round().to(torch.int8)
    elif packed.dtype == "bf16":
        rows = rows.to(torch.bfloat16).view(torch.int16)
    blocks = -(-matrix.rows // matrix.side)
    filled = torch.zeros(blocks * matrix.side, matrix.columns, dtype=rows.dtype)
    filled[: matrix.rows] = rows
    stored = filled.view(blocks, matrix.side, matrix.columns).transpose(1, 2).flatten()
    packed.w[matrix.offset : matrix.offset + matrix.size] = stored.numpy().view(packed.w.dtype)


def _checksum(about: str, *arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for array in arrays:
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()
