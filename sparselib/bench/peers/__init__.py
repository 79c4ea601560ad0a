"""The same decoding by other libraries: ms a token of dense models of equal size, each peer in a process of its own.

Peers are not needed to import this: `pip install 'sparselib[peers]'`. A peer that is missing, breaks or takes too long
becomes a :class:`NotRun`. Timed as :func:`~sparselib.bench.protocol.time_call` times: single tokens at batch 1, a
source of 16 tokens where there is an encoder, weights random (never zeros) and distinct in every layer. The speed of
memory drifts, so that the bandwidth can be looked at before and after each peer, and its time held against that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
from pandas import DataFrame
from tqdm import tqdm

from ...checks import require, require_choice, require_size
from ...config import ModelConfig, count_parameters, preset
from ..protocol import Timing
from .base import Job

if TYPE_CHECKING:
    from ..roofline import Reader  # brings in the compiler, which a peer's process has no use for

ENCODER_LAYERS = 2  # at most, as in the paper's protocol: a decoded token touches none of them
COPIES = 3  # of the fp32 weights that a peer may hold while it converts them
ONE_SHARE = 0.25  # of the budget at most for one peer, so that one that hangs leaves time for the others


@dataclass(frozen=True)
class Peer:
    """A library: the function of this package that makes its decoder, and the dtypes it is timed in."""

    module: str
    function: str
    dtypes: tuple[str, ...]


CATALOGUE = {
    "PyTorch eager": Peer("pytorch", "eager", ("fp32",)),
    "transformers": Peer("t5", "huggingface", ("fp32",)),
    "CTranslate2": Peer("t5", "ctranslate2", ("fp32", "int8")),
    "llama.cpp": Peer("llama", "llama", ("F16", "Q8_0", "Q4_0")),
    "torch.compile": Peer("pytorch", "compiled", ("fp32",)),  # last, as it takes longest
}
PEERS = [(name, dtype) for name, peer in CATALOGUE.items() for dtype in peer.dtypes]


@dataclass(frozen=True)
class PeerTiming:
    """One row: ``timing`` holds ms a token, n, and the bytes of the weights that a token touches."""

    peer: str
    version: str
    dtype: str
    threads: int
    shape: str
    timing: Timing

    def beside(self, read_gb_s: float) -> PeerTiming:
        """The same with the limit that memory sets: the time it takes to read the bytes at ``read_gb_s``."""
        bytes = self.timing.bytes
        limit_ms = None if bytes is None else bytes / read_gb_s / 1e6
        return replace(self, timing=replace(self.timing, limit_ms=limit_ms))

    @property
    def read_gb_s(self) -> float | None:
        """The bandwidth that the limit stands for; None where there is no limit."""
        bytes, limit_ms = self.timing.bytes, self.timing.limit_ms
        return None if bytes is None or limit_ms is None else bytes / limit_ms / 1e6


@dataclass(frozen=True)
class NotRun:
    """A peer without a timing, and why."""

    peer: str
    dtype: str
    threads: int
    reason: str


def run_peer(
    name: str,
    dtype: str,
    threads: int,
    config: ModelConfig | None = None,
    *,
    tokens: int = 16,
    context: int = 0,
    warmup: int = 4,
    timeout: float = 120,
    files: Path | None = None,
) -> PeerTiming | NotRun:
    """Time one of ``PEERS`` in a child process on ``threads`` threads; ``config`` defaults to the dense paper_800m.

    ``context`` tokens are in the cache before ``warmup`` steps that are not counted and ``tokens`` that are. The child
    is ended after ``timeout`` seconds. Converted weights go to ``files`` (default: a temporary folder) and are used
    again if they are there: give each config a folder of its own. Errors: ValueError for an unknown peer or dtype, bad
    counts, more threads than the machine has, more positions than max_len, a config that is not dense.
    """
    require_choice("name", name, tuple(CATALOGUE))
    require_choice("dtype", dtype, CATALOGUE[name].dtypes)
    require_size("threads", threads)
    most = psutil.cpu_count() or 1
    require(threads <= most, "threads", threads, f"at most the {most} of this machine")
    require_size("tokens", tokens)
    require_size("context", context, 0)
    require_size("warmup", warmup, 0)
    require(timeout > 0, "timeout", timeout, "above 0 seconds")
    config = _small_encoder(preset("paper_800m") if config is None else config)
    with ExitStack() as stack:
        folder = files or Path(stack.enter_context(TemporaryDirectory(prefix="peers-")))
        folder.mkdir(parents=True, exist_ok=True)
        job = Job(name, dtype, threads, config, tokens, context, warmup, str(folder))
        require(job.positions <= config.max_len, "positions", job.positions, f"at most max_len = {config.max_len}")
        return _run(job, timeout)


def run_peers(
    config: ModelConfig | None = None,
    threads: Sequence[int] = (1, 2),
    *,
    peers: Sequence[tuple[str, str]] = PEERS,
    tokens: int = 16,
    context: int = 0,
    warmup: int = 4,
    budget: float = 240,
    readers: Mapping[int, Reader] | None = None,
    progress: bool = True,
) -> list[PeerTiming | NotRun]:
    """Every one of ``peers`` on every number of ``threads``, converted weights shared.

    Those left after ``budget`` seconds are not run, and one may take ``ONE_SHARE`` of it. The converted weights of the
    paper_800m take 2.5 GB of the temporary folder. ``readers``, one for each number of threads, look at the bandwidth
    before and after each peer: timings then have a limit. ``progress`` shows a bar. Errors: as :func:`run_peer`, and
    ValueError for a number of threads without reader.
    """
    if readers is not None:
        for n in threads:
            require(n in readers, "threads", n, f"one of the readers' {sorted(readers)}")
    end = time.monotonic() + budget
    results: list[PeerTiming | NotRun] = []
    with TemporaryDirectory(prefix="peers-") as folder:
        bar = tqdm([(*peer, n) for peer in peers for n in threads], desc="peers", disable=not progress)
        for name, dtype, n in bar:
            bar.set_postfix_str(f"{name} {dtype}, {n} threads")
            left = end - time.monotonic()
            if left <= 0:
                results.append(NotRun(name, dtype, n, f"the budget of {budget:g} s was used up"))
                continue
            counts, timeout = dict(tokens=tokens, context=context, warmup=warmup), min(left, ONE_SHARE * budget)
            before = readers[n].now() if readers else 0.0
            result = run_peer(name, dtype, n, config, **counts, timeout=timeout, files=Path(folder))
            if readers and isinstance(result, PeerTiming):
                result = result.beside((before + readers[n].now()) / 2)
            results.append(result)
    return results


def peers_frame(results: Sequence[PeerTiming | NotRun]) -> DataFrame:
    """One row for each result; ``not run`` holds the reason where there is no timing."""
    return DataFrame([_row(result) for result in results], dtype=object)


def _row(result: PeerTiming | NotRun) -> dict[str, object]:
    ran = result if isinstance(result, PeerTiming) else None
    timing = ran and ran.timing
    return {
        "peer": result.peer,
        "version": ran and ran.version,
        "dtype": result.dtype,
        "threads": result.threads,
        "shape": ran and ran.shape,
        "MB a token": timing and timing.bytes and timing.bytes / 1e6,
        "ms a token": timing and timing.ms_median,
        "ms q1": timing and timing.ms_q1,
        "ms q3": timing and timing.ms_q3,
        "n": timing and timing.n,
        "GB/s": timing and timing.gb_s,
        "read GB/s": ran and ran.read_gb_s,
        "% of limit": timing and timing.limit_fraction and 100 * timing.limit_fraction,
        "not run": None if isinstance(result, PeerTiming) else result.reason,
    }


def _small_encoder(config: ModelConfig) -> ModelConfig:
    """The config with at most ``ENCODER_LAYERS``; refuses what the peers do not have."""
    dense = {"feedforward": "dense", "attention": "dense", "cross_attention": "dense", "loss_sparsity": 1}
    for field, value in dense.items():
        require(getattr(config, field) == value, field, getattr(config, field), f"{value!r}: peers are dense")
    require(config.is_encoder_decoder, "architecture", config.architecture, "'encoder_decoder', as T5 is")
    return replace(config, n_encoder_layers=min(config.n_encoder_layers, ENCODER_LAYERS))


def _run(job: Job, timeout: float) -> PeerTiming | NotRun:
    def not_run(reason: str) -> NotRun:
        return NotRun(job.peer, job.dtype, job.threads, reason)

    need, free = COPIES * 4 * count_parameters(job.config), psutil.virtual_memory().available
    if need > free:
        return not_run(f"may need {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")
    code, out, err = _child(job, timeout)
    if code is None:
        return not_run(f"took longer than the {timeout:.3g} s it was given")
    lines = out.strip().splitlines()
    if code != 0 or not lines:
        last = err.strip().splitlines()[-1:] or ["no message"]
        return not_run(f"its process ended with code {code}: {last[0]}")
    fields = json.loads(lines[-1])
    if "reason" in fields:
        return not_run(fields["reason"])
    timing = Timing(**fields.pop("timing"))
    return PeerTiming(peer=job.peer, dtype=job.dtype, threads=job.threads, timing=timing, **fields)


def _child(job: Job, timeout: float) -> tuple[int | None, str, str]:
    """Exit code (None: out of time), stdout and stderr of the process that runs the job."""
    settings = {
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(job.files) / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", __name__, "--one", job.to_json()]
    streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, env=os.environ | settings, text=True, **streams) as process:  # type: ignore[call-overload]
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:  # compilers too
                child.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, "", ""
    return process.returncode, out, err
