"""One golden file: reading it, and comparing with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_ABSOLUTE, _RELATIVE = 1e-5, 1e-5  # of values: |a - b| <= 1e-5 + 1e-5 |b|
_GRADIENTS = 2e-5  # of gradients, absolute


class GoldenFile:
    """Arguments and tensors of a file; it remembers which of the tensors were looked at.

    Floating-point tensors are handed out as float64, and our layers run in it: then rounding takes nothing of the
    tolerance but what the file's own float32 took.
    Errors: ValueError if the format is not that of tests/golden/README.md or a number is not finite; safetensors' own
    for a file that cannot be read.
    """

    def __init__(self, path: Path):
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            self.tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118, it is no dict
        if "args" not in metadata:
            raise ValueError("the metadata lack `args`")
        self.args = json.loads(metadata["args"])
        if not isinstance(self.args, dict) or not isinstance(self.args.get("case"), str):
            raise ValueError("args: must be a JSON object that names its `case`")
        for key, tensor in self.tensors.items():
            if tensor.dtype not in (torch.float32, torch.int32):
                raise ValueError(f"{key} is {tensor.dtype}: must be float32 or int32")
            if not tensor.isfinite().all():
                raise ValueError(f"{key} holds NaN or infinity")
        self._used: set[str] = set()

    @property
    def case(self) -> str:
        return self.args["case"]

    def arg(self, name: str) -> Any:
        if name not in self.args:
            raise ValueError(f"args lack {name}")
        return self.args[name]

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise ValueError(f"missing key {key}")
        self._used.add(key)
        tensor = self.tensors[key]
        return tensor.double() if tensor.is_floating_point() else tensor

    def require_all_used(self) -> None:
        extra = sorted(set(self.tensors) - self._used)
        if extra:
            raise ValueError(f"extra keys {', '.join(extra)}")


class Comparison:
    """Our values against a file's; errors are measured in units of what the format tolerates, so 1 is the limit."""

    def __init__(self, file: GoldenFile):
        self.file = file
        self.count = self.wrong = 0
        self.worst, self.where = -1.0, "nothing"
        self.wrong_in: list[str] = []

    def value(self, key: str, ours: Tensor, face: str = "", rows: Tensor | None = None) -> None:
        """Compare with the value stored as ``key``; ``face`` says where ours comes from. Integers must be equal.

        ``rows``: bool in the shape of all axes but the last, the vectors that are compared (None: all).
        """
        stored = self.file[key]
        self._compare(key, ours, _ABSOLUTE + _RELATIVE * stored.abs(), face, rows)

    def gradient(self, key: str, ours: Tensor) -> None:
        self._compare(key, ours, torch.tensor(_GRADIENTS, dtype=torch.float64), "", None)

    def _compare(self, key: str, ours: Tensor, tolerance: Tensor, face: str, rows: Tensor | None) -> None:
        stored, ours = self.file[key], ours.detach()
        if stored.shape != ours.shape:
            raise ValueError(f"{key} has shape {tuple(stored.shape)}, ours {tuple(ours.shape)}")
        if stored.is_floating_point() != ours.is_floating_point():
            raise ValueError(f"{key} is {stored.dtype}, ours {ours.dtype}")
        error = (ours.double() - stored.double()).abs()
        if stored.is_floating_point():
            error = (error / tolerance).nan_to_num(nan=math.inf)
        else:
            error = torch.where(error > 0, math.inf, 0.0)
        if rows is not None:
            error = error.masked_fill(~rows[..., None], 0)
        self.count += error.numel() if rows is None else int(rows.sum()) * error.shape[-1]
        self._record(f"{key} by {face}" if face else key, error, ours, stored)

    def _record(self, name: str, error: Tensor, ours: Tensor, stored: Tensor) -> None:
        wrong = int((error > 1).sum())
        self.wrong += wrong
        if wrong:
            self.wrong_in.append(name)
        if error.numel() and float(error.max()) > self.worst:
            place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            self.worst = float(error.max())
            values = f" ({ours[place].item():.7g}, expected {stored[place].item():.7g})" if wrong else ""
            self.where = f"{name}{list(place)}{values}"

    def __str__(self) -> str:
        differ = f"{self.wrong} differ in {', '.join(self.wrong_in)}; " if self.wrong else ""
        return f"{self.count} values, {differ}largest error {self.worst:.3g} x tolerance at {self.where}"
